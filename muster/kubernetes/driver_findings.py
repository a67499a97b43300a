"""Pure: finds DRA drivers that do not work, from slices, claims, pods and events.

The D numbers refer to docs/check.md, which also lists the failures that the API does not show.
Sources: kubelet cm/dra, scheduler structured/internal pools, dynamic-resource-allocation (1.36).
"""

import enum
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Final

from muster import wording
from muster.kubernetes import plugin_facts
from muster.kubernetes.plugin_facts import (
    Facts,
    Kind,
    Level,
    NodeFacts,
    NodeState,
    PluginFinding,
    PluginPod,
)
from muster.kubernetes.plugin_objects import Pod, ResourceSlice

_SETTLES_S: Final = 60.0
"""How long a driver may take to publish, and a pool to become complete."""
_RECENT_S: Final = 600.0
_TERMINATES_S: Final = 120.0
_FAILED: Final = "FailedPrepareDynamicResources"
_UNREGISTERED: Final = re.compile(r"DRA driver (\S+) is not registered")
_CEL_DRIVER: Final = re.compile(r"""device\.driver\s*==\s*["']([^"']{1,63})["']""")
_CDI: Final = "unresolvable CDI devices"
_FORGETFUL: Final = "v1.34.0"

Place = tuple[str, str]
"""A key: a node and a driver, an instance type and a plugin, or a driver and a pool."""
Slices = Mapping[str, list[ResourceSlice]]
"""By node; slices for several nodes have the empty name as key."""


class Cause(enum.StrEnum):
    """Why a driver could not prepare a claim, according to the kubelet's message."""

    UNREGISTERED = "it is not registered with the kubelet"
    SLOW = "it does not answer within 45 s"
    UNSERVED = "nothing serves its socket"
    REFUSES = "it rejects the claims"


def evaluate(facts: Facts) -> Iterable[PluginFinding]:
    """Yield the findings about the DRA drivers of all nodes."""
    yield from _prepares(facts)
    yield from _driverless_claims(facts)
    yield from _pools(facts)
    yield from _terminating(facts)
    yield from _same_devices(facts)
    yield from _missing_files(facts)
    slices: dict[str, list[ResourceSlice]] = {}
    for entry in facts.view.slices or ():
        slices.setdefault(entry.spec.node_name, []).append(entry)
    publishing = _publishing(facts, slices)
    for node in facts.nodes.values():
        if node.is_settled:
            yield from _no_slice(facts, node, slices, publishing)
            yield from _offered_twice(facts, node, slices.get(node.name, []))
            yield from _forgetful_kubelet(node)


def cause(message: str) -> Cause:
    """Return the cause of a failed prepare, from the kubelet's message."""
    lowered = message.lower()
    if _UNREGISTERED.search(message):
        return Cause.UNREGISTERED
    if "deadlineexceeded" in lowered or "deadline exceeded" in lowered:
        return Cause.SLOW
    if "unavailable" in lowered or "connection refused" in lowered:
        return Cause.UNSERVED
    return Cause.REFUSES


def _prepares(facts: Facts) -> Iterable[PluginFinding]:
    """Yield a finding for each driver that cannot prepare claims (D2, D7, D8, D17)."""
    waiting = {pod.full_name: pod for pod in facts.pods if pod.phase == "Pending"}
    failed: dict[Place, dict[str, str]] = {}
    for event in facts.view.events:
        about = event.involved_object
        age_s = facts.age_s(event.last_at)
        if event.reason != _FAILED or about is None or age_s is None or age_s > _RECENT_S:
            continue
        pod = waiting.get(f"{about.namespace}/{about.name}")
        if pod is None or not pod.has_claims or not _can_be_judged(facts, pod.node_name):
            continue
        match, drivers = _UNREGISTERED.search(event.message), _drivers(facts, pod)
        if match and drivers and match[1] not in drivers:
            # anyone with the right to create events can forge them
            continue
        driver = match[1] if match else wording.name_list(drivers)
        failed.setdefault((pod.node_name, driver), {})[pod.full_name] = event.message
    for (node, driver), pods in failed.items():
        message = next(iter(pods.values()))
        yield PluginFinding(
            kind=Kind.PREPARE,
            level=Level.ERROR,
            name=driver,
            node=node,
            pod=_driver_pod(facts, node, driver) or next(iter(pods)),
            text=f"{driver or 'a driver'} cannot prepare the claims of "
            f"{wording.counted(len(pods), 'pod')}: {cause(message)}",
            evidence=(message, wording.name_list(pods)),
        )


