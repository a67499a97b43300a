import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from muster_plugin.config import gpus as config_gpus
from muster_plugin.kubelet import allocation
from muster_plugin.model import advertised, gpu

ALIGNED, DISTRIBUTED, PACKED, EXCLUSIVE = config_gpus.Placement
Links = dict[tuple[str, str], gpu.Link]


def whole(number: int) -> advertised.Unit:
    return unit(f"GPU-{number:02}")


def unit(name: str, parent: str = "", gi: int | None = None) -> advertised.Unit:
    """Return a GPU or MIG device, or a replica of one: `GPU-a::0`, or `a-replica-0`."""
    physical = re.split("::|-replica-", name)[0]
    part = gpu.Part(gpu=parent or physical, gi=gi, ci=None if gi is None else 0)
    device = gpu.Device(part=part, uuid=physical, index="0", minor=0)
    return advertised.Unit(id=name, physical=physical, identity={0: physical}, gpu=device)


def existing(*names: str) -> dict[str, advertised.Unit]:
    return {name: unit(name) for name in names}


def replicas(**counts: int) -> dict[str, advertised.Unit]:
    return existing(*(f"{name}::{at}" for name, count in counts.items() for at in range(count)))


# Machines, as published documents describe them


def machine(
    sockets: list[list[list[int]]],
    nvlinks: str = "",
    between: gpu.TopologyLevel = gpu.TopologyLevel.HOST_BRIDGE,
) -> Links:
    """Return the link between each two GPUs: one switch in a list, `between` in a socket.

    `0-3x2` in `nvlinks` means two NVLinks between the GPUs 0 and 3.
    """
    place = {
        at: (socket, switch)
        for socket, switches in enumerate(sockets)
        for switch, gpus in enumerate(switches)
        for at in gpus
    }
    links = {}
    for item, other in ((a, b) for a in place for b in place if a < b):
        level = between if place[item][0] == place[other][0] else gpu.TopologyLevel.SYSTEM
        level = gpu.TopologyLevel.ONE_SWITCH if place[item] == place[other] else level
        links[whole(item).id, whole(other).id] = gpu.Link(level=level)
    for item, other, count in re.findall(r"(\d+)-(\d+)x(\d+)", nvlinks):
        key = whole(int(item)).id, whole(int(other)).id
        links[key] = gpu.Link(level=links[key].level, nvlinks=int(count))
    return links


RTX8000 = machine([[[0], [1]], [[2], [3]]], "0-3x2 1-2x2", between=gpu.TopologyLevel.NODE)
# the hybrid cube mesh of DGX-1, with four links per GPU, and with six
PASCAL = machine(
    [[[0, 2], [1, 3]], [[4, 6], [5, 7]]],
    "0-1x1 0-2x1 0-3x1 1-2x1 1-3x1 2-3x1 4-5x1 4-6x1 4-7x1 5-6x1 5-7x1 6-7x1 "
    "0-4x1 1-5x1 2-6x1 3-7x1",
)
VOLTA = machine(
    [[[0, 1], [2, 3]], [[4, 5], [6, 7]]],
    "0-1x1 0-2x1 0-3x2 1-2x2 1-3x1 2-3x2 4-5x1 4-6x1 4-7x2 5-6x2 5-7x1 6-7x2 "
    "0-4x2 1-5x2 2-6x1 3-7x1",
)
# all GPUs are behind NVSwitch, so the PCI bus decides
DGX2 = machine(
    [[[0, 1], [2, 3], [4, 5], [6, 7]], [[8, 9], [10, 11], [12, 13], [14, 15]]],
    between=gpu.TopologyLevel.NODE,
)
FOURTEEN = machine(
    [[[at] for at in range(14)]],
    "0-1x2 2-3x2 4-5x2 6-7x2 8-9x2 10-11x2 12-13x4",
)


