"""Adapter: publishes device changes: to the kubelet first, then to the log and the bus.

In this order no pod lands on a device that all others already know to be broken.
"""

import asyncio
from collections.abc import Callable, Iterable

from muster import vocabulary
from muster_plugin.inventory import inventory
from muster_plugin.kubelet import resource_manager
from muster_plugin.publishing import event_log


class UpdatePublisher:
    """Publishes changes in order; calls `on_published` after each batch.

    Changes that arrive meanwhile are published together: of many changes to a long list the kubelet
    needs only the last. `reason` is given to resources that are registered because of a change.
    """

    def __init__(
        self,
        devices: inventory.Inventory,
        resources: resource_manager.ResourcePlugins,
        events: event_log.EventLog,
        *,
        reason: Callable[[], vocabulary.RegistrationReason],
        on_published: Callable[[], None],
    ) -> None:
        self.heartbeat_due = asyncio.Event()
        """Set when a problem begins or ends that the next heartbeat should report at once."""
        self._devices = devices
        self._plugins = resources
        self._event_log = events
        self._reason = reason
        self._on_published = on_published
        self._pending: list[vocabulary.PluginEvent] = []
        self._lock = asyncio.Lock()
        self._publish_soon = asyncio.Event()

    def publish_soon(self, events: Iterable[vocabulary.PluginEvent]) -> None:
        """Publish changes without waiting for it."""
        self._pending += events
        self._publish_soon.set()

    async def publish(self, events: Iterable[vocabulary.PluginEvent]) -> None:
        """Publish changes; return when the kubelet has them, or is too slow."""
        self._pending += events
        try:
            async with self._lock:
                await self._publish()
        except asyncio.CancelledError:
            # the caller was cancelled, but other callers' changes may be among these
            self._publish_soon.set()
            raise
        self._on_published()

    async def run(self) -> None:
        """Publish what `publish_soon` was given, until cancelled."""
        while True:
            await self._publish_soon.wait()
            self._publish_soon.clear()
            await self.publish([])

    def record(self, events: Iterable[vocabulary.PluginEvent]) -> None:
        """Log changes and send them to the bus, but not to the kubelet."""
        for event in events:
            self._event_log.record_device(event)
        for name in self._devices.resources:
            if self._event_log.record_shortage(name, self._devices.shortage(name)):
                self.heartbeat_due.set()

    def record_problems(self, problems: Iterable[str]) -> None:
        """Log and publish the current problems that concern no single resource."""
        if self._event_log.record_problems(problems):
            self.heartbeat_due.set()

    async def _publish(self) -> None:
        changes, self._pending = self._pending, []
        # a resource named after a device may have gone with its last device
        self._plugins.reconcile(self._reason())
        try:
            await self._plugins.advertise({inventory.resource_of(event) for event in changes})
        finally:
            self.record(changes)
