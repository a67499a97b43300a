"""Adapter: the lock in NATS that elects the leading notifier, which alone notifies people."""

import asyncio
from typing import Final

import prometheus_client

from muster import leadership
from muster.nats import leader_lock
from muster.service import logs
from muster_notifier.config import schema

_IS_LEADER: Final = prometheus_client.Gauge(
    "muster_notifier_is_leader", "1 while this notifier is the leader and sends notifications."
)


class Election(leader_lock.Lock):
    """The notifier that holds the lock is active; the others wait to take over.

    Two active notifiers would each receive only half of the alerts. So an active notifier exits
    when another one acquires the lock.
    """

    def __init__(
        self, acting: schema.Acting, key: leader_lock.Key, *, us: leader_lock.Holder
    ) -> None:
        super().__init__(
            key,
            us=us,
            timing=leader_lock.Timing(
                ttl_s=acting.ttl_s, renew_s=acting.renew_s, margin_s=acting.renew_s / 2
            ),
            on_change=self._on_leader,
        )
        self.known_leader = ""
        """The other notifier that was last known to be the leader; empty if none was known."""
        self.has_led = False
        self._is_elected = asyncio.Event()
        self._lost = asyncio.Event()

    @property
    def is_leader(self) -> bool:
        """Return whether we are the leader right now."""
        return self.term() is not None

    async def wait_until_leader(self) -> None:
        """Wait until we are the leader."""
        while not self.is_leader:
            # becoming the leader again begins a new term, with a new call of `_on_leader`
            self._is_elected.clear()
            await self._is_elected.wait()

    async def lost(self) -> None:
        """Wait until another notifier has become the leader after us."""
        await self._lost.wait()

    def _on_leader(self, _: leadership.Leadership, current: leadership.Leadership) -> None:
        _IS_LEADER.set(current.term is not None)
        if current.term is not None:
            self.has_led = True
            self._is_elected.set()
        elif current.leader:
            self._on_other_leader(current.leader)

    def _on_other_leader(self, leader: str) -> None:
        if self.has_led:
            logs.logger().error("another_notifier_leads", leader=leader)
            self._lost.set()
        elif leader != self.known_leader:
            logs.logger().info("standing_by", leader=leader)
        self.known_leader = leader
