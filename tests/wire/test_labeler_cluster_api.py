"""The labeler's adapters for the Kubernetes API, against the stand-in and faulty servers."""

import asyncio
import contextlib
import pathlib
import time
from collections.abc import Awaitable, Callable, Sequence

import aiohttp
import orjson
import pytest

from muster.kubernetes import api as kubernetes_api
from muster.kubernetes import lease, objects, watch
from muster.local import kubernetes, nats
from muster.local.kubernetes import refusals
from muster_labeler import model
from muster_labeler.kubernetes import cluster_api, projection
from muster_labeler.service import decisions
from tests.worlds import bus_subjects

PATH = "/api/v1/nodes"
LABELS = {decisions.KEY: "l4"}


class Cluster:
    """The API as an administrator and as the labeler see it."""

    def __init__(self, http: aiohttp.ClientSession, api: kubernetes_api.Api) -> None:
        self.http = http
        self.api = api
        self.labeler = cluster_api.NodeApi(api, cluster_api.WritePace(1000), timeout_s=5)
        self.server: kubernetes.KubernetesApi

    async def make(self, name: str, **labels: str) -> None:
        """Create a node with labels that `kubectl` owns."""
        body = orjson.dumps({"metadata": {"name": name, "labels": labels}})
        async with self.http.post(PATH, params={"fieldManager": "kubectl"}, data=body) as response:
            assert response.status == 201

    async def delete(self, name: str) -> None:
        """Delete a node."""
        async with self.http.delete(f"{PATH}/{name}") as response:
            assert response.status == 200

    async def node(self, name: str) -> model.Node:
        """Return a node as the labeler reads it."""
        node = await self.labeler.get(name)
        assert isinstance(node, model.Node)
        return node

    async def labels(self, name: str) -> dict[str, str]:
        """Return all of a node's labels."""
        async with self.http.get(f"{PATH}/{name}") as response:
            labels: dict[str, str] = (await response.json())["metadata"].get("labels", {})
            return labels

    async def label(
        self, before: model.Node, value: str = "l4"
    ) -> model.Node | cluster_api.Failure:
        """Label a node as the labeler does."""
        return await self.labeler.label(before, {decisions.KEY: value}, provenance="{}")


async def api_client(
    server: kubernetes.KubernetesApi, directory: pathlib.Path
) -> kubernetes_api.Api:
    server.write_kubeconfig(directory / "kubeconfig")
    return await kubernetes_api.find(kubeconfig=str(directory / "kubeconfig"), context=None)


def play(story: Callable[[Cluster], Awaitable[None]], directory: pathlib.Path) -> None:
    async def played() -> None:
        async with (
            asyncio.timeout(100),
            kubernetes.KubernetesApi() as server,
            aiohttp.ClientSession(server.url) as http,
            await api_client(server, directory) as api,
        ):
            cluster = Cluster(http, api)
            cluster.server = server
            await story(cluster)

    asyncio.run(played())


def test_labels_are_written_beside_those_of_others_and_change_with_us(
    tmp_path: pathlib.Path,
) -> None:
    async def story(cluster: Cluster) -> None:
        await cluster.make("a", zone="x")
        before = await cluster.node("a")
        after = await cluster.label(before)
        assert isinstance(after, model.Node)
        assert (after.labels, after.our_labels) == (LABELS, LABELS)
        assert await cluster.labels("a") == {"zone": "x", **LABELS}
        assert isinstance(await cluster.label(before, "t4"), model.Node)
        assert await cluster.labels("a") == {"zone": "x", decisions.KEY: "t4"}
        gone = await cluster.labeler.unlabel(await cluster.node("a"))
        assert isinstance(gone, model.Node)
        assert (await cluster.labels("a"), gone.our_labels) == ({"zone": "x"}, {})

    play(story, tmp_path)


