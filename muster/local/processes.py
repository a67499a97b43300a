"""Adapter for processes: starts Python programs that log JSON lines, and stops them completely.

A program counts as started when it prints its `listening` line. It is killed when this process ends
in any way (Linux: PR_SET_PDEATHSIG).
"""

import asyncio
import contextlib
import ctypes
import os
import signal
import sys
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

import orjson

from muster import escaping

_UP_TIMEOUT_S: Final = 60.0
_END_TIMEOUT_S: Final = 5.0
_LAST_OUTPUT_S: Final = 1.0
_SHOWN_MAX: Final = 300
_LINE_BYTES_MAX: Final = 1024 * 1024
_PR_SET_PDEATHSIG: Final = 1


class ProgramFailed(Exception):
    """A program did not start, ended, or was not ready in time; the text gives the reason."""


def die_with_parent() -> Callable[[], None] | None:
    """Return a function that makes a child end with this process; None if unsupported."""
    if not sys.platform.startswith("linux"):
        return None
    library = ctypes.CDLL(None)
    parent = os.getpid()

    def request_signal() -> None:
        library.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)

    return request_signal


def send(process: asyncio.subprocess.Process, number: signal.Signals) -> None:
    """Send a signal; nothing happens if the process has ended.

    `send_signal` could reap a process that has just ended before asyncio does; asyncio would then
    return 255 as its exit code (CPython 3.11, subprocess.Popen.send_signal).
    """
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, number)


@dataclass(frozen=True, slots=True)
class Program:
    """A Python program to run: its name, module, arguments and additional environment."""

    name: str
    module: str
    arguments: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)

    def at(self, http: str) -> "Program":
        """Return the program with its address set to `http://host:port`; of a service, the port."""
        address = http.removeprefix("http://")
        if self.module.startswith("muster.local."):
            return replace(self, arguments=(*self.arguments, "--http", address))
        variable = f"{self.module.upper()}__HTTP__PORT"
        port = {variable: address.rpartition(":")[2]}
        return replace(self, environment={**self.environment, **port})


class Process:
    """The process of one program, which can be started again after it has ended."""

    def __init__(self, program: Program, log: Path) -> None:
        self.program = program
        self.log = log
        self.addresses: dict[str, str] = {}
        """The values of the program's `listening` line, such as its address `http`."""
        self._last_lines: deque[str] = deque(maxlen=20)
        self._process: asyncio.subprocess.Process | None = None
        self._reading: list[asyncio.Task[None]] = []
        self._listening = asyncio.Event()

    @property
    def pid(self) -> int:
        """The process id."""
        assert self._process is not None, f"{self.program.name} was not started"
        return self._process.pid

    @property
    def is_running(self) -> bool:
        """Whether the process exists, suspended or not."""
        return self._process is not None and self._process.returncode is None

    @property
    def last_line(self) -> str:
        """The last line that the program printed, or a text for people if there is none."""
        return self._last_lines[-1] if self._last_lines else "it printed nothing"

    @property
    def error(self) -> str:
        """The program's last line of output; of a log line, only its event and its error."""
        return _for_people(self._last_lines[-1]) if self._last_lines else ""

    @property
    def settings(self) -> Path | None:
        """The path of the program's settings file; None if it has none."""
        options = self.program.arguments
        return Path(options[options.index("--config") + 1]) if "--config" in options else None

    async def start(self) -> None:
        """Start the program, and wait until it is ready. Raises ProgramFailed."""
        # other programs still use its previous address
        http = self.addresses.get("http")
        program = self.program.at(http) if http else self.program
        environment = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
        self._listening.clear()
        self._last_lines.clear()
        self._process = await asyncio.create_subprocess_exec(
            sys.executable,
            *("-m", program.module, *program.arguments),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env={**environment, **program.environment},
            limit=_LINE_BYTES_MAX,
            # Ctrl-C reaches only this process, which then ends all others in the right order
            start_new_session=True,
            preexec_fn=die_with_parent(),
        )
        assert self._process.stdout is not None, "stdout is a pipe"
        assert self._process.stderr is not None, "stderr is a pipe"
        self._reading = [
            asyncio.create_task(self._read(self._process.stdout)),
            asyncio.create_task(self._read(self._process.stderr)),
        ]
        ended = asyncio.ensure_future(self._process.wait())
        up = asyncio.ensure_future(self._listening.wait())
        await asyncio.wait([ended, up], timeout=_UP_TIMEOUT_S, return_when=asyncio.FIRST_COMPLETED)
        up.cancel()
        if ended.done():
            await asyncio.gather(*self._reading)
            raise ProgramFailed(f"{self.program.name} ended immediately: {self.last_line}")
        ended.cancel()
        if not self._listening.is_set():
            waited = f"{self.program.name} was not ready after {_UP_TIMEOUT_S:g} s"
            last = f"The program's last line: {self.last_line}"
            raise ProgramFailed(f"{waited}; is the machine busy? {last}")

    async def wait(self) -> int:
        """Return the exit code once the process has ended, and its last output has been read."""
        assert self._process is not None, f"{self.program.name} was not started"
        code = await self._process.wait()
        if self._reading:
            # a child of the process may keep the pipes open
            await asyncio.wait(self._reading, timeout=_LAST_OUTPUT_S)
        return code

    def signal(self, number: signal.Signals) -> None:
        """Send a signal; nothing happens if the process has ended."""
        assert self._process is not None, f"{self.program.name} was not started"
        send(self._process, number)

    async def kill(self) -> None:
        """Kill the process, to simulate a crash."""
        self.signal(signal.SIGKILL)
        await self._ended()

    async def end(self) -> None:
        """End the process cleanly; kill it if that takes more than 5 s."""
        if self._process is None:
            return
        self.signal(signal.SIGTERM)
        self.signal(signal.SIGCONT)
        try:
            async with asyncio.timeout(_END_TIMEOUT_S):
                await self._ended()
        except TimeoutError:
            await self.kill()

    async def _ended(self) -> None:
        await self.wait()
        await asyncio.gather(*self._reading)

    async def _read(self, pipe: asyncio.StreamReader) -> None:
        """Copy lines to the log; keep the last lines, and the addresses of the `listening` line."""
        with self.log.open("ab") as log:
            while True:
                try:
                    line = await pipe.readline()
                except ValueError:
                    continue  # longer than the limit; asyncio has dropped it
                if not line:
                    return
                log.write(line)
                log.flush()
                text = line.decode("utf-8", "replace").strip()
                if text:
                    self._last_lines.append(text)
                self._read_addresses(line)

    def _read_addresses(self, line: bytes) -> None:
        try:
            message = orjson.loads(line)
        except orjson.JSONDecodeError:
            return
        if isinstance(message, dict) and message.get("event") == "listening":
            self.addresses = {k: str(v) for k, v in message.items()}
            self._listening.set()


def _for_people(line: str) -> str:
    """Return a line of output for people; of a JSON log line, only its event and its error."""
    try:
        entry = orjson.loads(line)
    except orjson.JSONDecodeError:
        entry = None
    if isinstance(entry, dict):
        line = ": ".join(str(entry[key]) for key in ("event", "error") if entry.get(key))
    shown = escaping.plain(line)
    return shown if len(shown) <= _SHOWN_MAX else f"{shown[: _SHOWN_MAX - 1]}…"
