"""The notifier's HTTP client against servers that answer in every way."""

import asyncio
import base64
import datetime as dt
import socket
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
import standardwebhooks

from muster import vocabulary
from muster.local import nats
from muster_notifier.config import receiver_settings
from muster_notifier.receivers import endpoint, message, results, webhook
from muster_notifier.receivers.results import Kind, Outcome, Result
from muster_notifier.routing import notifications

Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]

T0 = dt.datetime(2026, 1, 1, tzinfo=dt.UTC)
SENT = notifications.Notification(
    id="4711",
    receiver="ops",
    group="{}:{}",
    labels={},
    reason=vocabulary.NotificationReason.FIRST,
    firing=(),
    resolved=(),
    firing_ids=("é",),
    resolved_ids=(),
    episodes=(),
    send_resolved=True,
    at=T0,
)
BODY = webhook.encode_body(
    SENT, message.PLAIN.compose(SENT), format_=receiver_settings.Format.CLOUDEVENTS
)
LOOPBACK = receiver_settings.Reach.LOOPBACK


def site(url: str, timeout_s: float = 5.0) -> endpoint.Endpoint:
    return endpoint.Endpoint(url, timeout_s=timeout_s, reach=LOOPBACK)


async def send(serve: Serve, *, path: str = "/hook", timeout_s: float = 5.0) -> Result:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await serve(reader, writer)
        finally:
            writer.close()

    async with asyncio.timeout(30), await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        hook = webhook.Webhook(site(f"http://u:p%40@127.0.0.1:{port}{path}", timeout_s))
        got = await hook.send(SENT, {})
        return Result(
            outcome=got.outcome,
            detail=got.detail.replace(str(port), "PORT"),
            retry_after_s=got.retry_after_s,
        )


def saying(text: bytes) -> Serve:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        await reader.readexactly(len(BODY))
        writer.write(text)
        await writer.drain()

    return serve


def test_the_request_is_one_post_with_the_key_by_which_a_repeat_can_be_dropped() -> None:
    got = bytearray()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        got.extend(await reader.readuntil(b"\r\n\r\n"))
        got.extend(await reader.readexactly(len(BODY)))
        writer.write(b"HTTP/1.1 204 No Content\r\n\r\n")

    answer = asyncio.run(send(serve, path="/hook/ä?x=1&y=a b#z"))
    assert answer == Result(outcome=Outcome.ACCEPTED, detail="HTTP 204")
    head, _, body = bytes(got).partition(b"\r\n\r\n")
    first, *rest = head.decode().split("\r\n")
    assert first == "POST /hook/%C3%A4?x=1&y=a%20b HTTP/1.1"
    headers = dict(line.split(": ", 1) for line in rest)
    assert headers.pop("Host").startswith("127.0.0.1:")
    assert headers.pop("User-Agent").startswith("muster-notifier/")
    assert headers == {
        "Authorization": "Basic dTpwQA==",
        "Content-Type": "application/cloudevents+json; charset=utf-8",
        "Content-Length": str(len(BODY)),
        "Idempotency-Key": "4711",
        "Connection": "close",
    }
    assert body == BODY


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (b"HTTP/1.1 200 OK\r\n\r\n", Result(outcome=Outcome.ACCEPTED, detail="HTTP 200")),
        (
            b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.0 202 Accepted\r\n\r\n",
            Result(outcome=Outcome.ACCEPTED, detail="HTTP 202"),
        ),
        (
            b"HTTP/1.1 302 Found\r\nLocation: http://169.254.169.254/\r\n\r\n",
            Result(outcome=Outcome.REDIRECTED, detail="HTTP 302 to http://169.254.169.254"),
        ),
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", Result(outcome=Outcome.REJECTED, detail="HTTP 400")),
        (
            b"HTTP/1.1 429 Too Many Requests\r\nRetry-After: 3\r\n\r\n",
            Result(outcome=Outcome.RATE_LIMITED, detail="HTTP 429", retry_after_s=3.0),
        ),
        (b"HTTP/1.1 500\r\n\r\n", Result(outcome=Outcome.SERVER_ERROR, detail="HTTP 500")),
        (
            b"SSH-2.0-OpenSSH_9.2\r\n\r\n",
            Result(
                outcome=Outcome.INVALID_RESPONSE, detail="127.0.0.1:PORT: the answer is not HTTP"
            ),
        ),
        (
            b"HTTP/1.1 2OO OK\r\n\r\n",
            Result(
                outcome=Outcome.INVALID_RESPONSE, detail="127.0.0.1:PORT: the answer is not HTTP"
            ),
        ),
        (
            b"HTTP/1.1 200 OK\r\n" + b"X: " + b"x" * 200_000,
            Result(
                outcome=Outcome.INVALID_RESPONSE, detail="127.0.0.1:PORT: the answer is not HTTP"
            ),
        ),
        (
            b"HTTP/1.1 200 OK\r\n",
            Result(
                outcome=Outcome.CLOSED,
                detail="127.0.0.1:PORT: closed the connection without an answer",
            ),
        ),
    ],
)
def test_each_answer_has_one_meaning(text: bytes, answer: Result) -> None:
    assert asyncio.run(send(saying(text))) == answer


