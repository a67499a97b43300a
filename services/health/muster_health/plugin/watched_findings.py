"""Pure: assigns verdicts to the findings about plugins that muster does not run.

The agent decides on the finding, and waits long enough before it reports one. The verdict:

| the agent finds, or the Kubernetes API shows         | verdict      | rule                       |
|------------------------------------------------------|--------------|----------------------------|
| NOT_SERVED: connections are refused (1)              | PLUGIN_DOWN  | WATCHED_NOT_SERVED         |
| SOCKET_REMOVED: its socket is gone (1)               | DEREGISTERED | WATCHED_SOCKET_REMOVED     |
| NO_ANSWER: it accepts and does not answer (1)        | STUCK        | WATCHED_NO_ANSWER          |
| WRONG_ANSWER: something else answers                 | STUCK        | WATCHED_WRONG_ANSWER       |
| NOT_REGISTERED: it answers, the kubelet lists none(5)| DEREGISTERED | WATCHED_NOT_REGISTERED     |
| FEWER_DEVICES: the kubelet lists fewer than expected | MISMATCH     | WATCHED_FEWER_DEVICES      |
| TWO_SERVERS: two processes serve the resource (4)    | SPLIT_BRAIN  | WATCHED_TWO_SERVERS        |
| NOT_OFFERED: hardware that no plugin offers          | MISSING      | WATCHED_NOT_OFFERED        |
| FILES_MISSING: CDI files are gone                    | DEGRADED     | WATCHED_FILES_MISSING      |
| nothing, but the node's allocatable differs (2)      | MISMATCH     | WATCHED_NODE_OFFERS_OTHERS |

(1) Unless the stop is planned. The first row that applies decides; without an answer from
Kubernetes, the stop counts as unplanned:

| the Kubernetes API shows                             | verdict      | rule                       |
|------------------------------------------------------|--------------|----------------------------|
| the node is not in the cluster                       | MAINTENANCE  | WATCHED_NODE_GONE          |
| the node is cordoned or being removed                | MAINTENANCE  | WATCHED_NODE_PLANNED       |
| all its pods are being deleted, or it has none (3)   | MAINTENANCE  | WATCHED_POD_DELETED        |
| all its pods are new, and none has restarted         | MAINTENANCE  | WATCHED_POD_REPLACED       |

(2) For more than `mismatch_s`, because kubelets report changes only every 10 s.
(3) Not if the agent reports that its process does not run in a pod.
(4) Not while one of its pods is being deleted or is less than 5 min old.
(5) If the node's allocatable is still not 0 after `mismatch_s`, WATCHED_NODE_OFFERS_OTHERS: one of
    the kubelet's two numbers is wrong, and nothing shows that the plugin is not registered.

A process that hangs, one that was stopped and one that gets no CPU time look the same from outside:
none of them answers. The verdict is STUCK; the agent's text may give details.
"""

from collections.abc import Mapping
from typing import Final

import msgspec

from muster import vocabulary, wording
from muster.vocabulary import Verdict, WatchedFinding
from muster_health.alerting import evidence
from muster_health.model import signals
from muster_health.model.steps import Rule
from muster_health.plugin.problems import Problem

