"""Pure. What the detector takes in, and what it wants done."""

import enum
from dataclasses import dataclass
from datetime import datetime

from muster import vocabulary
from muster_health import snapshot


class Note(enum.StrEnum):
    """What is worth counting and nothing else."""

    SUSPECTED = "suspected"
    REFUTED = "refuted"
    CONFIRMED = "confirmed"
    CONVICTED = "convicted"
    """`seconds` from the first sign to the verdict."""
    BEAT_STALE = "beat_stale"
    EVENT_STALE = "event_stale"
    STALLED = "stalled"
    """`seconds` that our own clockwork was late."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Beat:
    """A heartbeat arrived."""

    heartbeat: vocabulary.Heartbeat


@dataclass(frozen=True, slots=True, kw_only=True)
class FromPlugin:
    """A plugin reported a fact; (`instance`, `sequence`) is its place among its sender's facts."""

    event: vocabulary.Event
    instance: str
    sequence: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeAnswered:
    """The plugin answered probe `number`."""

    heartbeat: vocabulary.Heartbeat
    number: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeFailed:
    """Probe `number` was heard by nobody, or (`subscribed`) not answered."""

    node: str
    plugin: str
    number: int
    subscribed: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeInconclusive:
    """Probe `number` says nothing about the plugin: our own link failed, or we cannot read it."""

    node: str
    plugin: str
    number: int


@dataclass(frozen=True, slots=True)
class BusLost:
    """Our own link is gone: from now on we know nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BusBack:
    """Our own link is there (again); `at` is the time now."""

    at: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class Restored:
    """What we remembered about a plugin before we were restarted."""

    state: snapshot.Snapshot


Input = (
    Beat
    | FromPlugin
    | ProbeAnswered
    | ProbeFailed
    | ProbeInconclusive
    | BusLost
    | BusBack
    | Restored
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """Ask the plugin, and feed back what comes of it; exactly one answer with this number."""

    node: str
    plugin: str
    number: int
    timeout_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Publish:
    """Tell the bus, under an id that the same fact always has."""

    event: vocabulary.VerdictChanged | vocabulary.AlertChanged
    event_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Remember:
    """Keep this for the time after a restart."""

    key: str
    value: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Noted:
    """Count this."""

    note: Note
    seconds: float = 0.0


Output = Probe | Publish | Remember | Noted
