"""Pure: reduces Kubernetes objects to the facts that the detector needs."""

from collections.abc import Collection
from datetime import UTC, datetime
from typing import Final

import msgspec

from muster.kubernetes import objects, scheduling
from muster_health.model import signals

TEMPLATE_GENERATION: Final = "pod-template-generation"
REVISION: Final = "controller-revision-hash"
"""Labels that the DaemonSet controller puts on its pods (daemon/util/daemonset_util.go, 1.36)."""

_GENERATION_ANNOTATION: Final = "deprecated.daemonset.template.generation"
_OFFERS_MAX: Final = 64
_ENDED: Final = frozenset({"Succeeded", "Failed"})


class _RawList(msgspec.Struct, frozen=True):
    """A list whose items are decoded one by one, to keep memory use low."""

    items: tuple[msgspec.Raw, ...] | None = None


def is_ready(node: objects.Node) -> bool | None:
    """Return whether a node reports Ready; None if it does not report that condition.

    `Unknown`, which the control plane sets for a silent node, counts as not Ready.
    """
    ready = objects.condition(node.conditions, "Ready")
    return ready.status == "True" if ready is not None else None


def planned(node: objects.Node) -> tuple[signals.Planned, ...]:
    """Return the signs that a node is about to lose its plugins as planned."""
    signs = []
    if node.spec is not None and node.spec.unschedulable:
        signs.append(signals.Planned.UNSCHEDULABLE)
    is_to_be_removed = any(taint.key in scheduling.REMOVAL_TAINTS for taint in node.taints)
    if is_to_be_removed or node.metadata.is_being_deleted:
        signs.append(signals.Planned.TO_BE_DELETED)
    return tuple(signs)


def offers(node: objects.Node) -> dict[str, signals.Offer]:
    """Return the amount of each extended resource on a node; an unreadable amount counts as 0."""
    capacity, allocatable = node.capacity, node.allocatable
    names = sorted(filter(scheduling.is_extended, capacity.keys() | allocatable.keys()))[
        :_OFFERS_MAX
    ]
    return {
        name: signals.Offer(
            capacity=scheduling.whole_quantity(capacity.get(name, 0)) or 0,
            allocatable=scheduling.whole_quantity(allocatable.get(name, 0)) or 0,
        )
        for name in names
    }


def pod(shape: objects.Pod, *, current_revision: str) -> signals.Pod:
    """Return the facts about a plugin's pod; `current_revision` is its DaemonSet's newest."""
    states = [container.state for container in shape.container_statuses]
    waiting = [state.waiting.reason for state in states if state and state.waiting]
    return signals.Pod(
        name=f"{shape.metadata.namespace}/{shape.metadata.name}",
        uid=shape.metadata.uid,
        phase=shape.phase,
        ready=objects.is_true(shape.conditions, "Ready"),
        restarts=sum(container.restart_count for container in shape.container_statuses),
        deleting=shape.metadata.is_being_deleted,
        waiting=waiting[0] if waiting else "",
        revision=shape.labels.get(REVISION, ""),
        current=current_revision,
    )


def template_generation(daemonset: objects.DaemonSet) -> str:
    """Return the generation of a DaemonSet's template; empty if it is missing."""
    return daemonset.annotations.get(_GENERATION_ANNOTATION, "")


def pods_requesting(pod_list: bytes, resources: Collection[str]) -> tuple[str, ...]:
    """Return the running or pending pods that request any of these, as sorted `namespace/name`.

    Raises msgspec's errors for bytes that are not a list of pods.
    """
    items = msgspec.json.decode(pod_list, type=_RawList).items or ()
    pods = (msgspec.json.decode(item, type=objects.Pod) for item in items)
    return tuple(
        sorted(
            f"{pod.metadata.namespace}/{pod.metadata.name}"
            for pod in pods
            if _requests(pod, resources)
        )
    )


def age_s(then: datetime | None, server_now: datetime | None) -> float | None:
    """Return the seconds between two times of the API server, at least 0."""
    if then is None or server_now is None or then.tzinfo is None:
        return None
    return max(0.0, (server_now - then.astimezone(UTC)).total_seconds())


def _requests(pod: objects.Pod, resources: Collection[str]) -> bool:
    """Return whether any container requests one of these; sidecars count as init containers.

    A limit without a request counts as a request (core/v1 defaults.go, SetDefaults_Pod, 1.36).
    """
    if pod.spec is None or pod.phase in _ENDED:
        return False
    amounts = (
        (resource, amount)
        for container in (*(pod.spec.init_containers or ()), *(pod.spec.containers or ()))
        if container.resources is not None
        for part in (container.resources.limits, container.resources.requests)
        for resource, amount in (part or {}).items()
    )
    return any(resource in resources and str(amount) != "0" for resource, amount in amounts)
