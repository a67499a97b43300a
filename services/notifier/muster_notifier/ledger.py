"""Pure. The ledger: who was last told what about which group; one entry in a bucket for each."""

import hashlib
from datetime import datetime
from typing import Annotated

import msgspec

from muster import vocabulary
from muster_notifier import notification as notifications


class MalformedEntry(ValueError):
    """A remembered value that is no ledger entry."""


class Entry(msgspec.Struct, frozen=True, kw_only=True):
    """What a receiver was last told about a group; `firing` and `resolved` hold fingerprints."""

    receiver: Annotated[str, msgspec.Meta(min_length=1)]
    group: Annotated[str, msgspec.Meta(min_length=1)]
    reason: vocabulary.NotificationReason
    firing: tuple[str, ...]
    resolved: tuple[str, ...]
    at: datetime
    id: str
    attempts: vocabulary.Count


def entry_of(notification: notifications.Notification, *, at: datetime, attempts: int) -> Entry:
    """Return the entry that says `notification` was delivered at `at`."""
    return Entry(
        receiver=notification.receiver,
        group=notification.group,
        reason=notification.reason,
        firing=tuple(sorted(alert.fingerprint for alert in notification.firing)),
        resolved=tuple(sorted(alert.fingerprint for alert in notification.resolved)),
        at=at,
        id=notification.id,
        attempts=attempts,
    )


def key_of(receiver: str, group: str) -> str:
    """Return the bucket's key: a group's name has characters that a key may not have."""
    return f"{receiver}.{hashlib.sha256(group.encode()).hexdigest()[:16]}"


def encode(entry: Entry) -> bytes:
    """Return the entry as JSON."""
    return msgspec.json.encode(entry)


def decode(value: bytes) -> Entry:
    """Return the entry. Raises MalformedEntry."""
    try:
        entry = msgspec.json.decode(value, type=Entry)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise MalformedEntry(str(error)) from None
    if entry.at.tzinfo is None:
        raise MalformedEntry("at: a time without a time zone")
    return entry
