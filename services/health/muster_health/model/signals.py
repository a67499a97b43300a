"""Pure: defines the detector's inputs and outputs; their names in recordings never change.

Some inputs are answers from the Kubernetes API about a node and a plugin; None in these means
unknown. Ages are in seconds at the moment of the answer. The adapter must not trust the node's
clock: it measures ages by the API server's `Date`, or since it read a changed value.
"""

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime

from muster import vocabulary
from muster_health.model import limits, snapshot


class Planned(enum.StrEnum):
    """Signs of a planned stop of the plugins on a node, temporary or permanent."""

    UNSCHEDULABLE = "unschedulable"
    TO_BE_DELETED = "to_be_deleted"
    """The node is being deleted, or has a taint such as karpenter.sh/disrupted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pod:
    """A plugin's pod; `waiting` is why a container waits, `last_exit` how a container ended."""

    name: str
    uid: str
    phase: str
    ready: bool
    restarts: int = 0
    deleting: bool = False
    waiting: str = ""
    last_exit: str = ""
    revision: str = ""
    current: str = ""
    """The newest revision of the pod's DaemonSet."""
    age_s: float | None = None

    @property
    def runs(self) -> bool:
        """Return whether the containers run; the phase alone stays Running during a crash loop."""
        return self.phase == "Running" and not self.waiting

    @property
    def is_outdated(self) -> bool:
        """Return whether a rollout will replace the pod."""
        return bool(self.revision and self.current) and self.revision != self.current


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """How many devices of a resource a node has, and how many of them pods may use."""

    capacity: int
    allocatable: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """The answers to a few GETs about one node and the plugin's pods on it.

    `exists` is False if the API server answered that the node does not exist. `pods` is empty if it
    answered that there are no pods. `holders` are the pods on the node (`namespace/name`, sorted)
    that request the resources in the query; it is also None if we lack the permission. `problem`
    describes what could not be read, and why.
    """

    exists: bool | None = None
    lease_age_s: float | None = None
    ready: bool | None = None
    planned: tuple[Planned, ...] = ()
    pods: tuple[Pod, ...] | None = None
    offers: Mapping[str, Offer] | None = None
    holders: tuple[str, ...] | None = None
    problem: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """A node that has been expected to run the plugin for `age_s` seconds.

    `causes` are possible common causes of failures, such as `zone=eu-1a` or `rack=7`. `revision` is
    the DaemonSet's revision on the node, another possible cause.
    """

    age_s: float
    causes: tuple[str, ...] = ()
    revision: str = ""


class Note(enum.StrEnum):
    """A kind of occurrence that is only counted, in a metric."""

    SUSPECTED = "suspected"
    REFUTED = "refuted"
    CONFIRMED = "confirmed"
    VERDICT_REACHED = "verdict_reached"
    """`seconds` from the last heartbeat, or the first report of a problem, to the verdict."""
    HEARTBEAT_STALE = "heartbeat_stale"
    EVENT_STALE = "event_stale"
    STALLED = "stalled"
    """`seconds` for which our own process was suspended or late."""
    DISCONNECTED = "disconnected"
    """`seconds` for which our own connection was down, or not yet established."""
    WAITS_RESTARTED = "waits_restarted"
    """All waits were restarted or extended; while that happens often, no verdict is reached."""
    REFUSED = "refused"
    """A node, a plugin, a resource or a device was ignored; `refusal` is the reason."""
    RATE_LIMITED = "rate_limited"
    """An alert is held back by the rate limit; the alert MORE_ALERTS counts it."""
    SUSPENDED = "suspended"
    """A verdict was not reached, because many plugins are suspected at the same time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _OfPlugin:
    node: str
    plugin: str


@dataclass(frozen=True, slots=True, kw_only=True)
class _Numbered(_OfPlugin):
    number: int


@dataclass(frozen=True, slots=True, kw_only=True)
class HeartbeatArrived:
    """A heartbeat arrived."""

    heartbeat: vocabulary.Heartbeat


@dataclass(frozen=True, slots=True, kw_only=True)
class HeartbeatsArrived:
    """Heartbeats of several plugins arrived together, in this order."""

    heartbeats: Sequence[vocabulary.Heartbeat]


@dataclass(frozen=True, slots=True, kw_only=True)
class FromPlugin:
    """A plugin published an event; (`instance`, `sequence`) gives its place in the sender's order.

    `position` is the event's place in the stream, or 0 if it must not be saved.
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
class ProbeFailed(_Numbered):
    """Probe `number` reached no subscriber, or got no answer (if `subscribed`)."""

    subscribed: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeInconclusive(_Numbered):
    """Probe `number` proves nothing: our own connection failed, or the answer is unusable."""


