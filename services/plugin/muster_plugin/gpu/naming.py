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
    look: gpu.Scan, told: config_gpus.Gpus, tell: NoteProblem
) -> tuple[vocabulary.Gpu, ...]:
    """Return the GPUs without what is excluded, by index; tell of references that name nothing."""
    known = [*_known(look, tell)]
    excluded = [selectors.parse(given, products=True) for given in told.exclude]
    met: set[int] = set()
    kept = []
    for one in known:
        hits = {
            at for at, r in enumerate(excluded) if selectors.selects(r, _whole(one), one.product)
        }
        parts = []
        for number, mig, device in _parts(one):
            inner = {
                at for at, r in enumerate(excluded) if selectors.selects(r, device, one.product)
            }
            met |= inner
            if not inner:
                # it keeps its number, whoever before it is left out
                parts.append(msgspec.structs.replace(mig, index=number))
        met |= hits
        if not hits and not (one.mig and not parts):
            kept.append(msgspec.structs.replace(one, mig=tuple(parts)))
    for at, reference in enumerate(excluded):
        if at not in met and known and not is_unreadable(reference, look):
            tell(f"exclude[{at}]: no GPU here is {told.exclude[at]}")
    return tuple(kept)


def is_unreadable(reference: selectors.Selector, look: gpu.Scan) -> bool:
    """Say whether a GPU is meant that is there, and cannot be read."""
    return any(
        selectors.selects(
            reference,
            gpu.Device(part=gpu.Part(gpu=one.uuid), uuid=one.uuid, index=str(one.index)),
            "",
        )
        for one in look.unreadable
    )


def by_name(
    gpus: Iterable[vocabulary.Gpu], told: config_gpus.Gpus, tell: NoteProblem
) -> dict[str, list[Candidate]]:
    """Return what is handed out under each name, before it is shared, in order of index."""
    found: dict[str, list[Candidate]] = {}
    for one in _handed_out(gpus, told.mig_strategy, tell):
        name = _name(one, told, tell)
        if name:
            found.setdefault(name, []).append(one)
    return found


def gpu_label(one: vocabulary.Gpu) -> str:
    """Return what a person is told a GPU is."""
    return f"GPU {one.index} ({one.uuid})" if one.index is not None else one.uuid


def _known(look: gpu.Scan, tell: NoteProblem) -> Iterator[vocabulary.Gpu]:
    """Give the GPUs that can be told apart, by index."""
    seen: set[str] = set()
    for one in sorted(look.gpus, key=lambda one: (one.index is None, one.index, one.uuid)):
        uuids = [one.uuid, *(mig.uuid for mig in one.mig)]
        if len({*uuids}) < len(uuids) or not seen.isdisjoint(uuids):
            tell(
                f"{gpu_label(one)}: another device has its uuid, or that of one of its MIG devices"
            )
        elif bad := next((u for u in uuids if not 0 < len(u) <= _UUID_MAX), None):
            tell(f"{gpu_label(one)}: {bad[:_UUID_MAX]!r} is no uuid: 1 to {_UUID_MAX} characters")
        else:
            seen.update(uuids)
            yield one


def _handed_out(
    gpus: Iterable[vocabulary.Gpu], strategy: config_gpus.MigStrategy, tell: NoteProblem
) -> Iterator[Candidate]:
    match strategy:
        case config_gpus.MigStrategy.NONE:
            chosen = [*gpus]
            yield from map(_of_whole, chosen)
            return
        case config_gpus.MigStrategy.SINGLE:
            chosen = _alike(_divided(gpus, tell), tell)
        case config_gpus.MigStrategy.MIXED:
            chosen = _divided(gpus, tell)
        case _ as never:
            assert_never(never)
    for one in chosen:
        yield from _of_parts(one) if one.mig else [_of_whole(one)]


