"""The health service as a process, and an agent that watches other plugins, on a real NATS."""

import asyncio
import contextlib
import signal
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from muster import vocabulary
from muster.local import nats
from muster.nats import bus
from muster.vocabulary import AlertKind, AlertState, Verdict, WatchedFinding
from muster_health.replay import player, recording
from tests.worlds import fleet_parts

PLUGIN = "device-plugin"
AMD = "amd.com/gpu"
RECORDING = "health.rec"
SETTINGS = """
bus: {{url: "{url}"}}
recording: {{file: "{recording}"}}
detection: {{probe_timeout_s: 1.0, reconnect_s: 1.0, recover_s: 1, hold_s: 1, interval_s: 30}}
"""
WELL = vocabulary.Watched(name=AMD, socket="device-plugins/amd.sock", listed=4, expected=4)
DOWN = msgspec.structs.replace(WELL, finding=WatchedFinding.NOT_SERVED, listed=0, text="refused")


@contextlib.asynccontextmanager
async def health(directory: Path, url: str) -> AsyncIterator[fleet_parts.Service]:
    file = directory / "health.yaml"
    file.write_text(SETTINGS.format(url=url, recording=directory / RECORDING))
    service = fleet_parts.Service(
        "muster_health", ("--config", str(file)), directory / "health.log"
    )
    try:
        await service.start()
        yield service
    finally:
        await service.end(signal.SIGKILL)


async def publish_observed(agent: bus.Bus, watched: vocabulary.Watched) -> None:
    event = vocabulary.PluginObserved(
        node="a", at=datetime.now(UTC), plugin=PLUGIN, watched=watched
    )
    await agent.publish(event)


async def report(agent: bus.Bus, *watched: vocabulary.Watched) -> None:
    event = vocabulary.InventoryReported(
        node="a", at=datetime.now(UTC), plugin=PLUGIN, devices=(), watched=watched
    )
    await agent.publish(event)


def verdicts(published: fleet_parts.Publications) -> list[tuple[str, Verdict]]:
    return [
        (event.watched, event.verdict)
        for _, event in published.events
        if isinstance(event, vocabulary.VerdictChanged) and event.watched
    ]


def alerts(published: fleet_parts.Publications) -> list[tuple[str, AlertKind, AlertState]]:
    return [
        (event.watched, event.kind, event.state)
        for _, event in published.events
        if isinstance(event, vocabulary.AlertChanged)
    ]


def test_a_watched_plugin_has_a_verdict_and_one_alert_over_a_restart_of_health(
    tmp_path: Path,
) -> None:
    firing = (AMD, AlertKind.PLUGIN_DOWN, AlertState.FIRING)

    async def story() -> None:
        async with (
            nats.NatsServer(tmp_path / "nats") as server,
            fleet_parts.following(server.url, fleet_parts.Publications) as published,
            bus.Bus(server.url, producer=f"plugins/{PLUGIN}", name="agent") as agent,
        ):
            url = server.url
            await agent.publish(
                vocabulary.PluginStarted(
                    node="a",
                    at=datetime.now(UTC),
                    plugin=PLUGIN,
                    version="1",
                    instance=agent.instance,
                    config_hash="",
                    resources=(),
                )
            )
            async with health(tmp_path, url) as service:
                await report(agent, WELL)
                await published.until(lambda: verdicts(published) == [(AMD, Verdict.HEALTHY)])
                await publish_observed(agent, DOWN)
                await published.until(lambda: alerts(published) == [firing])
                assert verdicts(published)[-1] == (AMD, Verdict.PLUGIN_DOWN)
                state = msgspec.json.decode(await service.get("/state"))
                (shown,) = [plugin for plugin in state["plugins"] if "watched" in plugin]
                assert (shown["watched"], shown["finding"]) == (AMD, "not_served")
            async with health(tmp_path, url):
                await report(agent, DOWN)
                await publish_observed(agent, WELL)
                await published.until(
                    lambda: alerts(published)[-1] == (*firing[:2], AlertState.RESOLVED)
                )
            assert verdicts(published)[2:] == [(AMD, Verdict.HEALTHY)]
            assert len(alerts(published)) == 2

    asyncio.run(asyncio.wait_for(story(), 60))
    lines = (tmp_path / RECORDING).read_bytes().splitlines()
    recorded = recording.read(map(recording.decode, lines))
    assert recording.differences(recorded, player.play(recorded).episodes) == ([], [])
