"""The health service as a process, with a real NATS and stand-ins for plugins."""

import asyncio
import contextlib
import re
import signal
import sys
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import TracebackType
from typing import Self

import msgspec

from muster import codec, vocabulary
from muster.local import nats
from muster.nats import bus, connection, storage, streams
from muster.vocabulary import AlertKind, AlertState, Health, StopReason, Verdict
from muster_health.replay import player, recording
from tests.worlds import fleet_parts

INTERVAL_S = 0.2
GPU = "nvidia.com/gpu"
PLUGIN = "device-plugin"
RECORDING = "health.rec"
SETTINGS = """
bus: {{url: "{url}"}}
recording: {{file: "{recording}"}}
detection:
  {{probe_timeout_s: 1.0, reconnect_s: 1.0, interval_s: 0.2, recover_s: 5, patience_s: 0,
    configuration_s: 0}}
"""


class FakePlugin:
    """A stand-in for a plugin: its heartbeats, its events, and its answers to probes."""

    def __init__(self, url: str, node: str) -> None:
        self.node = node
        self.is_frozen = False
        self.bus = bus.Bus(url, producer=f"plugins/{PLUGIN}", name=f"fake-{node}")
        self._seq = 0
        self._sending: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        await self.bus.__aenter__()
        await self.bus.link.subscribe(
            vocabulary.rpc_subject(self.node, PLUGIN, "probe"), self._answer
        )
        self._sending = asyncio.create_task(self._send_heartbeats())
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        assert self._sending is not None
        self._sending.cancel()
        await asyncio.gather(self._sending, return_exceptions=True)
        await self.bus.__aexit__(kind, error, at)

    def heartbeat(self) -> vocabulary.Heartbeat:
        self._seq += 1
        return vocabulary.Heartbeat(
            node=self.node,
            plugin=PLUGIN,
            instance=self.bus.instance,
            seq=self._seq,
            interval_s=INTERVAL_S,
            resources=(
                vocabulary.ResourceBeat(name=GPU, streams=1, probe_ok=True, probe_age_s=0.0),
            ),
        )

    async def report(self, device: str, health: Health) -> None:
        await self.bus.publish(
            vocabulary.InventoryReported(
                node=self.node,
                at=datetime.now(UTC),
                plugin=PLUGIN,
                devices=(
                    vocabulary.Device(id=device, resource=GPU, health=health, reason="XID 79"),
                ),
            )
        )

    async def announce_stop(self) -> None:
        await self.bus.publish(
            vocabulary.PluginStopping(
                node=self.node, at=datetime.now(UTC), plugin=PLUGIN, reason=StopReason.SIGNAL
            )
        )

    async def _answer(self, message: connection.Message) -> None:
        if not self.is_frozen:
            await message.respond(codec.encode_heartbeat(self.heartbeat()))

    async def _send_heartbeats(self) -> None:
        while True:
            if not self.is_frozen:
                await self.bus.send_heartbeat(self.heartbeat())
            await asyncio.sleep(INTERVAL_S)


@contextlib.asynccontextmanager
async def health(directory: Path, url: str) -> AsyncIterator[fleet_parts.Service]:
    file = directory / "health.yaml"
    file.write_text(SETTINGS.format(url=url, recording=directory / RECORDING))
    log = directory / "health.log"
    service = fleet_parts.Service("muster_health", ("--config", str(file)), log)
    try:
        await service.start()
        yield service
    finally:
        await service.end(signal.SIGKILL)


class Published(fleet_parts.Publications):
    """Everything that health publishes."""

    def verdicts(self, node: str) -> list[Verdict]:
        return [
            e.verdict
            for _, e in self.events
            if isinstance(e, vocabulary.VerdictChanged) and e.node == node
        ]

    def alerts(self) -> list[tuple[str, AlertKind, AlertState]]:
        return [
            (e.node, e.kind, e.state)
            for _, e in self.events
            if isinstance(e, vocabulary.AlertChanged)
        ]

    async def until_saved(self, node: str) -> None:
        """Wait until the saved state of a node's plugin has nothing left to publish."""
        key = f"{node}.{PLUGIN}"
        while b"untold" in (await storage.read_all(self.bus.link, streams.STATE)).get(
            key, b"untold"
        ):  # there is no event to wait for
            await asyncio.sleep(0)

    async def until_verdict(self, node: str, verdict: Verdict) -> None:
        await self.until(lambda: self.verdicts(node)[-1:] == [verdict])


