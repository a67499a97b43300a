"""Pure: one notification about one group of alerts to one receiver, before its text is written.

The outbox contains it as JSON, with as many alerts as fit and the fingerprints of all alerts. The
ledger has an entry for the last notification to each receiver about each group.
"""

import hashlib
from collections.abc import Collection, Mapping, Sequence
from datetime import datetime
from typing import Annotated, Final, TypeVar

import msgspec

from muster import codec, vocabulary
from muster.vocabulary import facts

ENCODED_BYTES_MAX: Final = 256 * 1024
ALERTS_MAX: Final = 100
PODS_MAX: Final = 50
_ASPECTS_MAX: Final = 64
"""The maximum number of an alert's aspects that cause notifications.

Without a limit, a plugin could cause any number of notifications by reporting new device names.
"""

_URGENCY: Final = tuple(vocabulary.Severity)
_EVIDENCE_MAX: Final = 10


class Malformed(ValueError):
    """A message in the outbox is not a notification, or a value in the ledger is not an entry."""


Time = Annotated[datetime, msgspec.Meta(tz=True)]
Stored = TypeVar("Stored")
Aspects = Mapping[str, frozenset[str]]
"""The aspects of alerts by fingerprint; empty if more than `ALERTS_MAX` alerts fire."""
_NO_ASPECTS: Final[Aspects] = {}


class Notification(msgspec.Struct, frozen=True, kw_only=True):
    """The state of a group when the decision to notify a receiver was made, at `at`.

    `id` is derived from the content, so that a receiver can drop a repeat after a crash.
    `firing_ids` and `resolved_ids` are the fingerprints of all alerts; `firing` and `resolved` are
    the alerts, the most urgent first, but only as many as fit if the notification was read from the
    outbox. `episodes` contains the start of each resolved alert. `why` is the reason for notifying
    this receiver if that is not obvious, for example if it is an owner of a workload.
    `pods_total` is the number of pods of all alerts; `pods_of` has the number for each alert that
    names only some of its pods. `aspects` are the aspects of the firing alerts in this and earlier
    notifications.
    """

    id: Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9][-A-Za-z0-9]{0,62}$")]
    receiver: str
    group: str
    labels: dict[str, str]
    reason: vocabulary.NotificationReason
    firing: tuple[vocabulary.AlertChanged, ...]
    resolved: tuple[vocabulary.AlertChanged, ...]
    firing_ids: tuple[str, ...]
    resolved_ids: tuple[str, ...]
    episodes: tuple[datetime, ...]
    send_resolved: bool
    at: Time
    pods_total: int = 0
    pods_of: dict[str, int] = {}
    aspects: dict[str, frozenset[str]] = {}
    why: str = ""
    is_test: bool = False

    def __post_init__(self) -> None:
        """Refuse a time without a time zone, or with a year out of range."""
        facts.check_time("at", self.at)

    @property
    def node(self) -> str:
        """The node in the group's labels; the fleet if they contain no node."""
        return self.labels.get("node", vocabulary.FLEET)

    @property
    def state(self) -> vocabulary.AlertState:
        """Return firing if any alert still fires, else resolved."""
        return vocabulary.AlertState.FIRING if self.firing_ids else vocabulary.AlertState.RESOLVED

    @property
    def is_ledger_only(self) -> bool:
        """Return whether the notification is not sent, but only recorded in the ledger."""
        return not self.firing_ids and not self.send_resolved

    @property
    def notified_resolved(self) -> tuple[vocabulary.AlertChanged, ...]:
        """The resolved alerts to report to the receiver; none without `send_resolved`."""
        return self.resolved if self.send_resolved else ()

    @property
    def notified_total(self) -> int:
        """The number of alerts to report to the receiver, including those that are only counted."""
        return len(self.firing_ids) + (len(self.resolved_ids) if self.send_resolved else 0)


