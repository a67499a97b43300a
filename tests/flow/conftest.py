"""Fixtures: a browser for the tests of a module, and a page in it."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from tests.worlds import console_browser

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page


@pytest.fixture(scope="module")
def browser() -> Iterator["Browser"]:
    """Run Chromium for the tests of a module; yield it."""
    with console_browser.browser() as browser:
        yield browser


@pytest.fixture
def page(browser: "Browser") -> Iterator["Page"]:
    """Open a page; yield it."""
    with console_browser.page(browser) as page:
        yield page
