"""Adapter: the settings' file while the plugin runs: what changes in it is taken, or refused."""

import asyncio
import contextlib
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Final, Protocol, TypeAlias

from muster_plugin import blocking
from muster_plugin import node as node_door
from muster_plugin.config import document, settings
from muster_plugin.discovery import inotify
from muster_plugin.gpu import policy_files

_READ_TIMEOUT_S: Final = 5.0
_READ_PERIOD_S: Final = 60.0
_WRITTEN_S: Final = 0.05
_Stamp: TypeAlias = tuple[int, ...]


class Source(Protocol):
    """Where the settings came from; `read` reads them again, and raises settings.BadSettings."""

    @property
    def file(self) -> Path | None:
        """The file, if there is one."""

    @property
    def read(self) -> Callable[[], settings.Settings]:
        """Read it."""


class Reloader:
    """Has the node follow its settings. `follow` is told the hash of what is in force."""

    def __init__(
        self,
        chosen: settings.Settings,
        source: Source,
        node: node_door.Node,
        follow: Callable[[str], None],
    ) -> None:
        self._chosen = chosen
        self._source = source
        self._node = node
        self._follow = follow
        self._in_force = chosen
        self._reading = asyncio.Event()
        self._files = blocking.Lane()
        self._policy: Path | None = None
        self._read: tuple[_Stamp | None, ...] = ()
        """What the files looked like from outside when they were last read; () to read them."""

    async def reload(self) -> None:
        """Read the settings again when their file changes, or at SIGHUP; take what can be used."""
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGHUP, self._ask)
        try:
            # the first look reads what was read a moment ago
            await self._node.lives.settle()
            looks = inotify.scan_times(
                lambda: _around(self._source.file),
                period_s=_READ_PERIOD_S,
                mask=inotify.CONTENT_EVENTS,
                settle_s=_WRITTEN_S,
                changed=self._reading,
            )
            async with contextlib.aclosing(looks):
                async for _ in looks:
                    if await self._may_say_otherwise():
                        await self._reread()
        finally:
            loop.remove_signal_handler(signal.SIGHUP)

    def _ask(self) -> None:
        self._read = ()
        self._reading.set()

    async def _may_say_otherwise(self) -> bool:
        """Tell whether a file is another than was read; much else may change beside it."""
        files = [file for file in (self._source.file, self._policy) if file]
        was, self._read = self._read, ()
        with contextlib.suppress(TimeoutError):
            self._read = await self._files.run(
                lambda: tuple(map(_stamp, files)), timeout_s=_READ_TIMEOUT_S
            )
        return not was or was != self._read

    async def _reread(self) -> None:
        try:
            found = await self._files.run(self._source.read, timeout_s=_READ_TIMEOUT_S)
            here = found.at(self._node.name)
            await self._judge_anew(here)
        except (ValueError, TimeoutError) as error:
            problems = tuple(str(error).splitlines()) or (f"{self._source.file}: does not answer",)
            in_force = self._in_force.hash_at(self._node.name)
            self._node.teller.refused(problems, in_force=in_force)
            self._node.problem_turned.set()
            # it may name another file, which we do not look at
            self._read = ()
            return
        policy = here.gpus.health.policy if here.gpus else ""
        self._policy = Path(policy) if policy else None
        told = found.hash_at(self._node.name)
        if found == self._in_force:
            self._node.teller.mended(told)
            return
        restart = found.changed_for_the_process(self._chosen)
        if here.gpus is not None and not self._node.sees_gpus:
            restart = (*restart, "gpus")
        self._in_force = found
        self._follow(told)
        await self._node.configure(here, config_hash=told, restart=restart)

    async def _judge_anew(self, here: document.NodeConfiguration) -> None:
        """Judge GPUs by what the files say now. Raises ValueError or TimeoutError."""
        if here.gpus is not None and self._node.sees_gpus:
            health = here.gpus.health
            judge = await self._files.run(
                lambda: policy_files.load(health), timeout_s=_READ_TIMEOUT_S
            )
            self._node.judge_by(judge, health)


def _stamp(file: Path) -> _Stamp | None:
    """Return what differs when a file is written or another is put in its place; None if gone."""
    try:
        found = file.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns


def _around(file: Path | None) -> set[Path]:
    """Return where a change of a file shows: a mounted ConfigMap changes by a link beside it."""
    return {file.parent, Path(os.path.realpath(file)).parent} if file else set()
