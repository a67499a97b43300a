"""Adapter: watches plugins that muster does not run, after muster's resources are registered.

The package `watch` is imported only if watching is enabled (see `lean`).
"""

from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Final

from muster import machine, vocabulary
from muster_plugin.config import settings
from muster_plugin.kubelet import podresources, resource_manager

if TYPE_CHECKING:
    from muster_plugin.watch import watcher

_PERIOD_S: Final = 3.0


class ForeignPlugins:
    """Watches the plugins that muster does not run, if enabled; `on_change` receives changes."""

    def __init__(
        self,
        chosen: settings.Settings,
        node: str,
        resources: resource_manager.ResourcePlugins,
        *,
        new_runner: machine.NewRunner,
        on_change: Callable[[vocabulary.PluginObserved], None],
    ) -> None:
        self.watcher: watcher.Watcher | None = None
        """The watcher; None if watching is disabled or has not begun."""
        self._chosen = chosen
        self._node = node
        self._resources = resources
        self._new_runner = new_runner
        self._on_change = on_change

    @property
    def poll_period_s(self) -> float:
        """The interval at which to poll the kubelet's device list."""
        return _PERIOD_S if self._chosen.watch.enabled else podresources.PERIOD_S

    @property
    def watched(self) -> tuple[vocabulary.Watched, ...]:
        """All watched plugins; empty until watching begins."""
        return self.watcher.watched if self.watcher is not None else ()

    def on_listing(self, listing: podresources.Listing | None) -> None:
        """Record the kubelet's device list; None if the kubelet does not answer."""
        if self.watcher is not None:
            self.watcher.on_listing(listing)

    def tasks(self) -> tuple[Coroutine[object, object, None], ...]:
        """Return the watch task as a tuple, which is empty if watching is disabled."""
        return (self._run(),) if self._chosen.watch.enabled else ()

    async def _run(self) -> None:
        """Wait until muster's registrations are answered or time out; watch until cancelled."""
        await self._resources.wait_for_first_answers()
        from muster_plugin.watch import watcher  # noqa: PLC0415  # see `lean`

        self.watcher = watcher.Watcher(
            self._chosen,
            self._node,
            new_runner=self._new_runner,
            ours=lambda: (*self._resources,),
            on_change=self._on_change,
        )
        await self.watcher.run()
