"""The labels that a running labeler maintains, with a real bus and the API stand-in."""

import asyncio
import contextlib
import datetime as dt
import itertools
import pathlib
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import aiohttp
import orjson

from muster import codec, vocabulary
from muster.local import kubernetes, nats, processes
from muster.nats import bus
from muster_labeler import model
from muster_labeler.kubernetes import projection
from muster_labeler.naming.sources import Product
from muster_labeler.service import decisions
from tests.worlds import labeler_cluster as clusters

KEY = decisions.KEY
T0 = dt.datetime(2026, 1, 1, tzinfo=dt.UTC)
MERGE = {"Content-Type": "application/merge-patch+json"}


class World:
    """A bus, a cluster, and as many labelers as a story needs."""

    def __init__(self, directory: pathlib.Path) -> None:
        self.directory = directory
        self.server = nats.NatsServer(directory / "nats")
        self.api = kubernetes.KubernetesApi()
        self.http: aiohttp.ClientSession
        self.bus: bus.Bus
        self.labelers: list[processes.Process] = []

    async def start(self, *, mode: str = "apply", **settings: object) -> processes.Process:
        """Start a labeler."""
        number = len(self.labelers)
        kubeconfig = self.directory / "kubeconfig"
        self.api.write_kubeconfig(kubeconfig)
        file = self.directory / f"labeler-{number}.json"
        cluster = {"kubeconfig": str(kubeconfig), "namespace": "default"}
        chosen = {"bus": {"url": self.server.url}, "mode": mode, "kubernetes": cluster}
        file.write_bytes(orjson.dumps({**chosen, "retry_s": 0.2, **settings}))
        program = processes.Program(f"labeler-{number}", "muster_labeler", ("--config", str(file)))
        labeler = processes.Process(program, self.directory / f"labeler-{number}.log")
        self.labelers.append(labeler)
        await labeler.start()
        return labeler

    async def reports(self, node: str, *products: str, **more: Any) -> None:
        """Publish an inventory as a plugin does."""
        gpus = tuple(
            vocabulary.Gpu(uuid=f"GPU-{index}", product=product, memory_mib=23034)
            for index, product in enumerate(products)
        )
        node_ = vocabulary.GpuNode(gpus=gpus, **more)
        await self.bus.publish(
            vocabulary.InventoryReported(
                node=node,
                plugin="device-plugin",
                at=dt.datetime.now(dt.UTC),
                devices=(),
                gpus=node_,
            )
        )

    async def judged(self, node: str, verdict: vocabulary.Verdict) -> None:
        """Publish a verdict as health does."""
        await self.bus.publish(
            vocabulary.VerdictChanged(
                node=node,
                plugin="device-plugin",
                at=dt.datetime.now(dt.UTC),
                verdict=verdict,
                rule="test",
            )
        )

    async def make(self, name: str, **labels: str) -> None:
        """Create a node with a GPU, as the kubelet does."""
        made = clusters.node(name, labels=labels)
        async with self.http.post("/api/v1/nodes", data=orjson.dumps(made)) as response:
            assert response.status == 201

    async def merge(self, name: str, labels: dict[str, str | None]) -> None:
        """Change labels as a person does."""
        body = orjson.dumps({"metadata": {"labels": labels}})
        path = f"/api/v1/nodes/{name}?fieldManager=kubectl"
        async with self.http.patch(path, data=body, headers=MERGE) as response:
            assert response.status == 200

    async def delete(self, name: str) -> None:
        """Delete a node."""
        async with self.http.delete(f"/api/v1/nodes/{name}") as response:
            assert response.status == 200

    async def get(self, path: str) -> Any:
        """Return an object of the API, or None if it does not exist."""
        async with self.http.get(path) as response:
            return await response.json() if response.status == 200 else None

    async def label(self, name: str) -> str | None:
        """Return a node's accelerator label."""
        node = await self.get(f"/api/v1/nodes/{name}")
        label: str | None = node["metadata"].get("labels", {}).get(KEY)
        return label

    async def until(self, look: Callable[[], Awaitable[Any]], wanted: object) -> None:
        """Poll until `look` returns the wanted value, which another process causes."""
        while await look() != wanted:
            await asyncio.sleep(0.02)

    async def labelled(self, **labels: str | None) -> None:
        """Wait until nodes have these labels."""
        for name, label in labels.items():
            await self.until(lambda name=name: self.label(name), label)  # type: ignore[misc]

    async def events(self) -> list[tuple[str, str, str]]:
        """Return node, reason and message of each Kubernetes Event."""
        events = await self.get("/api/v1/namespaces/default/events")
        return [
            (item["involvedObject"]["name"], item["reason"], item["message"])
            for item in events["items"]
        ]

    async def ask(self, labeler: processes.Process, path: str) -> tuple[int, str]:
        """Send a GET request to a labeler's HTTP server."""
        async with (
            aiohttp.ClientSession(labeler.addresses["http"]) as http,
            http.get(path) as response,
        ):
            return response.status, await response.text()

    async def refused(self, reason: str) -> int:
        """Return how many inventories the newest labeler refused for a reason."""
        _, metrics = await self.ask(self.labelers[-1], "/metrics")
        name = f'muster_labeler_refused_total{{reason="{reason}"}} '
        counts = [line.removeprefix(name) for line in metrics.splitlines() if name in line]
        return int(float(counts[0])) if counts else 0

    def log(self, number: int = 0) -> list[str]:
        """Return the events that a labeler logged, in order."""
        lines = (self.directory / f"labeler-{number}.log").read_text().splitlines()
        return [str(orjson.loads(line)["event"]) for line in lines]


