"""Every alert links to a page that says what to do, and the links of the pages work."""

import asyncio
import re
import shlex
from datetime import UTC, datetime
from pathlib import Path

import pytest

import muster
from muster import codec, vocabulary
from muster.cli import __main__ as cli
from muster.cli import reach
from muster.vocabulary import AlertKind
from muster_health.model import alerts
from muster_health.model import config as health
from muster_health.plugin import watched_findings
from muster_notifier import monitor
from muster_notifier.config import schema as notifier
from tests.worlds import runbook_commands

ROOT = Path(__file__).resolve().parents[2]
PAGES = ROOT / "docs" / "runbooks"
AT = datetime(2026, 1, 2, tzinfo=UTC)
OF_NOTIFIER = {AlertKind.HEALTH_SILENT, AlertKind.DEAD_LETTERS}


OF_WATCHED = (
    AlertKind.PLUGIN_DOWN,
    AlertKind.STUCK,
    AlertKind.DEREGISTERED,
    AlertKind.MISMATCH,
    AlertKind.SPLIT_BRAIN,
    AlertKind.MISSING,
    AlertKind.DEGRADED,
    AlertKind.MAINTENANCE_OVERDUE,
)
"""The kinds of alerts about plugins that muster does not run."""
WATCHED = "watched_plugin"
RULES = re.findall(
    rf"^ +runbook_url: {re.escape(muster.RUNBOOKS_URL)}(\w+)\.html$",
    (ROOT / "k8s/components/monitoring/rules.yaml").read_text("utf-8"),
    re.MULTILINE,
)
"""The pages to which rules of Prometheus link."""
NAMES = sorted({*AlertKind, WATCHED, *RULES})


def link(kind: AlertKind, watched: str = "") -> str:
    """Return the link that an alert of this kind carries, with the default settings."""
    if kind in OF_NOTIFIER:
        url = notifier.Settings().runbook_url
        events: asyncio.Queue[codec.CloudEvent] = asyncio.Queue()
        own = monitor.OwnAlerts(events.put, instance="i", runbook_url=url)
        event = own.alert(kind, "s", "s", fires=True, at=AT)
        assert isinstance(event.data, vocabulary.AlertChanged)
        return event.data.runbook
    alert = alerts.Alert(kind=kind, summary="s", evidence=(), starts_at=AT, changed_at=AT)
    url = health.Settings().runbook_url
    return alerts.changed(
        alert, node="a", plugin="p", runbook_url=url, leader=1, watched=watched
    ).runbook


@pytest.mark.parametrize("kind", AlertKind)
def test_every_alert_links_to_its_page(kind: AlertKind) -> None:
    page = link(kind).removeprefix(muster.RUNBOOKS_URL)
    assert (PAGES / page).suffix == ".html"  # as `make docs` creates it
    assert (PAGES / page).with_suffix(".md").read_text("utf-8").startswith(f"# {kind}\n")


@pytest.mark.parametrize("kind", OF_WATCHED)
def test_every_alert_about_a_watched_plugin_links_to_its_section(kind: AlertKind) -> None:
    page, _, section = link(kind, "nvidia.com/gpu").partition("#")
    text = (PAGES / page.removeprefix(muster.RUNBOOKS_URL)).with_suffix(".md").read_text("utf-8")
    assert f"\n## {section}\n" in text


def test_the_page_of_watched_plugins_has_a_section_for_each_verdict_that_they_can_have() -> None:
    verdicts = {verdict for verdict, _ in watched_findings.VERDICTS.values()}
    kinds = {alerts.kind_of(verdict) for verdict in verdicts}
    assert {*kinds, AlertKind.MAINTENANCE_OVERDUE} == set(OF_WATCHED)


def test_every_page_belongs_to_an_alert_or_a_rule() -> None:
    assert runbook_commands.names() == NAMES


def test_the_list_of_pages_has_each_of_them() -> None:
    links = re.findall(r"\[(\w+)\]\((\w+)\.md\)", runbook_commands.text("README"))
    assert sorted(links) == [(name, name) for name in NAMES]


BEGINNING = re.compile(
    r"# (\w+)\n\n"
    r"\*\*Impact\.\*\* (?:.+\n){1,3}\n"
    r"\*\*Urgency\.\*\* (?:.+\n){1,2}\n"
    r"```sh\n(?:.+\n){2,}```\n"
)


@pytest.mark.parametrize("kind", NAMES)
def test_every_page_begins_with_impact_urgency_and_commands(kind: str) -> None:
    match = BEGINNING.match(runbook_commands.text(kind))
    assert match
    assert match[1] == kind


@pytest.mark.parametrize("kind", NAMES)
def test_every_page_says_how_muster_knows_what_to_do_and_what_resolves_it(kind: str) -> None:
    parts = re.findall(r"^\*\*(.+?)\*\*", runbook_commands.text(kind), re.MULTILINE)
    assert [part for part in parts if part in {"How muster detects it.", "What to do."}] == [
        "How muster detects it.",
        "What to do.",
    ]
    assert parts[-1] == "It is resolved"


def test_a_variable_has_one_meaning_on_all_pages() -> None:
    lines = {line.text for line in runbook_commands.lines() if line.variable}
    names = [runbook_commands.Line("", text).variable for text in lines]
    assert len(names) == len(set(names))


@pytest.mark.parametrize("kind", NAMES)
def test_every_link_of_a_page_points_to_a_file(kind: str) -> None:
    links = re.findall(r"\]\(([^)]+)\)", (PAGES / f"{kind}.md").read_text("utf-8"))
    assert [target for target in links if not (PAGES / target).exists()] == []


@pytest.mark.parametrize("kind", NAMES)
def test_every_setting_that_a_page_names_exists(kind: str) -> None:
    text = (PAGES / f"{kind}.md").read_text("utf-8")
    named = re.findall(r"`(detection|bounds)\.(\w+)`", text)
    settings = health.Settings()
    assert [key for section, key in named if not hasattr(getattr(settings, section), key)] == []


def test_every_muster_command_of_the_pages_is_valid() -> None:
    every = [*runbook_commands.lines(), *runbook_commands.inline()]
    commands = {line.text for line in every if line.text.startswith("muster ")}
    assert len(commands) > 10
    for command in commands:
        words = shlex.split(re.sub(r"[|>].*", "", command))[1:]
        # raises for an unknown command or option
        context = words[:2] if words[0] == "--context" else []
        rest = [*words[len(context) :], *context]
        if rest[0] not in reach.NEEDS:
            rest = [word for word in rest if word not in context]
        else:
            cli.app.meta.parse_args(words, exit_on_error=False, print_error=False)
            rest = rest[: len(rest) - len(context)]
        cli.app.parse_args(rest, exit_on_error=False, print_error=False)
