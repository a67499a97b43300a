"""Pure: plans which scanned device nodes each resource advertises, and under which device ids.

A unit corresponds to one device id; it has one match for each entry of its group. Unlike in
generic-device-plugin, two identical USB sticks are two units, and a group can contain USB entries
and other entries. Each match is used in at most `limit` rows (a row is a unit before it has an id),
so the shortest list of matches limits the number of rows. A group has at most as many rows as its
longest list has matches. An optional entry without matches is left out; with matches it counts like
any other (generic-device-plugin, deviceplugin/path.go).

An id consists of the device's stable name and the number of the replica, never of the device's
position in a list or its device number. Other devices therefore do not change it when they appear
or disappear.
"""

import itertools
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Final

import msgspec

from muster import vocabulary
from muster_plugin.config import resources
from muster_plugin.discovery import scan_result
from muster_plugin.model import advertised, errors

DEVICES_MAX: Final = 10_000
"""The maximum number of ids of a rule, so that a resource's list fits into one message."""
TOTAL_DEVICES_MAX: Final = 50_000
"""The maximum number of ids for all device nodes; with more, each scan would take seconds."""

Row = Mapping[int, tuple[resources.Entry, scan_result.Match]]
"""One match for each entry of a group, by the entry's number."""
Columns = Mapping[int, tuple[resources.Entry, tuple[scan_result.Match, ...]]]

_LISTED_MAX: Final = 5
_NO_NAMES: Final[Mapping[str, str]] = {}


class PlannedResource(msgspec.Struct, frozen=True, kw_only=True):
    """A resource with its advertised name, its rule, and its units, sorted by id."""

    name: vocabulary.Name
    rule: resources.Resource
    units: tuple[advertised.Unit, ...] = ()


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """The planned units of every resource, and the problems found while planning."""

    resources: tuple[PlannedResource, ...] = ()
    problems: tuple[str, ...] = ()


def plan(
    configured: Sequence[resources.Resource],
    result: scan_result.ScanResult,
    *,
    current_names: Mapping[str, str] = _NO_NAMES,
) -> Plan:
    """Plan the present units of every resource.

    A resource with `per_match` is several planned resources, one for each match. If two matches
    would have the same name, the match that already has it keeps it (`current_names`). Never
    raises: an impossible unit is left out, with a problem that names it.
    """
    index = scan_result.NodeIndex(result.nodes)
    problems = list(result.problems)
    planned: dict[str, PlannedResource] = {}
    remaining = TOTAL_DEVICES_MAX
    for rule in configured:
        problems.extend(f"{rule.name}: {warning}" for warning in rule.warnings())
        limit = min(DEVICES_MAX, remaining)
        for name, units in _by_name(rule, index, current_names, problems, limit=limit).items():
            unique = _unique_units(name, units, problems)
            remaining -= len(unique)
            resource = PlannedResource(name=name, rule=rule, units=unique)
            if planned.setdefault(name, resource) is not resource:
                problems.append(f"{name}: two rules define it; the first applies")
    shared = _shared(configured, index)
    problems.extend(_overlaps(planned.values(), shared=shared))
    return Plan(resources=tuple(planned.values()), problems=tuple(dict.fromkeys(problems)))


def merged(first: Plan, second: Plan) -> Plan:
    """Combine two plans; of two resources with the same name keep the first, and add a problem."""
    names_of_first = {resource.name for resource in first.resources}
    added = [resource for resource in second.resources if resource.name not in names_of_first]
    duplicates = [
        f"{resource.name}: two rules define it; the first applies"
        for resource in second.resources
        if resource.name in names_of_first
    ]
    return Plan(
        resources=(*first.resources, *added),
        problems=(*first.problems, *second.problems, *duplicates),
    )


def limited(plan: Plan, most: int, *, current_names: Collection[str]) -> Plan:
    """Limit a plan to `most` resources; prefer resources that are already advertised."""
    if len(plan.resources) <= most:
        return plan
    planned = sorted(plan.resources, key=lambda resource: resource.name not in current_names)
    left_out = errors.listed([resource.name for resource in planned[most:]], most=_LISTED_MAX)
    problem = (
        f"{len(planned)} resources are more than the {most} that one plugin serves with its limit "
        f"of open files; left out: {left_out}"
    )
    return Plan(resources=tuple(planned[:most]), problems=(*plan.problems, problem))


