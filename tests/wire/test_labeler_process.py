"""The labeler as a process, with a real NATS server and the Kubernetes API stand-in."""

import asyncio
import contextlib
import datetime as dt
import pathlib
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable

import aiohttp
import orjson
import pytest

from muster import vocabulary
from muster.local import kubernetes, nats, processes
from muster.nats import bus, consumers, streams
from muster_labeler.service import decisions

T0 = dt.datetime(2026, 1, 1, tzinfo=dt.UTC)
L4 = "exact: 1 x NVIDIA L4 (23034 MiB)"
FACTS = {
    "labels.suggested": "suggested",
    "labels.applied": "applied",
    "labels.refused": "refused",
}


class World:
    """A NATS server, a plugin's bus, a cluster, and a labeler that can be ended."""

    def __init__(self, directory: pathlib.Path) -> None:
        self.directory = directory
        self.server = nats.NatsServer(directory / "nats")
        self.api = kubernetes.KubernetesApi()
        self.kubeconfig = directory / "kubeconfig"
        self.labeler: processes.Process | None = None
        self.bus: bus.Bus | None = None

    async def start(self, *, mode: str, **settings: object) -> processes.Process:
        """Start a labeler that knows the cluster."""
        file = self.directory / "labeler.json"
        chosen = {
            "bus": {"url": self.server.url},
            "mode": mode,
            "kubernetes": {"kubeconfig": str(self.kubeconfig), "namespace": "default"},
            **settings,
        }
        file.write_bytes(orjson.dumps(chosen))
        program = processes.Program("labeler", "muster_labeler", ("--config", str(file)))
        self.labeler = processes.Process(program, self.directory / "labeler.log")
        await self.labeler.start()
        return self.labeler

    async def reports(self, *products: str, simulated: bool = False) -> None:
        """Publish an inventory as a plugin does."""
        assert self.bus is not None
        gpus = tuple(
            vocabulary.Gpu(uuid=f"GPU-{index}", product=product, memory_mib=23034)
            for index, product in enumerate(products)
        )
        await self.bus.publish(
            vocabulary.InventoryReported(
                node="node-a",
                plugin="device-plugin",
                at=dt.datetime.now(dt.UTC),
                devices=(),
                gpus=vocabulary.GpuNode(gpus=gpus, simulated=simulated),
            )
        )

    async def published(self, count: int) -> list[tuple[str, str, str]]:
        """Return the first `count` events of the labeler: kind, label and reason."""
        assert self.bus is not None
        published: list[tuple[str, str, str]] = []
        since = T0 - dt.timedelta(days=9999)
        events = consumers.follow(
            self.bus.link, streams.LABELS, filters=["muster.label.>"], since=since
        )
        async for event in events:
            assert isinstance(event.data, vocabulary.LabelEvent)
            label = event.data.labels.get(decisions.KEY, "")
            published.append((FACTS[event.type], label, event.data.reason))
            if len(published) == count:
                break
        return published

    async def make(self, **labels: str) -> None:
        """Create the node, with labels that `kubectl` owns."""
        body = orjson.dumps({"metadata": {"name": "node-a", "labels": labels}})
        async with (
            aiohttp.ClientSession(self.api.url) as http,
            http.post("/api/v1/nodes", params={"fieldManager": "kubectl"}, data=body) as response,
        ):
            assert response.status == 201

    async def label(self) -> str | None:
        """Return the node's accelerator label."""
        async with (
            aiohttp.ClientSession(self.api.url) as http,
            http.get("/api/v1/nodes/node-a") as response,
        ):
            value: str | None = (
                (await response.json())["metadata"].get("labels", {}).get(decisions.KEY)
            )
            return value

    async def get(self, path: str) -> tuple[int, bytes]:
        """Send a GET request to the labeler's HTTP server."""
        assert self.labeler is not None
        async with (
            aiohttp.ClientSession() as http,
            http.get(self.labeler.addresses["http"] + path) as response,
        ):
            return response.status, await response.read()

    async def is_waiting(self) -> bool:
        """Return whether the labeler is going to retry the node."""
        nodes = orjson.loads((await self.get("/state"))[1])["nodes"]
        return bool(nodes.get("node-a", {}).get("is_waiting"))

    async def suggests_by_reports_alone(self) -> None:
        await self.reports("NVIDIA L4")
        await self.published(1)
        await self.reports("Tesla T4")
        assert [(what, label) for what, label, _ in await self.published(2)] == [
            ("suggested", "l4"),
            ("suggested", "t4"),
        ]

    def log(self) -> list[str]:
        """Return the events the labeler logged, in order."""
        lines = (self.directory / "labeler.log").read_text().splitlines()
        return [str(orjson.loads(line)["event"]) for line in lines]


