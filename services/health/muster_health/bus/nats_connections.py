"""Adapter: nats-server's advisories: who connects to the bus, who leaves it, which server ends.

Whether they come at all depends on the server's configuration (docs/health.md), and a server that
sends none says nothing about it. So we open a second connection of our own now and then, and look
whether we are told. Events can be lost: they only ever raise a suspicion.
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

_TOLD_WITHIN_S: Final = 2.0
_LOOK_AGAIN_S: Final = 300.0
_LOOK_SOON_S: Final = 30.0

_TOLD: Final = prometheus_client.Counter(
    "muster_health_advisories_total", "What nats-server told of connections, by kind.", ["kind"]
)
_FLOWING: Final = prometheus_client.Gauge(
    "muster_health_advisories_flowing",
    "1 while nats-server tells us of connections; without, a crash is noticed by silence only.",
)

Handler = Callable[[str, bytes], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Link:
    """What of the bus is needed: `Bus.listen`, `Connection.probe_connect`, `Connection.changes`."""

    listen: Callable[[str, Handler], Awaitable[None]]
    probe_connect: Callable[[str, float], Awaitable[bool]]
    changes: Callable[[], AsyncIterator[bool]]


class Connections:
    """Puts what nats-server tells of plugins into `put`; `name` is ours, and nobody else's."""

    def __init__(
        self, link: Link, put: Callable[[nats_advisories.Told], Awaitable[None]], *, name: str
    ) -> None:
        self.is_flowing: bool | None = None
        """Whether advisories come; None is not known (yet, or while NATS is away)."""
        self._link = link
        self._put = put
        self._name = name
        self._numbers = itertools.count(1)
        self._awaited = ""
        self._heard = asyncio.Event()

    @property
    def problem(self) -> str:
        """Say what we cannot do, in words; empty if all is well or not known."""
        if self.is_flowing is not False:
            return ""
        return (
            "nats-server tells nothing of connections: a crash is noticed by silence only; "
            "docs/health.md has the accounts' configuration that is missing"
        )

    async def run(self) -> None:
        """Listen for ever."""
        for subject in nats_advisories.SUBJECTS:
            await self._link.listen(subject, self._take)
        async with asyncio.TaskGroup() as tasks:
            looking: asyncio.Task[None] | None = None
            async for is_there in self._link.changes():
                if looking is not None:
                    looking.cancel()
                self._set(flowing=None)
                if is_there:
                    looking = tasks.create_task(self._look())

    async def _take(self, subject: str, payload: bytes) -> None:
        try:
            told = nats_advisories.decode(subject, payload)
        except nats_advisories.Unreadable:
            _TOLD.labels("unreadable").inc()
            return
        _TOLD.labels(type(told).__name__.lower()).inc()
        if not isinstance(told, nats_advisories.Other):
            await self._put(told)
        elif told.is_there and told.name == self._awaited:
            self._heard.set()

    async def _look(self) -> None:
        """See whether we are told of a connection that we make."""
        while True:
            self._heard.clear()
            self._awaited = f"{self._name} #{next(self._numbers)}"
            if await self._link.probe_connect(self._awaited, _TOLD_WITHIN_S):
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(_TOLD_WITHIN_S):
                        await self._heard.wait()
                self._set(flowing=self._heard.is_set())
            await asyncio.sleep(_LOOK_AGAIN_S if self.is_flowing else _LOOK_SOON_S)

    def _set(self, *, flowing: bool | None) -> None:
        was, self.is_flowing = self.is_flowing, flowing
        _FLOWING.set(bool(flowing))
        if flowing is False and was is not False:
            logs.logger().warning("advisories_missing", problem=self.problem)
