"""Door to one node: its devices, their lives with the kubelet, and what is to be told about them.

A change goes to the kubelet first and to the bus afterwards, so that no pod lands on a device that
everybody else knows to be broken.
"""

import asyncio
import contextlib
import os
import time
from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

import msgspec

from muster import logs, vocabulary
from muster_plugin import (
    agreement,
    aside,
    beats,
    cdi,
    config,
    devfs,
    examiner,
    ids,
    inotify,
    inventory,
    kubelet,
    podresources,
    rules,
    signals,
    simulated,
    specs,
    teller,
    units,
)

_Reason = vocabulary.RegistrationReason
_LOOK_PERIOD_S: Final = 30.0
_SETTLE_S: Final = 0.002
_LOOK_TIMEOUT_S: Final = 10.0
_LOOK_AT_SOCKETS_S: Final = 5.0
_SETTLE_MAX_S: Final = 1.0
_RELOOK_TIMEOUT_S: Final = 0.5
_FILES_TIMEOUT_S: Final = 1.0
_DEV: Final = "/dev/"
_DEVICES: Final = "devices"
_CHECKS: Final = "checks"
_PODS: Final = "pods"
_SOCKETS: Final = "sockets"
_STUCK_S: Final = 120.0
"""Three of the longer period, and the time that a look may take."""


