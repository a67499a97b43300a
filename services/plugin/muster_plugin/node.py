"""Adapter: wires a node's device discovery, inventory, kubelet plugins and publishing together."""

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Final, assert_never

import msgspec

from muster import machine, vocabulary
from muster.service import logs
from muster_plugin import device_updates, foreign_plugins
from muster_plugin.config import settings
from muster_plugin.discovery import host_scanner
from muster_plugin.inventory import device_checks, inventory
from muster_plugin.kubelet import (
    cdi,
    registration_signals,
    resource_manager,
)
from muster_plugin.model import advertised, gpu

if TYPE_CHECKING:
    from muster_plugin.config import gpus
    from muster_plugin.gpu import evaluation, xid_policy
    from muster_plugin.kubelet import resource_plugin

_Reason = vocabulary.RegistrationReason
RESOURCES_MAX: Final = 1000
_RESCAN_TIMEOUT_S: Final = 0.5
_DEVICES: Final = "devices"
_CHECKS: Final = "checks"
_PODS: Final = "pods"
_SOCKETS: Final = "sockets"
_LEAVE_BUS_TIMEOUT_S: Final = 1.0
_STUCK_S: Final = 120.0
"""The maximum age of a check: three times the longest period, plus the time of a slow check."""

Acquire = Callable[[], Awaitable[None]]


