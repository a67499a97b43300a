"""Every import contract fails when it is broken on purpose, in a copy of the tree."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SERVICES = ("plugin", "labeler", "health", "notifier", "gate", "console", "fuse")

PLANTED = [
    (
        "Services never import each other",
        "services/health/muster_health/model/config.py",
        "muster_plugin",
    ),
    (
        "The SDK, the command line and the stand-ins know no service",
        "muster/local/stack.py",
        "muster_plugin.config.settings",
    ),
    (
        "The Kubernetes client never loads in the plugin",
        "services/plugin/muster_plugin/kubelet/resource_plugin.py",
        "kubernetes",
    ),
    (
        "The stand-ins share no code of the bus",
        "muster/local/stack.py",
        "muster.vocabulary",
    ),
    (
        "Only kubelet adapters import the generated stubs",
        "services/plugin/muster_plugin/inventory/inventory.py",
        "muster.pb.deviceplugin_pb2",
    ),
    (
        "Only the wiring of a service opens shared adapters",
        "services/plugin/muster_plugin/inventory/inventory.py",
        "muster.nats.bus",
    ),
    (
        "Nothing shipped imports tests, benchmarks or scripts",
        "muster/vocabulary/facts.py",
        "scripts",
    ),
    # layers of muster_plugin
    (
        "Packages of the plugin import downwards only",
        "services/plugin/muster_plugin/inventory/inventory.py",
        "muster_plugin.kubelet.allocation",
    ),
    # layers of muster_health
    (
        "Health's packages form layers",
        "services/health/muster_health/alerting/plugin_alert.py",
        "muster_health.plugin.verdict_machine",
    ),
    # layers of muster_labeler
    (
        "Packages of the labeler import downwards only",
        "services/labeler/muster_labeler/naming/accelerators.py",
        "muster_labeler.service.decisions",
    ),
    # layers of muster_notifier
    (
        "Packages of the notifier import downwards only",
        "services/notifier/muster_notifier/receivers/results.py",
        "muster_notifier.delivery.queue",
    ),
    (
        "Modules of muster_notifier.routing import downwards only",
        "services/notifier/muster_notifier/routing/groups.py",
        "muster_notifier.routing.decision",
    ),
    # layers of muster_console
    (
        "Modules of the console import downwards only",
        "services/console/muster_console/event_log.py",
        "muster_console.pages",
    ),
    # layers of muster_gate
    (
        "Modules of the gate import downwards only",
        "services/gate/muster_gate/tokens.py",
        "muster_gate.callout",
    ),
    # layers of muster_fuse
    (
        "Packages of the FUSE broker import downwards only",
        "services/fuse/muster_fuse/kernel/jobs.py",
        "muster_fuse.request.caller",
    ),
    # layers of muster
    (
        "Packages of muster import downwards only",
        "muster/service/runtime.py",
        "muster.nats.compat",
    ),
    (
        "Modules of muster.nats import downwards only",
        "muster/nats/connection.py",
        "muster.nats.jetstream",
    ),
    (
        "Modules of muster.cli import downwards only",
        "muster/cli/keyfiles.py",
        "muster.cli.auth",
    ),
    ("The stand-ins import downwards only", "muster/local/httpd.py", "muster.local.stack"),
    (
        "Modules of muster.local.kubelet import downwards only",
        "muster/local/kubelet/plugins.py",
        "muster.local.kubelet.server",
    ),
    (
        "Modules of muster.local.kubernetes import downwards only",
        "muster/local/kubernetes/requests.py",
        "muster.local.kubernetes.server",
    ),
    ("A module is pure unless it is an adapter", "muster/vocabulary/facts.py", "time"),
]


def lint(tree: Path) -> str:
    """Return the output of lint-imports for a tree."""
    roots = [tree, *(tree / "services" / service for service in SERVICES)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, roots))}
    command = [str(Path(sys.executable).with_name("lint-imports")), "--no-cache"]
    done = subprocess.run(
        command, cwd=tree, env=environment, capture_output=True, text=True, check=False
    )
    return done.stdout + done.stderr


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """Return a copy of the packages that the contracts check."""
    for folder in ("muster", "services", "scripts"):
        shutil.copytree(ROOT / folder, tmp_path / folder)
    for empty in ("tests", "bench"):
        (tmp_path / empty).mkdir()
        (tmp_path / empty / "__init__.py").touch()
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    return tmp_path


def test_all_contracts_are_kept(tree: Path) -> None:
    said = lint(tree)
    assert "0 broken" in said, said
    assert f"{len(PLANTED)} kept" in said, said


def test_each_contract_names_the_import_that_breaks_it(tree: Path) -> None:
    for _, file, planted in PLANTED:
        target = tree / file
        target.write_text(f"{target.read_text()}\nimport {planted}\n")
    said = lint(tree)
    for contract, file, planted in PLANTED:
        assert f"{contract} BROKEN" in said
        _, _, after = said.partition(f"{contract}\n{'-' * len(contract)}\n")
        broken = re.split(r"\n\S.*\n-{10,}\n", after, maxsplit=1)[0]
        module = ".".join(Path(file).with_suffix("").parts).removeprefix("services.")
        module = module.removeprefix(f"{module.split('.')[0]}.") if "muster_" in module else module
        assert re.search(rf"{module}( -> |: pure, and imports ){planted}\b", broken), said
