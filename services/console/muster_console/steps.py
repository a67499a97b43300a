"""Pure: how the verdicts on plugins and the health of devices changed, from events.

Before the first event that names its health, nothing is known about a device, with one exception:
of a plugin only the last inventory is stored, so a device that did not change before that has had
the same health since the plugin started. An inventory says whether a device is Healthy, but not
which conditions hold, so it ends none.
"""

from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Final, NamedTuple

from muster import codec, vocabulary

ALWAYS: Final = datetime.min.replace(tzinfo=UTC)
"""The time of a step that is older than all events."""
_CONDITIONS: Final = frozenset(condition.value for condition in vocabulary.Condition)
_HEALTHY: Final = vocabulary.Health.HEALTHY.value


class Step(NamedTuple):
    """A change of a plugin's verdict, or of a device's health, and its reason.

    An empty value means that it is not known.
    """

    at: datetime
    value: str
    previous: str
    reason: str


class _Said(NamedTuple):
    """What one event says about one device; an inventory (`is_listed`) repeats what is known."""

    resource: str
    device: str
    physical: str
    value: str
    reason: str
    began: datetime | None = None
    """In an inventory: when the plugin started, or `ALWAYS`."""

    @property
    def is_listed(self) -> bool:
        """Whether an inventory says this."""
        return self.began is not None


def of_plugins(events: Iterable[codec.CloudEvent]) -> dict[str, list[Step]]:
    """Return the verdicts on each plugin, the oldest first."""
    steps: dict[str, list[Step]] = {}
    for event in events:
        if isinstance(event.data, vocabulary.VerdictChanged):
            change = event.data
            previous = str(change.previous or "")
            step = Step(change.at, str(change.verdict), previous, _evidence(change))
            steps.setdefault(change.plugin, []).append(step)
    return steps


def of_device(events: Iterable[codec.CloudEvent], names: frozenset[str]) -> list[Step]:
    """Return how one device's health changed; `names` are its id, and those of its replicas."""
    steps: list[Step] = []
    for at, said in _said(events):
        if about := [each for each in said if names & {each.device, each.physical}]:
            _add(steps, about, at)
    return steps


def of_devices(events: Iterable[codec.CloudEvent]) -> dict[tuple[str, str], list[Step]]:
    """Return how the health of each device changed, by resource and id.

    The id is that of the physical device, if it is known.
    """
    steps: dict[tuple[str, str], list[Step]] = {}
    for at, said in _said(events):
        about: dict[tuple[str, str], list[_Said]] = {}
        for each in said:
            about.setdefault((each.resource, each.physical or each.device), []).append(each)
        for key, of_one in about.items():
            _add(steps.setdefault(key, []), of_one, at)
    return {key: of_one for key, of_one in steps.items() if of_one}


def is_faulty(value: str) -> bool:
    """Return whether a device is known not to be well."""
    return value not in {"", _HEALTHY}


def value_at(
    steps: Sequence[Step], current: tuple[str, datetime | None], at: datetime
) -> tuple[str, datetime | None, str]:
    """Return the value at a time, the time since when it held, and the reason.

    `current` is the present value, and since when it holds.
    """
    before = [step for step in steps if step.at <= at]
    if before:
        return before[-1].value, before[-1].at, before[-1].reason
    if steps:
        return steps[0].previous, None, ""
    value, since = current
    return (value, since, "") if since is None or since <= at else ("", None, "")


def _evidence(change: vocabulary.VerdictChanged) -> str:
    evidence = "; ".join(f"{item.source}: {item.observed}" for item in change.evidence[:2])
    return f": {evidence}" if evidence else ""


def _said(events: Iterable[codec.CloudEvent]) -> Iterable[tuple[datetime, list[_Said]]]:
    """Yield what each event says about devices, with the physical device of each, if known."""
    physical: dict[tuple[str, str], str] = {}
    started: dict[str, tuple[str, datetime]] = {}
    for event in events:
        if isinstance(event.data, vocabulary.PluginStarted):
            # the event is published again after every connection to the bus
            last = started.get(event.data.plugin, ("", ALWAYS))
            if last[0] != event.data.instance:
                started[event.data.plugin] = event.data.instance, event.data.at
        said = []
        for each in _of_event(event.data, started):
            own = each.resource, each.device
            if each.physical:
                physical[own] = each.physical
            elif own in physical and not each.value:
                continue  # of several replicas of a device, this one was removed
            said.append(each._replace(physical=physical.get(own, "")))
        yield event.data.at, said


def _of_event(
    event: vocabulary.Event, started: Mapping[str, tuple[str, datetime]]
) -> Iterable[_Said]:
    match event:
        case vocabulary.InventoryReported(devices=devices, plugin=plugin):
            _, began = started.get(plugin, ("", ALWAYS))
            yield from (_of_unit(each, began) for each in devices)
        case vocabulary.DeviceAdded(device=added):
            yield _of_unit(added, None)
        case vocabulary.DeviceRemoved(reason=reason) as removed:
            yield _Said(removed.resource, removed.device_id, removed.physical, "", reason)
        case vocabulary.DeviceHealthChanged(health=health, reason=reason) as change:
            yield _Said(change.resource, change.device_id, "", str(health), reason)
        case vocabulary.DeviceConditionChanged(reason=reason) as change:
            value = str(change.condition) if change.holds else _HEALTHY
            yield _Said(change.resource, change.device_id, "", value, reason)
        case _:
            pass


def _of_unit(unit: vocabulary.Device, began: datetime | None) -> _Said:
    health = str(unit.health)
    return _Said(unit.resource, unit.id, unit.physical, health, unit.reason, began)


def _add(steps: list[Step], said: Sequence[_Said], at: datetime) -> None:
    """Add what an event says about a device; of its replicas, a faulty one counts."""
    worst = next((each for each in said if is_faulty(each.value)), said[0])
    last = steps[-1].value if steps else ""
    if worst.is_listed and (
        worst.value == last or (worst.value == _HEALTHY and last in _CONDITIONS)
    ):
        return
    if not (worst.value or last):
        return
    reason = f": {worst.reason}" if worst.reason else ""
    if worst.began is not None and not steps:
        at = min(at, worst.began)
    steps.append(Step(at, worst.value, last, reason))
