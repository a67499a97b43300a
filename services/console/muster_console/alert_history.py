"""Pure: resolved alerts, notifications and alerts per day, from the events about alerts.

The number of stored entries is limited; `is_cut` reports that entries were left out or dropped.
"""

import collections
from collections.abc import Iterable, Mapping
from datetime import UTC, date, datetime, timedelta
from typing import Final

import msgspec

from muster import codec, matching, vocabulary
from muster.fleet import dead_letters

KEPT: Final = timedelta(days=1)
"""How long resolved alerts and notifications are shown."""
DAYS: Final = 14
"""The number of days for which the alerts per day are counted."""
RESOLVED_MAX: Final = 1_000
_DELIVERIES_MAX: Final = 2_000
_PER_DAY_MAX: Final = 20_000
_FINGERPRINTS_MAX: Final = 200
_SKEW: Final = timedelta(seconds=5)
"""How far the notifier's clock may be behind health's."""


class Resolved(msgspec.Struct, frozen=True, kw_only=True):
    """An alert that no longer fires."""

    fingerprint: str
    node: str
    kind: str
    severity: str
    summary: str
    starts_at: datetime
    ends_at: datetime
    labels: Mapping[str, str]
    runbook: str = ""


class Delivery(msgspec.Struct, frozen=True, kw_only=True):
    """The outcome of one notification about a group of alerts."""

    at: datetime
    receiver: str
    group: str
    reason: str
    is_failed: bool
    outcome: str
    """What the receiver answered, or why the notification failed."""
    attempts: int
    firing: frozenset[str]
    resolved: frozenset[str]
    id: str
    times: int = 1
    """How many notifications the entry represents; see `outcomes`."""


class DeadLetters(msgspec.Struct, frozen=True, kw_only=True):
    """Undeliverable notifications, the newest first; `total` also counts those not listed."""

    letters: tuple[dead_letters.DeadLetter, ...] = ()
    total: int = 0
    problem: str = "not read yet"
    """Why the dead letters are unknown; empty if they are known."""


