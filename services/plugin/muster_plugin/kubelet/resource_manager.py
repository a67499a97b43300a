"""Adapter: runs a plugin for each resource, and has it check its sockets after changes.

The modules that serve a resource, and with them grpcio, are imported with the first resource. A
plugin that only watches others does not import them.
"""

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Final

from muster import machine, vocabulary
from muster_plugin.config import settings
from muster_plugin.inventory import inventory
from muster_plugin.kubelet import kubelet_socket, plugin_sockets

if TYPE_CHECKING:
    from muster_plugin.config import resources as config_resources
    from muster_plugin.kubelet import resource_plugin

_FIRST_ANSWERS_TIMEOUT_S: Final = 1.0


class ResourcePlugins(Mapping[str, "resource_plugin.ResourcePlugin"]):
    """The device plugin of each advertised resource, by name; `root` is the kubelet's directory."""

    def __init__(
        self,
        root: Path,
        devices: inventory.Inventory,
        *,
        new_runner: machine.NewRunner,
        observer: "resource_plugin.Observer",
        timing: "resource_plugin.Timing | None" = None,
    ) -> None:
        self.locks = plugin_sockets.ResourceLocks(root / settings.SOCKET_DIRECTORY)
        self._root = root
        self._devices = devices
        self._new_runner = new_runner
        self._observer = observer
        self._timing = timing
        self._plugins: dict[str, resource_plugin.ResourcePlugin] = {}
        self._running: dict[str, tuple[resource_plugin.ResourcePlugin, asyncio.Task[None]]] = {}
        self._handed_over: list[resource_plugin.ResourcePlugin] = []
        self._is_handed_over = False
        self._changed = asyncio.Event()
        self._unanswered: set[str] | None = None
        self._all_answered = asyncio.Event()

    def __getitem__(self, resource: str) -> "resource_plugin.ResourcePlugin":
        return self._plugins[resource]

    def __iter__(self) -> Iterator[str]:
        return iter(self._plugins)

    def __len__(self) -> int:
        return len(self._plugins)

    @property
    def kubelet_socket(self) -> str:
        """The identity of kubelet.sock at the latest registration; empty before the first one."""
        plugins = self._plugins.values()
        newest = max(plugins, key=lambda plugin: plugin.machine.registered_at or 0.0, default=None)
        return newest.machine.kubelet if newest else ""

    @property
    def all_registered(self) -> bool:
        """Whether every resource was registered at least once."""
        return all(plugin.machine.registrations for plugin in self._plugins.values())

    def reconcile(self, reason: vocabulary.RegistrationReason) -> None:
        """Start the plugins of new resources, and stop those of resources that are gone.

        A plugin whose resource must be registered differently is replaced.

        A resource without devices keeps its plugin: the node then offers 0 devices, which is
        clearer to schedulers and people than no entry. A resource named after a matched device is
        removed with that device. While the resources are handed over, no plugin is started or
        stopped.
        """
        if self._is_handed_over:
            return
        for name in self._plugins.keys() - set(self._devices.resources):
            self._plugins.pop(name).stopping.set()
            self.on_answered(name)
        for name, rule in self._devices.rules.items():
            plugin = self._plugins.get(name)
            if plugin is not None:
                if plugin.is_registered_as(rule):
                    continue
                plugin.stopping.set()
            self._plugins[name] = self._new_plugin(name, rule, reason)
        self._changed.set()

    def expect_first_answers(self) -> None:
        """Record which resources await the kubelet's first answer, when all resources are known."""
        if self._unanswered is None:
            listed = {
                name for name, plugin in self._plugins.items() if plugin.machine.registrations
            }
            self._unanswered = set(self._plugins) - listed
            self._set_if_all_answered()

    def on_answered(self, resource: str) -> None:
        """Record that the kubelet listed or refused a resource."""
        if self._unanswered is not None:
            self._unanswered.discard(resource)
            self._set_if_all_answered()

    async def wait_for_first_answers(self) -> None:
        """Wait until every initial resource is listed or refused, with a short timeout."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_FIRST_ANSWERS_TIMEOUT_S):
                await self._all_answered.wait()

    async def run(self) -> None:
        """Run every plugin, including those started later; when cancelled, stop them all."""
        running = self._running
        async with asyncio.TaskGroup() as tasks:
            while True:
                self._changed.clear()
                for name, plugin in self._plugins.items():
                    current, task = running.get(name, (None, None))
                    if current is not plugin:
                        running[name] = plugin, tasks.create_task(self._run(plugin, after=task))
                for name in [name for name, (_, task) in running.items() if task.done()]:
                    del running[name]
                await self._changed.wait()

    def expect_drops(self, until: float) -> None:
        """Register resources again immediately if the kubelet drops them before `until`.

        `until` is in monotonic seconds.
        """
        for plugin in self._plugins.values():
            plugin.machine.expect_drop(until)

    async def hand_over(self) -> tuple[str, ...]:
        """End registrations and repairs, and release the locks; return the sockets still served."""
        self._is_handed_over = True
        self._handed_over = [*self._plugins.values()]
        self._plugins.clear()
        tasks = [task for _, task in self._running.values()]
        sockets = [plugin.hand_over() for plugin in self._handed_over]
        if tasks:
            await asyncio.wait(tasks)
        self.locks.release_all()
        return tuple(path for path in sockets if path)

    async def end_handed_over(self) -> None:
        """End the streams and servers that were handed over."""
        await asyncio.gather(*(plugin.stop() for plugin in self._handed_over))
        self._handed_over.clear()

    def take_back(self) -> None:
        """Serve and register all resources again."""
        self._is_handed_over = False
        self.reconcile(vocabulary.RegistrationReason.START)

    @property
    def all_listed(self) -> bool:
        """Whether the kubelet lists every resource."""
        return all(plugin.machine.is_listed for plugin in self._plugins.values())

    async def watch_sockets(self, on_checked: Callable[[float], None]) -> None:
        """Check the sockets of the kubelet and the plugins periodically and after every change."""
        async with contextlib.aclosing(kubelet_socket.check_times(self._root)) as check_times:
            async for _ in check_times:
                for plugin in [*self._plugins.values()]:
                    plugin.check_sockets()
                on_checked(time.monotonic())

    async def advertise(self, resources: Iterable[str]) -> None:
        """Send the changed device lists of these resources to the kubelet."""
        plugins = [self._plugins[name] for name in resources if name in self._plugins]
        await asyncio.gather(*(plugin.advertise() for plugin in plugins))

    async def stop(self) -> None:
        """Stop every plugin: streams, servers, sockets; then release the locks."""
        plugins = (*self._plugins.values(), *self._handed_over)
        await asyncio.gather(*(plugin.stop() for plugin in plugins))
        if plugins:
            from muster_plugin.kubelet import server  # noqa: PLC0415  # see above

            await server.drain_grpc_tasks()
        self.locks.release_all()

    def _new_plugin(
        self,
        name: str,
        rule: "config_resources.Resource",
        reason: vocabulary.RegistrationReason,
    ) -> "resource_plugin.ResourcePlugin":
        from muster_plugin.kubelet import resource_plugin  # noqa: PLC0415  # see above

        return resource_plugin.ResourcePlugin(
            name,
            rule,
            directory=resource_plugin.KubeletDirectory(self._root, self.locks),
            devices=self._devices,
            runner=self._new_runner(),
            observer=self._observer,
            timing=self._timing,
            reason=reason,
        )

    async def _run(
        self, plugin: "resource_plugin.ResourcePlugin", *, after: asyncio.Task[None] | None
    ) -> None:
        """Run a plugin after its predecessor; release the lock of a resource that is gone."""
        if after is not None:
            await asyncio.wait([after])
        await plugin.run()
        if plugin.resource not in self._plugins:
            self.locks.release(plugin.resource)

    def _set_if_all_answered(self) -> None:
        if not self._unanswered:
            self._all_answered.set()
