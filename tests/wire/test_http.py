"""The HTTP client: the addresses it connects to, how much it reads, and its errors."""

import asyncio
import contextlib
import socket
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any

import pytest

from muster import http
from muster.local import nats

Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"


class Server:
    """A server that answers every connection in the same way, and counts them."""

    def __init__(self, serve: Serve) -> None:
        self._serve = serve
        self.port = 0
        self.connections = 0
        self.head = b""
        self.tasks: set[asyncio.Task[None] | None] = set()

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        self.tasks.add(asyncio.current_task())
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            self.head = await reader.readuntil(b"\r\n\r\n")
            await self._serve(reader, writer)
        writer.transport.abort()


def saying(text: bytes, *, after: int = 0) -> Serve:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readexactly(after)
        writer.write(text)
        await writer.drain()
        await reader.read()

    return serve


@contextlib.asynccontextmanager
async def server(serve: Serve, host: str = "127.0.0.1", port: int = 0) -> AsyncIterator[Server]:
    made = Server(serve)
    async with await asyncio.start_server(made.answer, host, port) as listening:
        made.port = listening.sockets[0].getsockname()[1]
        yield made
        # the client has closed its connections by now
        await asyncio.gather(*filter(None, made.tasks))


def endpoint(url: str, *, timeout_s: float = 5.0, check: http.Check | None = None) -> http.Endpoint:
    return http.Endpoint(url, timeout_s=timeout_s, user_agent="muster-test/1", check=check)


def refuse(*forbidden: str) -> http.Check:
    def check(addresses: Sequence[str]) -> str | None:
        bad = [address for address in addresses if address in forbidden]
        return f"{bad[0]} is forbidden" if bad else None

    return check


def answer_lookups(monkeypatch: pytest.MonkeyPatch, *answers: list[str]) -> list[str]:
    """Answer each look-up of a name with the next of `answers`; return the list of names."""
    names: list[str] = []
    look_up = socket.getaddrinfo

    def getaddrinfo(host: str, *about: Any, **more: Any) -> Any:
        with contextlib.suppress(OSError):
            return look_up(host, *about, **more | {"flags": socket.AI_NUMERICHOST})
        names.append(host)
        addresses = answers[min(len(names), len(answers)) - 1]
        return [info for address in addresses for info in look_up(address, *about, **more)]

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    return names


