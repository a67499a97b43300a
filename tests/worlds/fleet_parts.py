"""The parts of a fleet: its periods, a cable to NATS, a plugin process, what health published."""

import asyncio
import contextlib
import os
import signal
import socket
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Final, TypeVar

import orjson

from muster import vocabulary
from muster.local import processes
from muster.nats import bus, consumers, streams
from muster.vocabulary import AlertChanged, AlertState, Verdict, VerdictChanged

AnyPublications = TypeVar("AnyPublications", bound="Publications")

PROGRAM: Final = Path(__file__).resolve().parents[1] / "programs" / "sabotaged.py"


@dataclass(frozen=True, kw_only=True)
class Pace:
    """The periods of all parts, in seconds; `health` are health's settings.

    With `checks_s` 0 a plugin keeps the default periods of its own checks.
    """

    beat_s: float = 5.0
    checks_s: float = 0.0
    status_s: float = 10.0
    lease_s: float = 10.0
    ping_s: float = 5.0
    readiness_s: float = 5.0
    readiness_timeout_s: float = 2.0
    readiness_failures: int = 2
    slow_s: float = 10.0
    """The period in which a throttled process is suspended and continued once."""
    health: Mapping[str, Mapping[str, object]] = field(default_factory=dict)


NO_MASS_FAILURE: Final = {"storm_min": 1_000_000}
"""Many plugins fail at once here without a common cause: that must not count as a mass failure."""
PRODUCTION: Final = Pace(
    health={
        "detection": {**NO_MASS_FAILURE, "patience_s": 0},
        "bounds": {"alerts_per_minute": 100_000, "alerts_per_node_minute": 10_000},
    }
)
"""The default periods, and those of the NATS server in k8s/, but alerts without delay."""
FAST: Final = Pace(
    beat_s=0.5,
    checks_s=3.0,
    status_s=1.0,
    lease_s=1.0,
    ping_s=1.0,
    readiness_s=1.0,
    readiness_timeout_s=1.0,
    readiness_failures=2,
    slow_s=1.5,
    health={
        "detection": {
            **NO_MASS_FAILURE,
            "interval_s": 0.5,
            "suspicion_beats": 10,
            "probe_timeout_s": 1.0,
            "restart_s": 1.0,
            "lease_stale_s": 4.0,
            "ready_s": 6.0,
            "review_s": 2.0,
            "trouble_beats": 6,
            "mismatch_s": 8.0,
            "checker_age_s": 8.0,
            "degraded_s": 2.0,
            "lag_ms": 200,
            "recover_s": 3.0,
            "hold_s": 1.0,
            "patience_s": 4.0,
            "missing_s": 4.0,
            "reconnect_s": 2.0,
            "skew_s": 60,
        },
        "bounds": {"alerts_per_minute": 1_000, "alerts_per_node_minute": 100},
        "leading": {"ttl_s": 2, "renew_s": 0.5, "margin_s": 0.5, "watchdog_s": 0.5},
    },
)
"""About a tenth of PRODUCTION, for tests; not less, because a busy machine delays processes."""


class Cable:
    """A proxy to NATS; after `cut` no data passes and no connection is closed."""

    def __init__(self, port: int) -> None:
        self.url = ""
        self._port = port
        self._whole = asyncio.Event()
        self._whole.set()
        self._open: set[asyncio.StreamWriter] = set()
        self._server: asyncio.Server | None = None

    async def open(self) -> None:
        self._server = await asyncio.start_server(self._carry, "127.0.0.1", 0)
        self.url = f"nats://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    def cut(self) -> None:
        self._whole.clear()

    def restore(self) -> None:
        """Abort the old connections, with the data in them, and let new ones through."""
        self._drop()
        self._whole.set()

    async def close(self) -> None:
        assert self._server is not None
        self._server.close()
        self._drop()
        await self._server.wait_closed()

    def _drop(self) -> None:
        for writer in self._open:
            writer.transport.abort()

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._open.add(writer)
        try:
            await self._whole.wait()
            far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self._port)
            self._open.add(far_writer)
            await asyncio.gather(self._pump(reader, far_writer), self._pump(far_reader, writer))
        except OSError:
            pass
        finally:
            self._open.discard(writer)
            writer.transport.abort()

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while data := await reader.read(65_536):
                await self._whole.wait()
                writer.write(data)
        finally:
            self._open.discard(writer)
            writer.transport.abort()