class AlertHistory:
    """Collects resolved alerts, notifications, dead letters and the number of alerts per day."""

    def __init__(self) -> None:
        self.revision = 0
        """A number that grows with each change."""
        self.dead_letters = DeadLetters()
        self.is_loaded = False
        """Whether the events from before this process started have been read."""
        self.is_cut = False
        """Whether entries were left out or dropped, because there were too many."""
        self._resolved: collections.OrderedDict[tuple[str, datetime], Resolved] = (
            collections.OrderedDict()
        )
        self._deliveries: collections.OrderedDict[str, Delivery] = collections.OrderedDict()
        self._per_day: dict[date, dict[tuple[str, datetime], str]] = {}

    def receive(self, event: codec.CloudEvent, *, at: datetime) -> None:
        """Record an event; an event that is received again is counted only once."""
        match event.data:
            case vocabulary.AlertChanged() as alert:
                self._count(alert, at)
                if alert.state is vocabulary.AlertState.RESOLVED:
                    self._keep_resolved(alert, event.time, at)
            case vocabulary.NotificationDelivered(answer=answer) as sent:
                self._keep_delivery(event, sent, outcome=answer, is_failed=False, at=at)
            case vocabulary.NotificationFailed(error=error) as sent:
                self._keep_delivery(event, sent, outcome=error, is_failed=True, at=at)
            case _:
                return
        self.revision += 1

    def receive_dead_letters(self, now_dead: DeadLetters) -> None:
        """Store the current dead letters instead of those stored before."""
        if now_dead != self.dead_letters:
            self.dead_letters = now_dead
            self.revision += 1

    def resolved(self, at: datetime) -> list[Resolved]:
        """Return the alerts that were resolved within the last day, the last resolved first."""
        recent = [each for each in self._resolved.values() if each.ends_at > at - KEPT]
        return sorted(recent, key=lambda each: each.ends_at, reverse=True)

    def deliveries(self, at: datetime) -> list[Delivery]:
        """Return the notifications of the last day, the newest first."""
        recent = [each for each in self._deliveries.values() if each.at > at - KEPT]
        return sorted(recent, key=lambda each: each.at, reverse=True)

    def per_day(self, today: date) -> list[tuple[date, Mapping[str, int]]]:
        """Return how many alerts began on each of the last days, by severity; the oldest first."""
        days = [today - timedelta(days=back) for back in reversed(range(DAYS))]
        return [
            (day, dict(collections.Counter(self._per_day.get(day, {}).values()))) for day in days
        ]

    def _count(self, alert: vocabulary.AlertChanged, at: datetime) -> None:
        day = alert.starts_at.astimezone(UTC).date()
        oldest = at.astimezone(UTC).date() - timedelta(days=DAYS - 1)
        if day < oldest:
            return
        for passed in [each for each in self._per_day if each < oldest]:
            del self._per_day[passed]
        of_day = self._per_day.setdefault(day, {})
        key = (alert.fingerprint, alert.starts_at)
        if len(of_day) < _PER_DAY_MAX or key in of_day:
            of_day[key] = str(alert.severity)
        else:
            self.is_cut = True

    def _keep_resolved(self, alert: vocabulary.AlertChanged, time: datetime, at: datetime) -> None:
        ends_at = alert.ends_at or time
        if ends_at <= at - KEPT:
            return
        self._resolved[alert.fingerprint, alert.starts_at] = Resolved(
            fingerprint=alert.fingerprint,
            node=alert.node,
            kind=str(alert.kind),
            severity=str(alert.severity),
            summary=alert.summary,
            starts_at=alert.starts_at,
            ends_at=ends_at,
            labels=matching.labels_of(alert),
            runbook=alert.runbook,
        )
        while len(self._resolved) > RESOLVED_MAX:
            self._resolved.popitem(last=False)
            self.is_cut = True

    def _keep_delivery(
        self,
        event: codec.CloudEvent,
        sent: vocabulary.NotificationEvent,
        *,
        outcome: str,
        is_failed: bool,
        at: datetime,
    ) -> None:
        if event.time <= at - KEPT:
            return
        self._deliveries[event.id] = Delivery(
            at=event.time,
            receiver=sent.receiver,
            group=sent.group,
            reason=str(sent.reason),
            is_failed=is_failed,
            outcome=outcome,
            attempts=sent.attempts,
            firing=frozenset(sent.firing[:_FINGERPRINTS_MAX]),
            resolved=frozenset(sent.resolved[:_FINGERPRINTS_MAX]),
            id=event.id,
        )
        while len(self._deliveries) > _DELIVERIES_MAX:
            self._deliveries.popitem(last=False)
            self.is_cut = True


def about(deliveries: Iterable[Delivery], fingerprints: Iterable[str]) -> list[Delivery]:
    """Return the notifications that name at least one of the alerts; their order is kept."""
    wanted = set(fingerprints)
    return [each for each in deliveries if wanted & each.firing or wanted & each.resolved]


def still_firing(delivery: Delivery, firing: Mapping[str, datetime | None]) -> set[str]:
    """Return the fingerprints of the firing alerts that a notification reported as firing.

    `firing` has the start time of each firing alert. An earlier alert may have had the same
    fingerprint; a notification from before the start of the firing alert was about the earlier one.
    """
    return {
        fingerprint
        for fingerprint in firing.keys() & delivery.firing
        if (starts_at := firing[fingerprint]) is None or delivery.at >= starts_at - _SKEW
    }


def title(group: str) -> str:
    """Return the labels in a group's name without its route, or the name if it has no labels."""
    labels = group.rpartition(":{")[2].removesuffix("}")
    return labels.replace(",", ", ") or group


def outcomes(deliveries: Iterable[Delivery], *, most: int) -> tuple[Delivery, ...]:
    """Return the newest notification for each set of receiver, group, reason and `is_failed`.

    `times` counts the notifications that have these in common. `deliveries` and the result begin
    with the newest. At most `most` are returned: the newest of each receiver takes precedence,
    then the newest of the others.
    """
    newest: dict[tuple[str, str, str, bool], Delivery] = {}
    times: collections.Counter[tuple[str, str, str, bool]] = collections.Counter()
    for each in deliveries:
        key = each.receiver, each.group, each.reason, each.is_failed
        newest.setdefault(key, each)
        times[key] += 1
    receivers = {each.receiver: key for key, each in reversed(newest.items())}
    last = set(receivers.values())
    chosen = set(sorted(newest, key=lambda key: key not in last)[:most])
    return tuple(
        msgspec.structs.replace(each, times=times[key])
        for key, each in newest.items()
        if key in chosen
    )