def test_a_name_that_is_answered_otherwise_the_second_time_never_leads_to_the_second_address(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def story() -> None:
        names = answer_lookups(monkeypatch, ["127.0.0.1"], ["127.0.0.2"])
        async with (
            asyncio.timeout(30),
            server(saying(OK)) as allowed,
            server(saying(OK), "127.0.0.2", allowed.port) as forbidden,
        ):
            url = f"http://rebinding.example:{allowed.port}"
            site = endpoint(url, check=refuse("127.0.0.2"))
            assert (await site.request("GET")).body == b"ok"
            # one look-up for each request: the address that was checked was connected to
            assert names == ["rebinding.example"]
            with pytest.raises(http.ForbiddenAddress, match=r"127\.0\.0\.2 is forbidden"):
                await site.request("GET")
            assert (allowed.connections, forbidden.connections) == (1, 0)

    asyncio.run(story())


def test_one_forbidden_address_of_several_is_enough_to_connect_to_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def story() -> None:
        answer_lookups(monkeypatch, ["127.0.0.1", "127.0.0.2"])
        async with asyncio.timeout(30), server(saying(OK)) as allowed:
            url = f"http://two.example:{allowed.port}"
            with pytest.raises(http.ForbiddenAddress):
                await endpoint(url, check=refuse("127.0.0.2")).request("GET")
            assert allowed.connections == 0

    asyncio.run(story())


@pytest.mark.parametrize("host", ["127.0.0.2", "[::1]", "0x7f.2"])
def test_an_address_in_the_url_is_checked_too(host: str) -> None:
    async def story() -> None:
        async with asyncio.timeout(30), server(saying(OK), "127.0.0.2") as forbidden:
            site = endpoint(f"http://{host}:{forbidden.port}", check=refuse("127.0.0.2", "::1"))
            with pytest.raises(http.ForbiddenAddress):
                await site.request("GET")
            assert forbidden.connections == 0

    asyncio.run(story())


def test_an_address_that_does_not_answer_leaves_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    async def story() -> None:
        answer_lookups(monkeypatch, ["127.0.0.3", "127.0.0.1"])
        async with asyncio.timeout(30), server(saying(OK)) as allowed:
            response = await endpoint(f"http://two.example:{allowed.port}").request("GET")
            assert response.status == 200

    asyncio.run(story())


def test_redirects_are_answers_and_proxies_of_the_environment_are_not_used(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def story() -> None:
        async with asyncio.timeout(30), server(saying(OK)) as other:
            elsewhere = f"http://127.0.0.1:{other.port}"
            for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
                monkeypatch.setenv(name, elsewhere)
            location = f"Location: {elsewhere}/x\r\nContent-Length: 0\r\n\r\n"
            moved = f"HTTP/1.1 307 Moved\r\n{location}".encode()
            async with server(saying(moved)) as target:
                response = await endpoint(f"http://127.0.0.1:{target.port}").request("POST")
            assert (response.status, response.headers["location"]) == (307, f"{elsewhere}/x")
            assert other.connections == 0

    asyncio.run(story())


def test_the_request_has_no_header_that_nobody_asked_for() -> None:
    async def story() -> None:
        async with asyncio.timeout(30), server(saying(OK, after=2)) as target:
            site = endpoint(f"http://u:p%40@127.0.0.1:{target.port}/ä?x=1&y=a b#z")
            await site.request("POST", below="/b", headers={"X-A": "one\r\ntwo"}, body=b"{}")
            assert sorted(target.head.decode().strip().split("\r\n")) == [
                "Authorization: Basic dTpwQA==",
                "Connection: close",
                "Content-Length: 2",
                f"Host: 127.0.0.1:{target.port}",
                "POST /%C3%A4/b?x=1&y=a%20b HTTP/1.1",
                "User-Agent: muster-test/1",
                "X-A: one two",
            ]

    asyncio.run(story())


@pytest.mark.parametrize("head", [b"Content-Length: 1000000\r\n", b"", b"Content-Encoding: br\r\n"])
def test_of_a_body_only_the_beginning_is_read(head: bytes) -> None:
    async def story() -> None:
        text = b"HTTP/1.1 200 OK\r\n" + head + b"\r\n" + b"x" * 200_000
        async with asyncio.timeout(30), server(saying(text)) as target:
            response = await endpoint(f"http://127.0.0.1:{target.port}").request("GET")
            assert response.body == b"x" * http.BODY_BYTES_MAX

    asyncio.run(story())


def test_a_body_that_does_not_end_is_read_for_a_moment_of_a_refusal_and_never_of_a_success() -> (
    None
):
    async def story() -> None:
        bad = b"HTTP/1.1 400 Bad\r\nContent-Length: 9\r\n\r\nno"
        async with asyncio.timeout(30), server(saying(bad)) as target:
            response = await endpoint(f"http://127.0.0.1:{target.port}").request(
                "POST", read=http.Read.REFUSAL
            )
            assert (response.status, response.body) == (400, b"")
        good = b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nye"
        async with asyncio.timeout(30), server(saying(good)) as target:
            for read in (http.Read.REFUSAL, http.Read.NOTHING):
                site = endpoint(f"http://127.0.0.1:{target.port}", timeout_s=0.5)
                assert (await site.request("POST", read=read)).status == 200

    asyncio.run(story())


@pytest.mark.filterwarnings("ignore:Sending a large body:ResourceWarning")
def test_a_server_that_refuses_early_and_reads_no_further_has_answered() -> None:
    async def story() -> None:
        answered = asyncio.Event()

        async def serve(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(b"HTTP/1.1 413 Too Large\r\nContent-Length: 0\r\n\r\n")
            await writer.drain()
            await answered.wait()

        async with asyncio.timeout(30), server(serve) as target:
            site = endpoint(f"http://127.0.0.1:{target.port}")
            response = await site.request("POST", body=b"x" * 50_000_000)
            answered.set()
            assert response.status == 413

    asyncio.run(story())


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (b"SSH-2.0-OpenSSH_9.2\r\n\r\n", ValueError),
        (b"HTTP/1.1 2OO OK\r\n\r\n", ValueError),
        (b"HTTP/1.1 200 OK\r\n" + b"X: " + b"x" * 200_000, ValueError),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nless", EOFError),
        (b"HTTP/1.1 200 OK\r\n", EOFError),
        (b"", EOFError),
    ],
)
def test_an_answer_that_is_none_may_have_been_one(text: bytes, reason: type[Exception]) -> None:
    async def story() -> None:
        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readexactly(2)
            writer.write(text)
            await writer.drain()
            writer.close()

        async with asyncio.timeout(30), server(serve) as target:
            with pytest.raises(http.Unanswered) as raised:
                await endpoint(f"http://127.0.0.1:{target.port}").request("POST", body=b"{}")
        assert isinstance(raised.value.reason, reason)
        assert raised.value.is_sent

    asyncio.run(story())


@pytest.mark.filterwarnings("ignore:Sending a large body:ResourceWarning")
def test_what_was_not_sent_whole_was_not_processed() -> None:
    async def story() -> None:
        is_over = asyncio.Event()

        async def serve(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.transport.pause_reading()  # type: ignore[attr-defined]  # sockets have it
            await is_over.wait()

        async with asyncio.timeout(30), server(serve) as target:
            for body, is_sent in ((b"{}", True), (b"x" * 50_000_000, False)):
                site = endpoint(f"http://127.0.0.1:{target.port}", timeout_s=0.3)
                with pytest.raises(http.Unanswered) as raised:
                    await site.request("POST", body=body)
                assert isinstance(raised.value.reason, TimeoutError)
                assert raised.value.is_sent is is_sent
            is_over.set()

    asyncio.run(story())


@pytest.mark.filterwarnings("ignore:Sending a large body:ResourceWarning")
def test_a_connection_that_is_reset_or_closed_while_sending_was_closed() -> None:
    async def story() -> None:
        async def reset(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.transport.abort()

        async def close(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.close()

        for serve in (reset, close):
            async with asyncio.timeout(30), server(serve) as target:
                for body in (b"", b"x" * 50_000_000):
                    with pytest.raises(http.Unanswered) as raised:
                        await endpoint(f"http://127.0.0.1:{target.port}").request("POST", body=body)
                    assert isinstance(raised.value.reason, (ConnectionError, EOFError))

    asyncio.run(story())


def test_a_name_may_end_with_a_dot_and_have_any_case(monkeypatch: pytest.MonkeyPatch) -> None:
    async def story() -> None:
        answer_lookups(monkeypatch, ["127.0.0.1"])
        async with asyncio.timeout(30), server(saying(OK)) as target:
            for host in ("name.example", "NAME.example", "Name.Example."):
                url = f"http://{host}:{target.port}"
                assert (await endpoint(url).request("GET")).status == 200

    asyncio.run(story())


def test_no_server_no_such_name_and_no_tls_each_have_their_error() -> None:
    async def story() -> None:
        with pytest.raises(http.Unanswered) as refused:
            await endpoint(f"http://127.0.0.1:{nats.free_port()}").request("GET")
        assert isinstance(refused.value.reason, ConnectionRefusedError)
        with pytest.raises(http.Unanswered) as unknown:
            await endpoint("http://no.such.host.invalid/").request("GET")
        assert isinstance(unknown.value.reason, socket.gaierror)
        assert not refused.value.is_sent
        async with asyncio.timeout(30), server(saying(OK)) as plain:
            with pytest.raises(http.Unanswered) as untrusted:
                await endpoint(f"https://127.0.0.1:{plain.port}", timeout_s=0.5).request("GET")
        assert isinstance(untrusted.value.reason, (ssl.SSLError, TimeoutError))

    asyncio.run(story())


@pytest.mark.parametrize(
    "url",
    ["http://host:99999/", "http://[::1/", f"http://{'a' * 64}.example", "ftp://host/", "http:///"],
)
def test_a_url_that_cannot_be_is_refused(url: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        endpoint(url)


@pytest.mark.parametrize("url", ["http://user:hunter2@ex\u2100.com/", "http://user:hunter2/"])
def test_a_password_in_a_refused_url_is_not_in_the_error(url: str) -> None:
    with pytest.raises(ValueError, match="URL") as refused:
        endpoint(url)
    assert "hunter2" not in str(refused.value)


@pytest.mark.parametrize("host", ["127.1", "2130706433", "0177.0.0.1", "1.2.3.4.5"])
def test_an_address_of_other_than_four_numbers_is_refused_at_once(host: str) -> None:
    with pytest.raises(ValueError, match="use four numbers from 0 to 255"):
        http.Endpoint(f"http://{host}:8080/", timeout_s=1.0, user_agent="test")
