"""The import of NVIDIA's and its iktos fork's configuration: results, refusals, differences.

Cases restated as data. Origins: NVIDIA/k8s-device-plugin v0.20 api/config/v1/replicas_test.go
(TestUnmarshalReplicaDevices, TestUnmarshalReplicaResource, TestUnmarshalTimeSlicing except its
older field `strategy`), flags_test.go, imex_test.go, config_test.go; its README's flags;
iktos/k8s-gpu-sharing-plugin 9394ddf0 cmd/nvidia-device-plugin/main.go and README.
"""

import re
from pathlib import Path
from typing import Any, Final

import msgspec
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from muster.service import settings
from muster_plugin.config import files
from muster_plugin.config import gpus as config_gpus
from muster_plugin.config import settings as config_settings
from muster_plugin.config.importers import base, nvidia, nvidia_settings

Format = config_settings.Format
GPU: Final = "GPU-4cf8db2d-06c0-7d70-1a51-e59b25b2c16c"
MIG: Final = "MIG-4cf8db2d-06c0-7d70-1a51-e59b25b2c16c"
PAGE: Final = Path(__file__).parents[2] / "docs" / "compatibility.md"


def imported(text: str) -> base.ImportedConfiguration:
    return files.import_peer(text.encode(), source="FILE", peer=Format.NVIDIA)


def gpus(result: base.ImportedConfiguration) -> Any:
    """Return the section `gpus` as in a file; assert that its printed form gives the same."""
    printed = msgspec.yaml.encode(result.rules)
    again = files.read(printed, source="F", written_for=Format.MUSTER)
    assert again == config_settings.Settings(gpus=result.rules.gpus)
    assert result.rules.gpus is not None
    return msgspec.json.decode(msgspec.json.encode(result.rules.gpus))


def differences(result: base.ImportedConfiguration) -> list[str]:
    """Return the differences that are specific to this configuration."""
    general = nvidia.read({}).differences
    return [
        expected_lines for expected_lines in result.differences if expected_lines not in general
    ]


def problems(text: str) -> list[str]:
    with pytest.raises(settings.BadSettings) as refused:
        imported(text)
    return [line.removeprefix("FILE: ") for line in refused.value.problems]


DEVICES: list[tuple[str, Any]] = [
    ('"not-all"', None),
    ("-2", None),
    ("2.0", None),
    ("[-1]", None),
    ('["-1"]', None),
    ('["invalid-UUID"]', None),
    ('["GPU-UUID"]', None),
    ('["MIG-UUID"]', None),
    (f'["MIG-{GPU}"]', None),
    ('"all"', {}),
    ("2", {"devices": 2}),
    ("[0]", {"devices": [0]}),
    ('["0"]', {"devices": ["0"]}),
    ('["0:0"]', {"devices": ["0:0"]}),
    (f'["{GPU}"]', {"devices": [GPU]}),
    (f'["{MIG}"]', {"devices": [MIG]}),
    (f'["MIG-{GPU}/0/0"]', {"devices": [f"MIG-{GPU}/0/0"]}),
    # differs on purpose: 0 names the GPU with its MIG devices, so 0:0 is named twice
    (f'[0, "0:0", "{GPU}"]', None),
    (f'["0", "0:0", "{GPU}"]', None),
    (f'[1, "0:0", "{GPU}"]', {"devices": [1, "0:0", GPU]}),
    # further cases
    ("0", None),
    ("true", None),
    ("[]", None),
    ("[true]", None),
    ("[[0]]", None),
]


