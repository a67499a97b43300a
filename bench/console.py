"""Adapter for processes and Chromium: measures the console's cost and speed with 10,000 nodes.

The console is a separate process, and NATS is a real server; health is simulated here. Chromium is
Debian's package; without it or Playwright only the console itself is measured.
"""

import asyncio
import contextlib
import gzip
import importlib.util
import socket
import statistics
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import TYPE_CHECKING, Final

import aiohttp
import yaml

import muster
import muster_console
from bench import programs, report
from tests.worlds import console_fleet

if TYPE_CHECKING:
    from playwright.async_api import Page

_NODES: Final = 10_000
_PAGES: Final = 20
_CHANGED: Final = 100
_CHROMIUM: Final = Path("/usr/bin/chromium")
_FILES: Final = ("console.css", "fleet.js", "live.js")


async def measure(options: report.Options) -> list[report.Row]:
    """Measure the console, then its pages in a browser."""
    health = console_fleet.Health(console_fleet.large(_NODES))
    async with (
        programs.arena("health", muster, muster_console) as (root, nats_url),
        console_fleet.answering(health) as health_url,
        _console(root, nats_url, health_url) as (pid, address),
    ):
        rows = [await _size(address)]
        rows += await _in_browser(address, health, times=2 if options.quick else 10)
        rows += await _cost(address, pid, health, seconds=15.0 if options.quick else 60.0)
    return rows