class Node:
    """Connects device discovery, the inventory, the resource plugins and publishing.

    `new_runner` creates a machine's runner. Raises ValueError if the node's resources conflict.
    """

    def __init__(
        self,
        settings: settings.Settings,
        name: str,
        *,
        new_runner: machine.NewRunner,
        gpus: "evaluation.GpuEvaluator | None" = None,
        timing: "resource_plugin.Timing | None" = None,
        resources_max: int = RESOURCES_MAX,
    ) -> None:
        self.name = name
        self.plugin = settings.name
        self.started_at = time.monotonic()
        self.config_hash = settings.hash_for(name)
        """The hash of the last applied configuration."""
        self.inventory = inventory.Inventory(node=name, plugin=settings.name)
        self.stopping = asyncio.Event()
        """Set when the process must end: only a new process can use a new GPU driver."""
        self.stop_reason = vocabulary.StopReason.SIGNAL
        self.handed_over = asyncio.Event()
        """Set while a successor on this node serves the resources and reports to the bus."""
        self.taken_back = asyncio.Event()
        self.left_bus = asyncio.Event()
        """Set while this process has left the bus to a successor."""
        self.event_log = device_updates.EventLog(name, settings.name)
        self._resources_max = resources_max
        self._root = Path(settings.kubelet.directory)
        self.resource_plugins = resource_manager.ResourcePlugins(
            self._root, self.inventory, new_runner=new_runner, observer=self, timing=timing
        )
        self.foreign_plugins = foreign_plugins.ForeignPlugins(
            settings,
            name,
            self.resource_plugins,
            new_runner=new_runner,
            on_change=self.event_log.record_watched,
        )
        self._updates = device_updates.UpdatePublisher(
            self.inventory,
            self.resource_plugins,
            self.event_log,
            reason=lambda: self._reason,
            on_published=self._on_published,
        )
        self.heartbeat_due = self._updates.heartbeat_due
        """Set when a problem begins or ends, so that a heartbeat reports it immediately."""
        self._planner = inventory.Planner(settings.at(name))
        self._gpus = gpus
        self._checked_at: dict[str, float] = {}
        self._cdi_specs = cdi.SpecDirectory(Path(settings.cdi.directory))
        self._scan_lock = asyncio.Lock()
        self._scanner = host_scanner.HostScanner()
        self._host_paths = host_scanner.HostPaths()
        self.pods = device_updates.PodDevices(
            self._root,
            self.inventory,
            self.resource_plugins,
            events=self.event_log,
            updates=self._updates,
            on_polled=lambda at: self._record_check_time(_PODS, at),
            on_listing=self.foreign_plugins.on_listing,
        )
        self._device_checker = device_checks.DeviceChecker(self.inventory, self._on_check_result)
        self._deadline_changed = asyncio.Event()
        self._reason = _Reason.START
        self._problems: tuple[str, ...] = ()
        self._snapshot_problem = ""
        self._first_scan_done = asyncio.Event()

    # State

    def statuses(self) -> list[vocabulary.ResourceBeat]:
        """Return the status of every resource."""
        now = time.monotonic()
        return [self._status(plugin, now) for plugin in self.resource_plugins.values()]

    @property
    def checked_at(self) -> Mapping[str, float]:
        """When each kind of check last ran, in monotonic seconds."""
        return {**self._checked_at, **(self._gpus.source.checked_at if self._gpus else {})}

    @property
    def xids(self) -> Mapping[int, int]:
        """How many times the driver reported each XID."""
        return self._gpus.xids if self._gpus else {}

    @property
    def watches_gpus(self) -> bool:
        """Whether GPUs are watched; this is decided at startup."""
        return self._gpus is not None

    def stuck(self, now: float) -> str | None:
        """Return which check, of sockets or devices, is overdue, as text; None if neither is."""
        for kind in (_SOCKETS, _DEVICES):
            age_s = now - self._checked_at.get(kind, self.started_at)
            if age_s > _STUCK_S:
                return f"no check of the {kind} has ended for {age_s:.0f} s"
        return None

    def snapshot(self, at: datetime) -> vocabulary.InventoryReported:
        """Return the inventory as an event; if it must be shortened, record this as a problem."""
        event, problem = self.inventory.snapshot(at)
        if problem != self._snapshot_problem:
            self._snapshot_problem = problem
            self._record_problems()
        return msgspec.structs.replace(event, watched=self.foreign_plugins.watched)

    # Called by resource plugins

    async def missing_paths(self, paths: Sequence[str]) -> str:
        """Return which host paths are missing, as text, after a new scan; empty if none is missing.

        Raises TimeoutError if the check of the paths takes too long.
        """
        gone = await self._host_paths.missing(paths)
        if not gone:
            return ""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_RESCAN_TIMEOUT_S):
                await self.scan_devices()
        return f"{', '.join(gone)}: no such file or directory"

    async def existing_paths(self, paths: Sequence[str]) -> frozenset[str]:
        """Return which of these host paths exist. Raises TimeoutError as `missing_paths` does."""
        return await self._host_paths.present(paths)

    def on_listing_changed(
        self, resource: str, change: registration_signals.ListingChange, endpoint: str
    ) -> None:
        """Publish that the kubelet lists a resource, or no longer lists it."""
        self.resource_plugins.on_answered(resource)
        self.event_log.record_registration(resource, change, endpoint)

    def on_allocated(self, resource: str, device_ids: tuple[str, ...]) -> None:
        """Publish an allocation, whose pod the kubelet reports later."""
        self.event_log.record_allocation(resource, device_ids)
        self.pods.poller.soon.set()

    def on_list_sent(self) -> None:
        """Schedule a check of whether the kubelet lists the devices that were sent to it."""
        self.pods.poller.soon.set()

    def on_lock_acquired(self) -> None:
        """Write the CDI spec of a resource that is about to be registered."""
        self._write_cdi_specs()

    def on_problem_changed(self) -> None:
        """Send the next heartbeat immediately."""
        self.heartbeat_due.set()

    # Tasks

    def tasks(self, acquire: Acquire | None = None) -> tuple[Coroutine[object, object, None], ...]:
        """Return the node's tasks; resources are served only after `acquire` has returned."""
        return (
            self._run_plugins(acquire),
            self.resource_plugins.watch_sockets(self._on_sockets_checked),
            self._watch_devices(),
            self._expire_devices(),
            self._device_checker.run(),
            self.pods.poller.run(period_s=self.foreign_plugins.poll_period_s),
            *self.foreign_plugins.tasks(),
            self._updates.run(),
            *([self._gpus.watch(self._on_gpu_update)] if self._gpus else []),
        )

    async def scan_devices(self) -> None:
        """Scan the device nodes and publish changes; those of the first scan are only logged."""
        async with self._scan_lock:
            self._planner.devices = await self._scanner.plan(
                self._planner.resources, current_names=self.inventory.matched_devices
            )
            events = self._plan()
            if self._first_scan_done.is_set():
                await self._updates.publish(events)
                return
            for event in events:
                # the first snapshot contains these devices
                self.event_log.log_device(event)
            self._updates.record([])
            self._first_scan_done.set()
            self._start_if_all_seen()

    async def configure(
        self, rules: settings.NodeConfiguration, *, config_hash: str, restart: tuple[str, ...]
    ) -> None:
        """Apply changed rules; unchanged resources stay registered."""
        self.config_hash = config_hash
        before = dict(self.resource_plugins)
        self._planner.configure(rules)
        reason, self._reason = self._reason, _Reason.CONFIGURATION_CHANGED
        try:
            await self.scan_devices()
        finally:
            self._reason = reason
        after = self.resource_plugins
        self.event_log.configuration_applied(
            config_hash,
            added=tuple(name for name in after if name not in before),
            removed=tuple(name for name in before if name not in after),
            registered_again=tuple(n for n in after if n in before and after[n] is not before[n]),
            restart=restart,
        )

    def set_gpu_policy(self, policy: "xid_policy.Policy", health: "gpus.Health") -> None:
        """Apply new rules for the health of GPUs from now on, if GPUs are watched."""
        if self._gpus is not None:
            self._gpus.use_rules(policy, health)

    # Handover to a successor, see kubelet.handover

    async def hand_over(self) -> tuple[str, ...]:
        """Leave the bus and release the resources; return the sockets that are still served."""
        self.taken_back.clear()
        self.handed_over.set()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_LEAVE_BUS_TIMEOUT_S):
                await self.left_bus.wait()
        return await self.resource_plugins.hand_over()

    async def end_handed_over(self) -> None:
        """End the servers of the resources that were handed over."""
        await self.resource_plugins.end_handed_over()

    async def take_back(self) -> None:
        """Serve the resources again and return to the bus."""
        self.resource_plugins.take_back()
        self.handed_over.clear()
        self.taken_back.set()

    async def close(self) -> None:
        """Stop every resource plugin, and release the GPUs."""
        await self.resource_plugins.stop()
        if self._gpus:
            await self._gpus.source.close()

    async def _run_plugins(self, acquire: Acquire | None) -> None:
        """Wait for the first scan and for `acquire`; then serve the resources until cancelled."""
        await self._first_scan_done.wait()
        if acquire is not None:
            await acquire()
        self._cdi_specs.remove_stale(self.resource_plugins.locks.is_free)
        await self.resource_plugins.run()

    async def _watch_devices(self) -> None:
        """Scan the devices periodically, and whenever a watched directory changes."""
        async with self._scanner.scan_times(self._cdi_specs.directories) as scan_times:
            async for _ in scan_times:
                await self.scan_devices()
                if not self._scanner.is_dev_hanging:
                    self._record_check_time(_DEVICES, time.monotonic())

    async def _expire_devices(self) -> None:
        """Remove devices that have been missing or replaced for long enough."""
        clock = asyncio.get_running_loop().time
        while True:
            self._deadline_changed.clear()
            try:
                async with asyncio.timeout_at(self.inventory.next_deadline()):
                    await self._deadline_changed.wait()
            except TimeoutError:
                await self._updates.publish(self.inventory.tick(now=clock(), at=datetime.now(UTC)))

    async def _on_gpu_update(self, update: "evaluation.Evaluated") -> None:
        """Handle a new scan of the GPUs, or a fault that began or ended."""
        match update:
            case gpu.Scan():
                if update.driver is gpu.Driver.REPLACED:
                    logs.logger().warning("driver_replaced", problem=update.problem)
                    self.stop_reason = vocabulary.StopReason.UPGRADE
                    self.stopping.set()
                self._planner.gpu_scan = gpu.latest_scan(self._planner.gpu_scan, update)
                await self._updates.publish(self._plan())
                self._start_if_all_seen()
            case gpu.FaultBegan() | gpu.FaultEnded():
                self._updates.publish_soon(self.inventory.apply_fault(update))
                # hundreds of faults may arrive together: let other tasks run
                await asyncio.sleep(0)
            case _:
                assert_never(update)

    async def _on_check_result(self, resource: str, unit: advertised.Unit, problem: str) -> None:
        """Handle the result of a device check."""
        now = time.monotonic()
        self._record_check_time(_CHECKS, now)
        at = datetime.now(UTC)
        await self._updates.publish(
            self.inventory.record_check(resource, unit, problem, now=now, at=at)
        )

    def _on_published(self) -> None:
        self._deadline_changed.set()
        self._device_checker.changed.set()

    def _on_sockets_checked(self, at: float) -> None:
        self._record_check_time(_SOCKETS, at)
        self.pods.poll_if_listed()

    def _record_check_time(self, kind: str, at: float) -> None:
        self._checked_at[kind] = at

    def _status(
        self, plugin: "resource_plugin.ResourcePlugin", now: float
    ) -> vocabulary.ResourceBeat:
        status = plugin.status(now)
        allocated = self.pods.check.allocated_count(plugin.resource)
        return msgspec.structs.replace(
            status,
            problem=status.problem or self._cdi_specs.problems.get(plugin.resource, ""),
            allocated=status.allocated if allocated is None else allocated,
            mismatch=self.pods.check.mismatch(plugin.resource, now),
        )

    def _start_if_all_seen(self) -> None:
        """Begin to wait for the kubelet's answers if device nodes and watched GPUs were scanned."""
        if self._first_scan_done.is_set() and (
            self._gpus is None or self._planner.gpu_scan is not None
        ):
            self.resource_plugins.expect_first_answers()
            self._reason = _Reason.DEVICE_APPEARED

    def _plan(self) -> list[vocabulary.PluginEvent]:
        """Update the inventory and the resource plugins from the last scans; return the changes."""
        planner, devices = self._planner, self.inventory
        plan, configured = planner.plan(self._resources_max, standing=devices.resources)
        devices.gpus = planner.gpus
        devices.gpu_context = planner.gpu_context
        events = devices.observe(plan, configured, now=time.monotonic(), at=datetime.now(UTC))
        self._problems = plan.problems
        self._write_cdi_specs()
        self.resource_plugins.reconcile(self._reason)
        return events

    def _write_cdi_specs(self) -> None:
        """Write the CDI specs of the resources that this process serves."""
        specs = {
            name: cdi.spec(name, self.inventory.offered(name))
            for name, rule in self.inventory.rules.items()
            if rule.cdi and self.resource_plugins.locks.holds(name)
        }
        if self._cdi_specs.write(specs):
            # the directory may be new and then has to be watched
            self._scanner.changed.set()
        self._record_problems()

    def _record_problems(self) -> None:
        unwritten = (f"{name}: {text}" for name, text in self._cdi_specs.problems.items())
        snapshot = [self._snapshot_problem] if self._snapshot_problem else []
        self._updates.record_problems((*self._problems, *unwritten, *snapshot))
