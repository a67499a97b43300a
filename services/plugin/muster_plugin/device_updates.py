"""Adapter: publishes device changes, finds the pods that hold devices, and records events.

Changes go to the kubelet first, then to the log and the bus, so that no pod gets a device after
subscribers were informed that it is broken. The kubelet's podresources API reports which pod holds
which device; its answers are also compared with the plugin's list. Events are buffered until the
bus is connected, then published in order.
"""

import asyncio
import collections
import time
from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Final, assert_never

from muster import vocabulary, wording
from muster.service import logs
from muster_plugin.inventory import device_messages, inventory
from muster_plugin.kubelet import (
    kubelet_socket,
    plugin_sockets,
    podresources,
    registration_signals,
    resource_manager,
)

_PENDING_MAX: Final = 1_000
_PROBLEMS_MAX: Final = 20
_REJECTION_PROBLEMS_MAX: Final = 100
_TEXT_MAX: Final = 2048
"""The maximum length of a text in an event (vocabulary.Text)."""
_WARNINGS: Final = frozenset({"device_unhealthy", "device_degraded", "device_unmonitored"})


class EventLog:
    """Logs and publishes the events of one plugin on one node; stores the current problems."""

    def __init__(self, node: str, plugin: str) -> None:
        self._node = node
        self._plugin = plugin
        self._log = logs.logger()
        self._pending: collections.deque[vocabulary.Event] = collections.deque(maxlen=_PENDING_MAX)
        self._publish: Callable[[vocabulary.Event], None] = self._pending.append
        self._problems: tuple[str, ...] = ()
        self._shortages: dict[str, str] = {}
        self._findings: dict[str, vocabulary.WatchedFinding] = {}
        self._rejection: tuple[str, ...] = ()
        self.configurations_rejected = 0
        """How many times a changed configuration could not be used."""
        self.configuration_rejected_at: float | None = None
        """When the configuration became unusable, in monotonic seconds; None if it is usable."""

    def publish_to(self, publish: Callable[[vocabulary.Event], None]) -> None:
        """Publish the buffered events and all later events with `publish`."""
        while self._pending:
            publish(self._pending.popleft())
        self._publish = publish

    def record_registration(
        self, resource: str, change: registration_signals.ListingChange, endpoint: str
    ) -> None:
        """Record that the kubelet lists a resource, or no longer lists it."""
        match change:
            case registration_signals.Listed(reason=reason, registrations=registrations):
                self._publish(
                    vocabulary.PluginRegistered(
                        **self._origin(),
                        resource=resource,
                        endpoint=endpoint,
                        reason=reason,
                        registrations=registrations,
                    )
                )
            case registration_signals.Lost(reason=reason, detail=detail):
                self._publish(
                    vocabulary.PluginDeregistered(
                        **self._origin(), resource=resource, reason=reason, detail=detail
                    )
                )
            case _:
                assert_never(change)

    def record_allocation(
        self, resource: str, device_ids: tuple[str, ...], *, pod: str = ""
    ) -> None:
        """Record an allocation of devices to a container."""
        self._publish(
            vocabulary.AllocationObserved(
                **self._origin(), resource=resource, device_ids=device_ids, pod=pod
            )
        )

    def record_device(self, event: vocabulary.PluginEvent) -> None:
        """Record that a device was added or removed, or that its health or condition changed."""
        self.log_device(event)
        self._publish(event)

    def record_watched(self, event: vocabulary.PluginObserved) -> None:
        """Record an observation of a plugin that muster does not run."""
        watched, nothing = event.watched, vocabulary.WatchedFinding.NONE
        before = self._findings.pop(watched.name, None)
        if not event.gone:
            self._findings[watched.name] = watched.finding
        log = self._log.bind(watched=watched.name, kind=watched.kind)
        if event.gone:
            log.info("plugin_watch_ended")
        elif watched.finding not in {before, nothing}:
            log.warning("watched_plugin_failed", finding=watched.finding, observed=watched.text)
        elif before is None:
            log.info("plugin_watch_started", socket=watched.socket)
        elif watched.finding is not before:
            log.info("watched_plugin_recovered", finding=before)
        self._publish(event)

    def log_device(self, event: vocabulary.PluginEvent) -> None:
        """Log a device change without publishing it."""
        count = 1
        match event:
            case vocabulary.DeviceAdded(device=device):
                count = device.count
                name, reason = "device_added", device.reason
                resource, device_id = device.resource, device.id
            case vocabulary.DeviceRemoved():
                name, reason, count = "device_removed", event.reason, event.count
                resource, device_id = event.resource, event.device_id
            case vocabulary.DeviceHealthChanged():
                healthy = event.health is vocabulary.Health.HEALTHY
                name, reason = "device_healthy" if healthy else "device_unhealthy", event.reason
                resource, device_id = event.resource, event.device_id
            case vocabulary.DeviceConditionChanged():
                name = (
                    f"device_{event.condition}" if event.holds else f"device_not_{event.condition}"
                )
                resource, device_id, reason = event.resource, event.device_id, event.reason
            case _:
                return
        log = self._log.warning if name in _WARNINGS else self._log.info
        extra = {"count": count} if count > 1 else {}
        log(name, resource=resource, device=device_id, reason=reason, **extra)

    @property
    def current_problems(self) -> tuple[str, ...]:
        """The current problems with devices and with the configuration file, as text."""
        if not self._rejection:
            return self._problems
        first, *others = self._rejection
        more = f" (and {len(others)} more)" if others else ""
        return (f"the changed configuration cannot be used: {first}{more}", *self._problems)

    def record_problems(self, problems: Iterable[str]) -> bool:
        """Record which problems began and which ended; return whether any did.

        If there are too many problems, the last ones are replaced by their number.
        """
        now = _bounded(sorted({problem[:_TEXT_MAX] for problem in problems}), _PROBLEMS_MAX)
        changes = [(problem, True) for problem in now if problem not in self._problems]
        changes += [(problem, False) for problem in self._problems if problem not in now]
        self._problems = now
        for problem, holds in changes:
            if holds:
                self._log.warning("device_problem_detected", problem=problem)
            else:
                self._log.info("device_problem_resolved", problem=problem)
            self._publish(vocabulary.ProblemChanged(**self._origin(), problem=problem, holds=holds))
        return bool(changes)

    def record_shortage(self, resource: str, shortage: str) -> bool:
        """Record a shortage of devices (empty if there is none); return whether it changed."""
        if shortage == self._shortages.get(resource, ""):
            return False
        self._shortages[resource] = shortage
        if shortage:
            self._log.warning("device_shortage_detected", resource=resource, problem=shortage)
        else:
            self._log.info("device_shortage_resolved", resource=resource)
        self._publish(
            vocabulary.ExpectationChanged(**self._origin(), resource=resource, short=shortage)
        )
        return True

    def configuration_applied(
        self,
        config_hash: str,
        *,
        added: tuple[str, ...] = (),
        removed: tuple[str, ...] = (),
        registered_again: tuple[str, ...] = (),
        restart: tuple[str, ...] = (),
    ) -> None:
        """Record that a changed configuration was applied, and which resources it changed."""
        self._rejection, self.configuration_rejected_at = (), None
        event = vocabulary.ConfigurationApplied(
            **self._origin(),
            config_hash=config_hash,
            added=added,
            removed=removed,
            registered_again=registered_again,
            restart=restart,
        )
        self._log.info(
            "configuration_applied",
            config_hash=config_hash,
            added=added,
            removed=removed,
            registered_again=registered_again,
            restart=restart,
        )
        self._publish(event)

    def configuration_restored(self, config_hash: str) -> None:
        """Record that a rejected file was changed back to the applied configuration."""
        if self._rejection:
            self.configuration_applied(config_hash)

    def configuration_rejected(self, problems: tuple[str, ...], *, active_hash: str) -> None:
        """Record that a changed configuration cannot be used."""
        if problems == self._rejection:
            return
        self._rejection = problems
        self.configurations_rejected += 1
        self.configuration_rejected_at = self.configuration_rejected_at or time.monotonic()
        self._log.warning(
            "configuration_rejected", problems=problems, active_configuration=active_hash
        )
        self._publish(
            vocabulary.ConfigurationRefused(
                **self._origin(),
                config_hash=active_hash,
                problems=_bounded([text[:_TEXT_MAX] for text in problems], _REJECTION_PROBLEMS_MAX),
            )
        )

    def _origin(self) -> device_messages.Origin:
        return {"node": self._node, "plugin": self._plugin, "at": datetime.now(UTC)}


