"""From GPUs and rules to units: NVIDIA's MIG strategies, names and sharing, and invariants.

Origins: NVIDIA/k8s-device-plugin v0.20 internal/rm/device_map.go (strategies, sharing and its
errors) and device_map_test.go; iktos/k8s-gpu-sharing-plugin 9394ddf0 README.
"""

from collections.abc import Sequence
from random import Random
from typing import Any

import msgspec
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from muster import vocabulary
from muster_plugin.config import gpus as config_gpus
from muster_plugin.config import resources
from muster_plugin.discovery import resource_plan
from muster_plugin.gpu import replicas
from muster_plugin.model import advertised, gpu

USUAL = "nvidia.com/gpu"


def uuid(number: int, kind: str = "GPU") -> str:
    return f"{kind}-{number:08x}-0000-0000-0000-000000000000"


def card(
    index: int, *profiles: str, mig: bool | None = None, product: str = "NVIDIA A100-SXM4-40GB"
) -> vocabulary.Gpu:
    """Return a GPU with one MIG device for each profile."""
    return vocabulary.Gpu(
        uuid=uuid(index),
        product=product,
        memory_mib=40_960,
        index=index,
        minor=index + 1,
        numa_node=index // 2,
        mig_enabled=bool(profiles) if mig is None else mig,
        mig=tuple(
            vocabulary.MigDevice(
                uuid=uuid(16 * index + at, "MIG"), profile=profile, gi=at + 3, ci=0, memory_mib=4864
            )
            for at, profile in enumerate(profiles)
        ),
    )


def gpu_rules(**gpus: Any) -> config_gpus.Gpus:
    return msgspec.convert(gpus, config_gpus.Gpus, strict=True)


def sharing(*resources: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"sharing": {"resources": [*resources], **more}}


def scan(*gpus: vocabulary.Gpu, **more: Any) -> gpu.Scan:
    return gpu.Scan(gpus=gpus, **more)


def names(plan: resource_plan.Plan) -> dict[str, list[str]]:
    """Return the ids of each resource in short: `1` is a GPU, `1:0` a MIG device, `1::0` shared."""
    return {
        offer.name: [
            (unit.gpu.index if unit.gpu else "") + unit.id.removeprefix(unit.physical)
            for unit in offer.units
        ]
        for offer in plan.resources
    }