@contextlib.asynccontextmanager
async def world(directory: pathlib.Path) -> AsyncIterator[World]:
    made = World(directory)
    async with asyncio.timeout(100), contextlib.AsyncExitStack() as open_:
        await open_.enter_async_context(made.server)
        await open_.enter_async_context(made.api)
        made.http = await open_.enter_async_context(aiohttp.ClientSession(made.api.url))
        made.bus = await open_.enter_async_context(
            bus.Bus(made.server.url, producer="plugins/device-plugin", name="plugin", owner=True)
        )
        try:
            yield made
        finally:
            for labeler in made.labelers:
                await labeler.end()


def play(story: Callable[[World], Awaitable[None]], directory: pathlib.Path) -> None:
    async def played() -> None:
        async with world(directory) as made:
            await story(made)

    asyncio.run(played())


def test_a_removed_label_comes_back_a_replaced_gpu_is_noticed_and_a_missing_one_withdrawn(
    tmp_path: pathlib.Path,
) -> None:
    async def story(made: World) -> None:
        reasons: list[str] = []

        async def reasons_written() -> list[str]:
            metadata = sorted(reason for _, reason, _ in await made.events())
            # suggestions in between are not counted
            return [reason for reason in metadata if reason != "LabelsSuggested"]

        async def settled(reason: str, label: str | None) -> None:
            # the Event follows the read-back: an earlier change would be a failed write
            reasons.append(reason)
            await made.until(reasons_written, sorted(reasons))
            await made.labelled(**{"node-a": label})

        await made.make("node-a")
        await made.reports("node-a", "NVIDIA L4")
        await made.start()
        await settled("LabelsApplied", "l4")
        metadata = (await made.get("/api/v1/nodes/node-a"))["metadata"]
        provenance = orjson.loads(metadata["annotations"][model.PROVENANCE])
        keys = ("value", "source", "product", "memMiB", "actor")
        assert {key: provenance[key] for key in keys} == {
            "value": "l4",
            "source": "agent inventory",
            "product": "1 x NVIDIA L4 (23034 MiB)",
            "memMiB": 23034,
            "actor": model.FIELD_MANAGER,
        }
        await made.merge("node-a", {KEY: None})
        await settled("LabelsApplied", "l4")
        await made.reports("node-a", "Tesla T4")
        await settled("LabelsApplied", "t4")
        # deleted and created again, as by an autoscaler: unknown hardware until the agent reports
        await made.delete("node-a")
        await made.make("node-a")
        await made.merge("node-a", {"seen": "yes"})
        await made.reports("node-a", "NVIDIA A10")
        await settled("LabelsApplied", "a10")
        # replaced by a GPU without a certain name
        await made.reports("node-a", "NVIDIA T400 4GB")
        await settled("LabelsWithdrawn", None)
        await made.reports("node-a", "Tesla T4")
        await settled("LabelsApplied", "t4")
        await made.reports("node-a", problem="NVML: not loaded")
        await made.reports("node-a")
        await settled("LabelsWithdrawn", None)

    play(story, tmp_path)