def _by_name(
    resource: resources.Resource,
    index: scan_result.NodeIndex,
    current_names: Mapping[str, str],
    problems: list[str],
    *,
    limit: int,
) -> dict[str, list[advertised.Unit]]:
    """Return the units of a resource by the name under which they are advertised."""
    units: dict[str, list[advertised.Unit]] = {} if resource.per_match else {resource.name: []}
    keys = _keyed_rows(resource, index, problems)
    owners = (
        _names_by_key(resource.name, keys, current_names, problems) if resource.per_match else {}
    )
    named_units = itertools.islice(_units(resource, keys, owners, problems), limit + 1)
    for at, (name, unit) in enumerate(named_units):
        if at == limit:
            bound = f"{DEVICES_MAX} devices"
            if limit < DEVICES_MAX:
                bound = f"{TOTAL_DEVICES_MAX} devices in all resources"
            problems.append(f"{resource.name}: more than {bound}; the others are left out")
        else:
            units.setdefault(name, []).append(unit)
    return units


_Spec = tuple[str, str, str, bool]
_KeyedRows = Sequence[tuple[str, resources.Group, Row]]


def _keyed_rows(
    resource: resources.Resource, index: scan_result.NodeIndex, problems: list[str]
) -> _KeyedRows:
    """Return each row with its group and its unit's key; leave out and report duplicates."""
    taken: dict[str, int] = {}
    keys = []
    for number, group in enumerate(resource.groups):
        columns = group_columns(group, index, every_name=resource.per_match)
        problems.extend(
            f"{resource.name}: groups[{number}].{problem}" for problem in limiting_entries(columns)
        )
        taken_specs = set[frozenset[_Spec]]()
        for row in group_rows(columns):
            specs = frozenset(_spec(entry, match) for entry, match in row.values())
            key = _key(group, row)
            if specs in taken_specs:
                # to advertise a device twice, use `count`
                problems.append(
                    f"{resource.name}: groups[{number}]: {key} would duplicate another device"
                )
            elif taken.setdefault(key, number) == number:
                keys.append((key, group, row))
                taken_specs.add(specs)
            else:
                problems.append(
                    f"{resource.name}: groups {taken[key]} and {number} both match {key}"
                )
    return keys


def _names_by_key(
    rule: str, keys: _KeyedRows, current_names: Mapping[str, str], problems: list[str]
) -> dict[str, str]:
    """Return the resource name of each match, by key; report matches whose name is taken."""
    keys_by_name: dict[str, dict[str, None]] = {}
    for key, _, _ in keys:
        keys_by_name.setdefault(advertised.derived_name(rule, _short(key)), {})[key] = None
    owners = {}
    for name, rivals in keys_by_name.items():
        owner_before = current_names.get(name, "")
        owner = owner_before if owner_before in rivals else next(iter(rivals))
        owners[owner] = name
        problems.extend(
            f"{name}: {owner} and {key} would both have this name" for key in rivals if key != owner
        )
    return owners


def _units(
    resource: resources.Resource, keys: _KeyedRows, owners: Mapping[str, str], problems: list[str]
) -> Iterator[tuple[str, advertised.Unit]]:
    for key, group, row in keys:
        name = owners.get(key, "") if resource.per_match else resource.name
        for replica in range(group.count if name else 0):
            yield name, _unit(key, replica, row, problems)


