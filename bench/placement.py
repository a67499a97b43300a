"""Adapter for the clock: measures the worst case of preferred allocation among 16 GPUs.

Every request size is measured on machines with different GPU topologies: a tree of PCIe switches,
all links alike, NVLinks across the tree, and random links, which are the worst case.
"""

import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from typing import Final

from bench import report
from muster_plugin.config import gpus
from muster_plugin.kubelet import allocation
from muster_plugin.model import advertised, gpu

_GPUS: Final = 16
_TARGET_MS: Final = 50.0
_LEVELS: Final = {
    2: gpu.TopologyLevel.ONE_SWITCH,
    4: gpu.TopologyLevel.SWITCHES,
    8: gpu.TopologyLevel.NODE,
}
Joins = Callable[[int, int], gpu.Link]


def rows(*, quick: bool) -> list[report.Row]:
    """Return the median of the slowest size for each machine; the target applies to the worst."""
    times = 3 if quick else 9
    measured = []
    worst = 0.0
    for name, links in _machines():
        medians = [
            (statistics.median(_timed(links, size) for _ in range(times)), size)
            for size in range(1, _GPUS + 1)
        ]
        slowest, size = max(medians)
        worst = max(worst, slowest)
        measured.append(_row(f"advice, 16 GPUs, {name}", slowest, how=f"slowest size: {size}"))
    return [_row("advice, 16 GPUs aligned, worst", worst, target=_TARGET_MS), *measured]


def _row(name: str, value: float, *, target: float | None = None, how: str = "") -> report.Row:
    expected = how or f"median of each of {_GPUS} sizes; the slowest of all machines"
    return report.Row(name=name, value=round(value, 2), unit="ms", target=target, how=expected)


def _timed(links: allocation.Links, size: int) -> float:
    started = time.perf_counter()
    chosen = allocation.prefer(
        [*_UNITS], [], size, units=_UNITS, policy=gpus.Placement.ALIGNED, links=links
    )
    took = time.perf_counter() - started
    assert len(chosen) == size
    return took * 1000


def _unit(number: int) -> advertised.Unit:
    name = f"GPU-{number:02}"
    device = gpu.Device(part=gpu.Part(gpu=name), uuid=name, index=str(number), minor=number)
    return advertised.Unit(id=name, physical=name, identity={0: name}, gpu=device)


_UNITS: Final = {unit.id: unit for unit in map(_unit, range(_GPUS))}


def _machines() -> Iterator[tuple[str, allocation.Links]]:
    chance = random.Random(16)  # noqa: S311  # the same machines in every run, not a secret
    yield "PCIe tree", _links(_tree)
    yield "all alike", _links(lambda _left, _right: gpu.Link())
    yield "NVLinks across the tree", _links(_across)
    for number in range(3):
        yield (
            f"random {number + 1}",
            _links(
                lambda _left, _right: gpu.Link(
                    level=chance.choice([*gpu.TopologyLevel]), nvlinks=chance.choice([0, 0, 1, 2])
                )
            ),
        )


def _links(joins: Joins) -> allocation.Links:
    names = [*_UNITS]
    return {
        (names[first], names[other]): joins(first, other)
        for first in range(_GPUS)
        for other in range(first + 1, _GPUS)
    }


def _tree(first: int, other: int) -> gpu.Link:
    below = (level for size, level in _LEVELS.items() if first // size == other // size)
    return gpu.Link(level=next(below, gpu.TopologyLevel.SYSTEM))


def _across(first: int, other: int) -> gpu.Link:
    is_bridged = first // 4 == other // 4 and other - first == 2  # noqa: PLR2004  # every other one
    return gpu.Link(level=_tree(first, other).level, nvlinks=4 if is_bridged else 0)


if __name__ == "__main__":
    print(report.text("placement", rows(quick="--quick" in sys.argv)))
