"""Receivers of notifications, and an HTTP server that records what they send to it."""

import asyncio
import contextlib
import datetime as dt
import pathlib
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import orjson

from muster import vocabulary
from muster.vocabulary import AlertState
from muster_notifier.config import receiver_settings, schema
from muster_notifier.receivers import factory
from muster_notifier.receivers.results import Result
from muster_notifier.routing import notifications
from muster_notifier.routing.notifications import Notification

T0 = dt.datetime(2026, 1, 1, 12, 0, tzinfo=dt.UTC)
LOOPBACK = receiver_settings.Reach.LOOPBACK
QUICK = receiver_settings.Limits(rate_per_s=1000)
GROUP = '{}:{kind="stuck",node="node-a"}'


def alert(
    name: str = "a", state: AlertState = AlertState.FIRING, **more: Any
) -> vocabulary.AlertChanged:
    """Return an alert about a stuck plugin on node-a."""
    about: dict[str, Any] = {
        "node": "node-a",
        "at": T0,
        "plugin": "device-plugin",
        "kind": vocabulary.AlertKind.STUCK,
        "severity": vocabulary.Severity.CRITICAL,
        "state": state,
        "fingerprint": f"{name:0>16}",
        "summary": "device-plugin <is> stuck",
        "starts_at": T0,
        "ends_at": T0 + dt.timedelta(minutes=5) if state is AlertState.RESOLVED else None,
        "pods": ("ml/train-0",),
        "evidence": (vocabulary.Evidence(source="probe", observed="no answer"),),
        "runbook": "https://runbooks.example/stuck.md",
    }
    return vocabulary.AlertChanged(**(about | more))


def make_notification(
    firing: Sequence[vocabulary.AlertChanged] = (),
    resolved: Sequence[vocabulary.AlertChanged] = (),
    reason: vocabulary.NotificationReason = vocabulary.NotificationReason.FIRST,
) -> Notification:
    """Return a notification about alerts of one group."""
    return notifications.create(
        after="",
        receiver="r",
        group=GROUP,
        labels={"kind": "stuck", "node": "node-a"},
        reason=reason,
        firing=firing,
        resolved=resolved,
        send_resolved=True,
        at=T0,
    )


FIRES = make_notification([alert()])


OVER = make_notification(
    resolved=[alert(state=AlertState.RESOLVED)], reason=vocabulary.NotificationReason.ALL_RESOLVED
)


@dataclass
class Fake:
    """An HTTP server that gives `responses` in order, and repeats the last one."""

    responses: list[tuple[int, dict[str, str], bytes]] = field(default_factory=list)
    got: list[tuple[str, dict[str, str], bytes]] = field(default_factory=list)
    url: str = ""

    def answer(self, status: int, body: Any = None, **headers: str) -> None:
        self.responses.append((status, headers, b"" if body is None else orjson.dumps(body)))

    def bodies(self) -> list[Any]:
        return [orjson.loads(body) for _, _, body in self.got]

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        first, *lines = head.strip().split("\r\n")
        headers = dict(line.lower().split(": ", 1) for line in lines)
        body = await reader.readexactly(int(headers["content-length"]))
        self.got.append((first.removesuffix(" HTTP/1.1"), headers, body))
        status, more, answer = (
            self.responses.pop(0) if len(self.responses) > 1 else self.responses[0]
        )
        shown = "".join(f"{name}: {value}\r\n" for name, value in more.items())
        writer.write(
            f"HTTP/1.1 {status} X\r\n{shown}Content-Length: {len(answer)}\r\n\r\n".encode()
        )
        writer.write(answer)
        await writer.drain()
        writer.close()


@contextlib.asynccontextmanager
async def fake() -> AsyncIterator[Fake]:
    """Serve HTTP on a free port; yield the server."""
    made = Fake()
    async with await asyncio.start_server(made.serve, "127.0.0.1", 0) as server:
        made.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        yield made


def sender(settings: schema.Settings | None = None, **way: Any) -> factory.Sender:
    """Return a receiver with this configuration."""
    return factory.make(receiver_settings.Receiver(name="r", **way), settings or schema.Settings())


def send(receiver: factory.Sender, notification: Notification) -> Result:
    """Send a notification without data of an earlier one; return the result."""

    async def sent() -> Result:
        return await receiver.send(notification, {})

    return asyncio.run(sent())


def play(story: Callable[[Fake], Awaitable[None]]) -> None:
    """Run `story` with a new HTTP server, for at most 100 s."""

    async def played() -> None:
        async with asyncio.timeout(100), fake() as server:
            await story(server)

    asyncio.run(played())


def secret(directory: pathlib.Path, text: str) -> receiver_settings.Secret:
    """Write a secret to a file; return the setting that refers to it."""
    file = directory / f"secret-{len(text)}"
    file.write_text(text + "\n")
    return receiver_settings.Secret(file=str(file))


TITLE = "node-a: device-plugin <is> stuck; 1 pod holds devices, new pods fail"
