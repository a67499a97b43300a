"""Pure: dead letters: notifications that could not be delivered, each with its own subject.

When a notification fails again, it replaces its previous dead letter (`Nats-Rollup`): a receiver
that is unavailable for days leaves one dead letter for each notification. A later notification that
the receiver accepts removes the dead letters about the same alerts. If the alerts of a replayed
dead letter still fire, its group is flushed instead; otherwise it is sent as resolved, unless the
receiver was notified of these alerts in the meantime.
"""

import hashlib
from collections.abc import Mapping
from datetime import datetime
from typing import Final

import msgspec

from muster import vocabulary
from muster_notifier.receivers import headline, results
from muster_notifier.routing import notifications

_PREFIX: Final = "muster.dlq.notification."
SUBJECTS: Final = f"{_PREFIX}>"
REPLAY: Final = "Muster-Replay"
"""The header of a dead letter that was put back into the outbox by hand."""
NO_SUCH_RECEIVER: Final = results.Result(
    results.Outcome.NOT_FOUND, "a receiver with this name is no longer configured"
)
_ABOUT_DEAD: Final = "about-dead"
_SHOWN_MAX: Final = 500
_ID_MAX: Final = 50
Message = tuple[str, bytes, str, Mapping[str, str]]
"""A message for a stream: its subject, body, deduplication key and headers."""


def as_of_now(
    notification: notifications.Notification, *, last: notifications.LedgerEntry | None
) -> notifications.Notification | None:
    """Return the message to send instead of a dead letter whose alerts no longer fire.

    Return None if the receiver's last notification about the group covers these alerts, or if that
    notification lists firing alerts: the group's next one then reports their end. A dead letter
    without firing alerts is returned unchanged. Otherwise, the message has a new id: a receiver
    that has already received the dead letter would drop a message with the same id.
    """
    if last is not None and (last.firing or is_covered(notification, last)):
        return None
    if not notification.firing_ids:
        return notification
    resolved = tuple(
        msgspec.structs.replace(
            alert, state=vocabulary.AlertState.RESOLVED, ends_at=notification.at
        )
        for alert in notification.firing
    )
    began = tuple(alert.starts_at for alert in notification.firing)
    # a notification may list more fingerprints than it contains alerts
    began += (notification.at,) * (len(notification.firing_ids) - len(began))
    return msgspec.structs.replace(
        notification,
        id=f"{notification.id[:_ID_MAX]}-resolved",
        reason=vocabulary.NotificationReason.ALL_RESOLVED,
        firing=(),
        resolved=(*resolved, *notification.resolved),
        firing_ids=(),
        resolved_ids=(*notification.firing_ids, *notification.resolved_ids),
        episodes=(*began, *notification.episodes),
    )


def is_covered(notification: notifications.Notification, last: notifications.LedgerEntry) -> bool:
    """Return whether `last` is later, has the same group, and lists all these alerts."""
    alerts = {*notification.firing_ids, *notification.resolved_ids}
    return (
        notification.group == last.group
        and notification.at <= last.at
        and alerts <= {*last.firing, *last.resolved}
    )


def groups_of(last: notifications.LedgerEntry) -> list[str]:
    """Return the subject prefixes under which dead letters about the entry's group are stored."""
    names = notifications.token(last.group), _ABOUT_DEAD
    return [f"{_PREFIX}{last.receiver}.{name}" for name in names]


def dead_letter(
    notification: notifications.Notification,
    result: results.Result,
    *,
    attempts: int,
    at: datetime,
) -> Message:
    """Return the dead letter of a failed notification."""
    return (
        subject(notification),
        notifications.encode(notification),
        f"{notification.id}:{at.isoformat()}",
        {
            "Nats-Rollup": "sub",
            "Muster-Receiver": notification.receiver,
            "Muster-Group": _plain(notification.group),
            "Muster-Attempts": str(attempts),
            "Muster-Outcome": result.outcome,
            "Muster-Error": _plain(result.detail),
            "Muster-Died-At": at.isoformat(),
        },
    )


def unreadable(receiver: str, body: bytes, error: str) -> Message:
    """Return a dead letter for an unreadable message in the outbox."""
    name = hashlib.sha256(body).hexdigest()[:32]
    headers = {"Muster-Receiver": receiver, "Muster-Error": _plain(error)}
    return f"muster.dlq.notification.{receiver}.unreadable.{name}", body, name, headers


def is_dead(subject: str) -> bool:
    """Return whether messages on this subject are dead letters."""
    return subject.startswith(_PREFIX)


def is_about_dead(where: str) -> bool:
    """Return whether the dead letter with this subject is itself about dead letters."""
    return where.split(".")[4:5] == [_ABOUT_DEAD]


def subject(notification: notifications.Notification) -> str:
    """Return the subject under which a dead letter is stored."""
    kinds = {alert.kind for alert in (*notification.firing, *notification.resolved)}
    group = notifications.token(notification.group)
    if kinds == {vocabulary.AlertKind.DEAD_LETTERS}:
        group = _ABOUT_DEAD
    return f"muster.dlq.notification.{notification.receiver}.{group}.{notification.id}"


def _plain(text: str) -> str:
    """Return the text for a header: one short line, with characters outside ASCII escaped."""
    shown = headline.line(text, _SHOWN_MAX)
    return shown.encode("ascii", "backslashreplace").decode()