def _bounded(problems: Sequence[str], most: int) -> tuple[str, ...]:
    left = len(problems) - most
    return (*problems[:most], *([wording.counted(left, "more problem")] if left > 0 else []))


class UpdatePublisher:
    """Publishes changes in order; calls `on_published` after each batch.

    Changes that arrive during a batch are published together, because the kubelet needs only the
    newest version of a long list. Resources that a change adds are registered with `reason`.
    """

    def __init__(
        self,
        devices: inventory.Inventory,
        resources: resource_manager.ResourcePlugins,
        events: EventLog,
        *,
        reason: Callable[[], vocabulary.RegistrationReason],
        on_published: Callable[[], None],
    ) -> None:
        self.heartbeat_due = asyncio.Event()
        """Set when a problem begins or ends, so that a heartbeat reports it immediately."""
        self._devices = devices
        self._plugins = resources
        self._event_log = events
        self._reason = reason
        self._on_published = on_published
        self._pending: list[vocabulary.PluginEvent] = []
        self._faults_without_pods = device_messages.FaultsWithoutPods()
        self._lock = asyncio.Lock()
        self._publish_soon = asyncio.Event()

    def publish_soon(self, events: Iterable[vocabulary.PluginEvent]) -> None:
        """Queue changes to be published, without waiting."""
        self._pending += events
        self._publish_soon.set()

    async def publish(self, events: Iterable[vocabulary.PluginEvent]) -> None:
        """Publish changes; return when the kubelet has received them, or after a timeout."""
        self._pending += events
        try:
            async with self._lock:
                await self._publish()
        except asyncio.CancelledError:
            # the caller was cancelled, but the batch may contain other callers' changes
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
        """Log changes and shortages and send them to the bus, but not to the kubelet."""
        for event in events:
            self._faults_without_pods.record(event)
            self._event_log.record_device(event)
        for name in self._devices.resources:
            if self._event_log.record_shortage(name, self._devices.shortage(name)):
                self.heartbeat_due.set()

    def name_pods(self, at: datetime) -> None:
        """Publish again, with their pods, the faults of devices whose pods have become known."""
        self.record(self._faults_without_pods.named(self._devices.pods_holding, at))

    def record_problems(self, problems: Iterable[str]) -> None:
        """Log and publish which of the node's device problems began or ended."""
        if self._event_log.record_problems(problems):
            self.heartbeat_due.set()

    async def _publish(self) -> None:
        changes, self._pending = self._pending, []
        # a resource named after a device may have been removed with its last device
        self._plugins.reconcile(self._reason())
        try:
            await self._plugins.advertise({inventory.resource_of(event) for event in changes})
        finally:
            self.record(changes)


