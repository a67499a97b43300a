"""Pure: defines inputs and decisions of one plugin's state machine, and the rules for verdicts."""

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from muster import vocabulary
from muster.vocabulary import Verdict
from muster_health.model import signals, snapshot


class Rule(enum.StrEnum):
    """The rule that led to a verdict, named after its evidence."""

    FIRST_SIGN_OF_LIFE = "first_sign_of_life"
    RECOVERED = "recovered"
    GOODBYE = "said_goodbye"

    NOBODY_LISTENS = "silent_and_nobody_listens"
    NOT_BACK = "connection_ended_and_not_back"
    NO_ANSWER = "silent_and_no_answer"
    POD_NOT_RUNNING = "silent_and_pod_not_running"
    POD_NOT_READY = "silent_and_pod_not_ready"
    CONNECTION_STALE = "silent_and_connection_stale"
    ONLY_BUS_SILENT = "silent_and_all_else_well"
    LEASE_STALE = "silent_and_lease_stale"
    NODE_GONE = "silent_and_node_gone"
    NODE_PLANNED = "silent_and_node_leaves"
    POD_DELETED = "silent_and_pod_deleted"
    POD_REPLACED = "silent_and_rollout"
    NEVER_HEARD = "expected_and_never_heard"

    NOT_REGISTERED = "reports_not_registered"
    KUBELET_AWAY = "reports_kubelet_away"
    KUBELET_DEAD = "reports_kubelet_away_and_lease_stale"
    SELF_PROBE_FAILS = "reports_self_probe_failing"
    SELF_PROBE_STALE = "reports_self_probe_stale"
    KUBELET_LISTS_OTHERS = "reports_kubelet_apart"
    NODE_OFFERS_OTHERS = "node_offers_others"
    TWO_INSTANCES = "two_instances_beat"
    CHECKER_SILENT = "reports_checker_silent"
    LOOP_LATE = "reports_loop_late"
    BEATS_STRETCHED = "beats_stretched"

    FELL_OFTEN = "fell_often"

    WATCHED_NOT_SERVED = "watched_not_served"
    WATCHED_SOCKET_REMOVED = "watched_socket_removed"
    WATCHED_NO_ANSWER = "watched_no_answer"
    WATCHED_WRONG_ANSWER = "watched_wrong_answer"
    WATCHED_NOT_REGISTERED = "watched_not_registered"
    WATCHED_FEWER_DEVICES = "watched_fewer_devices"
    WATCHED_TWO_SERVERS = "watched_two_servers"
    WATCHED_NOT_OFFERED = "watched_not_offered"
    WATCHED_FILES_MISSING = "watched_files_missing"
    WATCHED_NODE_OFFERS_OTHERS = "watched_node_offers_others"
    WATCHED_NODE_GONE = "watched_and_node_gone"
    WATCHED_NODE_PLANNED = "watched_and_node_leaves"
    WATCHED_POD_DELETED = "watched_and_pod_deleted"
    WATCHED_POD_REPLACED = "watched_and_pod_replaced"
    WATCHED_REMOVED = "watched_removed"


PLANNED: Final[Mapping[Rule, str]] = {
    Rule.GOODBYE: "it announced a stop",
    Rule.NODE_GONE: "its node left the cluster, although the plugin is still expected there",
    Rule.NODE_PLANNED: "its last heartbeat, on a node that is cordoned or being removed",
    Rule.POD_DELETED: "its pod was deleted",
    Rule.POD_REPLACED: "a rollout began to replace its pod",
    Rule.WATCHED_NODE_GONE: "its node left the cluster",
    Rule.WATCHED_NODE_PLANNED: "it ended, on a node that is cordoned or being removed",
    Rule.WATCHED_POD_DELETED: "its pod was deleted",
    Rule.WATCHED_POD_REPLACED: "another pod took the place of its pod",
}
"""Descriptions of how a planned stop began."""


def rule_named(word: str) -> Rule | None:
    """Return the rule with that name; None if this version has no such rule."""
    return Rule(word) if word in Rule.__members__.values() else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """A verdict on a plugin, with its rule and evidence."""

    verdict: Verdict
    rule: Rule
    evidence: tuple[vocabulary.Evidence, ...]


