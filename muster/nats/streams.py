"""Pure: The JetStream streams and buckets muster keeps, with every limit said.

Two streams: what plugins report, and what muster concludes and does. Plugins may write the first
and never the second. The dead-letter stream holds what could not be read or delivered.
"""

from dataclasses import dataclass
from typing import Final

_DAY_S: Final = 86_400.0
_MIB: Final = 1024 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Stream:
    """One stream. Old messages make room for new ones when a limit is reached."""

    name: str
    subjects: tuple[str, ...]
    age_max_s: float
    bytes_max: int
    per_subject_max: int
    message_bytes_max: int = _MIB
    duplicate_window_s: float = 600.0
    """As long as a publisher goes on repeating one message after an outage."""
    rolls_up: bool = False
    """A message may take the place of others: whoever may write to the stream may then empty it."""
    is_queue: bool = False
    """A message stays until it was worked on, and when there is no room none is taken."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bucket:
    """One key-value bucket."""

    name: str
    bytes_max: int
    value_bytes_max: int = 1_000_000
    age_max_s: float = 0.0
    is_lock: bool = False
    """Its revisions tell who came later, also when the bucket was lost in between."""


EVENTS: Final = Stream(
    name="MUSTER_EVENTS",
    subjects=("muster.event.>",),
    age_max_s=7 * _DAY_S,
    bytes_max=512 * _MIB,
    per_subject_max=1_000,
)
ALERTS: Final = Stream(
    name="MUSTER_ALERTS",
    subjects=(
        "muster.verdict.>",
        "muster.alert.>",
        "muster.label.>",
        "muster.notification.>",
        # the watchdog goes where alerts go, so that its coming proves that they come
        "muster.sys.>",
    ),
    age_max_s=90 * _DAY_S,
    bytes_max=256 * _MIB,
    per_subject_max=1_000,
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
    # what is newer about a group takes the place of what still waits
    per_subject_max=1,
    is_queue=True,
)
STREAMS: Final = (EVENTS, ALERTS, DEAD_LETTERS, OUTBOX)

STATE: Final = Bucket(name="muster_state", bytes_max=128 * _MIB)
LEDGER: Final = Bucket(name="muster_ledger", bytes_max=64 * _MIB, age_max_s=90 * _DAY_S)
LEADER: Final = Bucket(name="muster_leader", bytes_max=_MIB, value_bytes_max=1_000, is_lock=True)
"""Who leads, for as long as the claim says. No limit markers: those would have to expire too."""
TENURE: Final = Bucket(name="muster_tenure", bytes_max=_MIB, value_bytes_max=1_000, is_lock=True)
"""Which notifier acts; apart from health's, so that neither can take the other's place."""
SILENCES: Final = Bucket(name="muster_silences", bytes_max=16 * _MIB, value_bytes_max=16_384)
BUCKETS: Final = (STATE, LEDGER, LEADER, TENURE, SILENCES)


@dataclass(frozen=True, slots=True)
class Claimed:
    """What a key holds after it was claimed, and whether this claim wrote it; revision 0: none."""

    revision: int
    value: bytes
    written: bool


def stream_of(subject: str) -> Stream | None:
    """Return the stream that keeps a subject or filter, or None."""
    kind = subject.split(".")[1]
    return next((s for s in STREAMS if f"muster.{kind}.>" in s.subjects), None)
