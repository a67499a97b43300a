"""Every alert links to a page that says what to do, and the links of the pages work."""

import asyncio
import re
import shlex
from datetime import UTC, datetime
from pathlib import Path

import pytest

from muster import codec, vocabulary
from muster.cli import __main__ as cli
from muster.vocabulary import AlertKind
from muster_health.model import alerts
from muster_health.model import config as health
from muster_notifier import monitor
from muster_notifier.config import schema as notifier

ROOT = Path(__file__).resolve().parents[2]
PAGES = ROOT / "docs" / "runbooks"
AT = datetime(2026, 1, 2, tzinfo=UTC)
OF_NOTIFIER = {AlertKind.HEALTH_SILENT, AlertKind.DEAD_LETTERS}


def link(kind: AlertKind) -> str:
    """Return the link that an alert of this kind carries, with the default settings."""
    if kind in OF_NOTIFIER:
        url = notifier.Settings().runbook_url
        events: asyncio.Queue[codec.CloudEvent] = asyncio.Queue()
        own = monitor.OwnAlerts(events.put, instance="i", runbook_url=url)
        event = own.alert(kind, "s", "s", fires=True, at=AT)
        assert isinstance(event.data, vocabulary.AlertChanged)
        return event.data.runbook
    alert = alerts.Alert(kind=kind, summary="s", evidence=(), starts_at=AT, told_at=AT)
    url = health.Settings().runbook_url
    return alerts.changed(alert, node="a", plugin="p", runbook_url=url, leader=1).runbook


@pytest.mark.parametrize("kind", AlertKind)
def test_every_alert_links_to_its_page(kind: AlertKind) -> None:
    assert (ROOT / link(kind)).read_text("utf-8").startswith(f"# {kind}\n")


def test_every_page_belongs_to_an_alert() -> None:
    assert {page.stem for page in PAGES.iterdir()} == {str(kind) for kind in AlertKind}


@pytest.mark.parametrize("kind", sorted(set(AlertKind) - OF_NOTIFIER))
def test_every_page_says_how_muster_knows_what_to_do_and_what_resolves_it(kind: AlertKind) -> None:
    parts = re.findall(r"^\*\*(.+?)\*\*", (PAGES / f"{kind}.md").read_text("utf-8"), re.MULTILINE)
    assert [part for part in parts if part in {"How muster knows.", "What to do."}] == [
        "How muster knows.",
        "What to do.",
    ]
    assert parts[-1] == "It is resolved"


@pytest.mark.parametrize("kind", AlertKind)
def test_every_link_of_a_page_points_to_a_file(kind: AlertKind) -> None:
    links = re.findall(r"\]\(([^)]+)\)", (PAGES / f"{kind}.md").read_text("utf-8"))
    assert [target for target in links if not (PAGES / target).exists()] == []


@pytest.mark.parametrize("kind", AlertKind)
def test_every_setting_that_a_page_names_exists(kind: AlertKind) -> None:
    text = (PAGES / f"{kind}.md").read_text("utf-8")
    named = re.findall(r"`(detection|bounds)\.(\w+)`", text)
    settings = health.Settings()
    assert [key for section, key in named if not hasattr(getattr(settings, section), key)] == []


@pytest.mark.parametrize("kind", AlertKind)
def test_every_muster_command_on_a_page_is_valid(kind: AlertKind) -> None:
    text = (PAGES / f"{kind}.md").read_text("utf-8")
    for command in re.findall(r"`muster ([^`]+)`", text):
        arguments = shlex.split(command.replace("<node>", "node-a"))
        # raises for an unknown command or option
        cli.app.parse_args(arguments, exit_on_error=False, print_error=False)