ONE_G, THREE_G = ("1g.5gb",) * 2, ("3g.20gb",)
STRATEGIES: list[tuple[str, list[vocabulary.Gpu], str, dict[str, list[str]], list[str]]] = [
    ("none: whole GPUs", [card(0), card(1)], "none", {USUAL: ["0", "1"]}, []),
    ("none: in MIG mode too", [card(0, *ONE_G), card(1)], "none", {USUAL: ["0", "1"]}, []),
    ("none: in MIG mode and empty", [card(0, mig=True)], "none", {USUAL: ["0"]}, []),
    ("single: no MIG at all", [card(0), card(1)], "single", {USUAL: ["0", "1"]}, []),
    (
        "single: all alike",
        [card(0, *ONE_G), card(1, *ONE_G)],
        "single",
        {USUAL: ["0:0", "0:1", "1:0", "1:1"]},
        [],
    ),
    (
        "single: one GPU is empty",
        [card(0, *ONE_G), card(1, mig=True)],
        "single",
        {USUAL: ["0:0", "0:1"]},
        ["GPU 1 (U) is left out: MIG is enabled, but it has no MIG device"],
    ),
    (
        "single: one GPU is not in MIG mode",
        [card(0, *ONE_G), card(1)],
        "single",
        {USUAL: ["0:0", "0:1"]},
        ["GPU 1 (U): is not in MIG mode, but most are divided into 1g.5gb; migStrategy single"],
    ),
    (
        "single: most GPUs are not in MIG mode",
        [card(0, *ONE_G), card(1), card(2)],
        "single",
        {USUAL: ["1", "2"]},
        ["GPU 0 (U): is divided into 1g.5gb, but most are not in MIG mode; migStrategy single"],
    ),
    (
        "single: GPUs of different profiles",
        [card(0, *THREE_G), card(1, *ONE_G), card(2, *ONE_G)],
        "single",
        {USUAL: ["1:0", "1:1", "2:0", "2:1"]},
        ["GPU 0 (U): is divided into 3g.20gb, but most are divided into 1g.5gb; migStrategy"],
    ),
    (
        "single: different profiles on one GPU",
        [card(0, *ONE_G, *THREE_G), card(1, *ONE_G)],
        "single",
        {USUAL: ["1:0", "1:1"]},
        ["GPU 0 (U): has MIG devices of profiles 1g.5gb, 3g.20gb; migStrategy single needs one"],
    ),
    (
        "mixed: each profile by its name",
        [card(0, "1g.5gb", "3g.20gb", "1g.10gb+me"), card(1), card(2, "1g.5gb")],
        "mixed",
        {
            USUAL: ["1"],
            "nvidia.com/mig-1g.5gb": ["0:0", "2:0"],
            "nvidia.com/mig-3g.20gb": ["0:1"],
            "nvidia.com/mig-1g.10gb.me": ["0:2"],
        },
        [],
    ),
    (
        "mixed: -me is part of the name",
        [card(0, "1g.24gb-me", "1g.24gb+me.all", "1g.24gb+gfx")],
        "mixed",
        {
            USUAL: [],
            "nvidia.com/mig-1g.24gb-me": ["0:0"],
            "nvidia.com/mig-1g.24gb.me.all": ["0:1"],
            "nvidia.com/mig-1g.24gb.gfx": ["0:2"],
        },
        [],
    ),
    (
        "mixed: one GPU is empty",
        [card(0, mig=True), card(1, "1g.5gb")],
        "mixed",
        {USUAL: [], "nvidia.com/mig-1g.5gb": ["1:0"]},
        ["GPU 0 (U) is left out: MIG is enabled, but it has no MIG device"],
    ),
    (
        "mixed: a part of a GPU instance has no name of NVIDIA's",
        [card(0, "1c.3g.20gb", "3g.20gb")],
        "mixed",
        {USUAL: [], "nvidia.com/mig-3g.20gb": ["0:1"]},
        ["MIG device 0:0 (U): 1c.3g.20gb is part of a GPU instance, for which NVIDIA has "],
    ),
    (
        "mixed: an unreadable profile",
        [card(0, "unknown", "1g.5gb")],
        "mixed",
        {USUAL: [], "nvidia.com/mig-1g.5gb": ["0:1"]},
        ["MIG device 0:0 (U) has no resource name, because its profile 'unknown' is unknown"],
    ),
]


def short(problem: str) -> str:
    head, bracket, rest = problem.partition("(")
    return f"{head}(U){rest.partition(')')[2]}" if bracket and "-0000-" in rest else problem


@pytest.mark.parametrize(
    ("gpus", "strategy", "expected", "problems"),
    [case[1:] for case in STRATEGIES],
    ids=[case[0] for case in STRATEGIES],
)
def test_a_mig_strategy_costs_no_more_than_what_does_not_fit(
    gpus: list[vocabulary.Gpu],
    strategy: str,
    expected: dict[str, list[str]],
    problems: list[str],
) -> None:
    plan = replicas.plan(scan(*gpus), gpu_rules(migStrategy=strategy))
    assert names(plan) == expected
    candidates = [short(problem) for problem in plan.problems]
    assert [p[: len(want)] for p, want in zip(candidates, problems, strict=True)] == problems


def test_a_unit_says_what_answers_and_health_need() -> None:
    plan = replicas.plan(
        scan(card(3, "3g.20gb")),
        gpu_rules(
            migStrategy="mixed",
            grace_s=5.0,
            registration="watcher",
            **sharing({"name": "nvidia.com/mig-3g.20gb", "replicas": 2}),
        ),
    )
    whole, mig = plan.resources
    assert whole == resource_plan.PlannedResource(
        name=USUAL,
        rule=resources.Resource(
            name=USUAL, groups=(), env="", grace_s=5.0, registration=resources.Registration.WATCHER
        ),
    )
    device = gpu.Device(
        part=gpu.Part(gpu=uuid(3), gi=3, ci=0), uuid=uuid(48, "MIG"), index="3:0", minor=4
    )
    assert mig == resource_plan.PlannedResource(
        name="nvidia.com/mig-3g.20gb",
        rule=msgspec.structs.replace(whole.rule, name="nvidia.com/*", per_match=True),
        units=tuple(
            advertised.Unit(
                id=f"{device.uuid}::{n}",
                physical=device.uuid,
                identity={0: device.uuid},
                numa=1,
                gpu=device,
            )
            for n in range(2)
        ),
    )


