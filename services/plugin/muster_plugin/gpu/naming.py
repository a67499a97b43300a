"""Pure: Which GPUs and MIG devices there are to hand out, and what each is called.

The MIG strategies and names are NVIDIA's (internal/rm/device_map.go, internal/lm/mig-strategy.go,
v0.20). Where NVIDIA's plugin gives up all GPUs because one does not fit, only that one is left out
here, with a problem that names it.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final, TypeAlias, assert_never

import msgspec

from muster import vocabulary
from muster_plugin.config import gpus as config_gpus
from muster_plugin.model import gpu, names, selectors

_UUID_MAX: Final = 58
"""A device id has 63 characters; `::999` of them number the replica."""
_COMPUTE_SLICE = re.compile(r"[0-9]+c\.")
"""A profile with fewer compute slices than its GPU instance has (go-nvlib mig_profile.go)."""
_PROFILE = re.compile(r"(?:[0-9]+c\.)?[0-9]+g\.[0-9]+gb(?:[-+][a-z.]+)*")

NoteProblem: TypeAlias = Callable[[str], None]


class Candidate(msgspec.Struct, frozen=True, kw_only=True):
    """A GPU or MIG device that can be handed out; `profile` is empty for a whole GPU."""

    device: gpu.Device
    product: str
    profile: str = ""
    memory_mib: int | None = None
    numa: int | None = None


def included_gpus(
    scan: gpu.Scan, rules: config_gpus.Gpus, note: NoteProblem
) -> tuple[vocabulary.Gpu, ...]:
    """Return the GPUs without what is excluded, by index; tell of references that name nothing."""
    candidates = [*_known(scan, note)]
    excluded = [selectors.parse(text, products=True) for text in rules.exclude]
    matched: set[int] = set()
    kept = []
    for one in candidates:
        matching = {
            at
            for at, selector in enumerate(excluded)
            if selectors.selects(selector, _whole(one), one.product)
        }
        parts = []
        for number, mig, device in _parts(one):
            matching_mig = {
                at
                for at, selector in enumerate(excluded)
                if selectors.selects(selector, device, one.product)
            }
            matched |= matching_mig
            if not matching_mig:
                # it keeps its number, whoever before it is left out
                parts.append(msgspec.structs.replace(mig, index=number))
        matched |= matching
        if not matching and not (one.mig and not parts):
            kept.append(msgspec.structs.replace(one, mig=tuple(parts)))
    for at, reference in enumerate(excluded):
        if at not in matched and candidates and not is_unreadable(reference, scan):
            note(f"exclude[{at}]: no GPU here is {rules.exclude[at]}")
    return tuple(kept)


def is_unreadable(selector: selectors.Selector, scan: gpu.Scan) -> bool:
    """Say whether a GPU is meant that is there, and cannot be read."""
    return any(
        selectors.selects(
            selector,
            gpu.Device(
                part=gpu.Part(gpu=unreadable.uuid),
                uuid=unreadable.uuid,
                index=str(unreadable.index),
            ),
            "",
        )
        for unreadable in scan.unreadable
    )


def by_name(
    gpus: Iterable[vocabulary.Gpu], rules: config_gpus.Gpus, note: NoteProblem
) -> dict[str, list[Candidate]]:
    """Return what is handed out under each name, before it is shared, in order of index."""
    candidates: dict[str, list[Candidate]] = {}
    for candidate in _handed_out(gpus, rules.mig_strategy, note):
        name = _name(candidate, rules, note)
        if name:
            candidates.setdefault(name, []).append(candidate)
    return candidates


def gpu_label(device: vocabulary.Gpu) -> str:
    """Return what a person is told a GPU is."""
    return f"GPU {device.index} ({device.uuid})" if device.index is not None else device.uuid


def _known(scan: gpu.Scan, note: NoteProblem) -> Iterator[vocabulary.Gpu]:
    """Give the GPUs that can be told apart, by index."""
    used: set[str] = set()
    for device in sorted(
        scan.gpus, key=lambda device: (device.index is None, device.index, device.uuid)
    ):
        uuids = [device.uuid, *(mig.uuid for mig in device.mig)]
        if len({*uuids}) < len(uuids) or not used.isdisjoint(uuids):
            note(
                f"{gpu_label(device)}: another device has its uuid, or that of one of its MIG devices"
            )
        elif invalid := next((u for u in uuids if not 0 < len(u) <= _UUID_MAX), None):
            note(
                f"{gpu_label(device)}: {invalid[:_UUID_MAX]!r} is no uuid: 1 to {_UUID_MAX} characters"
            )
        else:
            used.update(uuids)
            yield device


def _handed_out(
    gpus: Iterable[vocabulary.Gpu], strategy: config_gpus.MigStrategy, note: NoteProblem
) -> Iterator[Candidate]:
    match strategy:
        case config_gpus.MigStrategy.NONE:
            selected = [*gpus]
            yield from map(_of_whole, selected)
            return
        case config_gpus.MigStrategy.SINGLE:
            selected = _alike(_divided(gpus, note), note)
        case config_gpus.MigStrategy.MIXED:
            selected = _divided(gpus, note)
        case _ as never:
            assert_never(never)
    for device in selected:
        yield from _of_parts(device) if device.mig else [_of_whole(device)]


def _divided(gpus: Iterable[vocabulary.Gpu], note: NoteProblem) -> list[vocabulary.Gpu]:
    """Leave out those in MIG mode that are not divided: there is nothing to hand out."""
    usable = []
    for device in gpus:
        if device.mig_enabled and not device.mig:
            note(
                f"{gpu_label(device)}: MIG is enabled and it has no MIG device; nothing of it is given"
            )
        else:
            usable.append(device)
    return usable


def _alike(gpus: Sequence[vocabulary.Gpu], note: NoteProblem) -> list[vocabulary.Gpu]:
    """Return the GPUs that are divided like most: under one name everything has to be alike.

    Of as many of each, those in MIG mode are taken, and then the first by profile.
    """
    kinds: dict[str, str] = {}
    for device in gpus:
        profiles = sorted({mig.profile for mig in device.mig})
        if len(profiles) > 1:
            note(
                f"{gpu_label(device)}: has MIG devices of profiles {', '.join(profiles)}; migStrategy "
                "single needs one profile (mixed gives each a name)"
            )
        else:
            kinds[device.uuid] = "".join(profiles)
    counts = Counter(kinds.values())
    most = min(counts, key=lambda kind: (-counts[kind], not kind, kind), default="")
    for device in gpus:
        if kinds.get(device.uuid, most) != most:
            note(
                f"{gpu_label(device)}: is {_kind(kinds[device.uuid])} where most are {_kind(most)}; "
                "migStrategy single needs all alike (mixed gives each a name)"
            )
    return [device for device in gpus if kinds.get(device.uuid) == most]


def _kind(profile: str) -> str:
    return f"divided into {profile}" if profile else "not in MIG mode"


def _of_whole(device: vocabulary.Gpu) -> Candidate:
    return Candidate(
        device=_whole(device),
        product=device.product,
        memory_mib=device.memory_mib,
        numa=device.numa_node,
    )


def _of_parts(parent: vocabulary.Gpu) -> Iterator[Candidate]:
    for _, mig, mig_device in _parts(parent):
        yield Candidate(
            device=mig_device,
            product=parent.product,
            profile=mig.profile,
            memory_mib=mig.memory_mib,
            numa=parent.numa_node,
        )


def _whole(device: vocabulary.Gpu) -> gpu.Device:
    return gpu.Device(
        part=gpu.Part(gpu=device.uuid),
        uuid=device.uuid,
        index="" if device.index is None else str(device.index),
        minor=device.minor,
    )


def _parts(parent: vocabulary.Gpu) -> Iterator[tuple[int, vocabulary.MigDevice, gpu.Device]]:
    for position, mig in enumerate(parent.mig):
        number = position if mig.index is None else mig.index
        yield (
            number,
            mig,
            gpu.Device(
                part=gpu.Part(gpu=parent.uuid, gi=mig.gi, ci=mig.ci),
                uuid=mig.uuid,
                index="" if parent.index is None else f"{parent.index}:{number}",
                minor=parent.minor,
            ),
        )


def _name(candidate: Candidate, rules: config_gpus.Gpus, note: NoteProblem) -> str:
    """Return the resource that something is, or nothing after telling why it is none."""
    for naming in rules.resources:
        pattern, text = (
            (naming.mig, candidate.profile)
            if candidate.profile
            else (naming.product, candidate.product)
        )
        if pattern and selectors.matches(pattern, text):
            return naming.name
    if not candidate.profile or rules.mig_strategy is config_gpus.MigStrategy.SINGLE:
        return config_gpus.DEFAULT_NAME
    label = f"MIG device {candidate.device.index} ({candidate.device.uuid})"
    if not _PROFILE.fullmatch(candidate.profile):
        note(f"{label}: its profile is not known ({candidate.profile[:40]!r}), so it has no name")
        return ""
    if _COMPUTE_SLICE.match(candidate.profile):
        note(
            f"{label}: {candidate.profile} is a part of a GPU instance, which NVIDIA has no resource "
            "for; name it in resources, with mig: that profile"
        )
        return ""
    name = f"{config_gpus.DOMAIN}/mig-{candidate.profile.replace('+', '.')}"
    for problem in names.name_problems(name):
        note(f"{label}: {problem}")
        return ""
    return name
