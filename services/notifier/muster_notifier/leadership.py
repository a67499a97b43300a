"""Adapter: leadership: the notifier that holds the lock is active, others wait to take over.

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

_IS_LEADER = prometheus_client.Gauge(
    "muster_notifier_is_leader", "1 while this notifier is the leader, which sends notifications."
)


class LeaderElection:
    """One candidate in the leader election; an async context manager. See the module."""

    def __init__(self, key: lock.Key, *, instance: str, timing: lock.Timing) -> None:
        self.leader = ""
        """The notifier that is the leader, as far as we know."""
        self._lock = lock.Lock(
            key, us=lock.this_process(instance), timing=timing, on_change=self._on_change
        )
        self._has_led = False
        self._is_elected = asyncio.Event()
        self._lost = asyncio.Event()

    async def __aenter__(self) -> Self:
        """Start to compete for the lock."""
        await self._lock.__aenter__()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        """Release the lock, so that the next leader can take over at once."""
        await self._lock.__aexit__(kind, error, at)

    @property
    def is_leader(self) -> bool:
        """Return whether we are the leader right now."""
        return self._lock.term() is not None

    async def wait_until_leader(self) -> None:
        """Wait until we are the leader."""
        while not self.is_leader:
            # becoming leader again is another term, and so another call of `_on_change`
            self._is_elected.clear()
            await self._is_elected.wait()

    async def lost(self) -> None:
        """Wait until another notifier has become the leader after us."""
        await self._lost.wait()

    async def failed(self) -> None:
        """Wait forever; raise any error that ended our candidacy."""
        await self._lock.failed()

    def problem(self) -> str | None:
        """Return why it is unknown which notifier is the leader, if so."""
        return self._lock.problem()

    def _on_change(self, _: leadership.Leadership, now: leadership.Leadership) -> None:
        _IS_LEADER.set(now.term is not None)
        if now.term is not None:
            self._has_led = True
            self._is_elected.set()
        elif now.leader:
            self._on_other_leader(now.leader)

    def _on_other_leader(self, leader: str) -> None:
        if self._has_led:
            logs.logger().error("another_notifier_leads", leader=leader)
            self._lost.set()
        elif leader != self.leader:
            logs.logger().warning("waiting_for_lock", leader=leader)
        self.leader = leader
