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
    original_name: str
    candidate: naming.Candidate
    replicas: int | None = None


class _Made(msgspec.Struct, frozen=True, kw_only=True):
    """What becomes of one look."""

    gpus: tuple[vocabulary.Gpu, ...] = ()
    shares: tuple[_Share, ...] = ()
    problems: tuple[str, ...] = ()


def plan(scan: gpu.Scan, rules: gpus.Gpus) -> resource_plan.Plan:
    """Say what every resource of GPUs consists of now.

    A resource with a name of the configuration's, or `nvidia.com/gpu`, is there even without
    devices; one that a MIG profile names is not.
    """
    devices = _made(scan, rules)
    problems = [*devices.problems]
    always_advertised = rules.always_advertised()
    shares_by_name: dict[str, list[_Share]] = {name: [] for name in always_advertised}
    for share in devices.shares:
        shares_by_name.setdefault(share.name, []).append(share)
    planned = tuple(
        resource_plan.PlannedResource(
            name=name,
            rule=_rule(name, rules, is_always_advertised=name in always_advertised),
            units=_units(name, shares, problems),
        )
        for name, shares in shares_by_name.items()
    )
    return resource_plan.Plan(offers=planned, problems=tuple(dict.fromkeys(problems)))


def node(scan: gpu.Scan, rules: gpus.Gpus) -> vocabulary.GpuNode:
    """Return what a snapshot tells about the GPUs; what is excluded is not among them."""
    devices = _made(scan, rules)
    resources = (
        vocabulary.GpuResource(
            name=share.name,
            was=share.original_name,
            replicas=share.replicas or 1,
            profile=share.candidate.profile,
        )
        for share in devices.shares
    )
    return vocabulary.GpuNode(
        gpus=devices.gpus,
        resources=tuple(dict.fromkeys(resources)),
        mig_strategy=rules.mig_strategy.value,
        driver_version=scan.driver_version,
        cuda_version=scan.cuda_version,
        machine=scan.machine,
        problem="; ".join(devices.problems)[:_TEXT_MAX],
        simulated=scan.simulated,
    )


def _made(scan: gpu.Scan, rules: gpus.Gpus) -> _Made:
    if scan.driver is not gpu.Driver.READY:
        why = scan.problem or "no more is known"
        return _Made(problems=(f"no GPU can be used: {scan.driver}: {why}",))
    problems = [scan.problem] if scan.problem else []
    for unreadable in scan.unreadable:
        uuid = f" ({unreadable.uuid})" if unreadable.uuid else ""
        problems.append(f"GPU {unreadable.index}{uuid} cannot be read: {unreadable.error}")
    if not scan.gpus:
        if not scan.unreadable:
            problems.append("the driver is ready, and there is no GPU")
        return _Made(problems=tuple(problems))
    included = naming.included_gpus(scan, rules, problems.append)
    candidates_by_name = naming.by_name(included, rules, problems.append)
    for at, shared in enumerate(rules.sharing.resources):
        if shared.name not in candidates_by_name:
            problems.append(f"sharing.resources[{at}]: there is no {shared.name} here")
    shares = [
        share
        for name, candidates in candidates_by_name.items()
        for share in _shares(name, candidates, rules.sharing, scan, problems)
    ]
    return _Made(gpus=included, shares=tuple(shares), problems=tuple(dict.fromkeys(problems)))


def _shares(
    name: str,
    candidates: Sequence[naming.Candidate],
    sharing: gpus.Sharing,
    scan: gpu.Scan,
    problems: list[str],
) -> Iterator[_Share]:
    """Share the devices of one resource: each entry of its name takes of those that are left."""
    remaining = {candidate.device.uuid: candidate for candidate in candidates}
    for at, shared in enumerate(sharing.resources):
        if shared.name != name:
            continue
        key = f"sharing.resources[{at}]"
        for uuid in _chosen(shared, key, candidates, remaining, scan, problems):
            candidate = remaining.pop(uuid)
            yield _Share(
                name=sharing.advertised_name(shared),
                original_name=name,
                candidate=candidate,
                replicas=_replicas(shared, key, candidate, problems),
            )
    yield from (
        _Share(name=name, original_name=name, candidate=candidate)
        for candidate in remaining.values()
    )