@contextlib.asynccontextmanager
async def world(directory: pathlib.Path) -> AsyncIterator[World]:
    made = World(directory)
    async with asyncio.timeout(100), contextlib.AsyncExitStack() as open_:
        await open_.enter_async_context(made.server)
        await open_.enter_async_context(made.api)
        made.api.write_kubeconfig(made.kubeconfig)
        made.bus = await open_.enter_async_context(
            bus.Bus(made.server.url, producer="plugins/device-plugin", name="plugin", owner=True)
        )
        try:
            yield made
        finally:
            if made.labeler is not None:
                await made.labeler.end()


def play(story: Callable[[World], Awaitable[None]], directory: pathlib.Path) -> None:
    async def played() -> None:
        async with world(directory) as made:
            await story(made)

    asyncio.run(played())


def test_a_suggestion_is_published_once_a_change_and_writes_nothing(tmp_path: pathlib.Path) -> None:
    async def story(made: World) -> None:
        await made.make()
        await made.reports("NVIDIA L4")
        labeler = await made.start(mode="suggest")
        await made.published(1)
        await made.reports("NVIDIA L4")
        await made.reports("NVIDIA L4")
        await made.reports("Tesla T4", simulated=True)
        assert await made.published(2) == [
            ("suggested", "l4", L4),
            ("suggested", "t4", "simulated, exact: 1 x Tesla T4 (23034 MiB)"),
        ]
        assert await made.label() is None
        assert (await made.get("/readyz"))[0] == 200
        state = orjson.loads((await made.get("/state"))[1])
        assert state["nodes"]["node-a"] == {
            "gpus": 1,
            "action": "suggest",
            "labels": {decisions.KEY: "t4"},
            "reason": "simulated, exact: 1 x Tesla T4 (23034 MiB)",
            "is_waiting": False,
        }
        labeler.signal(signal.SIGTERM)
        assert await labeler.wait() == 0

    play(story, tmp_path)


def test_without_a_cluster_it_suggests_from_the_inventory_alone_and_says_so_once(
    tmp_path: pathlib.Path,
) -> None:
    async def story(made: World) -> None:
        await made.start(mode="suggest", kubernetes={})
        await made.suggests_by_reports_alone()
        assert made.log().count("kubernetes_api_not_configured") == 1

    play(story, tmp_path)


def test_an_unavailable_cluster_is_logged_once_and_suggestions_go_on(
    tmp_path: pathlib.Path,
) -> None:
    async def story(made: World) -> None:
        made.api.url = f"http://127.0.0.1:{nats.free_port()}"
        made.api.write_kubeconfig(made.kubeconfig)
        await made.start(mode="suggest")
        await made.suggests_by_reports_alone()
        assert made.log().count("kubernetes_api_unavailable") == 1

    play(story, tmp_path)


