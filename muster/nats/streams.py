"""Pure: defines muster's JetStream streams and buckets, with all their limits.

Plugins report to EVENTS and INVENTORY. ALERTS stores health's conclusions, LABELS the labeler's
decisions, NOTIFICATIONS the notifier's deliveries, and AUDIT what people did in the console: no
service can evict the messages of another. DEAD_LETTERS stores unreadable events and undelivered
notifications, OUTBOX the notifications to deliver.

Every full stream except OUTBOX removes its oldest messages, regardless of who published them. So
plugins' messages are small, and few are stored per subject: a node that floods the stream replaces
its own earlier messages, and fills only a small part of the stream.
"""

from dataclasses import dataclass
from typing import Final

_DAY_S: Final = 86_400.0
_HOUR_S: Final = 3_600.0
_KIB: Final = 1024
_FULL: Final = 0.9
_MIB: Final = 1024 * _KIB
HEADERS_BYTES_MAX: Final = _KIB
"""The part of a stream's maximum message size that is reserved for headers."""
PLUGINS_MAX: Final = 8
"""Equal to `vocabulary.PLUGINS_MAX`; stand-ins import this module but not `vocabulary`."""
_PAGES_MAX: Final = 64
"""Equal to `vocabulary.PAGES_MAX`."""
_PAGE_BYTES_MAX: Final = 48 * _KIB
_REPEAT_S: Final = 120.0
"""How long nats-server remembers the ids of plugins' messages. The server keeps the ids in memory,
and an id may be as long as a message. A later duplicate is stored again; readers recognise it by
its id.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stream:
    """One stream. If it is full, new messages replace the oldest, or are refused if `is_queue`."""

    name: str
    subjects: tuple[str, ...]
    age_max_s: float
    bytes_max: int
    per_subject_max: int
    kept_min_s: float = 0.0
    """The minimum age that the oldest message of a full stream should have."""
    message_bytes_max: int = _MIB
    duplicate_window_s: float = 600.0
    """How long the server recognises a repeated message by its id, and does not store it again.

    It must be at least as long as a publisher may retry.
    """
    rolls_up: bool = False
    """Whether a message may replace earlier ones (Nats-Rollup); if so, any publisher can empty the
    stream.
    """
    is_optional: bool = False
    """Whether the stream may be missing, because the previous version's health service does not
    create it.
    """
    is_queue: bool = False
    """Whether messages stay until they are acknowledged, and a full stream refuses new messages."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bucket:
    """One key-value bucket."""

    name: str
    bytes_max: int
    value_bytes_max: int = 1_000_000
    age_max_s: float = 0.0
    lock_key: str = ""
    """The only key of a lock; empty for other buckets. Revisions of a lock must keep increasing if
    the bucket is lost and created again.
    """

    @property
    def subjects(self) -> tuple[str, ...]:
        """The stored subjects: for a lock, only its key, so that other keys cannot fill it."""
        return (f"$KV.{self.name}.{self.lock_key or '>'}",)


EVENTS: Final = Stream(
    name="MUSTER_EVENTS",
    subjects=("muster.event.>",),
    age_max_s=7 * _DAY_S,
    bytes_max=512 * _MIB,
    # this many changes of one kind may wait for a reader
    per_subject_max=200,
    kept_min_s=_HOUR_S,
    message_bytes_max=8 * _KIB,
    duplicate_window_s=_REPEAT_S,
)
INVENTORY: Final = Stream(
    name="MUSTER_INVENTORY",
    # only these subjects are stored, so a node cannot have more pages than one inventory
    subjects=tuple(f"muster.inventory.*.*.{page}" for page in range(_PAGES_MAX)),
    age_max_s=7 * _DAY_S,
    bytes_max=256 * _MIB,
    per_subject_max=1,
    kept_min_s=_HOUR_S / 4,
    message_bytes_max=_PAGE_BYTES_MAX + HEADERS_BYTES_MAX,
    duplicate_window_s=_REPEAT_S,
    is_optional=True,
)
ALERTS: Final = Stream(
    name="MUSTER_ALERTS",
    subjects=(
        "muster.verdict.>",
        "muster.alert.>",
        # the watchdog uses the same path as alerts, so its arrival proves that alerts arrive
        "muster.sys.>",
    ),
    age_max_s=90 * _DAY_S,
    bytes_max=256 * _MIB,
    per_subject_max=1_000,
    kept_min_s=_DAY_S,
)
LABELS: Final = Stream(
    name="MUSTER_LABELS",
    subjects=("muster.label.>",),
    age_max_s=90 * _DAY_S,
    bytes_max=64 * _MIB,
    per_subject_max=1_000,
    kept_min_s=_DAY_S,
    is_optional=True,
)
NOTIFICATIONS: Final = Stream(
    name="MUSTER_NOTIFICATIONS",
    subjects=("muster.notification.>",),
    age_max_s=90 * _DAY_S,
    bytes_max=64 * _MIB,
    per_subject_max=1_000,
    kept_min_s=_DAY_S,
    is_optional=True,
)
AUDIT: Final = Stream(
    name="MUSTER_AUDIT",
    subjects=("muster.audit.>",),
    age_max_s=90 * _DAY_S,
    bytes_max=16 * _MIB,
    # every act has the same subject
    per_subject_max=100_000,
    kept_min_s=_DAY_S,
    is_optional=True,
)
DEAD_LETTERS: Final = Stream(
    name="MUSTER_DLQ",
    subjects=("muster.dlq.>",),
    age_max_s=30 * _DAY_S,
    bytes_max=64 * _MIB,
    per_subject_max=1_000,
    rolls_up=True,
)
OUTBOX: Final = Stream(
    name="MUSTER_OUTBOX",
    subjects=("muster.outbox.>",),
    age_max_s=30 * _DAY_S,
    bytes_max=512 * _MIB,
    # a newer notification of a group replaces the waiting one
    per_subject_max=1,
    is_queue=True,
)
STREAMS: Final = (EVENTS, INVENTORY, ALERTS, LABELS, NOTIFICATIONS, AUDIT, DEAD_LETTERS, OUTBOX)
"""All streams in the order of their creation: the previous version's ALERTS contains subjects of
the other streams, and a subject can belong to one stream only.
"""
FOLLOWED: Final = (EVENTS, INVENTORY, ALERTS, LABELS, NOTIFICATIONS, AUDIT)
"""The streams that may have any number of readers."""