def test_a_label_of_another_manager_stays_and_the_refusal_names_it(tmp_path: pathlib.Path) -> None:
    async def story(cluster: Cluster) -> None:
        await cluster.make("a", **{decisions.KEY: "t4"})
        refused = await cluster.label(await cluster.node("a"))
        assert isinstance(refused, cluster_api.Failure)
        assert (refused.is_passing, refused.is_gone) == (False, False)
        assert refused.text.startswith("label node a: HTTP 409 ")
        assert "kubectl" in refused.text
        assert await cluster.labels("a") == {decisions.KEY: "t4"}

    play(story, tmp_path)


def test_a_replica_that_may_not_write_any_more_when_its_turn_comes_does_not(
    tmp_path: pathlib.Path,
) -> None:
    async def story(cluster: Cluster) -> None:
        await cluster.make("a")
        turns = cluster_api.WritePace(1000)
        turns.may_write = lambda: False
        labels = cluster_api.NodeApi(cluster.api, turns, timeout_s=5)
        node_ = await cluster.node("a")
        done = await labels.label(node_, {decisions.KEY: "l4"}, provenance="{}")
        assert done == cluster_api.Failure(
            "label node a: another replica leads by now", is_passing=True
        )
        assert (await cluster.node("a")).labels == {}

    play(story, tmp_path)


def test_a_node_that_is_gone_meanwhile_is_reported_as_gone(tmp_path: pathlib.Path) -> None:
    async def story(cluster: Cluster) -> None:
        await cluster.make("a")
        before = await cluster.node("a")
        await cluster.delete("a")
        assert await cluster.label(before) == cluster_api.Failure(
            'get node a: HTTP 404 nodes "a" not found', is_gone=True
        )

    play(story, tmp_path)


def test_a_node_that_was_replaced_meanwhile_is_not_labelled(tmp_path: pathlib.Path) -> None:
    async def story(cluster: Cluster) -> None:
        await cluster.make("a")
        before = await cluster.node("a")
        await cluster.delete("a")
        await cluster.make("a")
        refused = await cluster.label(before)
        assert isinstance(refused, cluster_api.Failure)
        text = "label node a: it was deleted and created again"
        assert refused == cluster_api.Failure(text, is_gone=True)
        assert await cluster.labels("a") == {}

    play(story, tmp_path)


def test_an_api_that_is_away_may_be_back_another_time(tmp_path: pathlib.Path) -> None:
    async def story() -> None:
        server = kubernetes.KubernetesApi()
        server.url = f"http://127.0.0.1:{nats.free_port()}"
        async with await api_client(server, tmp_path) as api:
            away = await cluster_api.NodeApi(api, cluster_api.WritePace(9), timeout_s=5).get("a")
        assert isinstance(away, cluster_api.Failure)
        assert away.is_passing

    asyncio.run(story())


def served(
    answers: Sequence[bytes],
    directory: pathlib.Path,
    ask: Callable[[cluster_api.NodeApi], Awaitable[object]],
) -> object:
    """Call `ask` with a server that gives these answers, and then repeats the last one."""
    remaining = list(answers)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        length = [h for h in head.lower().split(b"\r\n") if h.startswith(b"content-length")]
        if length:
            await reader.readexactly(int(length[0].split(b":")[1]))
        writer.write(remaining.pop(0) if len(remaining) > 1 else remaining[0])
        await writer.drain()
        writer.close()

    async def story() -> object:
        async with (
            asyncio.timeout(100),
            await asyncio.start_server(serve, "127.0.0.1", 0) as server,
        ):
            api_ = kubernetes.KubernetesApi()
            api_.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
            async with await api_client(api_, directory) as api:
                return await ask(cluster_api.NodeApi(api, cluster_api.WritePace(100), timeout_s=5))

    return asyncio.run(story())


def answer(body: bytes, status: str = "200 OK", *headers: str) -> bytes:
    lines = [f"HTTP/1.1 {status}", f"Content-Length: {len(body)}", "Connection: close", *headers]
    return "\r\n".join([*lines, "", ""]).encode() + body


