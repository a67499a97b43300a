"""Pure: From rules and seen nodes to units: what is one device for the kubelet, and what it gives.

A unit is one row of its group's entries, laid side by side (`pairing`). Unlike generic's, two equal
USB sticks are two units, and a USB entry can stand beside others.

Ids are made of what identifies the device and the number of the replica, never of its place in a
list or of its device number: other devices that come or go do not change them.
"""

import itertools
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Final

import msgspec

from muster import vocabulary
from muster_plugin.config import resources
from muster_plugin.discovery import matching
from muster_plugin.model import advertised, names, scan_result

DEVICES_MAX: Final = 10_000
"""Ids of one resource: a list of them has to fit into one message to the kubelet."""
TOTAL_DEVICES_MAX: Final = 50_000
"""Ids of all resources that are device nodes; of more each look would take seconds."""

Row = Mapping[int, tuple[resources.Entry, matching.Match]]
"""By the number of its entry, each match."""
Columns = Mapping[int, tuple[resources.Entry, tuple[matching.Match, ...]]]

_NAMED_MAX: Final = 5
_NOTHING_STANDS: Final[Mapping[str, str]] = {}


class PlannedResource(msgspec.Struct, frozen=True, kw_only=True):
    """A resource by the name it is advertised under, the rule it follows, its units by id."""

    name: vocabulary.Name
    rule: resources.Resource
    units: tuple[advertised.Unit, ...] = ()


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """What every resource consists of; and what is wrong with that."""

    offers: tuple[PlannedResource, ...] = ()
    problems: tuple[str, ...] = ()


def plan(
    resources: Sequence[resources.Resource],
    result: scan_result.ScanResult,
    *,
    current_names: Mapping[str, str] = _NOTHING_STANDS,
) -> Plan:
    """Say what every resource consists of now.

    A resource that matches name (`per_match`) is several offers, one for each match that is there.
    Of two matches under one name the one counts that `current_names` says had it before, by name.
    Raises nothing: what cannot be is left out, with a problem that says so.
    """
    index = matching.NodeIndex(result.nodes)
    problems = list(result.problems)
    offers: dict[str, PlannedResource] = {}
    remaining = TOTAL_DEVICES_MAX
    for resource in resources:
        problems.extend(f"{resource.name}: {warning}" for warning in resource.warnings())
        by_name = _by_name(
            resource, index, current_names, problems, limit=min(DEVICES_MAX, remaining)
        )
        for name, units in by_name.items():
            offer = PlannedResource(name=name, rule=resource, units=_kept(name, units, problems))
            remaining -= len(offer.units)
            if offers.setdefault(name, offer) is not offer:
                problems.append(f"{name}: given by two rules; the first counts")
    shared = _shared(resources, index)
    problems.extend(_overlaps(offers.values(), shared=shared))
    return Plan(offers=tuple(offers.values()), problems=tuple(dict.fromkeys(problems)))


def merged(first: Plan, second: Plan) -> Plan:
    """Return what both say; of two offers under one name the first counts, and that is told."""
    names_of_first = {offer.name for offer in first.offers}
    duplicates = [offer.name for offer in second.offers if offer.name in names_of_first]
    return Plan(
        offers=(
            *first.offers,
            *(offer for offer in second.offers if offer.name not in names_of_first),
        ),
        problems=(
            *first.problems,
            *second.problems,
            *(f"{name}: given by two rules; the first counts" for name in duplicates),
        ),
    )


def limited(plan: Plan, most: int, *, current_names: Collection[str]) -> Plan:
    """Return a plan of so many resources at most, those that stand already first."""
    if len(plan.offers) <= most:
        return plan
    offers = sorted(plan.offers, key=lambda offer: offer.name not in current_names)
    left = [offer.name for offer in offers[most:]]
    more = f" and {len(left) - _NAMED_MAX} more" if len(left) > _NAMED_MAX else ""
    problem = (
        f"{len(offers)} resources are more than the {most} that the limit of open files allows; "
        f"left out: {', '.join(left[:_NAMED_MAX])}{more}"
    )
    return Plan(offers=tuple(offers[:most]), problems=(*plan.problems, problem))