def test_a_receiver_that_does_not_answer_costs_no_more_than_the_timeout() -> None:
    async def serve(reader: asyncio.StreamReader, _: asyncio.StreamWriter) -> None:
        await reader.read()

    assert asyncio.run(send(serve, timeout_s=0.2)) == Result(
        outcome=Outcome.TIMED_OUT, detail="127.0.0.1:PORT: no answer within 0.2 s"
    )


def test_a_body_without_an_end_is_not_read() -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 1000000\r\n\r\nslow")
        await writer.drain()
        await reader.read()

    assert asyncio.run(send(serve)).kind is Kind.ACCEPTED


def test_nobody_there_is_a_temporary_failure_that_names_host_and_port_only() -> None:
    port = nats.free_port()
    hook = webhook.Webhook(site(f"http://127.0.0.1:{port}/secret-token"))
    answer = asyncio.run(hook.send(SENT, {}))
    assert answer.kind is results.Kind.TEMPORARY
    assert f":{port}" in answer.detail
    assert "secret" not in answer.detail


def test_plain_http_as_an_answer_to_tls_is_a_temporary_failure() -> None:
    async def story() -> Result:
        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.read(100)
            writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
            await writer.drain()
            writer.close()

        async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
            port = server.sockets[0].getsockname()[1]
            return await webhook.Webhook(site(f"https://127.0.0.1:{port}")).send(SENT, {})

    assert asyncio.run(story()).kind is Kind.TEMPORARY