@pytest.mark.parametrize(
    ("raw", "failure"),
    [
        (
            answer(b'{"message":"no\\nrights!"}', "403 Forbidden"),
            cluster_api.Failure("get node a: HTTP 403 no rights!"),
        ),
        (
            answer(b"busy", "503 Away"),
            cluster_api.Failure("get node a: HTTP 503 busy", is_passing=True),
        ),
        (
            answer(b'{"message":"slow down"}', "429 Too Many", "Retry-After: 0"),
            cluster_api.Failure("get node a: HTTP 429 slow down", is_passing=True),
        ),
        (
            answer(b"[]"),
            cluster_api.Failure("get node a: Expected `object`, got `array`", is_passing=True),
        ),
    ],
)
def test_each_answer_has_one_meaning(
    raw: bytes, failure: cluster_api.Failure, tmp_path: pathlib.Path
) -> None:
    assert served([raw], tmp_path, lambda labeler: labeler.get("a")) == failure


def test_what_is_read_back_otherwise_is_a_failure(tmp_path: pathlib.Path) -> None:
    def node(value: str) -> bytes:
        return answer(orjson.dumps({"metadata": {"name": "a", "labels": {decisions.KEY: value}}}))

    def label(labeler: cluster_api.NodeApi) -> Awaitable[object]:
        return labeler.label(model.Node(name="a", uid="u"), LABELS, provenance="{}")

    failure = served([node("l4"), node("t4")], tmp_path, label)
    assert failure == cluster_api.Failure(
        f"label node a: after the write, the node has {decisions.KEY}='t4'"
    )
    assert isinstance(served([node("l4")], tmp_path, label), model.Node)


@pytest.mark.parametrize(
    ("content", "context"),
    [
        (None, None),
        (b"", None),
        (b"{", None),
        (b"[]", None),
        (b"clusters: 7", None),
        ("good", "no"),
    ],
)
def test_a_kubeconfig_that_leads_nowhere_is_named(
    content: bytes | str | None, context: str | None, tmp_path: pathlib.Path
) -> None:
    file = tmp_path / "kubeconfig"
    if content == "good":
        api = kubernetes.KubernetesApi()
        api.url = "http://127.0.0.1:1"
        api.write_kubeconfig(file)
    elif isinstance(content, bytes):
        file.write_bytes(content)
    with pytest.raises(kubernetes_api.NoCluster, match=r"kubernetes: .*kubeconfig: \S") as refused:
        asyncio.run(kubernetes_api.find(kubeconfig=str(file), context=context))
    assert "\n" not in str(refused.value)


