"""Pure: the timeline of one node: verdicts and faulty devices as bars, and marks for other events.

Positions are in the units of the drawing, which is `WIDTH` wide.
"""

import itertools
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Final

import msgspec

from muster import codec, vocabulary
from muster.cli import event_texts
from muster.fleet import health_state
from muster_console import alert_history, device_names, steps

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
DEVICES_MAX: Final = 8
"""The maximum number of faulty devices that each have a lane."""
_BARS_MAX: Final = 200
_SILENCED: Final = ", silenced"
_BAR_MIN: Final = 2.5
_LETTER: Final = 7.6
_NAME_MARGIN: Final = 12.0
"""A bar shows its verdict as text if its letters (each `_LETTER` wide) and this margin fit."""
_TICKS_MAX: Final = 8
_STEPS: Final = tuple(
    timedelta(minutes=minutes)
    for minutes in (1, 2, 5, 10, 15, 30, 60, 120, 180, 360, 720, 1440, 2880)
)
"""The possible distances between two ticks."""
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
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
"""The kind of mark for each type of event, empty for no mark; for other types see `_kind`."""
_HALF_WELL: Final = {
    vocabulary.Verdict.DEGRADED.value,
    vocabulary.Verdict.FLAPPING.value,
    *(condition.value for condition in vocabulary.Condition),
}
_SKEW_SHOWN: Final = timedelta(seconds=5)
"""If an event is later than now by more than this, its text notes that the clock is ahead."""


class Bar(msgspec.Struct, frozen=True, kw_only=True):
    """A period in which a verdict or a device's health did not change."""

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
    """An event or a notification; `kind` is fault, restart, delivery, alert or other."""

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
    devices_more: int
    """The number of other devices that were faulty in this period; they have no lane."""
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
    device: tuple[str, Sequence[steps.Step]] | None = None,
    labels: Mapping[str, str] | None = None,
    silenced: Mapping[str, datetime] | None = None,
) -> Timeline:
    """Return the timeline of a node between two times; `events` are in order of time.

    `device` is the name of a device, and how its health changed; `events` are then about that
    device only.
    `labels` are the names of devices. `silenced` has, by plugin, the time from which the plugin's
    current problem is silenced.
    """
    scale = _Scale(start, end)
    marks = [*_event_marks(events, scale), *_delivery_marks(deliveries, scale)]
    marks.sort(key=lambda mark: mark.at)
    if device:
        lanes, faulty = [_device_lane(*device, scale)], []
    else:
        lanes = _lanes(events, plugins, scale, silenced or {})
        faulty = _device_lanes(events, labels or {}, scale)
    return Timeline(
        lanes=(*lanes, *faulty[:DEVICES_MAX]),
        devices_more=max(0, len(faulty) - DEVICES_MAX),
        marks=tuple(marks[-MARKS_MAX:]),
        marks_total=len(marks),
        ticks=tuple(Tick(x=scale.x(at), at=at) for at in _ticks(start, end)),
        start=start,
        end=end,
    )


def position(line: Timeline, at: datetime) -> float:
    """Return the horizontal position of a time."""
    return _Scale(line.start, line.end).x(at)


def fitting(began: datetime | None, at: datetime) -> str:
    """Return the name of the range that shows the time since `began`; 1h if that is None.

    This is the shortest range that is at least 1.5 times as long, or 7d if all are shorter.
    """
    if began is None:
        return "1h"
    return next((name for name, length in RANGES.items() if length >= (at - began) * 1.5), "7d")


def _ticks(start: datetime, end: datetime) -> Iterable[datetime]:
    """Yield round times at equal intervals."""
    step = next((each for each in _STEPS if (end - start) / each <= _TICKS_MAX), _STEPS[-1])
    at = start + (_EPOCH - start) % step
    while at <= end:
        yield at
        at += step


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
    """Return the level with which a verdict, or a device's health, is drawn."""
    if not verdict:
        return "unknown"
    return _WELL.get(verdict) or ("warning" if verdict in _HALF_WELL else "critical")