def test_no_node_is_labelled_before_all_can_be_and_a_new_one_at_once(
    tmp_path: pathlib.Path,
) -> None:
    async def story(made: World) -> None:
        await made.make("node-a")
        await made.make("node-b")
        await made.start(retry_s=30)
        await made.reports("node-a", "NVIDIA L4")
        (http,) = [labeler.addresses["http"] for labeler in made.labelers]

        async def is_waiting() -> bool:
            async with aiohttp.ClientSession() as session, session.get(f"{http}/state") as answer:
                nodes = (await answer.json())["nodes"]
                return bool(nodes.get("node-a", {}).get("is_waiting"))

        await made.until(is_waiting, wanted=True)
        assert await made.label("node-a") is None
        await made.reports("node-b", "Tesla T4")
        await made.labelled(**{"node-a": "l4", "node-b": "t4"})
        began = asyncio.get_running_loop().time()
        await made.make("node-c")
        await made.reports("node-c", "NVIDIA L4")
        await made.labelled(**{"node-c": "l4"})
        assert asyncio.get_running_loop().time() - began < 10

    play(story, tmp_path)


def test_labels_of_other_tools_name_gpus_where_no_agent_does(tmp_path: pathlib.Path) -> None:
    async def story(made: World) -> None:
        await made.make("node-a", **{"doks.digitalocean.com/gpu-model": "h100"})
        await made.make("node-b", **{KEY: "t4"})
        await made.start()
        await made.labelled(**{"node-a": "h100", "node-b": "t4"})

    play(story, tmp_path)


def test_a_suggestion_is_a_kubernetes_event_and_the_inventory_is_there_for_the_commands(
    tmp_path: pathlib.Path,
) -> None:
    async def story(made: World) -> None:
        await made.make("node-a")
        await made.reports("node-a", "NVIDIA L4", simulated=True)
        await made.start(mode="suggest")
        reason = "simulated, exact: 1 x NVIDIA L4 (23034 MiB)"
        await made.until(made.events, [("node-a", "LabelsSuggested", f"{KEY}=l4: {reason}")])
        path = f"/api/v1/namespaces/default/configmaps/{projection.INVENTORY_CONFIG_MAP}"

        async def listed() -> object:
            config_map = await made.get(path)
            return config_map and projection.decode_inventory(
                config_map["data"][projection.INVENTORY_KEY]
            )

        await made.until(
            listed, ({"node-a": {Product("NVIDIA L4", 23034): 1}}, frozenset({"node-a"}))
        )
        assert await made.label("node-a") is None

    play(story, tmp_path)


def test_of_two_replicas_one_writes_and_the_other_goes_on_when_it_is_killed(
    tmp_path: pathlib.Path,
) -> None:
    async def story(made: World) -> None:
        await made.make("node-a")
        first = await made.start(lease={"lasts_s": 1})
        await made.reports("node-a", "NVIDIA L4")
        await made.labelled(**{"node-a": "l4"})
        await made.start(lease={"lasts_s": 1})
        await made.reports("node-a", "Tesla T4")
        await made.labelled(**{"node-a": "t4"})
        assert "leads" not in made.log(1)
        await first.kill()
        await made.reports("node-a", "NVIDIA A10")
        await made.labelled(**{"node-a": "a10"})
        assert made.log(1).count("leadership_won") == 1

    play(story, tmp_path)


