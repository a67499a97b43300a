"""docs/threat-model.md names tests and fuzz targets that exist, and every fuzz target."""

import re
from pathlib import Path
from typing import Final

from tests.fuzz.__main__ import import_targets
from tests.fuzz.target import TARGETS

ROOT: Final = Path(__file__).resolve().parents[2]
PAGE: Final = (ROOT / "docs" / "threat-model.md").read_text("utf-8")
TESTS: Final = frozenset(
    name
    for file in (ROOT / "tests").rglob("test_*.py")
    for name in re.findall(r"^(?:async )?def (test_\w+)", file.read_text("utf-8"), re.MULTILINE)
)


def test_every_test_that_the_page_names_exists() -> None:
    named = set(re.findall(r"`(test_\w+)`", PAGE))
    assert len(named) > 40
    assert named - TESTS == set()


def test_every_defence_names_what_shows_it() -> None:
    rows = [line for line in PAGE.splitlines() if line.startswith("| ") and line.count(" | ") == 2]
    tables = [row for row in rows if "shown by" not in row and "---" not in row]
    # the table of boundaries has a number in its first column
    assert [row for row in tables if "`test_" not in row and not re.match(r"\| \d? ?\|", row)] == []


def test_the_page_lists_every_fuzz_target_once() -> None:
    import_targets()
    section = PAGE.partition("## Foreign bytes")[2].partition("| boundary |")[2]
    assert sorted(re.findall(r"`(\w+)`", section)) == sorted(TARGETS)
