"""Pure: decides which GPUs and MIG devices are advertised, and under which resource name.

The MIG strategies and names are NVIDIA's (internal/rm/device_map.go, internal/lm/mig-strategy.go,
v0.20). If one GPU does not fit the strategy, NVIDIA's plugin advertises none; muster leaves out
only that GPU, with a problem that names it.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final, TypeAlias, assert_never

import msgspec

from muster import vocabulary
from muster_plugin.config import gpus as config_gpus
from muster_plugin.model import advertised, gpu

_UUID_MAX: Final = 58
"""The maximum length of a uuid: with `::999` added, a device id has at most 63 characters."""
_COMPUTE_SLICE = re.compile(r"[0-9]+c\.")
"""Matches a profile with fewer compute slices than its GPU instance (go-nvlib mig_profile.go)."""
_PROFILE = re.compile(r"(?:[0-9]+c\.)?[0-9]+g\.[0-9]+gb(?:[-+][a-z.]+)*")

NoteProblem: TypeAlias = Callable[[str], None]


class Candidate(msgspec.Struct, frozen=True, kw_only=True):
    """A GPU or MIG device that can be advertised; `profile` is empty for a whole GPU."""

    device: gpu.Device
    product: str
    profile: str = ""
    memory_mib: int | None = None
    numa: int | None = None


def included_gpus(
    scan: gpu.Scan, rules: config_gpus.Gpus, note: NoteProblem
) -> tuple[vocabulary.Gpu, ...]:
    """Return the GPUs that are not excluded, sorted by index, with their included MIG devices.

    A GPU is also left out if all its MIG devices are excluded, or if its uuid is invalid or
    repeated. An invalid or repeated uuid is reported, and so is a selector that matches nothing
    unless it names an unreadable GPU.
    """
    distinct = [*_distinct(scan, note)]
    excluded = [gpu.parse_selector(text, products=True) for text in rules.exclude]
    matched: set[int] = set()
    included = []
    for physical in distinct:
        hits = _matching(excluded, _whole(physical), physical.product)
        mig_devices = []
        for number, mig, device in _mig_devices(physical):
            mig_hits = _matching(excluded, device, physical.product)
            matched |= mig_hits
            if not mig_hits:
                # the GPU keeps its number even if earlier GPUs are left out
                mig_devices.append(msgspec.structs.replace(mig, index=number))
        matched |= hits
        if not hits and not (physical.mig and not mig_devices):
            included.append(msgspec.structs.replace(physical, mig=tuple(mig_devices)))
    for at, selector in enumerate(excluded):
        if at not in matched and distinct and not is_unreadable(selector, scan):
            note(f"exclude[{at}]: no GPU on this node matches {rules.exclude[at]}")
    return tuple(included)


def is_unreadable(selector: gpu.Selector, scan: gpu.Scan) -> bool:
    """Return whether the selector names a GPU that is present but cannot be read."""
    return any(
        gpu.selects(
            selector,
            gpu.Device(part=gpu.Part(gpu=failed.uuid), uuid=failed.uuid, index=str(failed.index)),
            "",
        )
        for failed in scan.unreadable
    )


def by_name(
    gpus: Iterable[vocabulary.Gpu], rules: config_gpus.Gpus, note: NoteProblem
) -> dict[str, list[Candidate]]:
    """Return the devices by resource name, before sharing, ordered by index.

    Devices that cannot be advertised are left out, and reported.
    """
    named: dict[str, list[Candidate]] = {}
    for candidate in _candidates(gpus, rules.mig_strategy, note):
        name = _name(candidate, rules, note)
        if name:
            named.setdefault(name, []).append(candidate)
    return named


def gpu_label(physical: vocabulary.Gpu) -> str:
    """Return the name of a GPU for use in messages."""
    if physical.index is None:
        return physical.uuid
    return f"GPU {physical.index} ({physical.uuid})"


def _matching(excluded: Sequence[gpu.Selector], device: gpu.Device, product: str) -> set[int]:
    return {at for at, selector in enumerate(excluded) if gpu.selects(selector, device, product)}


def _distinct(scan: gpu.Scan, note: NoteProblem) -> Iterator[vocabulary.Gpu]:
    """Yield the GPUs with valid and unique uuids, sorted by index; report the others."""
    used: set[str] = set()
    for physical in sorted(scan.gpus, key=lambda g: (g.index is None, g.index, g.uuid)):
        label = gpu_label(physical)
        uuids = [physical.uuid, *(mig.uuid for mig in physical.mig)]
        if len({*uuids}) < len(uuids) or not used.isdisjoint(uuids):
            note(f"{label}: its uuid, or that of one of its MIG devices, is not unique")
        elif invalid := next((u for u in uuids if not 0 < len(u) <= _UUID_MAX), None):
            note(f"{label}: {invalid[:_UUID_MAX]!r} is not a uuid of 1 to {_UUID_MAX} characters")
        else:
            used.update(uuids)
            yield physical


def _candidates(
    gpus: Iterable[vocabulary.Gpu], strategy: config_gpus.MigStrategy, note: NoteProblem
) -> Iterator[Candidate]:
    match strategy:
        case config_gpus.MigStrategy.NONE:
            yield from (_candidate(physical, _whole(physical)) for physical in gpus)
            return
        case config_gpus.MigStrategy.SINGLE:
            selected = _uniform(_partitioned(gpus, note), note)
        case config_gpus.MigStrategy.MIXED:
            selected = _partitioned(gpus, note)
        case _ as never:
            assert_never(never)
    for physical in selected:
        if not physical.mig:
            yield _candidate(physical, _whole(physical))
        yield from (_candidate(physical, device, mig) for _, mig, device in _mig_devices(physical))


def _partitioned(gpus: Iterable[vocabulary.Gpu], note: NoteProblem) -> list[vocabulary.Gpu]:
    """Return the GPUs, except GPUs in MIG mode without a MIG device, which are reported."""
    usable = []
    for physical in gpus:
        if physical.mig_enabled and not physical.mig:
            note(f"{gpu_label(physical)} is left out: MIG is enabled, but it has no MIG device")
        else:
            usable.append(physical)
    return usable


def _uniform(gpus: Sequence[vocabulary.Gpu], note: NoteProblem) -> list[vocabulary.Gpu]:
    """Return the largest group of GPUs that are partitioned alike, and report the other GPUs.

    A single name requires identical devices. If two groups are equally large, GPUs in MIG mode are
    preferred, then the alphabetically first profile.
    """
    kinds: dict[str, str] = {}
    for physical in gpus:
        profiles = sorted({mig.profile for mig in physical.mig})
        if len(profiles) > 1:
            note(
                f"{gpu_label(physical)}: has MIG devices of profiles {', '.join(profiles)}; "
                "migStrategy single needs one profile (mixed allows several)"
            )
        else:
            kinds[physical.uuid] = "".join(profiles)
    counts = Counter(kinds.values())
    most = min(counts, key=lambda kind: (-counts[kind], not kind, kind), default="")
    for physical in gpus:
        if kinds.get(physical.uuid, most) != most:
            note(
                f"{gpu_label(physical)}: is {_kind(kinds[physical.uuid])}, but most are "
                f"{_kind(most)}; migStrategy single needs identical GPUs (mixed does not)"
            )
    return [physical for physical in gpus if kinds.get(physical.uuid) == most]


def _kind(profile: str) -> str:
    return f"divided into {profile}" if profile else "not in MIG mode"


def _candidate(
    physical: vocabulary.Gpu, device: gpu.Device, mig: vocabulary.MigDevice | None = None
) -> Candidate:
    return Candidate(
        device=device,
        product=physical.product,
        profile=mig.profile if mig else "",
        memory_mib=(mig or physical).memory_mib,
        numa=physical.numa_node,
    )


def _whole(physical: vocabulary.Gpu) -> gpu.Device:
    return gpu.Device(
        part=gpu.Part(gpu=physical.uuid),
        uuid=physical.uuid,
        index="" if physical.index is None else str(physical.index),
        minor=physical.minor,
    )


def _mig_devices(
    physical: vocabulary.Gpu,
) -> Iterator[tuple[int, vocabulary.MigDevice, gpu.Device]]:
    for position, mig in enumerate(physical.mig):
        number = position if mig.index is None else mig.index
        device = gpu.Device(
            part=gpu.Part(gpu=physical.uuid, gi=mig.gi, ci=mig.ci),
            uuid=mig.uuid,
            index="" if physical.index is None else f"{physical.index}:{number}",
            minor=physical.minor,
        )
        yield number, mig, device


def _name(candidate: Candidate, rules: config_gpus.Gpus, note: NoteProblem) -> str:
    """Return the resource name of a device; if it has none, report why and return ""."""
    profile = candidate.profile
    for naming in rules.resources:
        pattern = naming.mig if profile else naming.product
        if pattern and gpu.matches_pattern(pattern, profile or candidate.product):
            return naming.name
    if not profile or rules.mig_strategy is config_gpus.MigStrategy.SINGLE:
        return config_gpus.DEFAULT_NAME
    label = f"MIG device {candidate.device.index} ({candidate.device.uuid})"
    if not _PROFILE.fullmatch(profile):
        note(f"{label} has no resource name, because its profile {profile[:40]!r} is unknown")
        return ""
    if _COMPUTE_SLICE.match(profile):
        note(
            f"{label}: {profile} is part of a GPU instance, for which NVIDIA has no resource; "
            "give it a name in resources, with mig set to that profile"
        )
        return ""
    name = f"{config_gpus.DOMAIN}/mig-{profile.replace('+', '.')}"
    for problem in advertised.name_problems(name):
        note(f"{label} has no valid resource name: {problem}")
        return ""
    return name