@contextlib.asynccontextmanager
async def world(directory: Path) -> AsyncIterator[tuple[nats.NatsServer, Published]]:
    async with (
        asyncio.timeout(100),
        nats.NatsServer(directory / "nats") as server,
        fleet_parts.following(server.url, Published) as published,
    ):
        yield server, published
    assert_replayed(directory / RECORDING)


def assert_replayed(file: Path) -> None:
    """Assert that replaying the recording raises exactly the published alerts."""
    recorded = recording.read(map(recording.decode, file.read_bytes().splitlines()))
    played = player.play(recorded).episodes
    assert recording.differences(recorded, played) == ([], [])
    pairs, _, _ = recording.match(recorded.published, played)
    assert all(
        abs(ours.fired_at - theirs.fired_at) < timedelta(seconds=2) for ours, theirs in pairs
    )


def test_a_killed_a_frozen_and_a_stopping_plugin_each_get_their_verdict(tmp_path: Path) -> None:
    async def story() -> None:
        async with (
            world(tmp_path) as (server, published),
            health(tmp_path, server.url) as service,
        ):
            async with FakePlugin(server.url, "node.a"), FakePlugin(server.url, "b") as b:
                await published.until_verdict("node.a", Verdict.HEALTHY)
                await published.until_verdict("b", Verdict.HEALTHY)
                b.is_frozen = True
                await published.until_verdict("b", Verdict.STUCK)
                b.is_frozen = False
                await published.until_verdict("b", Verdict.HEALTHY)
                await b.announce_stop()
                await published.until_verdict("b", Verdict.MAINTENANCE)
                assert await service.get("/readyz") == b"ok\n"
            await published.until_verdict("node.a", Verdict.PLUGIN_DOWN)
            async with FakePlugin(server.url, "node.a"):
                await published.until_verdict("node.a", Verdict.HEALTHY)
                await published.until(lambda: len(published.alerts()) == 4)
            assert published.alerts() == [
                ("b", AlertKind.STUCK, AlertState.FIRING),
                ("b", AlertKind.STUCK, AlertState.RESOLVED),
                ("node.a", AlertKind.PLUGIN_DOWN, AlertState.FIRING),
                ("node.a", AlertKind.PLUGIN_DOWN, AlertState.RESOLVED),
            ]
            metrics = await service.get("/metrics")
            assert b'muster_health_verdicts{verdict="MAINTENANCE"} 1.0' in metrics
            assert b"muster_health_detection_delay_seconds_count 2.0" in metrics
            of_b = b'muster_health_plugin_verdict{node="b",plugin="device-plugin",verdict="%b"} %d'
            assert of_b % (b"MAINTENANCE", 1) in metrics
            assert of_b % (b"HEALTHY", 0) in metrics
            async with asyncio.timeout(30):
                assert await service.end(signal.SIGTERM) == 0

    asyncio.run(story())


async def heartbeats(service: fleet_parts.Service) -> dict[str, int]:
    """Return how many heartbeats a health has received, by outcome."""
    metrics = (await service.get("/metrics")).decode()
    counts = re.findall(r'muster_health_heartbeats_total\{outcome="(\w+)"\} (\d+)', metrics)
    return {outcome: int(count) for outcome, count in counts}


def test_a_heartbeat_that_arrives_again_counts_as_stale(tmp_path: Path) -> None:
    async def story() -> None:
        async with (
            world(tmp_path) as (server, published),
            health(tmp_path, server.url) as service,
            FakePlugin(server.url, "a") as a,
        ):
            await published.until_verdict("a", Verdict.HEALTHY)
            a.is_frozen = True
            again = a.heartbeat()
            # a heartbeat may arrive twice, or not at all, while subscriptions are renewed
            while (counts := await heartbeats(service))["stale"] < 9:
                await a.bus.send_heartbeat(again)
            # the first ones may have been sent before health subscribed
            assert 1 <= counts["accepted"] <= again.seq

    asyncio.run(story())


