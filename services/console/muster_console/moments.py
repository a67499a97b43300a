"""Pure: the state of a node at one time of its timeline: verdicts, faults, alerts, restarts."""

import bisect
import math
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import Final

import msgspec

from muster import codec, vocabulary
from muster.fleet import health_state
from muster_console import steps, timeline

_FAULTS_MAX: Final = 20
_ALERTS_MAX: Final = 10
_ENTRIES_MAX: Final = 4


class PluginThen(msgspec.Struct, frozen=True, kw_only=True):
    """A plugin, with its verdict at the shown time."""

    name: str
    verdict: str
    level: str
    since: datetime | None
    why: str


class FaultThen(msgspec.Struct, frozen=True, kw_only=True):
    """A device that was not Healthy at the shown time."""

    device: str
    state: str
    level: str
    since: datetime | None
    """When the fault began; None if that was before all events."""
    reason: str


class AlertThen(msgspec.Struct, frozen=True, kw_only=True):
    """An alert that fired at the shown time."""

    kind: str
    severity: str
    since: datetime
    summary: str


class Moment(msgspec.Struct, frozen=True, kw_only=True):
    """The known state of a node at one time."""

    at: datetime
    x: float
    """The horizontal position of this time in the timeline."""
    plugins: tuple[PluginThen, ...]
    faults: tuple[FaultThen, ...]
    alerts: tuple[AlertThen, ...]
    restarts: int
    """How many starts, stops and restart decisions the timeline has up to this time."""
    entries: tuple[timeline.Mark, ...]
    """The last entries of the timeline up to this time, the newest first."""
    deliveries: int
    """How many notifications the timeline has up to this time."""
    earlier: datetime | None
    """The time of the previous entry of the timeline; None if there is none."""
    later: datetime | None


def moment(
    events: Sequence[codec.CloudEvent],
    plugins: Iterable[health_state.Plugin],
    line: timeline.Timeline,
    *,
    at: datetime,
    labels: Mapping[str, str],
) -> Moment:
    """Return the state at a time; a time outside the timeline is moved to its start or end.

    `events` are in order of time; `labels` are the names of devices, by id.
    """
    at = min(max(at, line.start), line.end)
    until = [event for event in events if event.time <= at]
    # times in the addresses of pages are in milliseconds
    times = [_milliseconds(mark.at) for mark in line.marks]
    before = bisect.bisect_left(times, _milliseconds(at))
    after = bisect.bisect_right(times, _milliseconds(at))
    marks = line.marks[:after]
    kinds = [mark.kind for mark in marks]
    return Moment(
        at=at,
        x=timeline.position(line, at),
        plugins=tuple(_plugins(events, plugins, at)),
        faults=tuple(_faults(until, labels))[:_FAULTS_MAX],
        alerts=tuple(_alerts(until))[:_ALERTS_MAX],
        restarts=kinds.count("restart"),
        deliveries=kinds.count("delivery"),
        entries=tuple(reversed(marks[-_ENTRIES_MAX:])),
        earlier=line.marks[before - 1].at if before else None,
        later=line.marks[after].at if after < len(times) else None,
    )


def _milliseconds(at: datetime) -> int:
    return math.ceil(at.timestamp() * 1e3)


def _plugins(
    events: Iterable[codec.CloudEvent], plugins: Iterable[health_state.Plugin], at: datetime
) -> Iterable[PluginThen]:
    of_plugins = steps.of_plugins(events)
    current = {each.plugin: (each.name, each.verdict or "", each.since) for each in plugins}
    for plugin in sorted({*of_plugins, *current}):
        name, verdict, since = current.get(plugin, (plugin, "", None))
        value, began, why = steps.value_at(of_plugins.get(plugin, ()), (verdict, since), at)
        yield PluginThen(
            name=name, verdict=value, level=timeline.level_of(value), since=began, why=why
        )


def _faults(events: Iterable[codec.CloudEvent], labels: Mapping[str, str]) -> Iterable[FaultThen]:
    """Return the devices that were not Healthy after these events, the newest fault first."""
    faults = []
    for (_, device), of_device in steps.of_devices(events).items():
        last = of_device[-1]
        if steps.is_faulty(last.value):
            faults.append(
                FaultThen(
                    device=labels.get(device, device),
                    state=last.value,
                    level=timeline.level_of(last.value),
                    since=None if last.at == steps.ALWAYS else last.at,
                    reason=last.reason.removeprefix(": "),
                )
            )
    return sorted(faults, key=lambda fault: fault.since or steps.ALWAYS, reverse=True)


def _alerts(events: Iterable[codec.CloudEvent]) -> Iterable[AlertThen]:
    """Yield the alerts that fired after these events, the newest first."""
    firing: dict[str, vocabulary.AlertChanged] = {}
    for event in events:
        if isinstance(event.data, vocabulary.AlertChanged):
            if event.data.state is vocabulary.AlertState.FIRING:
                firing[event.data.fingerprint] = event.data
            else:
                firing.pop(event.data.fingerprint, None)
    for alert in sorted(firing.values(), key=lambda each: each.starts_at, reverse=True):
        yield AlertThen(
            kind=str(alert.kind),
            severity=str(alert.severity),
            since=alert.starts_at,
            summary=alert.summary,
        )
