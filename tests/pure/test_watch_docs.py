"""docs/watch.md says what is there: findings, verdicts, runbooks, settings, folders."""

import re
from pathlib import Path
from typing import Final

import msgspec
import yaml

from muster.service import settings
from muster_health.plugin import watched_findings
from muster_plugin.config import settings as config_settings
from muster_plugin.config import watch
from tests.worlds import manifests

PAGE: Final = (manifests.ROOT / "docs/watch.md").read_text("utf-8")
ROWS: Final = re.findall(r"^\| ([a-z]) \| .* \|$", PAGE, re.MULTILINE)
ALERTS: Final = re.findall(
    r"^\| `([a-z_]+)` \| \[([A-Z_]+)\]\(runbooks/watched_plugin\.md#([a-z_]+)\) \| ",
    PAGE,
    re.MULTILINE,
)


def test_every_class_of_failure_has_a_row() -> None:
    assert [letter for letter in ROWS if letter <= "p"] == [*"abcdefghijklmnop"]


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