def test_a_device_alert_fires_and_is_resolved_by_the_next_snapshot(tmp_path: Path) -> None:
    async def story() -> None:
        async with (
            world(tmp_path) as (server, published),
            health(tmp_path, server.url) as service,
            FakePlugin(server.url, "a") as plugin,
        ):
            await published.until_verdict("a", Verdict.HEALTHY)
            await plugin.report("g0", Health.UNHEALTHY)
            await published.until(lambda: len(published.alerts()) == 1)
            (shown,) = msgspec.json.decode(await service.get("/state"))["plugins"]
            assert shown["unhealthy"] == [
                {"kind": "device_unhealthy", "resource": GPU, "device": "g0", "why": "XID 79"}
            ]
            assert [alert["devices"] for alert in shown["alerts"]] == [["g0"]]
            await plugin.report("g0", Health.HEALTHY)
            await published.until(lambda: len(published.alerts()) == 2)
            assert published.alerts() == [
                ("a", AlertKind.DEVICE_UNHEALTHY, AlertState.FIRING),
                ("a", AlertKind.DEVICE_UNHEALTHY, AlertState.RESOLVED),
            ]

    asyncio.run(story())


def test_a_killed_bus_leads_to_no_verdict_and_a_plugin_killed_meanwhile_is_noticed(
    tmp_path: Path,
) -> None:
    async def story() -> None:
        async with (
            world(tmp_path) as (server, published),
            health(tmp_path, server.url),
            FakePlugin(server.url, "a"),
        ):
            async with FakePlugin(server.url, "b"):
                await published.until_verdict("a", Verdict.HEALTHY)
                await published.until_verdict("b", Verdict.HEALTHY)
                await server.kill()
            # longer than a suspicion and its probe take
            await asyncio.sleep(1.5)
            await server.start()
            await published.until_verdict("b", Verdict.PLUGIN_DOWN)
            await published.until(lambda: len(published.alerts()) == 1)
            assert published.verdicts("a") == [Verdict.HEALTHY]
            assert published.alerts() == [("b", AlertKind.PLUGIN_DOWN, AlertState.FIRING)]

    asyncio.run(story())


def test_a_bus_that_hangs_leads_to_no_verdict(tmp_path: Path) -> None:
    async def story() -> None:
        async with (
            world(tmp_path) as (server, published),
            health(tmp_path, server.url) as service,
            FakePlugin(server.url, "a") as plugin,
        ):
            await published.until_verdict("a", Verdict.HEALTHY)
            await published.until_saved("a")
            server.freeze()
            await asyncio.sleep(2.0)
            server.thaw()
            plugin.is_frozen = True
            await published.until_verdict("a", Verdict.STUCK)
            assert published.verdicts("a") == [Verdict.HEALTHY, Verdict.STUCK]
            metrics = (await service.get("/metrics")).decode()
            assert 'muster_health_probes_total{result="inconclusive"}' in metrics

    asyncio.run(story())


def test_a_killed_health_service_repeats_nothing_and_notices_a_plugin_that_died_meanwhile(
    tmp_path: Path,
) -> None:
    async def story() -> None:
        async with (
            world(tmp_path) as (server, published),
        ):
            async with (
                FakePlugin(server.url, "a") as plugin,
                FakePlugin(server.url, "b"),
                health(tmp_path, server.url) as service,
            ):
                await published.until_verdict("a", Verdict.HEALTHY)
                await published.until_verdict("b", Verdict.HEALTHY)
                await plugin.report("g0", Health.UNHEALTHY)
                await published.until(lambda: len(published.alerts()) == 1)
                await service.end(signal.SIGKILL)
            async with FakePlugin(server.url, "a"), health(tmp_path, server.url):
                await published.until_verdict("b", Verdict.PLUGIN_DOWN)
                await published.until(lambda: len(published.alerts()) == 2)
            assert published.verdicts("a") == [Verdict.HEALTHY]
            assert published.alerts() == [
                ("a", AlertKind.DEVICE_UNHEALTHY, AlertState.FIRING),
                ("b", AlertKind.PLUGIN_DOWN, AlertState.FIRING),
            ]

    asyncio.run(story())