def test_a_mig_device_is_called_by_nvmls_number_where_some_are_missing() -> None:
    item = card(0, "1g.5gb", "1g.5gb")
    holes = tuple(msgspec.structs.replace(mig, index=4 + at) for at, mig in enumerate(item.mig))
    plan = replicas.plan(
        scan(msgspec.structs.replace(item, mig=holes)),
        gpu_rules(migStrategy="single", exclude=["0:4"]),
    )
    assert names(plan) == {USUAL: ["0:5"]}


A100, T4 = "NVIDIA A100-SXM4-40GB", "Tesla T4"
MIXED = [card(0), card(1, product=T4), card(2, "1g.5gb", "2g.10gb")]
NAMINGS: list[tuple[list[dict[str, str]], dict[str, list[str]]]] = [
    (
        [{"name": "a.b/big", "product": "*A100*"}],
        {"a.b/big": ["0"], USUAL: ["1"], "nvidia.com/mig-1g.5gb": ["2:0"]},
    ),
    (
        [{"name": "a.b/t4", "product": T4}, {"name": "a.b/rest", "product": "*"}],
        {"a.b/t4": ["1"], "a.b/rest": ["0"], "nvidia.com/mig-1g.5gb": ["2:0"]},
    ),
    (
        [{"name": "a.b/all", "product": "*"}, {"name": "a.b/all", "mig": "1g.*"}],
        {"a.b/all": ["0", "1", "2:0"]},
    ),
    ([{"name": "a.b/x", "product": "A100"}], {"a.b/x": [], USUAL: ["0", "1"]}),
]


@pytest.mark.parametrize(("resources", "expected"), NAMINGS)
def test_the_first_pattern_that_matches_names_a_device(
    resources: list[dict[str, str]], expected: dict[str, list[str]]
) -> None:
    plan = replicas.plan(scan(*MIXED), gpu_rules(migStrategy="mixed", resources=resources))
    candidates = names(plan)
    assert candidates.pop("nvidia.com/mig-2g.10gb") == ["2:1"]
    assert {name: candidates.get(name) for name in expected} == expected
    assert plan.problems == ()


def test_a_part_of_a_gpu_instance_can_be_given_a_name() -> None:
    naming = [{"name": "a.b/half", "mig": "1c.*"}]
    plan = replicas.plan(
        scan(card(0, "1c.3g.20gb")), gpu_rules(migStrategy="mixed", resources=naming)
    )
    assert (names(plan), plan.problems) == ({USUAL: [], "a.b/half": ["0:0"]}, ())


EXCLUDED: list[tuple[list[int | str], dict[str, list[str]], tuple[str, ...]]] = [
    ([0], {USUAL: ["1"]}, ()),
    (["1"], {USUAL: ["0"]}, ()),
    ([uuid(0), "Tesla T4"], {USUAL: []}, ()),
    (["*"], {USUAL: []}, ()),
    (["2:0"], {USUAL: ["0", "1"]}, ()),
    ([2], {USUAL: ["0", "1"]}, ()),
    ([uuid(33, "MIG"), f"MIG-{uuid(2)}/3/0"], {USUAL: ["0", "1"]}, ()),
    (
        [9, "*H100*", 0],
        {USUAL: ["1"]},
        (
            "exclude[0]: no GPU on this node matches 9",
            "exclude[1]: no GPU on this node matches *H100*",
        ),
    ),
]


