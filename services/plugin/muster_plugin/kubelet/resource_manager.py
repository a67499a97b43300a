"""Adapter: the lives of a node's resources with the kubelet: each begins and ends alone."""

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Final

from muster import machine, vocabulary
from muster_plugin.config import resources, settings
from muster_plugin.discovery import inotify
from muster_plugin.inventory import inventory
from muster_plugin.kubelet import resource_locks, resource_plugin, server

_LOOK_PERIOD_S: Final = 5.0
_SETTLE_MAX_S: Final = 1.0


class Lives(Mapping[str, resource_plugin.Life]):
    """The life of every resource that is advertised, by its name.

    `line` makes what a new life is spoken to by; `root` is the kubelet's directory.
    """

    def __init__(
        self,
        root: Path,
        devices: inventory.Inventory,
        *,
        line: machine.Lines,
        hears: resource_plugin.Listener,
        periods: resource_plugin.Periods | None = None,
    ) -> None:
        self.claims = resource_locks.Claims(root / settings.SOCKET_DIRECTORY)
        self._root = root
        self._devices = devices
        self._line = line
        self._hears = hears
        self._periods = periods
        self._lives: dict[str, resource_plugin.Life] = {}
        self._turned = asyncio.Event()
        self._unsettled: set[str] | None = None
        self._settled = asyncio.Event()

    def __getitem__(self, resource: str) -> resource_plugin.Life:
        return self._lives[resource]

    def __iter__(self) -> Iterator[str]:
        return iter(self._lives)

    def __len__(self) -> int:
        return len(self._lives)

    @property
    def kubelet_socket(self) -> str:
        """The kubelet.sock of the newest registration."""
        lives = self._lives.values()
        newest = max(lives, key=lambda life: life.machine.registered_at or 0.0, default=None)
        return newest.machine.kubelet if newest else ""

    @property
    def have_served(self) -> bool:
        """Whether every resource was registered at least once."""
        return all(life.machine.registrations for life in self._lives.values())

    def match(self, reason: vocabulary.RegistrationReason) -> None:
        """Begin the lives of new resources, and end those of resources that are gone.

        A resource without devices keeps its life: the node then offers 0 of it, which tells a pod,
        a scheduler and a person more than silence. One that a match gave its name has no name to
        keep when the match is gone.
        """
        for name in self._lives.keys() - set(self._devices.resources):
            self._lives.pop(name).over.set()
            self.settled(name)
        for name in self._devices.resources:
            terms = _terms(self._devices.rule(name))
            life = self._lives.get(name)
            if life is not None and life.terms == terms:
                continue
            if life is not None:
                life.over.set()
            self._lives[name] = resource_plugin.Life(
                name,
                terms,
                place=resource_plugin.Place(self._root, self.claims),
                devices=self._devices,
                line=self._line(),
                hears=self._hears,
                periods=self._periods,
                reason=reason,
            )
        self._turned.set()

    def begin(self) -> None:
        """Say that all resources of the start are there, so that `settle` knows them."""
        if self._unsettled is None:
            listed = {name for name, life in self._lives.items() if life.machine.registrations}
            self._unsettled = set(self._lives) - listed
            self._settle_if_done()

    def settled(self, resource: str) -> None:
        """Say that the kubelet has answered about a resource."""
        if self._unsettled is not None:
            self._unsettled.discard(resource)
            self._settle_if_done()

    async def settle(self) -> None:
        """Wait until every resource is registered or refused, but not for long."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_SETTLE_MAX_S):
                await self._settled.wait()

    async def live(self) -> None:
        """Live every life, those too that begin later; at the end, end them all."""
        running: dict[str, tuple[resource_plugin.Life, asyncio.Task[None]]] = {}
        async with asyncio.TaskGroup() as tasks:
            while True:
                self._turned.clear()
                for name, life in self._lives.items():
                    known, before = running.get(name, (None, None))
                    if known is not life:
                        running[name] = life, tasks.create_task(self._live(life, before))
                for name in [name for name, (_, task) in running.items() if task.done()]:
                    del running[name]
                await self._turned.wait()

    async def watch(self, looked: Callable[[float], None]) -> None:
        """Look at the sockets of kubelet and plugin whenever their directories change."""
        folders = [
            self._root / name for name in (settings.SOCKET_DIRECTORY, settings.REGISTRY_DIRECTORY)
        ]
        looks = inotify.scan_times(
            lambda: [folder for folder in folders if folder.is_dir()], period_s=_LOOK_PERIOD_S
        )
        async with contextlib.aclosing(looks):
            async for _ in looks:
                for life in [*self._lives.values()]:
                    life.look()
                looked(time.monotonic())

    async def advertise(self, resources: Iterable[str]) -> None:
        """Bring what changed of these resources to the kubelet."""
        lives = [self._lives[name] for name in resources if name in self._lives]
        await asyncio.gather(*(life.advertise() for life in lives))

    async def end(self) -> None:
        """End every life: streams, servers, sockets; then others may serve."""
        await asyncio.gather(*(life.end() for life in self._lives.values()))
        await server.settle()
        self.claims.close()

    async def _live(self, life: resource_plugin.Life, before: asyncio.Task[None] | None) -> None:
        """Live a life as soon as the one before it, of the same resource, is over."""
        if before is not None:
            await asyncio.wait([before])
        await life.live()
        if life.resource not in self._lives:
            self.claims.give_back(life.resource)

    def _settle_if_done(self) -> None:
        if not self._unsettled:
            self._settled.set()


def _terms(rule: resources.Resource | None) -> resource_plugin.Terms:
    if rule is None:
        return resource_plugin.Terms()
    return resource_plugin.Terms(registration=rule.registration, pre_start=rule.pre_start)