def _driverless_claims(facts: Facts) -> Iterable[PluginFinding]:
    """Yield a finding for each driver with no Ready pod on a node where its claims are used (D2).

    A driver is skipped if its pods are unknown, have just become unready, or are being updated.
    """
    used: dict[Place, set[str]] = {}
    for pod in facts.pods:
        if plugin_facts.is_active(pod):
            for driver in _drivers(facts, pod):
                used.setdefault((pod.node_name, driver), set()).add(pod.full_name)
    known_pods: dict[str, list[PluginPod]] = {}
    for (name, driver), pods in sorted(used.items()):
        if driver not in known_pods:
            known_pods[driver] = [each for each in facts.plugins if each.plugin.serves(driver)]
        known = known_pods[driver]
        plugins = facts.nodes[name].plugins if name in facts.nodes else ()
        here = [each for each in plugins if each.plugin.serves(driver)]
        is_young = any((each.unready_s or 0.0) < _SETTLES_S for each in here)
        is_ready = any(each.ready_s is not None for each in here)
        is_updated = not here and any(each.is_rolling for each in known)
        is_blind = facts.view.daemon_sets is None and not here
        if is_ready or is_young or is_updated or is_blind:
            continue
        if not known or not _can_be_judged(facts, name):
            continue
        yield PluginFinding(
            kind=Kind.NO_DRIVER,
            level=Level.ERROR,
            name=driver,
            node=name,
            pod=here[0].pod.full_name if here else "",
            text=f"{driver} has no Ready pod here, but its claims are used by "
            f"{wording.counted(len(pods), 'pod')}: pods with its claims can neither restart nor "
            "terminate",
            evidence=(wording.name_list(pods),),
        )


def _publishing(facts: Facts, slices: Slices) -> Counter[Place]:
    """Return the number of nodes with published slices, by instance type and plugin."""
    return Counter(
        (node.type, name)
        for node in facts.nodes.values()
        for name in {
            each.plugin.name
            for each in node.plugins
            if any(each.plugin.serves(entry.spec.driver) for entry in slices.get(node.name, ()))
        }
    )


