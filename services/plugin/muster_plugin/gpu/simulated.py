"""Adapter: GPUs that exist only here, and to a script that says what befalls them.

Each line of the script is a JSON object: `{"device": 0, "xid": 79}`, or `clear` in place of `xid`.
The whole file is read at every look, so it may be appended to, rewritten or removed.
"""

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from muster import vocabulary
from muster.service import logs
from muster_plugin.config import settings
from muster_plugin.discovery import inotify
from muster_plugin.gpu import faults, source
from muster_plugin.model import gpu, names

KIND: Final = "fault_script"

_BYTES_MAX: Final = 1024 * 1024
_LOOK_PERIOD_S: Final = 30.0


class SimulatedSource:
    """A `gpus.Source` of GPUs that answer every `poll_s` what the script says."""

    def __init__(self, settings_: settings.SimulatedGpus, node: str, *, poll_s: float) -> None:
        self._file = Path(settings_.faults) if settings_.faults else None
        self._poll_s = poll_s
        self._is_due = asyncio.Event()
        self._gpus = tuple(
            vocabulary.Gpu(
                uuid=names.gpu_uuid(node, index),
                product=settings_.product,
                memory_mib=settings_.memory_mib,
                index=index,
                minor=index,
            )
            for index in range(settings_.count)
        )
        self._script = faults.Script()
        self._looked_at: float | None = None
        self._log = logs.logger().bind(file=settings_.faults)

    @property
    def checked_at(self) -> Mapping[str, float]:
        """When the script was last read."""
        return {} if self._looked_at is None else {KIND: self._looked_at}

    async def first_scan(self, timeout_s: float) -> gpu.Scan:
        """Look at all GPUs at once; those that the script calls broken are broken already."""
        del timeout_s
        self._read()
        at = datetime.now(UTC)
        polls = tuple(self._polls(at))
        return gpu.Scan(machine="simulated", gpus=self._gpus, polls=polls, simulated=True)

    async def observe(self, observer: Callable[[source.Observed], None]) -> None:
        """Tell what the script says whenever it changes, and what the GPUs answer on a period."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._poll(observer))
            if self._file is not None:
                tasks.create_task(self._follow_script(self._file, observer))

    def set_poll_interval(self, seconds: float) -> None:
        """Ask each GPU so often from now on."""
        if seconds != self._poll_s:
            self._poll_s = seconds
            self._is_due.set()

    async def close(self) -> None:
        """Let go of nothing."""

    async def _poll(self, observer: Callable[[source.Observed], None]) -> None:
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._poll_s):
                    await self._is_due.wait()
            self._is_due.clear()
            for poll in self._polls(datetime.now(UTC)):
                observer(poll)

    async def _follow_script(self, file: Path, observer: Callable[[source.Observed], None]) -> None:
        for xid in sorted(self._script.holding):
            self._report(xid, observer)
        times = inotify.scan_times(
            lambda: {file.parent}, period_s=_LOOK_PERIOD_S, mask=inotify.CONTENT_EVENTS
        )
        async with contextlib.aclosing(times):
            async for _ in times:
                before = self._script
                self._read()
                for xid in sorted(self._script.holding - before.holding):
                    self._report(xid, observer)
                for cleared in sorted(before.holding - self._script.holding):
                    self._mended(cleared, observer)
                if self._script.holding != before.holding:
                    for poll in self._polls(datetime.now(UTC)):
                        observer(poll)

    def _report(self, xid: tuple[int, int], observer: Callable[[source.Observed], None]) -> None:
        index, number = xid
        if index >= len(self._gpus):
            self._log.warning("fault_script_unknown_gpu", device=index, xid=number)
            return
        part = gpu.Part(gpu=self._gpus[index].uuid)
        observer(gpu.Xid(part=part, xid=number, at=datetime.now(UTC)))

    def _mended(
        self, cleared: tuple[int, int], observer: Callable[[source.Observed], None]
    ) -> None:
        index, xid = cleared
        if index < len(self._gpus):
            uuid, at = self._gpus[index].uuid, datetime.now(UTC)
            observer(gpu.RepairReported(gpu=uuid, at=at, by="the fault script", xid=xid))

    def _polls(self, at: datetime) -> Iterator[gpu.Poll]:
        for index, one in enumerate(self._gpus):
            xids = frozenset(xid for device, xid in self._script.holding if device == index)
            yield faults.poll(one.uuid, xids, at)

    def _read(self) -> None:
        self._looked_at = time.monotonic()
        if self._file is None:
            return
        before, self._script = self._script, faults.script(self._text(self._file))
        if self._script.bad_lines not in {(), before.bad_lines}:
            self._log.warning("fault_script_unreadable", lines=self._script.bad_lines[:5])

    def _text(self, file: Path) -> bytes:
        try:
            if file.exists() and not file.is_file():
                self._log.warning("fault_script_unreadable", error="it is no regular file")
                return b""
            with file.open("rb") as opened:
                return opened.read(_BYTES_MAX)
        except FileNotFoundError:
            return b""
        except OSError as error:
            self._log.warning("fault_script_unreadable", error=str(error))
            return b""
