"""Pure: one group of alerts for one receiver, and what was restored of groups not active now."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

import msgspec

from muster import vocabulary
from muster_notifier.routing import muting, notifications, routes

Key = tuple[str, str]
"""A receiver's name and a group's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """What a receiver was last told about a group, by fingerprint; `at` is monotonic seconds.

    `is_acknowledged` says that it was last told that somebody knows.
    """

    firing: frozenset[str]
    resolved: frozenset[str]
    at: float
    id: str
    is_acknowledged: bool = False


class View(msgspec.Struct, frozen=True, kw_only=True):
    """One group as `/state` shows it; alerts by fingerprint."""

    receiver: str
    group: str
    firing: tuple[str, ...]
    resolved: tuple[str, ...]
    told_firing: tuple[str, ...]
    muted: dict[str, str]
    on_its_way: vocabulary.NotificationReason | None
    next_flush_s: float


@dataclass(slots=True, kw_only=True)
class Group:
    """The alerts of a group and what is under way for it; `told` is what the receiver knows.

    A resolved alert stays until the receiver was told, or need not be. `is_overdue` says that a
    flush came while a notification was on its way, `is_postponed` that this one is tried again and
    again. `muted` says what was kept back at the last flush, and why.
    """

    key: Key
    route: routes.Route
    labels: Mapping[str, str]
    flush_at: float
    told: Told | None
    heard: str
    """The id of the last news, also of one that nothing fires any more."""
    alerts: dict[str, vocabulary.AlertChanged] = field(default_factory=dict)
    on_its_way: notifications.Notification | None = None
    is_overdue: bool = False
    is_postponed: bool = False
    muted: dict[str, muting.Muted] = field(default_factory=dict)

    def firing(self) -> list[vocabulary.AlertChanged]:
        """Return the alerts that fire."""
        return self._in_state(vocabulary.AlertState.FIRING)

    def resolved(self) -> list[vocabulary.AlertChanged]:
        """Return the alerts that are over."""
        return self._in_state(vocabulary.AlertState.RESOLVED)

    def has_told(self, fingerprint: str) -> bool:
        """Tell whether the receiver was told that this alert fires, or is being told."""
        if self.on_its_way is not None and fingerprint in self.on_its_way.firing_ids:
            return True
        return self.told is not None and fingerprint in self.told.firing

    def take_delivered(self, notification: notifications.Notification, *, at: float) -> None:
        """Know that the receiver was told; what it knows to be over is forgotten."""
        self.told = None
        self.heard = notification.id
        if notification.firing_ids:
            self.told = Told(
                firing=frozenset(notification.firing_ids),
                resolved=frozenset(notification.resolved_ids),
                at=at,
                id=notification.id,
                is_acknowledged=notification.reason is vocabulary.NotificationReason.ACKNOWLEDGED,
            )
        for name, began in zip(notification.resolved_ids, notification.episodes, strict=True):
            alert = self.alerts.get(name)
            is_over = alert is not None and alert.state is vocabulary.AlertState.RESOLVED
            if alert is not None and is_over and alert.starts_at == began:
                del self.alerts[name]

    def forget_resolved(self, *, told_too: bool) -> None:
        """Drop what is over; without `told_too` only what the receiver has never heard of."""
        for alert in self.resolved():
            if told_too or not self.has_told(alert.fingerprint):
                del self.alerts[alert.fingerprint]

    def view(self, now: float) -> View:
        """Return the group as it stands."""
        return View(
            receiver=self.key[0],
            group=self.key[1],
            firing=tuple(sorted(alert.fingerprint for alert in self.firing())),
            resolved=tuple(sorted(alert.fingerprint for alert in self.resolved())),
            told_firing=tuple(sorted(self.told.firing)) if self.told else (),
            muted={name: f"{by.cause}: {by.by}" for name, by in sorted(self.muted.items())},
            on_its_way=self.on_its_way.reason if self.on_its_way else None,
            next_flush_s=round(self.flush_at - now, 3),
        )

    def _in_state(self, state: vocabulary.AlertState) -> list[vocabulary.AlertChanged]:
        return [alert for alert in self.alerts.values() if alert.state is state]


_ENDED_MAX: Final = 20_000


class RestoredGroups:
    """By receiver and group; see the module."""

    def __init__(self) -> None:
        self._told: dict[Key, Told] = {}
        self._by_alert: dict[str, set[Key]] = {}
        self._ended: dict[Key, str] = {}

    def restore(self, key: Key, told: Told) -> None:
        """Take what the ledger says of a group, in which something fires."""
        self._told[key] = told
        for name in told.firing:
            self._by_alert.setdefault(name, set()).add(key)

    def put(self, key: Key, told: Told) -> None:
        """Take what is known of a group that is no longer needed."""
        self._told[key] = told

    def end(self, key: Key, heard: str) -> None:
        """Take the id of the last news of a group in which nothing fires any more.

        An alert that was another in the meantime may come back: that is news after that news.
        """
        self._ended.pop(key, None)
        self._ended[key] = heard
        if len(self._ended) > _ENDED_MAX:
            del self._ended[next(iter(self._ended))]

    def last_heard(self, key: Key) -> str:
        """Return the id of the last news of a group, or empty."""
        told = self._told.get(key)
        return told.id if told else self._ended.get(key, "")

    def get(self, key: Key) -> Told | None:
        """Return what is known of a group."""
        return self._told.get(key)

    def drop(self, key: Key) -> None:
        """Forget a group: it is here again, and knows it itself."""
        self._told.pop(key, None)
        self._ended.pop(key, None)

    def heard_of(self, fingerprint: str) -> list[Key]:
        """Return the groups in which, by the ledger of the start, an alert fires."""
        return sorted(self._by_alert.get(fingerprint, ()))
