"""Pure: the timeline of one node: verdicts as bars, and marks for faults, restarts, deliveries.

Positions are in the units of the drawing, which is `WIDTH` wide.
"""

from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime, timedelta
from typing import Final, NamedTuple

import msgspec

from muster import codec, vocabulary
from muster.cli import event_texts
from muster.fleet import health_state
from muster_console import alert_history, device_names

WIDTH: Final = 1000.0
LEFT: Final = 4.0
RANGES: Final[Mapping[str, timedelta]] = {
    "15m": timedelta(minutes=15),
    "1h": timedelta(hours=1),
    "6h": timedelta(hours=6),
    "1d": timedelta(days=1),
    "7d": timedelta(days=7),
}
MARKS_MAX: Final = 300
_BARS_MAX: Final = 200
_BAR_MIN: Final = 2.5
_NAMED_MIN: Final = 70.0
"""The minimum width of a bar that shows its verdict as text."""
_TICKS: Final = 6
_WELL: Final = {
    vocabulary.Verdict.HEALTHY.value: "ok",
    vocabulary.Verdict.MAINTENANCE.value: "notice",
    vocabulary.Health.HEALTHY.value: "ok",
}
_KINDS: Final = (
    ((vocabulary.PluginStopping, vocabulary.RemediationDecided), "restart"),
    (
        (
            vocabulary.DeviceHealthChanged,
            vocabulary.DeviceConditionChanged,
            vocabulary.PluginDeregistered,
            vocabulary.ConfigurationRefused,
            vocabulary.ProblemChanged,
        ),
        "fault",
    ),
    ((vocabulary.AlertChanged,), "alert"),
    (
        (
            vocabulary.VerdictChanged,
            vocabulary.InventoryReported,
            vocabulary.NotificationEvent,
            vocabulary.WatchdogTicked,
        ),
        "",
    ),
)
"""The kind of mark for each type of event; empty: no mark. Other types have the kind `other`."""
_HALF_WELL: Final = {
    vocabulary.Verdict.DEGRADED.value,
    vocabulary.Verdict.FLAPPING.value,
    *(condition.value for condition in vocabulary.Condition),
}
_SKEW_SHOWN: Final = timedelta(seconds=5)
"""The text of an event further in the future than this says that its sender's clock is ahead."""


class Step(NamedTuple):
    """A change of a plugin's verdict, or of a device's health, and its reason."""

    at: datetime
    value: str
    previous: str
    reason: str


class Bar(msgspec.Struct, frozen=True, kw_only=True):
    """A period with the same verdict or health."""

    x: float
    width: float
    level: str
    title: str
    label: str


class Lane(msgspec.Struct, frozen=True, kw_only=True):
    """The verdicts about one plugin, or the health of a device."""

    name: str
    bars: tuple[Bar, ...]


class Mark(msgspec.Struct, frozen=True, kw_only=True):
    """Something that happened at one time. `kind` is fault, restart, delivery, alert or other."""

    x: float
    kind: str
    at: datetime
    text: str
    key: str


class Tick(msgspec.Struct, frozen=True, kw_only=True):
    """A time on the axis."""

    x: float
    at: datetime


class Timeline(msgspec.Struct, frozen=True, kw_only=True):
    """A timeline as it is drawn: lanes of bars, marks, and ticks of the axis."""

    lanes: tuple[Lane, ...]
    marks: tuple[Mark, ...]
    marks_total: int
    ticks: tuple[Tick, ...]
    start: datetime
    end: datetime


def timeline(
    events: Sequence[codec.CloudEvent],
    plugins: Iterable[health_state.Plugin],
    deliveries: Iterable[alert_history.Delivery],
    *,
    start: datetime,
    end: datetime,
    device: tuple[str, str] | None = None,
) -> Timeline:
    """Return the timeline of a node between two times; `events` are in order of time.

    `device` is the name and present health of a device; `events` are then about that device only.
    """
    scale = _Scale(start, end)
    marks = [*_event_marks(events, scale), *_delivery_marks(deliveries, scale)]
    marks.sort(key=lambda mark: mark.at)
    count = _TICKS
    ticks = (start + (end - start) * (number / count) for number in range(count + 1))
    return Timeline(
        lanes=tuple(
            [_device_lane(events, *device, scale)] if device else _lanes(events, plugins, scale)
        ),
        marks=tuple(marks[-MARKS_MAX:]),
        marks_total=len(marks),
        ticks=tuple(Tick(x=scale.x(at), at=at) for at in ticks),
        start=start,
        end=end,
    )


def position(line: Timeline, at: datetime) -> float:
    """Return the horizontal position of a time."""
    return _Scale(line.start, line.end).x(at)


def fitting(began: datetime | None, at: datetime) -> str:
    """Return the shortest range that also shows the time before a problem; 1h without one."""
    if began is None:
        return "1h"
    return next((name for name, length in RANGES.items() if length >= (at - began) * 1.5), "7d")


class _Scale:
    """Converts times to positions; times outside the timeline are moved to its edge."""

    def __init__(self, start: datetime, end: datetime) -> None:
        self.start = start
        self.end = end

    def x(self, at: datetime) -> float:
        part = (at - self.start) / (self.end - self.start)
        return round(LEFT + (WIDTH - 2 * LEFT) * min(1.0, max(0.0, part)), 1)

    def within(self, at: datetime) -> datetime | None:
        """Return an event's time, at most the end (clocks differ); None if before the start."""
        return min(at, self.end) if at >= self.start else None


