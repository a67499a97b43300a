"""A fleet with a plugin that muster watches but does not run."""

import dataclasses
from typing import Final

import msgspec

from muster import vocabulary
from muster.vocabulary import AlertState, Verdict, WatchedFinding
from muster_health.model import signals
from muster_health.plugin import watched_plugin
from tests.worlds.detector_fleet import World

FIRING, RESOLVED = AlertState.FIRING, AlertState.RESOLVED
AMD: Final = "amd.com/gpu"
NAME: Final = vocabulary.watched_plugin(AMD)
POD: Final = signals.Pod(
    name="kube-system/amdgpu-x", uid="u-1", phase="Running", ready=True, age_s=9_000.0
)
WELL: Final = vocabulary.Watched(name=AMD, socket="device-plugins/amd.sock", listed=4, expected=4)
DOWN: Final = msgspec.structs.replace(
    WELL, finding=WatchedFinding.NOT_SERVED, text="refused for 2 s", listed=0
)
SHOWN: Final = msgspec.structs.replace(DOWN, socket="", text="allocatable is 0 of 4")
"""What the Kubernetes API alone shows of it."""
LAGS: Final = "the node's allocatable is older than the agent's count"


def finds(finding: WatchedFinding) -> vocabulary.Watched:
    """Return an observation with this finding."""
    return msgspec.structs.replace(WELL, finding=finding)


def world_of(*nodes: str, **how: object) -> World:
    """Return a world in which the agent on each node watches a healthy plugin."""
    world = World(*nodes, **how)  # type: ignore[arg-type]  # keywords
    for node in nodes:
        world.plugins[node].others = (POD,)
        world.plugins[node].offers = {AMD: 4}
        world.offer_other(node, AMD, 4)
    world.run(5.0)
    for node in nodes:
        world.observe(node, WELL)
    world.run(5.0)
    assert [verdicts(world, node) for node in nodes] == [[Verdict.HEALTHY]] * len(nodes)
    return world


def published(world: World, node: str) -> list[vocabulary.VerdictChanged]:
    """Return the published verdicts on the plugin."""
    return [
        event
        for event in world.published.values()
        if isinstance(event, vocabulary.VerdictChanged)
        and (event.node, event.watched) == (node, AMD)
    ]


def verdicts(world: World, node: str) -> list[Verdict]:
    """Return the verdicts that were published, oldest first."""
    return [event.verdict for event in published(world, node)]


def tracked(world: World, node: str = "a") -> watched_plugin.WatchedPlugin:
    """Return the plugin as health tracks it."""
    (plugin,) = (
        plugin
        for plugin in world.services[0].detector.plugins()
        if isinstance(plugin, watched_plugin.WatchedPlugin) and plugin.node == node
    )
    return plugin


def replaced(pod: signals.Pod, **changes: object) -> signals.Pod:
    """Return a pod with other fields."""
    return dataclasses.replace(pod, **changes)  # type: ignore[arg-type]  # keywords


def show(world: World, watched: vocabulary.Watched, node: str = "a") -> None:
    """Let every health service read an observation from the Kubernetes API."""
    for service in world.services:
        service.feed(signals.ClusterObserved(node=node, watched=watched))


def alert_events(world: World) -> list[vocabulary.AlertChanged]:
    """Return all published changes of alerts."""
    return [e for e in world.published.values() if isinstance(e, vocabulary.AlertChanged)]
