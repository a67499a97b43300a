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
OF_DEVELOPERS: Final = {"demo", "up"}
"""The commands that need more than the extra `cli`."""
NOWHERE: Final = ("--url", "nats://127.0.0.1:1")
USES: Final = (
    ("auth", "init", "keys"),
    ("check", "--kubeconfig", "missing"),
    ("config", "import", "--from", "smarter", "smarter.yaml"),
    ("dlq", "list", *NOWHERE),
    ("events", "--no-follow", *NOWHERE),
    ("gpu-name", "NVIDIA H100 80GB HBM3"),
    ("label-gpus", "--kubeconfig", "missing"),
    ("notify", "import", "alertmanager.yml"),
    ("silence", "list", *NOWHERE),
    ("status", "--health", "http://127.0.0.1:1"),
    ("why", "node-a", "--health", "http://127.0.0.1:1", *NOWHERE),
)
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
    if name in OF_DEVELOPERS:
        problem = f"muster {name}: not installed: pip install '.[plugin,local]' in muster's source "
        assert (done.returncode, done.stdout) == (1, "")
        assert done.stderr.startswith(problem)
    else:
        assert (done.returncode, done.stderr) == (0, "")
        assert done.stdout.startswith(f"Usage: muster {name}")


@pytest.mark.parametrize("arguments", USES, ids=" ".join)
def test_with_the_extra_cli_alone_no_command_ends_in_a_traceback(
    arguments: tuple[str, ...], sites: Callable[[str], Path], tmp_path: Path
) -> None:
    (tmp_path / "alertmanager.yml").write_text("{route: {receiver: a}, receivers: [{name: a}]}")
    (tmp_path / "smarter.yaml").write_text("[{devicematch: ^fuse$, nummaxdevices: 1}]")
    (tmp_path / "empty.creds").touch()
    done = start("cli", sites("cli"), tmp_path, "", *arguments)
    assert "Traceback" not in done.stderr
    assert "not installed" not in done.stderr
    assert done.stdout + done.stderr != ""


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
