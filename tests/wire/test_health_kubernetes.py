"""Health's cluster adapter against the stand-in for the Kubernetes API."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import aiohttp
import orjson
import pytest
from aiohttp import web

from muster.kubernetes import api as kubernetes_api
from muster.local import kubernetes, nats
from muster.local.kubernetes import refusals
from muster_health.bus import self_monitoring
from muster_health.kubernetes import cluster_facts, queries, watches
from muster_health.model import config, signals

GPU = "nvidia.com/gpu"
SETTINGS = config.Cluster(plugins=(config.Plugin(namespace="kube-system", daemonset="d"),))
LOCAL = config.Plugin(plugin="local", nodes={"no-node": "has-this"})
QUERY = signals.AskCluster(node="a", plugin="device-plugin", number=7, timeout_s=2.0)
PODS = "/api/v1/namespaces/kube-system/pods"

KUBECONFIG = """
apiVersion: v1
kind: Config
current-context: c
contexts: [{{name: c, context: {{cluster: c, user: c}}}}]
clusters: [{{name: c, cluster: {{server: "http://127.0.0.1:{port}"}}}}]
users: [{{name: c, user: {{}}}}]
"""


class World:
    """A cluster as its administrator and as the health service see it."""

    def __init__(
        self,
        api: kubernetes.KubernetesApi,
        http: aiohttp.ClientSession,
        client: kubernetes_api.Api,
        watcher: watches.ClusterWatcher,
        results: asyncio.Queue[watches.ClusterEvent],
    ) -> None:
        self.api = api
        self.http = http
        self.client = client
        self.watcher = watcher
        self.results = results
        self.namespaces: set[str] = set()

    async def do(self, method: str, path: str, body: object = None, **query: str) -> Any:
        data = orjson.dumps(body) if body is not None else None
        kind = "application/merge-patch+json" if method == "PATCH" else "application/json"
        headers = {"Content-Type": kind}
        async with self.http.request(
            method, path, data=data, headers=headers, params=query
        ) as response:
            tree = orjson.loads(await response.read())
            assert response.status < 300, tree
            return tree

    async def node(self, name: str, gpus: str = "2", **labels: str) -> None:
        await self.do("POST", "/api/v1/nodes", {"metadata": {"name": name, "labels": labels}})
        await self.offer(name, gpus)

    async def offer(self, name: str, gpus: str) -> None:
        status = {
            "capacity": {"cpu": "4", GPU: gpus},
            "allocatable": {"cpu": "4", GPU: gpus},
            "conditions": [{"type": "Ready", "status": "True"}],
        }
        await self.do("PATCH", f"/api/v1/nodes/{name}/status", {"status": status})

    async def daemonset(self, generation: str = "1", **spec: object) -> None:
        annotations = {"deprecated.daemonset.template.generation": generation}
        await self.do(
            "POST",
            "/apis/apps/v1/namespaces/kube-system/daemonsets",
            {
                "metadata": {"name": "d", "annotations": annotations},
                "spec": {
                    "selector": {"matchLabels": {"app": "p"}},
                    "template": {"metadata": {"labels": {"app": "p"}}, "spec": spec},
                },
            },
        )

    async def pod(self, name: str, on: str) -> str:
        labels = {"app": "p", cluster_facts.REVISION: "r1", cluster_facts.TEMPLATE_GENERATION: "1"}
        made = await self.do(
            "POST",
            PODS,
            {
                "metadata": {"name": name, "labels": labels},
                "spec": {"nodeName": on, "containers": [{"name": "p", "image": "p"}]},
            },
        )
        status = {
            "phase": "Running",
            "conditions": [{"type": "Ready", "status": "True"}],
            "containerStatuses": [{"name": "p", "restartCount": 3}],
        }
        await self.do("PATCH", f"{PODS}/{name}/status", {"status": status})
        uid: str = made["metadata"]["uid"]
        return uid

    async def user(
        self,
        namespace: str,
        name: str,
        *,
        on: str,
        containers: list[dict[str, Any]],
        init: list[dict[str, Any]] | None = None,
    ) -> None:
        path = f"/api/v1/namespaces/{namespace}/pods"
        if namespace not in self.namespaces:
            self.namespaces.add(namespace)
            await self.do("POST", "/api/v1/namespaces", {"metadata": {"name": namespace}})
        spec = {
            "nodeName": on,
            "containers": [{"name": "c", "image": "c", **container} for container in containers],
            "initContainers": [
                {"name": "i", "image": "i", **container} for container in init or ()
            ],
        }
        await self.do("POST", path, {"metadata": {"name": name}, "spec": spec})

    async def lease(self, name: str, renewed: datetime) -> None:
        path = "/apis/coordination.k8s.io/v1/namespaces/kube-node-lease/leases"
        spec = {"holderIdentity": name, "renewTime": renewed.strftime("%Y-%m-%dT%H:%M:%S.000000Z")}
        await self.do("POST", path, {"metadata": {"name": name}, "spec": spec})

    async def expected(self) -> dict[str, signals.Expected]:
        while True:
            result = await self.results.get()
            if isinstance(result, signals.ExpectedNodes):
                return dict(result.nodes)

    async def offered(self, node: str) -> int | None:
        while True:
            result = await self.results.get()
            if isinstance(result, signals.NodeOffers) and result.node == node:
                return result.offers[GPU].allocatable if result.offers else None

    async def answer(self, query: signals.AskCluster = QUERY) -> signals.Facts | None:
        self.watcher.queries.start(query)
        while True:
            result = await self.results.get()
            if isinstance(result, signals.ClusterAnswered):
                assert result.number == query.number
                return result.facts


def holding(resource: str) -> dict[str, Any]:
    return {"resources": {"limits": {resource: "1"}, "requests": {resource: "1"}}}


Story = Callable[[World], Awaitable[None]]


@contextlib.asynccontextmanager
async def world(directory: Path, *, running: bool) -> AsyncIterator[World]:
    async with kubernetes.KubernetesApi(bookmark_period_s=0.2) as api:
        file = directory / "kubeconfig"
        api.write_kubeconfig(file)
        client = await kubernetes_api.find(kubeconfig=str(file), context=None)
        async with aiohttp.ClientSession(api.url) as http, client:
            results: asyncio.Queue[watches.ClusterEvent] = asyncio.Queue()
            watcher = watches.ClusterWatcher(client, SETTINGS, results.put)
            task = asyncio.create_task(watcher.run()) if running else None
            try:
                yield World(api, http, client, watcher, results)
            finally:
                if task is not None:
                    task.cancel()
                    await asyncio.gather(task, return_exceptions=True)
                await watcher.queries.close()


def play(tmp_path: Path, story: Story, *, running: bool = True) -> None:
    async def played() -> None:
        async with asyncio.timeout(100), world(tmp_path, running=running) as cluster:
            await story(cluster)

    asyncio.run(played())


def test_nodes_that_a_daemonset_selects_are_reported_and_followed(tmp_path: Path) -> None:
    async def story(world: World) -> None:
        await world.daemonset(nodeSelector={"gpu": "yes"})
        await world.node("a", gpu="yes", **{"topology.kubernetes.io/zone": "z1"})
        await world.node("b")
        expected = await world.expected()
        while "a" not in expected:
            expected = await world.expected()
        assert expected.keys() == {"a"}
        assert expected["a"].causes == ("zone=z1",)
        assert 0 <= expected["a"].age_s < 30
        await world.pod("p1", "a")
        assert (await world.expected())["a"].revision == "r1"
        await world.do("PATCH", "/api/v1/nodes/b", {"metadata": {"labels": {"gpu": "yes"}}})
        assert (await world.expected()).keys() == {"a", "b"}
        await world.do("DELETE", "/api/v1/nodes/a")
        assert (await world.expected()).keys() == {"b"}
        assert world.watcher.problems == {}

    play(tmp_path, story)


def test_what_a_node_offers_is_followed_across_lost_watches_and_lost_history(
    tmp_path: Path,
) -> None:
    async def story(world: World) -> None:
        await world.daemonset()
        await world.node("a", gpus="5k")
        while await world.offered("a") != 5000:
            pass
        world.api.compact()
        await world.offer("a", "3")
        assert await world.offered("a") == 3
        world.api.refuse("/api/v1/nodes", refusals.Reason.UNAVAILABLE)
        while "nodes" not in world.watcher.problems:
            await asyncio.sleep(0.01)
        world.api.allow("/api/v1/nodes")
        await world.offer("a", "1")
        assert await world.offered("a") == 1
        await world.do("DELETE", "/api/v1/nodes/a")
        assert await world.offered("a") is None
        assert world.watcher.problems == {}

    play(tmp_path, story)


def test_a_query_is_answered_with_node_lease_and_pods(tmp_path: Path) -> None:
    async def story(world: World) -> None:
        await world.daemonset()
        await world.node("a")
        uid = await world.pod("p1", "a")
        await world.pod("p2", "b")
        # the node's clock is an hour behind, and is not used
        await world.lease("a", datetime.now(UTC) - timedelta(hours=1))
        await world.expected()
        while not (answer := await world.answer()) or not answer.pods:
            await asyncio.sleep(0.05)
        assert answer.lease_age_s is not None
        assert answer.lease_age_s < 20
        assert answer == signals.Facts(
            exists=True,
            ready=True,
            lease_age_s=answer.lease_age_s,
            pods=(
                signals.Pod(
                    name="kube-system/p1",
                    uid=uid,
                    phase="Running",
                    ready=True,
                    restarts=3,
                    revision="r1",
                    current="r1",
                ),
            ),
            offers={GPU: signals.Offer(capacity=2, allocatable=2)},
        )

    play(tmp_path, story)


def test_pods_of_a_plugin_without_a_daemonset_in_the_settings_are_no_problem(
    tmp_path: Path,
) -> None:
    async def story(world: World) -> None:
        settings = config.Cluster(plugins=(LOCAL,))
        results: asyncio.Queue[watches.ClusterEvent] = asyncio.Queue()
        watcher = watches.ClusterWatcher(world.client, settings, results.put)
        local = World(world.api, world.http, world.client, watcher, results)
        # on a laptop there is no DaemonSet, so the settings name none
        answer = await local.answer(replace(QUERY, plugin="local"))
        assert answer == signals.Facts(exists=False)
        other = await local.answer(QUERY)
        problem = "pods of device-plugin: the plugin is not in the settings (cluster.plugins)"
        assert other == signals.Facts(exists=False, problem=problem)
        await watcher.queries.close()

    play(tmp_path, story, running=False)


def test_a_node_that_is_gone_is_distinguished_from_one_that_cannot_be_read(tmp_path: Path) -> None:
    async def story(world: World) -> None:
        answer = await world.answer()
        assert answer is not None
        assert answer.exists is False
        assert (
            answer.problem
            == "pods of device-plugin: daemonset kube-system/d is missing or not read yet"
        )
        world.api.refuse("/api/v1/nodes", refusals.Reason.FORBIDDEN)
        for _ in range(2):
            answer = await world.answer()
            assert answer is not None
            assert answer.exists is None
            assert answer.problem.startswith("get /api/v1/nodes/a: HTTP 403 GET /api/v1/nodes/a")
        assert list(world.watcher.problems) == ["get nodes"]
        world.api.allow("/api/v1/nodes")
        await world.answer()
        assert world.watcher.problems == {}

    play(tmp_path, story, running=False)


def test_pods_of_all_namespaces_that_hold_a_nodes_devices_are_listed_on_request(
    tmp_path: Path,
) -> None:
    query = replace(QUERY, resources=(GPU,))

    async def story(world: World) -> None:
        await world.node("a")
        await world.user("ml", "train", on="a", containers=[holding(GPU)])
        await world.user("ml", "other", on="b", containers=[holding(GPU)])
        await world.user("web", "idle", on="a", containers=[holding("cpu")])
        await world.user("web", "sidecar", on="a", init=[holding(GPU)], containers=[{}])
        await world.user("web", "ended", on="a", containers=[holding(GPU)])
        path = "/api/v1/namespaces/web/pods/ended/status"
        await world.do("PATCH", path, {"status": {"phase": "Succeeded"}})
        assert await world.answer(query) == signals.Facts(holders=("ml/train", "web/sidecar"))
        assert (await world.answer() or signals.Facts()).holders is None

    play(tmp_path, story, running=False)


def test_a_query_about_a_watched_plugin_lists_its_pods_among_all_of_the_node(
    tmp_path: Path,
) -> None:
    queries = [
        replace(QUERY, plugin="watched-x", watched=name, number=number)
        for number, name in enumerate(("nvidia.com/gpu", "amd.com/gpu", "own.example/x"))
    ]

    async def story(world: World) -> None:
        await world.node("a")
        nvidia = {"image": "nvcr.io/nvidia/k8s-device-plugin:v0.17.1"}
        await world.user("gpu-operator", "nvidia-x", on="a", containers=[nvidia])
        await world.user("gpu-operator", "nvidia-y", on="b", containers=[nvidia])
        await world.user("web", "shop", on="a", containers=[holding(GPU)])
        for query in queries:
            world.watcher.queries.start(query)
        by_number: dict[int, signals.Facts] = {}
        while len(by_number) < len(queries):
            answer = await world.results.get()
            assert isinstance(answer, signals.ClusterAnswered)
            by_number[answer.number] = answer.facts or signals.Facts()
        (pod,) = by_number[0].pods or ()
        assert (pod.name, by_number[0].exists) == ("gpu-operator/nvidia-x", True)
        assert pod.age_s is not None
        assert pod.age_s < 20
        # AMD's plugin is known, and no pod on this node may serve its resource
        assert by_number[1].pods == ()
        assert by_number[2].pods is None
        assert (by_number[0].offers or {})[GPU].allocatable == 2

    play(tmp_path, story, running=False)


def test_without_the_permission_to_list_pods_the_rest_about_a_watched_plugin_is_answered(
    tmp_path: Path,
) -> None:
    query = replace(QUERY, plugin="watched-x", watched="nvidia.com/gpu")

    async def story(world: World) -> None:
        await world.node("a")
        world.api.refuse("/api/v1/pods", refusals.Reason.FORBIDDEN)
        answer = await world.answer(query)
        assert answer is not None
        assert (answer.exists, answer.pods) == (True, None)
        assert "get /api/v1/pods: HTTP 403" in answer.problem
        assert list(world.watcher.problems) == ["list pods of all namespaces"]

    play(tmp_path, story, running=False)


def test_a_missing_permission_to_list_pods_is_reported_once(tmp_path: Path) -> None:
    query = replace(QUERY, resources=(GPU,))

    async def story(world: World) -> None:
        await world.node("a")
        await world.user("ml", "train", on="a", containers=[holding(GPU)])
        world.api.refuse("/api/v1/pods", refusals.Reason.FORBIDDEN)
        for _ in range(2):
            answer = await world.answer(query)
            assert answer is not None
            assert answer == signals.Facts(problem=answer.problem)
            assert answer.problem.startswith("get /api/v1/pods: HTTP 403")
        assert list(world.watcher.problems) == ["list pods of all namespaces"]
        world.api.allow("/api/v1/pods")
        answer = await world.answer(query)
        assert answer is not None
        assert answer.holders == ("ml/train",)
        assert world.watcher.problems == {}

    play(tmp_path, story, running=False)


def test_lists_of_pods_that_never_arrive_delay_nothing_else(tmp_path: Path) -> None:
    async def story(world: World) -> None:
        await world.node("a")
        world.api.refuse("/api/v1/pods", refusals.Reason.UNAVAILABLE)
        for number in range(10):
            query = replace(QUERY, number=number, timeout_s=0.5, resources=(GPU,))
            world.watcher.queries.start(query)
        world.watcher.queries.start(replace(QUERY, number=10))
        first, *later = [await world.results.get() for _ in range(11)]
        assert isinstance(first, signals.ClusterAnswered)
        assert first.number == 10
        assert first.facts is not None
        assert first.facts.exists is True
        assert {
            result.facts for result in later if isinstance(result, signals.ClusterAnswered)
        } == {None}

    play(tmp_path, story, running=False)


def test_an_unreachable_api_is_answered_in_time_with_no_facts(tmp_path: Path) -> None:
    async def story() -> None:
        api = kubernetes.KubernetesApi()
        api.url = f"http://127.0.0.1:{nats.free_port()}"
        file = tmp_path / "kubeconfig"
        api.write_kubeconfig(file)
        results: asyncio.Queue[watches.ClusterEvent] = asyncio.Queue()
        async with (
            asyncio.timeout(30),
            await kubernetes_api.find(kubeconfig=str(file), context=None) as client,
        ):
            watcher = watches.ClusterWatcher(client, SETTINGS, results.put)
            query = signals.AskCluster(node="a", plugin="device-plugin", number=1, timeout_s=0.3)
            began = asyncio.get_running_loop().time()
            watcher.queries.start(query)
            assert await results.get() == signals.ClusterAnswered(
                node="a", plugin="device-plugin", number=1, facts=None
            )
            assert asyncio.get_running_loop().time() - began < 10
            await watcher.queries.close()

    asyncio.run(story())


@contextlib.asynccontextmanager
async def served(
    directory: Path, answer: Callable[[str], Awaitable[tuple[int, bytes]]]
) -> AsyncIterator[tuple[queries.ClusterQueries, asyncio.Queue[watches.ClusterEvent]]]:
    """Run a server that answers by `answer`; yield queries to it and the queue of their results."""

    async def serve(request: web.Request) -> web.Response:
        status, body = await answer(request.path)
        return web.Response(status=status, body=body)

    app = web.Application()
    app.router.add_get("/{path:.*}", serve)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = runner.addresses[0][1]
    file = directory / "config"
    file.write_text(KUBECONFIG.format(port=port))
    results: asyncio.Queue[watches.ClusterEvent] = asyncio.Queue()
    async with (
        asyncio.timeout(30),
        await kubernetes_api.find(kubeconfig=str(file), context=None) as client,
    ):
        watcher = watches.ClusterWatcher(client, SETTINGS, results.put)
        yield watcher.queries, results
        await watcher.queries.close()
    await runner.cleanup()


def test_a_404_from_something_else_than_the_api_says_nothing_about_a_node(tmp_path: Path) -> None:
    async def story() -> None:
        async def answer(_: str) -> tuple[int, bytes]:
            return 404, b"404 page not found\n"

        async with served(tmp_path, answer) as (cluster, results):
            cluster.start(QUERY)
            answered = await results.get()
        assert isinstance(answered, signals.ClusterAnswered)
        assert answered.facts is not None
        assert answered.facts.exists is None
        assert "get /api/v1/nodes/a: HTTP 404 404 page not found" in answered.facts.problem

    asyncio.run(story())


@pytest.mark.parametrize("where", ["/nodes/", "/leases/", "/api/v1/pods"])
@pytest.mark.parametrize("body", [b"[" * 100_000, b'{"x":' + b"[" * 100_000, b"\xff", b""])
def test_an_unreadable_answer_is_answered_too(tmp_path: Path, where: str, body: bytes) -> None:
    async def story() -> None:
        async def answer(path: str) -> tuple[int, bytes]:
            return 200, body if where in path else b"{}"

        async with served(tmp_path, answer) as (cluster, results):
            for number, resources in enumerate([(), (GPU,)]):
                cluster.start(replace(QUERY, number=number, resources=resources))
            answers = [await results.get(), await results.get()]
            by_number = {
                answer.number: answer.facts
                for answer in answers
                if isinstance(answer, signals.ClusterAnswered)
            }
            assert results.empty()
        is_about_pods = where == "/api/v1/pods"
        assert by_number[0] is not None
        assert by_number[0].exists is True
        assert by_number[1] == (None if is_about_pods else signals.Facts(holders=()))

    asyncio.run(story())


def test_lists_of_pods_wait_for_their_turn_and_not_for_other_queries(tmp_path: Path) -> None:
    async def story() -> None:
        running, most = 0, 0

        async def answer(path: str) -> tuple[int, bytes]:
            nonlocal running, most
            if not path.startswith("/api/v1/pods"):
                await asyncio.Event().wait()
            running += 1
            most = max(most, running)
            await asyncio.sleep(0.3)  # together longer than the limit of each
            running -= 1
            return 200, b"{}"

        async with served(tmp_path, answer) as (cluster, results):
            cluster.start(replace(QUERY, timeout_s=2.0))
            for number in range(32):
                cluster.start(replace(QUERY, number=number, timeout_s=2.0, resources=(GPU,)))
            answers = [await results.get() for _ in range(33)]
        assert most == 4
        pairs = [
            (answer.resources, answer.facts)
            for answer in answers
            if isinstance(answer, signals.ClusterAnswered)
        ]
        assert pairs.count(((), None)) == 1
        assert pairs.count(((GPU,), signals.Facts(holders=()))) == 32

    asyncio.run(story())


def test_settings_that_lead_to_no_cluster_name_what_was_tried(tmp_path: Path) -> None:
    async def story() -> None:
        with pytest.raises(kubernetes_api.NoCluster, match="the cluster this runs in"):
            await kubernetes_api.find(kubeconfig=None, context=None)
        with pytest.raises(kubernetes_api.NoCluster, match="No such file"):
            await kubernetes_api.find(kubeconfig=str(tmp_path / "none"), context=None)

    asyncio.run(story())


def test_the_pod_that_is_deleted_is_the_one_that_was_meant(tmp_path: Path) -> None:
    async def story(world: World) -> None:
        uid = await world.pod("p1", "a")

        def remediate(uid: str, *, dry_run: bool = False, is_leader: Callable[[], bool]) -> None:
            meant = signals.Remediate(
                node="a", plugin="p", pod="kube-system/p1", uid=uid, reason="stuck"
            )
            world.watcher.queries.remediate(meant, dry_run=dry_run, is_leader=is_leader)

        async def remediated(uid: str, *, dry_run: bool = False) -> str:
            remediate(uid, dry_run=dry_run, is_leader=lambda: True)
            result = await world.results.get()
            assert isinstance(result, signals.Remediated)
            return result.error

        assert "HTTP 409" in await remediated("another")
        assert await remediated(uid, dry_run=True) == ""
        assert (await world.do("GET", f"{PODS}/p1"))["metadata"]["uid"] == uid
        asked = asyncio.Event()

        def no_longer() -> bool:
            asked.set()
            return False

        remediate(uid, is_leader=no_longer)
        await asked.wait()
        # a result of the first one would come before
        assert "HTTP 409" in await remediated("another")
        assert (await world.do("GET", f"{PODS}/p1"))["metadata"]["uid"] == uid
        assert await remediated(uid) == ""
        assert (await world.do("GET", PODS))["items"] == []
        assert await remediated(uid) == ""

    play(tmp_path, story, running=False)


def test_an_alarm_becomes_an_event_on_our_pod(tmp_path: Path) -> None:
    async def story(world: World) -> None:
        async def post(path: str, body: object) -> str:
            return await world.client.post(path, body, timeout_s=2)

        settings = config.OutOfBandAlarm(namespace="kube-system", pod="health-0")
        alarms = self_monitoring.AlarmSender(settings, name="health-0", post=post)
        running = asyncio.create_task(alarms.run())
        await alarms.send(signals.Alarm(firing=True, summary="disconnected for 10 s", seconds=10))
        path = "/api/v1/namespaces/kube-system/events"
        while not (items := (await world.do("GET", path))["items"]):
            await asyncio.sleep(0.01)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        (event,) = items
        assert event["involvedObject"]["name"] == "health-0"
        assert (event["type"], event["reason"]) == ("Warning", "HealthImpaired")
        assert event["message"] == "disconnected for 10 s"

    play(tmp_path, story, running=False)


def test_an_api_that_hangs_is_noticed_long_before_its_watches_end(tmp_path: Path) -> None:
    async def story() -> None:
        held: list[asyncio.StreamWriter] = []

        async def hang(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            held.append(writer)
            await reader.read()

        server = await asyncio.start_server(hang, "127.0.0.1", 0)
        file = tmp_path / "config"
        file.write_text(KUBECONFIG.format(port=server.sockets[0].getsockname()[1]))
        results: asyncio.Queue[watches.ClusterEvent] = asyncio.Queue()
        async with await kubernetes_api.find(kubeconfig=str(file), context=None) as client:
            watcher = watches.ClusterWatcher(client, SETTINGS, results.put, check_s=0.1)
            running = asyncio.create_task(watcher.run())
            while "API" not in watcher.problems:
                await asyncio.sleep(0.02)
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
        for writer in held:
            writer.close()
        server.close()
        assert watcher.problems["API"] == "get /api/v1/nodes: no answer within 0.1 s"

    asyncio.run(asyncio.wait_for(story(), 30))
