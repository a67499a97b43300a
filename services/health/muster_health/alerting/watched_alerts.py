"""Pure: composes the texts of alerts about plugins that muster watches but does not run.

The advice differs from that for our own plugins: muster cannot interpret this plugin's log, and the
other runbooks do not apply.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from muster.vocabulary import AlertKind
from muster_health.model import alerts, steps
from muster_health.model.steps import Rule

_PODS_SHOWN: Final = 3
_SUMMARY: Final[Mapping[Rule | None, str]] = {
    Rule.WATCHED_NOT_SERVED: "has ended and has not come back",
    Rule.WATCHED_SOCKET_REMOVED: "has lost its socket: the kubelet cannot connect to it again",
    Rule.WATCHED_NO_ANSWER: "is stuck: its socket accepts connections, but nothing answers",
    Rule.WATCHED_WRONG_ANSWER: "does not answer like a device plugin: another program may serve "
    "its socket",
    Rule.WATCHED_NOT_REGISTERED: "runs, but the kubelet lists none of its devices",
    Rule.WATCHED_FEWER_DEVICES: "offers fewer devices than expected",
    Rule.WATCHED_TWO_SERVERS: "is running twice at the same time",
    Rule.WATCHED_NOT_OFFERED: "is missing: the node has the hardware, but no plugin offers it",
    Rule.WATCHED_FILES_MISSING: "lacks CDI files that running pods need when they restart",
    Rule.WATCHED_NODE_OFFERS_OTHERS: "works, but the node's allocatable differs from the "
    "number of devices that the kubelet lists",
}
_RESTART: Final = "read the log of {pod}, then delete the pod: its DaemonSet starts a new one"
_ADVICE: Final[Mapping[Rule | None, str]] = {
    Rule.WATCHED_NOT_SERVED: "check whether {pod} exists, and why its process ended "
    "(kubectl logs --previous)",
    Rule.WATCHED_SOCKET_REMOVED: "delete {pod}: a new process creates a new socket; find out what "
    "removed the old one",
    Rule.WATCHED_NO_ANSWER: _RESTART,
    Rule.WATCHED_WRONG_ANSWER: "find out which process serves the socket, and stop it; then delete "
    "{pod}",
    Rule.WATCHED_NOT_REGISTERED: _RESTART,
    Rule.WATCHED_FEWER_DEVICES: "look for the missing devices: lspci, dmesg, the log of {pod}",
    Rule.WATCHED_TWO_SERVERS: "find out which DaemonSets offer the same resource, and remove one",
    Rule.WATCHED_NOT_OFFERED: "find out why no plugin runs on this node: node labels, tolerations, "
    "driver",
    Rule.WATCHED_FILES_MISSING: "delete {pod}: the new pod writes the files; running pods are not "
    "affected",
    Rule.WATCHED_NODE_OFFERS_OTHERS: "read the kubelet's log; restart the kubelet if this lasts",
}


@dataclass(slots=True, eq=False)
class Subject:
    """The watched plugin: its resource or driver, its own pods, and the pods that use it."""

    name: str
    pods: tuple[str, ...] = ()
    holders: tuple[str, ...] = ()
    """The pods that use the plugin; needed for a driver, whose pods request no resource."""


def texts(kind: AlertKind, rule: Rule | None, subject: Subject, *, node: str) -> tuple[str, str]:
    """Return the summary and the advice of an alert."""
    what = f"watched plugin {subject.name} on {node}"
    shown = ", ".join(subject.pods[:_PODS_SHOWN])
    pod = f"its pod {shown}" if shown else "its pod"
    not_ours = "muster does not run this plugin"
    if kind is AlertKind.MAINTENANCE_OVERDUE:
        since = steps.PLANNED.get(rule, "it stopped") if rule is not None else "it stopped"
        advice = f"find out why it has not come back since {since}"
        return (
            f"{what} is overdue: it has not returned from a planned stop",
            f"{not_ours}; {advice}",
        )
    wrong = _SUMMARY.get(rule)
    if wrong is None:
        summary = alerts.summary_of(kind, node=node, plugin=subject.name, resources=())
        return f"watched plugin {summary}", f"{not_ours}; check {pod}"
    return f"{what} {wrong}", f"{not_ours}; {_ADVICE[rule].format(pod=pod)}"
