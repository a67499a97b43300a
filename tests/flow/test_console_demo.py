"""The effects of `muster break` and `muster mend` in the console, in a real Chromium."""

import os
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.worlds import console_browser
from tests.worlds.broken_stack import NODES, Stack
from tests.worlds.console_browser import ready

if TYPE_CHECKING:
    from playwright.sync_api import Page

pytestmark = console_browser.NEEDED

LIMIT_MS = 90_000


@pytest.fixture
def stack() -> Iterator[Stack]:
    """Run `muster up`; its directory's path is short enough for sockets."""
    with tempfile.TemporaryDirectory(prefix="cd-") as temporary:
        made = Stack(Path(temporary))
        try:
            yield made
        finally:
            made.end()


@pytest.fixture
def fleet(stack: Stack, page: "Page") -> "Page":
    """Open the page of the fleet."""
    page.set_default_timeout(LIMIT_MS)
    stack.until(lambda: stack.program("console").get("http"))
    page.goto(stack.program("console")["http"])
    ready(page)
    shows(page, **dict.fromkeys(NODES, "HEALTHY"))
    return page


def shows(page: "Page", **labels: str) -> None:
    """Wait until the cells of nodes show these verdicts or alerts."""
    for node, label in labels.items():
        level = "ok" if label == "HEALTHY" else "critical"
        cell = page.locator(f'.cell.{level}[data-node="{node.replace("_", "-")}"]')
        cell.filter(has_text=label).wait_for()


def play(stack: Stack, page: "Page", faults: dict[str, tuple[str, str, str]]) -> None:
    """Break nodes, wait for verdicts and evidence, mend the nodes, wait for the resolved alerts.

    `faults` maps a node to its fault, the label in the fleet, and a text on the node's page.
    """
    for node, (fault, _, _) in faults.items():
        stack.do("break", fault, node)
    shows(page, **{node: label for node, (_, label, _) in faults.items()})
    for node, (_, label, why) in faults.items():
        page.locator("#side .problems a", has_text=node).click()
        page.get_by_role("heading", name=node, level=1).wait_for()
        page.locator("main").get_by_text(label).locator("visible=true").first.wait_for()
        page.locator("main").get_by_text(why).locator("visible=true").first.wait_for()
        page.get_by_text("notified webhook").first.wait_for()
        page.go_back()
        ready(page)
    stack.do("mend")
    shows(page, **dict.fromkeys(faults, "HEALTHY"))
    page.get_by_role("link", name="Alerts").click()
    page.get_by_text("No alert fires").first.wait_for()
    resolved = page.get_by_role("region", name="Resolved alerts")
    for node, (_, label, _) in faults.items():
        row = resolved.locator("tr", has_text=node).filter(has_text=label.lower())
        row.first.wait_for()
    page.go_back()
    ready(page)


def test_faults_appear_with_their_verdicts_and_evidence_and_are_resolved_when_mended(
    stack: Stack, fleet: "Page"
) -> None:
    play(
        stack,
        fleet,
        {
            "node-a": ("xid", "DEVICE_UNHEALTHY", "XID 79"),
            "node-b": ("freeze", "STUCK", "heartbeat"),
        },
    )


@pytest.mark.cluster
@pytest.mark.timeout(400)
@pytest.mark.skipif("KUBECONFIG" not in os.environ, reason="minutes long; `make test-cluster`")
def test_every_fault_that_can_be_made_is_shown_and_is_over_when_mended(
    stack: Stack, fleet: "Page"
) -> None:
    play(
        stack,
        fleet,
        {
            "node-a": ("kill", "PLUGIN_DOWN", "heartbeat"),
            "node-b": ("stream", "DEREGISTERED", "kubelet"),
            "node-c": ("kubelet", "DEREGISTERED", "kubelet"),
        },
    )
    stack.do("break", "socket", "node-a")
    fleet.get_by_role("link", name="Events", exact=True).click()
    fleet.locator("#events summary", has_text="plugin.registered").filter(
        has_text=re.compile("own_socket_lost|socket file is gone")
    ).first.wait_for()
    fleet.get_by_role("link", name="Fleet", exact=True).click()
    ready(fleet)
    stack.do("break", "health")
    fleet.locator("body.is-old #problem", has_text="health has not answered").wait_for()
    stack.do("mend")
    fleet.locator("body:not(.is-old) #live[data-state=live]").wait_for()
    stack.do("break", "nats")
    caveat = fleet.locator("#caveats", has_text="no connection to NATS")
    caveat.wait_for()
    stack.do("mend")
    caveat.wait_for(state="hidden")
    shows(fleet, **dict.fromkeys(NODES, "HEALTHY"))
