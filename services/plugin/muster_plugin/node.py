"""Door to one node: its devices, their lives with the kubelet, and what is to be told about them.

A change of health goes to the kubelet first and to the bus afterwards, so that no pod lands on a
device that everybody else knows to be broken.
"""

import asyncio
import collections
import contextlib
import time
from collections.abc import Callable, Iterable
from datetime import UTC, datetime
from pathlib import Path
from typing import Final, Protocol, assert_never

from muster import logs, vocabulary
from muster_plugin import (
    beats,
    config,
    devnodes,
    inotify,
    inventory,
    kubelet,
    signals,
    simulated,
)

_PENDING_MAX: Final = 1_000
_LOOK_PERIOD_S: Final = 30.0
_LOOK_AT_SOCKETS_S: Final = 5.0
_SETTLE_MAX_S: Final = 1.0


class Source(Protocol):
    """Where faults come from: knows what to watch, and looks when told to."""

    def directories(self) -> set[Path]:
        """Return the directories in which something may change."""

    def look(self) -> list[inventory.Change]:
        """Return what changed since the last look."""


class Node:
    """Everything the plugin does on its node, but for the bus and the probes.

    `tell` returns, for a resource, what puts signals into the inbox of its life.
    """

    def __init__(
        self,
        settings: config.Settings,
        name: str,
        sockets: Path,
        *,
        tell: Callable[[str], Callable[[signals.Signal], None]],
        periods: kubelet.Periods | None = None,
    ) -> None:
        self.name = name
        self.plugin = settings.name
        self.inventory = inventory.Inventory(
            inventory.planned(settings, node=name), node=name, plugin=settings.name
        )
        self.problem_turned = asyncio.Event()
        """Set when something begins to keep a resource from the kubelet, or no longer does."""
        self.checked_at: dict[str, float] = {}
        self._sockets = sockets
        self._log = logs.logger()
        self._pending: collections.deque[vocabulary.Event] = collections.deque(maxlen=_PENDING_MAX)
        self._publish: Callable[[vocabulary.Event], None] = self._pending.append
        self._unsettled = set(settings.resource_names)
        self._settled = asyncio.Event()
        self.lives = {
            resource: kubelet.Life(
                resource,
                sockets,
                devices=self.inventory,
                tell=tell(resource),
                hears=self,
                periods=periods,
            )
            for resource in settings.resource_names
        }
        self.sources = dict(_sources(settings, name))
        for source in self.sources.values():
            for change in source.look():
                self._apply(change)

    # What others ask

    def states(self) -> list[beats.ResourceState]:
        """Return what is known about every resource now."""
        now = time.monotonic()
        return [life.state(now) for life in self.lives.values()]

    @property
    def kubelet(self) -> str:
        """The kubelet.sock of the newest registration."""
        newest = max(self.lives.values(), key=lambda life: life.machine.registered_at or 0.0)
        return newest.machine.kubelet

    @property
    def has_served(self) -> bool:
        """Whether every resource was registered at least once."""
        return all(life.machine.registrations for life in self.lives.values())

    def publish_to(self, publish: Callable[[vocabulary.Event], None]) -> None:
        """Hand over the events that wait, and every later one."""
        while self._pending:
            publish(self._pending.popleft())
        self._publish = publish

    # What a life tells

    def reported(self, resource: str, report: signals.Report, endpoint: str) -> None:
        """Turn a report into an event."""
        self._unsettled.discard(resource)
        if not self._unsettled:
            self._settled.set()
        at = datetime.now(UTC)
        match report:
            case signals.Listed(reason=reason, registrations=registrations):
                self._publish(
                    vocabulary.PluginRegistered(
                        node=self.name,
                        plugin=self.plugin,
                        at=at,
                        resource=resource,
                        endpoint=endpoint,
                        reason=reason,
                        registrations=registrations,
                    )
                )
            case signals.Lost(reason=reason, detail=detail):
                self._publish(
                    vocabulary.PluginDeregistered(
                        node=self.name,
                        plugin=self.plugin,
                        at=at,
                        resource=resource,
                        reason=reason,
                        detail=detail,
                    )
                )
            case _:
                assert_never(report)

    def allocated(self, resource: str, device_ids: tuple[str, ...]) -> None:
        """Turn an allocation into an event."""
        self._publish(
            vocabulary.AllocationObserved(
                node=self.name,
                plugin=self.plugin,
                at=datetime.now(UTC),
                resource=resource,
                device_ids=device_ids,
            )
        )

    def problem_changed(self) -> None:
        """Let the next beat come at once."""
        self.problem_turned.set()

    # What goes on for ever

    async def settle(self) -> None:
        """Wait until every resource is registered or refused, but not for long."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_SETTLE_MAX_S):
                await self._settled.wait()

    async def watch_sockets(self) -> None:
        """Look at the sockets of kubelet and plugin whenever their directory changes."""
        looks = inotify.looks(lambda: [self._sockets], period_s=_LOOK_AT_SOCKETS_S)
        async with contextlib.aclosing(looks):
            async for _ in looks:
                for life in self.lives.values():
                    life.look()
                self.checked_at["sockets"] = time.monotonic()

    async def watch(self, kind: str, source: Source) -> None:
        """Take what a source finds whenever its directories change."""
        mask = inotify.CONTENTS if kind == simulated.KIND else inotify.NAMES
        looks = inotify.looks(source.directories, period_s=_LOOK_PERIOD_S, mask=mask)
        async with contextlib.aclosing(looks):
            async for _ in looks:
                await self.take(source.look())
                self.checked_at[kind] = time.monotonic()

    async def take(self, changes: Iterable[inventory.Change]) -> None:
        """Bring changes to the kubelet, then to the bus."""
        for change in changes:
            turned = self.inventory.apply(change)
            resources = {event.resource for event in turned}
            await asyncio.gather(*(self.lives[name].advertise() for name in resources))
            self._tell(turned)

    async def close(self) -> None:
        """End every life: streams, servers, sockets."""
        await asyncio.gather(*(life.end() for life in self.lives.values()))

    def _apply(self, change: inventory.Change) -> None:
        self._tell(self.inventory.apply(change))

    def _tell(self, turned: Iterable[vocabulary.DeviceHealthChanged]) -> None:
        for event in turned:
            healthy = event.health is vocabulary.Health.HEALTHY
            (self._log.info if healthy else self._log.warning)(
                "device_healthy" if healthy else "device_unhealthy",
                resource=event.resource,
                device=event.device_id,
                reason=event.reason,
            )
            self._publish(event)


def _sources(settings: config.Settings, node: str) -> Iterable[tuple[str, Source]]:
    paths = [path for resource in settings.resources for path in resource.paths]
    if paths:
        yield devnodes.KIND, devnodes.DeviceNodes(paths)
    gpus = settings.simulated_gpus
    if gpus and gpus.faults:
        uuids = tuple(inventory.gpu_uuid(node, index) for index in range(gpus.count))
        yield simulated.KIND, simulated.FaultScript(Path(gpus.faults), uuids)