def most_urgent_first(
    alerts: Sequence[vocabulary.AlertChanged],
) -> tuple[vocabulary.AlertChanged, ...]:
    """Return the alerts, the most urgent first; the order of `alerts` does not matter."""
    return tuple(
        sorted(alerts, key=lambda a: (_URGENCY.index(a.severity), a.node, a.devices, a.fingerprint))
    )


def create(  # noqa: PLR0913  # the parts of a notification, each by its name
    *,
    after: str,
    receiver: str,
    group: str,
    labels: Mapping[str, str],
    reason: vocabulary.NotificationReason,
    firing: Sequence[vocabulary.AlertChanged],
    resolved: Sequence[vocabulary.AlertChanged],
    send_resolved: bool,
    at: datetime,
    why: str = "",
    before: Aspects = _NO_ASPECTS,
) -> Notification:
    """Return a notification; `after` is the id of the group's previous one, or empty.

    `before` has the aspects that the receiver was notified of.

    A notifier that crashed after sending, but before recording, makes the same decision again and
    creates the same id. A reminder follows another notification, so it gets another id.
    """
    fires, ended = most_urgent_first(firing), most_urgent_first(resolved)
    parts = [after, receiver, group, reason]
    parts += sorted(f"firing {alert.fingerprint} {alert.starts_at.isoformat()}" for alert in fires)
    parts += sorted(
        f"resolved {alert.fingerprint} {alert.starts_at.isoformat()}" for alert in ended
    )
    return Notification(
        id=hashlib.sha256("\n".join(parts).encode()).hexdigest()[:32],
        receiver=receiver,
        group=group,
        labels=dict(labels),
        reason=reason,
        firing=fires,
        resolved=ended,
        firing_ids=tuple(alert.fingerprint for alert in fires),
        resolved_ids=tuple(alert.fingerprint for alert in ended),
        episodes=tuple(alert.starts_at for alert in ended),
        send_resolved=send_resolved,
        at=at,
        why=why,
        aspects=_all_aspects(fires, before),
        pods_total=sum(_affected(alert) for alert in (*fires, *ended)),
        pods_of={
            alert.fingerprint: _affected(alert)
            for alert in (*fires, *ended)
            if _affected(alert) > min(len(alert.pods), PODS_MAX)
        },
    )


def aspects_of(alert: vocabulary.AlertChanged) -> frozenset[str]:
    """Return short hashes of an alert's cause and of each device, and one more if it affects pods.

    The cause is the kind and the advice; the summary is not used, because its details change.
    """
    texts = [f"cause {alert.kind} {alert.advice}", *(f"device {name}" for name in alert.devices)]
    texts += ["pods"] if alert.pods or alert.pods_total else []
    return frozenset(hashlib.sha256(text.encode()).hexdigest()[:8] for text in texts)


def has_new_aspect(firing: Collection[vocabulary.AlertChanged], before: Aspects) -> bool:
    """Return whether a firing alert from an earlier notification has an aspect not in `before`.

    Each aspect is new only once, so an alert that alternates between two states is not sent each
    time. If more than `ALERTS_MAX` alerts fire, or if an alert has had `_ASPECTS_MAX` aspects, new
    aspects are ignored.
    """
    if len(firing) > ALERTS_MAX:
        return False
    known = ((alert, before[alert.fingerprint]) for alert in firing if alert.fingerprint in before)
    return any(len(old) < _ASPECTS_MAX and not aspects_of(alert) <= old for alert, old in known)


def _all_aspects(
    firing: Collection[vocabulary.AlertChanged], before: Aspects
) -> dict[str, frozenset[str]]:
    if len(firing) > ALERTS_MAX:
        return {}
    nothing: frozenset[str] = frozenset()
    return {
        alert.fingerprint: before.get(alert.fingerprint, nothing) | aspects_of(alert)
        for alert in firing
    }


def _affected(alert: vocabulary.AlertChanged) -> int:
    """Return the number of pods that an alert affects; the alert may name only the first ones."""
    return max(len(alert.pods), alert.pods_total)


