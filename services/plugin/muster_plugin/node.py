"""Door to one node: its devices, their lives with the kubelet, and what is to be told about them.

A change goes to the kubelet first and to the bus afterwards, so that no pod lands on a device that
everybody else knows to be broken.
"""

import asyncio
import contextlib
import os
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Final, assert_never

import msgspec

from muster import logs, vocabulary
from muster_plugin import (
    agreement,
    aside,
    beats,
    cdi,
    config,
    examiner,
    gpu,
    gpu_answer,
    gpu_units,
    gpus,
    inotify,
    inventory,
    kubelet,
    lines,
    lives,
    podresources,
    rulebook,
    rules,
    sights,
    signals,
    specs,
    start,
    teller,
    units,
)

if TYPE_CHECKING:
    from muster_plugin import gpu_rules, policy

_Reason = vocabulary.RegistrationReason
_LOOK_PERIOD_S: Final = 30.0
_SETTLE_S: Final = 0.002
_LOOK_SHARE: Final = 0.2
"""Of the time, when devices come and go without end."""
_RELOOK_TIMEOUT_S: Final = 0.5
_FILES_TIMEOUT_S: Final = 1.0
_FEW_NODES: Final = 200
"""Planned in less time than it takes to do it elsewhere."""
_DEV: Final = "/dev/"
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
        settings: config.Settings,
        name: str,
        *,
        line: lines.Lines,
        seen: gpus.Gpus | None = None,
        periods: kubelet.Periods | None = None,
        resources_max: int = start.RESOURCES_MAX,
    ) -> None:
        self.name = name
        self.plugin = settings.name
        self.inventory = inventory.Inventory(node=name, plugin=settings.name)
        self.problem_turned = asyncio.Event()
        """Set when something that a heartbeat should tell at once begins or ends."""
        self.over = asyncio.Event()
        """Set when the process is to end: only a new one can speak to a new GPU driver."""
        self.stop_reason = vocabulary.StopReason.SIGNAL
        self.teller = teller.Teller(name, settings.name)
        self._resources_max = resources_max
        self._root = Path(settings.kubelet.directory)
        self.lives = lives.Lives(self._root, self.inventory, line=line, hears=self, periods=periods)
        self._rules = settings.at(name)
        self._seen = seen
        self._look: gpu.Look | None = None
        self._known: dict[str, rules.Resource] = {}
        self._checked_at: dict[str, float] = {}
        self._specs = specs.Specs(Path(settings.cdi.directory))
        self._looking = asyncio.Lock()
        self._sights = sights.Sights()
        self._planning, self._files = aside.Lane(), aside.Lane()
        self._agreement = agreement.Agreement()
        self._pods = podresources.PodResources(self._root / podresources.SOCKET, self._heard)
        self._examiner = examiner.Examiner(self.inventory, self._judge)
        self._aged = asyncio.Event()
        self._reason = _Reason.START
        self._devices = units.Plan()
        self._problems: tuple[str, ...] = ()
        self._unlisted = ""
        self._untold: list[vocabulary.PluginEvent] = []
        self._telling = asyncio.Lock()
        self._found = asyncio.Event()
        self._has_looked = asyncio.Event()

    # What others ask

    def states(self) -> list[beats.ResourceState]:
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
        gone = await self._missing(paths)
        if not gone:
            return ""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_RELOOK_TIMEOUT_S):
                await self.look()
        return f"{', '.join(gone)}: no such file or directory"

    async def present(self, paths: Sequence[str]) -> frozenset[str]:
        """Return those of these paths of the host that are there."""
        return frozenset(paths).difference(await self._missing(paths)) if paths else frozenset()

    def reported(self, resource: str, report: signals.Report, endpoint: str) -> None:
        """Tell that the kubelet lists a resource, or has lost it."""
        self.lives.settled(resource)
        self.teller.registration(resource, report, endpoint)

    def allocated(self, resource: str, device_ids: tuple[str, ...]) -> None:
        """Tell which devices a container was given; whose it is, the kubelet knows later."""
        self.teller.allocation(resource, device_ids)
        self._pods.soon.set()

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
            *([self._seen.watch(self._take_judged), self._tell_found()] if self._seen else []),
        )

    async def look(self) -> None:
        """Look at the device nodes; bring what changed to the kubelet, then to the bus."""
        async with self._looking:
            configured = self._rules.resources
            seen = await self._sights.look(
                [nodes for resource in configured for _, nodes in resource.nodes()]
            )
            standing = self.inventory.standing

            def plan() -> units.Plan:
                return units.plan(configured, seen, standing=standing)

            if len(seen.nodes) <= _FEW_NODES:
                self._devices = plan()
            else:
                self._devices = await self._planning.run(plan, timeout_s=None)
            events = self._planned()
            if self._has_looked.is_set():
                await self.take(events)
                return
            for event in events:
                # the first snapshot tells of them
                self.teller.log_device(event)
            self._tell([])
            self._has_looked.set()
            self._begin()

    async def configure(
        self, found: rulebook.Here, *, config_hash: str, restart: tuple[str, ...]
    ) -> None:
        """Advertise what these rules say from now on; what did not change is left alone."""
        before = dict(self.lives)
        self._known.clear()
        self._rules = found
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

    def judge_by(self, judge: "policy.Policy", told: "gpu_rules.Health") -> None:
        """Judge GPUs by other rules from now on."""
        if self._seen is not None:
            self._seen.judge_by(judge, told)

    async def take(self, events: Iterable[vocabulary.PluginEvent]) -> None:
        """Bring changes to the kubelet, then to the bus, in order.

        What changes meanwhile waits, and is brought together: of many changes to a long list the
        kubelet needs only the last.
        """
        self._untold += events
        async with self._telling:
            told, self._untold = self._untold, []
            # a resource that was named by what it held may have left with the last of it
            self.lives.match(self._reason)
            await self.lives.advertise({inventory.resource_of(event) for event in told})
            self._tell(told)
        self._aged.set()
        self._examiner.turned.set()

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
        looks = inotify.looks(
            lambda: self._sights.directories | self._specs.directories(),
            period_s=_LOOK_PERIOD_S,
            settle_s=_SETTLE_S,
            share=_LOOK_SHARE,
            changed=self._sights.changed,
        )
        async with contextlib.aclosing(looks):
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
                await self.take(self.inventory.tick(now=clock(), at=datetime.now(UTC)))

    async def _take_judged(self, judged: gpus.Judged) -> None:
        """Take what was found out about GPUs."""
        match judged:
            case gpu.Look():
                if judged.driver is gpu.Driver.REPLACED:
                    logs.logger().warning("driver_replaced", problem=judged.problem)
                    self.stop_reason = vocabulary.StopReason.UPGRADE
                    self.over.set()
                self._look = gpu.newest(self._look, judged)
                await self.take(self._planned())
                self._begin()
            case gpu.Began() | gpu.Ended():
                self._untold += self.inventory.apply(judged)
                self._found.set()
                # hundreds may wait to be judged, and something else to be done
                await asyncio.sleep(0)
            case _:
                assert_never(judged)

    async def _tell_found(self) -> None:
        """Bring what was found out about GPUs to the kubelet and the bus."""
        while True:
            await self._found.wait()
            self._found.clear()
            await self.take([])

    async def _heard(self, listing: agreement.Listing | None) -> None:
        """Take what the kubelet says of pods and devices."""
        now, at = time.monotonic(), datetime.now(UTC)
        ours = {name: self.inventory.devices(name) for name in self.inventory.resources}
        for found in self._agreement.compare(listing, ours, now):
            self.teller.allocation(found.resource, found.device_ids, pod=found.pod)
        held = listing.held() if listing else None
        await self.take(self.inventory.held(held, now=now, at=at))
        if listing is not None:
            self._checked(_PODS, now)

    async def _judge(self, resource: str, unit: units.Unit, problem: str) -> None:
        """Take the result of an examination."""
        now = time.monotonic()
        self._checked(_CHECKS, now)
        at = datetime.now(UTC)
        await self.take(self.inventory.checked(resource, unit, problem, now=now, at=at))

    def _checked(self, kind: str, at: float) -> None:
        self._checked_at[kind] = at

    def _state(self, life: kubelet.Life, now: float) -> beats.ResourceState:
        state = life.state(now)
        held = self._agreement.held(life.resource)
        return msgspec.structs.replace(
            state,
            problem=state.problem or self._specs.problems.get(life.resource, ""),
            allocated=state.allocated if held is None else held,
            apart=self._agreement.apart(life.resource, now),
        )

    async def _missing(self, paths: Sequence[str]) -> list[str]:
        gone = [path for path in paths if path.startswith(_DEV) and not os.path.exists(path)]  # noqa: PTH110, ASYNC240  # devtmpfs never hangs; a Path costs more than the answer
        others = [path for path in paths if not path.startswith(_DEV)]
        if others:
            gone += await self._files.run(lambda: _missing(others), timeout_s=_FILES_TIMEOUT_S)
        return gone

    def _begin(self) -> None:
        """Say that all resources of the start are there, when everything was looked at once."""
        if self._has_looked.is_set() and (self._seen is None or self._look is not None):
            self.lives.begin()
            self._reason = _Reason.DEVICE_APPEARED

    def _planned(self) -> list[vocabulary.PluginEvent]:
        """Take what was last seen into the inventory, and begin and end lives by it."""
        plan, configured = self._devices, self._rules.resources
        if self._look is not None and self._rules.gpus is not None:
            of_gpus = gpu_units.plan(self._look, self._rules.gpus)
            # a MIG profile that is gone leaves with its devices, not with the look
            self._known.update({offer.name: offer.rule for offer in of_gpus.offers})
            configured += tuple(self._known.values())
            plan = units.together(plan, of_gpus)
            self.inventory.gpus = gpu_units.node(self._look, self._rules.gpus)
            self.inventory.terms = gpu_answer.Terms(rules=self._rules.gpus, look=self._look)
        plan = units.bounded(plan, self._resources_max, standing=self.inventory.resources)
        events = self.inventory.look(plan, configured, now=time.monotonic(), at=datetime.now(UTC))
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
        if self.teller.problems((*self._problems, *unwritten, *unlisted)):
            self.problem_turned.set()

    def _tell(self, events: Iterable[vocabulary.PluginEvent]) -> None:
        for event in events:
            self.teller.device(event)
        for name in self.inventory.resources:
            if self.teller.shortage(name, self.inventory.shortage(name)):
                self.problem_turned.set()


def _missing(paths: Iterable[str]) -> list[str]:
    return [path for path in paths if not Path(path).exists()]
