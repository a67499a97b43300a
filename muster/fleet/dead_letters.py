"""Pure: dead letters, such as undelivered notifications, and how one is sent again.

A dead letter is sent again by putting it back into the outbox. The notifier then sends the current
state of the alerts, which may be resolved by then.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Final

SUBJECTS: Final = "muster.dlq.>"
NOTIFICATIONS: Final = "muster.dlq.notification.>"
_ID_SHOWN: Final = 12


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """A notification that could not be delivered, or an event that could not be processed."""

    subject: str
    body: bytes
    headers: Mapping[str, str]
    number: int
    """The sequence number of its message in the stream."""

    @property
    def id(self) -> str:
        """The id by which people name the dead letter."""
        return id_of(self.subject)

    @property
    def is_notification(self) -> bool:
        """Whether it is a notification, which can be sent again."""
        return self.subject.startswith(NOTIFICATIONS.removesuffix(">"))

    @property
    def receiver(self) -> str:
        """The receiver of the notification; empty for an event."""
        return self.headers.get("Muster-Receiver", "")

    @property
    def about(self) -> str:
        """The group of the notification, or the subject of the event."""
        return self.headers.get("Muster-Group") or self.headers.get("Muster-Subject", "")

    @property
    def error(self) -> str:
        """Why delivery or processing was abandoned."""
        return self.headers.get("Muster-Error") or self.headers.get("Muster-Reason", "")

    @property
    def attempts(self) -> str:
        """How often delivery was attempted; empty if unknown."""
        return self.headers.get("Muster-Attempts", "")

    @property
    def died_at(self) -> datetime | None:
        """When delivery was abandoned; None if unknown."""
        try:
            at = datetime.fromisoformat(self.headers.get("Muster-Died-At", ""))
        except ValueError:
            return None
        return at if at.tzinfo else None

    def summary(self) -> dict[str, str]:
        """Return the dead letter without its body, to print it as JSON."""
        return {"id": self.id, "subject": self.subject, **self.headers}


def id_of(subject: str) -> str:
    """Return the id by which people name the dead letter on a subject."""
    return subject.rpartition(".")[2][:_ID_SHOWN]


@dataclass(frozen=True, slots=True)
class Again:
    """The message that puts a dead letter back into the outbox; `key` detects duplicates."""

    subject: str
    key: str
    headers: Mapping[str, str]


def again(letter: DeadLetter) -> Again:
    """Return the message that replays a letter; simultaneous replays store one message."""
    name = hashlib.sha256(f"{letter.subject} {letter.number}".encode()).hexdigest()[:32]
    subject = f"muster.outbox.{letter.receiver}.replay-{name}"
    return Again(subject, f"replay {name}", {"Muster-Replay": "1"})