def test_verdicts_become_a_node_condition_on_request(tmp_path: pathlib.Path) -> None:
    async def story(made: World) -> None:
        await made.make("node-a")
        await made.judged("node-a", vocabulary.Verdict.HEALTHY)
        await made.start(mode="suggest", condition=True)

        async def conditions() -> object:
            node = await made.get("/api/v1/nodes/node-a")
            return [
                (
                    condition["type"],
                    condition["status"],
                    condition["reason"],
                    condition.get("message"),
                )
                for condition in node["status"]["conditions"]
                if condition["type"] == model.CONDITION
            ]

        name = "device-plugin"
        await made.until(conditions, [(model.CONDITION, "True", "Healthy", f"{name}: HEALTHY")])
        await made.judged("node-a", vocabulary.Verdict.PLUGIN_DOWN)
        await made.until(
            conditions,
            [(model.CONDITION, "False", "PluginDown", f"{name}: PLUGIN_DOWN")],
        )
        kept = (await made.get("/api/v1/nodes/node-a"))["status"]["conditions"]
        assert "Ready" in [condition["type"] for condition in kept]

    play(story, tmp_path)


def test_labels_are_kept_while_nats_is_away(tmp_path: pathlib.Path) -> None:
    names = [f"node-{index}" for index in range(12)]

    async def story(made: World) -> None:
        for name in names:
            await made.make(name)
            await made.reports(name, "NVIDIA L4")
        await made.start()
        await made.labelled(**dict.fromkeys(names, "l4"))
        made.server.freeze()
        try:
            # wait until the labels were read back: an earlier change would be a failed write
            await made.until(lambda: _events(made), len(names))
            for name in names:
                await made.merge(name, {KEY: None})
            await made.labelled(**dict.fromkeys(names, "l4"))
        finally:
            made.server.thaw()

    async def _events(made: World) -> int:
        return len(await made.events())

    play(story, tmp_path)


def test_a_restored_permission_is_noticed_and_a_contested_label_is_left_alone(
    tmp_path: pathlib.Path,
) -> None:
    async def story(made: World) -> None:
        await made.make("node-a")
        made.api.write_kubeconfig(tmp_path / "limited", token="limited")  # noqa: S106  # of the stand-in
        made.api.users.deny("limited", "patch", "nodes")
        limited = {"kubeconfig": str(tmp_path / "limited"), "namespace": "default"}
        await made.start(kubernetes=limited)
        await made.reports("node-a", "NVIDIA L4")

        async def reasons() -> list[str]:
            return [reason for _, reason, _ in await made.events()]

        await made.until(reasons, ["LabelsRefused"])
        lines = (tmp_path / "labeler-0.log").read_text().splitlines()
        logged = [line["permissions"] for line in map(orjson.loads, lines) if "permissions" in line]
        assert logged == [["patch nodes"]]
        made.api.users.grant("limited", "patch", "nodes")
        await made.labelled(**{"node-a": "l4"})
        while made.log().count("label_overwritten_repeatedly") == 0:
            await made.merge("node-a", {KEY: None})
            await asyncio.sleep(0.02)
        applied = [reason for reason in await reasons() if reason == "LabelsApplied"]
        assert len(applied) <= 10
        (http,) = [labeler.addresses["http"] for labeler in made.labelers]
        async with aiohttp.ClientSession() as session, session.get(f"{http}/state") as answer:
            reason = (await answer.json())["nodes"]["node-a"]["reason"]
        assert reason == "labels written 10 times within a minute: another writer changes them back"
        assert made.log().count("label_overwritten_repeatedly") == 1

    play(story, tmp_path)


def test_all_sets_follow_the_gpus_and_what_the_policy_no_longer_wants_is_removed(
    tmp_path: pathlib.Path,
) -> None:
    count, product = "muster.dev/accelerator-count", "nvidia.com/gpu.product"

    async def story(made: World) -> None:
        async def values() -> list[str | None]:
            labels = (await made.get("/api/v1/nodes/node-a"))["metadata"].get("labels", {})
            return [labels.get(key) for key in (KEY, count, product)]

        await made.make("node-a")
        first = await made.start(policy={"labels": ["skypilot", "muster", "nvidia"]})
        await made.reports("node-a", "NVIDIA L4", "NVIDIA L4")
        await made.until(values, ["l4", "2", "NVIDIA-L4"])
        await made.reports("node-a", "Tesla T4")
        await made.until(values, ["t4", "1", "Tesla-T4"])
        await first.end()
        await made.start(policy={"labels": ["skypilot"]})
        await made.until(values, ["t4", None, None])

    play(story, tmp_path)


