"""Actions in the console, in a real Chromium: silence, expire, send again."""

import asyncio
import contextlib
import importlib.util
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Final

import pytest

from muster.local import nats
from muster.nats import bus, storage
from muster_console import config
from tests.worlds import console_fleet

if TYPE_CHECKING:
    from playwright.sync_api import Page

CHROMIUM: Final = Path("/usr/bin/chromium")
HAS_PLAYWRIGHT: Final = importlib.util.find_spec("playwright") is not None
WAIT_MS: Final = 60_000
NODE: Final = "gpu-a100-001"

pytestmark = [
    pytest.mark.skipif(not HAS_PLAYWRIGHT, reason="playwright is not installed"),
    pytest.mark.skipif(not CHROMIUM.exists(), reason=f"there is no {CHROMIUM}"),
]


@contextlib.contextmanager
def console(directory: Path) -> Iterator[str]:
    """Run NATS with a dead letter, and a console in which this user may act; yield its address."""
    is_up, loop, address = threading.Event(), asyncio.new_event_loop(), list[str]()
    end = asyncio.Event()

    async def serve() -> None:
        alerts = [console_fleet.alert(NODE, number=1)]
        health = console_fleet.Health([console_fleet.plugin(NODE, "STUCK", alerts=alerts)])
        async with (
            nats.NatsServer(directory / "nats") as server,
            bus.Bus(server.url, producer="test", name="test", owner=True) as owner,
        ):
            await owner.link.client()
            letter = "muster.dlq.notification.ops.0badcafe.0123456789abcdef"
            headers = {"Muster-Receiver": "ops", "Muster-Error": "HTTP 500"}
            await storage.enqueue(owner.link, letter, b"{}", key="letter", headers=headers)
            writing = config.Writing(local=True)
            async with console_fleet.shown(health, nats_url=server.url, writing=writing) as place:
                address.append(place)
                is_up.set()
                await end.wait()

    thread = threading.Thread(target=lambda: loop.run_until_complete(serve()))
    thread.start()
    try:
        assert is_up.wait(100)
        yield address[0]
    finally:
        loop.call_soon_threadsafe(end.set)
        thread.join()
        loop.close()


@pytest.fixture
def page() -> Iterator["Page"]:
    """Open a page; fail the test if the Content-Security-Policy refused anything."""
    from playwright.sync_api import sync_playwright  # noqa: PLC0415  # may be missing

    options = ["--no-sandbox", "--disable-dev-shm-usage"]
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=str(CHROMIUM), args=options)
        page = browser.new_page()
        page.set_default_timeout(WAIT_MS)
        errors: list[str] = []
        page.on(
            "console",
            lambda message: errors.append(message.text) if "Refused" in message.text else None,
        )
        yield page
        browser.close()
        assert errors == []


def test_an_alert_is_silenced_and_a_notification_sent_again_with_the_mouse(
    tmp_path: Path, page: "Page"
) -> None:
    with console(tmp_path) as address:
        page.goto(f"{address}/alerts?kind=stuck&node={NODE}")
        page.wait_for_selector("article.alert details >> text=silence it")
        page.locator("article.alert summary").first.click()
        page.get_by_role("link", name="Silence...").click()
        matchers = page.get_by_label("Matchers").input_value()
        assert matchers.splitlines() == [
            'kind="stuck"',
            f'node="{NODE}"',
            'resource="nvidia.com/gpu"',
        ]
        page.get_by_text("matches 1 firing alert.").wait_for()
        page.get_by_label("Matchers").fill("node=elsewhere")
        page.locator("#silence-show").click()
        page.get_by_text("node=elsewhere matches 0 firing alerts.").wait_for()
        page.get_by_label("Matchers").fill(matchers)
        page.get_by_label("For how long").fill("forever")
        page.get_by_label("Why").fill("new disk")
        page.locator("#silence-submit").click()
        page.get_by_role("alert").get_by_text("is not a duration").wait_for()
        assert page.get_by_label("Why").input_value() == "new disk"
        page.get_by_label("For how long").fill("2h")
        page.locator("#silence-submit").click()
        page.get_by_text("The silence is stored.").wait_for()
        page.locator(".badge.silenced", has_text="silenced until").wait_for()
        page.get_by_role("button", name="Expire now").click()
        page.get_by_text("The silence has expired.").wait_for()
        page.locator(".badge.silenced", has_text="silenced until").wait_for(state="detached")
        page.get_by_role("button", name="Send again").click()
        page.get_by_text("The notification is back in the outbox").wait_for()
        page.get_by_text("every notification was delivered").wait_for()
