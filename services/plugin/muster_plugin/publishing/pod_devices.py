"""Adapter: what the kubelet says of pods: who holds which device, and whether it lists ours."""

import time
from collections.abc import Callable, Coroutine
from datetime import UTC, datetime
from pathlib import Path

from muster_plugin.inventory import inventory
from muster_plugin.kubelet import podresources, podresources_check, resource_manager
from muster_plugin.publishing import event_log, update_publisher


class Pods:
    """Asks the kubelet for ever; `heard` is told when it answered."""

    def __init__(
        self,
        socket: Path,
        devices: inventory.Inventory,
        resources: resource_manager.Lives,
        *,
        told: event_log.Teller,
        changes: update_publisher.Courier,
        heard: Callable[[float], None],
    ) -> None:
        self._devices = devices
        self._lives = resources
        self._teller = told
        self._courier = changes
        self._heard = heard
        self._agreement = podresources_check.Agreement()
        self._asked = podresources.PodResources(socket, self._take)

    def follow(self) -> Coroutine[object, object, None]:
        """Ask for ever."""
        return self._asked.follow()

    def ask_soon(self) -> None:
        """Ask soon: what was allocated, or sent, the kubelet lists by then."""
        self._asked.soon.set()

    def held(self, resource: str) -> int | None:
        """Count the ids of a resource that pods hold; None if nobody knows."""
        return self._agreement.held(resource)

    def apart(self, resource: str, now: float) -> str:
        """Say in words what the kubelet lists otherwise, if that has lasted; else empty."""
        return self._agreement.apart(resource, now)

    async def _take(self, listing: podresources_check.Listing | None) -> None:
        now, at = time.monotonic(), datetime.now(UTC)
        before = set(self._agreement.disputed)
        ours = {
            name: podresources_check.Ours(self._devices.devices(name), self._sent_at(name, now))
            for name in self._devices.resources
        }
        for found in self._agreement.compare(listing, ours, now):
            self._teller.allocation(found.resource, found.device_ids, pod=found.pod)
        if set(self._agreement.disputed) != before:
            self._courier.turned.set()
        if self._agreement.is_doubtful:
            self.ask_soon()
        held = listing.held() if listing else None
        await self._courier.bring(self._devices.held(held, now=now, at=at))
        if listing is not None:
            self._heard(now)

    def _sent_at(self, resource: str, now: float) -> float | None:
        """Return when the kubelet was sent the resource, if it must have taken that in by now."""
        life = self._lives.get(resource)
        return life.figures.sent_at if life is not None and life.machine.has_settled(now) else None
