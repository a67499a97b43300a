"""Pure: What the detector takes in, and what it wants done."""

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime

from muster import vocabulary
from muster_health.model import facts, snapshot


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
    BLIND = "blind"
    """`seconds` that our own link was gone, or not there yet."""
    REBASED = "rebased"
    """All waits were begun anew or moved; whoever judges nobody for long shows here."""
    REFUSED = "refused"
    """A plugin, a resource or a device beyond what one node may have us keep."""
    HELD = "held"
    """An alert waits for its turn; it is counted in another one."""
    FROZEN = "frozen"
    """A verdict was not reached, because many are suspect at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Beat:
    """A heartbeat arrived."""

    heartbeat: vocabulary.Heartbeat


@dataclass(frozen=True, slots=True, kw_only=True)
class Beats:
    """Heartbeats of many plugins arrived at once, in this order."""

    heartbeats: Sequence[vocabulary.Heartbeat]


@dataclass(frozen=True, slots=True, kw_only=True)
class FromPlugin:
    """A plugin reported a fact; (`instance`, `sequence`) is its place among its sender's facts.

    `position` is its place in the stream, 0 where that is not to be remembered.
    """

    event: vocabulary.Event
    instance: str
    sequence: int
    position: int = 0


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Connected:
    """The bus took a plugin's connection: (`server`, `client`) names it from first to last."""

    node: str
    plugin: str
    server: str
    client: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Disconnected:
    """The bus lost a plugin's connection; `reason` is the server's word ("Client Closed", ...)."""

    node: str
    plugin: str
    server: str
    client: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerEvent:
    """Something happened to a server or leaf of the bus that explains many disconnects."""

    server: str
    what: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterAnswered:
    """The answer to `AskCluster` of this number; `facts` is None if there was no answer in time.

    `resources` are those that were asked about, and then `facts` tells of nothing but holders.
    """

    node: str
    plugin: str
    number: int
    facts: facts.Facts | None
    resources: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpectedNodes:
    """The whole set of nodes that should have this plugin, whenever it changes, and at start.

    Of a node for which nothing has changed it has the same object as before, of that time's age.
    """

    plugin: str
    nodes: Mapping[str, facts.Expected]


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeOffers:
    """What a node offers of the resources we know, whenever that changes, and at start.

    `offers` is None when the node is gone from the cluster.
    """

    node: str
    offers: Mapping[str, facts.Offer] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Leadership:
    """We lead under this revision of the lock, or (None) another one does.

    Before a revision come the `Restored` of all that the former leader remembered.
    """

    revision: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ClockStalled:
    """Our own loop or host stood still for so long, as something beside the detector noticed."""

    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Remediated:
    """What came of `Remediate`; `error` is empty if the pod is gone, or would be."""

    node: str
    plugin: str
    pod: str
    error: str = ""


Input = (
    Beat
    | Beats
    | FromPlugin
    | ProbeAnswered
    | ProbeFailed
    | ProbeInconclusive
    | BusLost
    | BusBack
    | Restored
    | Connected
    | Disconnected
    | ServerEvent
    | ClusterAnswered
    | ExpectedNodes
    | NodeOffers
    | Leadership
    | ClockStalled
    | Remediated
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """Ask the plugin, and feed back what comes of it; exactly one answer with this number."""

    node: str
    plugin: str
    number: int
    timeout_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class AskCluster:
    """GET node, lease and the plugin's pods, and feed back one `ClusterAnswered` of this number.

    With `resources` do none of this, and find which pods on the node request one of these.
    """

    node: str
    plugin: str
    number: int
    timeout_s: float
    resources: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Publish:
    """Tell the bus, under an id that the same fact always has. Only a leader is asked to."""

    event: vocabulary.VerdictChanged | vocabulary.AlertChanged | vocabulary.RemediationDecided
    event_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Remember:
    """Keep this for the time after a restart; an empty value is forgetting. Only a leader is asked.

    `revision` is the leader's: a store that can compare it must refuse a former leader's.
    """

    key: str
    value: bytes
    revision: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Alarm:
    """Tell people by a way without the bus that we are blind, or (not `firing`) see again."""

    firing: bool
    summary: str
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Remediate:
    """Delete this pod of the plugin, if its uid still is this one; feed back `Remediated`.

    With `dry_run` only ask whether that would be allowed.
    """

    node: str
    plugin: str
    pod: str
    uid: str
    reason: str
    dry_run: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Noted:
    """Count this."""

    note: Note
    seconds: float = 0.0


Output = Probe | AskCluster | Publish | Remember | Alarm | Remediate | Noted
