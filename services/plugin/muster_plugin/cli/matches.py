"""Adapter: this machine for a person who asks which of its devices the rules mean.

It is looked at as the plugin does, but once: device nodes below /dev, GPUs through NVML.
"""

import asyncio
from collections.abc import Iterable, Iterator, Mapping, Sequence

import msgspec

from muster import vocabulary
from muster_plugin.config import document, gpus, settings
from muster_plugin.discovery import devfs, units
from muster_plugin.gpu import replicas
from muster_plugin.gpu import source as gpu_source
from muster_plugin.model import gpu


class Matches(msgspec.Struct, frozen=True, kw_only=True):
    """A table in lines, and what a person should know besides."""

    lines: Sequence[str]
    problems: Sequence[str] = ()


def look(found: document.Here, made: settings.SimulatedGpus | None, node: str) -> Matches:
    """Look at this machine, or at GPUs that are `made` for a node of that name."""
    entries = [nodes for resource in found.resources for _, nodes in resource.nodes()]
    plan = units.plan(found.resources, devfs.scan(entries))
    seen: tuple[vocabulary.Gpu, ...] = ()
    if found.gpus is not None:
        look = asyncio.run(_look(found.gpus, made, node))
        seen = look.gpus
        plan = units.together(plan, replicas.plan(look, found.gpus))
    rows = [("RESOURCE", "DEVICE", "GIVES")]
    for offer in plan.offers:
        rows += [*_rows(offer, seen)] or [(offer.name, "-", "nothing is there")]
    widths = [max(len(row[column]) for row in rows) for column in (0, 1)]
    return Matches(
        lines=[
            f"{name:{widths[0]}}  {device:{widths[1]}}  {gives}" for name, device, gives in rows
        ],
        problems=plan.problems,
    )


async def _look(told: gpus.Gpus, made: settings.SimulatedGpus | None, node: str) -> gpu.Look:
    from muster_plugin.gpu import simulated  # noqa: PLC0415  # only where GPUs are meant
    from muster_plugin.gpu.nvml import observer  # noqa: PLC0415  # only where GPUs are meant

    source: gpu_source.Source = (
        simulated.Simulated(made, node, poll_s=told.health.poll_s) if made else observer.Nvml(told)
    )
    try:
        return await source.first(gpu_source.FIRST_LOOK_S)
    finally:
        await source.close()


def _rows(offer: units.Offer, seen: Iterable[vocabulary.Gpu]) -> Iterator[tuple[str, str, str]]:
    """Give a row for each thing; its ids are told by the first."""
    things: dict[str, list[units.Unit]] = {}
    for unit in offer.units:
        things.setdefault(unit.physical, []).append(unit)
    words = {device: text for one in seen for device, text in _words(one).items()}
    for name, same in things.items():
        more = f" and {len(same) - 1} more" if len(same) > 1 else ""
        paths = [device.host_path for device in same[0].devices]
        paths += [mount.host_path for mount in same[0].mounts]
        yield offer.name, f"{same[0].id}{more}", words.get(name) or ", ".join(paths)


def _words(one: vocabulary.Gpu) -> Mapping[str, str]:
    """Say what a GPU and its MIG devices are, by uuid."""
    which = f"GPU {one.index}" if one.index is not None else "a GPU"
    parts = {mig.uuid: f"{mig.profile} of {which}, {one.product}" for mig in one.mig}
    return {one.uuid: f"{which}, {one.product}", **parts}
