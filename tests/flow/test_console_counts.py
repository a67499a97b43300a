"""The console's cells in a real Chromium: which of a node's devices are usable."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

import pytest

from tests.worlds import console_browser, console_fleet
from tests.worlds.console_browser import Shown, ready

if TYPE_CHECKING:
    from playwright.sync_api import Page

FUSE: Final = "smarter-devices/fuse"

pytestmark = console_browser.NEEDED


@pytest.fixture(scope="module")
def shown() -> Iterator[Shown]:
    devices = {"resources": [FUSE], "devices": {FUSE: 20}, "allocatable": {FUSE: 20}}
    plugins = [
        console_fleet.plugin("gpu-a100-001"),
        console_fleet.plugin("gpu-a100-001", "STUCK", plugin="fuse", **devices),
        console_fleet.plugin("gpu-a100-002"),
    ]
    with Shown(console_fleet.Health(plugins)) as shown:
        yield shown


def test_only_the_devices_of_the_plugin_that_does_not_work_are_unconfirmed(
    shown: Shown, page: "Page"
) -> None:
    page.goto(shown.address)
    ready(page)
    page.wait_for_selector('.cell.warning[data-node="gpu-a100-001"]')
    cell = page.locator('.cell[data-node="gpu-a100-001"]')
    assert cell.locator(".tile-row").all_inner_texts() == [
        "nvidia.com/gpu\n8/8 usable",
        "smarter-devices/fuse\n20/20 listed",
    ]
    assert page.locator("#grid h3 .muted").inner_text().split(" · ") == [
        "2 nodes",
        "1 warning",
        "nvidia.com/gpu 16/16 usable",
        "smarter-devices/fuse 0/20 usable, 20 unconfirmed",
    ]
