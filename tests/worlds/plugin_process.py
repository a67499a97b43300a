"""Runs the plugin, or another program of nodes, as a process for tests."""

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import orjson

from muster.local import kubelet as stand_in


class Plugin:
    """The process, with the lines of its log that were read."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self.log: list[dict[str, Any]] = []

    async def said(self, event: str, **facts: object) -> dict[str, Any]:
        """Read the log until an event with these facts; return its line."""
        assert self.process.stdout is not None
        while line := await self.process.stdout.readline():
            self.log.append(orjson.loads(line))
            if self.log[-1].items() >= {"event": event, **facts}.items():
                return self.log[-1]
        raise AssertionError(f"ended without {event}: {await self.ended()}")

    async def ended(self) -> tuple[int | None, str]:
        """Wait until the process has ended; return its exit code and standard error."""
        _, errors = await self.process.communicate()
        return self.process.returncode, errors.decode()

    async def stop(self) -> None:
        """Send SIGTERM; the process must end within 30 s, with code 0 and no errors."""
        self.process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(30):
            assert await self.ended() == (0, "")

    async def asked(self, path: str) -> tuple[int, str]:
        """Return the status and body of a path; the address must be in the log that was read."""
        address = next(said["http"] for said in self.log if said["event"] == "listening")
        host, _, port = str(address).removeprefix("http://").partition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(f"GET {path} HTTP/1.1\r\n\r\n".encode())
        head, _, body = (await reader.read()).decode().partition("\r\n\r\n")
        writer.close()
        await writer.wait_closed()
        return int(head.split()[1]), body


def resource(name: str, *paths: str, **more: object) -> dict[str, object]:
    """Return the settings of a resource with a unit for each path."""
    return {"name": name, "groups": [{"devices": [{"path": path}]} for path in paths], **more}


def written(file: Path, *resources: dict[str, object], **more: object) -> Path:
    """Replace a configuration file atomically; return it."""
    new = file.with_name(f"{file.name}.new")
    new.write_bytes(orjson.dumps({"resources": resources, **more}))
    new.rename(file)
    return file


def plugin(
    root: Path, config: Path, *more: str, **environment: str
) -> contextlib.AbstractAsyncContextManager[Plugin]:
    """Run the plugin with the kubelet's directory at `root`, and without a bus."""
    given = {
        "MUSTER_PLUGIN__KUBELET__DIRECTORY": str(root),
        "MUSTER_PLUGIN__BUS__URL": "nats://127.0.0.1:1",
        "NODE_NAME": "node-a",
        **environment,
    }
    return started(config, *more, **given)


@contextlib.asynccontextmanager
async def started(
    config: Path, *more: str, program: str = "muster_plugin", **environment: str
) -> AsyncIterator[Plugin]:
    """Run the plugin, or another program of nodes, with a configuration file; yield it."""
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", program, "--config", str(config), *more),
        stdout=pipe,
        stderr=pipe,
        env=os.environ | environment,
    )
    try:
        yield Plugin(process)
    finally:
        if process.returncode is None:
            process.terminate()
        await process.communicate()


async def until_allocatable(kubelet: stand_in.Kubelet, name: str, count: int) -> None:
    """Wait until `count` units of a resource are allocatable."""
    await kubelet.until(
        lambda state: name in state.resources and state.resources[name].allocatable == count
    )


def run(story: Callable[[], Awaitable[None]], *, limit_s: float = 100) -> None:
    """Run `story` in a new event loop, for at most `limit_s` seconds."""

    async def limited() -> None:
        async with asyncio.timeout(limit_s):
            await story()

    asyncio.run(limited())
