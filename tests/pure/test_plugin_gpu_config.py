"""The settings of GPUs: all problems are reported at once, each with the key as written."""

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from muster.service import settings
from muster_plugin.config import gpus
from muster_plugin.config import settings as config_settings

GPU = "GPU-4cf8db2d-06c0-7d70-1a51-e59b25b2c16c"


def read(**gpus: Any) -> gpus.Gpus:
    parsed = settings.validate(config_settings.Settings, {"gpus": gpus}).gpus
    assert parsed is not None
    return parsed


def problems(**gpus: Any) -> list[str]:
    with pytest.raises(settings.BadSettings) as refused:
        read(**gpus)
    return refused.value.problems


EVERYTHING = {
    "migStrategy": "mixed",
    "exclude": [3, "0:1", GPU, "*T4*"],
    "resources": [
        {"name": "a.example/big", "product": "*H100*"},
        {"name": "a.example/small", "mig": "1g.*"},
    ],
    "sharing": {
        "renameByDefault": True,
        "onePerRequest": True,
        "resources": [
            {"name": "a.example/big", "perGb": True, "rename": "a.example/gb", "devices": [0, "1"]},
            {"name": "a.example/big", "replicas": 2, "devices": 4},
            {"name": "a.example/big", "replicas": 3},
        ],
    },
    "given": {
        "deviceList": ["volume-mounts", "cdi-cri"],
        "deviceIds": "index",
        "deviceSpecs": True,
        "driverRoot": "/run/nvidia/driver",
        "devRoot": "/",
        "cdiAnnotationPrefix": "x.example/",
        "cdiHook": "/usr/bin/hook",
        "gdrcopy": True,
        "gds": True,
        "mofed": True,
        "imex": {"channels": [0], "required": True},
    },
    "placement": "exclusive",
    "health": {
        "preset": "catalogue",
        "policy": "/etc/policy.json",
        "disable": "79",
        "enable": "all",
        "poll_s": 5.0,
        "good": 2,
        "cooldown_s": 120.0,
    },
    "expect": {"min": 8},
    "grace_s": 30.0,
    "registration": "auto",
    "library": "/usr/lib64/libnvidia-ml.so.1",
}


def test_every_key_is_written_as_the_rest_of_the_schema_and_returns() -> None:
    assert msgspec.json.decode(msgspec.json.encode(read(**EVERYTHING))) == EVERYTHING


def test_what_is_not_reported_is_not_printed() -> None:
    assert msgspec.to_builtins(read()) == {}


PROBLEMS: list[tuple[dict[str, Any], list[str]]] = [
    (
        {"migStrategie": "none", "sharing": {"rename_by_default": True}},
        [
            "gpus.migStrategie: unknown key (value 'none'); did you mean migStrategy?",
            (
                "gpus.sharing.rename_by_default: unknown key (value true); did you mean "
                "renameByDefault?"
            ),
        ],
    ),
    (
        {"resources": [{"name": "gpu"}, {"name": "a.example/_", "mig": "mig-1g.5gb"}]},
        [
            "gpus.resources[0].name: 'gpu' has no domain; write it as nvidia.com/gpu",
            "gpus.resources[0]: set either product (for GPUs) or mig (a profile)",
            (
                "gpus.resources[1].name: '_' must have 1 to 63 of A-Z a-z 0-9 - _ . and begin and "
                "end with a letter or digit"
            ),
            (
                "gpus.resources[1].mig: 'mig-1g.5gb' is not a profile; write it as 1g.10gb or "
                "1g.10gb+me, with * as a wildcard"
            ),
        ],
    ),
    (
        {
            "migStrategy": "mixed",
            "resources": [
                {"name": "a.example/x", "product": "*A100*"},
                {"name": "a.example/y", "product": "NVIDIA A100-SXM4-40GB"},
                {"name": "a.example/z", "mig": "1g.5gb"},
                {"name": "a.example/z", "mig": "1g.5gb"},
            ],
        },
        [
            (
                "gpus.resources[1]: resources[0] matches everything that 'NVIDIA A100-SXM4-40GB' "
                "matches; put the narrower pattern first"
            ),
            (
                "gpus.resources[3]: resources[2] matches everything that '1g.5gb' matches; "
                "put the narrower pattern first"
            ),
        ],
    ),
    (
        {"resources": [{"name": "a.example/z", "mig": "1g.5gb"}], "exclude": [0, "0", "0.5"]},
        [
            "gpus.exclude[1]: '0' is already named by [0]",
            (
                "gpus.exclude[2]: '0.5' does not name a device; "
                'write 0, "0:1", GPU-<uuid>, MIG-<uuid> or MIG-GPU-<uuid>/<gi>/<ci>, or the name '
                "of a product with * as a wildcard"
            ),
            "gpus.resources[0].mig: with migStrategy none only whole GPUs are advertised",
        ],
    ),
    (
        {"sharing": {"resources": [{"name": "nvidia.com/gpu"}, {"name": "x", "replicas": 1}]}},
        [
            "gpus.sharing.resources[0]: set either replicas or perGb: true",
            "gpus.sharing.resources[1].replicas: expected a whole number of at least 2, found 1",
        ],
    ),
    (
        {
            "sharing": {
                "resources": [
                    {"name": "nvidia.com/gpu", "replicas": 2, "devices": [0, "1:0", GPU]},
                    {"name": "nvidia.com/gpu", "replicas": 3, "devices": ["0:2", 2, GPU.lower()]},
                    {"name": "nvidia.com/gpu", "replicas": 4},
                    {"name": "nvidia.com/gpu", "perGb": True, "devices": 1},
                    {"name": "nvidia.com/gpu", "replicas": 4, "devices": []},
                ]
            }
        },
        [
            (
                "gpus.sharing.resources[4].devices: the list is empty; leave the key out to share "
                "all devices"
            ),
        ],
    ),
    (
        {
            "sharing": {
                "resources": [
                    {"name": "nvidia.com/gpu", "replicas": 2, "devices": [0, "1:0", GPU]},
                    {"name": "nvidia.com/gpu", "replicas": 3, "devices": ["0:2", 2, GPU.upper()]},
                    {"name": "nvidia.com/gpu", "replicas": 4},
                    {"name": "nvidia.com/gpu", "perGb": True, "devices": 1},
                ]
            }
        },
        [
            "gpus.sharing.resources[3]: resources[2] already shares all nvidia.com/gpu",
            "gpus.sharing.resources[1].devices: '0:2' is already shared by resources[0]",
            (
                f"gpus.sharing.resources[1].devices: '{GPU.upper()}' "
                "is already shared by resources[0]"
            ),
        ],
    ),
    (
        {
            "sharing": {
                "renameByDefault": True,
                "resources": [{"name": "nvidia.com/" + "x" * 60, "replicas": 2}],
            }
        },
        [
            (
                f"gpus.sharing.resources[0].name: '{'x' * 60}.shared' must have 1 to 63 of A-Z a-z "
                "0-9 - "
                "_ . and begin and end with a letter or digit"
            ),
        ],
    ),
    (
        {
            "given": {
                "deviceList": ["envvar", "envvar"],
                "driverRoot": "run",
                "imex": {"channels": [1]},
            },
            "health": {"policy": "a/b"},
            "library": "../lib",
        },
        [
            "gpus.given.imex.channels: [1] is neither [] nor [0]",
            "gpus.health.policy: 'a/b' is not an absolute path",
        ],
    ),
    (
        {"given": {"deviceList": ["envvar", "envvar"], "devRoot": "/a/../b"}},
        [
            "gpus.given.deviceList: envvar is listed twice",
            "gpus.given.devRoot: '/a/../b' is not the shortest form of this path",
        ],
    ),
    (
        {"given": {"deviceList": []}},
        ["gpus.given.deviceList: expected a list of at least 1 item, found 0"],
    ),
    ({"library": "x.so"}, ["gpus.library: 'x.so' is not an absolute path"]),
]