def token(group: str) -> str:
    """Return a short hash of a group's name, for subjects and bucket keys."""
    return hashlib.sha256(group.encode()).hexdigest()[:16]


def encode(notification: Notification) -> bytes:
    """Return the notification as JSON, with as many alerts as fit."""
    count = ALERTS_MAX
    while True:
        encoded = msgspec.json.encode(_with_at_most(notification, count), order="deterministic")
        if len(encoded) <= ENCODED_BYTES_MAX or count == 0:
            return encoded
        count //= 2


def decode(value: bytes) -> Notification:
    """Return the notification in a message. Raises Malformed."""
    return _decode(value, Notification)


def _with_at_most(notification: Notification, count: int) -> Notification:
    firing = notification.firing[:count]
    resolved = notification.resolved[: count - len(firing)]
    names = [alert.fingerprint for alert in (*firing, *resolved)]
    pods_of = notification.pods_of
    return msgspec.structs.replace(
        notification,
        firing=tuple(_brief(alert) for alert in firing),
        resolved=tuple(_brief(alert) for alert in resolved),
        pods_of={name: pods_of[name] for name in names if name in pods_of},
    )


def _brief(alert: vocabulary.AlertChanged) -> vocabulary.AlertChanged:
    if len(alert.pods) <= PODS_MAX and len(alert.evidence) <= _EVIDENCE_MAX:
        return alert
    return msgspec.structs.replace(
        alert, pods=alert.pods[:PODS_MAX], evidence=alert.evidence[:_EVIDENCE_MAX]
    )


class LedgerEntry(msgspec.Struct, frozen=True, kw_only=True):
    """The last notification to a receiver about a group; `firing` and `resolved` are fingerprints.

    `at` is when the decision to notify was made; after a restart, the group's timers continue from
    that time. `data` has what later messages about the group need, for example the id of the
    message to edit. `starts_at` is when the first of the firing alerts began; None if none fires.
    """

    receiver: Annotated[str, msgspec.Meta(min_length=1)]
    group: Annotated[str, msgspec.Meta(min_length=1)]
    reason: vocabulary.NotificationReason
    firing: tuple[str, ...]
    resolved: tuple[str, ...]
    at: Time
    id: str
    attempts: vocabulary.Count
    data: dict[str, str] = {}
    starts_at: Time | None = None
    aspects: dict[str, frozenset[str]] = {}

    def __post_init__(self) -> None:
        """Refuse a time without a time zone, or with a year out of range."""
        facts.check_time("at", self.at)


def entry_of(
    notification: Notification,
    *,
    attempts: int,
    data: Mapping[str, str] | None = None,
) -> LedgerEntry:
    """Return the ledger entry for a delivered `notification`."""
    return LedgerEntry(
        receiver=notification.receiver,
        group=notification.group,
        reason=notification.reason,
        firing=tuple(sorted(notification.firing_ids)),
        resolved=tuple(sorted(notification.resolved_ids)),
        at=notification.at,
        id=notification.id,
        attempts=attempts,
        data=dict(data or {}),
        starts_at=min((alert.starts_at for alert in notification.firing), default=None),
        aspects=notification.aspects,
    )


def ledger_key(receiver: str, group: str) -> str:
    """Return an entry's key in the bucket: the receiver, and a hash of the group's name."""
    return f"{receiver}.{token(group)}"


def encode_entry(entry: LedgerEntry) -> bytes:
    """Return the entry as JSON."""
    return msgspec.json.encode(entry, order="deterministic")


def decode_entry(value: bytes) -> LedgerEntry:
    """Return the ledger entry in a value. Raises Malformed."""
    return _decode(value, LedgerEntry)


def _decode(value: bytes, shape: type[Stored]) -> Stored:
    try:
        return msgspec.json.decode(value, type=shape)
    except codec.UNREADABLE as error:
        raise Malformed(str(error)) from None
