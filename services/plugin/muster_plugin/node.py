"""Adapter: one node: its devices, their lives with the kubelet, and what is to be told about them.

A change goes to the kubelet first and to the bus afterwards, so that no pod lands on a device that
everybody else knows to be broken.
"""

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
from muster_plugin import preflight
from muster_plugin.config import document, settings
from muster_plugin.discovery import host_scanner
from muster_plugin.gpu import source
from muster_plugin.inventory import device_checks, inventory, planner
from muster_plugin.kubelet import (
    cdi,
    podresources,
    registration_events,
    resource_manager,
    resource_plugin,
    resource_status,
)
from muster_plugin.model import advertised, gpu
from muster_plugin.publishing import event_log, pod_devices, update_publisher

if TYPE_CHECKING:
    from muster_plugin.config import gpus
    from muster_plugin.gpu import xid_policy

_Reason = vocabulary.RegistrationReason
_RELOOK_TIMEOUT_S: Final = 0.5
_DEVICES: Final = "devices"
_CHECKS: Final = "checks"
_PODS: Final = "pods"
_SOCKETS: Final = "sockets"
_STUCK_S: Final = 120.0
"""Three of the longer period, and the time that a look may take."""


Alone = Callable[[], Awaitable[None]]


class Node:
    """Everything the plugin does on its node, but for the bus and the probes.

    `line` makes what a machine is spoken to by; `seen` are the GPUs, if there may be any. Raises
    ValueError if the node's resources cannot stand together.
    """

    def __init__(
        self,
        settings: settings.Settings,
        name: str,
        *,
        line: machine.Lines,
        seen: source.GpuEvaluator | None = None,
        periods: resource_plugin.Periods | None = None,
        resources_max: int = preflight.RESOURCES_MAX,
    ) -> None:
        self.name = name
        self.plugin = settings.name
        self.inventory = inventory.Inventory(node=name, plugin=settings.name)
        self.over = asyncio.Event()
        """Set when the process is to end: only a new one can speak to a new GPU driver."""
        self.stop_reason = vocabulary.StopReason.SIGNAL
        self.teller = event_log.Teller(name, settings.name)
        self._resources_max = resources_max
        self._root = Path(settings.kubelet.directory)
        self.lives = resource_manager.Lives(
            self._root, self.inventory, line=line, hears=self, periods=periods
        )
        self._courier = update_publisher.Courier(
            self.inventory,
            self.lives,
            self.teller,
            reason=lambda: self._reason,
            brought=self._brought,
        )
        self.problem_turned = self._courier.turned
        """Set when something that a heartbeat should tell at once begins or ends."""
        self._planner = planner.Planner(settings.at(name))
        self._seen = seen
        self._checked_at: dict[str, float] = {}
        self._specs = cdi.Specs(Path(settings.cdi.directory))
        self._looking = asyncio.Lock()
        self._sights = host_scanner.HostScanner()
        self._paths = host_scanner.HostPaths()
        self._pods = pod_devices.Pods(
            self._root / podresources.SOCKET,
            self.inventory,
            self.lives,
            told=self.teller,
            changes=self._courier,
            heard=lambda at: self._checked(_PODS, at),
        )
        self._examiner = device_checks.Examiner(self.inventory, self._judge)
        self._aged = asyncio.Event()
        self._reason = _Reason.START
        self._problems: tuple[str, ...] = ()
        self._unlisted = ""
        self._has_looked = asyncio.Event()

    # What others ask

    def states(self) -> list[resource_status.ResourceState]:
        """Return what is known about every resource now."""
        now = time.monotonic()
        return [self._state(life, now) for life in self.lives.values()]

    @property
    def checked_at(self) -> Mapping[str, float]:
        """When each kind of looking was last done, in monotonic seconds."""
        return {**self._checked_at, **(self._seen.source.checked_at if self._seen else {})}

    @property
    def xids(self) -> Mapping[int, int]:
        """How often the driver reported each XID."""
        return self._seen.xids if self._seen else {}

    @property
    def sees_gpus(self) -> bool:
        """Whether somebody looks at the GPUs; who does is chosen at the start."""
        return self._seen is not None

    def stuck(self, now: float) -> str | None:
        """Say which look that should be repeated for ever has not been, or None."""
        for kind in (_SOCKETS, _DEVICES):
            age_s = now - self._checked_at.get(kind, now)
            if age_s > _STUCK_S:
                return f"the last look at the {kind} was {age_s:.0f} s ago"
        return None

    def snapshot(self, at: datetime, *, bytes_max: int) -> vocabulary.InventoryReported:
        """Return the whole inventory as an event; that not all of it can be told is a problem."""
        event, problem = self.inventory.snapshot(at, bytes_max=bytes_max)
        if problem != self._unlisted:
            self._unlisted = problem
            self._tell_problems()
        return event

    # What a life asks and tells

    async def absent(self, paths: Sequence[str]) -> str:
        """Say which of these paths of the host are gone, after telling the kubelet; else empty."""
        gone = await self._paths.missing(paths)
        if not gone:
            return ""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_RELOOK_TIMEOUT_S):
                await self.look()
        return f"{', '.join(gone)}: no such file or directory"

    async def present(self, paths: Sequence[str]) -> frozenset[str]:
        """Return those of these paths of the host that are there."""
        return await self._paths.present(paths)

    def reported(self, resource: str, report: registration_events.Report, endpoint: str) -> None:
        """Tell that the kubelet lists a resource, or has lost it."""
        self.lives.settled(resource)
        self.teller.registration(resource, report, endpoint)

    def allocated(self, resource: str, device_ids: tuple[str, ...]) -> None:
        """Tell which devices a container was given; whose it is, the kubelet knows later."""
        self.teller.allocation(resource, device_ids)
        self._pods.ask_soon()

    def sent(self) -> None:
        """Ask the kubelet soon whether it lists what it was sent."""
        self._pods.ask_soon()

    def claimed(self, resource: str) -> None:
        """Tell the container runtime of a resource that is about to be registered."""
        del resource
        self._write_specs()

    def problem_changed(self) -> None:
        """Let the next beat come at once."""
        self.problem_turned.set()

    # What goes on for ever

    def works(self, alone: Alone | None = None) -> tuple[Coroutine[object, object, None], ...]:
        """Give everything that is to go on as long as the process lives.

        No life begins before `alone` has returned: nobody else serves our resources then.
        """
        return (
            self._live(alone),
            self.lives.watch(lambda at: self._checked(_SOCKETS, at)),
            self._watch_devices(),
            self._age(),
            self._examiner.examine(),
            self._pods.follow(),
            self._courier.follow(),
            *([self._seen.watch(self._take_judged)] if self._seen else []),
        )

    async def look(self) -> None:
        """Look at the device nodes; bring what changed to the kubelet, then to the bus."""
        async with self._looking:
            self._planner.devices = await self._sights.plan(
                self._planner.resources, standing=self.inventory.standing
            )
            events = self._planned()
            if self._has_looked.is_set():
                await self._courier.bring(events)
                return
            for event in events:
                # the first snapshot tells of them
                self.teller.log_device(event)
            self._courier.tell([])
            self._has_looked.set()
            self._begin()

    async def configure(
        self, found: document.NodeConfiguration, *, config_hash: str, restart: tuple[str, ...]
    ) -> None:
        """Advertise what these rules say from now on; what did not change is left alone."""
        before = dict(self.lives)
        self._planner.follow(found)
        reason, self._reason = self._reason, _Reason.CONFIGURATION_CHANGED
        try:
            await self.look()
        finally:
            self._reason = reason
        after = self.lives
        self.teller.applied(
            config_hash,
            added=tuple(name for name in after if name not in before),
            removed=tuple(name for name in before if name not in after),
            again=tuple(n for n in after if n in before and after[n] is not before[n]),
            restart=restart,
        )

    def judge_by(self, judge: "xid_policy.Policy", told: "gpus.Health") -> None:
        """Judge GPUs by other rules from now on."""
        if self._seen is not None:
            self._seen.judge_by(judge, told)

    async def close(self) -> None:
        """End every life, and let go of the GPUs."""
        await self.lives.end()
        if self._seen:
            await self._seen.source.close()

    async def _live(self, alone: Alone | None) -> None:
        """Live with the kubelet as soon as it is known what there is."""
        await self._has_looked.wait()
        if alone is not None:
            await alone()
        self._specs.remove_stale(self.lives.claims.is_free)
        await self.lives.live()

    async def _watch_devices(self) -> None:
        """Look at the devices whenever their directories change."""
        async with self._sights.looks(self._specs.directories) as looks:
            async for _ in looks:
                await self.look()
                if not self._sights.is_blind:
                    self._checked(_DEVICES, time.monotonic())

    async def _age(self) -> None:
        """Let devices go that have been lost for long enough."""
        clock = asyncio.get_running_loop().time
        while True:
            self._aged.clear()
            try:
                async with asyncio.timeout_at(self.inventory.next_deadline()):
                    await self._aged.wait()
            except TimeoutError:
                await self._courier.bring(self.inventory.tick(now=clock(), at=datetime.now(UTC)))

    async def _take_judged(self, judged: source.Evaluated) -> None:
        """Take what was found out about GPUs."""
        match judged:
            case gpu.Scan():
                if judged.driver is gpu.Driver.REPLACED:
                    logs.logger().warning("driver_replaced", problem=judged.problem)
                    self.stop_reason = vocabulary.StopReason.UPGRADE
                    self.over.set()
                self._planner.look = gpu.latest_scan(self._planner.look, judged)
                await self._courier.bring(self._planned())
                self._begin()
            case gpu.FaultBegan() | gpu.FaultEnded():
                self._courier.soon(self.inventory.apply(judged))
                # hundreds may wait to be judged, and something else to be done
                await asyncio.sleep(0)
            case _:
                assert_never(judged)

    async def _judge(self, resource: str, unit: advertised.Unit, problem: str) -> None:
        """Take the result of an examination."""
        now = time.monotonic()
        self._checked(_CHECKS, now)
        at = datetime.now(UTC)
        await self._courier.bring(self.inventory.checked(resource, unit, problem, now=now, at=at))

    def _brought(self) -> None:
        self._aged.set()
        self._examiner.turned.set()

    def _checked(self, kind: str, at: float) -> None:
        self._checked_at[kind] = at

    def _state(self, life: resource_plugin.Life, now: float) -> resource_status.ResourceState:
        state = life.state(now)
        held = self._pods.held(life.resource)
        return msgspec.structs.replace(
            state,
            problem=state.problem or self._specs.problems.get(life.resource, ""),
            allocated=state.allocated if held is None else held,
            apart=self._pods.apart(life.resource, now),
        )

    def _begin(self) -> None:
        """Say that all resources of the start are there, when everything was looked at once."""
        if self._has_looked.is_set() and (self._seen is None or self._planner.look is not None):
            self.lives.begin()
            self._reason = _Reason.DEVICE_APPEARED

    def _planned(self) -> list[vocabulary.PluginEvent]:
        """Take what was last seen into the inventory, and begin and end lives by it."""
        planner, devices = self._planner, self.inventory
        plan, configured = planner.plan(self._resources_max, standing=devices.resources)
        devices.gpus = planner.gpus or devices.gpus
        devices.terms = planner.terms or devices.terms
        events = devices.look(plan, configured, now=time.monotonic(), at=datetime.now(UTC))
        self._problems = plan.problems
        self._write_specs()
        self.lives.match(self._reason)
        return events

    def _write_specs(self) -> None:
        """Tell the container runtime of what is ours."""
        wanted = {}
        for name in self.inventory.resources:
            rule = self.inventory.rule(name)
            if rule and rule.cdi and self.lives.claims.holds(name):
                wanted[name] = cdi.spec(name, self.inventory.offered(name))
        if self._specs.write(wanted):
            # its directory may be new, and is to be watched
            self._sights.changed.set()
        self._tell_problems()

    def _tell_problems(self) -> None:
        unwritten = (f"{name}: {text}" for name, text in self._specs.problems.items())
        unlisted = [self._unlisted] if self._unlisted else []
        self._courier.problems((*self._problems, *unwritten, *unlisted))