@pytest.mark.parametrize(("devices", "expected"), DEVICES)
def test_shared_devices_are_read_as_nvidia_reads_them(devices: str, expected: Any) -> None:
    text = (
        f"sharing: {{timeSlicing: {{resources: [{{name: a, replicas: 2, devices: {devices}}}]}}}}"
    )
    path = "sharing.timeSlicing.resources[0].devices"
    if expected is None:
        (problem,) = problems(text)
        assert problem.startswith(path) or "is already named by [0]" in problem
        return
    result = imported(text)
    shared = {"name": "nvidia.com/a", "replicas": 2, **expected}
    assert gpus(result) == {"sharing": {"resources": [shared]}}
    drops = f"{path}: NVIDIA drops it with a warning; with muster it works"
    assert differences(result) == ([drops] if expected else [])


RESOURCES: list[tuple[str, Any]] = [
    ("{}", None),
    ("{name: valid}", None),
    ("{name: valid, devices: all}", None),
    ("{name: valid, devices: all, rename: valid-shared}", None),
    ("{name: valid, devices: all, replicas: 2}", {"replicas": 2}),
    (
        "{name: valid, devices: all, replicas: 2, rename: valid}",
        {"replicas": 2, "rename": "nvidia.com/valid"},
    ),
    ("{name: valid, replicas: -1}", None),
    ("{name: valid, replicas: 0}", None),
    ("{name: valid, replicas: 2}", {"replicas": 2}),
    (
        "{name: valid, replicas: 2, rename: valid-shared}",
        {"replicas": 2, "rename": "nvidia.com/valid-shared"},
    ),
    ("{name: $invalid$, replicas: 2, rename: valid-shared}", None),
    ("{name: valid, replicas: 2, rename: $invalid$}", None),
    # the rules of NewResourceName, api/config/v1/resources.go
    ("{name: nvidia.com/valid, replicas: 2}", {"replicas": 2}),
    (f"{{name: {'x' * 53}, replicas: 2}}", None),
    ("{name: Upper, replicas: 2}", None),
    ("{name: under_score, replicas: 2}", None),
    # further cases
    ("{name: valid, replicas: 1001}", None),
    ("7", None),
]


@pytest.mark.parametrize(("resource", "expected"), RESOURCES)
def test_a_shared_resource_is_read_as_nvidia_reads_it(resource: str, expected: Any) -> None:
    text = f"sharing: {{timeSlicing: {{resources: [{resource}]}}}}"
    if expected is None:
        assert all(p.startswith("sharing.timeSlicing.resources[0]") for p in problems(text))
        return
    shared = {"name": "nvidia.com/valid", **expected}
    assert gpus(imported(text)) == {"sharing": {"resources": [shared]}}


SHARING: list[tuple[str, Any]] = [
    ("{timeSlicing: {}}", None),
    ("{timeSlicing: {resources: []}}", None),
    (
        "{timeSlicing: {resources: [{name: valid, replicas: 2}]}}",
        {"resources": [{"name": "nvidia.com/valid", "replicas": 2}]},
    ),
    (
        "{timeSlicing: {resources: [{name: valid1, replicas: 2}, {name: valid2, replicas: 2}]}}",
        {
            "resources": [
                {"name": "nvidia.com/valid1", "replicas": 2},
                {"name": "nvidia.com/valid2", "replicas": 2},
            ]
        },
    ),
    ("{timeSlicing: {resources: [{name: $invalid$, replicas: 2}]}}", None),
    # config_test.go: an entry's own rename and devices are kept
    (
        (
            "{timeSlicing: {renameByDefault: true, failRequestsGreaterThanOne: true, resources: ["
            "{name: gpu, rename: gpu-light, devices: ['0'], replicas: 2}, "
            "{name: gpu, rename: gpu-heavy, devices: ['1'], replicas: 4}]}}"
        ),
        {
            "renameByDefault": True,
            "onePerRequest": True,
            "resources": [
                {
                    "name": "nvidia.com/gpu",
                    "rename": "nvidia.com/gpu-light",
                    "devices": ["0"],
                    "replicas": 2,
                },
                {
                    "name": "nvidia.com/gpu",
                    "rename": "nvidia.com/gpu-heavy",
                    "devices": ["1"],
                    "replicas": 4,
                },
            ],
        },
    ),
]