def _chosen(
    shared: gpus.Shared,
    key: str,
    candidates: Sequence[naming.Candidate],
    remaining: Iterable[str],
    scan: gpu.Scan,
    problems: list[str],
) -> list[str]:
    """Return the uuids of the devices that an entry shares, of those that are left."""
    free = [*remaining]
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
            return _listed(listed, shared.name, f"{key}.devices", candidates, free, scan, problems)


def _listed(
    listed: Sequence[int | str],
    name: str,
    key: str,
    candidates: Sequence[naming.Candidate],
    free: Sequence[str],
    scan: gpu.Scan,
    problems: list[str],
) -> list[str]:
    selected: dict[str, int] = {}
    for at, text in enumerate(listed):
        selector = selectors.parse(text)
        matching = [
            candidate.device.uuid
            for candidate in candidates
            if selectors.selects(selector, candidate.device, candidate.product)
        ]
        if not matching and not naming.is_unreadable(selector, scan):
            problems.append(f"{key}[{at}]: {text} is no device of {name}")
        for uuid in matching:
            if uuid in selected:
                problems.append(f"{key}[{at}]: {uuid} is named by [{selected[uuid]}] already")
            elif uuid not in free:
                problems.append(f"{key}[{at}]: {uuid} is shared by an earlier entry already")
            else:
                selected[uuid] = at
    return [*selected]


def _replicas(
    shared: gpus.Shared, key: str, candidate: naming.Candidate, problems: list[str]
) -> int:
    if shared.replicas is not None:
        return shared.replicas
    if candidate.memory_mib is None:
        problems.append(
            f"{key}: the memory of {candidate.device.uuid} is not known; it counts as 1 GB"
        )
        return 1
    wanted = max(candidate.memory_mib // _MIB_PER_REPLICA, 1)
    if wanted > gpus.REPLICAS_MAX:
        problems.append(
            f"{key}: {candidate.device.uuid} would be {wanted} replicas; at most {gpus.REPLICAS_MAX}"
        )
    return min(wanted, gpus.REPLICAS_MAX)


def _units(name: str, shares: Iterable[_Share], problems: list[str]) -> tuple[advertised.Unit, ...]:
    """Return the units of one resource by id, as many as the kubelet can be told."""
    made: list[advertised.Unit] = []
    for share in shares:
        uuid = share.candidate.device.uuid
        numbered = (f"{uuid}::{number}" for number in range(share.replicas or 0))
        made.extend(
            advertised.Unit(
                id=device_id,
                physical=uuid,
                identity={0: uuid},
                numa=share.candidate.numa,
                gpu=share.candidate.device,
            )
            for device_id in (numbered if share.replicas else (uuid,))
        )
    if len(made) > resource_plan.DEVICES_MAX:
        problems.append(
            f"{name}: more than {resource_plan.DEVICES_MAX} devices; the rest is left out"
        )
    return tuple(sorted(made[: resource_plan.DEVICES_MAX], key=lambda unit: unit.id))


def _rule(name: str, rules: gpus.Gpus, *, is_always_advertised: bool) -> resources.Resource:
    """Return how a resource is kept, in the words of device nodes.

    One that lasts only as long as its devices is `per_match`, and so has no name of its own.
    """
    domain = name.partition("/")[0]
    return resources.Resource(
        name=name if is_always_advertised else f"{domain}/{names.WILDCARD}",
        groups=(),
        per_match=not is_always_advertised,
        env="",
        expect=rules.expect if is_always_advertised else None,
        grace_s=rules.grace_s,
        registration=rules.registration,
    )
