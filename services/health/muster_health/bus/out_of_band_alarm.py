"""Adapter: people without the bus: a Kubernetes Event on our pod, and one POST to a webhook.

For the one thing that cannot be told over NATS: that health does not hear NATS. Of each way the
newest word is tried until it was taken, refused, or is not the newest any more; nothing is queued.
"""

import asyncio
import contextlib
import http
import ssl
import urllib.parse
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from typing import Final

import msgspec
import prometheus_client

from muster.service import logs
from muster_health.model import config, signals

Post = Callable[[str, object], Awaitable[str]]
"""Creates an object at a path of the Kubernetes API; returns what went wrong, or nothing."""

_TIMEOUT_S: Final = 5.0
_WAIT_S: Final = (1.0, 30.0)
_HEAD_BYTES_MAX: Final = 64 * 1024

_TOLD: Final = prometheus_client.Counter(
    "muster_health_alarms_total", "Words sent past the bus, by way and outcome.", ["way", "outcome"]
)


class _Refused(Exception):
    """It was taken by nobody and never will be."""


class Alarms:
    """Tells of `signals.Alarm`; `name` is ours. `run` it, and `tell` it."""

    def __init__(self, settings: config.Blind, *, name: str, post: Post | None) -> None:
        self._settings = settings
        self._name = name
        self._post = post
        self._newest: signals.Alarm | None = None
        self._changed = asyncio.Condition()
        self._at = datetime.now(UTC)

    @property
    def ways(self) -> tuple[str, ...]:
        """Return by which ways people can be told; none is worth saying so."""
        event = ("event",) if self._post is not None and self._settings.namespace else ()
        return (*event, *(("webhook",) if self._settings.webhook_url else ()))

    async def tell(self, alarm: signals.Alarm) -> None:
        """Tell people this, without waiting for them; what was said before is out of date."""
        logs.logger().warning("blind" if alarm.firing else "sees_again", summary=alarm.summary)
        async with self._changed:
            self._newest, self._at = alarm, datetime.now(UTC)
            self._changed.notify_all()

    async def run(self) -> None:
        """Tell for ever."""
        sends = {"event": self._send_event, "webhook": self._send_webhook}
        async with asyncio.TaskGroup() as tasks:
            for way in self.ways:
                tasks.create_task(self._work(way, sends[way]))
            await asyncio.Event().wait()

    async def _work(self, way: str, send: Callable[[signals.Alarm], Awaitable[None]]) -> None:
        done: signals.Alarm | None = None
        while True:
            async with self._changed:
                while self._newest is done:
                    await self._changed.wait()
                done = self._newest
            assert done is not None, "changed to nothing"
            await self._deliver(way, send, done)

    async def _deliver(
        self, way: str, send: Callable[[signals.Alarm], Awaitable[None]], alarm: signals.Alarm
    ) -> None:
        wait_s, problem = _WAIT_S[0], ""
        while self._newest is alarm:
            try:
                async with asyncio.timeout(_TIMEOUT_S):
                    await send(alarm)
            except _Refused as error:
                _TOLD.labels(way, "refused").inc()
                logs.logger().error("alarm_refused", way=way, error=str(error))
                return
            except (OSError, TimeoutError, EOFError, ValueError) as error:
                _TOLD.labels(way, "failed").inc()
                if not problem:
                    problem = str(error) or type(error).__name__
                    logs.logger().warning("alarm_waits", way=way, error=problem)
            else:
                _TOLD.labels(way, "taken").inc()
                logs.logger().info("alarm_taken", way=way, firing=alarm.firing)
                return
            async with self._changed:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(wait_s):
                        await self._changed.wait_for(lambda: self._newest is not alarm)
            wait_s = min(_WAIT_S[1], 2 * wait_s)

    async def _send_event(self, alarm: signals.Alarm) -> None:
        assert self._post is not None, "no way"
        namespace, pod = self._settings.namespace, self._settings.pod
        at = self._at.strftime("%Y-%m-%dT%H:%M:%SZ")
        about = {"kind": "Pod", "name": pod} if pod else {"kind": "Namespace", "name": namespace}
        problem = await self._post(
            f"/api/v1/namespaces/{namespace}/events",
            {
                "kind": "Event",
                "apiVersion": "v1",
                "metadata": {"generateName": "muster-health-", "namespace": namespace},
                "involvedObject": {"apiVersion": "v1", "namespace": namespace, **about},
                "type": "Warning" if alarm.firing else "Normal",
                "reason": "HealthBlind" if alarm.firing else "HealthSees",
                "message": alarm.summary[:1024],
                "source": {"component": "muster-health"},
                "reportingComponent": "muster-health",
                "firstTimestamp": at,
                "lastTimestamp": at,
                "count": 1,
            },
        )
        if problem:
            refused = any(f"HTTP {status} " in problem for status in (400, 401, 403, 404, 422))
            raise _Refused(problem) if refused else OSError(problem)

    async def _send_webhook(self, alarm: signals.Alarm) -> None:
        body = msgspec.json.encode(
            {
                "kind": "blind",
                "state": "firing" if alarm.firing else "resolved",
                "summary": alarm.summary,
                "seconds": alarm.seconds,
                "service": "muster-health",
                "instance": self._name,
                "at": self._at,
            }
        )
        status = await _post(self._settings.webhook_url, body)
        # 3xx would need another URL; the setting is what is wrong then
        if status in {408, 429} or status >= http.HTTPStatus.INTERNAL_SERVER_ERROR:
            raise OSError(f"HTTP {status}")
        if not http.HTTPStatus.OK <= status < http.HTTPStatus.MULTIPLE_CHOICES:
            raise _Refused(f"HTTP {status}")


async def _post(url: str, body: bytes) -> int:
    """Return the status of one POST on a connection of its own; its answer's body is not read."""
    split = urllib.parse.urlsplit(url)
    tls = ssl.create_default_context() if split.scheme == "https" else None
    port = split.port or (443 if tls else 80)
    target = urllib.parse.quote(split.path or "/", safe="/%:@!$&'()*+,;=~")
    if split.query:
        target += "?" + urllib.parse.quote(split.query, safe="/?%:@!$&'()*+,;=~")
    head = (
        f"POST {target} HTTP/1.1\r\nHost: {split.netloc.rpartition('@')[2]}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n"
        "Connection: close\r\n\r\n"
    )
    reader, writer = await asyncio.open_connection(
        split.hostname, port, ssl=tls, limit=_HEAD_BYTES_MAX
    )
    try:
        writer.write(head.encode("latin-1") + body)
        with contextlib.suppress(ConnectionError):
            await writer.drain()
        first = (await reader.readuntil(b"\r\n")).decode("latin-1")
        version, status, *_ = [*first.split(" "), ""]
        if not version.startswith("HTTP/1."):
            raise ValueError("the answer is not HTTP")
        return int(status)
    finally:
        writer.transport.abort()
