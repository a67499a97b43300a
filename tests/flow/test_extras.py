"""Each extra, installed alone, is enough to start its program."""

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
from tests.worlds import muster_command, wheels

PROGRAMS: Final = {
    "plugin": "plugin",
    "fuse": "fuse",
    "labeler": "labeler",
    "health": "health",
    "notifier": "notifier",
    "auth": "gate",
    "console": "console",
    "cli": "muster",
}
"""The function in `muster.commands` that each extra is for."""
OF_DEVELOPERS: Final = {"break", "console", "demo", "mend", "up"}
"""The commands that need more than the extra `cli`."""
NOWHERE: Final = ("--url", "nats://127.0.0.1:1")
USES: Final = (
    ("auth", "init", "keys"),
    ("check", "--kubeconfig", "missing"),
    ("config", "import", "--from", "smarter", "smarter.yaml"),
    ("dlq", "list", *NOWHERE),
    ("doctor",),
    ("events", "--no-follow", *NOWHERE),
    ("gpu-name", "NVIDIA H100 80GB HBM3"),
    ("label-gpus", "--kubeconfig", "missing"),
    ("notify", "import", "alertmanager.yml"),
    ("silence", "list", *NOWHERE),
    ("replay", "missing", "--policy", "missing"),
    ("status", "--health", "http://127.0.0.1:1"),
    ("top", "--health", "http://127.0.0.1:1"),
    ("uninstall", "--kubeconfig", "missing"),
    ("unlabel-gpus", "--kubeconfig", "missing"),
    ("why", "node-a", "--health", "http://127.0.0.1:1", *NOWHERE),
)
START: Final = "import sys; sys.path.append(sys.argv.pop(1)); from muster import commands; "
MUSTER: Final = "sys.exit(commands.muster())"
IN_TURN: Final = """
program, options = getattr(commands, sys.argv[1]), sys.argv[2:]
for option in options:
    sys.argv[1:] = [option]
    try:
        code = program()
    except SystemExit as end:
        code = end.code
    print("exit code of", option, code, flush=True)
"""
"""Runs a program with each of the options, without importing it again."""


@pytest.fixture(scope="module")
def sites(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    wheel = wheels.build(tmp_path_factory.mktemp("dist"))
    own = tmp_path_factory.mktemp("own")  # so that each module is compiled once
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(own)
    return functools.cache(
        lambda extra: installed(wheel, own, extra, tmp_path_factory.mktemp(extra))
    )


def installed(wheel: Path, own: Path, extra: str, site: Path) -> Path:
    """Return a directory with links to what `pip install muster-k8s[extra]` would install."""
    for name in wheels.closure(wheel, extra) - {"muster-k8s"}:
        distribution = importlib.metadata.distribution(name)
        for top in {file.parts[0] for file in distribution.files or ()} - {"..", "__pycache__"}:
            link, target = site / top, Path(str(distribution.locate_file(top)))
            if target.is_dir() and link.exists():  # a namespace that several distributions share
                share(link, target)
            elif not link.exists():
                link.symlink_to(target)
    for target in own.iterdir():
        (site / target.name).symlink_to(target)
    return site


def share(link: Path, target: Path) -> None:
    """Check that the existing link to a namespace package also covers this distribution."""
    assert link.resolve() == target.resolve()


@pytest.mark.parametrize("extra", PROGRAMS)
def test_an_extra_alone_starts_its_program(
    extra: str, sites: Callable[[str], Path], tmp_path: Path
) -> None:
    options = ("--version", "--help" if extra == "cli" else "--check")
    with tempfile.TemporaryDirectory(prefix="mu-") as kubelet:  # a socket's path must be short
        (Path(kubelet) / "device-plugins").mkdir()
        arguments = (PROGRAMS[extra], *options)
        done = start(IN_TURN, sites(extra), tmp_path, kubelet, *arguments)
    assert (done.returncode, done.stderr) == (0, "")
    printed = done.stdout
    for option in options:
        text, end, printed = printed.partition(f"exit code of {option} 0\n")
        assert text != ""
        assert end != ""


def test_every_command_is_used() -> None:
    assert {name for name, *_ in USES} | OF_DEVELOPERS == registry.COMMANDS.keys()


@pytest.mark.parametrize("name", sorted(registry.COMMANDS.keys() - OF_DEVELOPERS))
def test_a_command_shows_its_help(name: str) -> None:
    code, out, errors = muster_command.muster(name, "--help")
    assert (code, errors) == (0, "")
    assert out.startswith(f"Usage: muster {name}")


@pytest.mark.parametrize("name", sorted(OF_DEVELOPERS))
def test_with_the_extra_cli_alone_a_command_that_needs_more_names_its_extra(
    name: str, sites: Callable[[str], Path], tmp_path: Path
) -> None:
    done = start(MUSTER, sites("cli"), tmp_path, "", name, "--help")
    extras = "console" if name == "console" else "plugin,local"
    problem = (
        f"muster {name}: required packages are not installed: run pip install '.[{extras}]' in "
    )
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith(problem)


@pytest.mark.parametrize("arguments", USES, ids=" ".join)
def test_with_the_extra_cli_alone_no_command_ends_in_a_traceback(
    arguments: tuple[str, ...], sites: Callable[[str], Path], tmp_path: Path
) -> None:
    (tmp_path / "alertmanager.yml").write_text("{route: {receiver: a}, receivers: [{name: a}]}")
    (tmp_path / "smarter.yaml").write_text("[{devicematch: ^fuse$, nummaxdevices: 1}]")
    (tmp_path / "empty.creds").touch()
    done = start(MUSTER, sites("cli"), tmp_path, "", *arguments)
    assert "Traceback" not in done.stderr
    assert "not installed" not in done.stderr
    assert done.stdout + done.stderr != ""


def start(
    program: str, site: Path, home: Path, kubelet: str, *options: str
) -> subprocess.CompletedProcess[str]:
    environment = {"PATH": os.environ["PATH"], "HOME": str(home), "NODE_NAME": "node-a"}
    environment |= {  # settings without a default
        "MUSTER_PLUGIN__GPUS__RESOURCES": '[{"name": "nvidia.com/gpu", "product": "*"}]',
        "MUSTER_PLUGIN__KUBELET__DIRECTORY": kubelet,
    }
    return subprocess.run(
        [sys.executable, "-I", "-S", "-c", START + program, str(site), *options],
        capture_output=True,
        text=True,
        check=False,
        env=environment,
        cwd=home,
    )
