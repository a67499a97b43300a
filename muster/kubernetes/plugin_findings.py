"""Pure: finds device plugins that run but do not work, from the Kubernetes API alone.

The kubelet computes the numbers as follows (devicemanager, 1.36). When a plugin's stream ends, the
kubelet keeps the node's capacity and sets allocatable to 0. After 5 minutes, or immediately after a
restart of the kubelet, both are 0, but the resource stays in the node's status. A plugin that
reports all its devices Unhealthy also has capacity and no allocatable.
"""

from collections.abc import Iterable
from datetime import datetime
from typing import Final

from muster import wording
from muster.kubernetes import objects, plugin_facts, plugin_objects
from muster.kubernetes.plugin_facts import (
    Facts,
    Kind,
    Level,
    NodeFacts,
    NodeState,
    Offer,
    Peers,
    PluginFinding,
    PluginPod,
)
from muster.kubernetes.plugin_objects import Pod

_PEERS_MIN: Final = 2
"""How many nodes must agree before a node that offers fewer devices is reported."""
_RECENT_S: Final = 600.0
_REJECTED_S: Final = 3600.0
"""How long a refused pod counts as evidence of a present problem."""
_RESTARTS_MIN: Final = 5


def evaluate(facts: Facts) -> Iterable[PluginFinding]:
    """Yield the findings about the device plugins of all nodes."""
    for node in facts.nodes.values():
        if node.state is NodeState.NOT_READY and node.plugins:
            names = wording.name_list(each.plugin.name for each in node.plugins)
            yield PluginFinding(
                kind=Kind.NODE,
                level=Level.INFO,
                name=names,
                node=node.name,
                text=f"the node is not Ready, so the state of {names} there is unknown",
            )
        if node.is_settled:
            for resource, offer in node.offers.items():
                yield from _resource(facts, node, resource, offer)
            for plugin in node.plugins:
                yield from _never(facts, node, plugin)
    for plugin in facts.plugins:
        yield from _pod(facts, plugin)
    yield from _rejections(facts)
    yield from _unhealthy_devices(facts)


def _resource(
    facts: Facts, node: NodeFacts, resource: str, offer: Offer
) -> Iterable[PluginFinding]:
    """Yield the findings about one resource of a settled node."""
    plugin = node.serving(resource)
    counts = f"{resource}: {offer.allocatable} of {offer.capacity} allocatable"
    if offer.capacity and not offer.allocatable:
        yield from _lost(facts, node, resource, offer, plugin)
    elif not offer.capacity and plugin is not None:
        yield from _none(facts, node, resource, plugin)
    elif offer.allocatable < offer.capacity:
        bad = offer.capacity - offer.allocatable
        yield PluginFinding(
            kind=Kind.UNHEALTHY,
            level=Level.WARN,
            name=resource,
            node=node.name,
            pod=plugin.pod.full_name if plugin else "",
            text=f"{bad} of {offer.capacity} {resource} are Unhealthy",
            evidence=(counts,),
        )
    if offer.capacity and plugin is not None and not plugin.plugin.registers_on_demand:
        yield from _fewer(facts, node, resource, offer, plugin)


def _lost(
    facts: Facts, node: NodeFacts, resource: str, offer: Offer, plugin: PluginPod | None
) -> Iterable[PluginFinding]:
    """Yield a finding for a resource without usable devices.

    There is none if a plugin registers on demand, or if no plugin's pod has been Ready for a while.
    """
    pods = [each for each in node.plugins if each.plugin.serves(resource)]
    if any(each.plugin.registers_on_demand for each in pods) or (pods and plugin is None):
        return
    counts = f"{resource}: 0 of {offer.capacity} allocatable"
    unhealthy = _reported_unhealthy(facts, node, resource)
    if facts.view.pods is None:
        why = "pods cannot be read, so the state of its plugin is unknown"
    elif plugin is None:
        why = (
            "no pod of a known plugin serves it here: its plugin is restarting, ended within the "
            "last 5 minutes, or reports all devices Unhealthy"
        )
    elif unhealthy:
        why = f"{plugin.plugin.name} runs, but reports its devices Unhealthy"
    else:
        why = (
            f"{plugin.plugin.name} runs and is Ready, but the kubelet has lost its connection to "
            "it, or it reports all devices Unhealthy"
        )
    yield PluginFinding(
        kind=Kind.LOST,
        level=Level.ERROR if plugin else Level.WARN,
        name=resource,
        node=node.name,
        pod=plugin.pod.full_name if plugin else "",
        text=f"offers no {resource}: {why}",
        evidence=(counts, *_pod_evidence(plugin), *unhealthy),
    )


