"""Probes and metrics over real sockets, also with clients that misbehave."""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager

import msgspec
import prometheus_client
import pytest

from muster.service import probes, runtime

Story = Callable[["Served"], Awaitable[None]]


class Served:
    """A server of probes with a private registry; `wrong` is the problem that makes it unready."""

    def __init__(self) -> None:
        self.wrong: str | None = None
        self.registry = prometheus_client.CollectorRegistry()
        self.port = 0

    def problem(self) -> str | None:
        return self.wrong

    async def ask(self, request: bytes) -> bytes:
        """Return the whole answer to what is sent; empty if the connection was closed."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        try:
            writer.write(request)
            return await reader.read()
        except ConnectionError:
            return b""
        finally:
            writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()

    async def get(self, path: str) -> tuple[int, bytes]:
        head, _, body = (await self.ask(f"GET {path} HTTP/1.1\r\n\r\n".encode())).partition(
            b"\r\n\r\n"
        )
        return int(head.split()[1]), body


def play(story: Story) -> None:
    async def played() -> None:
        served = Served()
        more = {"/state": lambda: (200, "application/json", b"{}")}
        async with (
            asyncio.timeout(20),
            probes.serve(
                "127.0.0.1",
                0,
                ready=served.problem,
                registry=served.registry,
                more=more,
                queried={"/echo": lambda fields: (200, "", msgspec.json.encode(fields))},
            ) as url,
        ):
            served.port = int(url.removeprefix("http://127.0.0.1:"))
            await story(served)

    asyncio.run(played())


def test_a_service_is_ready_while_it_has_no_problem_and_always_alive() -> None:
    async def story(served: Served) -> None:
        assert await served.get("/readyz") == (200, b"ok\n")
        served.wrong = "kubelet away for 3 s"
        assert await served.get("/readyz") == (503, b"kubelet away for 3 s\n")
        assert await served.get("/healthz") == (200, b"ok\n")
        served.wrong = None
        assert await served.get("/readyz?verbose") == (200, b"ok\n")

    play(story)


def test_metrics_are_prometheus_text() -> None:
    async def story(served: Served) -> None:
        prometheus_client.Counter("cats", "Cats seen.", registry=served.registry).inc(3)
        status, body = await served.get("/metrics")
        assert status == 200
        assert b"cats_total 3.0\n" in body

    play(story)


def test_a_service_can_add_routes() -> None:
    async def story(served: Served) -> None:
        assert await served.ask(b"GET /state HTTP/1.1\r\n\r\n") == (
            b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n"
            b"Content-Length: 2\r\nConnection: close\r\n\r\n{}"
        )

    play(story)


def test_a_route_can_receive_the_fields_of_a_query() -> None:
    async def story(served: Served) -> None:
        assert await served.get("/echo") == (200, b"{}")
        assert await served.get("/echo?node=a%20b&x=") == (200, b'{"node":"a b","x":""}')
        too_many = "&".join(["a=1"] * 11)
        assert (await served.get(f"/echo?{too_many}"))[0] == 400

    play(story)


def test_head_is_get_without_the_body() -> None:
    async def story(served: Served) -> None:
        assert await served.ask(b"HEAD /healthz HTTP/1.1\r\n\r\n") == (
            b"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\n"
            b"Content-Length: 3\r\nConnection: close\r\n\r\n"
        )

    play(story)


@pytest.mark.parametrize(
    ("request_line", "status"),
    [
        (b"GET / HTTP/1.1", b"404 Not Found"),
        (b"GET /healthz/ HTTP/1.1", b"404 Not Found"),
        (b"GET /../healthz HTTP/1.1", b"404 Not Found"),
        (b"GET http://x/healthz HTTP/1.1", b"404 Not Found"),
        (b"POST /healthz HTTP/1.1", b"405 Method Not Allowed"),
        (b"DELETE /metrics HTTP/1.1", b"405 Method Not Allowed"),
        (b"\xff\xfe\x00", b"404 Not Found"),
        (b"", b"404 Not Found"),
        (b"GET", b"404 Not Found"),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc", b"404 Not Found"),
    ],
)
def test_anything_else_is_answered_with_an_error(request_line: bytes, status: bytes) -> None:
    async def story(served: Served) -> None:
        answer = await served.ask(request_line + b"\r\n\r\n")
        assert answer.startswith(b"HTTP/1.1 " + status + b"\r\n")
        assert await served.get("/healthz") == (200, b"ok\n")

    play(story)


@pytest.mark.parametrize("request_head", [b"GET /" + b"a" * 200_000, b"a" * 10_000 + b"\r\n\r\n"])
def test_a_huge_request_head_ends_its_connection(request_head: bytes) -> None:
    async def story(served: Served) -> None:
        assert await served.ask(request_head) == b""
        assert await served.get("/healthz") == (200, b"ok\n")

    play(story)


@asynccontextmanager
async def opened(served: Served, count: int, sent: Sequence[bytes]) -> AsyncIterator[None]:
    """Open connections that send what is given, and then nothing; they never read."""
    loop = asyncio.get_running_loop()
    with contextlib.ExitStack() as clients:
        for number in range(count):
            client = clients.enter_context(socket.socket())
            client.settimeout(0)
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            await loop.sock_connect(client, ("127.0.0.1", served.port))
            await loop.sock_sendall(client, sent[number % len(sent)])
        yield


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Raise the timeout for slow clients, so that a test that waits for it never ends."""
    monkeypatch.setattr(probes, "_REQUEST_TIMEOUT_S", 3600)


@pytest.mark.usefixtures("patient")
def test_half_open_and_slow_clients_do_not_keep_others_waiting() -> None:
    async def story(served: Served) -> None:
        sent = [b"", b"GET /heal", b"GET /metrics HTTP/1.1\r\n"]
        async with opened(served, 200, sent), asyncio.timeout(60):
            assert await served.get("/healthz") == (200, b"ok\n")

    play(story)


def large(registry: prometheus_client.CollectorRegistry) -> None:
    dogs = prometheus_client.Counter("dogs", "Dogs.", ["name"], registry=registry)
    for number in range(4_000):
        dogs.labels(f"{number:0900}")


@pytest.mark.usefixtures("patient")
def test_a_client_that_never_reads_its_answer_does_not_keep_others_waiting() -> None:
    async def story(served: Served) -> None:
        large(served.registry)
        async with opened(served, 2, [b"GET /metrics HTTP/1.1\r\n\r\n"]), asyncio.timeout(60):
            assert await served.get("/healthz") == (200, b"ok\n")

    play(story)


@pytest.mark.usefixtures("patient")
def test_the_server_ends_at_once_with_clients_of_any_kind_still_there() -> None:
    async def story() -> None:
        served = Served()
        large(served.registry)
        async with (
            asyncio.timeout(60),
            contextlib.AsyncExitStack() as clients,
            probes.serve("127.0.0.1", 0, ready=probes.always, registry=served.registry) as url,
        ):
            served.port = int(url.rpartition(":")[2])
            sent = [b"", b"GET /heal", b"GET /metrics HTTP/1.1\r\n\r\n"]
            await clients.enter_async_context(opened(served, 9, sent))
            assert await served.get("/healthz") == (200, b"ok\n")

    asyncio.run(story())


def test_a_port_in_use_is_reported_with_its_address() -> None:
    async def story(served: Served) -> None:
        with pytest.raises(runtime.CannotStart, match=f"{served.port}: Address already in use"):
            async with probes.serve("127.0.0.1", served.port, ready=probes.always):
                pass

    play(story)