def test_an_expired_watch_lists_again(tmp_path: pathlib.Path) -> None:
    async def story(made: World) -> None:
        await made.make("node-a")
        await made.reports("node-a", "NVIDIA L4")
        await made.start()
        await made.labelled(**{"node-a": "l4"})
        made.api.compact()
        await made.merge("node-a", {KEY: None})
        await made.labelled(**{"node-a": "l4"})

    play(story, tmp_path)


def test_a_plugin_that_reports_before_its_node_is_known_counts_when_the_node_appears(
    tmp_path: pathlib.Path,
) -> None:
    async def story(made: World) -> None:
        await made.make("node-a")
        await made.reports("node-a", "NVIDIA L4")
        await made.start()
        await made.labelled(**{"node-a": "l4"})
        await made.reports("node-b", "Tesla T4")
        await made.until(lambda: made.refused("unknown_node"), wanted=1)
        await made.make("node-b")
        await made.labelled(**{"node-b": "t4"})

    play(story, tmp_path)


def test_a_node_that_reports_thousands_of_plugins_delays_nobody_not_even_after_a_restart(
    tmp_path: pathlib.Path,
) -> None:
    names = 3_000

    async def flood(made: World) -> None:
        at = dt.datetime.now(dt.UTC)
        client = await made.bus.link.client()
        for number in range(names):
            event = vocabulary.InventoryReported(
                node="node-a", plugin=f"p{number}", at=at, devices=(), gpus=vocabulary.GpuNode()
            )
            envelope = {"event_id": f"{number}", "producer": "plugins/p", "instance": "i"}
            data = codec.encode(event, **envelope, sequence=number, boot="")
            await client.publish(event.subject, data)
        await client.flush()

    async def story(made: World) -> None:
        for name in ("node-a", "node-b"):
            await made.make(name)
        first = await made.start()
        await made.reports("node-a", "NVIDIA L4")
        await made.reports("node-b", "NVIDIA L4")
        await made.labelled(**{"node-a": "l4", "node-b": "l4"})
        await flood(made)
        await made.reports("node-b", "Tesla T4")
        await made.labelled(**{"node-a": "l4", "node-b": "t4"})
        counted = vocabulary.PLUGINS_MAX - 1
        await made.until(lambda: made.refused("too_many_plugins"), wanted=names - counted)
        await first.kill()
        # the stream still has all of them
        second = await made.start(lease={"lasts_s": 1})
        while (await made.ask(second, "/readyz"))[0] != 200:
            began = asyncio.get_running_loop().time()
            assert (await made.ask(second, "/healthz"))[0] == 200
            # the timeout of the liveness probe
            assert asyncio.get_running_loop().time() - began < 5
        await made.reports("node-b", "NVIDIA A10")
        await made.labelled(**{"node-a": "l4", "node-b": "a10"})
        assert made.log(0).count("inventory_refused") == 1

    play(story, tmp_path)


def test_of_a_node_whose_gpus_keep_changing_only_some_decisions_are_published(
    tmp_path: pathlib.Path,
) -> None:
    async def story(made: World) -> None:
        await made.make("node-a")
        await made.make("node-b")
        labeler = await made.start(mode="suggest")

        async def nodes() -> dict[str, dict[str, object]]:
            return dict(orjson.loads((await made.ask(labeler, "/state"))[1])["nodes"])

        for product in itertools.cycle(("NVIDIA L4", "Tesla T4")):
            await made.reports("node-a", product)
            state = (await nodes()).get("node-a", {})
            if state.get("is_waiting"):
                break
        assert state["reason"] == "its plugins' reports change repeatedly"
        decided = made.log().count("label_decided")
        # a token comes back every 6 s; inventories that arrive together lead to one decision
        assert 1 <= decided <= 20
        await made.reports("node-b", "NVIDIA L4")

        async def labels_of_b() -> object:
            return (await nodes()).get("node-b", {}).get("labels")

        await made.until(labels_of_b, {KEY: "l4"})

    play(story, tmp_path)
