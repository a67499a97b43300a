"""Alarms to a webhook, without the bus."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping, Sequence

from structlog.testing import capture_logs

from muster.local import nats, webhook
from muster_health.bus import self_monitoring
from muster_health.model import config, signals

FIRING = signals.Alarm(firing=True, summary="disconnected for 10 s", seconds=10.0)
RESOLVED = signals.Alarm(firing=False, summary="connected again", seconds=42.0)


@contextlib.asynccontextmanager
async def alarms(url: str) -> AsyncIterator[self_monitoring.AlarmSender]:
    sender = self_monitoring.AlarmSender(
        config.OutOfBandAlarm(webhook_url=url), name="health-0", post=None
    )
    assert sender.channels == ("webhook",)
    running = asyncio.create_task(sender.run())
    try:
        yield sender
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


async def posts(receiver: webhook.WebhookReceiver, count: int) -> list[webhook.Received]:
    return list(await receiver.wait_for(lambda posts: len(posts) >= count, timeout_s=30))


def test_an_alarm_and_its_end_are_posted_once_each() -> None:
    async def story() -> None:
        async with asyncio.timeout(100), webhook.WebhookReceiver() as receiver:
            async with alarms(f"{receiver.url}/blind?team=a") as sender:
                await sender.send(FIRING)
                await posts(receiver, 1)
                await sender.send(RESOLVED)
                (first, second) = await posts(receiver, 2)
            alarm = first.json()
            assert isinstance(alarm, dict)
            assert alarm == {
                "kind": "blind",
                "state": "firing",
                "summary": "disconnected for 10 s",
                "seconds": 10.0,
                "service": "muster-health",
                "instance": "health-0",
                "at": alarm["at"],
            }
            assert first.path == "/blind"
            assert '"state":"resolved"' in second.body

    asyncio.run(story())


async def until_logged(lines: Sequence[Mapping[str, object]], event: str, count: int = 1) -> None:
    while len([line for line in lines if line["event"] == event]) < count:
        await asyncio.sleep(0.01)


def test_an_overloaded_receiver_is_retried_and_one_that_refuses_is_not() -> None:
    async def story(logged: Sequence[Mapping[str, object]]) -> None:
        async with (
            asyncio.timeout(100),
            webhook.WebhookReceiver() as receiver,
            alarms(receiver.url) as sender,
        ):
            receiver.behave(webhook.Behaviour(status=503))
            await sender.send(FIRING)
            assert [post.status for post in await posts(receiver, 2)] == [503, 200]
            receiver.behave(webhook.Behaviour(status=404))
            await sender.send(RESOLVED)
            await until_logged(logged, "alarm_refused")
            # the refused alarm is not repeated: the next request is the next alarm
            await sender.send(FIRING)
            states = [(post.status, '"firing"' in post.body) for post in await posts(receiver, 4)]
            assert states == [(503, True), (200, True), (404, False), (200, True)]

    with capture_logs() as logged:
        asyncio.run(story(logged))


def test_a_receiver_that_was_away_gets_only_the_newest_alarm() -> None:
    async def story(logged: Sequence[Mapping[str, object]]) -> None:
        port = nats.free_port()
        async with asyncio.timeout(100), alarms(f"http://127.0.0.1:{port}/") as sender:
            await sender.send(FIRING)
            await until_logged(logged, "alarm_delayed")
            await sender.send(RESOLVED)
            await until_logged(logged, "alarm_delayed", count=2)
            bodies: list[bytes] = []

            async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
                bodies.append(await reader.readuntil(b"}"))
                writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
                writer.close()

            async with await asyncio.start_server(serve, "127.0.0.1", port):
                while not bodies:
                    await asyncio.sleep(0.01)
            assert b'"state":"resolved"' in bodies[0]

    with capture_logs() as logged:
        asyncio.run(story(logged))