@contextlib.asynccontextmanager
async def _console(root: Path, nats_url: str, health_url: str) -> AsyncIterator[tuple[int, str]]:
    """Run a console until it shows every node; yield its process id and its address."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    settings = {"bus": {"url": nats_url}, "health": [health_url], "http": {"port": port}}
    file = root / "console.yaml"
    await asyncio.to_thread(file.write_text, yaml.safe_dump(settings), "utf-8")
    address = f"http://127.0.0.1:{port}"
    command = (sys.executable, "-m", "muster_console", "--config", str(file))
    async with programs.running(command) as process:
        async with asyncio.timeout(120), aiohttp.ClientSession() as client:
            while await _shown(client, address) < _NODES:  # noqa: ASYNC110  # another process
                await asyncio.sleep(0.2)
        yield process.pid, address


async def _shown(client: aiohttp.ClientSession, address: str) -> int:
    """Return how many nodes the console shows."""
    with contextlib.suppress(aiohttp.ClientConnectionError):
        async with client.get(f"{address}/api/fleet") as answer:
            return len((await answer.json())["names"])
    return 0


async def _size(address: str) -> report.Row:
    """Measure how many bytes a browser loads for the page of the fleet."""
    paths = ("/", "/api/fleet", *(f"/static/{name}" for name in _FILES))
    total = 0
    headers = {"accept-encoding": "gzip"}
    async with aiohttp.ClientSession(auto_decompress=False, headers=headers) as client:
        for path in paths:
            async with client.get(address + path) as answer:
                body = await answer.read()
                if answer.headers.get("content-encoding") != "gzip":
                    body = gzip.compress(body)
                total += len(body)
    how = f"{', '.join(paths)}; {_NODES:,} nodes"
    return report.row("page of the fleet, compressed", total / 1e3, "kB", target=300, how=how)


async def _in_browser(
    address: str, health: console_fleet.Health, *, times: int
) -> list[report.Row]:
    """Measure how fast the page of the fleet is drawn and updated."""
    if importlib.util.find_spec("playwright") is None or not _CHROMIUM.exists():
        print("not measured: the page in Chromium, because it or Playwright is missing")
        return []
    from playwright.async_api import async_playwright  # noqa: PLC0415  # may be missing

    paints, interactives, updates = [], [], list[float]()
    async with async_playwright() as playwright:
        arguments = ["--no-sandbox", "--disable-dev-shm-usage"]
        browser = await playwright.chromium.launch(executable_path=str(_CHROMIUM), args=arguments)
        for _ in range(times):
            context = await browser.new_context(
                viewport={"width": 1440, "height": 900}, bypass_csp=True
            )
            page = await context.new_page()
            await page.goto(address)
            await page.wait_for_selector("body[data-ready]", timeout=60_000)
            paints.append(await _time_of(page, "first-contentful-paint"))
            interactives.append(await _time_of(page, "fleet-interactive"))
            if not updates:
                updates += await _updates(page, health, times=max(1, times // 2))
            await context.close()
        await browser.close()
    how = f"{_NODES:,} nodes, {times} times in headless Chromium, 1440 x 900"
    changed = f"{_CHANGED} of {_NODES:,} nodes, in the page"
    return [
        *report.spread("first contentful paint", paints, "ms", how=how, target=1_000),
        *report.spread("cells drawn, keys answered", interactives, "ms", how=how, target=1_500),
        *report.spread("update", updates, "ms", how=changed, target=50),
    ]


async def _time_of(page: "Page", name: str) -> float:
    return float(await page.evaluate(f"performance.getEntriesByName('{name}')[0].startTime"))


async def _updates(page: "Page", health: console_fleet.Health, *, times: int) -> list[float]:
    """Change the first nodes repeatedly; return how long the page needed for each update."""
    read = "performance.getEntriesByName('fleet-update').map(e => [e.duration, e.detail])"
    for number in range(times):
        verdict = "STUCK" if number % 2 == 0 else "HEALTHY"
        before = len(await page.evaluate(read))
        _change(health, verdict)
        await page.wait_for_function(
            f"performance.getEntriesByName('fleet-update').length > {before}", timeout=120_000
        )
    return [duration for duration, count in await page.evaluate(read) if count >= _CHANGED / 2]


def _change(health: console_fleet.Health, verdict: str) -> None:
    """Change the verdict on the first nodes, in the order of their names."""
    health.plugins.sort(key=lambda plugin: str(plugin["node"]))
    changed = [plugin | {"verdict": verdict, "alerts": []} for plugin in health.plugins[:_CHANGED]]
    health.plugins[:_CHANGED] = changed


async def _cost(
    address: str, pid: int, health: console_fleet.Health, *, seconds: float
) -> list[report.Row]:
    """Measure memory and processor time with open pages while nodes change."""
    how = f"{_NODES:,} nodes, {_PAGES} open pages, {_CHANGED} nodes change every 10 s"
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(None)) as client:
        readers = [asyncio.create_task(_read(client, address)) for _ in range(_PAGES)]
        await asyncio.sleep(3.0)
        before, started = _cpu_s(pid), time.monotonic()
        peaks = []
        verdicts = ("STUCK", "HEALTHY")
        while (passed := time.monotonic() - started) < seconds:
            _change(health, verdicts[int(passed / 10) % 2])
            peaks.append(_resident_mib(pid))
            await asyncio.sleep(1.0)
        used = (_cpu_s(pid) - before) / (time.monotonic() - started)
        for reader in readers:
            reader.cancel()
        messages = await asyncio.gather(*readers, return_exceptions=True)
        assert all(isinstance(each, asyncio.CancelledError) for each in messages), "none ended"
    memory = statistics.median(peaks)
    return [
        report.row("memory of the console", memory, "MiB", target=80, how=f"{how}; resident"),
        report.row("processor time", used * 100, "% of a core", target=3, how=how),
    ]


async def _read(client: aiohttp.ClientSession, address: str) -> None:
    """Simulate an open page: read the changes, and the list of problems after each change."""
    async with client.get(f"{address}/api/changes") as answer:
        async for line in answer.content:
            if line.startswith(b"event: fleet"):
                async with client.get(f"{address}/?part=side") as side:
                    await side.read()


def _cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text("utf-8").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / 100


def _resident_mib(pid: int) -> float:
    text = Path(f"/proc/{pid}/status").read_text("utf-8")
    return int(text.partition("VmRSS:")[2].split()[0]) / 1024


if __name__ == "__main__":
    sys.exit(report.main("console", measure))
