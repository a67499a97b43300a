"""Adapter for a terminal and HTTP: measures the memory and response time of `muster top`.

A stand-in for health serves the state of 10,000 nodes in pages and changes 100 nodes a second; NATS
is real. Keys are written to a terminal of 200x50, and each is answered when the expected text is on
its screen.
"""

import asyncio
import contextlib
import fcntl
import itertools
import os
import pty
import struct
import sys
import tempfile
import termios
import time
import urllib.parse
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Final

import orjson
from aiohttp import web

from bench import programs, report
from muster.local import nats

_NODES: Final = 10_000
_CHANGED: Final = 100
_SIZE: Final = (50, 200)
_WAIT_S: Final = 5.0
_LOAD_S: Final = 120.0
_PROGRAM: Final = """
import sys
sys.modules.update(greenlet=None, colorama=None)
from muster.cli import __main__
sys.exit(__main__.main())
"""
"""The command `muster`; structlog must not find modules that only developer tools install."""
_ESCAPE: Final = "\x1b"
_KEYS: Final = (
    ("s", b"by name"),
    ("G", b"10000/10000"),
    ("\x1b[5~", b"9954/10000"),
    ("s", b"by newest"),
    ("s", b"by alerts"),
    ("s", b"by urgency"),
    ("2", b"SEVERITY"),
    ("1", b"VERDICT"),
    ("/", b"enter keeps"),
    ("9", b"9_"),
    ("9", b"99_"),
    ("7", b"997_"),
    ("\r", b"with '997'"),
    (_ESCAPE, b"/10000 by urgency"),
    ("4", b"USABLE"),
    ("?", b"the next or previous row"),
    (_ESCAPE, b"NODES WITH FEWER"),
    ("1", b"VERDICT"),
)
"""Each key, and a text that is on the screen only after the key was handled."""


class Health:
    """A stand-in for health: 10,000 nodes, of which a few change between two pages."""

    def __init__(self) -> None:
        names = [f"gpu-node-{number:05}" for number in range(_NODES)]
        self._plugins = {name: _plugin(name, "HEALTHY") for name in names}
        self._names = names
        self._changing = itertools.cycle(names)

    async def answer(self, request: web.Request) -> web.Response:
        """Return one page, or one node."""
        for name in itertools.islice(self._changing, _CHANGED):
            was = self._plugins[name]["verdict"]
            self._plugins[name] = _plugin(name, "HEALTHY" if was != "HEALTHY" else "DEGRADED")
        query = dict(urllib.parse.parse_qsl(request.query_string))
        chosen = [query["node"]] if "node" in query else self._page(query)
        last = chosen[-1] if chosen and chosen[-1] != self._names[-1] else ""
        state = {
            "plugins": [self._plugins[name] for name in chosen if name in self._plugins],
            "fleet": {},
            "service": {"leads": 1},
            "next": "" if "node" in query else last,
        }
        return web.Response(body=orjson.dumps(state))

    def _page(self, query: dict[str, str]) -> list[str]:
        after = query.get("after", "")
        start = self._names.index(after) + 1 if after else 0
        return self._names[start : start + int(query.get("nodes", _NODES))]


class Terminal:
    """A pseudo-terminal, which reads the program's output and measures its reaction to keys."""

    def __init__(self) -> None:
        self.ours, self.theirs = pty.openpty()
        fcntl.ioctl(self.theirs, termios.TIOCSWINSZ, struct.pack("HHHH", *_SIZE, 0, 0))
        os.set_blocking(self.ours, False)
        self._written = bytearray()
        self._changed = asyncio.Event()
        asyncio.get_running_loop().add_reader(self.ours, self._read)

    def _read(self) -> None:
        with contextlib.suppress(OSError):
            self._written += os.read(self.ours, 1 << 20)
        self._changed.set()

    async def press(self, key: str, expected: bytes) -> float:
        """Press a key; return the milliseconds until the text is written, or the whole wait."""
        self._written.clear()
        started = time.perf_counter()
        os.write(self.ours, key.encode())
        with contextlib.suppress(TimeoutError):
            await self.until(expected, _WAIT_S)
        return (time.perf_counter() - started) * 1000

    async def until(self, expected: bytes, limit_s: float) -> None:
        """Wait until a text is written."""
        async with asyncio.timeout(limit_s):
            while expected not in self._written:
                self._changed.clear()
                await self._changed.wait()


