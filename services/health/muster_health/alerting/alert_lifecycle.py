"""Pure: compares the wanted alerts with the published ones, to decide what to publish.

Apart from delays (`flap_damping`, rate limits), the decision depends only on these two sets. It can
therefore be repeated, and it does not matter which process published an alert.

An alert is first stored as pending, then published, then stored as published. After a crash in
between, it may be published again under the same id, but it is never lost.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Final

import msgspec

from muster import pacing, vocabulary
from muster_health.alerting import flap_damping
from muster_health.model import alerts, config


@dataclass(slots=True)
class _History:
    """When an alert was last published, when it became unwanted, and how often it has fired."""

    damping: flap_damping.FlapDamping
    published_at: float
    cleared_at: float | None = None


WhyEnded = Callable[[alerts.Key], tuple[vocabulary.Evidence, ...]]
MayOpen = Callable[[alerts.Key], bool]


_NONE: Final[Mapping[alerts.Key, alerts.Alert]] = {}
_NO_HISTORY: Final[Mapping[alerts.Key, _History]] = {}
"""The empty history that all plugins without alerts share; most plugins have none."""


class AlertLifecycle(msgspec.Struct, eq=False, gc=False):
    """The published open alerts of a plugin or of the fleet, and the unpublished changes."""

    _settings: config.Detection
    _bounds: config.Bounds
    published: Mapping[alerts.Key, alerts.Alert] = msgspec.field(default_factory=lambda: _NONE)
    pending: tuple[alerts.Alert, ...] = ()
    _history: Mapping[alerts.Key, _History] = msgspec.field(default_factory=lambda: _NO_HISTORY)
    _updates: pacing.TokenBucket | None = None

    def load(self, firing: Iterable[alerts.Alert], unpublished: Iterable[alerts.Alert]) -> None:
        """Load the alerts that another process published, and its pending changes."""
        self.published = {alert.key: alert for alert in firing} or _NONE
        self.pending = tuple(unpublished)

    def follow(
        self,
        wanted: Iterable[alerts.Alert],
        *,
        now: float,
        at: datetime,
        may_open: MayOpen,
        why_ended: WhyEnded,
    ) -> tuple[float | None, list[alerts.Alert]]:
        """Decide what to publish; return when to evaluate again (or None), and delayed alerts."""
        due: list[float] = []
        held: list[alerts.Alert] = []
        present = {alert.key: alert for alert in wanted}
        for key, published in list(self.published.items()):
            if key not in present:
                later = self._close(key, published, now, at, why_ended)
                if later is not None:
                    due.append(later)
        # the text that has been outdated for longest is updated first
        for key, alert in sorted(present.items(), key=self._told_at):
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

    def recovery(self, key: alerts.Key) -> tuple[float, float] | None:
        """Return when an alert's problem ended, and until when the alert is kept open.

        None if the problem has not ended, or no alert about it is open.
        """
        history = self._history.get(key)
        if history is None or history.cleared_at is None:
            return None
        return history.cleared_at, history.cleared_at + history.damping.hold_s

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
        due = now if history is None else history.published_at + self._bounds.update_s
        if published.kind is alert.kind:
            due = self._update_due(alert, due, now)
            if now < due:
                return due
        self._publish(key, published.becomes(alert, at), now)
        return None

    def _told_at(self, item: tuple[alerts.Key, alerts.Alert]) -> float:
        history = self._history.get(item[0])
        return (
            math.inf if history is None or item[0] not in self.published else history.published_at
        )

    def _update_due(self, alert: alerts.Alert, due: float, now: float) -> float:
        """Return when an alert may be updated; if that is now, count the update.

        Each update stores all alerts of the plugin, so all of them share one rate limit.
        """
        if now < due or alert.kind in alerts.OF_FLEET:
            return due
        if self._updates is None:
            self._updates = pacing.TokenBucket(
                per_s=1 / self._bounds.update_s, burst=self._bounds.alerts_per_plugin, now=now
            )
        due = self._updates.ready_at(now)
        if due <= now:
            self._updates.take(now)
        return due

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
        rest = {other: alert for other, alert in self.published.items() if other != key}
        self.published = rest or _NONE
        self.pending = (*self.pending, published.resolved(at, why_ended(key)))
        return None

    def _publish(self, key: alerts.Key, alert: alerts.Alert, now: float) -> None:
        self.published = {**self.published, key: alert}
        self._history_of(key, now).published_at = now
        self.pending = (*self.pending, alert)

    def _history_of(self, key: alerts.Key, now: float) -> _History:
        history = self._history.get(key)
        if history is None:
            kept = dict(self._history)
            if len(kept) >= 2 * self._bounds.alerts_per_plugin:
                # plugins choose the names of resources, so the number is limited: drop the oldest
                del kept[next(iter(kept))]
            history = kept[key] = _History(flap_damping.FlapDamping(self._settings), now)
            self._history = kept
        return history
