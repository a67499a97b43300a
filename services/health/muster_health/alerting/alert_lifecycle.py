"""Pure: alert lifecycle: compares wanted with published alerts, and decides what to publish.

Only these two sets matter, not their history. Any process may therefore have published an alert,
and the evaluation may be repeated. Repeated failures are damped: each time, the plugin must stay
healthy for longer before it counts as recovered.

An alert is first stored as pending, then published, then stored as published. After a crash in
between, it may be published again under the same id, but it is never lost.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Final

from muster import pacing, vocabulary
from muster_health.model import alerts, config

_COUNTED_MAX: Final = 64


@dataclass(slots=True, eq=False)
class FlapDamping:
    """Delays the recovery of a plugin, or of one of its alerts, that has failed repeatedly.

    | failure within the window | must stay healthy for            | and is   |
    |---------------------------|----------------------------------|----------|
    | 1st                       | 3 good heartbeats, or 15 s       |          |
    | 2nd                       | 30 s                             |          |
    | nth, from the 3rd on      | 30 s doubled n - 2 times, 15 min | flapping |

    The count starts again after a whole window without a failure.
    """

    settings: config.Detection
    level: int = 0
    _last: float | None = None
    _times: tuple[float, ...] = ()

    def failed(self, now: float) -> None:
        """Count a failure."""
        window_s = self.settings.flap_window_s
        if self._last is not None and now - self._last > window_s + self.hold_s:
            self.level = 0
        self._last = now
        self.level = min(self.level + 1, _COUNTED_MAX)
        recent = (at for at in self._times if now - at <= window_s)
        self._times = (*recent, now)[-_COUNTED_MAX:]

    def restore(self, level: int, now: float) -> None:
        """Restore the failures that a previous process counted, as if they had just happened."""
        self.level = level
        self._last = now if level else None
        self._times = (now,) * min(level, self.settings.flap_falls - 1)

    @property
    def hold_s(self) -> float:
        """Return for how long the plugin must stay healthy, beyond the usual time."""
        settings = self.settings
        holds = pacing.Backoff(first_s=settings.hold_s, max_s=settings.hold_max_s)
        return holds.delay_s(self.level - 1)

    def failures(self, now: float) -> int:
        """Return the number of failures within the window."""
        return sum(1 for at in self._times if now - at <= self.settings.flap_window_s)

    def is_flapping(self, now: float) -> bool:
        """Return whether there were so many failures that the plugin is reported as flapping."""
        return self.failures(now) >= self.settings.flap_falls


@dataclass(slots=True)
class _History:
    """When an alert was last published, when it became unwanted, and how often it has fired."""

    damping: FlapDamping
    told_at: float
    cleared_at: float | None = None


WhyEnded = Callable[[alerts.Key], tuple[vocabulary.Evidence, ...]]
MayOpen = Callable[[alerts.Key], bool]


_NONE: Final[Mapping[alerts.Key, alerts.Alert]] = {}
_NO_HISTORY: Final[Mapping[alerts.Key, _History]] = {}
"""Shared by all plugins without alerts, that is, by most plugins."""


class AlertLifecycle:
    """The open alerts of one owner as they were published, and changes still to be published."""

    __slots__ = ("_bounds", "_history", "_settings", "pending", "published")

    def __init__(self, settings: config.Detection, bounds: config.Bounds) -> None:
        self.published: Mapping[alerts.Key, alerts.Alert] = _NONE
        self.pending: tuple[alerts.Alert, ...] = ()
        self._settings = settings
        self._bounds = bounds
        self._history: Mapping[alerts.Key, _History] = _NO_HISTORY

    def load(self, firing: Iterable[alerts.Alert], untold: Iterable[alerts.Alert]) -> None:
        """Load the alerts that another process published, and its pending changes."""
        self.published = {alert.key: alert for alert in firing}
        self.pending = tuple(untold)

    def follow(
        self,
        wanted: Iterable[alerts.Alert],
        *,
        now: float,
        at: datetime,
        may_open: MayOpen,
        why_ended: WhyEnded,
    ) -> tuple[float | None, list[alerts.Alert]]:
        """Decide what to publish; return when to evaluate again and the alerts that must wait."""
        due: list[float] = []
        held: list[alerts.Alert] = []
        present = {alert.key: alert for alert in wanted}
        for key, published in list(self.published.items()):
            if key not in present:
                later = self._close(key, published, now, at, why_ended)
                if later is not None:
                    due.append(later)
        for key, alert in present.items():
            before = self.published.get(key)
            if before is not None:
                later = self._change(key, before, alert, now, at)
                if later is not None:
                    due.append(later)
            elif len(self.published) >= self._bounds.alerts_per_plugin or not may_open(key):
                held.append(alert)
            else:
                self._open(key, alert, now)
        return min(due, default=None), held

    def end_all(self, at: datetime, evidence: tuple[vocabulary.Evidence, ...]) -> None:
        """Resolve all open alerts."""
        ended = (alert.resolved(at, evidence) for alert in self.published.values())
        self.pending = (*self.pending, *ended)
        self.published = _NONE

    def _open(self, key: alerts.Key, alert: alerts.Alert, now: float) -> None:
        if alert.resource or alert.kind in alerts.OF_FLEET:
            self._history_of(key, now).damping.failed(now)
        self._publish(key, alert, now)

    def _change(
        self,
        key: alerts.Key,
        published: alerts.Alert,
        alert: alerts.Alert,
        now: float,
        at: datetime,
    ) -> float | None:
        history = self._history.get(key)
        if history is not None:
            history.cleared_at = None
        if published.says_the_same(alert):
            return None
        due = now if history is None else history.told_at + self._bounds.update_s
        if published.kind is alert.kind and now < due:
            return due
        self._publish(key, published.becomes(alert, at), now)
        return None

    def _close(
        self,
        key: alerts.Key,
        published: alerts.Alert,
        now: float,
        at: datetime,
        why_ended: WhyEnded,
    ) -> float | None:
        history = self._history.get(key)
        if history is not None and history.damping.hold_s:
            if history.cleared_at is None:
                history.cleared_at = now
            due = history.cleared_at + history.damping.hold_s
            if now < due:
                return due
            history.cleared_at = None
        self.published = {other: alert for other, alert in self.published.items() if other != key}
        self.pending = (*self.pending, published.resolved(at, why_ended(key)))
        return None

    def _publish(self, key: alerts.Key, alert: alerts.Alert, now: float) -> None:
        self.published = {**self.published, key: alert}
        self._history_of(key, now).told_at = now
        self.pending = (*self.pending, alert)

    def _history_of(self, key: alerts.Key, now: float) -> _History:
        history = self._history.get(key)
        if history is None:
            kept = dict(self._history)
            if len(kept) >= 2 * self._bounds.alerts_per_plugin:
                # plugins choose the names of resources, so the number is limited: drop the oldest
                del kept[next(iter(kept))]
            history = kept[key] = _History(FlapDamping(self._settings), now)
            self._history = kept
        return history