def test_apply_writes_the_label_and_writes_it_again_when_it_is_gone(
    tmp_path: pathlib.Path,
) -> None:
    async def story(made: World) -> None:
        await made.make()
        await made.start(mode="apply")
        await made.reports("NVIDIA L4")
        assert await made.published(1) == [("applied", "l4", L4)]
        assert await made.label() == "l4"
        await made.reports("NVIDIA L4")
        await made.reports("Tesla T4")
        assert (await made.published(2))[1:] == [
            ("applied", "t4", "exact: 1 x Tesla T4 (23034 MiB)")
        ]
        assert await made.label() == "t4"
        async with (
            aiohttp.ClientSession(made.api.url) as http,
            http.patch(
                "/api/v1/nodes/node-a",
                data=orjson.dumps({"metadata": {"labels": {decisions.KEY: None}}}),
                headers={"Content-Type": "application/merge-patch+json"},
            ) as response,
        ):
            assert response.status == 200
        await made.reports("Tesla T4")
        await made.published(3)
        assert await made.label() == "t4"

    play(story, tmp_path)


def test_apply_refuses_what_others_own_and_only_suggests_what_is_simulated(
    tmp_path: pathlib.Path,
) -> None:
    async def story(made: World) -> None:
        await made.make(**{decisions.KEY: "mine"})
        await made.start(mode="apply")
        await made.reports("NVIDIA L4")
        ((what, label, reason),) = await made.published(1)
        assert (what, label) == ("refused", "l4")
        assert "kubectl" in reason
        await made.reports("NVIDIA L4")
        await made.reports("NVIDIA L4", "Tesla T4")
        await made.published(2)
        await made.reports("NVIDIA L4", simulated=True)
        assert (await made.published(3))[1:] == [
            ("refused", "", "mixed: 1 x NVIDIA L4 (23034 MiB), 1 x Tesla T4 (23034 MiB)"),
            ("suggested", "l4", f"simulated, {L4}"),
        ]
        assert await made.label() == "mine"

    play(story, tmp_path)


def test_apply_waits_for_a_cluster_that_is_away(tmp_path: pathlib.Path) -> None:
    async def story(made: World) -> None:
        await made.make()
        back = asyncio.Event()
        host, port = "127.0.0.1", int(made.api.url.rpartition(":")[2])

        async def gate(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            if back.is_set():
                through, to = await asyncio.open_connection(host, port)
                await asyncio.gather(_pump(reader, to), _pump(through, writer))
            writer.close()

        async with await asyncio.start_server(gate, host, 0) as server:
            made.api.url = f"http://{host}:{server.sockets[0].getsockname()[1]}"
            made.api.write_kubeconfig(made.kubeconfig)
            await made.reports("NVIDIA L4")
            await made.start(mode="apply", retry_s=0.2)
            while not await made.is_waiting():  # polls another process
                await asyncio.sleep(0.02)
            back.set()
            assert await made.published(1) == [("applied", "l4", L4)]
            assert made.labeler is not None
            await made.labeler.end()
        assert made.log().count("kubernetes_api_unavailable") == 1
        assert made.log().count("kubernetes_api_available") == 1

    play(story, tmp_path)


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(65_536):
        writer.write(data)
        await writer.drain()
    writer.close()


def test_off_does_nothing(tmp_path: pathlib.Path) -> None:
    async def story(made: World) -> None:
        await made.reports("NVIDIA L4")
        labeler = await made.start(mode="off")
        assert orjson.loads((await made.get("/state"))[1]) == {"nodes": {}}
        labeler.signal(signal.SIGTERM)
        assert await labeler.wait() == 0

    play(story, tmp_path)


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ("mode: apply", "mode apply needs a Kubernetes API; run the labeler in a pod, "),
        ("kubernetes: {kubeconfig: /nowhere}", "kubernetes: /nowhere: No such file or directory"),
        ("mode: aply", "FILE: mode: expected off, suggest or apply, found 'aply'"),
    ],
)
def test_a_users_mistake_is_one_line_and_exit_code_2(
    settings: str, problem: str, tmp_path: pathlib.Path
) -> None:
    async def ends() -> tuple[int | None, str]:
        file = tmp_path / "bad.yaml"
        file.write_text(settings)
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "muster_labeler", "--config", str(file)),
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.PIPE,
        )
        _, errors = await process.communicate()
        return process.returncode, errors.decode().replace(str(file), "FILE")

    code, errors = asyncio.run(ends())
    assert code == 2
    assert errors.startswith(f"muster-labeler: {problem}")
    assert errors.count("\n") == 1