VERDICTS: Final[Mapping[WatchedFinding, tuple[Verdict, Rule]]] = {
    WatchedFinding.NOT_SERVED: (Verdict.PLUGIN_DOWN, Rule.WATCHED_NOT_SERVED),
    WatchedFinding.SOCKET_REMOVED: (Verdict.DEREGISTERED, Rule.WATCHED_SOCKET_REMOVED),
    WatchedFinding.NO_ANSWER: (Verdict.STUCK, Rule.WATCHED_NO_ANSWER),
    WatchedFinding.WRONG_ANSWER: (Verdict.STUCK, Rule.WATCHED_WRONG_ANSWER),
    WatchedFinding.NOT_REGISTERED: (Verdict.DEREGISTERED, Rule.WATCHED_NOT_REGISTERED),
    WatchedFinding.FEWER_DEVICES: (Verdict.MISMATCH, Rule.WATCHED_FEWER_DEVICES),
    WatchedFinding.TWO_SERVERS: (Verdict.SPLIT_BRAIN, Rule.WATCHED_TWO_SERVERS),
    WatchedFinding.NOT_OFFERED: (Verdict.MISSING, Rule.WATCHED_NOT_OFFERED),
    WatchedFinding.FILES_MISSING: (Verdict.DEGRADED, Rule.WATCHED_FILES_MISSING),
}
AWAY: Final = frozenset(
    {Rule.WATCHED_NOT_SERVED, Rule.WATCHED_SOCKET_REMOVED, Rule.WATCHED_NO_ANSWER}
)
"""The rules under which nothing answers, which a planned stop may explain."""
_NEW_POD_S: Final = 60.0
"""A pod younger than this counts as created after the plugin's process ended."""
_REPLACED_S: Final = 300.0
"""How long two pods may serve after the newer one was created."""
_TEXT_MAX: Final = 500
_NAME_MAX: Final = 320
_PODS_MAX: Final = 32
_LATE: Final = (
    "the node's allocatable is older than the agent's count: the kubelet writes it every 10 s"
)
_WORDS: Final = {
    WatchedFinding.NOT_SERVED: "connections to its socket are refused",
    WatchedFinding.SOCKET_REMOVED: "its socket was removed",
    WatchedFinding.NO_ANSWER: "its socket accepts connections, but nothing answers",
    WatchedFinding.WRONG_ANSWER: "something other than a device plugin answers on its socket",
    WatchedFinding.NOT_REGISTERED: "it answers, but the kubelet lists none of its devices",
    WatchedFinding.FEWER_DEVICES: "the kubelet lists fewer devices than expected",
    WatchedFinding.TWO_SERVERS: "two processes serve it",
    WatchedFinding.NOT_OFFERED: "the node has the hardware, but no plugin offers it",
    WatchedFinding.FILES_MISSING: "CDI files that its pods need do not exist",
}
"""Descriptions by finding, for observations that contain no description."""


def bounded(watched: vocabulary.Watched) -> vocabulary.Watched:
    """Return an observation limited in size, because it is stored."""
    return msgspec.structs.replace(
        watched,
        text=watched.text[:_TEXT_MAX],
        socket=watched.socket[:_NAME_MAX],
        process=watched.process[:_NAME_MAX],
        pod=watched.pod[:_NAME_MAX],
        pods=tuple(pod[:_NAME_MAX] for pod in watched.pods[:_PODS_MAX]),
    )


def resources_of(watched: vocabulary.Watched) -> tuple[str, ...]:
    """Return the extended resource that pods request; a driver has none."""
    is_resource = watched.kind is vocabulary.WatchedKind.DEVICE_PLUGIN and "/" in watched.name
    return (watched.name,) if is_resource else ()


def combined(
    by_agent: vocabulary.Watched | None, by_cluster: vocabulary.Watched
) -> tuple[vocabulary.Watched, str]:
    """Return the observation that takes precedence, and its source.

    An agent on the node observes more, and sooner. But only the Kubernetes API shows what a driver
    offers (slices and claims), and an agent that has just started may lack the expected number.
    """
    if by_agent is None:
        return by_cluster, "kubernetes"
    is_about_driver = by_cluster.kind is vocabulary.WatchedKind.DRA_DRIVER
    is_unsure = by_agent.expected is None and not by_agent.listed
    is_failing = by_cluster.finding is not WatchedFinding.NONE
    is_fine = by_agent.finding is WatchedFinding.NONE
    if is_fine and is_failing and (is_about_driver or is_unsure):
        return by_cluster, "kubernetes"
    return by_agent, "agent"


def problem(
    watched: vocabulary.Watched,
    offers: Mapping[str, signals.Offer] | None,
    *,
    grace_s: float,
    mismatch_s: float,
    source: str = "agent",
) -> Problem | None:
    """Return the problem, or None; `offers` are the node's offers, None if unknown."""
    if watched.finding is WatchedFinding.NONE:
        return offered_otherwise(watched, offers, mismatch_s)
    verdict, rule = VERDICTS[watched.finding]
    return Problem(
        verdict=verdict,
        rule=rule,
        resources=resources_of(watched),
        evidence=_observed(watched, source),
        grace_s=grace_s,
    )


