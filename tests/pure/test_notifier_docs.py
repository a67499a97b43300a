"""The settings, names and outcomes in docs/notifier.md agree with the code."""

import re
from pathlib import Path

import pytest
import yaml

from muster import vocabulary
from muster.service import settings
from muster_notifier.config import receiver_settings, schema
from muster_notifier.receivers import message, results

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "docs" / "notifier.md").read_text("utf-8")


def test_the_settings_that_are_shown_can_be_used() -> None:
    (shown,) = re.findall(r"```yaml\n(.*?)```", TEXT, re.DOTALL)
    settings_ = settings.validate(schema.Settings, yaml.safe_load(shown), source="docs")
    assert [receiver.name for receiver in settings_.receivers] == ["ops", "pager", "team-ml"]
    text = schema.route_tree(settings_).find({"severity": "critical", "node": "gpu-1"})
    assert [route.receivers for route in text] == [("pager",)]


def test_every_name_of_the_templates_is_listed() -> None:
    listed = set(re.findall(r"\$(\w+)", TEXT)) - {"name"}
    assert listed == {*message.NAMES, *message.ALERT_NAMES}


@pytest.mark.parametrize("way", receiver_settings.WAYS)
def test_every_receiver_has_its_guarantee(way: str) -> None:
    assert re.search(rf"^\| `{way}`.*\|.*\|.*\|", TEXT, re.MULTILINE)


@pytest.mark.parametrize("outcome", results.Outcome)
def test_every_outcome_is_explained(outcome: results.Outcome) -> None:
    assert re.search(rf"^\| .*`{outcome}`.*\|.*\|.*\|", TEXT, re.MULTILINE)


@pytest.mark.parametrize("kind", ["health_silent", "dead_letters"])
def test_what_the_notifier_raises_itself_has_a_runbook(kind: str) -> None:
    assert kind in {str(alert) for alert in vocabulary.AlertKind}
    assert (ROOT / "docs" / "runbooks" / f"{kind}.md").exists()