def _by_name(
    resource: resources.Resource,
    index: matching.NodeIndex,
    current_names: Mapping[str, str],
    problems: list[str],
    *,
    limit: int,
) -> dict[str, list[advertised.Unit]]:
    """Give the units of a resource under the name each is advertised under."""
    units: dict[str, list[advertised.Unit]] = {} if resource.per_match else {resource.name: []}
    keys = _keys(resource, index, problems)
    owners = _owners(resource.name, keys, current_names, problems) if resource.per_match else {}
    named_units = itertools.islice(_units(resource, keys, owners, problems), limit + 1)
    for at, (name, unit) in enumerate(named_units):
        if at == limit:
            bound = f"{DEVICES_MAX} devices"
            if limit < DEVICES_MAX:
                bound = f"{TOTAL_DEVICES_MAX} devices in all resources"
            problems.append(f"{resource.name}: more than {bound}; the rest is left out")
        else:
            units.setdefault(name, []).append(unit)
    return units


_Gives = tuple[str, str, str, bool]
_Keyed = Sequence[tuple[str, resources.Group, Row]]


def _keys(resource: resources.Resource, index: matching.NodeIndex, problems: list[str]) -> _Keyed:
    """Return every row under what its unit is called after, with its group."""
    taken: dict[str, int] = {}
    keys = []
    for number, group in enumerate(resource.groups):
        columns = group_columns(group, index, every_name=resource.per_match)
        problems.extend(
            f"{resource.name}: groups[{number}].{problem}" for problem in limiting_entries(columns)
        )
        taken_specs = set[frozenset[_Gives]]()
        for row in group_rows(columns):
            specs = frozenset(_gives(entry, match) for entry, match in row.values())
            key = _key(group, row)
            if specs in taken_specs:
                # to advertise it twice is what `count` is for
                problems.append(
                    f"{resource.name}: groups[{number}]: {key} would give what another device gives"
                )
            elif taken.setdefault(key, number) == number:
                keys.append((key, group, row))
                taken_specs.add(specs)
            else:
                problems.append(
                    f"{resource.name}: groups {taken[key]} and {number} both give {key}"
                )
    return keys


def _owners(
    rule: str, keys: _Keyed, current_names: Mapping[str, str], problems: list[str]
) -> dict[str, str]:
    """Return by its key which match has which name, where each match is a resource."""
    keys_by_name: dict[str, dict[str, None]] = {}
    for key, _, _ in keys:
        keys_by_name.setdefault(names.derived_name(rule, _short(key)), {})[key] = None
    owners = {}
    for name, rivals in keys_by_name.items():
        owner_before = current_names.get(name, "")
        owner = owner_before if owner_before in rivals else next(iter(rivals))
        owners[owner] = name
        problems.extend(
            f"{name}: {owner} and {key} would both be named so" for key in rivals if key != owner
        )
    return owners


def _units(
    resource: resources.Resource, keys: _Keyed, owners: Mapping[str, str], problems: list[str]
) -> Iterator[tuple[str, advertised.Unit]]:
    for key, group, row in keys:
        name = owners.get(key, "") if resource.per_match else resource.name
        for replica in range(group.count if name else 0):
            yield name, _unit(key, replica, row, problems)


def _key(group: resources.Group, row: Row) -> str:
    """Return what a unit is called after.

    A required entry with limit 1 is in one unit only, so its match alone is enough; whatever else
    comes or goes, the unit keeps its name. Without such an entry all matches make the name.
    """
    for kind in (resources.NodeType.DEVICE, resources.NodeType.MOUNT):
        for number, entry in enumerate(group.devices):
            if entry.type is kind and entry.limit == 1 and not entry.optional:
                return row[number][1].key
    return "+".join(dict.fromkeys(match.key for _, match in row.values()))


def _unit(key: str, replica: int, row: Row, problems: list[str]) -> advertised.Unit:
    devices: dict[str, advertised.DeviceSpec] = {}
    mounts: dict[str, advertised.Mount] = {}
    for entry, match in row.values():
        inside = _inside(entry, match)
        before = devices.get(inside) or mounts.get(inside)
        if before is not None:
            if before.host_path != match.path:
                problems.append(
                    f"{before.host_path} and {match.path} would both be {inside} in the container"
                )
            continue
        match entry.type:
            case resources.NodeType.DEVICE:
                devices[inside] = advertised.DeviceSpec(
                    host_path=match.path, container_path=inside, permissions=entry.permissions
                )
            case resources.NodeType.MOUNT:
                mounts[inside] = advertised.Mount(
                    host_path=match.path, container_path=inside, read_only=entry.read_only
                )
    return advertised.Unit(
        id=names.device_id(key, replica),
        physical=key,
        identity={number: match.identity for number, (_, match) in row.items()},
        devices=tuple(devices.values()),
        mounts=tuple(mounts.values()),
        nodes=tuple(dict.fromkeys(m.node.path for e, m in row.values() if _is_device(e))),
        numa=_numa(match.node.numa for entry, match in row.values() if _is_device(entry)),
    )


