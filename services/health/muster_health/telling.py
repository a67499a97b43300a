"""Pure. From what is to what was told: the alerts of one plugin, or of the fleet.

What is told follows from two levels, what should be open and what was told to be open, and never
from single changes. So it does not matter which process told it, or how often either was asked.

What is told is remembered first, with what is still to be told; then told; then remembered
without. A crash at any point between repeats a telling under the same id, or nothing.
"""

from collections.abc import Callable, Iterable
from datetime import datetime

from muster import vocabulary
from muster_health import alerts, config, damping

Why = Callable[[alerts.Key], tuple[vocabulary.Evidence, ...]]


class Telling:
    """The open alerts of one owner as they were told, and what is on its way."""

    __slots__ = ("_bounds", "_cleared_at", "_damping", "_settings", "_told_at", "told", "untold")

    def __init__(self, settings: config.Detection, bounds: config.Bounds) -> None:
        self.told: dict[alerts.Key, alerts.Alert] = {}
        self.untold: list[alerts.Alert] = []
        self._settings = settings
        self._bounds = bounds
        self._damping: dict[alerts.Key, damping.Damping] = {}
        self._cleared_at: dict[alerts.Key, float] = {}
        self._told_at: dict[alerts.Key, float] = {}

    def load(self, firing: Iterable[alerts.Alert], untold: Iterable[alerts.Alert]) -> None:
        """Take what a process before us, or beside us, told and had still to tell."""
        self.told = {alert.key: alert for alert in firing}
        self.untold = list(untold)

    def follow(
        self,
        wanted: Iterable[alerts.Alert],
        *,
        now: float,
        at: datetime,
        may_open: Callable[[], bool],
        why_ended: Why,
    ) -> tuple[float | None, list[alerts.Alert]]:
        """Find what is to be told; return when to look again, and what must wait for its turn."""
        due: list[float] = []
        held: list[alerts.Alert] = []
        present = {alert.key: alert for alert in wanted}
        for key, known in list(self.told.items()):
            if key not in present:
                later = self._close(key, known, now, at, why_ended)
                if later is not None:
                    due.append(later)
        for key, alert in present.items():
            self._cleared_at.pop(key, None)
            told = self.told.get(key)
            if told is not None:
                later = self._change(key, told, alert, now, at)
                if later is not None:
                    due.append(later)
            elif len(self.told) >= self._bounds.alerts_per_plugin or not may_open():
                held.append(alert)
            else:
                self._open(key, alert, now)
        return min(due, default=None), held

    def end_all(self, at: datetime, evidence: tuple[vocabulary.Evidence, ...]) -> None:
        """Resolve all that is open."""
        self.untold += [alert.resolved(at, evidence) for alert in self.told.values()]
        self.told = {}

    def _open(self, key: alerts.Key, alert: alerts.Alert, now: float) -> None:
        if alert.resource:
            if (
                key not in self._damping
                and len(self._damping) >= 2 * self._bounds.alerts_per_plugin
            ):
                # names of resources are the plugin's choice: the oldest one makes room
                self._damping.pop(next(iter(self._damping)))
            self._damping.setdefault(key, damping.Damping(self._settings)).fell(now)
        self._say(key, alert, now)

    def _change(
        self, key: alerts.Key, told: alerts.Alert, alert: alerts.Alert, now: float, at: datetime
    ) -> float | None:
        if told.says_the_same(alert):
            return None
        due = self._told_at.get(key, now - self._bounds.update_s) + self._bounds.update_s
        if told.kind is alert.kind and now < due:
            return due
        self._say(key, told.becomes(alert, at), now)
        return None

    def _close(
        self, key: alerts.Key, told: alerts.Alert, now: float, at: datetime, why_ended: Why
    ) -> float | None:
        damped = self._damping.get(key)
        due = self._cleared_at.setdefault(key, now) + (damped.hold_s if damped else 0.0)
        if now < due:
            return due
        del self.told[key], self._cleared_at[key]
        self._told_at.pop(key, None)
        self.untold.append(told.resolved(at, why_ended(key)))
        return None

    def _say(self, key: alerts.Key, alert: alerts.Alert, now: float) -> None:
        self.told[key] = alert
        self._told_at[key] = now
        self.untold.append(alert)
