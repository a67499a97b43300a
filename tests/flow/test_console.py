"""The console in a real Chromium: live faults, filters, history, keyboard, lost connections."""

import contextlib
import json
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Final

import pytest

from tests.worlds import console_browser, console_fleet
from tests.worlds.console_browser import Shown, ready, until

if TYPE_CHECKING:
    from playwright.sync_api import Page, Route

ATTACK: Final = "<img src=x onerror=document.title='taken'>"

pytestmark = console_browser.NEEDED


@pytest.fixture(scope="module")
def shown() -> Iterator[Shown]:
    nodes = [f"gpu-{pool}-{number:03d}" for pool in ("a100", "l4") for number in range(40)]
    with Shown(console_fleet.Health([console_fleet.plugin(node) for node in nodes])) as shown:
        yield shown


@pytest.fixture
def fault(shown: Shown) -> Iterator[str]:
    """Break a node until the test ends; yield its name."""
    shown.break_node("gpu-l4-003")
    yield "gpu-l4-003"
    shown.mend_node("gpu-l4-003")


def cells(page: "Page") -> list[str]:
    """Return the names of the visible cells."""
    names: list[str] = page.eval_on_selector_all(
        "#grid .cell:not([hidden])", "cells => cells.map(cell => cell.dataset.node)"
    )
    return names


def test_a_fault_appears_without_a_reload_leads_to_its_evidence_and_resolves(
    shown: Shown, page: "Page"
) -> None:
    page.goto(shown.address)
    ready(page)
    assert len(cells(page)) == 80
    page.get_by_text("All 80 nodes are well").wait_for()
    shown.break_node("gpu-a100-007", summary=ATTACK)
    cell = page.locator('.cell[data-node="gpu-a100-007"]')
    page.wait_for_selector('.cell.critical[data-node="gpu-a100-007"]')
    assert cell.text_content() == "C"
    assert cell.get_attribute("aria-label") == "gpu-a100-007, critical STUCK, 1 alert"
    # the first problem links to the node's page, which shows the evidence
    page.locator("#side .problems a").first.click()
    page.get_by_text("none for 12.4 s, 12.4 intervals").first.wait_for()
    assert page.get_by_role("heading", level=1).text_content() == "gpu-a100-007"
    assert page.get_by_role("link", name="Runbook").count() == 1
    assert page.get_by_text(ATTACK).count() == 1
    assert "taken" not in page.title()
    shown.mend_node("gpu-a100-007")
    page.get_by_text("HEALTHY").first.wait_for()
    page.go_back()
    ready(page)
    page.wait_for_selector('.cell.ok[data-node="gpu-a100-007"]')


def test_filters_are_in_the_address_and_survive_reload_and_back(
    shown: Shown, page: "Page", fault: str
) -> None:
    page.goto(shown.address)
    ready(page)
    page.wait_for_selector(f'.cell.critical[data-node="{fault}"]')
    page.get_by_role("button", name=re.compile("critical")).click()
    until(page, lambda: cells(page) == [fault])
    assert page.url.endswith("?level=critical")
    page.get_by_label("Group by").select_option("zone")
    assert page.url.endswith("?level=critical&by=zone")
    page.reload()
    ready(page)
    assert cells(page) == [fault]
    assert page.get_by_label("Group by").input_value() == "zone"
    page.go_back()
    page.go_back()
    until(page, lambda: len(cells(page)) == 80)
    page.get_by_label("Search nodes").fill("A100-00 healthy")
    until(page, lambda: len(cells(page)) == 10)
    assert page.url.endswith("?q=A100-00+healthy")


def test_the_name_of_a_pod_finds_the_node_whose_alert_names_it(shown: Shown, page: "Page") -> None:
    pods = [f"ml/train-{ATTACK}", "ml/eval", "ml/serve"]
    shown.break_node("gpu-l4-004", pods=pods, pods_total=5)
    page.goto(shown.address)
    page.wait_for_selector('.cell.critical[data-node="gpu-l4-004"]')
    page.get_by_label("Search nodes").fill("ml/serve")
    until(page, lambda: cells(page) == ["gpu-l4-004"])
    # the pods come before the reason, which may be long
    used = page.locator("#side .problems .used-by")
    assert used.text_content() == f"used by {pods[0]}, {pods[1]} and 3 more"
    label = page.locator('.cell[data-node="gpu-l4-004"]').get_attribute("aria-label")
    assert label == f"gpu-l4-004, critical STUCK, 1 alert, used by {pods[0]} and others"
    page.get_by_label("Search nodes").fill("ml/idle")
    page.get_by_text("Pods are found if an alert names them.").wait_for()
    shown.mend_node("gpu-l4-004")


def test_everything_can_be_reached_with_keys_alone(shown: Shown, page: "Page", fault: str) -> None:
    page.goto(shown.address)
    ready(page)
    page.wait_for_selector(f'.cell.critical[data-node="{fault}"]')

    def focused() -> str:
        name: str = page.evaluate("document.activeElement.dataset.node || ''")
        return name

    page.keyboard.press("/")
    page.keyboard.type("l4")
    until(page, lambda: len(cells(page)) == 40)
    for _ in range(60):
        page.keyboard.press("Tab")
        if focused():
            break
    assert focused() == "gpu-l4-000"
    for _ in range(3):
        page.keyboard.press("ArrowRight")
    assert focused() == fault
    page.keyboard.press("ArrowDown")
    below = focused()
    page.keyboard.press("ArrowUp")
    assert below != fault == focused()
    page.keyboard.press("Enter")
    page.get_by_text("none for 12.4 s, 12.4 intervals").first.wait_for()
    page.go_back()
    ready(page)
    assert page.get_by_label("Search nodes").input_value() == "l4"


