"""Adapter: simulated GPUs whose faults are set by a script.

Each line of the script is a JSON object: `{"device": 0, "xid": 79}`, or `clear` instead of `xid`.
The device is an index or a uuid. The whole file is read after every change, so it may be appended
to, rewritten or removed. While it cannot be read, the faults stay as they are.
"""

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Final

import msgspec

from muster import codec, vocabulary
from muster.service import logs
from muster_plugin.config import settings
from muster_plugin.discovery import inotify
from muster_plugin.gpu import evaluation, xid_policy
from muster_plugin.model import advertised, gpu

KIND: Final = "fault_script"

_BYTES_MAX: Final = 1024 * 1024
_READ_PERIOD_S: Final = 30.0
_LOST: Final = 79
"""The XID after which a simulated GPU is lost: NVML then answers GPU_IS_LOST."""
_RESET: Final = frozenset({46, 62, 64, 95, 110, 119, 120, 136, 140, 143, 155, 156, 158})
"""The XIDs after which a simulated GPU requests a reset.

NVIDIA's catalogue requires a reset for them, and NVIDIA's plugin does not ignore them.
"""


class SimulatedSource:
    """A source of simulated GPUs, polled every `poll_s` and when the script changes."""

    def __init__(self, simulated: settings.SimulatedGpus, node: str, *, poll_s: float) -> None:
        self._file = Path(simulated.faults) if simulated.faults else None
        self._poll_s = poll_s
        self._is_due = asyncio.Event()
        self._gpus = tuple(
            vocabulary.Gpu(
                uuid=advertised.gpu_uuid(node, index),
                product=simulated.product,
                memory_mib=simulated.memory_mib,
                index=index,
                minor=index,
            )
            for index in range(simulated.count)
        )
        self._script = Script()
        self._read_at = time.monotonic()
        self._log = logs.logger().bind(file=simulated.faults)

    @property
    def checked_at(self) -> Mapping[str, float]:
        """When the script was last read, in monotonic seconds; empty without a script.

        If it has never been read, it is the time when this object was created.
        """
        return {} if self._file is None else {KIND: self._read_at}

    async def first_scan(self, timeout_s: float) -> gpu.Scan:
        """Read the script; return all GPUs, with polls that show the faults in the script."""
        del timeout_s
        self._read()
        polls = tuple(self._polls(datetime.now(UTC)))
        return gpu.Scan(machine="simulated", gpus=self._gpus, polls=polls, simulated=True)

    async def observe(self, observer: Callable[[evaluation.Observed], None]) -> None:
        """Report the active XIDs of the script and every change, and poll each GPU periodically."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._poll(observer))
            if self._file is not None:
                tasks.create_task(self._follow_script(self._file, observer))

    def set_poll_interval(self, seconds: float) -> None:
        """Change the interval at which each GPU is polled."""
        if seconds != self._poll_s:
            self._poll_s = seconds
            self._is_due.set()

    async def close(self) -> None:
        """Do nothing: simulated GPUs hold no resources."""

    async def _poll(self, observer: Callable[[evaluation.Observed], None]) -> None:
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._poll_s):
                    await self._is_due.wait()
            self._is_due.clear()
            for poll in self._polls(datetime.now(UTC)):
                observer(poll)

    async def _follow_script(
        self, file: Path, observer: Callable[[evaluation.Observed], None]
    ) -> None:
        for fault in sorted(self._script.active):
            self._report(fault, observer)
        times = inotify.scan_times(
            lambda: {file.parent}, period_s=_READ_PERIOD_S, mask=inotify.CONTENT_EVENTS
        )
        async with contextlib.aclosing(times):
            async for _ in times:
                before = self._script.active
                self._read()
                after = self._script.active
                for fault in sorted(after - before):
                    self._report(fault, observer)
                for index, xid in sorted(before - after):
                    if index < len(self._gpus):
                        uuid, at = self._gpus[index].uuid, datetime.now(UTC)
                        by = "the fault script"
                        observer(gpu.RepairReported(gpu=uuid, at=at, by=by, xid=xid))
                if after != before:
                    for poll in self._polls(datetime.now(UTC)):
                        observer(poll)

    def _report(
        self, fault: tuple[int, int], observer: Callable[[evaluation.Observed], None]
    ) -> None:
        index, xid = fault
        if index >= len(self._gpus):
            self._log.warning("fault_script_gpu_not_found", device=index, xid=xid)
            return
        part = gpu.Part(gpu=self._gpus[index].uuid)
        observer(gpu.Xid(part=part, xid=xid, at=datetime.now(UTC)))

    def _polls(self, at: datetime) -> Iterator[gpu.Poll]:
        for index, device in enumerate(self._gpus):
            xids = {xid for of, xid in self._script.active if of == index}
            yield answer(device.uuid, xids, at)

    def _read(self) -> None:
        text = None if self._file is None else self._text(self._file)
        if text is None:
            return
        self._read_at = time.monotonic()
        indexes = {gpu.uuid: index for index, gpu in enumerate(self._gpus)}
        before, self._script = self._script, parse_script(text, indexes)
        if self._script.bad_lines not in {(), before.bad_lines}:
            self._log.warning("fault_script_unreadable", lines=self._script.bad_lines[:5])

    def _text(self, file: Path) -> bytes | None:
        """Return the content of the script, empty if there is no file; None if it is unreadable."""
        try:
            if file.exists() and not file.is_file():
                self._log.warning("fault_script_unreadable", error="it is not a regular file")
                return None
            with file.open("rb") as opened:
                return opened.read(_BYTES_MAX)
        except FileNotFoundError:
            return b""
        except OSError as error:
            self._log.warning("fault_script_unreadable", error=str(error))
            return None


class _ScriptLine(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One line of a fault script: an XID occurs on a GPU, or is cleared."""

    device: Annotated[int, msgspec.Meta(ge=0, le=63)] | vocabulary.Name
    xid: xid_policy.Xid | None = None
    clear: xid_policy.Xid | None = None

    def __post_init__(self) -> None:
        """Refuse a line that has both `xid` and `clear`, or neither."""
        if (self.xid is None) == (self.clear is None):
            raise ValueError("set either xid or clear")