@pytest.mark.parametrize(("exclude", "expected", "problems"), EXCLUDED)
def test_what_is_excluded_is_as_if_it_were_not_there(
    exclude: list[int | str], expected: dict[str, list[str]], problems: tuple[str, ...]
) -> None:
    rule = gpu_rules(migStrategy="mixed", exclude=exclude)
    plan = replicas.plan(scan(*MIXED), rule)
    candidates = names(plan)
    left = {name: ids for name, ids in candidates.items() if "mig" not in name}
    assert (left, plan.problems) == (expected, problems)
    gpus = replicas.node(scan(*MIXED), rule).gpus
    there = {item.uuid for item in gpus}.union(mig.uuid for item in gpus for mig in item.mig)
    assert {unit.physical for offer in plan.resources for unit in offer.units} <= there


FOUR = [card(n) for n in range(4)]
SHARINGS: list[tuple[str, dict[str, Any], dict[str, list[str]], list[str]]] = [
    (
        "all, same name",
        sharing({"name": USUAL, "replicas": 2}),
        {USUAL: ["0::0", "0::1", "1::0", "1::1", "2::0", "2::1", "3::0", "3::1"]},
        [],
    ),
    (
        "renamed by default",
        sharing({"name": USUAL, "replicas": 2, "devices": [1]}, renameByDefault=True),
        {USUAL: ["0", "2", "3"], "nvidia.com/gpu.shared": ["1::0", "1::1"]},
        [],
    ),
    (
        "a rename goes before renameByDefault",
        sharing(
            {"name": USUAL, "replicas": 2, "rename": "nvidia.com/x", "devices": 1},
            renameByDefault=True,
        ),
        {USUAL: ["1", "2", "3"], "nvidia.com/x": ["0::0", "0::1"]},
        [],
    ),
    (
        "some, and those that are not chosen keep their name",
        sharing({"name": USUAL, "replicas": 2, "devices": 2}),
        {USUAL: ["0::0", "0::1", "1::0", "1::1", "2", "3"]},
        [],
    ),
    (
        "by index and uuid",
        sharing({"name": USUAL, "replicas": 2, "rename": "a.b/s", "devices": ["3", uuid(1)]}),
        {USUAL: ["0", "2"], "a.b/s": ["1::0", "1::1", "3::0", "3::1"]},
        [],
    ),
    (
        "each differently, and the rest too",
        sharing(
            {"name": USUAL, "replicas": 2, "devices": [0]},
            {"name": USUAL, "replicas": 3, "rename": "a.b/light", "devices": 1},
            {"name": USUAL, "replicas": 2, "rename": "a.b/heavy"},
        ),
        {
            USUAL: ["0::0", "0::1"],
            "a.b/light": ["1::0", "1::1", "1::2"],
            "a.b/heavy": ["2::0", "2::1", "3::0", "3::1"],
        },
        [],
    ),
    (
        "more than there are",
        sharing({"name": USUAL, "replicas": 2, "devices": 5}),
        {USUAL: [f"{n}::{i}" for n in range(4) for i in range(2)]},
        ["sharing.resources[0].devices: 5 of nvidia.com/gpu should be shared, but only 4 can be"],
    ),
    (
        "what is not there",
        sharing({"name": USUAL, "replicas": 2, "devices": [7, "0:0", uuid(9), 3]}),
        {USUAL: ["0", "1", "2", "3::0", "3::1"]},
        [
            "sharing.resources[0].devices[0]: 7 is not a device of nvidia.com/gpu",
            "sharing.resources[0].devices[1]: 0:0 is not a device of nvidia.com/gpu",
            f"sharing.resources[0].devices[2]: {uuid(9)} is not a device of nvidia.com/gpu",
        ],
    ),
    (
        "the same twice, as only the node shows",
        sharing(
            {"name": USUAL, "replicas": 2, "devices": [0, uuid(0)]},
            {"name": USUAL, "replicas": 3, "devices": [uuid(1)]},
            {"name": USUAL, "replicas": 2, "devices": [1]},
        ),
        {USUAL: ["0::0", "0::1", "1::0", "1::1", "1::2", "2", "3"]},
        [
            f"sharing.resources[0].devices[1]: {uuid(0)} is already named by [0]",
            f"sharing.resources[2].devices[0]: {uuid(1)} is already shared by an earlier entry",
        ],
    ),
    (
        "a resource that is not here",
        sharing({"name": "nvidia.com/mig-1g.5gb", "replicas": 2, "rename": "a.b/s"}),
        {USUAL: ["0", "1", "2", "3"]},
        ["sharing.resources[0]: there is no nvidia.com/mig-1g.5gb on this node"],
    ),
]