class Manner(enum.StrEnum):
    """How a plugin failed, as seen from outside; the value is a text about several plugins."""

    SILENT = "went silent"
    ENDED = "closed their connections"
    PROBLEM = "reported problems"


@dataclass(frozen=True, slots=True)
class Failure:
    """How and when a suspected plugin failed, and the causes that it may share with others."""

    manner: Manner
    at: float
    causes: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """The current verdict, with the data that alerts need.

    `resources` are those that the verdict is about. `is_flapping` means that the plugin also fails
    repeatedly. `failed_at` is the time of the last failure.
    """

    state: snapshot.State
    verdict: Verdict | None
    rule: Rule | None
    resources: tuple[str, ...]
    is_flapping: bool
    failed_at: float


@dataclass(frozen=True, slots=True)
class NotExpected:
    """Event: the plugin is no longer expected on its node."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Observed:
    """Event: the node's agent (given by its plugin name) has observed a watched plugin.

    If `agent` is empty, the observation is from the Kubernetes API. `causes` are possible common
    causes of failures on the agent's node, such as its zone.
    """

    watched: vocabulary.Watched
    agent: str
    causes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Suspend:
    """Event: many plugins are suspected at the same time; reach no verdict until `Resume`."""


@dataclass(frozen=True, slots=True)
class Resume:
    """Event: the suspension is over; investigate again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reconnected:
    """Event: our connection was down for `paused_s`; plugins have `window_s` more to reconnect."""

    window_s: float
    paused_s: float


Event = (
    vocabulary.Heartbeat
    | signals.FromPlugin
    | signals.ProbeAnswered
    | signals.ProbeFailed
    | signals.ProbeInconclusive
    | signals.ClusterAnswered
    | signals.Connected
    | signals.Disconnected
    | signals.Restored
    | signals.NodeOffers
    | signals.ClockStalled
    | signals.Expected
    | NotExpected
    | Suspend
    | Resume
    | Reconnected
)
"""The inputs of one tracked plugin."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VerdictReached:
    """A new verdict with its reason; `previous` is the verdict before it."""

    verdict: Verdict
    previous: Verdict | None
    rule: Rule
    resources: tuple[str, ...]
    evidence: tuple[vocabulary.Evidence, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class VerdictConfirmed:
    """The verdict stays, but with another reason or more resources."""

    rule: Rule
    evidence: tuple[vocabulary.Evidence, ...]
    resources: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReturnOverdue:
    """A plugin has not returned in time from a planned stop."""

    evidence: tuple[vocabulary.Evidence, ...]


@dataclass(frozen=True, slots=True)
class Changed:
    """The deadline may be earlier than before, or there is news to publish or state to save."""


@dataclass(frozen=True, slots=True)
class ClockSkewChanged:
    """The clock of the plugin's node began or ceased to differ from ours."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchedReported:
    """An agent's report on watched plugins: all of them if `is_all`; `gone` names removed ones."""

    watched: tuple[vocabulary.Watched, ...] = ()
    gone: tuple[str, ...] = ()
    is_all: bool = False


def watched_reports(event: vocabulary.Event) -> tuple[WatchedReported, ...]:
    """Return the reports in an agent's event about the plugins that it watches, if any."""
    match event:
        case vocabulary.PluginObserved(watched=watched, gone=True):
            return (WatchedReported(gone=(watched.name,)),)
        case vocabulary.PluginObserved(watched=watched):
            return (WatchedReported(watched=(watched,)),)
        case vocabulary.InventoryReported(watched=watched):
            return (WatchedReported(watched=watched, is_all=True),)
        case _:
            return ()


CHANGED: Final = Changed()
Decision = VerdictReached | VerdictConfirmed | ReturnOverdue
Step = signals.Probe | signals.AskCluster | Decision | signals.Noted
"""The decisions of the parts of a tracked plugin."""

Effect = Step | Changed | ClockSkewChanged | WatchedReported
"""The requests of a tracked plugin to the detector."""