class PluginForker:
    """The process that forks plugins; see `tests/programs/sabotaged.py`."""

    def __init__(self, log: Path, *, checks_s: float) -> None:
        self._log = log
        self._checks_s = checks_s
        self._requests, self._theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._requests.setblocking(False)  # noqa: FBT003
        self._lock = asyncio.Lock()
        self._process: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        with self._log.open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                *(sys.executable, str(PROGRAM), str(self._theirs.fileno())),
                pass_fds=[self._theirs.fileno()],
                stderr=log,
                env=os.environ
                | {"MUSTER_TEST_PERIOD_S": str(self._checks_s), "GRPC_ENABLE_FORK_SUPPORT": "0"},
            )
        self._theirs.close()

    async def make(self, config: Path, pipe: socket.socket) -> int:
        """Return the process id of a new plugin."""
        async with self._lock:
            socket.send_fds(self._requests, [str(config).encode()], [pipe.fileno()])
            return int(await asyncio.get_running_loop().sock_recv(self._requests, 64))

    async def close(self) -> None:
        self._requests.close()
        if self._process is not None:
            await self._process.wait()


class Plugin:
    """One plugin process; its log is also written to a file."""

    def __init__(self, nursery: PluginForker, config: Path, log: Path) -> None:
        self.http = ""
        self.config = config
        self._nursery = nursery
        self._log = log
        self._pid = 0
        self._writer: asyncio.StreamWriter | None = None
        self._reading: asyncio.Task[None] | None = None
        self._listening = asyncio.Event()
        self._sabotaged = asyncio.Event()

    @property
    def is_running(self) -> bool:
        return self._reading is not None and not self._reading.done()

    async def start(self) -> None:
        """Start the process, and return when it listens."""
        assert not self.is_running, "one at a time"
        self._listening.clear()
        ours, theirs = socket.socketpair()
        with theirs:
            self._pid = await self._nursery.make(self.config, theirs)
        reader, self._writer = await asyncio.open_connection(sock=ours)
        self._reading = asyncio.create_task(self._read(reader, self._writer))
        await _until_listening(self._listening, self._reading, self._log)

    def send(self, number: signal.Signals) -> None:
        if self.is_running:
            os.kill(self._pid, number)

    async def end(self, number: signal.Signals = signal.SIGKILL) -> None:
        self.send(number)
        if self._reading is not None:
            await self._reading

    async def sabotage(self, command: str, value: float) -> None:
        """Send the process a command by which it sabotages itself; return when it is done."""
        assert self._writer is not None, "started"
        self._sabotaged.clear()
        self._writer.write(f"{command} {value}\n".encode())
        await self._sabotaged.wait()

    async def is_ready(self, timeout_s: float) -> bool:
        """Return whether the plugin is ready, probed as by a kubelet."""
        with contextlib.suppress(OSError, TimeoutError, ValueError):
            async with asyncio.timeout(timeout_s):
                return await _answer(self.http, "/readyz") == b"ok\n"
        return False

    async def _read(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with self._log.open("ab") as log, contextlib.suppress(ConnectionResetError):
            while line := await reader.readline():
                log.write(line)
                log.flush()
                record = orjson.loads(line)
                if record["event"] == "listening":
                    self.http = record["http"]
                    self._listening.set()
                elif record["event"] == "sabotaged":
                    self._sabotaged.set()
        writer.transport.abort()


class Service:
    """A program that logs when it is listening; it can be started repeatedly."""

    def __init__(self, module: str, arguments: Sequence[str], log: Path) -> None:
        self.http = ""
        self._module = module
        self._arguments = arguments
        self._log = log
        self._process: asyncio.subprocess.Process | None = None
        self._reading: asyncio.Task[None] | None = None
        self._listening = asyncio.Event()

    async def start(self) -> None:
        """Start the program, and return when it listens."""
        await self.launch()
        assert self._reading is not None, "launched"
        await _until_listening(self._listening, self._reading, self._log)

    async def launch(self) -> None:
        """Start the program, without waiting for anything."""
        self._listening.clear()
        with self._log.open("ab") as log:
            # no preexec_fn: with gRPC's threads it is unsafe to run code between fork and exec
            self._process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", self._module, *self._arguments),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=log,
                limit=1024 * 1024,
            )
        assert self._process.stdout is not None, "a pipe"
        self._reading = asyncio.create_task(self._read(self._process.stdout))

    async def get(self, path: str) -> bytes:
        """Return its answer, once it listens. Raises OSError if it no longer does."""
        await self._listening.wait()
        return await _answer(self.http, path)

    def send(self, number: signal.Signals) -> None:
        assert self._process is not None, "started"
        processes.send(self._process, number)

    async def end(self, number: signal.Signals = signal.SIGTERM) -> int | None:
        """End the program, if it was started; return its exit code once it has ended."""
        if self._process is None or self._reading is None:
            return None
        self.send(number)
        self.send(signal.SIGCONT)
        await self._reading
        return await self._process.wait()

    async def _read(self, stdout: asyncio.StreamReader) -> None:
        with self._log.open("ab") as log:
            while line := await stdout.readline():
                log.write(line)
                log.flush()
                record = orjson.loads(line)
                if record["event"] == "listening":
                    self.http = record["http"]
                    self._listening.set()