@pytest.mark.parametrize(
    ("rule", "expected", "problems"),
    [case[1:] for case in SHARINGS],
    ids=[case[0] for case in SHARINGS],
)
def test_a_resource_is_shared_as_reported(
    rule: dict[str, Any], expected: dict[str, list[str]], problems: list[str]
) -> None:
    plan = replicas.plan(scan(*FOUR), gpu_rules(**rule))
    assert (names(plan), list(plan.problems)) == (expected, problems)


def test_a_gb_is_a_thousand_mib_as_the_iktos_fork_counts() -> None:
    small = msgspec.structs.replace(card(1), memory_mib=999)
    silent = msgspec.structs.replace(card(2), memory_mib=None)
    huge = msgspec.structs.replace(card(3), memory_mib=1_000_500)
    rule = gpu_rules(
        migStrategy="mixed",
        **sharing(
            {"name": USUAL, "perGb": True, "rename": "nvidia.com/gb"},
            {"name": "nvidia.com/mig-1g.5gb", "perGb": True},
        ),
    )
    plan = replicas.plan(scan(card(0), small, silent, huge, card(4, "1g.5gb")), rule)
    counts: dict[str, int] = {}
    for unit in (unit for offer in plan.resources for unit in offer.units):
        counts[unit.physical] = counts.get(unit.physical, 0) + 1
    assert counts == {uuid(0): 40, uuid(1): 1, uuid(2): 1, uuid(3): 1000, uuid(64, "MIG"): 4}
    assert plan.problems == (
        f"sharing.resources[0]: the memory of {uuid(2)} is unknown and counts as 1 GB",
    )


def test_no_more_ids_than_the_kubelet_can_be_reported() -> None:
    gpus = [msgspec.structs.replace(card(n), memory_mib=3_000_000) for n in range(11)]
    plan = replicas.plan(scan(*gpus), gpu_rules(**sharing({"name": USUAL, "perGb": True})))
    assert [len(offer.units) for offer in plan.resources] == [resource_plan.DEVICES_MAX]
    assert plan.problems[0].endswith("would have 3000 replicas; 1000 are allowed")
    assert plan.problems[-1] == "nvidia.com/gpu: more than 10000 devices; the others are left out"


def test_a_snapshot_says_how_each_resource_is_advertised() -> None:
    rule = gpu_rules(
        migStrategy="mixed",
        **sharing({"name": USUAL, "replicas": 4, "rename": "a.b/s", "devices": [0]}),
    )
    gpu_scan = scan(
        *MIXED, driver_version="580.95.05", cuda_version="13.0", machine="m", simulated=True
    )
    assert replicas.node(gpu_scan, rule) == vocabulary.GpuNode(
        gpus=(
            *MIXED[:2],
            msgspec.structs.replace(
                MIXED[2],
                mig=tuple(
                    msgspec.structs.replace(mig, index=at) for at, mig in enumerate(MIXED[2].mig)
                ),
            ),
        ),
        resources=(
            vocabulary.GpuResource(name="a.b/s", was=USUAL, replicas=4),
            vocabulary.GpuResource(name=USUAL, was=USUAL),
            vocabulary.GpuResource(
                name="nvidia.com/mig-1g.5gb", was="nvidia.com/mig-1g.5gb", profile="1g.5gb"
            ),
            vocabulary.GpuResource(
                name="nvidia.com/mig-2g.10gb", was="nvidia.com/mig-2g.10gb", profile="2g.10gb"
            ),
        ),
        mig_strategy="mixed",
        driver_version="580.95.05",
        cuda_version="13.0",
        machine="m",
        simulated=True,
    )


