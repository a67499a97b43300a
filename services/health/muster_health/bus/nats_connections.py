"""Adapter: NATS: receives nats-server's advisories about connecting and disconnecting clients.

Whether any arrive depends on the server's configuration (docs/health.md), and a server that sends
none does not say so. Therefore we open a second connection now and then, and check that it is
reported. Advisories can be lost: they only ever raise a suspicion.
"""

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Final

import prometheus_client

from muster.service import logs
from muster_health.bus import nats_advisories

_REPORTED_WITHIN_S: Final = 2.0
_CHECK_S: Final = 300.0
_RETRY_S: Final = 30.0

_ADVISORIES: Final = prometheus_client.Counter(
    "muster_health_advisories_total", "Advisories received from nats-server, by kind.", ["kind"]
)
_FLOWING: Final = prometheus_client.Gauge(
    "muster_health_advisories_flowing",
    "1 while nats-server reports connections; otherwise a crash is only noticed by missing "
    "heartbeats.",
)

Handler = Callable[[str, bytes], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Link:
    """What is needed of the bus: `Bus.listen`, `Connection.probe_connect`, `.changes`."""

    listen: Callable[[str, Handler], Awaitable[None]]
    probe_connect: Callable[[str, float], Awaitable[bool]]
    changes: Callable[[], AsyncIterator[bool]]


class ConnectionMonitor:
    """Passes connections that nats-server reports to `put`; `name` identifies this process."""

    def __init__(
        self, link: Link, put: Callable[[nats_advisories.Advisory], Awaitable[None]], *, name: str
    ) -> None:
        self.is_flowing: bool | None = None
        """Whether advisories arrive; None if unknown (at the start or without NATS)."""
        self._link = link
        self._put = put
        self._name = name
        self._numbers = itertools.count(1)
        self._test_client = ""
        self._test_reported = asyncio.Event()

    @property
    def problem(self) -> str:
        """Why advisories do not arrive; empty if they do, or if that is unknown."""
        if self.is_flowing is not False:
            return ""
        return (
            "nats-server does not report connections: a crash is only noticed by missing "
            "heartbeats; docs/health.md has the account configuration that is missing"
        )

    async def run(self) -> None:
        """Receive advisories forever."""
        for subject in nats_advisories.SUBJECTS:
            await self._link.listen(subject, self._receive)
        async with asyncio.TaskGroup() as tasks:
            checking: asyncio.Task[None] | None = None
            async for is_connected in self._link.changes():
                if checking is not None:
                    checking.cancel()
                self._set(flowing=None)
                if is_connected:
                    checking = tasks.create_task(self._check())

    async def _receive(self, subject: str, payload: bytes) -> None:
        try:
            advisory = nats_advisories.decode(subject, payload)
        except nats_advisories.Unreadable:
            _ADVISORIES.labels("unreadable").inc()
            return
        if not isinstance(advisory, nats_advisories.OtherClient):
            _ADVISORIES.labels(type(advisory).__name__.lower()).inc()
            await self._put(advisory)
            return
        _ADVISORIES.labels("other").inc()
        if advisory.is_connected and advisory.name == self._test_client:
            self._test_reported.set()

    async def _check(self) -> None:
        """Check again and again whether NATS reports a test connection of ours."""
        while True:
            self._test_reported.clear()
            self._test_client = f"{self._name} #{next(self._numbers)}"
            if await self._link.probe_connect(self._test_client, _REPORTED_WITHIN_S):
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(_REPORTED_WITHIN_S):
                        await self._test_reported.wait()
                self._set(flowing=self._test_reported.is_set())
            await asyncio.sleep(_CHECK_S if self.is_flowing else _RETRY_S)

    def _set(self, *, flowing: bool | None) -> None:
        was, self.is_flowing = self.is_flowing, flowing
        _FLOWING.set(bool(flowing))
        if flowing is False and was is not False:
            logs.logger().warning("advisories_missing", problem=self.problem)
