"""Pure: From what was seen of GPUs and the rules to units: what is one device for the kubelet.

A device that is not shared is one unit, under its uuid; a shared one is several, `<uuid>::0` and so
on, as with NVIDIA's plugin (internal/rm/devices.go, v0.20). Nothing is raised: what cannot be is
left out, with a problem that says so.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Final

import msgspec

from muster import vocabulary
from muster_plugin.config import gpus, resources
from muster_plugin.discovery import resource_plan
from muster_plugin.gpu import naming
from muster_plugin.model import advertised, gpu, names, selectors

_MIB_PER_REPLICA: Final = 1000
"""What the iktos fork calls a GB (cmd/nvidia-device-plugin, replicas of -1)."""
_TEXT_MAX: Final = 2048


class _Share(msgspec.Struct, frozen=True, kw_only=True):
    """A device under the name it is advertised by; no `replicas` if it is not shared."""

    name: str
    was: str
    one: naming.Candidate
    replicas: int | None = None


class _Made(msgspec.Struct, frozen=True, kw_only=True):
    """What becomes of one look."""

    gpus: tuple[vocabulary.Gpu, ...] = ()
    shares: tuple[_Share, ...] = ()
    problems: tuple[str, ...] = ()


def plan(look: gpu.Scan, told: gpus.Gpus) -> resource_plan.Plan:
    """Say what every resource of GPUs consists of now.

    A resource with a name of the configuration's, or `nvidia.com/gpu`, is there even without
    devices; one that a MIG profile names is not.
    """
    made = _made(look, told)
    problems = [*made.problems]
    lasting = told.lasting()
    offered: dict[str, list[_Share]] = {name: [] for name in lasting}
    for share in made.shares:
        offered.setdefault(share.name, []).append(share)
    offers = tuple(
        resource_plan.PlannedResource(
            name=name,
            rule=_rule(name, told, is_lasting=name in lasting),
            units=_units(name, shares, problems),
        )
        for name, shares in offered.items()
    )
    return resource_plan.Plan(offers=offers, problems=tuple(dict.fromkeys(problems)))


def node(look: gpu.Scan, told: gpus.Gpus) -> vocabulary.GpuNode:
    """Return what a snapshot tells about the GPUs; what is excluded is not among them."""
    made = _made(look, told)
    resources = (
        vocabulary.GpuResource(
            name=share.name,
            was=share.was,
            replicas=share.replicas or 1,
            profile=share.one.profile,
        )
        for share in made.shares
    )
    return vocabulary.GpuNode(
        gpus=made.gpus,
        resources=tuple(dict.fromkeys(resources)),
        mig_strategy=told.mig_strategy.value,
        driver_version=look.driver_version,
        cuda_version=look.cuda_version,
        machine=look.machine,
        problem="; ".join(made.problems)[:_TEXT_MAX],
        simulated=look.simulated,
    )


def _made(look: gpu.Scan, told: gpus.Gpus) -> _Made:
    if look.driver is not gpu.Driver.READY:
        why = look.problem or "no more is known"
        return _Made(problems=(f"no GPU can be used: {look.driver}: {why}",))
    problems = [look.problem] if look.problem else []
    for lost in look.unreadable:
        uuid = f" ({lost.uuid})" if lost.uuid else ""
        problems.append(f"GPU {lost.index}{uuid} cannot be read: {lost.error}")
    if not look.gpus:
        if not look.unreadable:
            problems.append("the driver is ready, and there is no GPU")
        return _Made(problems=tuple(problems))
    gpus = naming.included_gpus(look, told, problems.append)
    found = naming.by_name(gpus, told, problems.append)
    for at, shared in enumerate(told.sharing.resources):
        if shared.name not in found:
            problems.append(f"sharing.resources[{at}]: there is no {shared.name} here")
    shares = [
        share
        for name, candidates in found.items()
        for share in _shares(name, candidates, told.sharing, look, problems)
    ]
    return _Made(gpus=gpus, shares=tuple(shares), problems=tuple(dict.fromkeys(problems)))


def _shares(
    name: str,
    candidates: Sequence[naming.Candidate],
    sharing: gpus.Sharing,
    look: gpu.Scan,
    problems: list[str],
) -> Iterator[_Share]:
    """Share the devices of one resource: each entry of its name takes of those that are left."""
    left = {one.device.uuid: one for one in candidates}
    for at, shared in enumerate(sharing.resources):
        if shared.name != name:
            continue
        key = f"sharing.resources[{at}]"
        for uuid in _chosen(shared, key, candidates, left, look, problems):
            one = left.pop(uuid)
            yield _Share(
                name=sharing.called(shared),
                was=name,
                one=one,
                replicas=_replicas(shared, key, one, problems),
            )
    yield from (_Share(name=name, was=name, one=one) for one in left.values())


def _chosen(
    shared: gpus.Shared,
    key: str,
    candidates: Sequence[naming.Candidate],
    left: Iterable[str],
    look: gpu.Scan,
    problems: list[str],
) -> list[str]:
    """Return the uuids of the devices that an entry shares, of those that are left."""
    free = [*left]
    match shared.devices:
        case None:
            return free
        case int() as count:
            if count > len(free):
                problems.append(
                    f"{key}.devices: {count} of {shared.name} are to be shared, {len(free)} can be"
                )
            return free[:count]
        case listed:
            return _listed(listed, shared.name, f"{key}.devices", candidates, free, look, problems)


def _listed(
    listed: Sequence[int | str],
    name: str,
    key: str,
    candidates: Sequence[naming.Candidate],
    free: Sequence[str],
    look: gpu.Scan,
    problems: list[str],
) -> list[str]:
    chosen: dict[str, int] = {}
    for at, given in enumerate(listed):
        reference = selectors.parse(given)
        meant = [
            one.device.uuid
            for one in candidates
            if selectors.selects(reference, one.device, one.product)
        ]
        if not meant and not naming.is_unreadable(reference, look):
            problems.append(f"{key}[{at}]: {given} is no device of {name}")
        for uuid in meant:
            if uuid in chosen:
                problems.append(f"{key}[{at}]: {uuid} is named by [{chosen[uuid]}] already")
            elif uuid not in free:
                problems.append(f"{key}[{at}]: {uuid} is shared by an earlier entry already")
            else:
                chosen[uuid] = at
    return [*chosen]


def _replicas(shared: gpus.Shared, key: str, one: naming.Candidate, problems: list[str]) -> int:
    if shared.replicas is not None:
        return shared.replicas
    if one.memory_mib is None:
        problems.append(f"{key}: the memory of {one.device.uuid} is not known; it counts as 1 GB")
        return 1
    wanted = max(one.memory_mib // _MIB_PER_REPLICA, 1)
    if wanted > gpus.REPLICAS_MAX:
        problems.append(
            f"{key}: {one.device.uuid} would be {wanted} replicas; at most {gpus.REPLICAS_MAX}"
        )
    return min(wanted, gpus.REPLICAS_MAX)


def _units(name: str, shares: Iterable[_Share], problems: list[str]) -> tuple[advertised.Unit, ...]:
    """Return the units of one resource by id, as many as the kubelet can be told."""
    made: list[advertised.Unit] = []
    for share in shares:
        uuid = share.one.device.uuid
        numbered = (f"{uuid}::{number}" for number in range(share.replicas or 0))
        made.extend(
            advertised.Unit(
                id=device_id,
                physical=uuid,
                identity={0: uuid},
                numa=share.one.numa,
                gpu=share.one.device,
            )
            for device_id in (numbered if share.replicas else (uuid,))
        )
    if len(made) > resource_plan.DEVICES_MAX:
        problems.append(
            f"{name}: more than {resource_plan.DEVICES_MAX} devices; the rest is left out"
        )
    return tuple(sorted(made[: resource_plan.DEVICES_MAX], key=lambda unit: unit.id))


def _rule(name: str, told: gpus.Gpus, *, is_lasting: bool) -> resources.Resource:
    """Return how a resource is kept, in the words of device nodes.

    One that lasts only as long as its devices is `per_match`, and so has no name of its own.
    """
    domain = name.partition("/")[0]
    return resources.Resource(
        name=name if is_lasting else f"{domain}/{names.WILDCARD}",
        groups=(),
        per_match=not is_lasting,
        env="",
        expect=told.expect if is_lasting else None,
        grace_s=told.grace_s,
        registration=told.registration,
    )