@pytest.mark.parametrize("driver", [d for d in gpu.Driver if d is not gpu.Driver.READY])
def test_without_a_driver_the_names_stay_and_one_problem_says_why(driver: gpu.Driver) -> None:
    rule = gpu_rules(
        migStrategy="mixed",
        exclude=[3],
        resources=[{"name": "a.b/c", "product": "*T4"}],
        **sharing({"name": "a.b/c", "replicas": 2}),
    )
    gpu_scan = gpu.Scan(driver=driver, problem="load it", gpus=tuple(FOUR))
    plan = replicas.plan(gpu_scan, rule)
    entry = f"no GPU can be used ({driver}): load it"
    assert (names(plan), plan.problems) == ({"a.b/c": []}, (entry,))
    assert replicas.node(gpu_scan, rule) == vocabulary.GpuNode(mig_strategy="mixed", problem=entry)


LOST = gpu.UnreadableGpu(index=3, error="GPU_IS_LOST", uuid=uuid(3))


@pytest.mark.parametrize(
    ("gpu_scan", "expected", "problems"),
    [
        (scan(), [], ("the driver is ready, but there is no GPU",)),
        (scan(unreadable=(LOST,)), [], (f"GPU 3 ({uuid(3)}) cannot be read: GPU_IS_LOST",)),
        (
            scan(*FOUR[:3], unreadable=(LOST,), problem="odd"),
            ["0::0", "0::1", "1", "2"],
            ("odd", f"GPU 3 ({uuid(3)}) cannot be read: GPU_IS_LOST"),
        ),
        (
            scan(card(0), card(0), card(1)),
            ["0::0", "0::1", "1"],
            (
                (f"GPU 0 ({uuid(0)}): its uuid, or that of one of its MIG devices, is not unique"),
                "sharing.resources[0].devices[1]: 3 is not a device of nvidia.com/gpu",
            ),
        ),
        (
            scan(card(0), msgspec.structs.replace(card(3), uuid="x" * 59)),
            ["0::0", "0::1"],
            (
                f"GPU 3 ({'x' * 59}): {'x' * 58!r} is not a uuid of 1 to 58 characters",
                "sharing.resources[0].devices[1]: 3 is not a device of nvidia.com/gpu",
            ),
        ),
    ],
)
def test_what_is_wrong_with_a_gpu_is_reported_once_and_costs_no_other(
    gpu_scan: gpu.Scan, expected: list[str], problems: tuple[str, ...]
) -> None:
    rule = gpu_rules(**sharing({"name": USUAL, "replicas": 2, "devices": [0, 3]}))
    plan = replicas.plan(gpu_scan, rule)
    assert (names(plan), plan.problems) == ({USUAL: expected}, problems)


def test_expected_are_devices_and_not_replicas() -> None:
    rule = gpu_rules(
        migStrategy="mixed", expect={"min": 3}, **sharing({"name": USUAL, "replicas": 4})
    )
    plan = replicas.plan(scan(*MIXED), rule)
    assert {offer.name: offer.rule.expect for offer in plan.resources} == {
        USUAL: resources.Expect(min=3),
        "nvidia.com/mig-1g.5gb": None,
        "nvidia.com/mig-2g.10gb": None,
    }


def test_the_longest_id_of_a_mig_device_still_fits() -> None:
    old = f"MIG-{uuid(0)}/14/6"
    item = card(0, "1g.5gb")
    named = msgspec.structs.replace(item.mig[0], uuid=old, memory_mib=2_000_000)
    rule = gpu_rules(
        migStrategy="mixed", **sharing({"name": "nvidia.com/mig-1g.5gb", "replicas": 1000})
    )
    plan = replicas.plan(scan(msgspec.structs.replace(item, mig=(named,))), rule)
    assert max(len(unit.id) for unit in plan.resources[1].units) == len(f"{old}::999") == 54