def offered_otherwise(
    watched: vocabulary.Watched,
    offers: Mapping[str, signals.Offer] | None,
    mismatch_s: float,
) -> Problem | None:
    """Return the problem that the node's allocatable differs from the kubelet's list, or None."""
    resources = resources_of(watched)
    if offers is None or watched.listed is None or not resources:
        return None
    offer = offers.get(watched.name, signals.Offer(capacity=0, allocatable=0))
    if offer.allocatable == watched.listed:
        return None
    text = (
        f"the kubelet lists {wording.counted(watched.listed, 'device')}, "
        f"but the node's allocatable is {offer.allocatable} of {offer.capacity}"
    )
    return Problem(
        verdict=Verdict.MISMATCH,
        rule=Rule.WATCHED_NODE_OFFERS_OTHERS,
        resources=resources,
        evidence=(evidence.of("agent", f"{watched.name}: {text}"),),
        grace_s=mismatch_s,
    )


def planned(
    problem: Problem,
    watched: vocabulary.Watched,
    answer: signals.Facts,
    *,
    back_s: float | None = None,
) -> Rule | None:
    """Return the rule that shows a planned stop; None if Kubernetes shows none.

    `back_s` is how many seconds ago the plugin first answered, or answered again after a stop.
    """
    if problem.rule not in AWAY:
        return None
    pods = None if watched.process and not watched.pod else answer.pods
    rows = (
        (answer.exists is False, Rule.WATCHED_NODE_GONE),
        (bool(answer.planned), Rule.WATCHED_NODE_PLANNED),
        (pods is not None and all(pod.deleting for pod in pods), Rule.WATCHED_POD_DELETED),
        (pods is not None and all(_is_new(pod, back_s) for pod in pods), Rule.WATCHED_POD_REPLACED),
    )
    return next((rule for applies, rule in rows if applies), None)


def is_replacing(problem: Problem, answer: signals.Facts) -> bool:
    """Return whether there are two servers because one pod is replacing another.

    With `maxSurge` the old pod ends only when the new one is ready.
    """
    is_changing = any(
        pod.deleting or (pod.age_s is not None and pod.age_s <= _REPLACED_S)
        for pod in answer.pods or ()
    )
    return problem.rule is Rule.WATCHED_TWO_SERVERS and is_changing


def contradicts(watched: vocabulary.Watched, offers: Mapping[str, signals.Offer] | None) -> bool:
    """Return whether the node offers devices of a resource of which the kubelet lists none.

    Both numbers come from one list in the kubelet, which writes them to the node every 10 s.
    """
    offer = (offers or {}).get(watched.name)
    return offer is not None and offer.allocatable > 0 and watched.listed == 0


def shown(
    answer: signals.Facts | None, watched: vocabulary.Watched, *, source: str = "agent"
) -> list[vocabulary.Evidence]:
    """Return the answer from Kubernetes as evidence."""
    seen = evidence.cluster(answer, resources_of(watched))
    is_agents = source == "agent"
    if is_agents and answer is not None and contradicts(watched, answer.offers):
        seen.append(evidence.undecided(_LATE))
    return seen


def _is_new(pod: signals.Pod, back_s: float | None) -> bool:
    """Return whether a pod is ending, or is so new that it has not served yet."""
    if pod.deleting or pod.age_s is None:
        return pod.deleting
    has_served = back_s is not None and pod.age_s > back_s
    return pod.age_s <= _NEW_POD_S and not pod.restarts and not has_served


def _observed(watched: vocabulary.Watched, source: str) -> tuple[vocabulary.Evidence, ...]:
    text = watched.text or _WORDS[watched.finding]
    place = f" ({watched.socket})" if watched.socket else ""
    seen = [evidence.of(source, f"{watched.name}{place}: {text}")]
    counts = (
        f"{count} {word}"
        for count, word in (
            (watched.listed, "listed by the kubelet"),
            (watched.expected, "expected"),
            (watched.allocated, "held by pods"),
        )
        if count is not None
    )
    devices = ", ".join(counts)
    if devices:
        seen.append(evidence.of(source, f"devices: {devices}"))
    if watched.process:
        seen.append(evidence.of(source, f"served by {watched.process}"))
    return tuple(seen)
