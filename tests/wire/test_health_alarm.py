"""Blindness told to a webhook, without the bus."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

from muster.local import nats, webhook
from muster_health.bus import out_of_band_alarm
from muster_health.model import config, signals

BLIND = signals.Alarm(firing=True, summary="deaf for 10 s", seconds=10.0)
SEES = signals.Alarm(firing=False, summary="heard NATS again", seconds=42.0)


@contextlib.asynccontextmanager
async def alarms(url: str) -> AsyncIterator[out_of_band_alarm.Alarms]:
    found = out_of_band_alarm.Alarms(config.Blind(webhook_url=url), name="health-0", post=None)
    assert found.ways == ("webhook",)
    running = asyncio.create_task(found.run())
    try:
        yield found
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


async def posts(receiver: webhook.WebhookReceiver, count: int) -> list[webhook.Received]:
    return list(await receiver.wait_for(lambda found: len(found) >= count, timeout_s=30))


def test_blindness_and_its_end_are_posted_once_each() -> None:
    async def story() -> None:
        async with asyncio.timeout(100), webhook.WebhookReceiver() as receiver:
            async with alarms(f"{receiver.url}/blind?team=a") as found:
                await found.tell(BLIND)
                await posts(receiver, 1)
                await found.tell(SEES)
                (first, second) = await posts(receiver, 2)
            said = first.json()
            assert isinstance(said, dict)
            assert said == {
                "kind": "blind",
                "state": "firing",
                "summary": "deaf for 10 s",
                "seconds": 10.0,
                "service": "muster-health",
                "instance": "health-0",
                "at": said["at"],
            }
            assert first.path == "/blind"
            assert '"state":"resolved"' in second.body

    asyncio.run(story())


def test_a_receiver_that_is_overloaded_is_tried_again_and_one_that_refuses_is_not() -> None:
    async def story() -> None:
        async with (
            asyncio.timeout(100),
            webhook.WebhookReceiver() as receiver,
            alarms(receiver.url) as found,
        ):
            receiver.behave(webhook.Behaviour(status=503))
            await found.tell(BLIND)
            assert [post.status for post in await posts(receiver, 2)] == [503, 200]
            receiver.behave(webhook.Behaviour(status=404))
            await found.tell(SEES)
            await posts(receiver, 3)
            await asyncio.sleep(1.2)
            assert [post.status for post in receiver.received()] == [503, 200, 404]

    asyncio.run(story())


def test_a_receiver_that_is_away_is_told_only_what_is_newest() -> None:
    async def story() -> None:
        port = nats.free_port()
        async with asyncio.timeout(100), alarms(f"http://127.0.0.1:{port}/") as found:
            await found.tell(BLIND)
            await asyncio.sleep(0.1)
            await found.tell(SEES)
            await asyncio.sleep(0.1)
            heard: list[bytes] = []

            async def take(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
                heard.append(await reader.readuntil(b"}"))
                writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
                writer.close()

            async with await asyncio.start_server(take, "127.0.0.1", port):
                while not heard:
                    await asyncio.sleep(0.01)
            assert b'"state":"resolved"' in heard[0]

    asyncio.run(story())
