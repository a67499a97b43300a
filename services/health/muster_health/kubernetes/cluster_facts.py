"""Pure: reduces Kubernetes objects to the facts that the detector needs."""

import dataclasses
from collections.abc import Collection, Sequence
from datetime import UTC, datetime
from typing import Final

import msgspec

from muster.kubernetes import known_plugins, objects, scheduling
from muster_health.model import signals

TEMPLATE_GENERATION: Final = "pod-template-generation"
REVISION: Final = "controller-revision-hash"
"""Labels that the DaemonSet controller sets on its pods (daemon/util/daemonset_util.go, 1.36)."""

_GENERATION_ANNOTATION: Final = "deprecated.daemonset.template.generation"
_OFFERS_MAX: Final = 64
_REASON_MAX: Final = 40
_KUBELET: Final = "/kubelet"
"""The end of the path of the kubelet's directory: k0s, for example, uses /var/lib/k0s/kubelet."""
_DEVICE_PLUGINS: Final = f"{_KUBELET}/device-plugins"
_REGISTRY: Final = f"{_KUBELET}/plugins_registry"
_MIRROR_ANNOTATION: Final = "kubernetes.io/config.mirror"
"""The annotation with a static pod's uid on its node (kubelet/types/pod_update.go, 1.36)."""
_ENDED: Final = frozenset({"Succeeded", "Failed"})


class _RawList(msgspec.Struct, frozen=True):
    """A list whose items are decoded one by one, to keep memory use low."""

    items: tuple[msgspec.Raw, ...] | None = None


class _HostPath(objects.Object, frozen=True):
    path: str = ""


class _Volume(objects.Object, frozen=True):
    host_path: _HostPath | None = None


class _SpecWithVolumes(objects.PodSpec, frozen=True):
    volumes: tuple[_Volume, ...] | None = None


class _PodWithVolumes(objects.Pod, frozen=True):
    spec: _SpecWithVolumes | None = None


def is_ready(node: objects.Node) -> bool | None:
    """Return whether a node reports Ready; None if it does not report that condition.

    `Unknown`, which the control plane sets for a silent node, counts as not Ready.
    """
    ready = objects.condition(node.conditions, "Ready")
    return ready.status == "True" if ready is not None else None


def planned(node: objects.Node) -> tuple[signals.Planned, ...]:
    """Return the signs of a planned stop of a node's plugins."""
    signs = []
    if node.spec is not None and node.spec.unschedulable:
        signs.append(signals.Planned.UNSCHEDULABLE)
    is_to_be_removed = any(taint.key in scheduling.REMOVAL_TAINTS for taint in node.taints)
    if is_to_be_removed or node.metadata.is_being_deleted:
        signs.append(signals.Planned.TO_BE_DELETED)
    return tuple(signs)


def offers(node: objects.Node) -> dict[str, signals.Offer]:
    """Return a node's capacity and allocatable by extended resource; unreadable amounts are 0."""
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
    """Return the facts about a pod; `current_revision` is the newest one of its DaemonSet."""
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
        last_exit=_last_exit(shape.container_statuses),
        revision=shape.labels.get(REVISION, ""),
        current=current_revision,
    )


def _last_exit(statuses: Sequence[objects.ContainerStatus]) -> str:
    """Return how a container last ended; empty if none has ended or the kubelet reports nothing."""
    states = [state for status in statuses for state in (status.state, status.last_state) if state]
    ends = [state.terminated for state in states if state.terminated]
    end = max(ends, key=lambda ended: ended.finished_at or "", default=None)
    if end is None or end.exit_code is None:
        return ""
    reason = f" ({end.reason[:_REASON_MAX]})" if end.reason else ""
    at = f" at {end.finished_at[:_REASON_MAX]}" if end.finished_at else ""
    return f"exit code {end.exit_code}{reason}{at}"


def watched_pods(
    pod_list: bytes,
    name: str,
    uid: str,
    *,
    now: datetime | None,
    more: Sequence[known_plugins.KnownPlugin] = (),
) -> tuple[signals.Pod, ...] | None:
    """Return the pods that serve a resource or driver; None if that is unknown.

    `uid` is the uid of the pod that the agent saw serving it, if any; if that pod is gone, the pods
    that may have replaced it are returned. A pod that cannot serve it is ignored, whatever the
    agent reports, because the pods in the result may be restarted. `now` is the API server's time,
    and `more` are the configured plugins. The result is empty only if the pod with that uid is gone
    without a replacement, or if a known plugin serves the resource but no pod on this node may
    serve it. Raises msgspec's errors.
    """
    items = msgspec.json.decode(pod_list, type=_RawList).items or ()
    pods = [msgspec.json.decode(item, type=_PodWithVolumes) for item in items]
    plugins = [(pod, known_plugins.plugin_of(pod, more)) for pod in pods]
    serving = [pod for pod, plugin in plugins if plugin is not None and plugin.serves(name)]
    with_uid = [(pod, plugin) for pod, plugin in plugins if uid and uid in _uids(pod)]
    serving = [
        pod
        for pod, plugin in with_uid
        if (_may_serve(pod, name, _DEVICE_PLUGINS) if plugin is None else plugin.serves(name))
    ] or serving
    if with_uid and not serving:
        return None
    if serving:
        return tuple(_with_age(pod, now) for pod in serving)
    is_known = any(each.serves(name) for each in (*more, *known_plugins.KNOWN_PLUGINS))
    may_serve = any(plugin is None and _may_serve(pod, name) for pod, plugin in plugins)
    return () if uid or (is_known and not may_serve) else None


def template_generation(daemonset: objects.DaemonSet) -> str:
    """Return the generation of a DaemonSet's template; empty if it is missing."""
    return daemonset.annotations.get(_GENERATION_ANNOTATION, "")


def pods_requesting(pod_list: bytes, resources: Collection[str]) -> tuple[str, ...]:
    """Return the pods that have not ended and request any of `resources`.

    The pods are sorted, in the form `namespace/name`.

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
    """Return the seconds between two times of the API server, at least 0; None if unknown."""
    if then is None or server_now is None or then.tzinfo is None:
        return None
    return max(0.0, (server_now - then.astimezone(UTC)).total_seconds())


def _with_age(shape: objects.Pod, now: datetime | None) -> signals.Pod:
    age = age_s(shape.metadata.created_at, now)
    return dataclasses.replace(pod(shape, current_revision=""), age_s=age)


def _uids(shape: objects.Pod) -> tuple[str, str]:
    """Return the uids of a pod; a static pod has one uid on its node and another in the API."""
    return shape.metadata.uid, shape.annotations.get(_MIRROR_ANNOTATION, "")


def _may_serve(shape: _PodWithVolumes, name: str, *more: str) -> bool:
    """Return whether a pod mounts a directory for plugins' sockets; False for muster's own pods.

    Drivers and device plugins use different directories. A name with a slash is a device plugin's
    resource. `more` are further directories.
    """
    volumes = shape.spec.volumes if shape.spec is not None else None
    paths = (volume.host_path.path for volume in volumes or () if volume.host_path is not None)
    is_ours = shape.labels.get("app.kubernetes.io/part-of") == "muster"
    places = _KUBELET, _DEVICE_PLUGINS if "/" in name else _REGISTRY, *more
    return not is_ours and any(path.rstrip("/").endswith(places) for path in paths)


def _requests(pod: objects.Pod, resources: Collection[str]) -> bool:
    """Return whether a pod that has not ended requests any of `resources`, in any container.

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
