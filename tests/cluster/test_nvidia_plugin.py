"""NVIDIA's device plugin and ours, with the same configuration file on the same machine.

Their device lists, preferred allocations and answers to Allocate are equal, except for the intended
differences in docs/compatibility.md.
"""

import asyncio
import itertools
import re
import tempfile
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import msgspec
import pytest

from muster.pb import deviceplugin_pb2 as dp
from tests.worlds import device_plugins
from tests.worlds.nvml import scenes

PAGE: Final = Path(__file__).parents[2] / "docs" / "compatibility.md"
GPU: Final = "nvidia.com/gpu"
CDI: Final = "k8s.device-plugin.nvidia.com"
SHARED: Final = "nvidia.com/gpu.shared"
ANY_ORDER: Final = "`deviceIds: index`, device nodes"
REPLICAS: Final = "device nodes of replicas"
TOO_FEW: Final = "too few devices, unknown ids"
EQUALLY_GOOD: Final = "equally good sets"
MIG_ORDER: Final = "MIG devices"
AT_RANDOM: Final = {ANY_ORDER, EQUALLY_GOOD, MIG_ORDER}
"""Differences that need not occur, because NVIDIA's plugin leaves the result to chance."""
NODE_MISSING: Final = "a device node that is missing on the host"

NO_FEATURE: Final = "with CDI, `gds`, `mofed` or `gdrcopy` on a machine that does not have it"

NODES: Final = (
    *("nvidiactl", "nvidia-uvm", *(f"nvidia{number}" for number in range(9))),
    "nvidia-caps-imex-channels/channel0",
    *(f"nvidia-caps/nvidia-cap{number}" for number in range(3, 200)),
)
CAPS: Final = {
    f"gpu{gpu}/gi{gi}/{name}": minor
    for minor, (gpu, gi, name) in enumerate(
        itertools.product(range(3), range(16), ("access", "ci0/access", "ci1/access")), start=3
    )
}
HGX: Final = device_plugins.Machine(scene=scenes.h100x8(), nodes=NODES)
DGX1: Final = device_plugins.Machine(scene=scenes.dgx1(), nodes=NODES)
T4: Final = device_plugins.Machine(scene=scenes.t4(), nodes=NODES)
CUT: Final = device_plugins.Machine(scene=scenes.a100_mig(), nodes=NODES, caps=CAPS)
"""Three A100s, two of them in MIG mode, one of those with profiles that NVIDIA has no name for."""
MIXED: Final = device_plugins.Machine(
    scene=CUT.scene.carved(0, *CUT.scene.gpus[0].mig[:2]), nodes=NODES, caps=CAPS
)
SEVEN: Final = device_plugins.Machine(scene=CUT.scene.without(0, 2), nodes=NODES, caps=CAPS)


class Case(msgspec.Struct, frozen=True, kw_only=True):
    """A configuration file, the number of devices of each resource, and the differences."""

    name: str
    machine: device_plugins.Machine
    file: str
    devices: Mapping[str, int]
    differs: frozenset[str] = frozenset({TOO_FEW})


def file(flags: str = "", plugin: str = "", more: str = "") -> str:
    return f"version: v1\nflags: {{{flags}{', ' * bool(flags)}plugin: {{{plugin}}}}}\n{more}\n"


def shared(more: str, *resources: str) -> str:
    listed = ", ".join(f"{{name: {name}, replicas: 3}}" for name in resources)
    return f"sharing: {{timeSlicing: {{{more}resources: [{listed}]}}}}"


