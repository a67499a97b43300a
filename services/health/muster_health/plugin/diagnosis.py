"""Pure: diagnoses a silent plugin (STUCK, PLUGIN_DOWN, NODE_DOWN) from a table of evidence.

`problems` has the verdicts on problems that a plugin itself reports; `watched_findings` has those
on device plugins that muster only watches.

The diagnosis is made once all queries are answered. The first row that applies decides. "Quiet":
for the whole timeout no heartbeat arrived and no connection ended, so Kubernetes has had time to
detect a change of the pod. "Well": the pod is Running and Ready, on a node that still offers the
plugin's devices.

| the probe was not answered, and                       | verdict     | rule             |
|-------------------------------------------------------|-------------|------------------|
| Kubernetes has not answered, but still may (3)        | wait        |                  |
| the node is not in the cluster                        | MAINTENANCE | NODE_GONE        |
| the pod is being deleted                              | MAINTENANCE | POD_DELETED      |
| not subscribed; the node is cordoned or being removed | MAINTENANCE | NODE_PLANNED     |
| the lease is older than 20 s                          | NODE_DOWN   | LEASE_STALE      |
| the lease is older than the missing heartbeat (1)     | wait        |                  |
| not subscribed; a rollout replaces the pod            | MAINTENANCE | POD_REPLACED     |
| it is expected, and never sent a heartbeat            | MISSING     | NEVER_HEARD      |
| there is no pod, or none that runs                    | PLUGIN_DOWN | POD_NOT_RUNNING  |
| subscribed; the pod is not well, or not known         | STUCK       | NO_ANSWER        |
| connection open or ended by the server; pod not Ready | STUCK       | POD_NOT_READY    |
| the pod is well, but it is too early to be sure (2)   | wait        |                  |
| the pod is well; it did not hang up, or is quiet      | UNREACHABLE | ONLY_BUS_SILENT  |
| connection ended just now, not by the server (3)      | PLUGIN_DOWN | NOT_BACK         |
| the server closed its connection; no pod is known     | STUCK       | CONNECTION_STALE |
| otherwise                                             | PLUGIN_DOWN | NOBODY_LISTENS   |

(1) With a small margin, because the node may have failed just before that heartbeat was due. The
lease will soon be renewed or stale. There is no wait if the plugin's side closed its connection:
the node was still running. (2) A suspended process looks like one that is cut off from NATS until
its readiness probes fail (its event loop answers those too), and a short network failure needs no
action. So UNREACHABLE needs silence of at least `ready_s`. There is no wait if the plugin hung up:
its own side closed the connection (Client Closed) while it was still sending heartbeats. A reset
connection (Read Error) may have been broken by the network; the pod shows whether the process ended
too. (3) The process crashed a moment ago and is being restarted, or only its connection broke. The
plugin is probed again once it is quiet, and Kubernetes is queried repeatedly for a while.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from muster import vocabulary
from muster.vocabulary import Verdict
from muster_health.alerting import evidence
from muster_health.model import config, signals, steps
from muster_health.model.steps import Rule
from muster_health.plugin import liveness

_DUE_BEATS: Final = 1.1
"""The next heartbeat is overdue after this many intervals."""
_HANGS_OR_CUT = (
    "without the Kubernetes API, a hanging process cannot be distinguished from a network failure"
)
_PLUGIN_OR_NODE = (
    "without the Kubernetes API, a dead plugin cannot be distinguished from a dead node"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Observations:
    """All evidence about a silent plugin.

    `is_subscribed` means that an unanswered probe had a subscriber. `cluster` is None if Kubernetes
    did not answer, or was not queried (not `has_cluster`). `healthy` is the last reported number of
    Healthy devices by resource. `was_heard` means that we or a previous process received a sign of
    life.
    """

    silent_s: float
    interval_s: float
    was_heard: bool
    is_expected: bool
    is_subscribed: bool
    connections: liveness.Connections
    has_cluster: bool
    cluster: signals.Facts | None
    healthy: Mapping[str, int]
    has_waited: bool
    now: float

    @property
    def quiet_s(self) -> float:
        """Return the seconds since the last heartbeat or closed connection, whichever is later."""
        closed = self.connections.closed
        return self.silent_s if closed is None else min(self.silent_s, self.now - closed.at)


def diagnose(observed: Observations, settings: config.Detection) -> steps.Diagnosis | None:
    """Return the diagnosis; None if it is better to wait a few more seconds."""
    decided = _decide(observed, settings)
    if decided is None:
        return None
    verdict, rule = decided
    seen = [
        evidence.silent(observed.silent_s, observed.interval_s, ever_heard=observed.was_heard),
        evidence.no_answer(settings.probe_timeout_s)
        if observed.is_subscribed
        else evidence.not_subscribed(),
        *_connection(observed.connections, observed.now),
    ]
    if observed.has_cluster:
        seen += evidence.cluster(observed.cluster, sorted(observed.healthy))
    elif rule is Rule.CONNECTION_STALE:
        seen.append(evidence.undecided(_HANGS_OR_CUT))
    elif verdict is Verdict.PLUGIN_DOWN:
        seen.append(evidence.undecided(_PLUGIN_OR_NODE))
    return steps.Diagnosis(verdict=verdict, rule=rule, evidence=tuple(seen))


def _connection(connections: liveness.Connections, now: float) -> list[vocabulary.Evidence]:
    """Return the evidence from NATS about the plugin's connection, if any."""
    if connections.closed is not None:
        closed = connections.closed
        text = f"connection closed {now - closed.at:.1f} s ago ({closed.reason or 'no reason'})"
        return [evidence.of("bus", text)]
    if connections.is_open:
        return [
            evidence.of(
                "bus", f"connection open at server {liveness.short_server(connections.server)}"
            )
        ]
    return []