@dataclass(frozen=True, slots=True)
class BusLost:
    """At least one of our connections to NATS is down, so we may miss messages."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BusBack:
    """All our connections to NATS are up; `at` is the current time."""

    at: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class Restored:
    """The saved state of a plugin or of the fleet, read at the start and before we lead."""

    state: snapshot.Snapshot


@dataclass(frozen=True, slots=True, kw_only=True)
class Connected(_OfPlugin):
    """A NATS server accepted a plugin's connection, which (`server`, `client`) identifies."""

    server: str
    client: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Disconnected(_OfPlugin):
    """A plugin's connection ended; `reason` is from the NATS server ("Client Closed", ...)."""

    server: str
    client: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerEvent:
    """An event of a NATS server or leaf that explains many disconnections."""

    server: str
    what: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterAnswered(_Numbered):
    """The answer to the `AskCluster` of this number; `facts` is None if there is no usable answer.

    If the query names `resources`, `facts` contains only `holders` or a `problem`.
    """

    facts: Facts | None
    resources: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterObserved:
    """The Kubernetes API shows a finding about a watched plugin; NONE ends an earlier finding."""

    node: str
    watched: vocabulary.Watched


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpectedNodes:
    """All nodes that should run this plugin; sent at the start and at every change.

    An unchanged node keeps the same object, with the age that it had at its last change.
    """

    plugin: str
    nodes: Mapping[str, Expected]


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeOffers:
    """The extended resources that a node offers; sent at the start and at every change.

    `offers` is None when the node is no longer in the cluster.
    """

    node: str
    offers: Mapping[str, Offer] | None


@dataclass(frozen=True, slots=True)
class NodesListed:
    """All nodes of the cluster have been sent as `NodeOffers`; other nodes are not tracked."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Leadership:
    """We lead under this revision of the lock; None means that we do not lead.

    Before a new revision, everything that the previous leader saved arrives as `Restored`.
    """

    revision: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ClockStalled:
    """Our own process or host was suspended for this time, as measured outside the detector."""

    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamsChecked:
    """Health checked the streams; `early` describes those that remove messages too early."""

    early: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Remediated(_OfPlugin):
    """The result of `Remediate`; `error` is empty on success, even if the pod was gone."""

    pod: str
    error: str = ""


Input = (
    HeartbeatArrived
    | HeartbeatsArrived
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
    | ClusterObserved
    | ExpectedNodes
    | NodeOffers
    | NodesListed
    | Leadership
    | ClockStalled
    | limits.NodeNoisy
    | StreamsChecked
    | Remediated
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe(_Numbered):
    """Probe the plugin; exactly one result with this number must follow."""

    timeout_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class AskCluster(_Numbered):
    """Query node, lease and the plugin's pods; one `ClusterAnswered` with this number must follow.

    With `resources`, only find the pods on the node that request one of these. `watched` is the
    resource or driver of a watched plugin, and `pod` the uid of its pod if the agent has reported
    one.
    """

    timeout_s: float
    resources: tuple[str, ...] = ()
    watched: str = ""
    pod: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Publish:
    """Publish the event under `event_id`. Only the leader does this."""

    event: vocabulary.VerdictChanged | vocabulary.AlertChanged | vocabulary.RemediationDecided
    event_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Store:
    """Save the value under the key; an empty value deletes the key. Only the leader does this."""

    key: str
    value: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Alarm:
    """Notify people, without using NATS, that NATS fails or (if not `firing`) works again."""

    firing: bool
    summary: str
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Remediate(_OfPlugin):
    """Delete the plugin's pod if it still has this uid; one `Remediated` follows while we lead.

    With `dry_run`, only check whether the deletion would be allowed.
    """

    pod: str
    uid: str
    reason: str
    dry_run: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Noted:
    """Count an occurrence of this kind in a metric."""

    note: Note
    seconds: float = 0.0
    refusal: limits.Refusal | None = None
    node: str = ""
    """The node whose data was refused."""


def refused(refusal: limits.Refusal, node: str) -> Noted:
    """Return the note that data of a node was not stored."""
    return Noted(note=Note.REFUSED, refusal=refusal, node=node)


Output = Probe | AskCluster | Publish | Store | Alarm | Remediate | Noted
