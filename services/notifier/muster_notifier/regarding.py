"""Pure: A notification as Kubernetes Events (events.k8s.io/v1), on nodes and on pods.

The name of an Event follows from the news, so that a repeat finds it there already. Kubernetes
forgets Events after about an hour: they are a view, and not the record.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from muster import vocabulary
from muster_notifier import message
from muster_notifier import notification as notifications

CONTROLLER: Final = "muster.dev/notifier"

_NAMESPACE: Final = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
_POD: Final = re.compile(r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?")
_ALERTS_MAX: Final = 20
_PODS_MAX: Final = 20
_NOTE_MAX: Final = 1000
"""Kubernetes takes 1,024 bytes (apis/events/v1/types.go, note)."""

Json = dict[str, object]


@dataclass(frozen=True, slots=True)
class Event:
    """One Event, the namespace it goes to, and the pod it is about, if it is."""

    namespace: str
    body: Json
    pod: str = ""


def events(notification: notifications.Notification, *, namespace: str, pods: bool) -> list[Event]:
    """Return the Events; the first alerts, and of each the first pods, have one."""
    found: list[Event] = []
    told = (*notification.firing, *notification.told_resolved)
    for alert in told[:_ALERTS_MAX]:
        for where, about in _about(alert, namespace=namespace, pods=pods):
            number = len(found)
            body = _event(notification, alert, where, about, number)
            pod = str(about["name"]) if about["kind"] == "Pod" else ""
            found.append(Event(where, body, pod))
    return found


def with_uid(body: Json, uid: str) -> Json:
    """Return an Event that names its object's uid, if there is one."""
    about = body["regarding"]
    assert isinstance(about, dict), "made here"
    return {**body, "regarding": {**about, "uid": uid}} if uid else body


def pod_of(text: str) -> tuple[str, str] | None:
    """Return namespace and name of a pod, or None: whoever can write to the bus wrote it.

    What is no name must not become part of a path.
    """
    namespace, _, name = text.partition("/")
    if _NAMESPACE.fullmatch(namespace) and _POD.fullmatch(name):
        return namespace, name
    return None


def _about(
    alert: vocabulary.AlertChanged, *, namespace: str, pods: bool
) -> Iterator[tuple[str, Json]]:
    if alert.node != vocabulary.FLEET:
        # the kubelet uses a node's name as its uid here, and so does `kubectl describe node`
        yield namespace, {"kind": "Node", "name": alert.node, "uid": alert.node, "apiVersion": "v1"}
    for pod in alert.pods[:_PODS_MAX] if pods else ():
        found = pod_of(pod)
        if found is not None:
            where, name = found
            yield where, {"kind": "Pod", "name": name, "namespace": where, "apiVersion": "v1"}


def _event(
    notification: notifications.Notification,
    alert: vocabulary.AlertChanged,
    namespace: str,
    about: Json,
    number: int,
) -> Json:
    fires = alert.state is vocabulary.AlertState.FIRING
    at = notification.at.strftime("%Y-%m-%dT%H:%M:%S.%fZ")
    word = "".join(part.capitalize() for part in alert.kind.split("_"))
    test = message.TEST if notification.is_test else ""
    return {
        "apiVersion": "events.k8s.io/v1",
        "kind": "Event",
        "metadata": {"name": f"muster.{notification.id}.{number}", "namespace": namespace},
        "eventTime": at,
        "reportingController": CONTROLLER,
        "reportingInstance": "muster-notifier",
        "action": "Notify",
        "reason": word if fires else f"{word}Resolved",
        "regarding": about,
        "note": _note(f"{test}{alert.summary}", alert),
        "type": "Warning" if fires and alert.severity != vocabulary.Severity.INFO else "Normal",
    }


def _note(head: str, alert: vocabulary.AlertChanged) -> str:
    parts = [head]
    parts += [f"{seen.source}: {seen.observed}" for seen in alert.evidence]
    parts += [alert.advice or alert.runbook]
    text = message.line("; ".join(part for part in parts if part), _NOTE_MAX)
    # the limit is in bytes
    while len(text.encode()) > _NOTE_MAX:
        text = message.cut(text, len(text) * 9 // 10)
    return text
