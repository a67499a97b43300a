"""Pure: the ledger: what each receiver was last notified of, one entry for each group."""

from collections.abc import Mapping
from datetime import datetime
from typing import Annotated

import msgspec

from muster import vocabulary
from muster_notifier.routing import notifications


class MalformedEntry(ValueError):
    """A stored value that is no ledger entry."""


class Entry(msgspec.Struct, frozen=True, kw_only=True):
    """The last notification of a receiver about a group; alerts by fingerprint.

    `at` is when it was decided, so that a group's timers go on from there after a restart. `data`
    is needed to send more about the same group, such as the message to edit.
    """

    receiver: Annotated[str, msgspec.Meta(min_length=1)]
    group: Annotated[str, msgspec.Meta(min_length=1)]
    reason: vocabulary.NotificationReason
    firing: tuple[str, ...]
    resolved: tuple[str, ...]
    at: datetime
    id: str
    attempts: vocabulary.Count
    data: dict[str, str] = {}


def entry_of(
    notification: notifications.Notification,
    *,
    attempts: int,
    data: Mapping[str, str] | None = None,
) -> Entry:
    """Return the entry that says `notification` was delivered."""
    return Entry(
        receiver=notification.receiver,
        group=notification.group,
        reason=notification.reason,
        firing=tuple(sorted(notification.firing_ids)),
        resolved=tuple(sorted(notification.resolved_ids)),
        at=notification.at,
        id=notification.id,
        attempts=attempts,
        data=dict(data or {}),
    )


def key_of(receiver: str, group: str) -> str:
    """Return the bucket's key: a group's name has characters that a key may not have."""
    return f"{receiver}.{notifications.token(group)}"


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