def _none(
    facts: Facts, node: NodeFacts, resource: str, plugin: PluginPod
) -> Iterable[PluginFinding]:
    """Yield a finding for a resource without devices.

    There is no finding if the plugin registers on demand, or if it offers another resource and
    nothing shows that the node should offer this one.
    """
    if plugin.plugin.registers_on_demand:
        return
    expected = _expected(facts, node, resource, plugin)
    others = [
        name
        for name, offer in node.offers.items()
        if name != resource and offer.allocatable and plugin.plugin.serves(name)
    ]
    if others and not expected:
        return
    yield PluginFinding(
        kind=Kind.NONE,
        level=Level.ERROR if expected else Level.WARN,
        name=resource,
        node=node.name,
        pod=plugin.pod.full_name,
        text=f"offers no {resource}: {plugin.plugin.name} runs and is Ready, but it did not "
        "register after the kubelet restarted, was disconnected for 5 minutes, or has no devices",
        evidence=(f"{resource}: 0 of 0 allocatable", *_pod_evidence(plugin), *expected),
    )


def _never(facts: Facts, node: NodeFacts, plugin: PluginPod) -> Iterable[PluginFinding]:
    """Yield a finding for a resource that all similar nodes offer, but this node never offered."""
    if not plugin.is_serving() or plugin.plugin.registers_on_demand or plugin.plugin.drivers:
        return
    if any(plugin.plugin.serves(resource) for resource in node.offers):
        return
    peers = facts.peers(node, plugin.plugin)
    common = [
        resource
        for resource in peers.resources
        if plugin.plugin.serves(resource) and 0 < peers.count == peers.offering(resource)
    ]
    if not common:
        return
    yield PluginFinding(
        kind=Kind.NEVER,
        level=Level.ERROR if peers.count >= _PEERS_MIN else Level.WARN,
        name=common[0],
        node=node.name,
        pod=plugin.pod.full_name,
        text=f"offers no {common[0]}: {plugin.plugin.name} runs and is Ready, but has never "
        "registered it here",
        evidence=(_peer_evidence(peers, common[0]), *_pod_evidence(plugin)),
    )


def _fewer(
    facts: Facts, node: NodeFacts, resource: str, offer: Offer, plugin: PluginPod
) -> Iterable[PluginFinding]:
    """Yield a finding for a node that offers fewer devices than all similar nodes."""
    peers = facts.peers(node, plugin.plugin)
    usual = peers.usual(resource)
    if peers.count < _PEERS_MIN or usual is None or offer.capacity >= usual:
        return
    yield PluginFinding(
        kind=Kind.FEWER,
        level=Level.WARN,
        name=resource,
        node=node.name,
        pod=plugin.pod.full_name,
        text=f"offers {offer.capacity} {resource}, but all {peers.count} other {node.type} nodes "
        f"offer {usual}; this may be intended",
        evidence=(f"{resource}: {offer.allocatable} of {offer.capacity} allocatable",),
    )


def _pod(facts: Facts, plugin: PluginPod) -> Iterable[PluginFinding]:
    """Yield a finding for a plugin's pod that restarts repeatedly or has been unready for long."""
    node = facts.nodes.get(plugin.pod.node_name)
    if node is not None and not node.is_settled:
        return
    pod, unready_s = plugin.pod, plugin.unready_s or 0.0
    restarts = max((each.restart_count for each in pod.containers), default=0)
    states = [each.state for each in pod.containers if each.state]
    waiting = [state.waiting for state in states if state.waiting]
    is_crashing = any(each.reason == "CrashLoopBackOff" for each in waiting)
    if is_crashing:
        text = f"crashes repeatedly: {restarts} restarts"
    elif unready_s >= plugin_facts.NOT_READY_S:
        text = f"has been unready for {int(unready_s // 60)} minutes"
    elif restarts >= _RESTARTS_MIN and any(
        (facts.age_s(_started(state)) or _RECENT_S) < _RECENT_S for state in states
    ):
        text = f"has restarted {restarts} times, the last time less than 10 minutes ago"
    else:
        return
    yield PluginFinding(
        kind=Kind.POD,
        level=Level.ERROR if is_crashing or unready_s else Level.WARN,
        name=plugin.plugin.name,
        node=pod.node_name,
        pod=pod.full_name,
        text=f"{plugin.plugin.name} {text}",
        evidence=tuple(f"{each.reason}: {each.message}".rstrip(": ") for each in waiting),
    )