def level_of(verdict: str) -> str:
    """Return the level that a verdict is drawn with."""
    if not verdict:
        return "unknown"
    return _WELL.get(verdict) or ("warning" if verdict in _HALF_WELL else "critical")


def verdict_steps(events: Iterable[codec.CloudEvent]) -> dict[str, list[Step]]:
    """Return the verdicts on each plugin, the oldest first."""
    steps: dict[str, list[Step]] = {}
    for event in events:
        if isinstance(event.data, vocabulary.VerdictChanged):
            change = event.data
            previous = str(change.previous or "")
            step = Step(change.at, str(change.verdict), previous, _reason(change))
            steps.setdefault(change.plugin, []).append(step)
    return steps


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


def _lanes(
    events: Sequence[codec.CloudEvent], plugins: Iterable[health_state.Plugin], scale: _Scale
) -> list[Lane]:
    steps = verdict_steps(events)
    names: dict[str, str] = {}
    current: dict[str, tuple[str, datetime | None]] = {}
    for plugin in plugins:
        steps.setdefault(plugin.plugin, [])
        names[plugin.plugin] = plugin.name
        current[plugin.plugin] = plugin.verdict or "", plugin.since
    for event in events:
        if isinstance(event.data, vocabulary.VerdictChanged):
            names.setdefault(event.data.plugin, event.data.watched or event.data.plugin)
    return [
        Lane(
            name=names[plugin], bars=tuple(_bars(of_plugin, current.get(plugin, ("", None)), scale))
        )
        for plugin, of_plugin in sorted(steps.items())
    ]


def health_steps(events: Iterable[codec.CloudEvent]) -> list[Step]:
    """Return the changes of one device's health, from the events about it."""
    steps: list[Step] = []
    for event in events:
        match event.data:
            case vocabulary.DeviceHealthChanged() as change:
                value = str(change.health)
            case vocabulary.DeviceConditionChanged() as change:
                value = str(change.condition if change.holds else vocabulary.Health.HEALTHY)
            case _:
                continue
        # before its first known fault, a device was Healthy
        unknown = "" if value == vocabulary.Health.HEALTHY else str(vocabulary.Health.HEALTHY)
        previous = steps[-1].value if steps else unknown
        steps.append(Step(change.at, value, previous, f": {change.reason}"))
    return steps


def _device_lane(events: Iterable[codec.CloudEvent], name: str, health: str, scale: _Scale) -> Lane:
    return Lane(name=name, bars=tuple(_bars(health_steps(events), (health, None), scale)))


def _bars(
    steps: Sequence[Step], current: tuple[str, datetime | None], scale: _Scale
) -> Iterable[Bar]:
    """Yield one bar for each value; the first bar has the value before the first step."""
    shown = steps[-_BARS_MAX:]
    value, since = current
    first = shown[0].previous if shown else value
    begins = [(scale.start, first, "")]
    begins += [(min(max(s.at, scale.start), scale.end), s.value, s.reason) for s in shown]
    if not shown and since is not None and since > scale.start:
        begins = [(scale.start, "", ""), (min(since, scale.end), value, "")]
    ends = [begin for begin, _, _ in begins[1:]] + [scale.end]
    for (begin, name, reason), end in zip(begins, ends, strict=True):
        x, width = scale.x(begin), scale.x(end) - scale.x(begin)
        if end <= scale.start and scale.start < scale.end:
            continue  # the bar ends before the timeline begins
        width = max(_BAR_MIN, width)
        shown_name = name or "no verdict known"
        yield Bar(
            x=x,
            width=round(width, 1),
            level=level_of(name),
            title=f"{shown_name} from {begin:%H:%M:%S} to {end:%H:%M:%S} UTC{reason}",
            label=shown_name if width >= _NAMED_MIN else "",
        )


def _reason(change: vocabulary.VerdictChanged) -> str:
    evidence = "; ".join(f"{item.source}: {item.observed}" for item in change.evidence[:2])
    return f": {evidence}" if evidence else ""


def _event_marks(events: Iterable[codec.CloudEvent], scale: _Scale) -> Iterable[Mark]:
    instances: dict[tuple[str, str], str] = {}
    for event in events:
        kind = _kind(event, instances)
        at = scale.within(event.time)
        if kind and at is not None:
            text = device_names.shortened(event_texts.change_text(event))
            if event.time - at > _SKEW_SHOWN:
                text += f" (its sender's clock is ahead: {event.time:%H:%M:%S} UTC)"
            yield Mark(x=scale.x(at), kind=kind, at=at, text=text, key=event.id)


def _kind(event: codec.CloudEvent, instances: dict[tuple[str, str], str]) -> str:
    """Return the kind of an event's mark; empty if it has none."""
    if isinstance(event.data, vocabulary.PluginStarted):
        # the event is published again after every connection to the bus
        key = event.data.node, event.data.plugin
        before, instances[key] = instances.get(key), event.data.instance
        return "" if before == event.data.instance else "restart"
    for types, kind in _KINDS:
        if isinstance(event.data, types):
            return kind
    return "other"


def _delivery_marks(deliveries: Iterable[alert_history.Delivery], scale: _Scale) -> Iterable[Mark]:
    for each in deliveries:
        at = scale.within(each.at)
        if at is not None:
            did = "could not notify" if each.is_failed else "notified"
            text = f"{did} {each.receiver} ({each.reason}): {each.outcome}"
            yield Mark(x=scale.x(at), kind="delivery", at=at, text=text, key=each.id)
