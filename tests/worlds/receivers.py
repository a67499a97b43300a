"""Adapter for HTTP and SMTP: runs stand-ins for the services that receive notifications.

All record messages in the same form: node, episode, whether the alert fires, and whether the
message had an effect or was dropped as a repeat. Node and episode are read from the text that
`tests.worlds.webhook_sink` writes into every alert.
"""

import asyncio
import contextlib
import re
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from email import message_from_bytes, policy
from pathlib import Path
from typing import Any, Final

import aiosmtpd.smtp
import msgspec

IDEMPOTENT: Final = ("webhook", "pagerduty", "alertmanager", "kubernetes")
"""The services that drop a repeat, by a key or because it changes nothing."""
REPEATING: Final = ("slack", "email")
"""The services that show every message, repeats included."""

_OF_NATS: Final = "NATS can"
_TEXT: Final = re.compile(r"on (node-\d+) is stuck \(episode (\d+)\)")

Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Heard:
    """One message that a service received; `is_effect` is false if it was dropped as a repeat."""

    way: str
    node: str
    episode: int
    fires: bool
    is_effect: bool

    @property
    def news(self) -> tuple[str, str, int, bool]:
        """Return what makes two messages repeats of each other."""
        return self.way, self.node, self.episode, self.fires


@dataclass
class Services:
    """The stand-ins for all services, on one HTTP and one SMTP server."""

    heard: list[Heard] = field(default_factory=list)
    url: str = ""
    smtp_port: int = 0
    changed: asyncio.Condition = field(default_factory=asyncio.Condition)
    _keys: set[str] = field(default_factory=set)
    _incidents: dict[str, tuple[str, int]] = field(default_factory=dict)
    _alerts: dict[str, tuple[int, bool]] = field(default_factory=dict)
    _messages: int = 0

    def known(self, way: str) -> dict[str, bool]:
        """Return, by node, whether its alert fires according to the last effective message."""
        return {
            message.node: message.fires
            for message in self.heard
            if message.way == way and message.is_effect
        }

    async def wait_for(self, enough: Callable[["Services"], bool], timeout_s: float) -> None:
        """Wait until the recorded messages fulfil a condition."""
        async with asyncio.timeout(timeout_s), self.changed:
            await self.changed.wait_for(lambda: enough(self))

    async def take(self, heard: Heard) -> None:
        """Record one message."""
        async with self.changed:
            self.heard.append(heard)
            self.changed.notify_all()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer one request."""
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            first, *lines = head.strip().split("\r\n")
            headers = dict(line.lower().split(": ", 1) for line in lines)
            body = await reader.readexactly(int(headers["content-length"]))
            status, answer = await self._answer(first.split(" ")[1], headers, body)
            writer.write(f"HTTP/1.1 {status} X\r\nContent-Length: {len(answer)}\r\n\r\n".encode())
            writer.write(answer)
            await writer.drain()
        except (asyncio.IncompleteReadError, OSError):
            pass  # the client was killed
        finally:
            writer.transport.abort()

    async def _answer(
        self, path: str, headers: Mapping[str, str], body: bytes
    ) -> tuple[int, bytes]:
        payload = msgspec.json.decode(body)
        match path.split("/")[1]:
            case "webhook":
                await self._webhook(payload, headers["idempotency-key"])
            case "pagerduty":
                await self._pagerduty(payload)
                return 202, b"{}"
            case "alertmanager":
                for alert in payload:
                    await self._alertmanager(alert)
            case "kubernetes":
                return await self._kubernetes(payload), b"{}"
            case "slack":
                return 200, msgspec.json.encode(await self._slack(path, payload))
            case other:
                raise AssertionError(f"nobody is at /{other}")
        return 200, b""

    async def _webhook(self, payload: Json, key: str) -> None:
        node, episode = _about(payload["data"]["title"])
        fires = payload["data"]["status"] == "firing"
        await self.take(Heard("webhook", node, episode, fires, key not in self._keys))
        self._keys.add(key)

    async def _pagerduty(self, payload: Json) -> None:
        """Record an event: a trigger opens the incident with its key, unless that is open."""
        key = payload["dedup_key"]
        if payload["event_action"] == "trigger":
            node, episode = _about(payload["payload"]["summary"])
            is_effect = key not in self._incidents
            self._incidents.setdefault(key, (node, episode))
            await self.take(Heard("pagerduty", node, episode, fires=True, is_effect=is_effect))
        elif key in self._incidents:
            node, episode = self._incidents.pop(key)
            await self.take(Heard("pagerduty", node, episode, fires=False, is_effect=True))

    async def _alertmanager(self, alert: Json) -> None:
        node, episode = _about(alert["annotations"]["summary"])
        fires = datetime.fromisoformat(alert["endsAt"]) > datetime.now(UTC)
        is_effect = self._alerts.get(node) != (episode, fires)
        self._alerts[node] = (episode, fires)
        await self.take(Heard("alertmanager", node, episode, fires, is_effect))

    async def _kubernetes(self, event: Json) -> int:
        node, episode = _about(event["note"])
        fires = not event["reason"].endswith("Resolved")
        name = event["metadata"]["name"]
        await self.take(Heard("kubernetes", node, episode, fires, name not in self._keys))
        if name in self._keys:
            return 409
        self._keys.add(name)
        return 201

    async def _slack(self, path: str, payload: Json) -> Json:
        """Record a message or a reply in a thread; edits of messages are not recorded."""
        if path.endswith("chat.update"):
            return {"ok": True, "ts": payload["ts"], "channel": payload["channel"]}
        node, episode = _about(payload["text"])
        await self.take(Heard("slack", node, episode, _fires(payload["text"]), is_effect=True))
        self._messages += 1
        return {"ok": True, "ts": f"{self._messages}.0", "channel": "C1"}

    async def handle_DATA(self, _server: Any, _session: Any, envelope: Any) -> str:  # noqa: N802  # aiosmtpd's name
        """Record a mail."""
        subject = str(message_from_bytes(envelope.content, policy=policy.default)["Subject"])
        node, episode = _about(subject)
        await self.take(Heard("email", node, episode, _fires(subject), is_effect=True))
        return "250 OK"

    def receivers(self, secret: Path) -> list[Json]:
        """Write a secret, and return a notifier's settings of receivers for all services."""
        secret.write_text("a token of the bench")
        here: Json = {"reach": "loopback", "timeout_s": 30.0}
        limits: Json = {"limits": {"rate_per_s": 1000, "burst": 100}}
        mail: Json = {"host": "127.0.0.1", "port": self.smtp_port, "tls": "none"}
        mail |= {"sender": "muster@example.com", "to": ["ops@example.com"]}
        token: Json = {"file": str(secret)}
        ways: Json = {
            "webhook": {"url": f"{self.url}/webhook", **here},
            "slack": {"token_from": token, "channel": "#a", "url": f"{self.url}/slack", **here},
            "pagerduty": {"routing_key_from": token, "url": f"{self.url}/pagerduty", **here},
            "alertmanager": {"url": f"{self.url}/alertmanager", **here},
            "kubernetes": {},
            "email": mail,
        }
        return [{"name": way, way: options, **limits} for way, options in ways.items()]


@contextlib.asynccontextmanager
async def services() -> AsyncIterator[Services]:
    """Run all stand-ins; yield them."""
    made = Services()
    loop = asyncio.get_running_loop()

    def protocol() -> aiosmtpd.smtp.SMTP:
        return aiosmtpd.smtp.SMTP(made, enable_SMTPUTF8=True)

    smtp = await loop.create_server(protocol, "127.0.0.1", 0)
    try:
        async with await asyncio.start_server(made.serve, "127.0.0.1", 0) as server:
            made.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
            made.smtp_port = smtp.sockets[0].getsockname()[1]
            yield made
    finally:
        smtp.close()
        await asyncio.sleep(0)


def _fires(title: str) -> bool:
    return "Resolved after" not in title


def _about(text: str) -> tuple[str, int]:
    if _OF_NATS in text:
        return "nats", 0
    match = _TEXT.search(text)
    assert match is not None, f"nobody said: {text}"
    return match[1], int(match[2])