@pytest.mark.parametrize(
    "url", ["http://host:99999/", "http://[::1/", f"http://{'a' * 64}.example"]
)
def test_a_url_that_cannot_be_is_refused(url: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        site(url)


def test_a_signed_body_is_verified_by_an_independent_library_under_either_secret() -> None:
    got = bytearray()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        got.extend(await reader.readuntil(b"\r\n\r\n"))
        got.extend(await reader.readexactly(len(BODY)))
        writer.write(b"HTTP/1.1 204 No Content\r\n\r\n")
        await writer.drain()
        writer.close()

    secrets = ["whsec_" + base64.b64encode(bytes([byte]) * 32).decode() for byte in (1, 2)]

    async def story() -> Result:
        async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
            port = server.sockets[0].getsockname()[1]
            keys = [webhook.signing_key(secret) for secret in secrets]
            hook = webhook.Webhook(site(f"http://127.0.0.1:{port}"), keys=keys)
            return await hook.send(SENT, {})

    assert asyncio.run(story()).kind is Kind.ACCEPTED
    head, _, body = bytes(got).partition(b"\r\n\r\n")
    headers = dict(line.lower().split(": ", 1) for line in head.decode().split("\r\n")[1:])
    signed = {
        name: line.split(": ", 1)[1]
        for line in head.decode().split("\r\n")[1:]
        if (name := line.split(": ", 1)[0]).startswith("webhook-")
    }
    assert headers["webhook-id"] == SENT.id
    for secret in secrets:
        standardwebhooks.Webhook(secret).verify(body, signed)
    with pytest.raises(standardwebhooks.WebhookVerificationError):
        standardwebhooks.Webhook(secrets[0]).verify(body + b" ", signed)


@pytest.mark.parametrize("secret", ["whsec_!", "whsec_" + base64.b64encode(b"short").decode()])
def test_an_invalid_signing_secret_is_refused_without_being_shown(secret: str) -> None:
    with pytest.raises(ValueError, match="signing secret") as refused:
        webhook.signing_key(secret)
    assert secret not in str(refused.value)


@pytest.mark.parametrize(
    ("url", "reach", "why"),
    [
        ("http://127.0.0.1:9/", "public", "127.0.0.1 is this machine; to allow that, set `reach`"),
        ("http://[::1]:9/", "private", "::1 is this machine; to allow that, set `reach`"),
        ("http://10.0.0.1/", "public", "10.0.0.1 is private; to allow that, set `reach`"),
        ("http://[fd00::1]/", "public", "fd00::1 is private; to allow that, set `reach`"),
        ("http://100.64.0.1/", "public", "100.64.0.1 is private; to allow that, set `reach`"),
        ("http://169.254.169.254/", "loopback", "169.254.169.254 is link-local"),
        ("http://[fe80::1]/", "loopback", "fe80::1 is link-local"),
        ("http://[fd00:ec2::254]/", "private", "fd00:ec2::254 is link-local"),
        ("http://[::ffff:169.254.169.254]/", "loopback", "::ffff:169.254.169.254 is link-local"),
        ("http://[64:ff9b::a9fe:a9fe]/", "loopback", "64:ff9b::a9fe:a9fe is link-local"),
        ("http://[64:ff9b:1:a9fe:a9:fe00::]/", "loopback", "64:ff9b:1:a9fe:a9:fe00:: is link-loc"),
        ("http://[fd20:ce::254]/", "loopback", "fd20:ce::254 is link-local"),
        ("http://[fec0::1]/", "loopback", "fec0::1 is not the address of one machine"),
        ("http://0.0.0.0/", "loopback", "0.0.0.0 is not the address of one machine"),
        ("http://localhost:9/", "public", " is this machine"),
    ],
)
def test_a_url_does_not_lead_where_it_must_not(url: str, reach: str, why: str) -> None:
    guarded = endpoint.Endpoint(url, timeout_s=2, reach=receiver_settings.Reach(reach))
    answer = asyncio.run(webhook.Webhook(guarded).send(SENT, {}))
    assert answer.kind is Kind.REFUSED
    assert why in answer.detail


def test_a_name_that_answers_otherwise_between_check_and_connection_gains_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The name is looked up once: the address that was checked is connected to."""

    async def story() -> tuple[Result, int]:
        lookups = 0
        look_up = socket.getaddrinfo

        def getaddrinfo(*about: Any, **more: Any) -> Any:
            nonlocal lookups
            lookups += about[0] == "rebinding.example"
            address = "127.0.0.1" if lookups == 1 else "169.254.169.254"
            return look_up(address, *about[1:], **more)

        # in place of a name server, which may be that of an attacker
        monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
            await writer.drain()
            writer.close()

        async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
            port = server.sockets[0].getsockname()[1]
            hook = webhook.Webhook(site(f"http://rebinding.example:{port}"))
            first = await hook.send(SENT, {})
            assert (await hook.send(SENT, {})).kind is Kind.REFUSED
            return first, lookups

    first, lookups = asyncio.run(story())
    assert (first.kind, lookups) == (Kind.ACCEPTED, 2)
