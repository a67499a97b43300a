"""docs/check.md and docs/labeler.md agree with the code."""

import re
from pathlib import Path

import yaml

from muster.service import settings
from muster_labeler import __main__, config
from muster_labeler.check import findings
from muster_labeler.cli import commands
from muster_labeler.service import decisions

ROOT = Path(__file__).resolve().parents[2]
CHECK = (ROOT / "docs/check.md").read_text()
LABELER = (ROOT / "docs/labeler.md").read_text()


def test_every_finding_is_in_the_table_and_no_other() -> None:
    assert re.findall(r"^\| ([A-Z]+\d*) \|", CHECK, re.MULTILINE) == list(findings.Id)


def test_every_exit_code_is_in_the_table() -> None:
    codes = re.findall(r"^\| (\d) \|", CHECK, re.MULTILINE)
    assert [int(code) for code in codes] == list(findings.Exit)


def test_every_option_in_the_page_exists() -> None:
    named = set(re.findall(r"--[a-z][-a-z]+", CHECK))
    apps = (commands.check, commands.label_gpus, commands.unlabel_gpus, commands.gpu_name)
    options = {
        name
        for app in apps
        for argument in app.assemble_argument_collection()
        for name in argument.names
    }
    # an option of gcloud
    assert named - options == {"--node-labels"}


def test_the_settings_in_the_page_can_be_used(tmp_path: Path) -> None:
    (example,) = re.findall(r"```yaml\n(.*?)```", LABELER, re.DOTALL)
    tree = yaml.safe_load(example)
    assert set(tree) <= set(config.Settings.__struct_fields__)
    file = tmp_path / "labeler.yaml"
    file.write_text(example)
    loaded = settings.load(config.Settings, prefix="MUSTER_LABELER", file=file, environment={})
    assert (loaded.mode, loaded.policy.nodes) == (config.Mode.APPLY, {"pool": "gpu"})


def test_every_mode_is_in_the_page() -> None:
    table = re.findall(r"^\| `([a-z]+)`", LABELER, re.MULTILINE)
    assert set(config.Mode) <= set(table)
    assert decisions.KEY in LABELER


def test_the_manifests_grant_every_permission_that_is_checked_at_the_start() -> None:
    documents = [*yaml.safe_load_all((ROOT / "k8s/base/labeler.yaml").read_text())]
    roles = [document for document in documents if document["kind"] in {"Role", "ClusterRole"}]
    every = config.Settings(mode=config.Mode.APPLY, condition=True)
    for right in __main__._permissions(every):
        rules = [
            rule
            for role in roles
            if role["metadata"].get("namespace", right.namespace) == right.namespace
            for rule in role["rules"]
            if right.verb in rule["verbs"]
            and right.resource in rule["resources"]
            and right.group in rule["apiGroups"]
            and rule.get("resourceNames", [right.name]) == [right.name]
        ]
        assert rules, right
