"""The workflows pin their actions and have few permissions; linters check the rest."""

import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.worlds import manifests

FILES = sorted((manifests.ROOT / ".github/workflows").glob("*.yml"))
WORKFLOWS: dict[str, dict[str, Any]] = {
    path.name: yaml.safe_load(path.read_text("utf-8")) for path in FILES
}
PINNED = re.compile(r"uses: [\w-]+/[\w/-]+@[0-9a-f]{40}  # v\d+\.\d+\.\d+")


def tool(name: str) -> str:
    """Return the path of a linter of the environment or of the machine."""
    path = shutil.which(name, path=str(Path(sys.executable).parent)) or shutil.which(name)
    if path is None:
        pytest.skip(f"{name} is not installed")
    return path


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_every_action_is_pinned_by_its_commit(path: Path) -> None:
    uses = [line for line in path.read_text("utf-8").splitlines() if "uses:" in line]
    assert uses
    assert [line.strip() for line in uses if not PINNED.search(line)] == []


@pytest.mark.parametrize("name", WORKFLOWS)
def test_no_job_has_more_permissions_or_time_than_it_names(name: str) -> None:
    workflow = WORKFLOWS[name]
    assert workflow["permissions"] == {}
    assert "concurrency" in workflow
    for job in workflow["jobs"].values():
        assert job["permissions"]
        assert job["timeout-minutes"] <= 90


def test_the_oldest_python_that_is_tested_is_the_oldest_that_is_supported() -> None:
    versions = WORKFLOWS["check.yml"]["jobs"]["test"]["strategy"]["matrix"]["python"]
    project = tomllib.loads((manifests.ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    assert (f">={versions[0]}", versions[-1]) == (project["requires-python"], "3.x")


def test_actionlint_accepts_the_workflows() -> None:
    done = subprocess.run(
        [tool("actionlint"), "-no-color", *FILES], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (0, "")


def test_zizmor_reports_nothing_about_their_security() -> None:
    arguments = ["--offline", "--no-progress", "--quiet", *map(str, FILES)]
    done = subprocess.run([tool("zizmor"), *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