def _decide(observed: Observations, settings: config.Detection) -> tuple[Verdict, Rule] | None:
    cluster = observed.cluster or signals.Facts()
    pods = cluster.pods or ()
    is_gone = not observed.is_subscribed
    age_s = cluster.lease_age_s or 0.0
    may_have_died = cluster.lease_age_s is not None and _may_have_died(observed, age_s)
    is_replaced = bool(pods) and all(pod.is_outdated or pod.deleting for pod in pods)
    is_deleted = bool(pods) and all(pod.deleting for pod in pods)
    rows = (
        (_may_answer_yet(observed, settings), None),
        (cluster.exists is False, (Verdict.MAINTENANCE, Rule.NODE_GONE)),
        (is_deleted, (Verdict.MAINTENANCE, Rule.POD_DELETED)),
        (is_gone and bool(cluster.planned), (Verdict.MAINTENANCE, Rule.NODE_PLANNED)),
        (age_s > settings.lease_stale_s, (Verdict.NODE_DOWN, Rule.LEASE_STALE)),
        (may_have_died, None),
        (is_gone and is_replaced, (Verdict.MAINTENANCE, Rule.POD_REPLACED)),
        (observed.is_expected and not observed.was_heard, (Verdict.MISSING, Rule.NEVER_HEARD)),
    )
    return next((decided for holds, decided in rows if holds), _of_plugin(observed, settings))


def _may_have_died(observed: Observations, lease_age_s: float) -> bool:
    closed = observed.connections.closed
    if (
        observed.has_waited
        or not observed.was_heard
        or (closed is not None and not closed.by_server)
    ):
        return False
    return lease_age_s > observed.silent_s - _DUE_BEATS * observed.interval_s


def _may_answer_yet(observed: Observations, settings: config.Detection) -> bool:
    if not observed.has_cluster or observed.cluster is not None or observed.has_waited:
        return False
    return not _hung_up(observed, settings) or _is_quiet(observed, settings)


def _is_quiet(observed: Observations, settings: config.Detection) -> bool:
    return observed.quiet_s >= settings.suspicion_beats * observed.interval_s


def _is_early(observed: Observations, settings: config.Detection) -> bool:
    if not observed.was_heard or _hung_up(observed, settings):
        return False
    # the failure may have begun just before the missing heartbeat was due, ...
    lasted_s = observed.silent_s - _DUE_BEATS * observed.interval_s
    if observed.connections.closed is not None:
        # ... but not after the connection ended
        lasted_s = max(lasted_s, observed.now - observed.connections.closed.at)
    # `has_waited` is not needed here: this wait ends with time
    return lasted_s < settings.ready_s


def _hung_up(observed: Observations, settings: config.Detection) -> bool:
    """Return whether the plugin's side closed a connection that carried heartbeats until then.

    A plugin that was silent before may have been cut off, and then have closed its connection.
    """
    closed = observed.connections.closed
    if closed is None or not closed.by_process:
        return False
    silent_before_s = observed.silent_s - (observed.now - closed.at)
    return silent_before_s < settings.suspicion_beats * observed.interval_s


def _of_plugin(observed: Observations, settings: config.Detection) -> tuple[Verdict, Rule] | None:
    pods = observed.cluster.pods if observed.cluster is not None else None
    stale = observed.connections.closed is not None and observed.connections.closed.by_server
    hangs = stale or observed.connections.closed is None
    quiet = _is_quiet(observed, settings)
    runs = pods is None or any(pod.runs for pod in pods)
    ready = pods is not None and any(pod.ready for pod in pods)
    well = ready and _offers_all(observed)
    rows = (
        (not runs, (Verdict.PLUGIN_DOWN, Rule.POD_NOT_RUNNING)),
        (observed.is_subscribed and not well, (Verdict.STUCK, Rule.NO_ANSWER)),
        (hangs and pods is not None and not ready, (Verdict.STUCK, Rule.POD_NOT_READY)),
        (well and _is_early(observed, settings), None),
        (
            well and (quiet or not _hung_up(observed, settings)),
            (Verdict.UNREACHABLE, Rule.ONLY_BUS_SILENT),
        ),
        (not quiet and not stale, (Verdict.PLUGIN_DOWN, Rule.NOT_BACK)),
        (stale and pods is None, (Verdict.STUCK, Rule.CONNECTION_STALE)),
    )
    otherwise = (Verdict.PLUGIN_DOWN, Rule.NOBODY_LISTENS)
    return next((decided for holds, decided in rows if holds), otherwise)


def _offers_all(observed: Observations) -> bool:
    """Return whether the node offers all devices that were last Healthy; True if unknown."""
    offers = observed.cluster.offers if observed.cluster is not None else None
    if offers is None:
        return True
    return all(
        name in offers and offers[name].allocatable >= healthy
        for name, healthy in observed.healthy.items()
        if healthy
    )