def aligned(links: Links, available: list[int], required: list[int], size: int) -> list[int]:
    count = 1 + max(int(name[4:]) for pair in links for name in pair)
    chosen = allocation.prefer(
        [whole(at).id for at in available],
        [whole(at).id for at in required],
        size,
        units={whole(at).id: whole(at) for at in range(count)},
        policy=ALIGNED,
        links=links,
    )
    return sorted(int(name[4:]) for name in chosen)


# Cases of go-gpuallocator 876e7b7, gpuallocator/besteffort_test.go TestBestEffortAllocate


@pytest.mark.parametrize(
    ("available", "required", "size", "result"),
    [
        ([0, 2, 4, 5], [], 2, [4, 5]),
        ([0, 4, 5, 6], [], 2, [5, 6]),
        ([0, 3, 1], [], 2, [0, 3]),
        ([0, 1, 4], [], 2, [0, 4]),
        ([*range(8)], [4], 1, [4]),
        ([*range(8)], [4], 2, [4, 7]),
        ([*range(8)], [4], 4, [4, 5, 6, 7]),
        ([*range(8)], [0, 2, 4, 6], 4, [0, 2, 4, 6]),
    ],
)
def test_gpus_of_a_dgx1_are_chosen_as_by_nvidias_allocator(
    available: list[int], required: list[int], size: int, result: list[int]
) -> None:
    assert aligned(VOLTA, available, required, size) == result


# Cases of the same table for which that allocator returns no GPU


@pytest.mark.parametrize(
    ("available", "required", "size", "result"),
    [
        ([1, 2, 3, 4, 5, 6, 7], [0, 1, 2, 3], 4, [0, 1, 2, 3]),
        ([*range(8)], [1, 2, 3, 4, 5, 6], 4, [1, 2, 3, 4]),
        ([1, 2, 3, 4, 5], [1, 2, 3, 4, 5, 6], 1, [1]),
    ],
)
def test_what_must_be_included_is_named_even_where_that_cannot_be(
    available: list[int], required: list[int], size: int, result: list[int]
) -> None:
    assert aligned(VOLTA, available, required, size) == result


# besteffort_test.go and staticdgx_test.go: one request after the other


@pytest.mark.parametrize(
    ("links", "results"),
    [
        (RTX8000, [[0], [1], [2], [3]]),
        (RTX8000, [[0, 3], [1, 2]]),
        (RTX8000, [[0, 1, 2, 3]]),
        (PASCAL, [[at] for at in range(8)]),
        (PASCAL, [[0, 2], [1, 3], [4, 6], [5, 7]]),
        (PASCAL, [[0, 1, 2, 3], [4, 5, 6, 7]]),
        (PASCAL, [[*range(8)]]),
        (VOLTA, [[at] for at in range(8)]),
        (VOLTA, [[0, 3], [1, 2], [4, 7], [5, 6]]),
        (VOLTA, [[0, 1, 2, 3], [4, 5, 6, 7]]),
        (VOLTA, [[*range(8)]]),
        (FOURTEEN, [[12, 13], [0, 1], [2, 3]]),
        (DGX2, [[0, 1], [2, 3], [4, 5]]),
        (DGX2, [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11], [12, 13, 14, 15]]),
        (DGX2, [[*range(8)], [*range(8, 16)]]),
    ],
)
def test_one_request_after_the_other_leaves_the_best_for_the_next(
    links: Links, results: list[list[int]]
) -> None:
    left = sorted({int(name[4:]) for pair in links for name in pair})
    for result in results:
        assert aligned(links, left, [], len(result)) == result
        left = [at for at in left if at not in result]


def test_fewer_than_asked_for_are_all_that_there_are() -> None:
    assert aligned(VOLTA, [2, 5], [], 4) == [2, 5]
    assert aligned(VOLTA, [], [], 4) == []
    assert aligned(VOLTA, [1, 2], [], 0) == []


# Replicas