def _key(group: resources.Group, row: Row) -> str:
    """Return the key that names a unit.

    A match of a required entry with limit 1 belongs to one unit only, so it suffices as the key.
    The unit then keeps its name when other devices appear or disappear. Without such an entry the
    key consists of all matches.
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
        inside = _container_path(entry, match)
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
        id=advertised.device_id(key, replica),
        physical=key,
        identity={number: match.identity for number, (_, match) in row.items()},
        devices=tuple(devices.values()),
        mounts=tuple(mounts.values()),
        nodes=tuple(dict.fromkeys(m.node.path for e, m in row.values() if _is_device(e))),
        numa=_numa(match.node.numa for entry, match in row.values() if _is_device(entry)),
    )


def _spec(entry: resources.Entry, match: scan_result.Match) -> _Spec:
    return _container_path(entry, match), match.path, entry.permissions, entry.read_only


def _container_path(entry: resources.Entry, match: scan_result.Match) -> str:
    """Return the path in the container; a mount path that ends with / is a directory."""
    if not entry.mount_path:
        return match.path
    if entry.mount_path.endswith("/"):
        return entry.mount_path + match.path.rpartition("/")[2]
    return entry.mount_path


def _numa(values: Iterable[int | None]) -> int | None:
    """Return the NUMA node if exactly one is known, else None, because a hint could be wrong."""
    numbers = {numa for numa in values if numa is not None and numa >= 0}
    return numbers.pop() if len(numbers) == 1 else None


def _unique_units(
    name: str, units: Iterable[advertised.Unit], problems: list[str]
) -> tuple[advertised.Unit, ...]:
    """Return the units sorted by id; leave out and report units whose id is taken."""
    by_id: dict[str, advertised.Unit] = {}
    for unit in sorted(units, key=lambda unit: (unit.id, unit.physical)):
        first = by_id.setdefault(unit.id, unit)
        if first is not unit:
            problems.append(
                f"{name}: {first.physical} and {unit.physical} have the same id {unit.id}"
            )
    return tuple(by_id.values())


def _overlaps(planned: Iterable[PlannedResource], *, shared: frozenset[str]) -> Iterator[str]:
    """Yield a problem for each pair of resources with the same nodes; ignore `shared` nodes."""
    first: dict[str, str] = {}
    common: dict[tuple[str, str], dict[str, None]] = {}
    for resource in planned:
        for path in dict.fromkeys(path for unit in resource.units for path in unit.nodes):
            other = first.setdefault(path, resource.name)
            if other != resource.name and path not in shared:
                common.setdefault((other, resource.name), {})[path] = None
    for (first_name, second_name), paths in common.items():
        listed = errors.listed([*paths], most=_LISTED_MAX)
        yield f"{first_name} and {second_name} both advertise {listed}"


def _shared(
    resources: Iterable[resources.Resource], index: scan_result.NodeIndex
) -> frozenset[str]:
    """Return the paths of the device nodes that configuration entries mark as `shared`."""
    return frozenset(
        match.node.path
        for resource in resources
        for _, entry in resource.entries()
        if entry.shared
        for match in scan_result.matches(entry, index)
    )


def _is_device(entry: resources.Entry) -> bool:
    return entry.type is resources.NodeType.DEVICE


def _short(key: str) -> str:
    return key.removeprefix(scan_result.DEV).removeprefix("/")


def group_columns(
    group: resources.Group, index: scan_result.NodeIndex, *, every_name: bool
) -> Columns:
    """Return the matches of each entry of a group, without optional entries that have none."""
    columns = {
        number: (entry, scan_result.matches(entry, index, every_name=every_name))
        for number, entry in enumerate(group.devices)
    }
    return {n: column for n, column in columns.items() if column[1] or not column[0].optional}


def group_rows(columns: Columns) -> Iterator[Row]:
    """Yield the rows of a group: one match of each entry; shorter lists are repeated."""
    for at in range(_length(columns)):
        yield {n: (entry, matches[at % len(matches)]) for n, (entry, matches) in columns.items()}


def limiting_entries(columns: Columns) -> Iterator[str]:
    """Yield a problem for each optional entry whose few matches limit the number of units."""
    length = _length(columns)
    for number, (entry, matches) in columns.items():
        if entry.optional and len(matches) * entry.limit == length:
            without = _length({n: column for n, column in columns.items() if n != number})
            if without > length:
                yield (
                    f"devices[{number}]: optional, but it limits the group to {length} of "
                    f"{without} devices; raise its limit"
                )


def _length(columns: Columns) -> int:
    reusable = min((len(matches) * entry.limit for entry, matches in columns.values()), default=0)
    return min(reusable, max((len(matches) for _, matches in columns.values()), default=0))
