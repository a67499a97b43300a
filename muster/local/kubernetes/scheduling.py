"""Pure: binds pods to nodes that have free devices, as kube-scheduler does.

Only devices, `nodeSelector`, cordoned nodes and taints count; CPU, memory, affinity and preemption
do not. Of the nodes that fit, a pod gets the node with the most free devices of the requested
resources. A pod that fits nowhere stays pending, with the texts of kube-scheduler
(pkg/scheduler/framework, FitError; plugins/noderesources/fit.go, nodeunschedulable, nodeaffinity,
tainttoleration).
"""

import contextlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from muster.local.kubernetes import objects, refusals, resources, trees, writes

SCHEDULER = "default-scheduler"
_ENDED = ("Succeeded", "Failed")
_KEEPING_OUT = ("NoSchedule", "NoExecute")


@dataclass(frozen=True, slots=True)
class Node:
    """A node, and how many of its allocatable devices are `free`, by resource."""

    name: str
    free: Mapping[str, int]
    tree: trees.Tree


@dataclass(frozen=True, slots=True)
class Bound:
    """The node of a pod."""

    node: str


@dataclass(frozen=True, slots=True)
class Unschedulable:
    """Why a pod has no node."""

    message: str


def schedule(store: objects.Store, *, at: str, ids: Iterator[str]) -> bool:
    """Bind pending pods that fit, and record why others do not; return whether anything changed.

    `ids` yields unique words for the events.
    """
    pods = store.all(resources.PODS)
    pending = [pod for pod in pods if _is_pending(pod)]
    if not pending:
        return False
    before = store.version
    used = Counter[tuple[str, str]]()
    for pod in pods:
        _count(used, pod, _text(pod, "spec", "nodeName"))
    for pod in sorted(pending, key=_created):
        nodes = [_node(node, used) for node in store.all(resources.NODES)]
        decision = decide(pod, nodes)
        if isinstance(decision, Bound):
            _count(used, pod, decision.node)
        # a full store refuses the event; that is no error of the write that led to this
        with contextlib.suppress(refusals.RequestError):
            _write(store, pod, decision, at=at, ids=ids)
    return store.version != before


def decide(pod: trees.Tree, nodes: Sequence[Node]) -> Bound | Unschedulable:
    """Return the node of a pod, or why no node fits."""
    if not nodes:
        return Unschedulable("no nodes available to schedule pods")
    try:
        wanted = requests(pod)
    except refusals.RequestError as error:
        return Unschedulable(error.message)
    reasons: Counter[str] = Counter()
    fitting = []
    for node in nodes:
        against = _reasons(pod, node, wanted)
        reasons.update(against)
        if not against:
            fitting.append(node)
    if not fitting:
        listed = ", ".join(sorted(f"{count} {reason}" for reason, count in reasons.items()))
        return Unschedulable(f"0/{len(nodes)} nodes are available: {listed}.")
    best = min(fitting, key=lambda node: (-sum(node.free.get(r, 0) for r in wanted), node.name))
    return Bound(best.name)


def requests(pod: trees.Tree) -> dict[str, int]:
    """Return the devices that a pod requests, by resource. Raises RequestError."""
    apps, first = Counter[str](), Counter[str]()
    for container in _list(pod, "spec", "containers"):
        apps.update(_limits(container))
    for container in _list(pod, "spec", "initContainers"):
        if _text(container, "restartPolicy") == "Always":
            apps.update(_limits(container))
        else:
            first |= _limits(container)
    return dict(apps | first)


def _limits(container: trees.Tree) -> Counter[str]:
    """Return a container's limits of device resources, which are also its requests."""
    limits = Counter[str]()
    for resource, value in _object(container, "resources", "limits").items():
        if "/" not in resource or resource.startswith("kubernetes.io/"):
            continue
        if isinstance(value, bool) or not str(value).isdecimal():
            raise refusals.bad_request(f"{resource}: {value!r} is not a whole number")
        limits[resource] = int(str(value)[:18])
    return limits


def _reasons(pod: trees.Tree, node: Node, wanted: Mapping[str, int]) -> list[str]:
    reasons = [
        f"Insufficient {resource}"
        for resource, count in wanted.items()
        if node.free.get(resource, 0) < count
    ]
    if trees.value_at(node.tree, "spec", "unschedulable"):
        reasons.append("node(s) were unschedulable")
    labels = _object(node.tree, "metadata", "labels")
    selected = _object(pod, "spec", "nodeSelector")
    if any(labels.get(key) != value for key, value in selected.items()):
        reasons.append("node(s) didn't match Pod's node affinity/selector")
    for taint in _list(node.tree, "spec", "taints"):
        if taint.get("effect") in _KEEPING_OUT and not _is_tolerated(pod, taint):
            value = f"{_text(taint, 'key')}: {_text(taint, 'value')}"
            reasons.append(f"node(s) had untolerated taint {{{value}}}")
            break
    return reasons