@pytest.mark.parametrize(("gpus", "expected"), PROBLEMS)
def test_every_problem_is_reported_with_its_key(gpus: dict[str, Any], expected: list[str]) -> None:
    parsed = problems(**gpus)
    assert [line[: len(want)] for line, want in zip(parsed, expected, strict=True)] == expected


SHARED = gpus.Shared(name="nvidia.com/gpu", replicas=2)
NAMES: list[tuple[dict[str, Any], tuple[str, ...], tuple[str, ...]]] = [
    ({}, ("nvidia.com/gpu",), ()),
    ({"resources": [{"name": "a.b/c", "product": "*"}]}, ("a.b/c",), ()),
    ({"resources": [{"name": "a.b/c", "product": "*T4"}]}, ("a.b/c",), ("nvidia.com/gpu",)),
    (
        {"migStrategy": "mixed", "resources": [{"name": "a.b/c", "mig": "*"}]},
        ("nvidia.com/gpu", "a.b/c"),
        (),
    ),
    (
        {"migStrategy": "single", "resources": [{"name": "a.b/c", "product": "*"}]},
        ("a.b/c",),
        ("nvidia.com/gpu",),
    ),
    (
        {
            "sharing": {
                "renameByDefault": True,
                "resources": [{"name": "nvidia.com/gpu", "replicas": 2}],
            }
        },
        ("nvidia.com/gpu.shared",),
        (),
    ),
    (
        {
            "sharing": {
                "resources": [
                    {"name": "nvidia.com/gpu", "perGb": True, "rename": "a.b/gb", "devices": 1},
                    {"name": "nvidia.com/mig-1g.5gb", "replicas": 2, "rename": "a.b/small"},
                ]
            }
        },
        ("nvidia.com/gpu", "a.b/gb"),
        ("a.b/small",),
    ),
]


@pytest.mark.parametrize(("gpus", "lasting", "more"), NAMES)
def test_the_names_that_last_are_reported_from_those_that_may_come(
    gpus: dict[str, Any], lasting: tuple[str, ...], more: tuple[str, ...]
) -> None:
    parsed = read(**gpus)
    assert (parsed.always_advertised(), parsed.names()) == (lasting, lasting + more)


TREES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-3, 3000)
    | st.floats()
    | st.sampled_from(["0", "0:1", GPU, "*", "nvidia.com/gpu", "a.b/c", "none", "1g.5gb", "/", ""])
    | st.text(max_size=4),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                [
                    *("migStrategy", "exclude", "resources", "sharing", "given", "health", "name"),
                    *("product", "mig", "replicas", "perGb", "rename", "devices", "imex", "expect"),
                    *("renameByDefault", "deviceList", "channels", "poll_s", "library", "min"),
                ]
            ),
            inner,
            max_size=4,
        )
    ),
    max_leaves=15,
)


@given(tree=TREES)
def test_any_tree_is_a_configuration_or_is_refused(tree: object) -> None:
    try:
        parsed = settings.validate(config_settings.Settings, {"gpus": tree})
    except settings.BadSettings as error:
        assert all("\n" not in problem for problem in error.problems)  # noqa: PT017  # or valid
        return
    again = msgspec.to_builtins(parsed.gpus)
    assert parsed.gpus is None or msgspec.convert(again, gpus.Gpus, strict=True) == parsed.gpus
