"""Health's reader of plugins that muster does not run, against the API stand-in."""

import asyncio
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from muster import vocabulary
from muster.kubernetes import api as kubernetes_api
from muster.local import kubernetes
from muster.local.kubernetes import refusals
from muster_health.kubernetes import plugin_reader
from muster_health.model import signals
from tests.worlds import detector_fleet

GPU = "nvidia.com/gpu"
OLD = "2026-01-01T00:00:00Z"
READY = {"type": "Ready", "status": "True", "lastTransitionTime": OLD}
SPEC = {"nodeName": "a", "containers": [{"name": "c", "image": "nvidia/k8s-device-plugin:v1"}]}


async def put_cluster(url: str, usable: str) -> None:
    """Create a node, and on it the pod of a plugin."""
    patch = {"Content-Type": "application/merge-patch+json"}
    async with aiohttp.ClientSession(url, raise_for_status=True) as http:

        async def put(path: str, name: str, made: dict[str, Any]) -> None:
            await http.post(path, json={"metadata": {"name": name}, **made})
            status = {"status": made["status"]}
            await http.patch(f"{path}/{name}/status", json=status, headers=patch)

        counts = {"capacity": {GPU: "8"}, "allocatable": {GPU: usable}}
        await put("/api/v1/nodes", "a", {"status": {**counts, "conditions": [READY]}})
        running = {"phase": "Running", "conditions": [READY]}
        pods = "/api/v1/namespaces/default/pods"
        await put(pods, "plugin-a", {"spec": SPEC, "status": running})


async def observed(
    directory: Path, *, usable: str = "0", refused: str = "", leads: bool = True
) -> tuple[list[signals.ClusterObserved], dict[str, str]]:
    """Return the observations of two rounds, and what could not be read."""
    handed: list[signals.ClusterObserved] = []

    async def put(observed: signals.ClusterObserved) -> None:
        handed.append(observed)

    async with kubernetes.KubernetesApi() as server:
        await put_cluster(server.url, usable)
        if refused:
            server.refuse(refused, refusals.Reason.FORBIDDEN)
        file = directory / "kubeconfig"
        server.write_kubeconfig(file)
        async with await kubernetes_api.find(
            kubeconfig=str(file), context=None, attempts=1
        ) as client:
            reader = plugin_reader.PluginReader(client, put, is_leading=lambda: leads)
            await reader.read()
            await reader.read()
            return handed, reader.problems


async def rounds(
    directory: Path, **more: Any
) -> tuple[list[vocabulary.WatchedFinding], dict[str, str]]:
    """Return the findings of two rounds, and what could not be read."""
    handed, problems = await observed(directory, **more)
    return [each.watched.finding for each in handed], problems


def test_a_lost_plugin_is_handed_on_after_two_rounds(tmp_path: Path) -> None:
    assert asyncio.run(rounds(tmp_path)) == ([vocabulary.WatchedFinding.NOT_REGISTERED], {})


def test_an_alert_says_what_the_api_alone_shows(tmp_path: Path) -> None:
    (lost,), _ = asyncio.run(observed(tmp_path))
    (works,), _ = asyncio.run(observed(tmp_path, usable="8"))
    world = detector_fleet.World("a")
    world.run(5.0)
    (service,) = world.services
    for each in (works, lost):
        service.feed(each)
        world.run(60.0)
    assert world.alerts() == [("a", vocabulary.AlertKind.DEREGISTERED, "")]
    alert = next(e for e in world.published.values() if isinstance(e, vocabulary.AlertChanged))
    assert (alert.watched, alert.evidence[0].source) == (GPU, "kubernetes")
    assert alert.evidence[0].observed.startswith(f"{GPU}: offers no {GPU}: NVIDIA ")
    service.feed(works)
    world.run(60.0)
    assert world.alerts() == []


def test_a_plugin_that_works_is_handed_on_once(tmp_path: Path) -> None:
    assert asyncio.run(rounds(tmp_path, usable="8")) == ([vocabulary.WatchedFinding.NONE], {})


def test_a_replica_that_no_longer_leads_hands_nothing_on(tmp_path: Path) -> None:
    assert asyncio.run(rounds(tmp_path, leads=False)) == ([], {})


@pytest.mark.parametrize(
    ("path", "findings", "unread"),
    [
        ("/apis/apps/v1", [vocabulary.WatchedFinding.NOT_REGISTERED], ["/apis/apps/v1/daemonsets"]),
        ("/api/v1/pods", [], ["/api/v1/pods", "plugins"]),
    ],
)
def test_what_may_not_be_read_is_left_out_and_named(
    tmp_path: Path, path: str, findings: Any, unread: list[str]
) -> None:
    handed, problems = asyncio.run(rounds(tmp_path, refused=path))
    assert (handed, sorted(problems)) == (findings, unread)
