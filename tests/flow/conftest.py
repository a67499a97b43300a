"""The browser in which tests of a module open pages."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from tests.worlds import console_browser

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page


@pytest.fixture(scope="module")
def browser() -> Iterator["Browser"]:
    """Run a Chromium for the tests of a module."""
    with console_browser.browser() as browser:
        yield browser


@pytest.fixture
def page(browser: "Browser") -> Iterator["Page"]:
    """Open a page."""
    with console_browser.page(browser) as page:
        yield page
