"""One connection to a real nats-server that is killed, freezes, refuses clients, and recovers."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator, MutableMapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

import msgspec
import nats.aio.client
import prometheus_client
import pytest
from structlog.testing import capture_logs

from muster.local import nats as local
from muster.nats import connection
from muster.service import sections
from tests.worlds import nats_links

LIMITED: Final = """
authorization { users = [
  {
    user: limited, password: secret,
    permissions: {publish: ["allowed", "_INBOX.>"], subscribe: "_INBOX.>"}
  }
  %s
] }
"""


def errors(kind: str) -> float:
    return (
        prometheus_client.REGISTRY.get_sample_value("muster_bus_errors_total", {"kind": kind}) or 0
    )


def logged_events(lines: list[MutableMapping[str, Any]]) -> list[str]:
    return [line["event"] for line in lines]


@asynccontextmanager
async def received(link: connection.Connection, subject: str) -> AsyncIterator[list[bytes]]:
    received: list[bytes] = []

    async def receive(message: connection.Message) -> None:
        received.append(message.data)

    await link.subscribe(subject, receive)
    yield received


async def publish(server: local.NatsServer, subject: str, payload: bytes) -> None:
    """Publish a message from another client."""
    client = nats.aio.client.Client()
    await client.connect(server.url)
    await client.publish(subject, payload)
    await nats_links.flushed(client)
    await client.close()


def test_an_outage_is_logged_once_when_it_begins_and_once_when_it_ends(tmp_path: Path) -> None:
    async def story(server: local.NatsServer) -> None:
        with capture_logs() as lines:
            async with connection.Connection(server.url, name="test") as link:
                await link.client()
                await server.kill()
                await nats_links.until(lambda: not link.is_connected)
                failed = errors("ConnectionRefusedError")
                await nats_links.until(lambda: errors("ConnectionRefusedError") >= failed + 2)
                await server.start()
                await link.client()
        assert logged_events(lines) == ["bus_connected", "bus_disconnected", "bus_connected"]
        connected = [line for line in lines if line["event"] == "bus_connected"]
        assert [line["connections_total"] for line in connected] == [1, 2]

    nats_links.play(tmp_path, story)


def test_each_connection_is_yielded_as_a_change_once(tmp_path: Path) -> None:
    async def story(server: local.NatsServer) -> None:
        async with connection.Connection(server.url, name="test") as link:
            changes = link.changes()
            assert await anext(changes) is False
            assert await anext(changes) is True
            await server.kill()
            assert await anext(changes) is False
            await server.start()
            assert await anext(changes) is True
            await server.kill()
            await nats_links.until(lambda: not link.is_connected)
            await server.start()
            await link.client()
            # the loss was not read as a change; the return is yielded all the same
            assert await anext(changes) is True
            assert link.epoch == 3

    nats_links.play(tmp_path, story)


def test_subscriptions_come_back_with_the_server(tmp_path: Path) -> None:
    async def story(server: local.NatsServer) -> None:
        async with (
            connection.Connection(server.url, name="test") as link,
            received(link, "before") as before,
        ):
            await link.client()
            await server.kill()
            await nats_links.until(lambda: not link.is_connected)
            async with received(link, "during") as during:
                await server.start()
                await nats_links.settled(link)
                await publish(server, "before", b"1")
                await publish(server, "during", b"2")
                await nats_links.until(lambda: bool(before and during))
            assert (before, during) == ([b"1"], [b"2"])

    nats_links.play(tmp_path, story)


def test_a_subscription_made_while_a_connection_is_prepared_is_not_forgotten(
    tmp_path: Path,
) -> None:
    async def story(server: local.NatsServer) -> None:
        preparing, go_on = asyncio.Event(), asyncio.Event()

        async def prepare(_: nats.aio.client.Client) -> None:
            preparing.set()
            await go_on.wait()

        async with connection.Connection(server.url, name="test", prepare=prepare) as link:
            await preparing.wait()
            async with received(link, "x") as bodies:
                go_on.set()
                await nats_links.settled(link)
                await publish(server, "x", b"1")
                await nats_links.until(lambda: bool(bodies))
            assert bodies == [b"1"]

    nats_links.play(tmp_path, story)


def test_a_client_is_available_only_after_it_was_prepared_again(tmp_path: Path) -> None:
    async def story(server: local.NatsServer) -> None:
        prepared: list[int] = []

        async def prepare(client: nats.aio.client.Client) -> None:
            if len(prepared) % 2 == 0:
                prepared.append(0)
                raise TimeoutError("not yet")
            await nats_links.flushed(client)
            prepared.append(1)

        async with connection.Connection(server.url, name="test", prepare=prepare) as link:
            await link.client()
            assert prepared == [0, 1]
            await server.kill()
            await nats_links.until(lambda: not link.is_connected)
            await server.start()
            await link.client()
            assert prepared == [0, 1, 0, 1]

    nats_links.play(tmp_path, story)


def test_a_handler_that_fails_is_logged_and_gets_the_next_message(tmp_path: Path) -> None:
    async def story(server: local.NatsServer) -> None:
        received: list[bytes] = []

        async def receive(message: connection.Message) -> None:
            received.append(message.data)
            if message.data == b"1":
                raise LookupError("a bug of ours")

        with capture_logs() as lines:
            async with connection.Connection(server.url, name="test") as link:
                await link.subscribe("x", receive)
                await nats_links.settled(link)
                await publish(server, "x", b"1")
                await publish(server, "x", b"2")
                await nats_links.until(lambda: len(received) == 2)
        assert received == [b"1", b"2"]
        assert [(x["event"], x["kind"], x["error"]) for x in lines if "kind" in x] == [
            ("bus_error", "LookupError", "a bug of ours")
        ]

    nats_links.play(tmp_path, story)


def test_a_refusal_is_logged_and_counted_without_the_password(tmp_path: Path) -> None:
    async def story(server: local.NatsServer) -> None:
        url = server.url.replace("//", "//limited:secret@")
        before = errors("Error")
        with capture_logs() as lines:
            async with connection.Connection(url, name="test") as link:
                client = await link.client()
                await client.publish("allowed", b"")
                await client.publish("forbidden", b"")
                async with received(link, "forbidden"):
                    await nats_links.until(lambda: errors("Error") == before + 2)
                assert link.is_connected
        assert logged_events(lines) == ["bus_connected", "bus_error", "bus_error"]
        assert 'permissions violation for publish to "forbidden"' in lines[1]["error"].lower()
        assert 'permissions violation for subscription to "forbidden"' in lines[2]["error"].lower()
        assert "secret" not in str(lines)

    nats_links.play(tmp_path, story, LIMITED % "")


def test_a_client_that_the_server_closed_for_good_is_replaced(tmp_path: Path) -> None:
    async def story(server: local.NatsServer) -> None:
        async with (
            connection.Connection(server.url, name="test") as link,
            received(link, "x") as bodies,
        ):
            first = await link.client()
            assert first._transport is not None
            first._transport.write(b"NONSENSE\r\n")
            await nats_links.until(lambda: first.is_closed)
            second = await link.client()
            assert second is not first
            await nats_links.settled(link)
            await second.publish("x", b"1")
            await nats_links.until(lambda: bool(bodies))
        assert bodies == [b"1"]

    nats_links.play(tmp_path, story)


def test_a_client_whose_password_was_refused_reconnects_when_it_is_accepted_again(
    tmp_path: Path,
) -> None:
    async def story(server: local.NatsServer) -> None:
        config = tmp_path / "nats.conf"
        url = server.url.replace("//", "//other:secret@")
        with capture_logs() as lines:
            async with connection.Connection(url, name="test") as link:
                await link.client()
                config.write_text(LIMITED % "")
                os.kill(server.pid, signal.SIGHUP)
                await nats_links.until(lambda: not link.is_connected)
                config.write_text(LIMITED % "{user: other, password: secret}")
                os.kill(server.pid, signal.SIGHUP)
                await link.client()
        assert logged_events(lines) == ["bus_connected", "bus_disconnected", "bus_connected"]

    nats_links.play(tmp_path, story, LIMITED % "{user: other, password: secret}")


def test_of_several_servers_one_is_enough(tmp_path: Path) -> None:
    async def story(server: local.NatsServer) -> None:
        urls = f"nats://127.0.0.1:{local.free_port()},{server.url}"
        async with connection.Connection(urls, name="test") as link:
            assert (await link.client()).connected_url is not None

    nats_links.play(tmp_path, story)


@pytest.mark.parametrize("url", ["nats://127.0.0.1:99999", "nats://[::1", "nats://"])
def test_an_address_that_cannot_be_dialled_is_logged_and_tried_again(url: str) -> None:
    async def story() -> None:
        before = errors("Error")
        with capture_logs() as lines:
            async with asyncio.timeout(30), connection.Connection(url, name="test"):
                await nats_links.until(lambda: errors("Error") >= before + 2)
        assert logged_events(lines) == ["bus_disconnected"]
        assert "connect url" in lines[0]["error"]

    asyncio.run(story())


@pytest.mark.parametrize(
    "url",
    [
        "nats://127.0.0.1:4222",
        "nats://nats",
        "tls://u:p@nats.example.com:4222/",
        "nats://[::1]:4222",
        "nats://a:1,nats://b:2",
    ],
)
def test_an_address_of_nats_is_accepted(url: str) -> None:
    assert msgspec.convert({"url": url}, sections.Bus) == sections.Bus(url=url)


@pytest.mark.parametrize(
    "url",
    ["", "nats", "http://a", "nats://", "nats://a:b", "nats://a:1,", "nats://[::1", "nats://a b"],
)
def test_anything_but_an_address_of_nats_is_refused(url: str) -> None:
    with pytest.raises(msgspec.ValidationError, match="is not an address such as nats://host:4222"):
        msgspec.convert({"url": url}, sections.Bus)
