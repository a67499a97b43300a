"""docs/watch.md agrees with the code: findings, verdicts, runbooks, settings, folders."""

import re
from pathlib import Path
from typing import Final

import msgspec
import pytest
import yaml

from muster.service import settings
from muster_health.plugin import watched_findings
from muster_plugin.config import settings as config_settings
from muster_plugin.config import watch
from tests.worlds import manifests

PAGE: Final = (manifests.ROOT / "docs/watch.md").read_text("utf-8")
ROWS: Final = re.findall(r"^\| ([a-z]) \| .* \|$", PAGE, re.MULTILINE)
STORIES: Final = {
    "a": "wire/test_plugin_watch.py::test_a_killed_plugin_is_published_and_its_return_too",
    "b": "wire/test_plugin_watch_bad_input.py::"
    "test_a_method_that_hangs_is_silence_though_its_server_has_a_deadline_too",
    "c": "pure/test_plugin_watch_model.py::test_a_stopped_plugin_is_found_within_twenty_seconds",
    "d": "pure/test_plugin_watch_model.py::"
    "test_a_plugin_that_a_restarted_kubelet_does_not_get_back_is_found",
    "e": "wire/test_plugin_watch.py::"
    "test_what_is_wrong_with_a_plugin_is_published_and_so_is_its_recovery",
    "f": "pure/test_plugin_watch_model.py::test_a_removed_socket_is_found_within_three_seconds",
    "g": "pure/test_plugin_watch_model.py::test_fewer_devices_are_found_once_that_has_lasted",
    "h": "pure/test_plugin_watch_model.py::"
    "test_devices_that_their_plugin_never_checks_look_healthy",
    "i": "pure/test_health_watched.py::"
    "test_while_the_agent_is_silent_the_verdict_stays_and_is_shown_as_not_observed",
    "j": "pure/test_health_watched.py::test_a_node_that_is_down_has_one_alert",
    "k": "pure/test_health_watched_stops.py::"
    "test_a_planned_stop_is_maintenance_and_raises_no_alert",
    "l": "flow/test_health_classes.py::"
    "test_when_health_itself_dies_the_notifier_reports_it_and_its_return",
    "m": "pure/test_health_fleet.py::test_a_skewed_clock_is_an_alert_and_no_verdict",
    "n": "pure/test_plugin_watch_model.py::test_a_stopped_plugin_is_found_within_twenty_seconds",
    "o": "pure/test_plugin_watch_model.py::test_two_processes_of_one_resource_are_found",
    "p": "pure/test_plugin_watch_model.py::"
    "test_hardware_that_nothing_offers_is_found_after_a_while",
}
ALERTS: Final = re.findall(
    r"^\| `([a-z_]+)` \| \[([A-Z_]+)\]\(runbooks/watched_plugin\.md#([a-z_]+)\) \| ",
    PAGE,
    re.MULTILINE,
)


def test_every_class_of_failure_has_a_row() -> None:
    assert [letter for letter in ROWS if letter <= "p"] == [*"abcdefghijklmnop"]


@pytest.mark.parametrize(("letter", "story"), STORIES.items())
def test_every_row_of_the_table_has_a_story(letter: str, story: str) -> None:
    file, _, name = story.partition("::")
    text = (manifests.ROOT / "tests" / file).read_text("utf-8")
    assert letter in ROWS
    assert re.search(rf"^def {name}\(", text, re.MULTILINE)


def test_every_finding_has_its_verdict_with_the_part_of_the_runbook() -> None:
    verdicts = {
        finding.value: verdict for finding, (verdict, _) in watched_findings.VERDICTS.items()
    }
    assert {finding: name for finding, name, _ in ALERTS} == {
        finding: verdict.name for finding, verdict in verdicts.items()
    }
    assert {part for _, _, part in ALERTS} == {each.name.lower() for each in verdicts.values()}


def test_every_finding_is_in_the_table_of_what_is_seen() -> None:
    seen, _, _ = PAGE.partition("## What it cannot see")
    assert [finding for finding, _, _ in ALERTS if f"`{finding}`" not in seen] == []


def test_the_settings_of_the_page_are_all_there_are_and_are_taken() -> None:
    _, _, section = PAGE.partition("| `watch.` | default | meaning |")
    listed = re.findall(r"^\| `(\w+)` \|", section.partition("\n\n")[0], re.MULTILINE)
    assert listed == [field.name for field in msgspec.structs.fields(watch.Watch)]
    (example,) = re.findall(r"```yaml\n(apiVersion: muster.*?)```", PAGE, re.DOTALL)
    (tree,) = settings.parse(example.encode(), source="the page")
    chosen = settings.validate(config_settings.Settings, tree, source="the page")
    assert (chosen.watch.enabled, chosen.serves) == (True, False)


def test_a_folder_made_as_the_page_says_renders_with_both_components(tmp_path: Path) -> None:
    (written,) = re.findall(r"cat > my-muster/kustomization.yaml <<EOF\n(.*?)EOF", PAGE, re.DOTALL)
    components = re.findall(r"^components: \[(\S+)\]$", PAGE, re.MULTILINE)
    assert len(components) == 2
    (tmp_path / "muster").symlink_to(manifests.ROOT)
    folder = tmp_path / "my-muster"
    folder.mkdir()
    (folder / "kustomization.yaml").write_text(f"{written}components: [{', '.join(components)}]\n")
    installed = [each for each in yaml.safe_load_all(manifests.render(folder)) if each]
    (plugin,) = [o["spec"]["template"]["spec"] for o in installed if o["kind"] == "DaemonSet"]
    assert plugin["hostPID"] is True
    assert "/var/lib/kubelet/plugins" in {
        volume["hostPath"]["path"] for volume in plugin["volumes"] if "hostPath" in volume
    }


def test_every_link_of_the_page_leads_somewhere() -> None:
    for page, anchor in re.findall(r"\]\(([a-z_/.-]*)(?:#([a-z_-]+))?\)", PAGE):
        text = (manifests.ROOT / "docs" / page).read_text("utf-8") if page else PAGE
        headings = {
            re.sub(r"[^a-z0-9 _-]", "", heading.lower()).replace(" ", "-")
            for heading in re.findall(r"^#+ (.*)$", text, re.MULTILINE)
        }
        assert not anchor or anchor in headings, (page, anchor)