class Script(msgspec.Struct, frozen=True, kw_only=True):
    """The effect of a fault script: the active XIDs as (GPU index, XID), and bad lines."""

    active: frozenset[tuple[int, int]] = frozenset()
    bad_lines: tuple[str, ...] = ()


_LINE: Final = msgspec.json.Decoder(_ScriptLine)


def parse_script(text: bytes, indexes: Mapping[str, int]) -> Script:
    """Parse a whole fault script; a line that cannot be parsed is skipped and listed as bad.

    `indexes` are the indexes of the GPUs by uuid.
    """
    active: set[tuple[int, int]] = set()
    bad: list[str] = []
    for number, text_line in enumerate(text.splitlines(), start=1):
        if not text_line.strip():
            continue
        try:
            line = _LINE.decode(text_line)
        except codec.UNREADABLE as error:
            bad.append(f"line {number}: {error}")
            continue
        device = indexes.get(line.device) if isinstance(line.device, str) else line.device
        if device is None:
            bad.append(f"line {number}: no GPU {line.device}")
        elif line.xid is not None:
            active.add((device, line.xid))
        elif line.clear is not None:
            active.discard((device, line.clear))
    return Script(active=frozenset(active), bad_lines=tuple(bad))


def answer(uuid: str, xids: Iterable[int], at: datetime) -> gpu.Poll:
    """Return the poll of a simulated GPU while these XIDs are active."""
    active = frozenset(xids)
    if _LOST in active:
        return gpu.Poll(gpu=uuid, at=at, error="GPU_IS_LOST")
    action = 1 if active & _RESET else 0
    return gpu.Poll(
        gpu=uuid,
        at=at,
        recovery_action=action,
        ecc_uncorrected=0,
        slowdowns=(),
        nvlinks_down=(),
    )