class Node:
    """Everything the plugin does on its node, but for the bus and the probes.

    `line` makes what a new life is spoken to by. Raises ValueError if the node's resources cannot
    stand together.
    """

    def __init__(
        self,
        settings: config.Settings,
        name: str,
        *,
        line: Callable[[], kubelet.Line],
        periods: kubelet.Periods | None = None,
    ) -> None:
        self.name = name
        self.plugin = settings.name
        self.inventory = inventory.Inventory(
            node=name, plugin=settings.name, gpus=settings.simulated_gpus
        )
        self.lives: dict[str, kubelet.Life] = {}
        self.problem_turned = asyncio.Event()
        """Set when something that a heartbeat should tell at once begins or ends."""
        self.checked_at: dict[str, float] = {}
        self._root = Path(settings.kubelet.directory)
        self._resources = settings.at(name)
        self._line = line
        self._periods = periods
        self.teller = teller.Teller(name, settings.name)
        self._specs = specs.Specs(Path(settings.cdi.directory))
        self._looking = asyncio.Lock()
        self._scanning, self._files = aside.Lane(), aside.Lane()
        self._agreement = agreement.Agreement()
        self._pods = podresources.PodResources(self._root / podresources.SOCKET, self._heard)
        self._examiner = examiner.Examiner(self.inventory, self._judge)
        self._lives_turned = asyncio.Event()
        self._aged = asyncio.Event()
        self._script = _script(settings, name)
        if self._script:
            for change in self._script.look():
                self._tell(self.inventory.apply(change))
        self._reason = _Reason.START
        for event in self._looked(self._scan()):
            # the first snapshot tells of them
            self.teller.log_device(event)
        self._tell([])
        self._unsettled = set(self.lives)
        self._settled = asyncio.Event()
        self._settle_if_done()

    # What others ask

    def states(self) -> list[beats.ResourceState]:
        """Return what is known about every resource now."""
        now = time.monotonic()
        return [self._state(life, now) for life in self.lives.values()]

    @property
    def kubelet_socket(self) -> str:
        """The kubelet.sock of the newest registration."""
        lives = self.lives.values()
        newest = max(lives, key=lambda life: life.machine.registered_at or 0.0, default=None)
        return newest.machine.kubelet if newest else ""

    @property
    def has_served(self) -> bool:
        """Whether every resource was registered at least once."""
        return all(life.machine.registrations for life in self.lives.values())

    def stuck(self, now: float) -> str | None:
        """Say which look that should be repeated for ever has not been, or None."""
        for kind in (_SOCKETS, _DEVICES):
            age_s = now - self.checked_at.get(kind, now)
            if age_s > _STUCK_S:
                return f"the last look at the {kind} was {age_s:.0f} s ago"
        return None

    # What a life asks and tells

    async def absent(self, paths: Sequence[str]) -> str:
        """Say which of these paths of the host are gone, after telling the kubelet; else empty."""
        gone = [path for path in paths if path.startswith(_DEV) and not os.path.exists(path)]  # noqa: PTH110, ASYNC240  # devtmpfs never hangs; a Path costs more than the answer
        others = [path for path in paths if not path.startswith(_DEV)]
        if others:
            gone += await self._files.run(lambda: _missing(others), timeout_s=_FILES_TIMEOUT_S)
        if not gone:
            return ""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_RELOOK_TIMEOUT_S):
                await self.look()
        return f"{', '.join(gone)}: no such file or directory"

    def reported(self, resource: str, report: signals.Report, endpoint: str) -> None:
        """Tell that the kubelet lists a resource, or has lost it."""
        self._unsettled.discard(resource)
        self._settle_if_done()
        self.teller.registration(resource, report, endpoint)

    def allocated(self, resource: str, device_ids: tuple[str, ...]) -> None:
        """Tell which devices a container was given; whose it is, the kubelet knows later."""
        self.teller.allocation(resource, device_ids)
        self._pods.soon.set()

    def problem_changed(self) -> None:
        """Let the next beat come at once."""
        self.problem_turned.set()

    # What goes on for ever

    async def settle(self) -> None:
        """Wait until every resource is registered or refused, but not for long."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_SETTLE_MAX_S):
                await self._settled.wait()

    async def live(self) -> None:
        """Live every life, those too that begin later; at the end, end them all."""
        running: dict[str, tuple[kubelet.Life, asyncio.Task[None]]] = {}
        async with asyncio.TaskGroup() as tasks:
            while True:
                self._lives_turned.clear()
                for name, life in self.lives.items():
                    known, before = running.get(name, (None, None))
                    if known is not life:
                        running[name] = life, tasks.create_task(_live(life, before))
                await self._lives_turned.wait()

    async def watch_sockets(self) -> None:
        """Look at the sockets of kubelet and plugin whenever their directories change."""
        folders = [
            self._root / name for name in (config.SOCKET_DIRECTORY, config.REGISTRY_DIRECTORY)
        ]
        looks = inotify.looks(
            lambda: [folder for folder in folders if folder.is_dir()], period_s=_LOOK_AT_SOCKETS_S
        )
        async with contextlib.aclosing(looks):
            async for _ in looks:
                for life in [*self.lives.values()]:
                    life.look()
                self.checked_at[_SOCKETS] = time.monotonic()

    async def watch_devices(self) -> None:
        """Look at the devices whenever their directories change."""
        looks = inotify.looks(self._directories, period_s=_LOOK_PERIOD_S, settle_s=_SETTLE_S)
        async with contextlib.aclosing(looks):
            async for _ in looks:
                try:
                    await self.look()
                except TimeoutError:
                    logs.logger().warning("look_at_devices_hangs", waited_s=_LOOK_TIMEOUT_S)
                    continue
                self.checked_at[_DEVICES] = time.monotonic()

    @property
    def has_script(self) -> bool:
        """Whether there is a fault script to watch."""
        return self._script is not None

    async def watch_script(self) -> None:
        """Take what the fault script says whenever it changes."""
        assert self._script is not None, "there is a script to watch"
        looks = inotify.looks(
            self._script.directories, period_s=_LOOK_PERIOD_S, mask=inotify.CONTENTS
        )
        async with contextlib.aclosing(looks):
            async for _ in looks:
                for change in self._script.look():
                    await self.take(self.inventory.apply(change))
                self.checked_at[simulated.KIND] = time.monotonic()

    async def age(self) -> None:
        """Let devices go that have been lost for long enough."""
        clock = asyncio.get_running_loop().time
        while True:
            self._aged.clear()
            try:
                async with asyncio.timeout_at(self.inventory.next_deadline()):
                    await self._aged.wait()
            except TimeoutError:
                await self.take(self.inventory.tick(now=clock(), at=datetime.now(UTC)))

    async def examine(self) -> None:
        """Examine the devices whose resource says how, each on its period."""
        await self._examiner.examine()

    async def follow_pods(self) -> None:
        """Follow what the kubelet says of pods and devices, where its socket is mounted."""
        await self._pods.follow()

    async def look(self) -> None:
        """Look at the devices; bring what changed to the kubelet, then to the bus.

        Raises TimeoutError if the host's files do not answer.
        """
        async with self._looking:
            plan = await self._scanning.run(self._scan, timeout_s=_LOOK_TIMEOUT_S)
            await self.take(self._looked(plan))

    async def configure(
        self, resources: tuple[rules.Resource, ...], *, config_hash: str, restart: tuple[str, ...]
    ) -> None:
        """Advertise these resources from now on; what did not change is left alone."""
        before = dict(self.lives)
        self._resources, self._reason = resources, _Reason.CONFIGURATION_CHANGED
        try:
            await self.look()
        finally:
            self._reason = _Reason.START
        after = self.lives
        self.teller.applied(
            config_hash,
            added=tuple(name for name in after if name not in before),
            removed=tuple(name for name in before if name not in after),
            again=tuple(n for n in after if n in before and after[n] is not before[n]),
            restart=restart,
        )

    async def take(self, events: Iterable[vocabulary.PluginEvent]) -> None:
        """Bring changes to the kubelet, then to the bus."""
        told = [*events]
        resources = {inventory.resource_of(event) for event in told}
        await asyncio.gather(
            *(self.lives[name].advertise() for name in resources if name in self.lives)
        )
        self._tell(told)
        self._aged.set()
        self._examiner.turned.set()

    async def close(self) -> None:
        """End every life: streams, servers, sockets; and take back what containers are told."""
        await asyncio.gather(*(life.end() for life in self.lives.values()))
        self._specs.update({})

    def _state(self, life: kubelet.Life, now: float) -> beats.ResourceState:
        state = life.state(now)
        held = self._agreement.held(life.resource)
        return msgspec.structs.replace(
            state,
            allocated=state.allocated if held is None else held,
            apart=self._agreement.apart(life.resource, now),
        )

    async def _heard(self, listing: agreement.Listing | None) -> None:
        """Take what the kubelet says of pods and devices."""
        now, at = time.monotonic(), datetime.now(UTC)
        ours = {name: self.inventory.devices(name) for name in self.inventory.resources}
        for found in self._agreement.compare(listing, ours, now):
            self.teller.allocation(found.resource, found.device_ids, pod=found.pod)
        held = listing.held() if listing else None
        await self.take(self.inventory.held(held, now=now, at=at))
        self.checked_at[_PODS] = now

    async def _judge(self, resource: str, unit: units.Unit, problem: str) -> None:
        """Take the result of an examination."""
        at = datetime.now(UTC)
        self.checked_at[_CHECKS] = time.monotonic()
        await self.take(
            self.inventory.checked(resource, unit, problem, now=time.monotonic(), at=at)
        )

    def _entries(self) -> list[rules.Nodes]:
        return [nodes for resource in self._resources for _, nodes in resource.nodes()]

    def _directories(self) -> set[Path]:
        return devfs.directories(self._entries())

    def _scan(self) -> units.Plan:
        """Look at the devices; runs in a thread."""
        return units.plan(self._resources, devfs.scan(self._entries()))

    def _looked(self, plan: units.Plan) -> list[vocabulary.PluginEvent]:
        """Take a look into the inventory, and begin and end lives by it."""
        events = self.inventory.look(
            plan, self._resources, now=time.monotonic(), at=datetime.now(UTC)
        )
        self.teller.problems(plan.problems)
        self._specs.update(self._wanted_specs())
        self._match_lives()
        return events

    def _wanted_specs(self) -> dict[str, bytes]:
        wanted = {}
        for name in self.inventory.resources:
            rule = self.inventory.rule(name)
            if rule and rule.cdi:
                wanted[cdi.file_name(name)] = cdi.spec(name, self.inventory.offered(name))
        return wanted

    def _match_lives(self) -> None:
        """Begin the lives of new resources, and end those of resources that are gone.

        A resource without devices keeps its life: the node then offers 0 of it, which tells a pod,
        a scheduler and a person more than silence. One that a match gave its name has no name to
        keep when the match is gone.
        """
        for name in self.lives.keys() - set(self.inventory.resources):
            self.lives.pop(name).over.set()
        for name in self.inventory.resources:
            terms = _terms(self.inventory.rule(name))
            life = self.lives.get(name)
            if life is not None and life.terms == terms:
                continue
            if life is not None:
                life.over.set()
            self.lives[name] = kubelet.Life(
                name,
                terms,
                root=self._root,
                devices=self.inventory,
                line=self._line(),
                hears=self,
                periods=self._periods,
                reason=self._reason,
            )
        self._lives_turned.set()

    def _settle_if_done(self) -> None:
        if not self._unsettled:
            self._settled.set()

    def _tell(self, events: Iterable[vocabulary.PluginEvent]) -> None:
        for event in events:
            self.teller.device(event)
        for name in self.inventory.resources:
            if self.teller.shortage(name, self.inventory.shortage(name)):
                self.problem_turned.set()


async def _live(life: kubelet.Life, before: asyncio.Task[None] | None) -> None:
    """Live a life as soon as the one before it, of the same resource, is over."""
    if before is not None:
        await asyncio.wait([before])
    await life.live()


def _terms(rule: rules.Resource | None) -> kubelet.Terms:
    if rule is None:
        return kubelet.Terms()
    return kubelet.Terms(registration=rule.registration, pre_start=rule.pre_start)


def _missing(paths: Iterable[str]) -> list[str]:
    return [path for path in paths if not Path(path).exists()]


def _script(settings: config.Settings, node: str) -> simulated.FaultScript | None:
    gpus = settings.simulated_gpus
    if not gpus or not gpus.faults:
        return None
    uuids = tuple(ids.gpu_uuid(node, index) for index in range(gpus.count))
    return simulated.FaultScript(Path(gpus.faults), uuids)
