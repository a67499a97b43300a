"""How open pages are kept up to date, in a real Chromium: connections that break, many tabs."""

import asyncio
import contextlib
import functools
import tempfile
import threading
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from muster import vocabulary
from muster.nats import bus
from tests.worlds import console_browser, console_fleet, fleet_parts
from tests.worlds.console_browser import Shown, ready, until

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page, Route

NODE = "gpu-l4-001"
HIDE = """hidden => {
  Object.defineProperty(document, 'hidden', { configurable: true, get: () => hidden });
  document.dispatchEvent(new Event('visibilitychange'));
}"""
"""Simulates that another tab is selected, because a headless browser shows all its tabs."""

pytestmark = console_browser.NEEDED


@pytest.fixture(scope="module")
def shown() -> Iterator[Shown]:
    """Run a console of a small fleet, with NATS."""
    nodes = [f"gpu-l4-{number:03d}" for number in range(4)]
    health = console_fleet.Health([console_fleet.plugin(node) for node in nodes])
    with (
        tempfile.TemporaryDirectory(prefix="cs-") as directory,
        Shown(health, Path(directory)) as shown,
    ):
        yield shown


@contextlib.contextmanager
def cable(address: str) -> Iterator[tuple[str, "Cut"]]:
    """Run a proxy for a console; yield its address, and a callable that cuts its connections."""
    loop, is_up = asyncio.new_event_loop(), threading.Event()
    proxy = fleet_parts.Cable(int(address.rpartition(":")[2]))
    end = asyncio.Event()

    async def carry() -> None:
        await proxy.open()
        is_up.set()
        await end.wait()
        await proxy.close()
        others = asyncio.all_tasks() - {asyncio.current_task()}
        await asyncio.gather(*others, return_exceptions=True)

    thread = threading.Thread(target=lambda: loop.run_until_complete(carry()))
    thread.start()
    try:
        assert is_up.wait(60)
        yield f"http://127.0.0.1:{proxy.url.rpartition(':')[2]}", Cut(loop, proxy)
    finally:
        loop.call_soon_threadsafe(end.set)
        thread.join()
        loop.close()


class Cut:
    """Cuts the connections through a proxy, which then accepts new ones."""

    def __init__(self, loop: asyncio.AbstractEventLoop, proxy: fleet_parts.Cable) -> None:
        self._loop = loop
        self._proxy = proxy

    def __call__(self) -> None:
        """Cut all connections."""
        self._loop.call_soon_threadsafe(self._proxy.restore)


async def remove_device(link: bus.Bus, device: str) -> None:
    """Publish an event about a device."""
    event = vocabulary.DeviceRemoved(
        node=NODE,
        at=datetime.now(UTC),
        plugin="device-plugin",
        resource=console_fleet.GPU,
        device_id=device,
    )
    await link.publish(event)


def publish(shown: Shown, *devices: str) -> None:
    for device in devices:
        shown.do(functools.partial(remove_device, device=device))


def devices(page: "Page") -> list[str]:
    """Return the devices that the listed events name, the newest first."""
    texts: list[str] = page.eval_on_selector_all(
        "#events .text", "each => each.map(one => one.textContent)"
    )
    return [word for text in texts for word in text.split() if word.startswith("dev-")]


def is_live(page: "Page") -> None:
    page.wait_for_selector("#live[data-state=live]")


def hide(page: "Page", *, hidden: bool = True) -> None:
    page.evaluate(HIDE, hidden)


def test_each_event_is_shown_once_when_the_connection_breaks(shown: Shown, page: "Page") -> None:
    note = "as they come, the newest first; from the last hour at most"
    with cable(shown.address) as (address, cut):
        page.goto(f"{address}/events?node={NODE}")
        is_live(page)
        publish(shown, "dev-a1", "dev-a2")
        until(page, lambda: devices(page)[:2] == ["dev-a2", "dev-a1"])
        cut()
        page.wait_for_selector("#live[data-state=lost]")
        publish(shown, "dev-a3")
        is_live(page)
        until(page, lambda: "dev-a3" in devices(page))
        assert devices(page)[:3] == ["dev-a3", "dev-a2", "dev-a1"]
        assert len(devices(page)) == len({*devices(page)})
        assert page.text_content("#tail-note") == note


def test_a_refused_page_goes_on_where_it_was(shown: Shown, page: "Page") -> None:
    refused = []

    def refuse_second(route: "Route") -> None:
        refused.append(route.request.url)
        if len(refused) == 2:
            route.fulfill(status=503, body="too many pages")
        else:
            route.continue_()

    page.clock.install()
    page.route("**/api/changes*", refuse_second)
    with cable(shown.address) as (address, cut):
        page.goto(f"{address}/events?node={NODE}")
        is_live(page)
        publish(shown, "dev-b1")
        until(page, lambda: devices(page)[:1] == ["dev-b1"])
        cut()
        until(page, lambda: len(refused) == 2)
        page.wait_for_selector("#live[data-state=lost]")
        publish(shown, "dev-b2")
        page.clock.run_for(10_000)
        until(page, lambda: devices(page)[:1] == ["dev-b2"])
        assert len(devices(page)) == len({*devices(page)})