def _rejections(facts: Facts) -> Iterable[PluginFinding]:
    """Yield findings about resources that the kubelet refused to pods in the last hour."""
    refused: dict[tuple[str, str], list[tuple[float, Pod]]] = {}
    for pod in facts.pods:
        age_s = facts.age_s(_since(pod))
        if pod.rejection and age_s is not None and age_s <= _REJECTED_S:
            requested = sorted(pod.requested())
            refused_names = [name for name in requested if name in pod.rejection] or requested
            key = pod.node_name, (refused_names or ["devices"])[0]
            refused.setdefault(key, []).append((age_s, pod))
    for (name, resource), pods in refused.items():
        node = facts.nodes.get(name)
        newest_s, newest = min(pods, key=lambda each: each[0])
        is_now = node is not None and node.is_settled and newest_s <= _RECENT_S
        plugin = node.serving(resource) if node is not None else None
        yield PluginFinding(
            kind=Kind.ADMISSION,
            level=Level.ERROR if is_now else Level.WARN,
            name=resource,
            node=name,
            pod=plugin.pod.full_name if plugin else newest.full_name,
            text=f"refused {resource} to {wording.counted(len(pods), 'pod')} within the last hour, "
            f"most recently {wording.counted(int(newest_s // 60), 'minute')} ago",
            evidence=(
                f"UnexpectedAdmissionError: {newest.rejection}",
                wording.name_list(pod.full_name for _, pod in pods),
            ),
        )


def _unhealthy_devices(facts: Facts) -> Iterable[PluginFinding]:
    """Yield a finding for each active pod with a device that is reported Unhealthy."""
    for pod in facts.pods:
        if not plugin_facts.is_active(pod):
            continue
        unhealthy = [
            (resource.name, device)
            for container in pod.containers
            for resource in container.allocated_resources_status or ()
            for device in resource.resources or ()
            if device.health == plugin_objects.UNHEALTHY
        ]
        if unhealthy:
            names = wording.name_list(name for name, _ in unhealthy)
            yield PluginFinding(
                kind=Kind.UNHEALTHY,
                level=Level.WARN,
                name=unhealthy[0][0],
                node=pod.node_name,
                pod=pod.full_name,
                text=f"{pod.full_name} holds "
                f"{wording.counted(len(unhealthy), 'Unhealthy device')} of {names}",
                evidence=tuple(
                    f"{device.resource_id}: {device.message or device.health}"
                    for _, device in unhealthy[:5]
                ),
            )


def _expected(facts: Facts, node: NodeFacts, resource: str, plugin: PluginPod) -> tuple[str, ...]:
    """Return the evidence that a node should offer a resource; empty if there is none."""
    reasons = []
    holders = [pod for pod in _requesting(facts, node.name, resource) if pod.phase == "Running"]
    if holders:
        reasons.append(f"devices are held by {wording.name_list(pod.full_name for pod in holders)}")
    peers = facts.peers(node, plugin.plugin)
    if peers.offering(resource):
        reasons.append(_peer_evidence(peers, resource))
    waiting = [] if resource in facts.offered else _requesting(facts, "", resource)
    if waiting:
        names = wording.name_list(pod.full_name for pod in waiting)
        reasons.append(f"no node offers {resource}, which {names} requested")
    if resource.startswith("nvidia.com/"):
        labels = node.node.labels
        reasons += [
            f"{k}={labels[k]}"
            for k in plugin_facts.GPU_LABELS
            if labels.get(k, "0") not in {"0", "false"}
        ]
    return tuple(reasons)


def _reported_unhealthy(facts: Facts, node: NodeFacts, resource: str) -> tuple[str, ...]:
    """Return up to 5 texts about a node's pods that hold Unhealthy devices of a resource."""
    return tuple(
        f"{pod.full_name}: {device.resource_id} is Unhealthy"
        for pod in facts.pods_on.get(node.name, ())
        if plugin_facts.is_active(pod)
        for container in pod.containers
        for allocated in container.allocated_resources_status or ()
        if allocated.name == resource
        for device in allocated.resources or ()
        if device.health == plugin_objects.UNHEALTHY
    )[:5]


def _pod_evidence(plugin: PluginPod | None) -> tuple[str, ...]:
    if plugin is None or plugin.ready_s is None:
        return ()
    return (f"{plugin.pod.full_name}: Ready for {int(plugin.ready_s // 60)} minutes",)


def _requesting(facts: Facts, node: str, resource: str) -> list[Pod]:
    """Return a node's pods that request a resource; for an empty name, pods without a node."""
    pods = facts.pods_on.get(node, ())
    return [pod for pod in pods if plugin_facts.is_active(pod) and resource in pod.requested()]


def _peer_evidence(peers: Peers, resource: str) -> str:
    return (
        f"{peers.offering(resource)} of {peers.count} other {peers.node.type} nodes with this "
        f"plugin offer {resource}"
    )


def _started(state: objects.ContainerState) -> datetime | None:
    return objects.parse_time(state.running.started_at) if state.running else None


def _since(pod: Pod) -> datetime | None:
    """Return when the kubelet admitted or refused a pod, or else when the pod was created."""
    status = pod.status
    return objects.parse_time(status.start_time if status else None) or pod.metadata.created_at
