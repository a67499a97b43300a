"""A Chromium, and a console of a scripted fleet that runs in a thread of its own."""

import asyncio
import contextlib
import importlib.util
import threading
from collections.abc import Callable, Coroutine, Iterator
from concurrent import futures
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Self

import pytest

from muster.local import nats
from muster.nats import bus
from muster_console import config
from tests.worlds import console_fleet

if TYPE_CHECKING:
    from playwright.sync_api import Browser, ConsoleMessage, Page

CHROMIUM: Final = Path("/usr/bin/chromium")
WAIT_MS: Final = 30_000
NEEDED: Final = [
    pytest.mark.skipif(
        importlib.util.find_spec("playwright") is None, reason="playwright is not installed"
    ),
    pytest.mark.skipif(not CHROMIUM.exists(), reason=f"there is no {CHROMIUM}"),
]
"""Marks of every test that needs a browser."""


@contextlib.contextmanager
def browser() -> Iterator["Browser"]:
    """Run a Chromium; no event loop may run in this thread meanwhile."""
    from playwright.sync_api import sync_playwright  # noqa: PLC0415  # may be missing

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=str(CHROMIUM),
            args=["--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu"],
        )
        yield browser
        browser.close()


@contextlib.contextmanager
def page(browser: "Browser", **options: Any) -> Iterator["Page"]:
    """Open a page; a script error or a violation of the Content-Security-Policy fails the test."""
    options = {"viewport": {"width": 1280, "height": 800}, **options}
    with contextlib.closing(browser.new_context(**options)) as context:
        made = context.new_page()
        made.set_default_timeout(WAIT_MS)
        errors: list[str] = []

        def logged(message: "ConsoleMessage") -> None:
            # a failed request is not an error of the page
            if message.type == "error" and "Failed to load resource" not in message.text:
                errors.append(message.text)

        context.on("page", lambda opened: errors.append(f"a window: {opened.url}"))
        made.on("pageerror", lambda error: errors.append(str(error)))
        made.on("console", logged)
        yield made
        assert errors == []


def ready(page: "Page") -> None:
    """Wait until the cells are drawn."""
    page.wait_for_selector("body[data-ready]")


def until(page: "Page", holds: Callable[[], bool]) -> None:
    """Wait until a condition holds, while the page runs."""
    for _ in range(WAIT_MS // 50):
        if holds():
            return
        page.wait_for_timeout(50)
    raise AssertionError("not within half a minute")


class Shown:
    """A console that shows a scripted fleet.

    With a directory, a nats-server runs as well, with its data there; `link` is connected to it,
    and the user of the console may act.
    """

    def __init__(self, health: console_fleet.Health, directory: Path | None = None) -> None:
        self.health = health
        self.address = ""
        self.link: bus.Bus | None = None
        self._directory = directory
        self._up = threading.Event()
        self._loop = asyncio.new_event_loop()
        self._end = asyncio.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Self:
        self._thread.start()
        assert self._up.wait(60)
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._end.set)
        self._thread.join()

    def do(self, work: Callable[[bus.Bus], Coroutine[Any, Any, None]]) -> None:
        """Run a coroutine with the bus, and wait until it ends."""
        assert self.link is not None
        doing: futures.Future[None] = asyncio.run_coroutine_threadsafe(work(self.link), self._loop)
        doing.result(60)

    def set(self, plugin: dict[str, object]) -> None:
        """Replace the plugin of a node."""
        self.health.plugins = [
            plugin if each["node"] == plugin["node"] else each for each in self.health.plugins
        ]

    def break_node(self, node: str, **more: object) -> None:
        """Give a node a verdict and an alert."""
        alert = console_fleet.alert(node, number=7, **more)  # type: ignore[arg-type]
        self.set(console_fleet.plugin(node, "STUCK", alerts=[alert], evidence=alert["evidence"]))

    def mend_node(self, node: str) -> None:
        """Make a node healthy."""
        self.set(console_fleet.plugin(node))

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_until_complete(self._serve())
        self._loop.close()

    async def _serve(self) -> None:
        async with contextlib.AsyncExitStack() as stack:
            url = "nats://127.0.0.1:1"
            if self._directory is not None:
                server = await stack.enter_async_context(nats.NatsServer(self._directory))
                url = server.url
                connected = bus.Bus(url, producer="health", name="test", owner=True)
                self.link = await stack.enter_async_context(connected)
            writing = config.Writing(local=self._directory is not None)
            self.address = await stack.enter_async_context(
                console_fleet.shown(self.health, nats_url=url, writing=writing)
            )
            self._up.set()
            await self._end.wait()
