"""Pure: how long health took to detect each fault of the last day.

| fault           | from                                | to                                   |
|-----------------|-------------------------------------|--------------------------------------|
| a silent plugin | its last heartbeat, by the evidence | the verdict                          |
| a device fault  | its event, by the node's clock      | its alert's start, by health's clock |

The number of stored events is limited: the oldest are dropped.
"""

import collections
import re
from collections.abc import Iterable
from datetime import datetime, timedelta
from typing import Final

import msgspec

from muster import codec, vocabulary

_SHOWN: Final = timedelta(days=1)
_DELAYS_MAX: Final = 2_000
_FAULTS_MAX: Final = 5_000
_APART_MAX: Final = timedelta(minutes=10)
"""The maximum time between a device fault and the start of the alert about it."""
KEPT: Final = _SHOWN + _APART_MAX
"""The maximum age of events to read: a fault is older than its alert, which may be a day old."""
_SILENT: Final = re.compile(r"none for ([0-9]+(?:\.[0-9]+)?) s\b")
"""Health's text about missing heartbeats, with the seconds since the last heartbeat."""
_WELL: Final = (vocabulary.Verdict.HEALTHY, vocabulary.Verdict.MAINTENANCE)


class Delay(msgspec.Struct, frozen=True, kw_only=True):
    """How long it took to detect one fault."""

    at: datetime
    node: str
    is_device: bool
    """Whether a device had the fault; otherwise a plugin was silent."""
    seconds: float


class DetectionDelays:
    """Computes the delays of the last day from events, which may arrive in any order."""

    def __init__(self) -> None:
        self._silences: collections.OrderedDict[tuple[str, str, datetime], Delay] = (
            collections.OrderedDict()
        )
        self._faults: collections.OrderedDict[tuple[str, str, datetime], None] = (
            collections.OrderedDict()
        )
        """The faults, by node, device and time."""
        self._recoveries: collections.OrderedDict[tuple[str, str, datetime], None] = (
            collections.OrderedDict()
        )
        self._alerts: collections.OrderedDict[tuple[str, datetime], vocabulary.AlertChanged] = (
            collections.OrderedDict()
        )

    def receive(self, event: codec.CloudEvent) -> None:
        """Record an event; a repeated event changes nothing."""
        match event.data:
            case vocabulary.VerdictChanged() as change if change.verdict not in _WELL:
                seconds = _silent_s(change)
                if seconds is not None:
                    key = change.node, change.plugin, change.at
                    delay = Delay(at=change.at, node=change.node, is_device=False, seconds=seconds)
                    self._silences[key] = delay
            case vocabulary.DeviceHealthChanged() as device:
                is_fault = device.health is vocabulary.Health.UNHEALTHY
                kept_changes = self._faults if is_fault else self._recoveries
                kept_changes[device.node, device.device_id, device.at] = None
            case vocabulary.AlertChanged(kind=vocabulary.AlertKind.DEVICE_UNHEALTHY) as alert:
                kept = self._alerts.get((alert.fingerprint, alert.starts_at), alert)
                if alert.change <= kept.change:
                    # only the facts known when the alert began
                    few = msgspec.structs.replace(alert, evidence=(), pods=(), advice="")
                    self._alerts[alert.fingerprint, alert.starts_at] = few
            case _:
                return
        for kept_most, most in (
            (self._silences, _DELAYS_MAX),
            (self._faults, _FAULTS_MAX),
            (self._recoveries, _FAULTS_MAX),
            (self._alerts, _DELAYS_MAX),
        ):
            while len(kept_most) > most:
                kept_most.popitem(last=False)

    def last_day(self, at: datetime) -> list[Delay]:
        """Return the delays of the last day, the newest first."""
        began, ended = _by_device(self._faults), _by_device(self._recoveries)
        delays = [*self._silences.values()]
        for alert in self._alerts.values():
            near = []
            for device in alert.devices:
                earlier = [time for time in ended[alert.node, device] if time < alert.starts_at]
                first = max([alert.starts_at - _APART_MAX, *earlier])
                last = alert.starts_at + _APART_MAX
                near += [time for time in began[alert.node, device] if first <= time <= last]
            if near:
                # clocks differ: a fault may seem to follow its alert
                seconds = max(0.0, (alert.starts_at - min(near)).total_seconds())
                delays.append(
                    Delay(at=alert.starts_at, node=alert.node, is_device=True, seconds=seconds)
                )
        recent = [each for each in delays if each.at > at - _SHOWN]
        return sorted(recent, key=lambda each: each.at, reverse=True)


def _by_device(
    changes: Iterable[tuple[str, str, datetime]],
) -> collections.defaultdict[tuple[str, str], list[datetime]]:
    """Return the times of changes by node and device."""
    times: collections.defaultdict[tuple[str, str], list[datetime]] = collections.defaultdict(list)
    for node, device, time in changes:
        times[node, device].append(time)
    return times


def _silent_s(change: vocabulary.VerdictChanged) -> float | None:
    """Return for how many seconds the plugin was silent; None if no evidence shows this."""
    for item in change.evidence:
        match = _SILENT.match(item.observed) if item.source == "heartbeat" else None
        if match:
            return float(match[1])
    return None
