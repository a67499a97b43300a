"""Pure. One group of alerts, as one receiver knows it."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import msgspec

from muster import vocabulary
from muster_notifier import decision
from muster_notifier import notification as notifications

Key = tuple[str, str]
"""A receiver's name and a group's."""


class View(msgspec.Struct, frozen=True, kw_only=True):
    """One group as `/state` shows it; alerts by fingerprint."""

    receiver: str
    group: str
    firing: tuple[str, ...]
    resolved: tuple[str, ...]
    told_firing: tuple[str, ...]
    on_its_way: vocabulary.NotificationReason | None
    next_flush_s: float


@dataclass(slots=True, kw_only=True)
class Group:
    """The alerts of a group and what is under way for it; `told` is what the receiver knows.

    A resolved alert stays until the receiver was told, or need not be. `is_overdue` says that a
    flush came while a notification was on its way.
    """

    key: Key
    labels: Mapping[str, str]
    flush_at: float
    told: decision.Told | None
    alerts: dict[str, vocabulary.AlertChanged] = field(default_factory=dict)
    on_its_way: notifications.Notification | None = None
    is_overdue: bool = False

    def firing(self) -> list[vocabulary.AlertChanged]:
        """Return the alerts that fire."""
        return self._in_state(vocabulary.AlertState.FIRING)

    def resolved(self) -> list[vocabulary.AlertChanged]:
        """Return the alerts that are over."""
        return self._in_state(vocabulary.AlertState.RESOLVED)

    def view(self, now: float) -> View:
        """Return the group as it stands."""
        return View(
            receiver=self.key[0],
            group=self.key[1],
            firing=tuple(sorted(alert.fingerprint for alert in self.firing())),
            resolved=tuple(sorted(alert.fingerprint for alert in self.resolved())),
            told_firing=tuple(sorted(self.told.firing)) if self.told else (),
            on_its_way=self.on_its_way.reason if self.on_its_way else None,
            next_flush_s=round(self.flush_at - now, 3),
        )

    def _in_state(self, state: vocabulary.AlertState) -> list[vocabulary.AlertChanged]:
        return [alert for alert in self.alerts.values() if alert.state is state]