SPECS: Final = "passDeviceSpecs: true"
CASES: Final = (
    Case(name="defaults", machine=HGX, file=file(), devices={GPU: 8}),
    Case(name="NVLinks", machine=DGX1, file=file(), devices={GPU: 8}),
    Case(name="one GPU", machine=T4, file=file(), devices={GPU: 1}),
    Case(
        name="indices",
        machine=HGX,
        file=file(plugin="deviceIDStrategy: index"),
        devices={GPU: 8},
        differs=frozenset({TOO_FEW, ANY_ORDER}),
    ),
    Case(
        name="device nodes",
        machine=HGX,
        file=file(plugin=SPECS),
        devices={GPU: 8},
        differs=frozenset({TOO_FEW, ANY_ORDER}),
    ),
    Case(
        name="volume mounts, features, another root",
        machine=HGX,
        file=file(
            "gdsEnabled: true, mofedEnabled: true, gdrcopyEnabled: true, "
            "nvidiaDevRoot: /run/nvidia/driver",
            f"{SPECS}, deviceListStrategy: volume-mounts",
        ),
        devices={GPU: 8},
        differs=frozenset({TOO_FEW, ANY_ORDER}),
    ),
    Case(
        name="an IMEX channel",
        machine=HGX,
        file=file(
            plugin="deviceListStrategy: [envvar, volume-mounts]", more="imex: {channelIDs: [0]}"
        ),
        devices={GPU: 8},
    ),
    Case(
        name="CDI, both ways",
        machine=device_plugins.Machine(scene=HGX.scene, nodes=(*NODES, "nvidia-fs0")),
        file=file(
            "gdsEnabled: true",
            "containerDriverRoot: /run/nvidia/driver, "
            "deviceListStrategy: [cdi-annotations, cdi-cri], cdiAnnotationPrefix: a.example/",
            "imex: {channelIDs: [0], required: true}",
        ),
        devices={GPU: 8},
    ),
    Case(
        name="CDI, a feature that is not there",
        machine=HGX,
        file=file(
            "gdsEnabled: true",
            "containerDriverRoot: /run/nvidia/driver, deviceListStrategy: cdi-cri",
        ),
        devices={GPU: 8},
        differs=frozenset({TOO_FEW, NO_FEATURE}),
    ),
    Case(
        name="no device nodes",
        machine=device_plugins.Machine(scene=HGX.scene),
        file=file(plugin=SPECS),
        devices={GPU: 8},
        differs=frozenset({TOO_FEW, NODE_MISSING}),
    ),
    Case(
        name="replicas",
        machine=HGX,
        file=file(plugin=SPECS, more=shared("", GPU)),
        devices={GPU: 24},
        differs=frozenset({TOO_FEW, REPLICAS, EQUALLY_GOOD}),
    ),
    Case(
        name="replicas renamed, one a request, indices",
        machine=HGX,
        file=file(
            plugin="deviceIDStrategy: index",
            more=shared("renameByDefault: true, failRequestsGreaterThanOne: true, ", GPU),
        ),
        devices={SHARED: 24},
        differs=frozenset({TOO_FEW, EQUALLY_GOOD}),
    ),
    Case(name="MIG: none", machine=CUT, file=file("migStrategy: none"), devices={GPU: 3}),
    Case(
        name="MIG: mixed",
        machine=MIXED,
        file=file("migStrategy: mixed", SPECS),
        devices={GPU: 1, "nvidia.com/mig-1g.5gb": 8, "nvidia.com/mig-2g.10gb": 1},
        differs=frozenset({TOO_FEW, ANY_ORDER, REPLICAS, MIG_ORDER}),
    ),
    Case(
        name="MIG: mixed, replicas, indices",
        machine=MIXED,
        file=file(
            "migStrategy: mixed", "deviceIDStrategy: index", shared("", "nvidia.com/mig-1g.5gb")
        ),
        devices={GPU: 1, "nvidia.com/mig-1g.5gb": 24, "nvidia.com/mig-2g.10gb": 1},
        differs=frozenset({TOO_FEW, ANY_ORDER, MIG_ORDER}),
    ),
    Case(
        name="MIG: single",
        machine=SEVEN,
        file=file("migStrategy: single", "deviceIDStrategy: index"),
        devices={GPU: 7},
        differs=frozenset({TOO_FEW, ANY_ORDER, MIG_ORDER}),
    ),
    Case(
        name="MIG: single, replicas renamed",
        machine=SEVEN,
        file=file("migStrategy: single", more=shared("renameByDefault: true, ", "gpu")),
        devices={SHARED: 21},
        differs=frozenset({TOO_FEW, MIG_ORDER}),
    ),
)
REFUSED: Final = (
    Case(
        name="one GPU does not fit `migStrategy`: it is in MIG mode without MIG devices, or, with "
        "`single`, is divided unlike the others",
        machine=MIXED,
        file=file("migStrategy: single"),
        devices={GPU: 7},
    ),
    Case(
        name="a required IMEX channel that is missing",
        machine=device_plugins.Machine(scene=HGX.scene),
        file=file(more="imex: {channelIDs: [0], required: true}"),
        devices={GPU: 8},
    ),
    Case(
        name="an unknown minor number, an entry missing in `mig-minors`",
        machine=device_plugins.Machine(scene=SEVEN.scene, nodes=NODES),
        file=file("migStrategy: single"),
        devices={GPU: 7},
    ),
)

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.skipif(bool(device_plugins.missing()), reason=device_plugins.missing()),
]


