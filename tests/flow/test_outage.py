"""NATS is killed and restarted: everything recovers, no verdict is wrong, no event is lost."""

import asyncio
import json
from datetime import UTC, datetime
from typing import Any

from muster import vocabulary
from muster.cli import demo_steps
from muster.local import stack
from muster.nats import bus, consumers, streams
from muster.vocabulary import Health, Verdict

NODE = "node-b"


def script(running: stack.Stack, fault: dict[str, int]) -> None:
    with running.faults(NODE).open("a") as file:
        file.write(json.dumps(fault) + "\n")


async def events_until_healthy(
    connected: bus.Bus, since: datetime
) -> list[vocabulary.DeviceHealthChanged]:
    """Return the device events of a node since a time, until one is Healthy."""
    events = []
    filters = vocabulary.subject_filters("device.health_changed", NODE)
    async for event in consumers.follow(
        connected.link, streams.EVENTS, filters=filters, since=since
    ):
        assert isinstance(event.data, vocabulary.DeviceHealthChanged)
        events.append(event.data)
        if event.data.health is Health.HEALTHY:
            return events
    raise AssertionError("follow ended")


async def verdicts_during(
    connected: bus.Bus, since: datetime, *, task: asyncio.Task[None]
) -> list[str]:
    """Return the verdicts that were published after `since` and before `task` ends."""
    verdicts: list[str] = []

    async def collect() -> None:
        filters = vocabulary.subject_filters("verdict.changed")
        async for event in consumers.follow(
            connected.link, streams.ALERTS, filters=filters, since=since
        ):
            assert isinstance(event.data, vocabulary.VerdictChanged)
            verdicts.append(f"{event.node} {event.data.verdict}")

    collecting = asyncio.create_task(collect())
    await task
    collecting.cancel()
    await asyncio.gather(collecting, return_exceptions=True)
    return verdicts


async def receive_heartbeats(connected: bus.Bus, count: int) -> None:
    """Wait until `count` more heartbeats of every node have arrived."""
    counts: dict[str, int] = {}
    enough = asyncio.Event()

    async def receive(heartbeat: vocabulary.Heartbeat) -> None:
        counts[heartbeat.node] = counts.get(heartbeat.node, 0) + 1
        if len(counts) == len(stack.NODES) and min(counts.values()) >= count:
            enough.set()

    await connected.heartbeats(receive)
    await enough.wait()


async def outage() -> tuple[list[str], list[str]]:
    # a separate port: another test may take the usual one while our server is down
    made = stack.Stack(show=lambda _: None, restart=False, nats_port=0)
    async with made as running:
        assert running.nats is not None
        async with bus.Bus(running.nats_url, producer="tests/outage", name="outage") as connected:
            since = datetime.now(UTC)
            await receive_heartbeats(connected, 2)
            await running.nats.kill()
            script(running, {"device": 0, "xid": 79})
            await asyncio.wait_for(wait_for_lost_gpu(running), 30)
            script(running, {"device": 0, "clear": 79})
            # longer than a suspicion: without the self-check every plugin would get a verdict
            await asyncio.sleep(4 * stack.HEARTBEAT_S)
            await running.nats.start()
            changes = await events_until_healthy(connected, since)
            # watch as long again for verdicts after the restart
            watching = asyncio.create_task(receive_heartbeats(connected, 8))
            return [c.code for c in changes], await verdicts_during(connected, since, task=watching)


async def wait_for_lost_gpu(running: stack.Stack) -> None:
    """Wait until the node's kubelet counts one GPU less as allocatable."""

    def has_lost(state: dict[str, Any]) -> bool:
        gpus = state["resources"][stack.GPU]
        return bool(gpus["allocatable"] == gpus["capacity"] - 1)

    await demo_steps.poll(f"{running.http(f'kubelet-{NODE}')}/state", has_lost)


def test_an_outage_of_the_bus_leads_to_no_verdict_and_loses_no_event() -> None:
    async def story() -> tuple[list[str], list[str]]:
        async with asyncio.timeout(100):
            return await outage()

    changes, verdicts = asyncio.run(story())
    # the XID and the lost GPU each begin and end; with the last end the GPU is Healthy
    assert sorted(changes) == ["gpu-lost", "gpu-lost", "xid-79", "xid-79"]
    assert {verdict.split()[1] for verdict in verdicts} <= {Verdict.HEALTHY}
