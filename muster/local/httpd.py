"""Adapter: HTTP. What the stand-ins that are web servers share: listen, end on a signal, say no."""

import argparse
import asyncio
import contextlib
import dataclasses
import signal
import sys
from collections.abc import AsyncIterator
from typing import NoReturn

import orjson
from aiohttp import web

SHUTDOWN_S = 1.0
"""How long open requests may take to end after SIGTERM; two seconds are allowed in all."""


@dataclasses.dataclass(frozen=True)
class Address:
    """A host and a port to listen on; port 0 is any free one."""

    host: str
    port: int

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"


LOCAL = Address("127.0.0.1", 0)


class MistakeError(Exception):
    """A mistake of whoever started us: one line on stderr, exit code 2."""


class Parser(argparse.ArgumentParser):
    """An argument parser that complains in one line."""

    def error(self, message: str) -> NoReturn:
        """End with the one line and exit code 2."""
        self.exit(2, f"{self.prog}: {message}\n")


def address(written: str) -> Address:
    """Return the address that `host:port` spells; raises what argparse expects of a type."""
    host, colon, port = written.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    port_max = 65_535
    if not (host and colon and port.isascii() and port.isdigit() and int(port[:6]) <= port_max):
        raise argparse.ArgumentTypeError(f"{written!r} is not host:port, such as 127.0.0.1:0")
    return Address(host, int(port))


@contextlib.asynccontextmanager
async def listening(application: web.Application, at: Address) -> AsyncIterator[str]:
    """Serve `application` while the block runs; yields the URL.

    A request whose client has gone is cancelled, so that no watch outlives its watcher.
    """
    runner = web.AppRunner(
        application,
        access_log=None,
        # a body that does not unpack would end in 500; nobody we stand in for unpacks any
        auto_decompress=False,
        handler_cancellation=True,
        shutdown_timeout=SHUTDOWN_S,
    )
    await runner.setup()
    try:
        site = web.TCPSite(runner, at.host, at.port)
        try:
            await site.start()
        except OSError as error:
            why = error.strerror or error
            raise MistakeError(f"cannot listen on {at}: {why}") from error
        port: int = runner.addresses[0][1]
        yield f"http://{Address(at.host, port)}"
    finally:
        await runner.cleanup()


def stop_on_signals() -> asyncio.Event:
    """Return an event that SIGTERM and SIGINT set, from now on.

    To be called before anybody is told that we listen: who has read that may send the signal.
    """
    stopped = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopped.set)
    return stopped


def say_listening(service: str, url: str) -> None:
    """Print the one line that tells where we listen."""
    line = {"event": "listening", "service": service, "http": url}
    sys.stdout.buffer.write(orjson.dumps(line) + b"\n")
    sys.stdout.buffer.flush()


def complain(program: str, mistake: MistakeError) -> int:
    """Tell the one line on stderr; return the exit code."""
    sys.stderr.write(f"{program}: {mistake}\n")
    return 2