class PodDevices:
    """Polls the kubelet for the devices of pods and publishes changes.

    `on_polled` is called after each answer. `on_listing` receives the kubelet's whole list, which
    includes other plugins' devices, or None if the kubelet does not answer.
    """

    def __init__(
        self,
        root: Path,
        devices: inventory.Inventory,
        resources: resource_manager.ResourcePlugins,
        *,
        events: EventLog,
        updates: UpdatePublisher,
        on_polled: Callable[[float], None],
        on_listing: Callable[[podresources.Listing | None], None],
    ) -> None:
        self._devices = devices
        self._plugins = resources
        self._event_log = events
        self._updates = updates
        self._on_polled = on_polled
        self._also_on_listing = on_listing
        self.check = podresources.PodResourcesCheck()
        self.poller = podresources.PodResourcesPoller(root / podresources.SOCKET, self._on_listing)
        self._sockets = kubelet_socket.directories(root)
        self._checkpointed_at: int | None = None

    def poll_if_listed(self) -> None:
        """Poll soon if the kubelet's checkpoint changed: a plugin may have displaced this one."""
        before = self._checkpointed_at
        self._checkpointed_at = kubelet_socket.checkpointed_at(self._sockets)
        if self._checkpointed_at != before:
            self.poller.soon.set()

    async def _on_listing(self, listing: podresources.Listing | None) -> None:
        now, at = time.monotonic(), datetime.now(UTC)
        before = set(self.check.mismatches)
        advertised = {
            name: podresources.Advertised(self._devices.devices(name), self._sent_at(name, now))
            for name in self._devices.resources
        }
        for allocation in self.check.compare(listing, advertised, now):
            self._event_log.record_allocation(
                allocation.resource, allocation.device_ids, pod=allocation.pod
            )
        if set(self.check.mismatches) != before:
            self._updates.heartbeat_due.set()
        machines = [plugin.machine for plugin in self._plugins.values()]
        is_early = any(each.is_listed and not each.has_settled(now) for each in machines)
        if self.check.needs_recheck or is_early:
            self.poller.soon.set()
        self._report_displaced(listing)
        pods = listing.pods_by_resource() if listing else None
        await self._updates.publish(self._devices.record_pods(pods, now=now, at=at))
        self._updates.name_pods(at)
        if listing is not None:
            self._on_polled(now)
        self._also_on_listing(listing)

    def _report_displaced(self, listing: podresources.Listing | None) -> None:
        is_asked = any(self.check.displaced.values())
        others = plugin_sockets.others(self._sockets) if is_asked else frozenset()
        listed = (listing.allocatable or {}) if listing else {}
        for resource, displaced in self.check.displaced.items():
            if resource in self._plugins:
                rivals = others if listed.get(resource) else frozenset()
                self._plugins[resource].on_compared(displaced, rivals)

    def _sent_at(self, resource: str, now: float) -> float | None:
        """Return when the list was last sent; None until the kubelet has had time to process it."""
        plugin = self._plugins.get(resource)
        return plugin.counters.sent_at if plugin and plugin.machine.has_settled(now) else None
