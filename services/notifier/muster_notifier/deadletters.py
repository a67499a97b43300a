"""Pure: Dead letters: what could not be delivered, kept under one subject for each piece of news.

The same news that dies again takes the place of its former self (`Nats-Rollup`), so that a receiver
that is away for days leaves one letter for each thing that it did not hear.
"""

import hashlib
from collections.abc import Mapping
from datetime import datetime
from typing import Final

from muster import vocabulary
from muster_notifier import answers, message
from muster_notifier import notification as notifications

SUBJECTS: Final = "muster.dlq.notification.>"
REPLAY: Final = "Muster-Replay"
"""The header of a letter that was put back into the outbox by hand."""

TO_NOBODY: Final = answers.Answer(
    outcome=answers.Outcome.NOT_FOUND, detail="no receiver of this name is configured any more"
)

_ABOUT_DEAD: Final = "about-dead"
_SHOWN_MAX: Final = 500

Message = tuple[str, bytes, str, Mapping[str, str]]
"""Subject, body, key by which a repeat is dropped, headers."""


def bury(
    notification: notifications.Notification,
    answer: answers.Answer,
    *,
    attempts: int,
    at: datetime,
) -> Message:
    """Return the dead letter."""
    return (
        subject(notification),
        notifications.encode(notification),
        f"{notification.id}:{at.isoformat()}",
        {
            "Nats-Rollup": "sub",
            "Muster-Receiver": notification.receiver,
            "Muster-Group": _plain(notification.group),
            "Muster-Attempts": str(attempts),
            "Muster-Outcome": answer.outcome,
            "Muster-Error": _plain(answer.detail),
            "Muster-Died-At": at.isoformat(),
        },
    )


def unreadable(receiver: str, body: bytes, error: str) -> Message:
    """Return what was in the outbox and is no letter."""
    name = hashlib.sha256(body).hexdigest()[:32]
    headers = {"Muster-Receiver": receiver, "Muster-Error": _plain(error)}
    return f"muster.dlq.notification.{receiver}.unreadable.{name}", body, name, headers


def is_about_dead(where: str) -> bool:
    """Tell whether a dead letter only says that there are dead letters."""
    return where.split(".")[4:5] == [_ABOUT_DEAD]


def subject(notification: notifications.Notification) -> str:
    """Return where a dead letter is kept."""
    kinds = {alert.kind for alert in (*notification.firing, *notification.resolved)}
    group = notifications.token(notification.group)
    if kinds == {vocabulary.AlertKind.DEAD_LETTERS}:
        group = _ABOUT_DEAD
    return f"muster.dlq.notification.{notification.receiver}.{group}.{notification.id}"


def _plain(text: str) -> str:
    """Return a text as a header can hold it."""
    shown = message.line(text, _SHOWN_MAX)
    return shown.encode("ascii", "backslashreplace").decode()
