"""Adapter: everybody who hears of a change: the kubelet first, the log and the bus afterwards.

In this order no pod lands on a device that everybody else knows to be broken.
"""

import asyncio
from collections.abc import Callable, Iterable

from muster import vocabulary
from muster_plugin.inventory import inventory
from muster_plugin.kubelet import resource_manager
from muster_plugin.publishing import event_log


class Courier:
    """Brings what changed, in order; says `reason` of lives that begin, calls `brought` each time.

    What changes while something is brought waits, and is brought together: of many changes to a
    long list the kubelet needs only the last.
    """

    def __init__(
        self,
        devices: inventory.Inventory,
        resources: resource_manager.Lives,
        told: event_log.Teller,
        *,
        reason: Callable[[], vocabulary.RegistrationReason],
        brought: Callable[[], None],
    ) -> None:
        self.turned = asyncio.Event()
        """Set when something that a heartbeat should tell at once begins or ends."""
        self._devices = devices
        self._lives = resources
        self._teller = told
        self._reason = reason
        self._brought = brought
        self._waiting: list[vocabulary.PluginEvent] = []
        self._bringing = asyncio.Lock()
        self._soon = asyncio.Event()

    def soon(self, events: Iterable[vocabulary.PluginEvent]) -> None:
        """Have changes brought without waiting for it."""
        self._waiting += events
        self._soon.set()

    async def bring(self, events: Iterable[vocabulary.PluginEvent]) -> None:
        """Bring changes; return when the kubelet has them, or is too slow."""
        self._waiting += events
        try:
            async with self._bringing:
                await self._bring()
        except asyncio.CancelledError:
            # who waited has no time any more; somebody else's changes may be among these
            self._soon.set()
            raise
        self._brought()

    async def follow(self) -> None:
        """Bring for ever what is to be brought soon."""
        while True:
            await self._soon.wait()
            self._soon.clear()
            await self.bring([])

    def tell(self, events: Iterable[vocabulary.PluginEvent]) -> None:
        """Tell everybody but the kubelet."""
        for event in events:
            self._teller.device(event)
        for name in self._devices.resources:
            if self._teller.shortage(name, self._devices.shortage(name)):
                self.turned.set()

    def problems(self, found: Iterable[str]) -> None:
        """Tell what is wrong now, and concerns no single resource."""
        if self._teller.problems(found):
            self.turned.set()

    async def _bring(self) -> None:
        changes, self._waiting = self._waiting, []
        # a resource that was named by what it held may have left with the last of it
        self._lives.match(self._reason())
        try:
            await self._lives.advertise({inventory.resource_of(event) for event in changes})
        finally:
            self.tell(changes)