@pytest.mark.parametrize(("sharing", "expected"), SHARING)
def test_time_slicing_is_read_as_nvidia_reads_it(sharing: str, expected: Any) -> None:
    if expected is None:
        assert all(p.startswith("sharing.timeSlicing.") for p in problems(f"sharing: {sharing}"))
        return
    assert gpus(imported(f"sharing: {sharing}")) == {"sharing": expected}


@pytest.mark.parametrize(
    "mps",
    [
        "{}",
        "{resources: [{name: nvidia.com/gpu, replicas: 2}]}",
        "{failRequestsGreaterThanOne: false, resources: [{name: nvidia.com/gpu, replicas: 2}]}",
    ],
)
def test_mps_is_refused_with_what_to_do(mps: str) -> None:
    assert problems(f"sharing: {{mps: {mps}}}") == [
        (
            "sharing.mps: MPS is not supported: muster shares GPUs by time-slicing only. Write it "
            "as timeSlicing, or keep NVIDIA's plugin on the nodes that need MPS"
        )
    ]
    assert gpus(imported("sharing: {mps: null}")) == {}


LABELER: Final = "the labeler sets the labels and does not need this setting"
FLAGS: list[tuple[str, Any, list[str]]] = [
    ("{}", {}, []),
    ("{gfd: {}}", {}, []),
    ("{gfd: {sleepInterval: 0}}", {}, [f"flags.gfd.sleepInterval: 0: {LABELER}"]),
    ("{gfd: {sleepInterval: 0s}}", {}, [f"flags.gfd.sleepInterval: '0s': {LABELER}"]),
    ("{gfd: {sleepInterval: 5}}", {}, [f"flags.gfd.sleepInterval: 5: {LABELER}"]),
    ("{gfd: {sleepInterval: 5s}}", {}, [f"flags.gfd.sleepInterval: '5s': {LABELER}"]),
    ("{plugin: {deviceListStrategy: envvar}}", {}, []),
    (
        "{plugin: {deviceListStrategy: [envvar, cdi-annotations]}}",
        {"given": {"deviceList": ["envvar", "cdi-annotations"]}},
        [],
    ),
    # from its README
    (
        "{plugin: {deviceListStrategy: 'envvar,cdi-cri'}}",
        {"given": {"deviceList": ["envvar", "cdi-cri"]}},
        [],
    ),
    ("{plugin: null, gfd: null, migStrategy: null}", {}, []),
    ("{deviceDiscoveryStrategy: auto, plugin: {containerDriverRoot: /driver-root}}", {}, []),
    (
        "{plugin: {sharedDevicesAllocationPolicy: packed}}",
        {"placement": "packed"},
        [
            (
                "flags.plugin.sharedDevicesAllocationPolicy: unshared GPUs are packed too; "
                "with NVIDIA they remain aligned"
            )
        ],
    ),
    ("{plugin: {sharedDevicesAllocationPolicy: distributed}}", {}, []),
    (
        "{failOnInitError: true}",
        {},
        [
            (
                "flags.failOnInitError: true: without a driver, muster reports "
                "this and advertises 0 GPUs until it is loaded"
            )
        ],
    ),
    (
        "{deviceIDStrategy: index, migStrategi: single}",
        {"given": {"deviceIds": "index"}},
        [
            "flags.migStrategi: NVIDIA ignores this key; did you mean migStrategy?",
            (
                "flags.deviceIDStrategy: imported, as the iktos fork reads it; NVIDIA reads it in "
                "flags.plugin"
            ),
        ],
    ),
]


@pytest.mark.parametrize(("flags", "expected", "expected_lines"), FLAGS)
def test_flags_of_a_file_are_read_as_nvidia_reads_them(
    flags: str, expected: Any, expected_lines: list[str]
) -> None:
    result = imported(f"{{version: v1, flags: {flags}}}")
    assert (gpus(result), differences(result)) == (expected, expected_lines)


