"""The webhook receiver, over HTTP and as a process."""

import asyncio
import pathlib
import signal
import socket
import subprocess
import sys
from collections.abc import Awaitable, Callable

import aiohttp
import orjson
import pytest

from muster.local import webhook

Story = Callable[[webhook.WebhookReceiver, aiohttp.ClientSession], Awaitable[None]]


def play(story: Story, file: pathlib.Path | None = None) -> None:
    async def played() -> None:
        async with (
            asyncio.timeout(100),
            webhook.WebhookReceiver(file=file) as receiver,
            aiohttp.ClientSession(receiver.url) as http,
        ):
            await story(receiver, http)

    asyncio.run(played())


async def post(http: aiohttp.ClientSession, path: str, body: bytes, **headers: str) -> int:
    async with http.post(path, data=body, headers=headers) as response:
        return response.status


def test_what_is_posted_to_any_path_is_kept_with_its_headers(tmp_path: pathlib.Path) -> None:
    file = tmp_path / "received.jsonl"

    async def story(receiver: webhook.WebhookReceiver, http: aiohttp.ClientSession) -> None:
        assert await post(http, "/hooks/a", b'{"alert": "x"}', Signature="abc") == 200
        assert await post(http, "/", b"not json \xff") == 200
        async with http.get("/received") as response:
            received = await response.json()
        assert [(r["index"], r["path"], r["body"], r["status"]) for r in received] == [
            (0, "/hooks/a", {"alert": "x"}, 200),
            (1, "/", "not json \ufffd", 200),
        ]
        assert received[0]["headers"]["signature"] == "abc"
        async with http.get("/received?since=1") as response:
            assert [r["index"] for r in await response.json()] == [1]
        assert [r.body for r in receiver.received()] == ['{"alert": "x"}', "not json \ufffd"]
        assert [orjson.loads(line) for line in file.read_bytes().splitlines()] == received

    play(story, file)


def test_a_long_poll_answers_as_soon_as_there_is_more() -> None:
    async def story(receiver: webhook.WebhookReceiver, http: aiohttp.ClientSession) -> None:
        async def poll() -> object:
            async with http.get("/received?since=0&wait=20") as response:
                return await response.json()

        waiting = asyncio.create_task(poll())
        async with http.get("/received?wait=0.01") as response:
            assert await response.json() == []
        await post(http, "/a", b"1")
        received = await waiting
        assert isinstance(received, list)
        assert [r["body"] for r in received] == [1]
        assert len(await receiver.wait_for(lambda kept: len(kept) == 1, timeout_s=30)) == 1

    play(story)


def test_the_next_answers_are_as_requested() -> None:
    async def story(receiver: webhook.WebhookReceiver, http: aiohttp.ClientSession) -> None:
        order = {"status": 503, "times": 2, "delay_s": 0.01, "headers": {"Retry-After": "7"}}
        async with http.post("/behave", json=order) as response:
            assert response.status == 204
        async with http.post("/a", data=b"1") as response:
            assert (response.status, response.headers["Retry-After"]) == (503, "7")
        assert await post(http, "/a", b"2") == 503
        assert await post(http, "/a", b"3") == 200
        assert [r.status for r in receiver.received()] == [503, 503, 200]

    play(story)


@pytest.mark.parametrize(
    ("body", "text"),
    [
        (b"{", "truncated"),
        (b'{"status": "x"}', "Expected `int`, got `str` - at `$.status`"),
        (b'{"state": 500}', "unknown field `state`"),
        (b'{"status": 700}', "Expected `int` <= 599 - at `$.status`"),
        (b'{"times": -1}', "Expected `int` >= 0 - at `$.times`"),
        (b'{"delay_s": 1e9}', "delay_s"),
        (b'{"headers": {"a": "b\\r\\nc: d"}}', "printable"),
    ],
)
def test_a_behaviour_out_of_range_is_refused(body: bytes, text: str) -> None:
    async def story(_: webhook.WebhookReceiver, http: aiohttp.ClientSession) -> None:
        async with http.post("/behave", data=body) as response:
            assert response.status == 400
            assert text in await response.text()
        async with http.get("/received?since=x") as response:
            assert response.status == 400

    play(story)


def test_the_last_thousand_are_kept_and_large_bodies_refused() -> None:
    async def story(receiver: webhook.WebhookReceiver, http: aiohttp.ClientSession) -> None:
        assert await post(http, "/a", b"x" * (webhook.BODY_BYTES_MAX + 1)) == 413
        for _ in range(webhook.KEPT_MAX + 5):
            await post(http, "/a", b"")
        kept = receiver.received()
        assert (len(kept), kept[0].index) == (webhook.KEPT_MAX, 5)

    play(story)


def start(*arguments: str) -> "subprocess.Popen[bytes]":
    command = [sys.executable, "-m", "muster.local.webhook", *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_process_prints_its_address_and_ends_cleanly(number: signal.Signals) -> None:
    with start() as process:
        assert process.stdout is not None
        line = orjson.loads(process.stdout.readline())
        port = int(line["http"].rpartition(":")[2])
        assert line == {
            "event": "listening",
            "service": "webhook",
            "http": f"http://127.0.0.1:{port}",
        }
        with socket.create_connection(("127.0.0.1", port)) as waiting:
            waiting.sendall(b"GET /received?wait=30 HTTP/1.1\r\nHost: x\r\n\r\n")
            process.send_signal(number)
            rest, errors = process.communicate(timeout=30)
    assert (process.returncode, rest, errors) == (0, b"", b"")


def test_a_usage_error_is_one_line() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        mistakes = {
            ("--http", f"127.0.0.1:{port}"): f"cannot listen on 127.0.0.1:{port}: ",
            ("--http", "nonsense"): "'nonsense' is not host:port",
            ("--file", "/nowhere/f"): "cannot write /nowhere/f: No such file or directory",
            ("--fiel", "x"): "unrecognized arguments: --fiel x",
        }
        processes = {arguments: start(*arguments) for arguments in mistakes}
        for arguments, process in processes.items():
            with process:
                output, errors = process.communicate(timeout=30)
            assert (process.returncode, output) == (2, b"")
            assert mistakes[arguments] in errors.decode()
            assert errors.count(b"\n") == 1