def _lanes(
    events: Sequence[codec.CloudEvent],
    plugins: Iterable[health_state.Plugin],
    scale: _Scale,
    silenced: Mapping[str, datetime],
) -> list[Lane]:
    of_plugins = steps.of_plugins(events)
    names: dict[str, str] = {}
    current: dict[str, tuple[str, datetime | None]] = {}
    for plugin in plugins:
        of_plugins.setdefault(plugin.plugin, [])
        names[plugin.plugin] = plugin.name
        current[plugin.plugin] = plugin.verdict or "", plugin.since
    for event in events:
        if isinstance(event.data, vocabulary.VerdictChanged):
            names.setdefault(event.data.plugin, event.data.watched or event.data.plugin)
    return [
        Lane(
            name=names[plugin],
            bars=tuple(
                _bars(
                    of_plugin,
                    current.get(plugin, ("", None)),
                    scale,
                    silenced_at=silenced.get(plugin),
                )
            ),
        )
        for plugin, of_plugin in sorted(of_plugins.items())
    ]


def _device_lanes(
    events: Iterable[codec.CloudEvent], labels: Mapping[str, str], scale: _Scale
) -> list[Lane]:
    """Return the lanes of devices that were faulty in this period; those still faulty first."""
    faulty = [
        (of_device, labels.get(device, device_names.shortened(device)))
        for (_, device), of_device in steps.of_devices(events).items()
        if _is_faulty(of_device, scale.start)
    ]
    faulty.sort(key=lambda each: (not steps.is_faulty(each[0][-1].value), -_newest(each[0])))
    return [_device_lane(name, of_device, scale) for of_device, name in faulty]


def _is_faulty(of_device: Sequence[steps.Step], start: datetime) -> bool:
    """Return whether a device was faulty at any time after `start`."""
    ends = [step.at for step in of_device[1:]]
    return any(
        steps.is_faulty(step.value) and (end is None or end > start)
        for step, end in itertools.zip_longest(of_device, ends)
    )


def _newest(of_device: Sequence[steps.Step]) -> float:
    return max(step.at.timestamp() for step in of_device if steps.is_faulty(step.value))


def _device_lane(name: str, of_device: Sequence[steps.Step], scale: _Scale) -> Lane:
    return Lane(
        name=name, bars=tuple(_bars(of_device, ("", None), scale, unknown="health not known"))
    )


def _bars(
    changes: Sequence[steps.Step],
    current: tuple[str, datetime | None],
    scale: _Scale,
    *,
    unknown: str = "no verdict known",
    silenced_at: datetime | None = None,
) -> Iterable[Bar]:
    """Yield one bar for each value; the first bar has the value before the first change.

    If the last value is silenced, a separate bar begins at the start of the silence.
    """
    shown = changes[-_BARS_MAX:]
    value, since = current
    first = shown[0].previous if shown else value
    begins = [(scale.start, first, "")]
    begins += [(min(max(s.at, scale.start), scale.end), s.value, s.reason) for s in shown]
    if not shown and since is not None and since > scale.start:
        begins = [(scale.start, "", ""), (min(since, scale.end), value, "")]
    if silenced_at is not None:
        begin, name, _ = begins[-1]
        begins.append((min(max(begin, silenced_at), scale.end), name, _SILENCED))
    ends = [begin for begin, _, _ in begins[1:]] + [scale.end]
    for (begin, name, reason), end in zip(begins, ends, strict=True):
        if reason is not _SILENCED and silenced_at is not None and begin == end:
            continue  # it is silenced from its start
        x, width = scale.x(begin), scale.x(end) - scale.x(begin)
        if end <= scale.start and scale.start < scale.end:
            continue  # the bar ends before the timeline begins
        width = max(_BAR_MIN, width)
        is_silenced = reason is _SILENCED
        why = "" if is_silenced else reason
        shown_name = f"{name or unknown}{_SILENCED if is_silenced else ''}"
        is_named = width >= len(shown_name) * _LETTER + _NAME_MARGIN
        yield Bar(
            x=x,
            width=round(width, 1),
            level="notice" if is_silenced else level_of(name),
            title=f"{shown_name} from {begin:%H:%M:%S} to {end:%H:%M:%S} UTC{why}",
            label=shown_name if is_named else "",
        )


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
