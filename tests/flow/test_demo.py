"""`muster demo`, as users run it: every fault is detected, notified and resolved."""

import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from muster.cli import demo

STEPS = [
    "start",
    "advertise",
    "allocate",
    "suggest_labels",
    "apply_labels",
    "judge_healthy",
    "freeze_plugin",
    "thaw_plugin",
    "kill_plugin",
    "restart_plugin",
    "lose_kubelet_stream",
    "register_again",
    "gpu_xid_79",
    "gpu_recovered",
    "stop",
]


@pytest.mark.timeout(120)
def test_every_step_of_the_demo_succeeds(tmp_path: Path) -> None:
    command = [sys.executable, "-P", "-m", "muster.cli", "demo", "--json"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, check=False)
    report = msgspec.json.decode(done.stdout, type=demo.Report)
    assert [(step.name, step.ok) for step in report.steps] == [(name, True) for name in STEPS]
    assert (report.ok, done.returncode, done.stderr) == (True, 0, b"")