IMEX: list[tuple[str, Any]] = [
    ("{}", {}),
    ("{channelIDs: null}", {}),
    ("{channelIDs: []}", {}),
    ("{channelIDs: [0]}", {"given": {"imex": {"channels": [0]}}}),
    ("{channelIDs: [0], required: true}", {"given": {"imex": {"channels": [0], "required": True}}}),
    ("{channelIDs: [2]}", None),
]


@pytest.mark.parametrize(("imex", "expected"), IMEX)
def test_imex_is_read_as_nvidia_reads_it(imex: str, expected: Any) -> None:
    if expected is None:
        expected_lines = "gpus: channels: [2] is neither [] nor [0] - at `gpus.given.imex`"
        assert problems(f"imex: {imex}") == [expected_lines]
        return
    assert gpus(imported(f"imex: {imex}")) == expected


def test_what_nvidia_drops_with_a_warning_works_here() -> None:
    result = imported(
        """
        version: v1
        flags: {migStrategy: mixed}
        resources:
          gpus: [{pattern: "*A100*", name: a100}, {pattern: "*", name: gpu}]
          mig: [{pattern: 1g.10gb, name: small}]
        """
    )
    assert gpus(result) == {
        "migStrategy": "mixed",
        "resources": [
            {"name": "nvidia.com/a100", "product": "*A100*"},
            {"name": "nvidia.com/small", "mig": "1g.10gb"},
        ],
    }
    drops = "NVIDIA drops it with a warning; with muster it works; "
    drops += "a device that no pattern matches keeps its default name"
    whole = (
        "resources.mig[0].pattern: '1g.10gb': compared with the whole name, as in NVIDIA's "
        "v0.20; up to v0.19 it matched any part; to keep that, write a * before and after it"
    )
    assert differences(result) == [f"resources.gpus: {drops}", whole, f"resources.mig: {drops}"]


@pytest.mark.parametrize(
    ("text", "expected_lines"),
    [
        ("version: v2", "version: unknown version: 'v2'; expected v1"),
        ("flagz: 1", "none of the keys of NVIDIA's file: version, flags, resources, sharing, "),
        ("[]", "expected a mapping of keys, found []"),
        ("7", "expected a mapping of keys, found 7"),
        ("flags: 1", "flags: expected a mapping of keys, found 1"),
        ("flags: {plugin: 1}", "flags.plugin: expected a mapping of keys, found 1"),
        ("flags: {migStrategy: all}", "flags.migStrategy: unknown MIG strategy: 'all'"),
        ("flags: {gdsEnabled: 1}", "flags.gdsEnabled: expected true or false, found 1"),
        (
            "flags: {plugin: {deviceListStrategy: [envvar, x]}}",
            "flags.plugin.deviceListStrategy: invalid --device-list-strategy option: 'x'",
        ),
        (
            "flags: {plugin: {deviceIDStrategy: name}}",
            "flags.plugin.deviceIDStrategy: invalid --device-id-strategy option: 'name'",
        ),
        (
            "flags: {nvidiaDriverRoot: run/nvidia}",
            "gpus: driverRoot: 'run/nvidia' is not an absolute path - at `gpus.given`",
        ),
        ("resources: {gpus: [{name: gpu}]}", "resources.gpus[0].pattern: required but missing"),
        (
            "sharing: {timeSlicing: {resources: [{replicas: 2}]}}",
            "sharing.timeSlicing.resources[0].name: required but missing",
        ),
    ],
)
def test_what_nvidia_refuses_is_refused(text: str, expected_lines: str) -> None:
    assert [line[: len(expected_lines)] for line in problems(text)] == [expected_lines]


MAPPED = [setting for setting in nvidia_settings.TABLE if setting.ours]


