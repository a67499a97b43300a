"""Adapter for HTTP: runs a webhook receiver that records its messages, and a notifier.

Each record is small: the time, the idempotency key, the group, the reason and the firing alerts.
"""

import asyncio
import contextlib
import datetime as dt
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import msgspec

from muster import vocabulary
from muster.local import nats, processes
from muster.nats import bus

T0: Final = dt.datetime(2026, 1, 1, tzinfo=dt.UTC)


class _Alert(msgspec.Struct):
    fingerprint: str
    state: str


class _Data(msgspec.Struct, rename="camel"):
    group_key: str
    reason: str
    status: str
    alerts: list[_Alert]
    truncated_alerts: int


class _Body(msgspec.Struct):
    data: _Data


@dataclass(frozen=True, slots=True)
class Taken:
    """One message that the receiver accepted."""

    at: float
    key: str
    group: str
    reason: str
    firing: frozenset[str]
    total: int


@dataclass
class Sink:
    """An HTTP receiver that answers after `delay_s`, or never if that is None."""

    delay_s: float | None = 0.0
    taken: list[Taken] = field(default_factory=list)
    url: str = ""
    changed: asyncio.Condition = field(default_factory=asyncio.Condition)

    async def wait_for(self, enough: Callable[[list[Taken]], bool], timeout_s: float) -> None:
        """Wait until the recorded messages fulfil a condition."""
        async with asyncio.timeout(timeout_s), self.changed:
            await self.changed.wait_for(lambda: enough(self.taken))

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Record and answer one request."""
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
            headers = dict(line.split(": ", 1) for line in head.strip().split("\r\n")[1:])
            body = await reader.readexactly(int(headers["content-length"]))
            if self.delay_s is None:
                await reader.read()
                return
            await asyncio.sleep(self.delay_s)
            data = msgspec.json.decode(body, type=_Body).data
            firing = frozenset(a.fingerprint for a in data.alerts if a.state == "firing")
            async with self.changed:
                self.taken.append(
                    Taken(
                        asyncio.get_running_loop().time(),
                        headers["idempotency-key"],
                        data.group_key,
                        data.reason,
                        firing,
                        len(data.alerts) + data.truncated_alerts,
                    )
                )
                self.changed.notify_all()
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")
            await writer.drain()
        except (asyncio.IncompleteReadError, OSError):
            pass  # the client was killed
        finally:
            writer.transport.abort()


@contextlib.asynccontextmanager
async def sink(delay_s: float | None = 0.0) -> AsyncIterator[Sink]:
    """Run a receiver; yield it."""
    made = Sink(delay_s)
    async with await asyncio.start_server(made.serve, "127.0.0.1", 0) as server:
        made.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/"
        yield made


class World:
    """A NATS server, a connection that publishes as health does, and a notifier to be started."""

    def __init__(self, directory: Path, server: nats.NatsServer, voice: bus.Bus) -> None:
        self.directory = directory
        directory.mkdir(parents=True, exist_ok=True)
        self.server = server
        self.voice = voice
        self.notifier: processes.Process | None = None

    async def start(self, sinks: dict[str, Sink], **settings: Any) -> processes.Process:
        """Start a notifier with these receivers; `limits` may contain limits for some of them."""
        limits = settings.pop("limits", {})
        file = self.directory / "notifier.json"
        receivers = [
            {
                "name": name,
                "webhook": {"url": sink.url, "reach": "loopback", "timeout_s": 30.0},
                "limits": limits.get(name, {}),
            }
            for name, sink in sinks.items()
        ]
        config = {"bus": {"url": self.server.url}, "receivers": receivers, **settings}
        config["watchdog"] = {"enabled": False}
        file.write_bytes(msgspec.json.encode(config))
        program = processes.Program("notifier", "muster_notifier", ("--config", str(file)))
        self.notifier = processes.Process(program, self.directory / "notifier.log")
        await self.notifier.start()
        return self.notifier

    async def says(
        self, number: int, state: str, *, node: str = "node-a", episode: int = 0
    ) -> None:
        """Publish an alert as health does."""
        starts_at = T0 + dt.timedelta(seconds=episode)
        firing = state == "firing"
        await self.voice.publish(
            vocabulary.AlertChanged(
                node=node,
                at=dt.datetime.now(dt.UTC),
                plugin="device-plugin",
                kind=vocabulary.AlertKind.STUCK,
                severity=vocabulary.Severity.CRITICAL,
                state=vocabulary.AlertState(state),
                fingerprint=f"{number:016x}",
                summary=f"device-plugin on {node} is stuck (episode {episode}): it does not answer",
                starts_at=starts_at,
                ends_at=None if firing else starts_at + dt.timedelta(seconds=1),
                evidence=(
                    vocabulary.Evidence(source="heartbeat", observed="silent for 12.5 s"),
                    vocabulary.Evidence(source="probe", observed="no answer within 2 s"),
                ),
                runbook="docs/runbooks/stuck.md",
            )
        )


@contextlib.asynccontextmanager
async def world(directory: Path) -> AsyncIterator[World]:
    """Run a NATS server; at the end, end the notifier that was started last."""
    async with (
        nats.NatsServer(directory / "nats") as server,
        bus.Bus(server.url, producer="services/health", name="health", owner=True) as voice,
    ):
        await voice.link.client()
        made = World(directory, server, voice)
        try:
            yield made
        finally:
            if made.notifier is not None:
                await made.notifier.end()
