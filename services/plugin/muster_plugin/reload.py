"""Adapter: reloads the settings file while the plugin runs; applies or rejects its changes."""

import asyncio
import contextlib
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Final, TypeAlias

from muster import blocking
from muster_plugin import node as node_wiring
from muster_plugin.config import settings
from muster_plugin.discovery import inotify
from muster_plugin.gpu import evaluation

_READ_TIMEOUT_S: Final = 5.0
_READ_PERIOD_S: Final = 60.0
_SETTLE_S: Final = 0.05
_Stamp: TypeAlias = tuple[int, ...]


class Reloader:
    """Applies changed settings to the node; `read` reads `file`, and raises ValueError."""

    def __init__(
        self,
        chosen: settings.Settings,
        file: Path,
        read: Callable[[], settings.Settings],
        node: node_wiring.Node,
    ) -> None:
        self._chosen = chosen
        self._file = file
        self._read = read
        self._node = node
        self._active = chosen
        self._read_requested = asyncio.Event()
        self._files = blocking.Serial()
        self._policy: Path | None = None
        self._stamps: tuple[_Stamp | None, ...] = ()
        """Stamps of the files when they were last read; () forces a read."""

    async def run(self) -> None:
        """Read the settings when their file changes or at SIGHUP; apply those that are valid."""
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGHUP, self._on_sighup)
        try:
            # the first read repeats the one of the start
            await self._node.resource_plugins.wait_for_first_answers()
            change_times = inotify.scan_times(
                lambda: _watched_directories(self._file),
                period_s=_READ_PERIOD_S,
                mask=inotify.CONTENT_EVENTS,
                settle_s=_SETTLE_S,
                changed=self._read_requested,
            )
            async with contextlib.aclosing(change_times):
                async for _ in change_times:
                    if await self._may_have_changed():
                        await self._reread()
        finally:
            loop.remove_signal_handler(signal.SIGHUP)

    def _on_sighup(self) -> None:
        self._stamps = ()
        self._read_requested.set()

    async def _may_have_changed(self) -> bool:
        """Return whether a file may differ from when it was read; its neighbours may change."""
        files = [self._file, *([self._policy] if self._policy else [])]
        before, self._stamps = self._stamps, ()
        with contextlib.suppress(TimeoutError):
            self._stamps = await self._files.run(
                lambda: tuple(map(_stamp, files)), timeout_s=_READ_TIMEOUT_S
            )
        return not before or before != self._stamps

    async def _reread(self) -> None:
        try:
            new = await self._files.run(self._read, timeout_s=_READ_TIMEOUT_S)
            configuration = new.at(self._node.name)
            await self._reload_gpu_policy(configuration)
        except (ValueError, TimeoutError) as error:
            problems = tuple(str(error).splitlines()) or (f"{self._file}: read timed out",)
            active_hash = self._active.hash_for(self._node.name)
            self._node.event_log.configuration_rejected(problems, active_hash=active_hash)
            self._node.heartbeat_due.set()
            # it may name another file, which is not watched
            self._stamps = ()
            return
        policy = configuration.gpus.health.policy if configuration.gpus else ""
        self._policy = Path(policy) if policy else None
        config_hash = new.hash_for(self._node.name)
        if new == self._active:
            self._node.event_log.configuration_restored(config_hash)
            return
        restart = new.restart_needed_for(self._chosen)
        if configuration.gpus is not None and not self._node.watches_gpus:
            restart = (*restart, "gpus")
        self._active = new
        await self._node.configure(configuration, config_hash=config_hash, restart=restart)

    async def _reload_gpu_policy(self, configuration: settings.NodeConfiguration) -> None:
        """Apply the GPU health rules of the files. Raises ValueError or TimeoutError."""
        if configuration.gpus is not None and self._node.watches_gpus:
            health = configuration.gpus.health
            policy = await self._files.run(
                lambda: evaluation.load_policy(health), timeout_s=_READ_TIMEOUT_S
            )
            self._node.set_gpu_policy(policy, health)


def _stamp(file: Path) -> _Stamp | None:
    """Return a stamp that changes when a file is written or replaced; None if it is gone."""
    try:
        status = file.stat()
    except OSError:
        return None
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns


def _watched_directories(file: Path) -> set[Path]:
    """Return the directories to watch; a mounted ConfigMap changes by a link beside the file."""
    return {file.parent, Path(os.path.realpath(file)).parent}