def samples(setting: nvidia_settings.Setting) -> tuple[str, Any]:
    """Return a value with an effect: in the form of a flag, and in that of the file."""
    match setting.kind:
        case nvidia_settings.Kind.FLAG:
            return "true", True
        case nvidia_settings.Kind.NUMBERS:
            return "0", [0]
        case nvidia_settings.Kind.LIST:
            return "cdi-cri", "cdi-cri"
        case _:
            value = [*setting.values, "/some/path"][-1] if not setting.values else None
            last = value or [*setting.values][-1]
            return last, last


@pytest.mark.parametrize("setting", MAPPED, ids=lambda item: item.ours)
def test_flag_variable_and_key_say_the_same(setting: nvidia_settings.Setting) -> None:
    text, value = samples(setting)
    result = [nvidia.read(None, environment=[(variable, text)]) for variable in setting.variables]
    for flag in setting.flags:
        result.append(nvidia.read(None, arguments=[f"{flag}={text}"]))
        is_switch = setting.kind is nvidia_settings.Kind.FLAG
        result.append(nvidia.read(None, arguments=[flag] if is_switch else [flag, text]))
    if setting.key:
        *above, last = setting.key.split(".")
        inner: dict[str, Any] = {last: value}
        for key in reversed(above):
            inner = {key: inner}
        result.append(nvidia.read(inner))
    (only,) = {msgspec.json.encode(item.rules) for item in result}
    expected_lines = msgspec.json.decode(only)["gpus"]
    for key in setting.ours.split("."):
        expected_lines = expected_lines[key]
    assert expected_lines == (value if setting.kind is not nvidia_settings.Kind.LIST else [value])


@pytest.mark.parametrize(
    "setting",
    [item for item in nvidia_settings.TABLE if not item.ours],
    ids=lambda item: item.key or "".join(item.flags or item.variables),
)
def test_what_has_no_equivalent_is_reported(setting: nvidia_settings.Setting) -> None:
    text = "true" if setting.kind is nvidia_settings.Kind.FLAG else "x"
    for name in (*setting.flags, *setting.variables):
        flag = [f"{name}={text}"] if name in setting.flags else []
        result = nvidia.read(None, arguments=flag, environment=[] if flag else [(name, text)])
        noted = (f"{name}: {text!r}: {setting.instead}",)
        assert result.losses == (noted if setting.is_lost else ())
        assert differences(result) == ([] if setting.is_lost else [*noted])


def test_a_flag_goes_before_a_variable_and_that_before_the_file() -> None:
    file = {"flags": {"migStrategy": "none", "gdsEnabled": True}}
    result = nvidia.read(
        file,
        arguments=["plugin", "--mig-strategy", "mixed", "--gds-enabled"],
        environment=[("MIG_STRATEGY", "single"), ("DP_DISABLE_HEALTHCHECKS", "xids")],
    )
    assert gpus(result) == {
        "migStrategy": "mixed",
        "given": {"gds": True},
        "health": {"disable": "xids"},
    }
    assert differences(result) == [
        "MIG_STRATEGY: --mig-strategy takes precedence, with 'mixed'",
        "flags.migStrategy: --mig-strategy takes precedence, with 'mixed'",
    ]


@pytest.mark.parametrize(("text", "expected"), [("T", True), ("1", True), ("FALSE", None)])
def test_a_switch_is_read_as_go_reads_it(text: str, expected: Any) -> None:
    result = gpus(nvidia.read(None, arguments=[f"--mofed-enabled={text}"]))
    assert result.get("given", {}).get("mofed") == expected
    with pytest.raises(base.ImportRejected, match="--mofed-enabled: expected true or false"):
        nvidia.read(None, arguments=["--mofed-enabled=yes"])


def test_a_flag_has_one_dash_or_two_and_an_unknown_one_is_reported() -> None:
    result = nvidia.read(None, arguments=["-mig-strategy=single", "--kubeconfig", "/x", "-v=4"])
    assert gpus(result) == {"migStrategy": "single"}
    assert differences(result) == ["'--kubeconfig': not a setting of GPUs; left out"]