class Asked(msgspec.Struct, frozen=True, kw_only=True):
    """A request to a plugin: for its device list, an allocation, or a preferred allocation."""

    resource: str
    ids: tuple[str, ...] = ()
    must: tuple[str, ...] = ()
    size: int = 0


Answer = dict[str, object] | tuple[str, ...] | str
Answers = dict[Asked, Answer]


async def answers(
    case: Case, command: tuple[str, ...], *, allocate: bool = True
) -> tuple[dict[str, int], Answers]:
    """Return the number of devices of each resource, and the answer to each request."""
    counts: dict[str, int] = {}
    given: Answers = {}
    with tempfile.TemporaryDirectory(prefix="mu-") as root:
        async with device_plugins.running(
            Path(root), case.machine, case.file, command, [*case.devices]
        ) as plugin:
            for resource in plugin.resources:
                devices = await plugin.devices(resource)
                counts[resource] = len(devices)
                given[Asked(resource=resource)] = {
                    device.ID: (device.health, [node.ID for node in device.topology.nodes])
                    for device in devices
                } | {"options": str(await plugin.options(resource))}
                if not devices or not allocate:
                    continue
                for asked in questions(resource, [device.ID for device in devices]):
                    given[asked] = await answer(plugin, asked)
    return counts, given


def questions(resource: str, ids: list[str]) -> set[Asked]:
    containers = {(ids[0],), (ids[-1],), (*ids[:2],), (*ids[1::-1],), (*ids,), ("GPU-none",)}
    half = tuple(ids[::2])
    advice = {
        *((tuple(ids), (), size) for size in range(1, min(len(ids), 8) + 1)),
        *((half, (), size) for size in range(1, min(len(half), 4) + 1)),
        (tuple(ids), (ids[-1],), min(2, len(ids))),
        (tuple(ids[:1]), (), 2),
    }
    return {
        *(Asked(resource=resource, ids=chosen) for chosen in containers),
        *(
            Asked(resource=resource, ids=among, must=must, size=size)
            for among, must, size in advice
        ),
    }


async def answer(plugin: device_plugins.Plugin, asked: Asked) -> Answer:
    if asked.size:
        advised = await plugin.prefer(asked.resource, asked.ids, asked.must, asked.size)
        # a kubelet ignores the order
        return "refused" if isinstance(advised, str) else tuple(sorted(advised))
    given = await plugin.allocate(asked.resource, asked.ids)
    return "refused" if isinstance(given, str) else plain(given)


def plain(given: dp.ContainerAllocateResponse) -> dict[str, object]:
    """Return an answer to Allocate without the random parts of annotation names."""
    names = {re.sub(r"_[0-9a-f-]{32,36}$", "_ANY", key): v for key, v in given.annotations.items()}
    return {
        "envs": dict(given.envs),
        "mounts": [(m.host_path, m.container_path, m.read_only) for m in given.mounts],
        "devices": [(d.host_path, d.container_path, d.permissions) for d in given.devices],
        "annotations": names,
        "cdi": [device.name for device in given.cdi_devices],
    }