class Publications:
    """All published verdicts and alerts with their arrival times, and the number of heartbeats."""

    def __init__(self, connected: bus.Bus) -> None:
        self.events: list[tuple[float, vocabulary.Event]] = []
        self.heartbeats: Counter[str] = Counter()
        self.bus = connected
        self._changed = asyncio.Condition()

    async def follow(self) -> None:
        filters = ["muster.verdict.>", "muster.alert.>"]
        since = datetime(2000, 1, 1, tzinfo=UTC)
        await self.bus.heartbeats(self._count)
        async for event in consumers.follow(
            self.bus.link, streams.ALERTS, filters=filters, since=since
        ):
            async with self._changed:
                self.events.append((time.monotonic(), event.data))
                self._changed.notify_all()

    async def until(self, enough: Callable[[], bool]) -> None:
        async with self._changed:
            await self._changed.wait_for(enough)

    async def _count(self, heartbeat: vocabulary.Heartbeat) -> None:
        async with self._changed:
            self.heartbeats[heartbeat.node] += 1
            self._changed.notify_all()


class PublicationsByNode(Publications):
    """All published verdicts and alerts, with queries by node."""

    def verdicts(self, node: str, *, since: float = 0.0) -> list[tuple[float, VerdictChanged]]:
        return [
            (at, e)
            for at, e in self.events
            if isinstance(e, VerdictChanged) and e.node == node and at >= since
        ]

    def alerts(self, node: str, *, since: float = 0.0) -> list[tuple[float, AlertChanged]]:
        return [
            (at, e)
            for at, e in self.events
            if isinstance(e, AlertChanged) and e.node == node and at >= since
        ]

    def verdict(self, node: str) -> Verdict | None:
        """Return the current verdict."""
        verdicts = self.verdicts(node)
        return verdicts[-1][1].verdict if verdicts else None

    def firing(self, node: str) -> list[AlertChanged]:
        """Return the firing alerts, as last published."""
        last = {alert.fingerprint: alert for _, alert in self.alerts(node)}
        return [alert for alert in last.values() if alert.state is AlertState.FIRING]


def following_by_node(url: str) -> contextlib.AbstractAsyncContextManager[PublicationsByNode]:
    """Follow all past and new publications, for queries by node."""
    return following(url, PublicationsByNode)


@contextlib.asynccontextmanager
async def following(url: str, kind: type[AnyPublications]) -> AsyncIterator[AnyPublications]:
    """Follow all past and new publications; yield an object of class `kind`."""
    async with bus.Bus(url, producer="tests/flow", name="test", owner=True) as connected:
        publications = kind(connected)
        task = asyncio.create_task(publications.follow())
        try:
            yield publications
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


async def _until_listening(
    listening: asyncio.Event, reading: asyncio.Task[None], log: Path
) -> None:
    """Return when a process has logged that it is listening."""
    waiting = asyncio.create_task(listening.wait())
    await asyncio.wait([waiting, reading], return_when=asyncio.FIRST_COMPLETED)
    waiting.cancel()
    assert not reading.done(), f"it ended: {log.read_text()[-2000:]}"


async def _answer(http: str, path: str) -> bytes:
    host, _, port = http.removeprefix("http://").partition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        writer.write(f"GET {path} HTTP/1.1\r\n\r\n".encode())
        _, _, body = (await reader.read()).partition(b"\r\n\r\n")
        return body
    finally:
        writer.transport.abort()