def prefer(
    policy: config_gpus.Placement,
    devices: dict[str, advertised.Unit],
    size: int,
    *,
    available: list[str] | None = None,
    required: list[str] | None = None,
) -> list[str]:
    return allocation.prefer(
        [*devices] if available is None else available,
        required or [],
        size,
        units=devices,
        policy=policy,
        links={},
    )


# Cases of k8s-device-plugin, internal/rm/allocate_test.go; here, ids decide ties

GREEDY = [
    (DISTRIBUTED, replicas(a=4, b=4), 2, ["a::0", "b::0"]),
    (DISTRIBUTED, replicas(a=2, b=2, c=2), 3, ["a::0", "b::0", "c::0"]),
    (DISTRIBUTED, replicas(a=4, b=4), 4, ["a::0", "b::0", "a::1", "b::1"]),
    (DISTRIBUTED, replicas(a=4), 1, ["a::0"]),
    (PACKED, replicas(a=4, b=4), 2, ["a::0", "a::1"]),
    (PACKED, replicas(a=2, b=2, c=2), 3, ["a::0", "a::1", "b::0"]),
    (PACKED, replicas(a=4, b=4), 4, ["a::0", "a::1", "a::2", "a::3"]),
    (PACKED, replicas(a=4, b=4), 5, ["a::0", "a::1", "a::2", "a::3", "b::0"]),
    (PACKED, replicas(a=4), 1, ["a::0"]),
    # NVIDIA's plugin fails the request; here, fewer devices are returned
    (DISTRIBUTED, replicas(a=2), 5, ["a::0", "a::1"]),
    (PACKED, replicas(a=2), 5, ["a::0", "a::1"]),
    # shared GPUs are never aligned
    (ALIGNED, replicas(a=4, b=4), 4, ["a::0", "b::0", "a::1", "b::1"]),
]


@pytest.mark.parametrize(("policy", "devices", "size", "result"), GREEDY)
def test_replicas_are_spread_or_packed(
    policy: config_gpus.Placement,
    devices: dict[str, advertised.Unit],
    size: int,
    result: list[str],
) -> None:
    assert prefer(policy, devices, size) == result


def test_what_is_in_use_counts_and_then_what_was_just_picked() -> None:
    two = replicas(a=2, b=2)
    assert prefer(DISTRIBUTED, two, 2, available=["a::0", "a::1", "b::1"]) == ["a::0", "b::1"]
    four = replicas(a=4, b=4)
    left = ["a::0", "a::1", "a::2", "a::3", "b::3"]
    assert prefer(DISTRIBUTED, four, 2, available=left) == ["a::0", "a::1"]
    assert prefer(PACKED, four, 2, available=left) == ["b::3", "a::0"]


def test_unshared_gpus_are_aligned_whatever_the_policy() -> None:
    gpus = {whole(at).id: whole(at) for at in range(8)}
    for policy in config_gpus.Placement:
        chosen = allocation.prefer([*gpus], [], 2, units=gpus, policy=policy, links=VOLTA)
        assert chosen == ["GPU-00", "GPU-03"]


def test_mig_devices_are_spread_over_their_gpus_or_packed_into_them() -> None:
    mig = {
        f"MIG-{parent}{gi}": unit(f"MIG-{parent}{gi}", parent=parent, gi=gi)
        for parent in "ab"
        for gi in range(3)
    }
    assert prefer(ALIGNED, mig, 3) == ["MIG-a0", "MIG-b0", "MIG-a1"]
    assert prefer(PACKED, mig, 3) == ["MIG-a0", "MIG-a1", "MIG-a2"]


# Cases of the iktos plugin 9394ddf, cmd/nvidia-device-plugin/replica_test.go prioritizeDevices. It
# also chooses GPUs that are not in the request yet; if there are none, it adds others and an error


def of(text: str) -> list[str]:
    return [f"{name[0]}-replica-{name[1]}" for name in text.split()]


