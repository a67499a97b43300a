"""Each extra, alone in an empty environment, is enough to start its program."""

import functools
import importlib.metadata
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Final

import pytest

from muster.cli import registry
from tests.worlds import wheels

PROGRAMS: Final = {
    "plugin": "plugin",
    "fuse": "fuse",
    "labeler": "labeler",
    "health": "health",
    "notifier": "notifier",
    "auth": "gate",
    "cli": "muster",
}
"""The function of `muster.commands` that an extra is for."""
START: Final = "import sys; sys.path.append(sys.argv.pop(1)); from muster import commands; "


@pytest.fixture(scope="module")
def sites(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    wheel = wheels.build(tmp_path_factory.mktemp("dist"))
    return functools.cache(lambda extra: installed(wheel, extra, tmp_path_factory.mktemp(extra)))


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
    extra: str, option: str, sites: Callable[[str], Path], tmp_path: Path
) -> None:
    if (extra, option) == ("cli", "--check"):
        option = "--help"
    with tempfile.TemporaryDirectory(prefix="mu-") as kubelet:  # a socket's path must be short
        (Path(kubelet) / "device-plugins").mkdir()
        done = start(extra, sites(extra), tmp_path, kubelet, option)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout != ""


@pytest.mark.parametrize("name", registry.COMMANDS)
def test_with_the_extra_cli_alone_a_command_shows_its_help_or_names_its_extra(
    name: str, sites: Callable[[str], Path], tmp_path: Path
) -> None:
    done = start("cli", sites("cli"), tmp_path, "", name, "--help")
    extras = registry.COMMANDS[name].extras
    if extras:
        names = ",".join(extras)
        problem = (
            f"muster {name}: not installed: pip install 'muster-k8s[{names}]' "
            f"(or '.[{names}]' in the source tree)\n"
        )
        assert (done.returncode, done.stdout, done.stderr) == (1, "", problem)
    else:
        assert (done.returncode, done.stderr) == (0, "")
        assert done.stdout.startswith(f"Usage: muster {name}")


def start(
    extra: str, site: Path, home: Path, kubelet: str, *options: str
) -> subprocess.CompletedProcess[str]:
    environment = {"PATH": os.environ["PATH"], "HOME": str(home), "NODE_NAME": "node-a"}
    environment |= {  # what has no default
        "MUSTER_PLUGIN__GPUS__RESOURCES": '[{"name": "nvidia.com/gpu", "product": "*"}]',
        "MUSTER_PLUGIN__KUBELET__DIRECTORY": kubelet,
    }
    program = f"{START}sys.exit(commands.{PROGRAMS[extra]}())"
    return subprocess.run(
        [sys.executable, "-I", "-S", "-c", program, str(site), *options],
        capture_output=True,
        text=True,
        check=False,
        env=environment,
        cwd=home,
    )