async def measure(options: report.Options) -> list[report.Row]:
    """Measure every key, then memory and processor time while nodes change."""
    _, floor = await programs.bare_interpreter()
    rounds = 3 if options.quick else 10
    taken: list[tuple[float, str]] = []
    async with _running() as (terminal, pid):
        for _ in range(rounds):
            for key, expected in _KEYS:
                taken.append((await terminal.press(key, expected), repr(key)))
                await asyncio.sleep(0.05)
        memory = programs.resident_mib(pid)
        before, started = programs.cpu_s(pid), time.monotonic()
        await asyncio.sleep(10)
        load = (programs.cpu_s(pid) - before) / (time.monotonic() - started)
    slowest, key = max(pair for pair in taken if pair[1] != repr(_ESCAPE))
    escape = max(pair for pair in taken if pair[1] == repr(_ESCAPE))[0]
    middle = sorted(taken)[len(taken) // 2][0]
    how = f"{len(taken)} keys at 200x50, while 100 nodes change with each page; slowest: {key}"
    return [
        report.Row(
            name="memory of muster top, 10,000 nodes",
            value=round(memory, 1),
            unit="MiB",
            target=60.0,
            how="resident, after all keys; floor: Python with asyncio",
            floor=round(floor, 1),
        ),
        report.Row(
            name="a key but escape until its answer is written, worst",
            value=round(slowest, 1),
            unit="ms",
            target=100.0,
            how=how,
        ),
        report.Row(
            name="the escape key, worst",
            value=round(escape, 1),
            unit="ms",
            target=None,
            how="for 100 ms of it, textual waits for the rest of a sequence that begins so",
        ),
        report.Row(name="a key, median", value=round(middle, 1), unit="ms", target=None, how=how),
        report.Row(
            name="processor of muster top",
            value=round(load * 100, 1),
            unit="% of a core",
            target=None,
            how="10 s without keys, one page of 500 nodes every 2 s",
        ),
    ]


@contextlib.asynccontextmanager
async def _running() -> AsyncIterator[tuple[Terminal, int]]:
    application = web.Application()
    application.router.add_get("/state", Health().answer)
    runner = web.AppRunner(application)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = runner.addresses[0][1]
    with tempfile.TemporaryDirectory() as directory:
        server = nats.NatsServer(Path(directory))
        await server.start()
        terminal = Terminal()
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", _PROGRAM, "top", "--health", f"http://127.0.0.1:{port}"),
            *("--url", server.url),
            stdin=terminal.theirs,
            stdout=terminal.theirs,
            stderr=terminal.theirs,
            env={**os.environ, "TERM": "xterm-256color"},
            start_new_session=True,
        )
        try:
            await terminal.until(b"10000 nodes", _LOAD_S)
            await asyncio.sleep(2)
            yield terminal, process.pid
        finally:
            process.terminate()
            await process.wait()
            await server.stop()
            await runner.cleanup()


def _plugin(node: str, verdict: str) -> dict[str, object]:
    counts = {"nvidia.com/gpu": 8, "smarter-devices/fuse": 20}
    return {
        "node": node,
        "plugin": "device-plugin",
        "state": "alive",
        "verdict": verdict,
        "since": f"2026-01-01T12:{int(node[-4:]) % 60:02}:00Z",
        "rule": "first_sign_of_life",
        "evidence": [{"source": "heartbeat", "observed": "0.9 s ago, due every 5 s"}],
        "instance": f"{int(node[-5:]):016x}",
        "interval_s": 5.0,
        "beat_age_s": 1.0,
        "resources": list(counts),
        "devices": counts,
        "allocatable": counts,
    }


if __name__ == "__main__":
    raise SystemExit(report.main("top", measure))