MANIFESTS: Final = """
apiVersion: apps/v1
kind: DaemonSet
metadata: {name: p}
spec:
  template:
    spec:
      containers:
        - name: plugin
          command: [nvidia-device-plugin, --config-file=/config/config.yaml]
          args: [--device-list-strategy=envvar, --device-list-strategy, cdi-cri]
          env:
            - {name: MIG_STRATEGY, value: mixed}
            - {name: NODE_NAME, valueFrom: {fieldRef: {fieldPath: spec.nodeName}}}
        - {name: gfd, env: [{name: MIG_STRATEGY, value: mixed}]}
---
apiVersion: v1
kind: ConfigMap
metadata: {name: c}
data:
  config.yaml: |
    version: v1
    flags: {migStrategy: mixed}
    sharing: {timeSlicing: {resources: [{name: gpu, replicas: 2}]}}
"""


ELSEWHERE = """
apiVersion: apps/v1
kind: DaemonSet
spec:
  template:
    spec:
      containers:
        - name: nvidia-device-plugin-ctr
          env:
            - {name: NODE_NAME, valueFrom: {fieldRef: {fieldPath: spec.nodeName}}}
            - {name: MIG_STRATEGY, valueFrom: {configMapKeyRef: {name: a, key: mig}}}
          envFrom: [{configMapRef: {name: a}}]
"""


def test_a_variable_whose_value_stands_elsewhere_is_not_taken_and_named() -> None:
    result = imported(ELSEWHERE)
    assert gpus(result) == {}
    assert differences(result) == []
    assert result.losses == (
        "MIG_STRATEGY: its value is not in the manifests (valueFrom)",
        "envFrom: its variables are not in the manifests",
    )


def test_a_daemonset_is_read_with_its_configmap() -> None:
    result = imported(MANIFESTS)
    assert gpus(result) == {
        "migStrategy": "mixed",
        "sharing": {"resources": [{"name": "nvidia.com/gpu", "replicas": 2}]},
        "given": {"deviceList": ["envvar", "cdi-cri"]},
    }
    spec = f"--device-list-strategy: {nvidia_settings.CDI_SPEC}"
    assert (differences(result), result.losses) == ([], (spec,))
    daemonset, configmap = MANIFESTS.split("---")
    alone = imported(daemonset)
    assert gpus(alone).keys() == {"migStrategy", "given"}
    missing = f"--config-file: '/config/config.yaml': {nvidia_settings.CONFIG_FILE.instead}"
    assert alone.losses == (spec, missing)
    assert gpus(imported(configmap)).keys() == {"migStrategy", "sharing"}


GB: Final = {"name": "nvidia.com/gpu", "perGb": True, "rename": "nvidia.com/gpu-mem-gb"}
SMALL: Final = {"name": "nvidia.com/mig-3g.20gb", "replicas": 2, "rename": "nvidia.com/small"}
FORK: list[tuple[str, Any]] = [
    ("gpu:gpu-mem-gb:-1", {"sharing": {"resources": [GB]}}),
    ("gpu:gpu-mem-gb:-1,mig-3g.20gb:small:2", {"sharing": {"resources": [GB, SMALL]}}),
    (" ,gpu:gpu-mem-gb:-1 , ,", {"sharing": {"resources": [GB]}}),
    ("gpu:gpu:4", {"sharing": {"resources": [{"name": "nvidia.com/gpu", "replicas": 4}]}}),
    ("gpu:a100:1", {"resources": [{"name": "nvidia.com/a100", "product": "*"}]}),
    ("gpu:gpu:1", {}),
    ("gpu:4", "gpu:4' is not original:new:replicas"),
    ("gpu:a:b:4", "gpu:a:b:4' is not original:new:replicas"),
    ("gpu:a:x", "gpu:a:x': replica must be an integer"),
    ("gpu:a:1.5", "gpu:a:1.5': replica must be an integer"),
    ("gpu:a:0", "nvidia.com/gpu: 0 replicas; the number must be -1, or 1 to 1000"),
    ("gpu:a:-2", "nvidia.com/gpu: -2 replicas; the number must be -1, or 1 to 1000"),
    ("gpu:a:4294967295", "gpu:a:4294967295': replica must be an integer"),
    ("gpu:a:2,gpu:b:3", "nvidia.com/gpu is named twice"),
    ("gpus:a:1", "nvidia.com/gpus: no GPU or MIG device has this name, so none can be renamed"),
    ("gpu:_:2", "name"),
]


