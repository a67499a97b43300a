"""Pure: how the verdicts on plugins and the health of devices changed, from events.

Nothing is known about a device before the first event about its health, with one exception. Only
the last inventory of a plugin is stored, so if a device had no event before that inventory, it has
had the listed health since the plugin started. An inventory lists whether a device is Healthy, not
its conditions, so it ends none of them.

The value of a device that is not Unhealthy is its newest current condition, or Healthy if it has no
current condition.
"""

from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Final, NamedTuple

from muster import codec, vocabulary

ALWAYS: Final = datetime.min.replace(tzinfo=UTC)
"""The time of a step that is older than all events."""
_HEALTHY: Final = vocabulary.Health.HEALTHY.value


class Step(NamedTuple):
    """A change of a plugin's verdict, or of a device's health, and its reason.

    An empty value means that the verdict or health is unknown.
    """

    at: datetime
    value: str
    previous: str
    reason: str


class _Said(NamedTuple):
    """The information in one event about one device; an inventory (`is_listed`) may repeat it."""

    resource: str
    device: str
    physical: str
    value: str
    reason: str
    began: datetime | None = None
    """In an inventory: when the plugin started, or `ALWAYS` if unknown. Otherwise None."""
    fault: tuple[str, str] | None = None
    """The condition and the code of the fault that began, or that ended if `value` is Healthy."""

    @property
    def is_listed(self) -> bool:
        """Whether this information is from an inventory."""
        return self.began is not None


class _Device:
    """The state of one device after the events so far, and the steps that led to it."""

    def __init__(self) -> None:
        self.steps: list[Step] = []
        self._unhealthy: _Said | None = None
        self._held: dict[tuple[str, str], _Said] = {}
        """The conditions that hold, by fault, the newest last."""

    def add(self, said: Sequence[_Said], at: datetime) -> None:
        """Add an event's information about the device; a faulty replica takes precedence."""
        worst = next((each for each in said if is_faulty(each.value)), said[0])
        self._record(worst)
        shown = self._unhealthy or next(reversed(self._held.values()), worst)
        last = self.steps[-1] if self.steps else Step(ALWAYS, "", "", "")
        reason = f": {shown.reason}" if shown.reason else ""
        if shown.value == last.value and (
            worst.is_listed or not shown.value or (shown is not worst and reason == last.reason)
        ):
            return
        if worst.began is not None and not self.steps:
            at = min(at, worst.began)
        self.steps.append(Step(at, shown.value, last.value, reason))

    def _record(self, said: _Said) -> None:
        if said.fault is not None:
            self._held.pop(said.fault, None)
            if said.value != _HEALTHY:
                self._held[said.fault] = said
            return
        self._unhealthy = said if is_faulty(said.value) else None
        if not said.value:
            self._held.clear()


def of_plugins(events: Iterable[codec.CloudEvent]) -> dict[str, list[Step]]:
    """Return how the verdict about each plugin changed, the oldest change first."""
    steps: dict[str, list[Step]] = {}
    for event in events:
        if isinstance(event.data, vocabulary.VerdictChanged):
            change = event.data
            previous = str(change.previous or "")
            step = Step(change.at, str(change.verdict), previous, _evidence(change))
            steps.setdefault(change.plugin, []).append(step)
    return steps


def of_device(events: Iterable[codec.CloudEvent], names: frozenset[str]) -> list[Step]:
    """Return how a device's health changed; `names` are the ids of the device and its replicas."""
    device = _Device()
    for at, said in _said(events):
        if about := [each for each in said if names & {each.device, each.physical}]:
            device.add(about, at)
    return device.steps


def of_devices(events: Iterable[codec.CloudEvent]) -> dict[tuple[str, str], list[Step]]:
    """Return how the health of each device changed, by resource and id.

    The id is that of the physical device, if it is known.
    """
    devices: dict[tuple[str, str], _Device] = {}
    for at, said in _said(events):
        about: dict[tuple[str, str], list[_Said]] = {}
        for each in said:
            about.setdefault((each.resource, each.physical or each.device), []).append(each)
        for key, of_one in about.items():
            devices.setdefault(key, _Device()).add(of_one, at)
    return {key: device.steps for key, device in devices.items() if device.steps}


def is_faulty(value: str) -> bool:
    """Return whether a device's health is known and is not Healthy."""
    return value not in {"", _HEALTHY}


def value_at(
    steps: Sequence[Step], current: tuple[str, datetime | None], at: datetime
) -> tuple[str, datetime | None, str]:
    """Return the value at a time, when it began (None if unknown), and the reason.

    `current` is the current value, and when it began.
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
    """Yield the information in each event about devices, with their physical devices, if known."""
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
            fault = str(change.condition), change.code
            yield _Said(change.resource, change.device_id, "", value, reason, fault=fault)
        case _:
            pass


def _of_unit(unit: vocabulary.Device, began: datetime | None) -> _Said:
    health = str(unit.health)
    return _Said(unit.resource, unit.id, unit.physical, health, unit.reason, began)
