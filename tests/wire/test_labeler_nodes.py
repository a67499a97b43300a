"""The labeler's door to the Kubernetes API, against the stand-in."""

import asyncio
import pathlib
from collections.abc import Awaitable, Callable

import aiohttp
import orjson
import pytest

from muster.local import kubernetes, nats
from muster_labeler import desired, nodes

PATH = "/api/v1/nodes"
LABELS = {desired.KEY: "l4"}


class Cluster:
    """The API as an administrator and as the labeler see it."""

    def __init__(self, http: aiohttp.ClientSession, labeler: nodes.Nodes) -> None:
        self.http = http
        self.labeler = labeler

    async def make(self, name: str, **labels: str) -> None:
        """Create a node with labels that `kubectl` owns."""
        body = orjson.dumps({"metadata": {"name": name, "labels": labels}})
        async with self.http.post(PATH, params={"fieldManager": "kubectl"}, data=body) as response:
            assert response.status == 201

    async def delete(self, name: str) -> None:
        """Delete a node."""
        async with self.http.delete(f"{PATH}/{name}") as response:
            assert response.status == 200

    async def node(self, name: str) -> desired.Node:
        """Return a node as the labeler reads it."""
        found = await self.labeler.get(name)
        assert isinstance(found, desired.Node)
        return found


def play(story: Callable[[Cluster], Awaitable[None]], directory: pathlib.Path) -> None:
    async def played() -> None:
        async with asyncio.timeout(30), kubernetes.KubernetesApi() as api:
            file = directory / "kubeconfig"
            api.write_kubeconfig(file)
            found = await nodes.Nodes.find(kubeconfig=str(file), context=None, timeout_s=5)
            async with aiohttp.ClientSession(api.url) as http, found as labeler:
                await story(Cluster(http, labeler))

    asyncio.run(played())


def test_labels_are_written_beside_those_of_others_and_change_with_us(
    tmp_path: pathlib.Path,
) -> None:
    async def story(cluster: Cluster) -> None:
        await cluster.make("a", zone="x")
        before = await cluster.node("a")
        assert before.labels == {"zone": "x"}
        assert await cluster.labeler.apply("a", before, LABELS) is None
        assert (await cluster.node("a")).labels == {"zone": "x", **LABELS}
        assert await cluster.labeler.apply("a", before, {desired.KEY: "t4"}) is None
        assert (await cluster.node("a")).labels == {"zone": "x", desired.KEY: "t4"}

    play(story, tmp_path)


def test_a_label_of_another_manager_stays_and_the_refusal_names_it(tmp_path: pathlib.Path) -> None:
    async def story(cluster: Cluster) -> None:
        await cluster.make("a", **{desired.KEY: "t4"})
        refused = await cluster.labeler.apply("a", await cluster.node("a"), LABELS)
        assert refused is not None
        assert not refused.is_passing
        assert refused.text.startswith("label node a: HTTP 409 ")
        assert "kubectl" in refused.text
        assert (await cluster.node("a")).labels == {desired.KEY: "t4"}

    play(story, tmp_path)


def test_a_node_that_is_not_there_is_unknown(tmp_path: pathlib.Path) -> None:
    async def story(cluster: Cluster) -> None:
        assert await cluster.labeler.get("a") == desired.Unknown(
            'get node a: HTTP 404 nodes "a" not found', is_passing=False
        )

    play(story, tmp_path)


def test_a_node_that_was_replaced_meanwhile_is_not_labelled(tmp_path: pathlib.Path) -> None:
    async def story(cluster: Cluster) -> None:
        await cluster.make("a")
        before = await cluster.node("a")
        await cluster.delete("a")
        await cluster.make("a")
        refused = await cluster.labeler.apply("a", before, LABELS)
        assert refused is not None
        assert "409" in refused.text
        assert (await cluster.node("a")).labels == {}

    play(story, tmp_path)


def test_an_api_that_is_away_may_be_back_another_time(tmp_path: pathlib.Path) -> None:
    async def story() -> None:
        file = tmp_path / "kubeconfig"
        api = kubernetes.KubernetesApi()
        api.url = f"http://127.0.0.1:{nats.free_port()}"
        api.write_kubeconfig(file)
        found = await nodes.Nodes.find(kubeconfig=str(file), context=None, timeout_s=5)
        async with found as labeler:
            away = await labeler.get("a")
        assert isinstance(away, desired.Unknown)
        assert away.is_passing

    asyncio.run(story())


@pytest.mark.parametrize(
    ("answer", "unknown"),
    [
        (
            b'HTTP/1.1 403 Forbidden\r\nContent-Length: 25\r\n\r\n{"message":"no\\nrights!"}',
            desired.Unknown("get node a: HTTP 403 no rights!", is_passing=False),
        ),
        (
            b"HTTP/1.1 503 Away\r\nContent-Length: 4\r\n\r\nbusy",
            desired.Unknown("get node a: HTTP 503", is_passing=True),
        ),
        (
            b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n[]",
            desired.Unknown("get node a: Expected `object`, got `array`", is_passing=True),
        ),
    ],
)
def test_each_answer_has_one_meaning(
    answer: bytes, unknown: desired.Unknown, tmp_path: pathlib.Path
) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(answer)
        await writer.drain()
        writer.close()

    async def story() -> None:
        async with asyncio.timeout(20), await asyncio.start_server(serve, "127.0.0.1", 0) as server:
            api = kubernetes.KubernetesApi()
            api.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
            api.write_kubeconfig(tmp_path / "kubeconfig")
            found = await nodes.Nodes.find(
                kubeconfig=str(tmp_path / "kubeconfig"), context=None, timeout_s=5
            )
            async with found as labeler:
                assert await labeler.get("a") == unknown

    asyncio.run(story())


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
    with pytest.raises(nodes.NoCluster, match=r"kubernetes: .*kubeconfig: \S") as refused:
        asyncio.run(nodes.Nodes.find(kubeconfig=str(file), context=context, timeout_s=1))
    assert "\n" not in str(refused.value)


def test_outside_a_pod_there_is_no_cluster_without_a_kubeconfig(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    with pytest.raises(nodes.NoCluster, match="the cluster this runs in"):
        asyncio.run(nodes.Nodes.find(kubeconfig=None, context=None, timeout_s=1))