def row(asked: Asked, theirs: Answer, ours: Answer) -> str:
    """Return the row of the page that describes this difference; empty if none does."""
    if isinstance(theirs, dict) and ours == "refused":
        return NODE_MISSING if theirs["devices"] else ""
    if isinstance(theirs, dict) and isinstance(ours, dict):
        if ordered(theirs) == ordered(ours):
            return ANY_ORDER
        if theirs | {"cdi": [*listed(theirs), f"{CDI}/gds=all"]} == ours:
            return NO_FEATURE
        return REPLICAS if ordered(theirs, once=True) == ordered(ours, once=True) else ""
    return advice_row(asked, theirs, ours)


def listed(given: dict[str, object]) -> list[str]:
    """Return the names of an answer's CDI devices."""
    names = given["cdi"]
    assert isinstance(names, list)
    return names


def advice_row(asked: Asked, theirs: Answer, ours: Answer) -> str:
    if asked.size > len(asked.ids):
        return TOO_FEW if theirs in {"refused", ()} and ours == asked.ids else ""
    if not isinstance(theirs, tuple) or not isinstance(ours, tuple):
        return ""
    if spread(theirs) != spread(ours):
        return ""
    return MIG_ORDER if all(name.startswith("MIG-") for name in ours) else EQUALLY_GOOD


def spread(advised: tuple[str, ...]) -> list[int]:
    """Return the number of replicas of each GPU, in descending order."""
    return sorted(Counter(name.partition("::")[0] for name in advised).values(), reverse=True)


def ordered(given: dict[str, object], *, once: bool = False) -> dict[str, object]:
    """Return an answer with sorted devices; with `once`, without repeated device nodes."""
    envs, nodes = given["envs"], given["devices"]
    assert isinstance(envs, dict)
    assert isinstance(nodes, list)
    visible = sorted(envs.get("NVIDIA_VISIBLE_DEVICES", "").split(","))
    kept = sorted({*nodes} if once else nodes)
    return given | {"envs": envs | {"NVIDIA_VISIBLE_DEVICES": visible}, "devices": kept}


def intended() -> set[str]:
    """Return the first cells of the tables of intended differences."""
    _, *sections = PAGE.read_text().split("\n## Intended differences")
    lines = itertools.chain.from_iterable(section.splitlines() for section in sections)
    return {line.split(" | ")[0].removeprefix("| ") for line in lines if line.startswith("| ")}


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_with_the_same_file_ours_differs_only_as_the_page_says(case: Case) -> None:
    async def story() -> tuple[tuple[dict[str, int], Answers], tuple[dict[str, int], Answers]]:
        return await asyncio.gather(
            answers(case, device_plugins.nvidia_command()),
            answers(case, device_plugins.muster_command()),
        )

    (counts, theirs), (our_counts, ours) = asyncio.run(story())
    assert counts == case.devices
    assert our_counts == case.devices
    assert theirs.keys() == ours.keys()
    different = {asked for asked in theirs if theirs[asked] != ours[asked]}
    rows = {asked: row(asked, theirs[asked], ours[asked]) for asked in different}
    unexplained = {asked: (theirs[asked], ours[asked]) for asked in rows if not rows[asked]}
    assert unexplained == {}
    assert {*rows.values()} - AT_RANDOM == case.differs - AT_RANDOM
    assert {*rows.values()} <= case.differs
    assert case.differs <= intended()


@pytest.mark.parametrize("case", REFUSED, ids=lambda case: case.name)
def test_where_nvidias_plugin_does_not_start_ours_serves_the_rest(case: Case) -> None:
    with pytest.raises(device_plugins.Ended, match="error starting plugins"):
        asyncio.run(answers(case, device_plugins.nvidia_command()))
    counts, _ = asyncio.run(answers(case, device_plugins.muster_command(), allocate=False))
    assert counts == case.devices
    assert case.name in intended()
