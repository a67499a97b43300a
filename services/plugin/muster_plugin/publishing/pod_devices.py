"""Adapter: the pods' devices by the kubelet's podresources: allocations and listing mismatches."""

import time
from collections.abc import Callable, Coroutine
from datetime import UTC, datetime
from pathlib import Path

from muster_plugin.inventory import inventory
from muster_plugin.kubelet import podresources, podresources_check, resource_manager
from muster_plugin.publishing import event_log, update_publisher


class PodDevices:
    """Polls the kubelet and publishes what changed; `on_polled` is called after each answer."""

    def __init__(
        self,
        socket: Path,
        devices: inventory.Inventory,
        resources: resource_manager.ResourcePlugins,
        *,
        events: event_log.EventLog,
        updates: update_publisher.UpdatePublisher,
        on_polled: Callable[[float], None],
    ) -> None:
        self._devices = devices
        self._plugins = resources
        self._event_log = events
        self._updates = updates
        self._on_polled = on_polled
        self._check = podresources_check.PodResourcesCheck()
        self._poller = podresources.PodResourcesPoller(socket, self._on_listing)

    def run(self) -> Coroutine[object, object, None]:
        """Poll until cancelled."""
        return self._poller.run()

    def poll_soon(self) -> None:
        """Poll soon, when the kubelet lists what was just allocated or sent."""
        self._poller.soon.set()

    def allocated_count(self, resource: str) -> int | None:
        """Return how many ids of a resource pods hold; None if that is unknown."""
        return self._check.allocated_count(resource)

    def mismatch(self, resource: str, now: float) -> str:
        """Return how the kubelet's listing persistently differs, in words; empty if it does not."""
        return self._check.mismatch(resource, now)

    async def _on_listing(self, listing: podresources_check.Listing | None) -> None:
        now, at = time.monotonic(), datetime.now(UTC)
        before = set(self._check.mismatches)
        advertised = {
            name: podresources_check.Advertised(
                self._devices.devices(name), self._sent_at(name, now)
            )
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
        """Return when the kubelet was sent the resource, if it must have processed that by now."""
        plugin = self._plugins.get(resource)
        return plugin.counters.sent_at if plugin and plugin.machine.has_settled(now) else None
