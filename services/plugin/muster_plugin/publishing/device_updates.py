"""Adapter: publishes changes of devices and of the pods that hold them.

Changes go to the kubelet first, then to the log and the bus: in this order no pod lands on a device
that all others already know to be broken. Which pod holds which device, and where the kubelet's
listing differs, comes from its podresources.
"""

import asyncio
import time
from collections.abc import Callable, Coroutine, Iterable
from datetime import UTC, datetime
from pathlib import Path

from muster import vocabulary
from muster_plugin.inventory import inventory
from muster_plugin.kubelet import podresources, resource_manager
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
        """Queue changes to be published, without waiting."""
        self._pending += events
        self._publish_soon.set()

    async def publish(self, events: Iterable[vocabulary.PluginEvent]) -> None:
        """Publish changes; return when the kubelet has them, or after a timeout."""
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
        """Publish the changes queued by `publish_soon` until cancelled."""
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


class PodDevices:
    """Polls the kubelet and publishes changes; calls `on_polled` after each answer."""

    def __init__(
        self,
        socket: Path,
        devices: inventory.Inventory,
        resources: resource_manager.ResourcePlugins,
        *,
        events: event_log.EventLog,
        updates: UpdatePublisher,
        on_polled: Callable[[float], None],
    ) -> None:
        self._devices = devices
        self._plugins = resources
        self._event_log = events
        self._updates = updates
        self._on_polled = on_polled
        self._check = podresources.PodResourcesCheck()
        self._poller = podresources.PodResourcesPoller(socket, self._on_listing)

    def run(self) -> Coroutine[object, object, None]:
        """Poll until cancelled."""
        return self._poller.run()

    def poll_soon(self) -> None:
        """Schedule a poll for when the kubelet lists what was just allocated or sent."""
        self._poller.soon.set()

    def allocated_count(self, resource: str) -> int | None:
        """Return how many ids of a resource pods hold; None if that is unknown."""
        return self._check.allocated_count(resource)

    def mismatch(self, resource: str, now: float) -> str:
        """Say how the kubelet's listing persistently differs; empty if it does not."""
        return self._check.mismatch(resource, now)

    async def _on_listing(self, listing: podresources.Listing | None) -> None:
        now, at = time.monotonic(), datetime.now(UTC)
        before = set(self._check.mismatches)
        advertised = {
            name: podresources.Advertised(self._devices.devices(name), self._sent_at(name, now))
            for name in self._devices.resources
        }
        for allocation in self._check.compare(listing, advertised, now):
            self._event_log.record_allocation(
                allocation.resource, allocation.device_ids, pod=allocation.pod
            )
        if set(self._check.mismatches) != before:
            self._updates.heartbeat_due.set()
        if self._check.needs_recheck:
            self.poll_soon()
        pods = listing.pods_by_resource() if listing else None
        await self._updates.publish(self._devices.record_pods(pods, now=now, at=at))
        if listing is not None:
            self._on_polled(now)

    def _sent_at(self, resource: str, now: float) -> float | None:
        """Return when the kubelet was sent the resource, if it has had time to process that."""
        plugin = self._plugins.get(resource)
        return plugin.counters.sent_at if plugin and plugin.machine.has_settled(now) else None