def test_outside_a_pod_there_is_no_cluster_without_a_kubeconfig(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    with pytest.raises(kubernetes_api.NoCluster, match="the cluster this runs in"):
        asyncio.run(kubernetes_api.find(kubeconfig=None, context=None))


class Seen:
    """The nodes that a reflector has reported."""

    def __init__(self) -> None:
        self.nodes: dict[str, model.Node] = {}
        self.lists = 0
        self.changed = asyncio.Event()

    def sink(self) -> watch.Sink[objects.Node, model.Node]:
        return watch.Sink(projection.node, self._replace, self._put, self._drop)

    async def until(self, labels: dict[str, str | None]) -> None:
        """Wait until these are the nodes, with these accelerator labels."""
        while {name: n.labels.get(decisions.KEY) for name, n in self.nodes.items()} != labels:
            self.changed.clear()
            await self.changed.wait()

    def _replace(self, nodes: list[model.Node]) -> None:
        self.nodes = {node.name: node for node in nodes}
        self.lists += 1
        self.changed.set()

    def _put(self, node: model.Node) -> None:
        self.nodes[node.name] = node
        self.changed.set()

    def _drop(self, node: model.Node) -> None:
        del self.nodes[node.name]
        self.changed.set()


def test_all_nodes_are_kept_up_to_date_also_when_the_watch_expires(
    tmp_path: pathlib.Path,
) -> None:
    async def story(cluster: Cluster) -> None:
        await cluster.make("a")
        kept = Seen()
        watched = watch.Reflector(cluster.api, cluster_api.NODES_PATH, objects.Node, kept.sink())
        task = asyncio.create_task(watched.run())
        await kept.until({"a": None})
        await cluster.make("b")
        await cluster.label(await cluster.node("b"))
        await kept.until({"a": None, "b": "l4"})
        await cluster.delete("a")
        await kept.until({"b": "l4"})
        cluster.server.compact()
        await cluster.make("c")
        await kept.until({"b": "l4", "c": None})
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert kept.lists >= 1

    play(story, tmp_path)


def candidate(cluster: Cluster, changed: asyncio.Event, *, duration_s: int = 2) -> lease.Lease:
    return lease.Lease(
        cluster.api,
        namespace="default",
        name="x",
        duration_s=duration_s,
        on_change=lambda *_: changed.set(),
    )


async def leads(election: lease.Lease, changed: asyncio.Event) -> int:
    while (term := election.term()) is None:
        changed.clear()
        await changed.wait()
    return term


def test_of_two_replicas_one_holds_the_lease_and_the_other_has_it_when_it_ends(
    tmp_path: pathlib.Path,
) -> None:
    async def story(cluster: Cluster) -> None:
        changed = asyncio.Event()

        async def holders(renewals: int) -> list[str]:
            path = "/apis/coordination.k8s.io/v1/namespaces/default/leases"
            async with cluster.http.get(path, params={"watch": "1"}) as answer:
                lines = [await answer.content.readline() for _ in range(renewals)]
            return [orjson.loads(line)["object"]["spec"]["holderIdentity"] for line in lines]

        first, second = candidate(cluster, changed), candidate(cluster, changed)
        async with contextlib.AsyncExitStack() as stack:
            async with first:
                term = await leads(first, changed)
                await stack.enter_async_context(second)
                # five renewals take longer than the lease lasts
                assert await holders(5) == [first.name] * 5
                assert (second.term(), second.current.leader) == (None, first.name)
                assert first.is_term(term)
            assert (first.term(), first.current.term) == (None, None)
            # a later leader has a greater term, also after the one before resigned
            assert await leads(second, changed) > term

    play(story, tmp_path)


def test_a_replica_that_cannot_renew_stops_before_another_may_begin(tmp_path: pathlib.Path) -> None:
    async def story(cluster: Cluster) -> None:
        changed = asyncio.Event()
        async with candidate(cluster, changed, duration_s=1) as election:
            await leads(election, changed)
            cluster.server.refuse("/apis/coordination.k8s.io", refusals.Reason.UNAVAILABLE)
            while election.term() is not None:
                changed.clear()
                await changed.wait()
            await bus_subjects.until(lambda: "HTTP 503" in (election.problem() or ""))

    play(story, tmp_path)


def test_a_replica_whose_machine_was_suspended_no_longer_holds_the_lease(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, suspended_s = time.clock_gettime, {time.CLOCK_BOOTTIME: 60.0}

    async def story(cluster: Cluster) -> None:
        changed = asyncio.Event()
        async with candidate(cluster, changed) as election:
            term = await leads(election, changed)
            # the loop's clock, CLOCK_MONOTONIC, stops while the machine is suspended
            monkeypatch.setattr(
                time, "clock_gettime", lambda clock: real(clock) + suspended_s.get(clock, 0.0)
            )
            assert election.term() is None
            assert await leads(election, changed) > term

    play(story, tmp_path)


def test_the_callback_runs_when_the_lease_becomes_unavailable_and_available(
    tmp_path: pathlib.Path,
) -> None:
    async def story(cluster: Cluster) -> None:
        changed = asyncio.Event()
        cluster.server.refuse("/apis/coordination.k8s.io", refusals.Reason.UNAVAILABLE)
        async with candidate(cluster, changed, duration_s=1) as election:
            await changed.wait()
            assert (election.term(), election.problem() is None) == (None, False)
            cluster.server.allow("/apis/coordination.k8s.io")
            await leads(election, changed)
            assert election.problem() is None

    play(story, tmp_path)