def _no_slice(
    facts: Facts, node: NodeFacts, slices: Slices, publishing: Counter[Place]
) -> Iterable[PluginFinding]:
    """Yield a finding for each driver that runs but has published nothing for its node (D3)."""
    if facts.view.slices is None:
        return
    for each in node.plugins:
        here = (*slices.get(node.name, ()), *slices.get("", ()))
        has_any = any(each.plugin.serves(entry.spec.driver) for entry in here)
        if not each.plugin.drivers or has_any or not each.is_serving(_SETTLES_S):
            continue
        users = [
            pod.full_name
            for pod in facts.pods_on.get(node.name, ())
            if any(map(each.plugin.serves, facts.drivers_of.get(pod.metadata.uid, ())))
        ]
        peers = facts.peers(node, each.plugin).count
        agree = min(peers, publishing[node.type, each.plugin.name])
        is_expected = bool(users) or 0 < peers == agree
        ready_min = int((each.ready_s or 0) // 60)
        yield PluginFinding(
            kind=Kind.NO_SLICE,
            level=Level.ERROR if is_expected else Level.WARN,
            name=wording.name_list(each.plugin.drivers),
            node=node.name,
            pod=each.pod.full_name,
            text=f"{each.plugin.name} runs and is Ready, but has published no ResourceSlice for "
            "this node" + ("" if is_expected else "; it may have no devices here"),
            evidence=(
                f"{each.pod.full_name}: Ready for {wording.counted(ready_min, 'minute')}",
                *([f"{agree} of {peers} other {node.type} nodes have one"] if peers else []),
                *([f"pods here use its claims: {wording.name_list(users)}"] if users else []),
            ),
        )


def _pools(facts: Facts) -> Iterable[PluginFinding]:
    """Yield a finding for each incomplete or invalid pool, which the scheduler skips (D5)."""
    for (driver, pool), newest in _newest(facts).items():
        ages = [facts.age_s(entry.metadata.changed_at) for entry in newest]
        nodes = {entry.spec.node_name for entry in newest}
        wanted = newest[0].spec.pool.resource_slice_count
        is_young = any(age_s is None or age_s < _SETTLES_S for age_s in ages)
        if not wanted or is_young or len(nodes) > 1 or not _can_be_judged(facts, *nodes):
            continue
        names = Counter(device.name for entry in newest for device in entry.spec.devices or ())
        doubled = sorted(name for name, count in names.items() if count > 1)
        if len(newest) != wanted:
            problem = f"{len(newest)} of {wanted} slices of its newest generation exist"
        elif doubled:
            problem = f"device {doubled[0]} is in it twice"
        else:
            continue
        node = next(iter(nodes))
        yield PluginFinding(
            kind=Kind.POOL,
            level=Level.ERROR,
            name=driver,
            node=node,
            pod=_driver_pod(facts, node, driver),
            text=f"the scheduler skips all devices of pool {pool} of {driver}: {problem}",
            evidence=(
                f"generation {newest[0].spec.pool.generation}: "
                + wording.name_list(entry.metadata.name for entry in newest),
            ),
        )


def _terminating(facts: Facts) -> Iterable[PluginFinding]:
    """Yield a finding for each pod with claims whose termination seems to hang (D10)."""
    for pod in facts.pods:
        late_s = facts.age_s(pod.metadata.deleted_at)
        node = facts.nodes.get(pod.node_name)
        if late_s is None or late_s <= _TERMINATES_S or pod.metadata.finalizers or node is None:
            continue
        is_running = any(each.state and each.state.running for each in pod.containers)
        is_certain = node.state in {NodeState.SETTLED, NodeState.LEAVING}
        if is_running or not pod.has_claims or not is_certain:
            continue
        drivers = _drivers(facts, pod)
        served = all(node.serving(driver, _SETTLES_S) for driver in drivers)
        names = wording.name_list(drivers) or "its driver"
        yield PluginFinding(
            kind=Kind.TERMINATING,
            level=Level.WARN if served else Level.ERROR,
            name=names,
            node=pod.node_name,
            pod=pod.full_name,
            text=f"has been Terminating for {int(late_s // 60)} minutes without a running "
            f"container: the kubelet may wait until {names} has released its claims",
            evidence=() if served else (f"no Ready pod of {names} is known on {node.name}",),
        )


def _offered_twice(
    facts: Facts, node: NodeFacts, slices: list[ResourceSlice]
) -> Iterable[PluginFinding]:
    """Yield a finding for each resource whose devices are also offered through DRA (D12)."""
    drivers = {entry.spec.driver for entry in slices if entry.spec.devices}
    if not drivers:
        return
    held = _held(facts, node)
    uuids = {uuid for entry in slices for uuid in entry.uuids}
    for resource, offer in node.offers.items():
        if not offer.allocatable:
            continue
        named = drivers & _class_drivers(facts, resource)
        same = sorted(held.get(resource, set()) & uuids)
        alike = drivers & {f"gpu.{resource.partition('/')[0]}", resource.partition("/")[0]}
        if not (named or same or alike):
            continue
        driver = min(named or alike or drivers)
        yield PluginFinding(
            kind=Kind.OFFERED_TWICE,
            level=Level.ERROR if named or same else Level.WARN,
            name=resource,
            node=node.name,
            text=f"offers {resource} through a device plugin and the devices of {driver} through "
            "DRA: the scheduler treats them as different devices, and may allocate one to two pods",
            evidence=(
                f"{resource}: {offer.allocatable} allocatable",
                *(f"{uuid} is offered by both" for uuid in same[:5]),
                *([f"a DeviceClass of {driver} also offers {resource}"] if named else []),
            ),
        )


def _same_devices(facts: Facts) -> Iterable[PluginFinding]:
    """Yield a finding for each pool that has devices of the same name on several nodes (D13)."""
    for (driver, pool), newest in _newest(facts).items():
        nodes: dict[str, set[str]] = {}
        for entry in newest:
            for device in entry.spec.devices or () if entry.spec.node_name else ():
                nodes.setdefault(device.name, set()).add(entry.spec.node_name)
        shared = {name: where for name, where in nodes.items() if len(where) > 1}
        if shared:
            name, where = min(shared.items())
            yield PluginFinding(
                kind=Kind.SAME_DEVICE,
                level=Level.ERROR,
                name=driver,
                text=f"pool {pool} of {driver} is on {len(where)} nodes: the scheduler treats "
                f"all their devices named {name} as one, so only one pod can get it",
                evidence=(
                    wording.name_list(where),
                    f"{wording.counted(len(shared), 'device')} in all",
                ),
            )


def _missing_files(facts: Facts) -> Iterable[PluginFinding]:
    """Yield a finding for each pod that needs missing CDI files, as after a reboot (D1)."""
    for pod in facts.pods:
        states = [each.state for each in pod.containers if each.state]
        texts = [state.waiting.message for state in states if state.waiting]
        broken = [text for text in texts if _CDI in text]
        if broken and plugin_facts.is_active(pod):
            yield PluginFinding(
                kind=Kind.CDI,
                level=Level.ERROR,
                name=wording.name_list(_drivers(facts, pod)),
                node=pod.node_name,
                pod=pod.full_name,
                text="cannot start: the CDI files of its devices are missing on the node, as "
                "after a reboot; its driver or plugin must write them again",
                evidence=(broken[0],),
            )


def _forgetful_kubelet(node: NodeFacts) -> Iterable[PluginFinding]:
    """Yield a finding if the node's kubelet loses DRA drivers after 30 idle minutes (D11)."""
    info = node.node.status.node_info if node.node.status else None
    drivers = [each for each in node.plugins if each.plugin.drivers]
    version = "" if info is None else info.kubelet_version.partition("+")[0]
    if drivers and info is not None and version == _FORGETFUL:
        yield PluginFinding(
            kind=Kind.KUBELET,
            level=Level.WARN,
            name=wording.name_list(each.plugin.name for each in drivers),
            node=node.name,
            text="kubelet 1.34.0 loses a DRA driver that it has not called for 30 minutes: upgrade "
            "the kubelet (kubernetes/kubernetes#133920)",
            evidence=(info.kubelet_version,),
        )


def _newest(facts: Facts) -> dict[Place, list[ResourceSlice]]:
    """Return the slices of the newest generation of each pool, by driver and pool."""
    pools: dict[Place, list[ResourceSlice]] = {}
    for entry in facts.view.slices or ():
        if entry.spec.pool.name:
            pools.setdefault((entry.spec.driver, entry.spec.pool.name), []).append(entry)
    newest = {}
    for place, slices in sorted(pools.items()):
        generation = max(entry.spec.pool.generation for entry in slices)
        newest[place] = [e for e in slices if e.spec.pool.generation == generation]
    return newest


def _drivers(facts: Facts, pod: Pod) -> set[str]:
    """Return the drivers of a pod's allocated claims."""
    return facts.drivers_of.get(pod.metadata.uid, set())


def _driver_pod(facts: Facts, node: str, driver: str) -> str:
    """Return the full name of the driver's pod on a node; empty if it is unknown."""
    here = facts.nodes[node].plugins if node in facts.nodes else ()
    return next((each.pod.full_name for each in here if each.plugin.serves(driver)), "")


def _can_be_judged(facts: Facts, *nodes: str) -> bool:
    """Return whether all of these nodes are Ready, and neither new nor about to be removed."""
    return all(name in facts.nodes and facts.nodes[name].is_settled for name in nodes if name)


def _class_drivers(facts: Facts, resource: str) -> frozenset[str]:
    """Return the drivers of the DeviceClasses that offer an extended resource."""
    return frozenset(
        driver
        for entry in facts.view.classes
        if entry.spec.extended_resource_name == resource
        for selector in entry.spec.selectors or ()
        for driver in _CEL_DRIVER.findall(selector.cel.expression)
    )


def _held(facts: Facts, node: NodeFacts) -> dict[str, set[str]]:
    """Return the ids of the devices that are allocated to a node's active pods, by resource."""
    held: dict[str, set[str]] = {}
    for pod in facts.pods_on.get(node.name, ()):
        if plugin_facts.is_active(pod):
            for container in pod.containers:
                for entry in container.allocated_resources_status or ():
                    ids = {device.resource_id for device in entry.resources or ()}
                    held.setdefault(entry.name, set()).update(ids)
    return held
