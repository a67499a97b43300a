"""Adapter: checks devices by opening them or by running a command, as configured."""

import asyncio
import contextlib
import errno
import os
import signal
from collections.abc import Awaitable, Callable, Mapping
from typing import Final, Self

from muster import blocking
from muster_plugin.config import resources
from muster_plugin.inventory import inventory
from muster_plugin.model import advertised

_BUSY: Final = frozenset({errno.EBUSY, errno.EAGAIN, errno.ETXTBSY})
"""The errors of a device that another process uses exclusively, which is a sign of health."""
_PARALLEL_MAX: Final = 8
_STDERR_MAX: Final = 4096
_PIPE_BYTES: Final = 65_536
"""The capacity of a pipe in Linux, so that one read returns everything."""

Key = tuple[str, str]
OnResult = Callable[[str, advertised.Unit, str], Awaitable[None]]


class DeviceChecker:
    """Checks each device periodically, as configured for its resource, and new devices immediately.

    `on_result` receives the resource, the unit and the problem, which is empty if the check passed.
    """

    def __init__(self, devices: inventory.Inventory, on_result: OnResult) -> None:
        self.changed = asyncio.Event()
        """Set when devices or rules may have changed, and after each check."""
        self._devices = devices
        self._on_result = on_result
        self._due: dict[Key, float] = {}
        self._lanes: dict[Key, blocking.Serial] = {}
        self._running: set[Key] = set()
        self._slots = asyncio.Semaphore(_PARALLEL_MAX)

    async def run(self) -> None:
        """Check devices that are due, until cancelled."""
        clock = asyncio.get_running_loop().time
        async with asyncio.TaskGroup() as tasks:
            while True:
                self.changed.clear()
                now = clock()
                to_check = self._to_check()
                self._due = {key: self._due.get(key, now) for key in to_check}
                self._lanes = {key: self._lanes.get(key) or blocking.Serial() for key in to_check}
                for key, (unit, checks) in to_check.items():
                    if self._due[key] <= now and key not in self._running:
                        self._due[key] = now + checks.period_s
                        self._running.add(key)
                        tasks.create_task(self._check(key, unit, checks, self._lanes[key]))
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout_at(self._next_due()):
                        await self.changed.wait()

    def _next_due(self) -> float | None:
        waiting = (at for key, at in self._due.items() if key not in self._running)
        return min(waiting, default=None)

    def _to_check(self) -> Mapping[Key, tuple[advertised.Unit, resources.Checks]]:
        to_check = {}
        for name, rule in self._devices.rules.items():
            if rule.checks.open or rule.checks.command:
                for unit in self._devices.units_to_check(name):
                    to_check[name, unit.physical] = unit, rule.checks
        return to_check

    async def _check(
        self, key: Key, unit: advertised.Unit, checks: resources.Checks, lane: blocking.Serial
    ) -> None:
        async with self._slots:
            problem = await _opened(unit, checks, lane) if checks.open else ""
            if not problem and checks.command:
                problem = await _commanded(unit, checks)
        self._running.discard(key)
        await self._on_result(key[0], unit, problem)
        self.changed.set()


async def _opened(unit: advertised.Unit, checks: resources.Checks, lane: blocking.Serial) -> str:
    try:
        return await lane.run(lambda: _open_all(unit), timeout_s=checks.timeout_s)
    except TimeoutError:
        return f"open() has not returned within {checks.timeout_s:g} s"


def _open_all(unit: advertised.Unit) -> str:
    for device in unit.devices:
        flags = os.O_RDWR if {"r", "w"} <= {*device.permissions} else os.O_RDONLY
        if device.permissions == "w":
            flags = os.O_WRONLY
        try:
            _open(device.host_path, flags)
        except OSError as error:
            if error.errno not in _BUSY:
                return f"cannot open {device.host_path} ({(error.strerror or str(error)).lower()})"
    return ""


def _open(path: str, flags: int) -> None:
    """Open and close a device; a directory of device nodes is opened read-only."""
    flags |= os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
    try:
        os.close(os.open(path, flags))
    except IsADirectoryError:
        os.close(os.open(path, flags & ~os.O_ACCMODE))


async def _commanded(unit: advertised.Unit, checks: resources.Checks) -> str:
    """Run the check command; return the problem, which is empty if the check passed.

    MUSTER_DEVICES contains the device nodes, separated by commas. The command counts as ended when
    its own process has ended, even if child processes still run.
    """
    paths = ",".join(device.host_path for device in unit.devices)
    program = checks.command[0]
    with _StderrTail() as tail:
        try:
            process = await asyncio.create_subprocess_exec(
                *checks.command,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.DEVNULL,
                stderr=tail.writing,
                env=os.environ | {"MUSTER_DEVICES": paths},
                start_new_session=True,
            )
        except OSError as error:
            return f"cannot run {program} ({(error.strerror or str(error)).lower()})"
        try:
            async with asyncio.timeout(checks.timeout_s):
                code = await process.wait()
        except TimeoutError:
            return f"{program} has not ended within {checks.timeout_s:g} s"
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()
        message = tail.last_line()
    return "" if code == 0 else f"{program} ended with {code}{message and f': {message}'}"


class _StderrTail:
    """A pipe for stderr that keeps only the last bytes.

    asyncio's pipe would stay open as long as any child process holds its other end.
    """

    def __init__(self) -> None:
        self._stderr = b""
        self._reading, self.writing = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(self._reading, False)

    def __enter__(self) -> Self:
        asyncio.get_running_loop().add_reader(self._reading, self._read)
        return self

    def __exit__(self, *_: object) -> None:
        asyncio.get_running_loop().remove_reader(self._reading)
        os.close(self._reading)
        os.close(self.writing)

    def last_line(self) -> str:
        """Return the last line written so far; empty if there is none."""
        self._read()
        lines = self._stderr.decode(errors="replace").strip().splitlines()
        return lines[-1].strip() if lines else ""

    def _read(self) -> None:
        with contextlib.suppress(BlockingIOError):
            self._stderr = (self._stderr + os.read(self._reading, _PIPE_BYTES))[-_STDERR_MAX:]