def _divided(gpus: Iterable[vocabulary.Gpu], tell: NoteProblem) -> list[vocabulary.Gpu]:
    """Leave out those in MIG mode that are not divided: there is nothing to hand out."""
    found = []
    for one in gpus:
        if one.mig_enabled and not one.mig:
            tell(
                f"{gpu_label(one)}: MIG is enabled and it has no MIG device; nothing of it is given"
            )
        else:
            found.append(one)
    return found


def _alike(gpus: Sequence[vocabulary.Gpu], tell: NoteProblem) -> list[vocabulary.Gpu]:
    """Return the GPUs that are divided like most: under one name everything has to be alike.

    Of as many of each, those in MIG mode are taken, and then the first by profile.
    """
    kinds: dict[str, str] = {}
    for one in gpus:
        profiles = sorted({mig.profile for mig in one.mig})
        if len(profiles) > 1:
            tell(
                f"{gpu_label(one)}: has MIG devices of profiles {', '.join(profiles)}; migStrategy "
                "single needs one profile (mixed gives each a name)"
            )
        else:
            kinds[one.uuid] = "".join(profiles)
    counts = Counter(kinds.values())
    most = min(counts, key=lambda kind: (-counts[kind], not kind, kind), default="")
    for one in gpus:
        if kinds.get(one.uuid, most) != most:
            tell(
                f"{gpu_label(one)}: is {_kind(kinds[one.uuid])} where most are {_kind(most)}; "
                "migStrategy single needs all alike (mixed gives each a name)"
            )
    return [one for one in gpus if kinds.get(one.uuid) == most]


def _kind(profile: str) -> str:
    return f"divided into {profile}" if profile else "not in MIG mode"


def _of_whole(one: vocabulary.Gpu) -> Candidate:
    return Candidate(
        device=_whole(one), product=one.product, memory_mib=one.memory_mib, numa=one.numa_node
    )


def _of_parts(one: vocabulary.Gpu) -> Iterator[Candidate]:
    for _, mig, device in _parts(one):
        yield Candidate(
            device=device,
            product=one.product,
            profile=mig.profile,
            memory_mib=mig.memory_mib,
            numa=one.numa_node,
        )


def _whole(one: vocabulary.Gpu) -> gpu.Device:
    return gpu.Device(
        part=gpu.Part(gpu=one.uuid),
        uuid=one.uuid,
        index="" if one.index is None else str(one.index),
        minor=one.minor,
    )


def _parts(one: vocabulary.Gpu) -> Iterator[tuple[int, vocabulary.MigDevice, gpu.Device]]:
    for at, mig in enumerate(one.mig):
        number = at if mig.index is None else mig.index
        yield (
            number,
            mig,
            gpu.Device(
                part=gpu.Part(gpu=one.uuid, gi=mig.gi, ci=mig.ci),
                uuid=mig.uuid,
                index="" if one.index is None else f"{one.index}:{number}",
                minor=one.minor,
            ),
        )


def _name(one: Candidate, told: config_gpus.Gpus, tell: NoteProblem) -> str:
    """Return the resource that something is, or nothing after telling why it is none."""
    for naming in told.resources:
        pattern, text = (naming.mig, one.profile) if one.profile else (naming.product, one.product)
        if pattern and selectors.matches(pattern, text):
            return naming.name
    if not one.profile or told.mig_strategy is config_gpus.MigStrategy.SINGLE:
        return config_gpus.DEFAULT_NAME
    which = f"MIG device {one.device.index} ({one.device.uuid})"
    if not _PROFILE.fullmatch(one.profile):
        tell(f"{which}: its profile is not known ({one.profile[:40]!r}), so it has no name")
        return ""
    if _COMPUTE_SLICE.match(one.profile):
        tell(
            f"{which}: {one.profile} is a part of a GPU instance, which NVIDIA has no resource "
            "for; name it in resources, with mig: that profile"
        )
        return ""
    name = f"{config_gpus.DOMAIN}/mig-{one.profile.replace('+', '.')}"
    for problem in names.name_problems(name):
        tell(f"{which}: {problem}")
        return ""
    return name