STATE: Final = Bucket(name="muster_state", bytes_max=128 * _MIB)
LEDGER: Final = Bucket(name="muster_ledger", bytes_max=64 * _MIB, age_max_s=90 * _DAY_S)
LEADER: Final = Bucket(
    name="muster_leader", bytes_max=_MIB, value_bytes_max=1_000, lock_key="health"
)
"""The leading health service's claim. When it expires, NATS stores no delete marker in the bucket,
because the marker would not expire.
"""
TENURE: Final = Bucket(
    name="muster_tenure", bytes_max=_MIB, value_bytes_max=1_000, lock_key="notifier"
)
"""The leading notifier's claim, in a separate bucket, so that neither service can take the other's
lock.
"""
SILENCES: Final = Bucket(name="muster_silences", bytes_max=16 * _MIB, value_bytes_max=16_384)
BUCKETS: Final = (STATE, LEDGER, LEADER, TENURE, SILENCES)


@dataclass(frozen=True, slots=True)
class Claimed:
    """A key's value after a claim, and whether this claim wrote it; revision 0 means no value."""

    revision: int
    value: bytes
    written: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """The usage of a stream or bucket; `away` are the replicas that are offline or behind."""

    name: str
    stored_bytes: int
    bytes_max: int
    messages: int = 0
    oldest_age_s: float = 0.0
    away: tuple[str, ...] = ()

    @property
    def share(self) -> float:
        """The used share of `bytes_max`, 0.0 if unlimited; a message may not fit even below 1.0."""
        return self.stored_bytes / self.bytes_max if self.bytes_max > 0 else 0.0

    @property
    def refuses(self) -> bool:
        """Whether a full stream refuses new messages instead of removing the oldest."""
        return self.name == OUTBOX.name or self.name.startswith("KV_")


@dataclass(frozen=True, slots=True, kw_only=True)
class Durable:
    """A durable consumer: how many messages wait for it, and how many were delivered again."""

    stream: str
    name: str
    waiting: int = 0
    redelivered: int = 0


def stream_of(subject: str) -> Stream | None:
    """Return the stream with the first two tokens of a subject or filter; None if there is none."""
    prefix = ".".join(subject.split(".")[:2])
    return next((s for s in STREAMS if any(x.startswith(f"{prefix}.") for x in s.subjects)), None)


def required(subject: str) -> Stream:
    """Return the stream with the first two tokens of a subject or filter; there must be one."""
    stream = stream_of(subject)
    assert stream is not None, f"no stream stores {subject}"
    return stream


def early_eviction(stream: Stream, stored_bytes: int, oldest_age_s: float) -> str:
    """Return a warning if a stream removes messages too early; otherwise an empty text."""
    if stored_bytes < _FULL * stream.bytes_max or oldest_age_s >= stream.kept_min_s:
        return ""
    return (
        f"{stream.name} has {stored_bytes / _MIB:.0f} of {stream.bytes_max / _MIB:.0f} MiB, and "
        f"its oldest message is {oldest_age_s:.0f} s old; "
        f"messages should stay for at least {stream.kept_min_s:.0f} s"
    )


def payload_bytes_max(stream: Stream) -> int:
    """Return the maximum size of a message without its headers, in bytes."""
    return stream.message_bytes_max - HEADERS_BYTES_MAX
