"""NATS is killed and comes back: everything heals, nobody is called dead, no event is missing."""

import asyncio
import json
from datetime import UTC, datetime

from muster import vocabulary
from muster.cli import demo_steps
from muster.local import layout, stack
from muster.nats import bus, consumers, streams
from muster.vocabulary import Health, Verdict

NODE = "node-b"


def script(running: stack.Stack, fault: dict[str, int]) -> None:
    with running.faults(NODE).open("a") as file:
        file.write(json.dumps(fault) + "\n")


async def heard(connected: bus.Bus, since: datetime) -> list[vocabulary.DeviceHealthChanged]:
    """Return the device events of a node since a time, until one is Healthy."""
    found = []
    filters = vocabulary.subject_filters("device.health_changed", NODE)
    async for event in consumers.follow(
        connected.link, streams.EVENTS, filters=filters, since=since
    ):
        assert isinstance(event.data, vocabulary.DeviceHealthChanged)
        found.append(event.data)
        if event.data.health is Health.HEALTHY:
            return found
    raise AssertionError("follow ended")


async def judged(connected: bus.Bus, since: datetime, *, beside: asyncio.Task[None]) -> list[str]:
    """Return every verdict since a time that was given before a task ends."""
    found: list[str] = []

    async def collect() -> None:
        filters = vocabulary.subject_filters("verdict.changed")
        async for event in consumers.follow(
            connected.link, streams.ALERTS, filters=filters, since=since
        ):
            assert isinstance(event.data, vocabulary.VerdictChanged)
            found.append(f"{event.node} {event.data.verdict}")

    collecting = asyncio.create_task(collect())
    await beside
    collecting.cancel()
    await asyncio.gather(collecting, return_exceptions=True)
    return found


async def beats_again(connected: bus.Bus, count: int) -> None:
    """Return when every node has beaten so often since now."""
    seen: dict[str, int] = {}
    enough = asyncio.Event()

    async def hear(beat: vocabulary.Heartbeat) -> None:
        seen[beat.node] = seen.get(beat.node, 0) + 1
        if len(seen) == len(layout.NODES) and min(seen.values()) >= count:
            enough.set()

    await connected.heartbeats(hear)
    await enough.wait()


async def outage() -> tuple[list[str], list[str]]:
    # a port of its own: another test may take the usual one while our server is away
    made = stack.Stack(show=lambda _: None, restart=False, nats_port=0)
    async with made as running:
        assert running.nats is not None
        async with bus.Bus(running.nats_url, producer="tests/outage", name="outage") as connected:
            since = datetime.now(UTC)
            await beats_again(connected, 2)
            await running.nats.kill()
            script(running, {"device": 0, "xid": 79})
            await asyncio.wait_for(lost_on_kubelet(running), 30)
            script(running, {"device": 0, "clear": 79})
            # longer than a suspicion takes, so that silence alone would convict everybody
            await asyncio.sleep(4 * layout.HEARTBEAT_S)
            await running.nats.start()
            changes = await heard(connected, since)
            # as long again, for whoever would be convicted after the return
            watching = asyncio.create_task(beats_again(connected, 8))
            return [c.code for c in changes], await judged(connected, since, beside=watching)


async def lost_on_kubelet(running: stack.Stack) -> None:
    """Return when the node's kubelet counts one GPU less."""

    def fewer(state: dict[str, object]) -> bool:
        return layout.GPU in json.dumps(state) and '"Unhealthy"' in json.dumps(state)

    await demo_steps.poll(f"{running.http(f'kubelet-{NODE}')}/state", fewer)


def test_an_outage_of_the_bus_convicts_nobody_and_loses_no_event() -> None:
    async def story() -> tuple[list[str], list[str]]:
        async with asyncio.timeout(100):
            return await outage()

    changes, verdicts = asyncio.run(story())
    # the XID and what the GPU answers begin, and end again; the last of them makes it Healthy
    assert sorted(changes) == ["gpu-lost", "gpu-lost", "xid-79", "xid-79"]
    assert {verdict.split()[1] for verdict in verdicts} <= {Verdict.HEALTHY}
