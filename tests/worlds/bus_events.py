"""Events on a real nats-server, and what a stream contains."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from typing import Final

import nats.aio.client
import nats.js.api
import prometheus_client
from structlog.typing import EventDict

from muster import codec, vocabulary
from muster.local import nats as local
from muster.nats import bus, consumers, streams
from tests.worlds import nats_links

NOW: Final = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
ALL: Final = ("muster.event.>",)


def owner(server: local.NatsServer, name: str = "test") -> bus.Bus:
    """Return a connection that creates the streams."""
    return bus.Bus(server.url, producer="plugins/p", name=name, owner=True)


def fact(number: int, node: str = "node-a") -> vocabulary.Event:
    """Return an event with a number."""
    return vocabulary.DeviceRemoved(
        node=node, at=NOW, plugin="p", resource="example.com/fuse", device_id=str(number)
    )


def number(event: codec.CloudEvent) -> int:
    """Return the number of such an event."""
    assert isinstance(event.data, vocabulary.DeviceRemoved)
    return int(event.data.device_id)


def heartbeat_of(seq: int, node: str = "node-a") -> vocabulary.Heartbeat:
    """Return a heartbeat."""
    return vocabulary.Heartbeat(node=node, plugin="p", instance="i", seq=seq, interval_s=5)


def count(metric: str, outcome: str) -> float:
    """Return the value of a counter of this process."""
    events = prometheus_client.REGISTRY.get_sample_value(
        f"muster_bus_{metric}_total", {"outcome": outcome}
    )
    return events or 0.0


async def stored(
    server: local.NatsServer, stream: str = "MUSTER_EVENTS"
) -> list[nats.js.api.RawStreamMsg]:
    """Return every message of a stream, read without muster's code."""
    async with nats_links.raw(server.url) as client:
        jetstream = client.jetstream()
        info = await jetstream.stream_info(stream)
        return [
            await jetstream.get_msg(stream, seq=seq)
            for seq in range(info.state.first_seq, info.state.last_seq + 1)
        ]


async def stored_numbers(server: local.NatsServer) -> list[int]:
    """Return the numbers of the stored events."""
    return [number(codec.decode(m.subject or "", m.data or b"")) for m in await stored(server)]


@asynccontextmanager
async def collected(
    events: AsyncIterator[codec.CloudEvent],
) -> AsyncIterator[list[codec.CloudEvent]]:
    """Collect the events of a subscription in the background; yield the growing list."""
    received: list[codec.CloudEvent] = []

    async def collect() -> None:
        async for event in events:
            received.append(event)  # noqa: PERF401  # seen as it grows

    task = asyncio.create_task(collect())
    try:
        yield received
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def following(link: bus.Bus, events: Sequence[codec.CloudEvent]) -> None:
    """Publish markers until a follower receives them: it receives all later events, too."""
    marker = 1_000_000
    while not events:
        await link.publish(fact(marker), event_id=f"marker-{marker}")
        marker += 1
        await asyncio.sleep(0.01)
    await nats_links.until(lambda: number(events[-1]) == marker - 1)


async def consume(link: bus.Bus, events: list[int], durable: str = "reader") -> None:
    """Consume and acknowledge events until cancelled; append their numbers to `events`."""
    async for delivery in consumers.consume(
        link.link, streams.EVENTS, durable=durable, filters=ALL
    ):
        events.append(number(delivery.event))
        await delivery.ack()


def dead_letters(lines: Sequence[EventDict]) -> list[EventDict]:
    return [line for line in lines if line["event"].startswith("dead_letter_")]
