"""Pure: plans the devices of GPU resources: GPUs, MIG devices, and replicas of shared devices.

A device that is not shared is one unit with the uuid as its id. A shared device has a unit for each
replica, `<uuid>::0` and so on, as in NVIDIA's plugin (internal/rm/devices.go, v0.20). These
functions never raise: a device that cannot be advertised is left out, and a problem names it.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Final

import msgspec

from muster import vocabulary
from muster_plugin.config import gpus, resources
from muster_plugin.discovery import resource_plan
from muster_plugin.gpu import naming
from muster_plugin.model import advertised, gpu

_MIB_PER_REPLICA: Final = 1000
"""The MiB of memory for each replica if `replicas` is -1 (iktos fork, cmd/nvidia-device-plugin)."""
_TEXT_MAX: Final = 2048


class _Share(msgspec.Struct, frozen=True, kw_only=True):
    """A device with its advertised name; `replicas` is None if the device is not shared."""

    name: str
    original_name: str
    candidate: naming.Candidate
    replicas: int | None = None


class _Shares(msgspec.Struct, frozen=True, kw_only=True):
    """The included GPUs of one scan, how their devices are shared, and the problems."""

    gpus: tuple[vocabulary.Gpu, ...] = ()
    shares: tuple[_Share, ...] = ()
    problems: tuple[str, ...] = ()


def plan(scan: gpu.Scan, rules: gpus.Gpus) -> resource_plan.Plan:
    """Return the current units of every GPU resource, and the problems.

    The resources in `rules.always_advertised()` are planned even without devices; other resources,
    such as those named after a MIG profile, only with devices.
    """
    made = _make_shares(scan, rules)
    problems = [*made.problems]
    always_advertised = rules.always_advertised()
    by_name: dict[str, list[_Share]] = {name: [] for name in always_advertised}
    for share in made.shares:
        by_name.setdefault(share.name, []).append(share)
    planned = tuple(
        resource_plan.PlannedResource(
            name=name,
            rule=_rule(name, rules, is_permanent=name in always_advertised),
            units=_units(name, shares, problems),
        )
        for name, shares in by_name.items()
    )
    return resource_plan.Plan(resources=planned, problems=tuple(dict.fromkeys(problems)))


def node(scan: gpu.Scan, rules: gpus.Gpus) -> vocabulary.GpuNode:
    """Return the description of the GPUs for a snapshot; excluded GPUs are left out."""
    made = _make_shares(scan, rules)
    resources = (
        vocabulary.GpuResource(
            name=share.name,
            was=share.original_name,
            replicas=share.replicas or 1,
            profile=share.candidate.profile,
        )
        for share in made.shares
    )
    return vocabulary.GpuNode(
        gpus=made.gpus,
        resources=tuple(dict.fromkeys(resources)),
        mig_strategy=rules.mig_strategy.value,
        driver_version=scan.driver_version,
        cuda_version=scan.cuda_version,
        machine=scan.machine,
        problem="; ".join(made.problems)[:_TEXT_MAX],
        simulated=scan.simulated,
    )


def _make_shares(scan: gpu.Scan, rules: gpus.Gpus) -> _Shares:
    if scan.driver is not gpu.Driver.READY:
        why = scan.problem or "no details are known"
        return _Shares(problems=(f"no GPU can be used ({scan.driver}): {why}",))
    problems = [scan.problem] if scan.problem else []
    for failed in scan.unreadable:
        uuid = f" ({failed.uuid})" if failed.uuid else ""
        problems.append(f"GPU {failed.index}{uuid} cannot be read: {failed.error}")
    if not scan.gpus:
        if not scan.unreadable:
            problems.append("the driver is ready, but there is no GPU")
        return _Shares(problems=tuple(problems))
    included = naming.included_gpus(scan, rules, problems.append)
    by_name = naming.by_name(included, rules, problems.append)
    for at, shared in enumerate(rules.sharing.resources):
        if shared.name not in by_name:
            problems.append(f"sharing.resources[{at}]: there is no {shared.name} on this node")
    sharer = _Sharer(rules.sharing, scan, problems)
    shares = [share for name, devices in by_name.items() for share in sharer.shares(name, devices)]
    return _Shares(gpus=included, shares=tuple(shares), problems=tuple(dict.fromkeys(problems)))


class _Sharer:
    """Shares the devices of each resource as configured; collects `problems`."""

    def __init__(self, sharing: gpus.Sharing, scan: gpu.Scan, problems: list[str]) -> None:
        self._sharing = sharing
        self._scan = scan
        self._problems = problems

    def shares(self, name: str, candidates: Sequence[naming.Candidate]) -> Iterator[_Share]:
        """Yield a share for each device of a resource; shared devices come first."""
        remaining = {candidate.device.uuid: candidate for candidate in candidates}
        for at, shared in enumerate(self._sharing.resources):
            if shared.name != name:
                continue
            key = f"sharing.resources[{at}]"
            for uuid in self._selected(shared, key, candidates, [*remaining]):
                candidate = remaining.pop(uuid)
                yield _Share(
                    name=self._sharing.advertised_name(shared),
                    original_name=name,
                    candidate=candidate,
                    replicas=self._replicas(shared, key, candidate),
                )
        for candidate in remaining.values():
            yield _Share(name=name, original_name=name, candidate=candidate)

    def _selected(
        self,
        shared: gpus.Shared,
        key: str,
        candidates: Sequence[naming.Candidate],
        free: Sequence[str],
    ) -> Iterable[str]:
        """Return the uuids of the free devices that an entry shares."""
        match shared.devices:
            case None:
                return free
            case int() as count:
                if count > len(free):
                    wanted = f"{count} of {shared.name} should be shared"
                    self._problems.append(f"{key}.devices: {wanted}, but only {len(free)} can be")
                return free[:count]
            case listed:
                return self._listed(listed, shared.name, f"{key}.devices", candidates, free)

    def _listed(
        self,
        listed: Sequence[int | str],
        name: str,
        key: str,
        candidates: Sequence[naming.Candidate],
        free: Sequence[str],
    ) -> Iterable[str]:
        selected: dict[str, int] = {}
        for at, text in enumerate(listed):
            selector = gpu.parse_selector(text)
            matching = [
                candidate.device.uuid
                for candidate in candidates
                if gpu.selects(selector, candidate.device, candidate.product)
            ]
            if not matching and not naming.is_unreadable(selector, self._scan):
                self._problems.append(f"{key}[{at}]: {text} is not a device of {name}")
            for uuid in matching:
                if uuid in selected:
                    problem = f"{uuid} is already named by [{selected[uuid]}]"
                    self._problems.append(f"{key}[{at}]: {problem}")
                elif uuid not in free:
                    problem = f"{uuid} is already shared by an earlier entry"
                    self._problems.append(f"{key}[{at}]: {problem}")
                else:
                    selected[uuid] = at
        return selected

    def _replicas(self, shared: gpus.Shared, key: str, candidate: naming.Candidate) -> int:
        if shared.replicas is not None:
            return shared.replicas
        uuid = candidate.device.uuid
        if candidate.memory_mib is None:
            problem = f"the memory of {uuid} is unknown and counts as 1 GB"
            self._problems.append(f"{key}: {problem}")
            return 1
        wanted = max(candidate.memory_mib // _MIB_PER_REPLICA, 1)
        if wanted > gpus.REPLICAS_MAX:
            problem = f"{uuid} would have {wanted} replicas; {gpus.REPLICAS_MAX} are allowed"
            self._problems.append(f"{key}: {problem}")
        return min(wanted, gpus.REPLICAS_MAX)


def _units(name: str, shares: Iterable[_Share], problems: list[str]) -> tuple[advertised.Unit, ...]:
    """Return at most `DEVICES_MAX` units of one resource, sorted by id; report it if more exist."""
    units: list[advertised.Unit] = []
    for share in shares:
        uuid = share.candidate.device.uuid
        numbered = (f"{uuid}::{number}" for number in range(share.replicas or 0))
        units.extend(
            advertised.Unit(
                id=device_id,
                physical=uuid,
                identity={0: uuid},
                numa=share.candidate.numa,
                gpu=share.candidate.device,
            )
            for device_id in (numbered if share.replicas else (uuid,))
        )
    most = resource_plan.DEVICES_MAX
    if len(units) > most:
        problems.append(f"{name}: more than {most} devices; the others are left out")
    return tuple(sorted(units[:most], key=lambda unit: unit.id))


def _rule(name: str, rules: gpus.Gpus, *, is_permanent: bool) -> resources.Resource:
    """Return the rule of a GPU resource in the form of a device-node rule.

    If the resource exists only as long as its devices, the rule is `per_match` and its name ends
    in a wildcard.
    """
    domain = name.partition("/")[0]
    return resources.Resource(
        name=name if is_permanent else f"{domain}/{advertised.WILDCARD}",
        groups=(),
        per_match=not is_permanent,
        env="",
        expect=rules.expect if is_permanent else None,
        grace_s=rules.grace_s,
        registration=rules.registration,
    )