def test_an_alert_about_a_mount_outlasts_health_and_ends_with_the_mount(tmp_path: Path) -> None:
    condition = vocabulary.FuseCondition.HUNG
    mount = vocabulary.FuseMount(id="51-7", pod="shop/web-0", connection=51)
    where = {"node": "a", "plugin": PLUGIN, "at": datetime.now(UTC)}
    hung = vocabulary.FuseMountChanged(mount=mount, condition=condition, holds=True, **where)  # type: ignore[arg-type]  # by name

    def inventory(*mounts: vocabulary.FuseMount) -> vocabulary.InventoryReported:
        return vocabulary.InventoryReported(devices=(), fuse_mounts=mounts, **where)  # type: ignore[arg-type]  # by name

    async def story() -> None:
        async with (
            world(tmp_path) as (server, published),
            FakePlugin(server.url, "a") as plugin,
        ):
            async with health(tmp_path, server.url) as service:
                await published.until_verdict("a", Verdict.HEALTHY)
                await plugin.bus.publish(hung)
                await published.until(lambda: len(published.alerts()) == 1)
                await plugin.bus.publish(
                    inventory(msgspec.structs.replace(mount, conditions=(condition,)))
                )
                await service.end(signal.SIGKILL)
            async with health(tmp_path, server.url) as service:
                await plugin.bus.publish(inventory())
                await published.until(lambda: len(published.alerts()) == 2)
            assert published.alerts() == [
                ("a", AlertKind.FUSE_MOUNT_HUNG, AlertState.FIRING),
                ("a", AlertKind.FUSE_MOUNT_HUNG, AlertState.RESOLVED),
            ]

    asyncio.run(story())


def test_an_alert_about_a_refused_configuration_outlasts_health_and_ends_when_one_is_applied(
    tmp_path: Path,
) -> None:
    where = {"node": "a", "plugin": PLUGIN, "at": datetime.now(UTC), "config_hash": ""}
    refused = vocabulary.ConfigurationRefused(problems=("f: empty",), **where)  # type: ignore[arg-type]  # by name

    async def story() -> None:
        async with (
            world(tmp_path) as (server, published),
            FakePlugin(server.url, "a") as plugin,
        ):
            async with health(tmp_path, server.url) as service:
                await published.until_verdict("a", Verdict.HEALTHY)
                await plugin.bus.publish(refused)
                await published.until(lambda: len(published.alerts()) == 1)
                await service.end(signal.SIGKILL)
            async with health(tmp_path, server.url):
                await plugin.bus.publish(vocabulary.ConfigurationApplied(**where))  # type: ignore[arg-type]  # by name
                await published.until(lambda: len(published.alerts()) == 2)
            assert published.alerts() == [
                ("a", AlertKind.CONFIGURATION_REFUSED, AlertState.FIRING),
                ("a", AlertKind.CONFIGURATION_REFUSED, AlertState.RESOLVED),
            ]

    asyncio.run(story())


def test_a_published_alert_is_resolved_even_if_all_saved_state_is_lost(tmp_path: Path) -> None:
    async def story() -> None:
        async with (
            world(tmp_path) as (server, published),
            FakePlugin(server.url, "a") as plugin,
        ):
            async with health(tmp_path, server.url) as service:
                await published.until_verdict("a", Verdict.HEALTHY)
                await plugin.report("g0", Health.UNHEALTHY)
                await published.until(lambda: len(published.alerts()) == 1)
                await service.end(signal.SIGKILL)
            client = await plugin.bus.link.client()
            await client.jetstream().purge_stream(f"KV_{streams.STATE.name}")
            await plugin.report("g0", Health.HEALTHY)
            async with health(tmp_path, server.url):
                await published.until(lambda: len(published.alerts()) == 2)
            assert [state for _, _, state in published.alerts()] == [
                AlertState.FIRING,
                AlertState.RESOLVED,
            ]

    asyncio.run(story())


def test_bad_settings_end_with_one_line_each_and_exit_code_2(tmp_path: Path) -> None:
    async def story() -> None:
        file = tmp_path / "health.yaml"
        file.write_text("detection: {suspicion_beats: 1, probe_timeout: 3}\n")
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            *("-m", "muster_health", "--config", str(file)),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        stdout, stderr = await process.communicate()

        assert (process.returncode, stdout) == (2, b"")
        assert stderr.decode().splitlines() == [
            (
                f"muster-health: {file}: detection.suspicion_beats: expected a number of more "
                "than 1, found 1"
            ),
            (
                f"muster-health: {file}: detection.probe_timeout: unknown key (value 3); "
                "did you mean probe_timeout_s?"
            ),
        ]

    asyncio.run(story())