PROFILES = st.sampled_from(["1g.5gb", "2g.10gb", "1c.3g.20gb", "1g.10gb+me", "", "x y", "unknown"])
CARDS = st.lists(
    st.builds(
        lambda number, profiles, product, more: msgspec.structs.replace(
            card(number, *profiles, product=product, mig=bool(profiles) or more[0]),
            index=None if more[1] else number,
            memory_mib=more[2],
        ),
        st.integers(0, 6),
        st.lists(PROFILES, max_size=3),
        st.sampled_from([A100, T4, "", "x" * 80]),
        st.tuples(st.booleans(), st.booleans(), st.none() | st.integers(0, 2000)),
    ),
    max_size=6,
)
REFERENCES = st.lists(
    st.sampled_from([0, "1", "2:0", uuid(3), uuid(17, "MIG"), f"MIG-{uuid(1)}/3/0"]),
    max_size=3,
    unique=True,
)
ENTRIES = st.fixed_dictionaries(
    {
        "name": st.sampled_from([USUAL, "a.b/c", "nvidia.com/mig-1g.5gb"]),
        "replicas": st.sampled_from([None, 2, 3]),
        "rename": st.sampled_from(["", "a.b/c", "a.b/d", USUAL]),
        "devices": st.none() | st.integers(1, 4) | REFERENCES,
    }
)
NAMED = st.builds(
    lambda name, pattern: {"name": name, **pattern},
    st.sampled_from(["a.b/c", "a.b/d", USUAL]),
    st.sampled_from(
        [{"product": "*"}, {"product": "*A100*"}, {"product": T4}, {"mig": "*"}, {"mig": "1g.*"}]
    ),
)
RULES = st.builds(
    lambda strategy, exclude, namings, entries, flag: {
        "migStrategy": strategy,
        "exclude": exclude,
        "resources": namings,
        "sharing": {
            "renameByDefault": flag,
            "resources": [{**item, "perGb": item["replicas"] is None} for item in entries],
        },
    },
    st.sampled_from(["none", "single", "mixed"]),
    REFERENCES,
    st.lists(NAMED, max_size=2),
    st.lists(ENTRIES, max_size=3),
    st.booleans(),
)


@given(gpus=CARDS, tree=RULES, driver=st.sampled_from([gpu.Driver.READY] * 9 + [*gpu.Driver]))
def test_whatever_is_observed_and_reported_no_device_is_advertised_twice(
    gpus: Sequence[vocabulary.Gpu], tree: dict[str, Any], driver: gpu.Driver
) -> None:
    try:
        rule = gpu_rules(**tree)
    except msgspec.ValidationError:
        assume(False)  # noqa: FBT003  # refused at load
        return
    gpu_scan = gpu.Scan(driver=driver, gpus=tuple(gpus))
    plan = replicas.plan(gpu_scan, rule)
    owners: dict[str, str] = {}
    for offer in plan.resources:
        ids = [unit.id for unit in offer.units]
        assert ids == sorted({*ids})
        assert all(0 < len(name) <= 63 for name in ids)
        assert offer.rule.per_match is (offer.name not in rule.always_advertised())
        for unit in offer.units:
            assert unit.gpu is not None
            assert unit.physical == unit.gpu.uuid
            assert owners.setdefault(unit.physical, offer.name) == offer.name
    assert {*rule.always_advertised()} <= {offer.name for offer in plan.resources}
    told_parts = {u.gpu.part for offer in plan.resources for u in offer.units if u.gpu is not None}
    assert not any(
        item != other and item.covers(other) for item in told_parts for other in told_parts
    )
    node = replicas.node(gpu_scan, rule)
    assert {resource.name for resource in node.resources} == {
        offer.name for offer in plan.resources if offer.units
    }
    if not any(offer.units for offer in plan.resources) and not tree["exclude"]:
        assert plan.problems


@settings(max_examples=50)
@given(gpus=CARDS, tree=RULES, seed=st.integers(0, 9))
def test_the_order_in_which_gpus_are_observed_decides_nothing(
    gpus: list[vocabulary.Gpu], tree: dict[str, Any], seed: int
) -> None:
    gpus = list({item.uuid: item for item in gpus}.values())
    try:
        rule = gpu_rules(**tree)
    except msgspec.ValidationError:
        assume(False)  # noqa: FBT003  # refused at load
        return
    before = replicas.plan(gpu.Scan(gpus=tuple(gpus)), rule)
    Random(seed).shuffle(gpus)  # noqa: S311  # not for secrets
    assert replicas.plan(gpu.Scan(gpus=tuple(gpus)), rule) == before
