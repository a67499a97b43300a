"""The adapter for the Kubernetes API: the choice of the cluster, and invalid answers."""

import asyncio
import contextlib
import json
import os
import pathlib
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable

import msgspec
import pytest

from muster.kubernetes import api as kubernetes_api
from muster.kubernetes import client, watch


def config(server: str, **user: object) -> dict[str, object]:
    return {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": server, "cluster": {"server": f"http://{server}"}}],
        "users": [{"name": server, "user": user}],
        "contexts": [{"name": server, "context": {"cluster": server, "user": server}}],
    }


def written(path: pathlib.Path, tree: object) -> str:
    path.write_text(json.dumps(tree))
    return str(path)


def server(kubeconfig: str, context: str | None = None) -> tuple[str, str | None]:
    async def address() -> tuple[str, str | None]:
        async with await kubernetes_api.find(
            kubeconfig=kubeconfig, context=context, timeout_s=1
        ) as api:
            return api.server, api.context

    return asyncio.run(address())


def test_of_several_kubeconfigs_the_existing_ones_count_and_the_first_context_as_with_kubectl(
    tmp_path: pathlib.Path,
) -> None:
    files = [
        written(tmp_path / "none", config("none")),
        str(tmp_path / "missing"),
        written(tmp_path / "a", {**config("a"), "current-context": "a"}),
        written(tmp_path / "b", {**config("b"), "current-context": "b"}),
    ]
    together = os.pathsep.join(files)
    assert server(together) == ("http://a", "a")
    assert server(together, "b") == ("http://b", "b")
    with pytest.raises(kubernetes_api.NoCluster, match="none of these files exists"):
        server(os.pathsep.join([str(tmp_path / "x"), str(tmp_path / "y")]))


PLUGIN = {"apiVersion": "client.authentication.k8s.io/v1", "interactiveMode": "Never"}


@pytest.mark.parametrize(
    ("command", "problem"),
    [
        ("echo", "failed to decode process output"),
        ("/no/such/program", "No such file or directory"),
        ("false", "process returned 1"),
    ],
)
def test_a_program_without_credentials_is_an_error_and_not_an_anonymous_user(
    tmp_path: pathlib.Path, command: str, problem: str
) -> None:
    user = {"exec": {**PLUGIN, "command": command}}
    file = written(tmp_path / "k", {**config("a", **user), "current-context": "a"})
    with pytest.raises(kubernetes_api.NoCluster, match=problem):
        server(file)


def test_a_program_that_hangs_is_not_waited_for(tmp_path: pathlib.Path) -> None:
    pid = tmp_path / "pid"
    script = f"echo $$ > {pid}; exec sleep 1000"
    user = {"exec": {**PLUGIN, "command": "sh", "args": ["-c", script]}}
    file = written(tmp_path / "k", {**config("a", **user), "current-context": "a"})
    # a separate process, since a program that the library has started cannot be ended in order
    words = ("check", "gpu", "--timeout", "3s", "--kubeconfig", file)
    command = [sys.executable, "-m", "muster.cli", *words]
    done = subprocess.run(command, check=False, capture_output=True, timeout=100)
    assert (done.returncode, done.stdout) == (3, b"")
    assert done.stderr.decode().endswith(f"kubernetes: {file}: no credentials within 3 s\n")
    with contextlib.suppress(ProcessLookupError):
        os.kill(int(pid.read_text()), 9)


