"""The documentation builds as a site in strict mode, and loads nothing from other hosts."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.worlds import manifests

PICTURES = sorted((manifests.ROOT / "docs/pictures").glob("*.svg"))
LOADED = re.compile(r"<(?:script|img|iframe|link)\b[^>]*\b(?:src|href)=\"?(?:https?:)?//[^>]*>")
"""A tag that loads something from another host."""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the site and return its folder; a broken link or anchor is an error."""
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--quiet", "--strict", "--site-dir", folder],
        cwd=manifests.ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def test_no_page_loads_anything_from_elsewhere(site: Path) -> None:
    pages = [*site.rglob("*.html")]
    assert len(pages) > 50
    loaded = {
        str(page.relative_to(site)): tags
        for page in pages
        if (tags := LOADED.findall(page.read_text("utf-8")))
    }
    assert loaded == {}


def test_every_runbook_is_a_page_that_the_search_knows(site: Path) -> None:
    entries = json.loads((site / "search/search_index.json").read_text("utf-8"))["docs"]
    known = {entry["location"].partition("#")[0] for entry in entries}
    names = {page.stem for page in (manifests.ROOT / "docs/runbooks").glob("*.md")} - {"README"}
    assert {f"runbooks/{name}.html" for name in names} <= known


@pytest.mark.parametrize("picture", PICTURES, ids=lambda path: path.stem)
def test_every_drawing_has_colours_for_light_and_dark_and_loads_nothing(picture: Path) -> None:
    text = picture.read_text("utf-8")
    assert "prefers-color-scheme: dark" in text
    assert re.findall(r"(?:href|url)[=(]\"?(?!#)[^\"#]", text) == []
    assert picture.stat().st_size < 200_000
