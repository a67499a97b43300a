"""The settings in docs/health.md and in the runbooks exist, with these defaults."""

import re
from pathlib import Path

import msgspec
import pytest

from muster_health.model import config

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "docs" / "health.md").read_text("utf-8")
SECTIONS = {
    "detection": config.Detection,
    "bounds": config.Bounds,
    "remediation": config.Remediation,
    "leading": config.Leading,
}


def documented(section: str) -> dict[str, str]:
    """Return the settings of a section's table with their defaults."""
    table = TEXT.partition(f"| `{section}.` |")[2].partition("\n\n")[0]
    defaults_by_name: dict[str, str] = {}
    for names, defaults in re.findall(r"^\| (`.*?) \| (.*?) \|", table, re.MULTILINE):
        defaults_by_name |= zip(re.findall(r"`(\w+)`", names), defaults.split(", "), strict=True)
    return defaults_by_name


@pytest.mark.parametrize("section", SECTIONS)
def test_every_setting_is_listed_with_its_default(section: str) -> None:
    defaults = msgspec.structs.asdict(SECTIONS[section]())
    assert documented(section) == {
        name: f"{value:g}" if type(value) in {int, float} else f"`{str(value).lower()}`"
        for name, value in defaults.items()
    }


def test_every_setting_that_a_runbook_names_exists() -> None:
    pages = "".join(path.read_text("utf-8") for path in (ROOT / "docs" / "runbooks").glob("*.md"))
    named = set(re.findall(rf"`({'|'.join(SECTIONS)})\.(\w+)`", pages))
    assert named
    assert {name for section, name in named if name not in documented(section)} == set()