@contextlib.asynccontextmanager
async def answering(answer: bytes) -> AsyncIterator[kubernetes_api.Api]:
    """Yield a client of an API that gives this answer to every request."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            await reader.readuntil(b"\r\n\r\n")
            writer.write(answer)
            await writer.drain()
        writer.close()

    async with serving(serve) as api:
        yield api


@contextlib.asynccontextmanager
async def serving(
    serve: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]],
) -> AsyncIterator[kubernetes_api.Api]:
    listening = await asyncio.start_server(serve, "127.0.0.1", 0)
    configuration = client.Configuration()
    port = listening.sockets[0].getsockname()[1]
    configuration.host = f"http://127.0.0.1:{port}"
    async with listening, kubernetes_api.Api(client.Where(configuration), attempts=1) as api:
        yield api


def http(body: bytes, *more: bytes, status: bytes = b"200 OK") -> bytes:
    head = (b"HTTP/1.1 " + status, b"Content-Length: %d" % len(body), b"Connection: close", *more)
    return b"\r\n".join(head) + b"\r\n\r\n" + body


def test_a_watch_that_the_server_never_accepts_is_lost_and_not_waited_for() -> None:
    async def hang(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.closing(writer):
            await reader.read()

    async def story() -> None:
        async with serving(hang) as api:
            lines = api.watch("/x", {}, idle_s=0.2)
            with pytest.raises(TimeoutError):
                await anext(lines)

    asyncio.run(asyncio.wait_for(story(), 5.0))


DEEP = b'{"items":' + b"[" * 200_000
UNREADABLE = [b"\xff\xfe{}", DEEP, b"<html>", b"", b"[]", b"null", b"{}", b'{"items":[{}]}']


async def listed(body: bytes) -> list[msgspec.Raw]:
    async with answering(http(body)) as api:
        return [item async for page in api.pages("/x", timeout_s=5) for item in page.items]


@pytest.mark.parametrize("number", range(len(UNREADABLE)))
def test_what_is_no_list_is_refused_and_no_crash(number: int) -> None:
    with pytest.raises(kubernetes_api.Refused, match="unreadable"):
        asyncio.run(listed(UNREADABLE[number]))


def test_of_a_list_each_object_is_read_by_itself() -> None:
    body = b'{"metadata":{"resourceVersion":"1"},"items":[{"name":"\xff"},{"name":"a"}]}'
    assert [bytes(item) for item in asyncio.run(listed(body))] == [
        b'{"name":"\xff"}',
        b'{"name":"a"}',
    ]


def test_a_body_without_end_is_not_read_to_its_end() -> None:
    async def story() -> kubernetes_api.Answer:
        async with endless() as api:
            return await api.request("GET", "/x", timeout_s=30)

    answer = asyncio.run(story())
    assert (answer.status, b"the body has more than" in answer.body) == (0, True)


@contextlib.asynccontextmanager
async def endless() -> AsyncIterator[kubernetes_api.Api]:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            await reader.readuntil(b"\r\n\r\n")
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 99999999999\r\n\r\n")
            while True:
                writer.write(b" " * 1024 * 1024)
                await writer.drain()
        writer.close()

    async with serving(serve) as api:
        yield api


@pytest.mark.parametrize(
    "date",
    [
        b"Sat, 21 Nov 2026 10:00:00 -0000",
        b"nonsense",
        b"99999999999",
        b"Sat, 21 Nov 99999999999999999999 10:00:00 GMT",
    ],
)
def test_an_odd_clock_is_no_crash(date: bytes) -> None:
    async def story() -> tuple[bool, bool]:
        async with answering(http(b"{}", b"Date: " + date)) as api:
            answer = await api.request("GET", "/x", timeout_s=5)
            now = api.now()
            return answer.is_ok, now is None or now.tzinfo is not None

    assert asyncio.run(story()) == (True, True)


@pytest.mark.parametrize(
    "after", [b"nan", b"-1", b"1e999", b"soon", b"Sat, 21 Nov 2026 10:00:00 GMT"]
)
def test_an_odd_retry_after_waits_no_longer_than_the_time_there_is(after: bytes) -> None:
    async def story() -> int:
        busy = http(b"{}", b"Retry-After: " + after, status=b"429 Too Many Requests")
        async with answering(busy) as api, asyncio.timeout(30):
            return (await api.request("GET", "/x", timeout_s=0.5, attempts=9)).status

    assert asyncio.run(story()) == 429


def test_an_attempt_that_the_deadline_cuts_short_does_not_hide_the_answer_before_it() -> None:
    answers = [http(b"{}", status=b"503 Service Unavailable")]

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.closing(writer):
            writer.writelines(answers)
            answers.clear()
            await reader.read()

    async def story() -> int:
        async with serving(serve) as api:
            return (await api.request("GET", "/x", timeout_s=1, attempts=9)).status

    assert asyncio.run(story()) == 503


LINES = [
    b'{"type":"ERROR","object":null}',
    b'{"type":"BOOKMARK","object":{"metadata":[]}}',
    b'{"type":"BOOKMARK","object":{"metadata":{"resourceVersion":"\xff"}}}',
    b'{"type":"ADDED","object":' + b"[" * 200_000,
    b"<html>",
    b'{"type":7}',
]


class _Shape(msgspec.Struct):
    metadata: dict[str, object]


def test_unreadable_lines_of_a_watch_are_left_out() -> None:
    objects: list[_Shape] = []
    good = b'{"type":"ADDED","object":{"metadata":{"name":"a","resourceVersion":"2"}}}'
    body = b"\n".join([*LINES, good, b""])

    async def story() -> None:
        done = asyncio.Event()

        def put(shape: _Shape) -> None:
            objects.append(shape)
            done.set()

        async with answering(http(body)) as api:
            sink = watch.Sink(lambda shape: shape, objects.extend, put, put)
            watched = watch.Reflector(api, "/x", _Shape, sink)
            # as after a list
            watched._version = "1"
            task = asyncio.create_task(watched.run())
            async with asyncio.timeout(30):
                await done.wait()
            assert not task.done()
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    asyncio.run(story())
    assert objects[0].metadata["name"] == "a"


def test_a_server_that_refuses_everybody_at_first_is_read_soon_after() -> None:
    refused = http(b'{"message":"clusterrole not found"}', status=b"403 Forbidden")
    empty = http(b'{"metadata":{"resourceVersion":"1"},"items":[]}')

    async def story() -> tuple[float, str]:
        answers = [refused, refused, empty]

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
                await reader.readuntil(b"\r\n\r\n")
                writer.write(answers.pop(0) if answers else http(b""))
                await writer.drain()
            writer.close()

        began = asyncio.get_running_loop().time()
        async with serving(serve) as api:
            nothing: watch.Sink[_Shape, _Shape] = watch.Sink(
                lambda shape: shape, lambda _: None, lambda _: None, lambda _: None
            )
            watched = watch.Reflector(api, "/x", _Shape, nothing)
            task = asyncio.create_task(watched.run())
            async with asyncio.timeout(30):
                await watched.listed.wait()
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        return asyncio.get_running_loop().time() - began, watched.problem

    waited_s, problem = asyncio.run(story())
    assert (waited_s < 10.0, problem) == (True, "")
