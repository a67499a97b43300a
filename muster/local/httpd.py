"""Adapter for HTTP: serves an application, answers in JSON, logs, and stops on a signal."""

import argparse
import asyncio
import contextlib
import dataclasses
import datetime as dt
import os
import signal
import sys
from collections.abc import AsyncIterator, Coroutine
from typing import NoReturn

import msgspec
import orjson
from aiohttp import web

from muster import escaping

SHUTDOWN_S = 1.0
"""How long open requests may take after SIGTERM; a stand-in must end within two seconds."""


@dataclasses.dataclass(frozen=True)
class Address:
    """A host and a port to listen on; port 0 means a free port."""

    host: str
    port: int

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"


LOCAL = Address("127.0.0.1", 0)


class UsageError(Exception):
    """The program cannot run with these options; `run` prints the message and returns 2."""


class Parser(argparse.ArgumentParser):
    """An argument parser that reports an error in one line."""

    def error(self, message: str) -> NoReturn:
        """Exit with one line on stderr and code 2."""
        self.exit(2, f"{self.prog}: {message}\n")


def address(text: str) -> Address:
    """Parse `host:port`. Raises ArgumentTypeError."""
    host, colon, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    port_max = 65_535
    if not (host and colon and port.isascii() and port.isdigit() and int(port[:6]) <= port_max):
        raise argparse.ArgumentTypeError(f"{text!r} is not host:port, such as 127.0.0.1:0")
    return Address(host, int(port))


@contextlib.asynccontextmanager
async def listening(application: web.Application, at: Address) -> AsyncIterator[str]:
    """Serve `application` while the block runs; yield its URL. Raises UsageError.

    A request is cancelled when its client disconnects, so that no watch outlives its client.
    """
    runner = web.AppRunner(
        application,
        access_log=None,
        # a body that cannot be decompressed would cause a 500; real servers do not decompress
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
            number = error.errno or 0
            why = os.strerror(number) if number > 0 else error.strerror or error
            raise UsageError(f"cannot listen on {at}: {why}") from error
        port: int = runner.addresses[0][1]
        yield f"http://{Address(at.host, port)}"
    finally:
        await runner.cleanup()


def stop_on_signals() -> asyncio.Event:
    """Return an event that SIGTERM and SIGINT will set.

    Call this before the program prints that it is listening, because a signal may follow
    immediately.
    """
    stopped = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopped.set)
    return stopped


def log(event: str, **facts: object) -> None:
    """Print a log line, as JSON."""
    line = escaping.json_text(orjson.dumps({"event": event, **facts}, default=str))
    sys.stdout.buffer.write(line.encode() + b"\n")
    sys.stdout.buffer.flush()


def run(program: str, work: Coroutine[object, object, None]) -> int:
    """Run a stand-in until it ends; return the exit code."""
    try:
        asyncio.run(work)
    except UsageError as error:
        sys.stderr.write(escaping.plain(f"{program}: {error}") + "\n")
        return 2
    return 0


def json_response(body: object, *, status: int = 200) -> web.Response:
    """Return a JSON response."""
    encoded = msgspec.json.encode(body)
    return web.Response(body=encoded, status=status, content_type="application/json")


def timestamp(*, fraction: bool = False) -> str:
    """Return the current time as the Kubernetes API writes it."""
    pattern = "%Y-%m-%dT%H:%M:%S.%fZ" if fraction else "%Y-%m-%dT%H:%M:%SZ"
    return dt.datetime.now(dt.UTC).strftime(pattern)