def _gives(entry: resources.Entry, match: matching.Match) -> _Gives:
    return _inside(entry, match), match.path, entry.permissions, entry.read_only


def _inside(entry: resources.Entry, match: matching.Match) -> str:
    """Return where the container sees it; a mount path that ends with / is a directory."""
    if not entry.mount_path:
        return match.path
    if entry.mount_path.endswith("/"):
        return entry.mount_path + match.path.rpartition("/")[2]
    return entry.mount_path


def _numa(values: Iterable[int | None]) -> int | None:
    """Return the NUMA node that all agree on; no hint is better than one that is half true."""
    numbers = {numa for numa in values if numa is not None and numa >= 0}
    return numbers.pop() if len(numbers) == 1 else None


def _kept(
    name: str, units: Iterable[advertised.Unit], problems: list[str]
) -> tuple[advertised.Unit, ...]:
    """Sort by id, and refuse ids that stand twice."""
    by_id: dict[str, advertised.Unit] = {}
    for unit in sorted(units, key=lambda unit: (unit.id, unit.physical)):
        first = by_id.setdefault(unit.id, unit)
        if first is not unit:
            problems.append(f"{name}: {first.physical} and {unit.physical} have one id, {unit.id}")
    return tuple(by_id.values())


def _overlaps(offers: Iterable[PlannedResource], *, shared: frozenset[str]) -> Iterator[str]:
    """Say which resources hand out the same device nodes."""
    first: dict[str, str] = {}
    both: dict[tuple[str, str], dict[str, None]] = {}
    for offer in offers:
        for path in dict.fromkeys(path for unit in offer.units for path in unit.nodes):
            other = first.setdefault(path, offer.name)
            if other != offer.name and path not in shared:
                both.setdefault((other, offer.name), {})[path] = None
    for (first_name, second_name), paths in both.items():
        more = f" and {len(paths) - _NAMED_MAX} more" if len(paths) > _NAMED_MAX else ""
        listed = ", ".join([*paths][:_NAMED_MAX])
        yield f"{first_name} and {second_name} both hand out {listed}{more}"


def _shared(resources: Iterable[resources.Resource], index: matching.NodeIndex) -> frozenset[str]:
    """Return the nodes that rules say may belong to several resources."""
    return frozenset(
        match.node.path
        for resource in resources
        for _, entry in resource.nodes()
        if entry.shared
        for match in matching.matches(entry, index)
    )


def _is_device(entry: resources.Entry) -> bool:
    return entry.type is resources.NodeType.DEVICE


def _short(key: str) -> str:
    return key.removeprefix(matching.DEV).removeprefix("/")


def group_columns(
    group: resources.Group, index: matching.NodeIndex, *, every_name: bool
) -> Columns:
    """Return what each entry of a group finds; an optional one that finds nothing is left out."""
    columns = {
        number: (entry, matching.matches(entry, index, every_name=every_name))
        for number, entry in enumerate(group.devices)
    }
    return {n: column for n, column in columns.items() if column[1] or not column[0].optional}


def group_rows(columns: Columns) -> Iterator[Row]:
    """Lay the matches of a group's entries side by side."""
    for at in range(_length(columns)):
        yield {n: (entry, matches[at % len(matches)]) for n, (entry, matches) in columns.items()}


def limiting_entries(columns: Columns) -> Iterator[str]:
    """Say which optional entry, now that it is there, leaves fewer units than without it."""
    length = _length(columns)
    for number, (entry, matches) in columns.items():
        if entry.optional and len(matches) * entry.limit == length:
            without = _length({n: column for n, column in columns.items() if n != number})
            if without > length:
                yield (
                    f"devices[{number}]: optional, and yet it is what leaves {length} of {without} "
                    "devices; raise its limit"
                )


def _length(columns: Columns) -> int:
    reusable = min((len(matches) * entry.limit for entry, matches in columns.values()), default=0)
    return min(reusable, max((len(matches) for _, matches in columns.values()), default=0))
