"""Adapter: leadership: one notifier acts while it holds the lock, others wait to take over.

Two at once would each receive half of the alerts, and forget the other half. A notifier that has
acted and finds that another holds the lock ends.
"""

import asyncio
from types import TracebackType
from typing import Self

import prometheus_client

from muster import leadership
from muster.nats import lock
from muster.service import logs

_ACTS = prometheus_client.Gauge("muster_notifier_acts", "1 while this notifier may tell people.")


class Leadership:
    """The time in which we may act; an async context manager. See the module."""

    def __init__(self, key: lock.Key, *, instance: str, timing: lock.Timing) -> None:
        self.holder = ""
        """Who acts instead of us, as far as we know."""
        self._lock = lock.Lock(
            key, us=lock.this_process(instance), timing=timing, on_change=self._hear
        )
        self._has_acted = False
        self._acts = asyncio.Event()
        self._lost = asyncio.Event()

    async def __aenter__(self) -> Self:
        """Begin to ask for the lock."""
        await self._lock.__aenter__()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        """Act no more, and leave the lock to the next at once."""
        await self._lock.__aexit__(kind, error, at)

    @property
    def is_ours(self) -> bool:
        """Whether we may act right now."""
        return self._lock.term() is not None

    async def held(self) -> None:
        """Return when we may act: at once, if we may now."""
        while not self.is_ours:
            # once we may again, it is as another revision, and we hear of that
            self._acts.clear()
            await self._acts.wait()

    async def lost(self) -> None:
        """Return when somebody else acts, who did not before."""
        await self._lost.wait()

    async def failed(self) -> None:
        """Raise what ended our asking for the lock, once something does."""
        await self._lock.failed()

    def problem(self) -> str | None:
        """Return why nobody knows who acts, if so."""
        return self._lock.problem()

    def _hear(self, _: leadership.Leadership, now: leadership.Leadership) -> None:
        _ACTS.set(now.term is not None)
        if now.term is not None:
            if not self._has_acted:
                self._has_acted = True
                logs.logger().info("acting", revision=now.term)
            self._acts.set()
        elif now.leader:
            self._hear_of(now.leader)

    def _hear_of(self, holder: str) -> None:
        if self._has_acted:
            logs.logger().error("another_notifier_acts", holder=holder)
            self._lost.set()
        elif holder != self.holder:
            logs.logger().warning("waiting_for_lock", holder=holder)
        self.holder = holder