@pytest.mark.parametrize(
    ("available", "required", "size", "result"),
    [
        ("a0 a1 b1", "", 1, "a0"),
        ("a0 a1 b1", "", 2, "a0 b1"),
        ("a0 a1 b1", "b1", 1, "b1"),
        ("a0 a1 b1", "a1", 1, "a1"),
        ("a0 a1 b1", "a1", 2, "a1 b1"),
        ("a0 a1 a2 b1 c0", "a2", 3, "a2 b1 c0"),
        ("a1 b1 c1 d1 e1 f1 g1 h1", "", 1, "a1"),
        ("a0 a1 a2 b1", "", 0, ""),
        ("", "", 1, ""),
        # the iktos plugin: NonUniqueError for a GPU given twice; here, fewer devices are returned
        ("a0 a1 a2 b1", "", 3, "a0 b1"),
        ("a0 a1 a2 b2 b1", "a2", 3, "a2 b1"),
        ("a0 a1 a2 b1", "", 5, "a0 b1"),
        # all required ids are returned, and Allocate refuses them
        ("a0 a1 a2 b1", "a2 b1 a1", 3, "a2 b1 a1"),
        # an error of the iktos plugin: the device is not available
        ("a0 a1", "a2", 1, "a2"),
        ("a0 a1", "b2", 1, "b2"),
    ],
)
def test_exclusive_takes_one_replica_of_each_gpu(
    available: str, required: str, size: int, result: str
) -> None:
    devices = existing(*of(available), *of(required))
    chosen = prefer(EXCLUSIVE, devices, size, available=of(available), required=of(required))
    assert chosen == of(result)


# Any request

IDS = st.lists(st.sampled_from([*replicas(a=3, b=2), "GPU-c", "GPU-d", "nope", ""]), max_size=12)
SOME = {**replicas(a=3, b=2), **existing("GPU-c", "GPU-d")}
WHOLE = existing("GPU-c", "GPU-d", "a::0")


@given(
    IDS,
    IDS,
    st.integers(-1, 12),
    st.sampled_from(config_gpus.Placement),
    st.sampled_from([SOME, WHOLE, {}]),
)
def test_advice_never_fails_and_is_the_same_for_the_same_question(
    available: list[str],
    required: list[str],
    size: int,
    policy: config_gpus.Placement,
    devices: dict[str, advertised.Unit],
) -> None:
    chosen = prefer(policy, devices, size, available=available, required=required)
    shuffled = prefer(policy, devices, size, available=available[::-1], required=required)
    first = list(dict.fromkeys(required))[: max(size, 0)]
    assert chosen == shuffled
    assert len(set(chosen)) == len(chosen)
    assert chosen[: len(first)] == first
    assert set(chosen) <= {*available, *required}
    if policy is EXCLUSIVE:
        physical = [devices[name].physical for name in chosen[len(first) :] if name in devices]
        assert len(set(physical)) == len(physical)
        assert not {*physical} & {devices[name].physical for name in first if name in devices}
    else:
        assert len(chosen) == min(max(size, 0), len({*available, *required}))


@given(
    st.dictionaries(st.sampled_from("abcd"), st.integers(1, 4), min_size=1),
    st.data(),
    st.integers(0, 8),
    st.sampled_from([DISTRIBUTED, PACKED]),
)
def test_each_replica_is_of_a_gpu_that_serves_the_fewest_or_most(
    counts: dict[str, int], data: st.DataObject, size: int, policy: config_gpus.Placement
) -> None:
    devices = replicas(**{name: count + 1 for name, count in counts.items()})
    available = data.draw(st.lists(st.sampled_from([*devices]), unique=True))
    chosen = prefer(policy, devices, size, available=available)
    left = set(available)
    for name in chosen:
        serves = {free[0]: sum(id_[0] == free[0] for id_ in devices.keys() - left) for free in left}
        best = min(serves.values()) if policy is DISTRIBUTED else max(serves.values())
        assert serves[name[0]] == best
        assert name == min(id_ for id_ in left if id_[0] == name[0])
        left.discard(name)
