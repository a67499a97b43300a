"""Each extra, alone in an empty environment, is enough to start its program."""

import importlib.metadata
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Final

import pytest

from tests.worlds import wheels

PROGRAMS: Final = {
    "plugin": "plugin",
    "labeler": "labeler",
    "health": "health",
    "notifier": "notifier",
    "auth": "gate",
    "cli": "muster",
}
"""The function of `muster.commands` that an extra is for."""
START: Final = "import sys; sys.path.append(sys.argv.pop(1)); from muster import commands; "


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return wheels.build(tmp_path_factory.mktemp("dist"))


def installed(wheel: Path, extra: str, site: Path) -> Path:
    """Return a directory that holds what `pip install muster-k8s[extra]` would bring, as links."""
    for name in wheels.closure(wheel, extra) - {"muster-k8s"}:
        distribution = importlib.metadata.distribution(name)
        for top in {file.parts[0] for file in distribution.files or ()} - {"..", "__pycache__"}:
            link, target = site / top, Path(str(distribution.locate_file(top)))
            if target.is_dir() and link.exists():  # a namespace that several distributions share
                share(link, target)
            elif not link.exists():
                link.symlink_to(target)
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    return site


def share(link: Path, target: Path) -> None:
    """Nothing to do where both stand in one directory already."""
    assert link.resolve() == target.resolve()


@pytest.mark.parametrize("option", ["--version", "--check"])
@pytest.mark.parametrize("extra", PROGRAMS)
def test_an_extra_alone_starts_its_program(
    extra: str, option: str, wheel: Path, tmp_path: Path
) -> None:
    if (extra, option) == ("cli", "--check"):
        option = "--help"
    site = installed(wheel, extra, tmp_path)
    with tempfile.TemporaryDirectory(prefix="mu-") as kubelet:  # a socket's path must be short
        (Path(kubelet) / "device-plugins").mkdir()
        done = start(extra, option, site, tmp_path, kubelet)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout != ""


def start(
    extra: str, option: str, site: Path, home: Path, kubelet: str
) -> subprocess.CompletedProcess[str]:
    environment = {"PATH": os.environ["PATH"], "HOME": str(home), "NODE_NAME": "node-a"}
    environment |= {  # what has no default
        "MUSTER_PLUGIN__GPUS__RESOURCES": '[{"name": "nvidia.com/gpu", "product": "*"}]',
        "MUSTER_PLUGIN__KUBELET__DIRECTORY": kubelet,
    }
    program = f"{START}sys.exit(commands.{PROGRAMS[extra]}())"
    return subprocess.run(
        [sys.executable, "-I", "-S", "-c", program, str(site), option],
        capture_output=True,
        text=True,
        check=False,
        env=environment,
        cwd=home,
    )