@pytest.mark.parametrize(("text", "expected"), FORK)
def test_the_iktos_fork_shares_as_its_readme_says(text: str, expected: Any) -> None:
    if isinstance(expected, str):
        (problem,) = problems(yaml.safe_dump(text))
        assert expected in problem
        return
    for result in (
        imported(yaml.safe_dump(text)),
        nvidia.read({"version": "v1"}, arguments=[f"--resource-config={text}"]),
        nvidia.read(None, environment=[("NVIDIA_DRIVER_RESOURCE_CONFIG", text)]),
    ):
        assert gpus(result) == expected
        assert [expected_lines.partition(": ")[2] for expected_lines in differences(result)] == [
            "a resource that is not listed keeps its devices; with the fork it loses them",
            "a device id is <uuid>::<n>; the fork's is <uuid>-replica-<n>",
            (
                "a new name also applies to MIG devices in migStrategy mixed; "
                "the fork ignores it there"
            ),
        ]


def test_the_iktos_fork_renames_mig_devices_too() -> None:
    text = "mig-1g.10gb.me:me:1,mig-3g.20gb:small:2"
    result = nvidia.read({"flags": {"migStrategy": "mixed"}}, arguments=["--resource-config", text])
    assert gpus(result) == {
        "migStrategy": "mixed",
        "resources": [{"name": "nvidia.com/me", "mig": "1g.10gb+me"}],
        "sharing": {"resources": [SMALL]},
    }


def test_two_ways_of_sharing_at_once_are_refused() -> None:
    file = {"sharing": {"timeSlicing": {"resources": [{"name": "gpu", "replicas": 2}]}}}
    with pytest.raises(base.ImportRejected, match="the iktos fork's resource config sets the"):
        nvidia.read(file, arguments=["--resource-config=gpu:a:2"])


def rows() -> list[list[str]]:
    """Return the rows of the page's table, each as a list of cells."""
    text = PAGE.read_text("utf-8")
    _, _, section = text.partition("## NVIDIA's flags, variables and keys\n")
    lines = [line for line in section.partition("\n## ")[0].splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]


@pytest.mark.parametrize(
    "setting",
    nvidia_settings.EVERY,
    ids=lambda item: item.key or "".join(item.flags or item.variables),
)
def test_the_page_has_a_row_for_every_setting(setting: nvidia_settings.Setting) -> None:
    wanted = [
        ", ".join(f"`{flag}`" for flag in setting.flags) or "-",
        ", ".join(f"`{variable}`" for variable in setting.variables) or "-",
        f"`{setting.key}`" if setting.key else "-",
        f"`{setting.ours}`" if setting.ours else setting.instead,
    ]
    assert wanted in [row[:4] for row in rows()]


def test_the_page_has_no_row_too_many() -> None:
    assert len(rows()) - 2 == len(nvidia_settings.EVERY)


def fields(shape: type[msgspec.Struct], path: str = "") -> set[str]:
    """Return the path of every key of a struct, also of nested ones."""
    result: set[str] = set()
    for field in msgspec.structs.fields(shape):
        inner = field.type
        if isinstance(inner, type) and issubclass(inner, msgspec.Struct):
            result |= fields(inner, f"{path}{field.encode_name}.")
        else:
            result.add(path + field.encode_name)
    return result