def test_a_hidden_page_is_not_connected_and_shows_what_it_missed_when_it_is_seen_again(
    shown: Shown, page: "Page"
) -> None:
    page.goto(f"{shown.address}/events?node={NODE}")
    is_live(page)
    publish(shown, "dev-c1")
    until(page, lambda: devices(page)[:1] == ["dev-c1"])
    hide(page)
    page.wait_for_selector("#live[data-state=page]")
    publish(shown, "dev-c2")
    with console_browser.page(page.context.browser) as other:  # type: ignore[arg-type]
        other.goto(f"{shown.address}/events?node={NODE}")
        until(other, lambda: "dev-c2" in devices(other))
    assert "dev-c2" not in devices(page)
    hide(page, hidden=False)
    until(page, lambda: devices(page)[:2] == ["dev-c2", "dev-c1"])
    assert len(devices(page)) == len({*devices(page)})


def test_eight_tabs_of_which_one_is_seen_do_not_block_the_browser(
    shown: Shown, browser: "Browser"
) -> None:
    with contextlib.closing(browser.new_context()) as context:
        tabs: list[Page] = []
        for path in ("/", "/alerts", "/events", "/plots", f"/node/{NODE}", "/", "/alerts", "/"):
            for tab in tabs[-1:]:
                hide(tab)
            tab = context.new_page()
            tab.set_default_timeout(console_browser.WAIT_MS)
            # later tabs start hidden, like tabs that are opened in the background
            if tabs:
                tab.add_init_script(f"({HIDE})(true)")
            tab.goto(shown.address + path)
            tabs.append(tab)
        for tab in (tabs[-1], tabs[0]):
            hide(tab, hidden=False)
            ready(tab)
            is_live(tab)
        assert {tab.get_attribute("#live", "data-state") for tab in tabs[1:-1]} == {"page"}
        shown.break_node(NODE)
        try:
            tabs[0].wait_for_selector(f'.cell.critical[data-node="{NODE}"]')
            hide(tabs[0])
            hide(tabs[4], hidden=False)
            tabs[4].get_by_text("none for 12.4 s, 12.4 intervals").first.wait_for()
        finally:
            shown.mend_node(NODE)


def test_a_selection_delays_the_refresh_only_while_it_lasts(shown: Shown, page: "Page") -> None:
    page.goto(f"{shown.address}/alerts")
    is_live(page)
    page.get_by_text("No alert fires").wait_for()
    page.get_by_role("heading", name="Silences").select_text()
    shown.break_node(NODE)
    try:
        page.locator("#alert-count", has_text="1").wait_for()
        # the selected text stays, but the title is updated
        until(page, lambda: page.title() == "1 alert · muster")
        assert page.evaluate("String(getSelection())").strip() == "Silences"
        assert page.get_by_text("No alert fires").count() == 1
        page.evaluate("getSelection().removeAllRanges()")
        page.locator("article.alert", has_text=NODE).wait_for()
    finally:
        shown.mend_node(NODE)
    until(page, lambda: page.title() == "0 alerts · muster")


def test_the_focus_stays_on_its_node_when_the_nodes_are_drawn_again(
    shown: Shown, page: "Page"
) -> None:
    page.goto(shown.address)
    ready(page)
    is_live(page)
    page.locator(f'.cell[data-node="{NODE}"]').focus()
    before = shown.health.plugins
    shown.health.plugins = [*before, console_fleet.plugin("gpu-l4-000a")]
    try:
        page.wait_for_selector('.cell[data-node="gpu-l4-000a"]')
        assert page.evaluate("document.activeElement.dataset.node") == NODE
    finally:
        shown.health.plugins = before
    # the node with the focus is removed
    page.wait_for_selector('.cell[data-node="gpu-l4-000a"]', state="detached")
    shown.health.plugins = [each for each in before if each["node"] != NODE]
    try:
        page.wait_for_selector(f'.cell[data-node="{NODE}"]', state="detached")
        assert page.evaluate("document.activeElement.dataset.node") == "gpu-l4-000"
    finally:
        shown.health.plugins = before


def test_the_page_of_a_node_that_is_removed_says_so(shown: Shown, page: "Page") -> None:
    node = "gpu-l4-002"
    page.goto(f"{shown.address}/node/{node}")
    is_live(page)
    page.get_by_text("HEALTHY").first.wait_for()
    before = shown.health.plugins
    shown.health.plugins = [each for each in before if each["node"] != node]
    try:
        page.get_by_text("This node is not known").wait_for()
    finally:
        shown.health.plugins = before
    page.get_by_text("HEALTHY").first.wait_for()


def test_a_page_waits_as_long_as_a_busy_console_says_before_it_is_read_again(
    shown: Shown, page: "Page"
) -> None:
    refused = []

    def refuse_first(route: "Route") -> None:
        refused.append(route.request.url)
        if len(refused) == 1:
            route.fulfill(status=429, headers={"retry-after": "20"}, body="too many requests")
        else:
            route.continue_()

    page.clock.install()
    page.goto(f"{shown.address}/node/{NODE}")
    is_live(page)
    page.route(f"**/node/{NODE}", refuse_first)
    shown.break_node(NODE)
    try:
        until(page, lambda: len(refused) == 1)
        page.clock.run_for(19_000)
        assert len(refused) == 1
        page.clock.run_for(21_000)
        page.get_by_text("none for 12.4 s, 12.4 intervals").first.wait_for()
    finally:
        shown.mend_node(NODE)


def test_the_title_of_a_hidden_page_of_the_fleet_is_current(shown: Shown, page: "Page") -> None:
    page.clock.install()
    page.goto(shown.address)
    ready(page)
    is_live(page)
    hide(page)
    shown.break_node(NODE)
    try:
        until(page, lambda: "1 critical" in page.request.get(shown.address).text())
        page.clock.run_for(60_000)
        until(page, lambda: page.title() == "1 critical · muster")
    finally:
        shown.mend_node(NODE)