def _is_tolerated(pod: trees.Tree, taint: trees.Tree) -> bool:
    for toleration in _list(pod, "spec", "tolerations"):
        exists = toleration.get("operator") == "Exists"
        same_key = toleration.get("key") == taint.get("key") or (
            exists and not toleration.get("key")
        )
        same_value = exists or toleration.get("value", "") == taint.get("value", "")
        if same_key and same_value and toleration.get("effect") in {None, "", taint.get("effect")}:
            return True
    return False


def _is_pending(pod: trees.Tree) -> bool:
    scheduler = _text(pod, "spec", "schedulerName") or SCHEDULER
    is_bound = bool(_text(pod, "spec", "nodeName"))
    has_ended = _text(pod, "status", "phase") in _ENDED
    return scheduler == SCHEDULER and not is_bound and not has_ended


def _count(used: Counter[tuple[str, str]], pod: trees.Tree, node: str) -> None:
    """Add the devices of a pod to those that are used on its node."""
    if not node or _text(pod, "status", "phase") in _ENDED:
        return
    try:
        wanted = requests(pod)
    except refusals.RequestError:
        return
    for resource, count in wanted.items():
        used[node, resource] += count


def _node(tree: trees.Tree, used: Counter[tuple[str, str]]) -> Node:
    name = _text(tree, "metadata", "name")
    free = {
        resource: int(str(count)[:18]) - used[name, resource]
        for resource, count in _object(tree, "status", "allocatable").items()
        if "/" in resource and str(count).isdecimal()
    }
    return Node(name, free, tree)


def _created(pod: trees.Tree) -> tuple[str, str]:
    metadata = _object(pod, "metadata")
    return _text(metadata, "creationTimestamp"), _text(metadata, "name")


def _write(
    store: objects.Store,
    pod: trees.Tree,
    decision: Bound | Unschedulable,
    *,
    at: str,
    ids: Iterator[str],
) -> None:
    """Bind the pod if it fits; set its condition and add an event, unless nothing has changed."""
    name, namespace = (_text(pod, "metadata", key) for key in ("name", "namespace"))
    condition: trees.Tree = {"type": "PodScheduled", "lastTransitionTime": at}
    if isinstance(decision, Bound):
        message = f"Successfully assigned {namespace}/{name} to {decision.node}"
        kind, reason = "Normal", "Scheduled"
        _patch(store, pod, {"spec": {"nodeName": decision.node}}, at=at)
        condition |= {"status": "True"}
    else:
        message, kind, reason = decision.message, "Warning", "FailedScheduling"
        condition |= {"status": "False", "reason": "Unschedulable", "message": message}
        if any(old.get("message") == message for old in _list(pod, "status", "conditions")):
            return
    _patch(store, pod, {"status": {"conditions": [condition]}}, at=at, subresource="status")
    event: trees.Tree = {
        "involvedObject": {
            "apiVersion": "v1",
            "kind": "Pod",
            "namespace": namespace,
            "name": name,
            "uid": _text(pod, "metadata", "uid"),
        },
        "metadata": {"name": f"{name}.{next(ids)}"},
        "type": kind,
        "reason": reason,
        "message": message,
        "source": {"component": SCHEDULER},
        "firstTimestamp": at,
        "lastTimestamp": at,
        "count": 1,
    }
    place = resources.Place(resource=resources.EVENTS, namespace=namespace)
    store.create(event, _by_scheduler(place, at=at, uid=next(ids)))


def _patch(
    store: objects.Store, pod: trees.Tree, patch: trees.Tree, *, at: str, subresource: str = ""
) -> None:
    place = resources.Place(
        resource=resources.PODS,
        namespace=_text(pod, "metadata", "namespace"),
        name=_text(pod, "metadata", "name"),
        subresource=subresource,
    )
    store.patch(patch, writes.PatchFormat.STRATEGIC, _by_scheduler(place, at=at))


def _by_scheduler(place: resources.Place, *, at: str, uid: str = "") -> writes.Write:
    return writes.Write(place=place, manager="kube-scheduler", at=at, uid=uid, suffix="")


def _list(tree: trees.Tree, *path: str) -> list[trees.Tree]:
    value = trees.value_at(tree, *path)
    return [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []


def _object(tree: trees.Tree, *path: str) -> trees.Tree:
    value = trees.value_at(tree, *path)
    return value if isinstance(value, dict) else {}


def _text(tree: trees.Tree, *path: str) -> str:
    value = trees.value_at(tree, *path)
    return value if isinstance(value, str) else ""