def test_what_a_setting_is_here_is_a_key_of_ours() -> None:
    assert {item.ours for item in nvidia_settings.EVERY if item.ours} <= fields(config_gpus.Gpus)


KEYS: Final = st.sampled_from(
    [
        *("version", "flags", "resources", "sharing", "imex", "plugin", "gfd", "timeSlicing"),
        *("gpus", "mig", "pattern", "name", "rename", "devices", "replicas", "renameByDefault"),
        *(item.key.rpartition(".")[2] for item in nvidia_settings.TABLE if item.key),
    ]
)
LEAVES: Final = (
    st.none()
    | st.booleans()
    | st.integers(-2, 2000)
    | st.floats()
    | st.sampled_from(
        ["v1", "none", "mixed", "gpu", "nvidia.com/gpu", "*", "1g.5gb", "all", "0:1", GPU, "/a"]
    )
    | st.text(max_size=5)
)
TREES: Final = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=4),
    max_leaves=20,
)
SHARED: Final = st.lists(
    st.dictionaries(st.sampled_from(["name", "replicas", "rename", "devices"]), LEAVES | TREES),
    max_size=3,
)
SLICING: Final = {"resources": SHARED}
FILES: Final = st.fixed_dictionaries(
    {},
    optional={
        "flags": TREES | st.dictionaries(KEYS, LEAVES, max_size=4),
        "sharing": st.fixed_dictionaries(
            {"timeSlicing": st.fixed_dictionaries({"resources": SHARED})}
        ),
        "resources": st.fixed_dictionaries({"gpus": st.lists(TREES, max_size=2)}),
        "imex": TREES,
    },
)
SHORT: Final = st.text(":,-01gpua/", max_size=8)
NAMES: Final = [name for item in nvidia_settings.EVERY for name in (*item.flags, *item.variables)]


def usable(result: base.ImportedConfiguration) -> None:
    """Assert that an imported configuration can be used, and stays the same when read back."""
    gpus(result)
    assert all(
        expected_lines and "\n" not in expected_lines for expected_lines in result.differences
    )


@given(file=FILES | TREES)
def test_any_tree_is_read_or_refused(file: object) -> None:
    text = yaml.safe_dump(file)
    try:
        result = imported(text)
    except settings.BadSettings as error:
        assert error.problems  # noqa: PT017  # or it is read
        return
    usable(result)


@given(
    arguments=st.lists(st.sampled_from(NAMES) | st.text(max_size=6), max_size=6),
    values=st.lists(
        st.tuples(st.sampled_from(NAMES), st.text(":,-01gpua/", max_size=8)), max_size=6
    ),
)
def test_any_flags_and_variables_are_read_or_refused(
    arguments: list[str], values: list[tuple[str, str]]
) -> None:
    flags = [f"{name}={value}" for name, value in values if name.startswith("-")]
    try:
        result = nvidia.read({}, arguments=[*arguments, *flags], environment=values)
    except base.ImportRejected as error:
        assert error.problems  # noqa: PT017  # or it is read
        return
    usable(result)


@given(text=st.text(":,-+0123456789gpumi.", max_size=24))
def test_any_text_of_the_fork_is_read_or_refused(text: str) -> None:
    try:
        result = nvidia.read({}, arguments=[f"--resource-config={text}"])
    except base.ImportRejected as error:
        assert all(re.match(r"--resource-config|gpus", p) for p in error.problems)  # noqa: PT017
        return
    usable(result)


def test_a_name_with_a_line_feed_is_named_on_one_line() -> None:
    why = "no GPU or MIG device has this name, so none can be renamed"
    assert problems('"a\\nb:c:1,x\\e[31m:y:1"') == [
        f"resource-config: nvidia.com/{name}: {why}" for name in ("a\\nb", "x\\x1b[31m")
    ]