def test_old_data_is_marked_old_and_current_again(shown: Shown, page: "Page") -> None:
    page.goto(shown.address)
    ready(page)
    page.wait_for_selector("#live[data-state=live]")
    shown.health.is_away = True
    page.wait_for_selector("body.is-old")
    assert "health has not answered" in (page.text_content("#problem") or "")
    assert len(cells(page)) == 80
    shown.health.is_away = False
    page.wait_for_selector("body:not(.is-old)")


@pytest.mark.parametrize("path", ["", "/node/gpu-l4-001", "/alerts", "/events"])
def test_a_page_whose_connection_was_refused_connects_again(
    shown: Shown, page: "Page", path: str
) -> None:
    refused = []

    def refuse_once(route: "Route") -> None:
        refused.append(route.request.url)
        route.fulfill(status=503, body="too many pages") if len(refused) == 1 else route.continue_()

    page.clock.install()
    page.route("**/api/changes*", refuse_once)
    page.goto(f"{shown.address}{path}")
    page.wait_for_selector("#live[data-state=lost]")
    page.clock.run_for(10_000)
    page.wait_for_selector("#live[data-state=live]")


def test_the_fleet_is_read_again_after_a_failure(shown: Shown, page: "Page") -> None:
    page.clock.install()
    page.route("**/api/fleet", lambda route: route.abort(), times=1)
    with page.expect_event("requestfailed"):
        page.goto(shown.address)
    page.clock.run_for(10_000)
    ready(page)


def test_the_state_at_another_time_is_reached_with_keys_and_kept_in_the_address(
    shown: Shown, page: "Page", fault: str
) -> None:
    page.goto(f"{shown.address}/node/{fault}?range=1h")
    page.wait_for_selector("#live[data-state=live]")
    assert not page.is_visible("#scrub-show")
    page.focus("#scrub")
    page.keyboard.press("PageDown")
    page.keyboard.press("PageDown")
    page.keyboard.press("PageDown")
    page.locator("#moment", has_text="no verdict known").wait_for()
    until(page, lambda: "&at=" in page.url)
    page.keyboard.press("End")
    page.locator("#moment", has_text="STUCK").wait_for()
    page.reload()
    page.locator("#moment", has_text="STUCK").wait_for()
    page.get_by_role("link", name="now", exact=True).click()
    until(page, lambda: "&at=" not in page.url)
    # the same without scripts: the slider is a form
    with contextlib.closing(page.context.browser.new_context(java_script_enabled=False)) as plain:  # type: ignore[union-attr]
        still = plain.new_page()
        still.goto(f"{shown.address}/node/{fault}?range=1h")
        still.click("#scrub-show")
        still.locator("#moment", has_text="STUCK").wait_for()


def test_ages_do_not_depend_on_the_clock_of_the_browser(shown: Shown, page: "Page") -> None:
    page.clock.set_fixed_time("2001-01-01T00:00:00Z")
    page.goto(shown.address)
    ready(page)
    page.wait_for_selector("#live[data-state=live]")
    cell = page.locator('.cell[data-node="gpu-a100-001"]')
    cell.hover()
    assert re.search(r" for 1[2-9] min ", cell.get_attribute("title") or "")


def test_a_narrow_phone_shows_every_page_without_scrolling_sideways(
    shown: Shown, page: "Page", fault: str
) -> None:
    page.set_viewport_size({"width": 360, "height": 740})
    for path in ("/", f"/node/{fault}", "/alerts", "/events", "/plots"):
        page.goto(shown.address + path)
        width = page.evaluate("document.documentElement.scrollWidth")
        assert (path, width) == (path, 360)


def test_a_gpu_that_fails_on_the_stand_in_appears_and_resolves(page: "Page") -> None:
    command = (sys.executable, "-P", "-m", "muster.cli", "up", "--plain", "--nodes", "1")
    with subprocess.Popen(
        [*command, "--gpus", "2"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as up:
        assert up.stdout is not None
        reading = threading.Thread(target=up.stdout.read)
        try:
            addresses = {}
            for line in up.stdout:
                name, _, where = line.partition("  ")
                addresses[name] = where.strip()
                if name == "settings, logs":
                    break
            assert next(name for name in addresses if "starting" not in name) == "console"
            reading.start()
            page.goto(addresses["console"].split()[0])
            page.wait_for_selector('.cell.ok[data-node="node-a"]')
            faults = Path(addresses["settings, logs"]) / "faults-node-a.jsonl"
            with faults.open("a") as script:
                script.write(json.dumps({"device": 0, "xid": 79}) + "\n")
            page.wait_for_selector('.cell.critical[data-node="node-a"]')
            page.locator("#side .problems a").first.click()
            page.get_by_text("XID 79").first.wait_for()
            page.get_by_text("1/2 usable").first.wait_for()
            page.get_by_text("notified webhook").first.wait_for()
            received = page.request.get(addresses["webhook"].split()[0]).text()
            assert f"{addresses['console'].split()[0]}/node/node-a" in received
            page.get_by_role("link", name="Events", exact=True).click()
            page.locator("#events summary", has_text="device.health_changed").first.click()
            page.get_by_text('"type": "dev.muster.device.health_changed"').first.wait_for()
            with faults.open("a") as script:
                script.write(json.dumps({"device": 0, "clear": 79}) + "\n")
            page.get_by_role("link", name="Alerts", exact=False).click()
            page.get_by_text("No alert fires").first.wait_for()
            assert page.get_by_text("device_unhealthy").count() == 1
        finally:
            up.send_signal(signal.SIGINT)
            up.wait(60)
            if reading.is_alive():
                reading.join()
