"""The wheel's files, the dependencies of its extras, and the modules that the plugin loads."""

import importlib.metadata
import re
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Final

import pytest

from muster import commands
from tests.worlds import wheels

ROOT: Final = Path(__file__).parents[2]
PACKAGES: Final = {
    "muster",
    "muster_console",
    "muster_fuse",
    "muster_gate",
    "muster_health",
    "muster_labeler",
    "muster_notifier",
    "muster_plugin",
}
HEAVY: Final = {"aiohttp", "kubernetes", "pydantic"}
LOADED: Final = """
import importlib, importlib.abc, pkgutil, sys

class Absent(importlib.abc.MetaPathFinder):
    '''What an environment with the plugin's extra alone has not.'''

    def find_spec(self, name, path, target=None):
        if name.partition(".")[0] in {absent!r}:
            raise ModuleNotFoundError(name, name=name)

sys.meta_path.insert(0, Absent())
import muster_plugin
for found in pkgutil.walk_packages(muster_plugin.__path__, "muster_plugin."):
    importlib.import_module(found.name)
for name in ("nats.bus", "client", "service.entry", "service.probes", "service.runtime"):
    importlib.import_module("muster." + name)
print(*sorted({m.partition(".")[0] for m in sys.modules}))
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return wheels.build(tmp_path_factory.mktemp("dist"))


def test_the_wheel_holds_eight_packages_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    (info,) = {n.split("/")[0] for n in names if ".dist-info/" in n}
    assert re.fullmatch(r"muster_k8s-[0-9.]+\.dist-info", info)
    assert {n.split("/")[0] for n in names} == {*PACKAGES, info}
    assert {f"{package}/py.typed" for package in PACKAGES} <= names
    in_tree = {
        str(file.relative_to(folder.parent))
        for folder in (ROOT / "muster", *ROOT.glob("services/*/muster_*"))
        for file in folder.rglob("*")
        if file.is_file() and "__pycache__" not in file.parts
    }
    assert {n for n in names if not n.startswith(info)} == in_tree
    assert {f"muster/pb/{n}_pb2.pyi" for n in ("deviceplugin", "podresources")} <= names


def test_every_command_of_the_wheel_names_a_function_of_ours(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        (file,) = (n for n in names if n.endswith("/entry_points.txt"))
        text = archive.read(file).decode()
    assert "muster/commands.py" in names
    assert dict(re.findall(r"^(\S+) = muster\.commands:(\w+)$", text, re.MULTILINE)) == {
        "muster": "muster",
        "muster-console": "console",
        "muster-fuse": "fuse",
        "muster-fuse-webhook": "fuse_webhook",
        "muster-gate": "gate",
        "muster-health": "health",
        "muster-labeler": "labeler",
        "muster-notifier": "notifier",
        "muster-plugin": "plugin",
    }


def test_the_image_has_the_entry_points_of_the_wheel(wheel: Path, tmp_path: Path) -> None:
    script = (str(ROOT / "scripts/entry_points.py"), str(ROOT / "pyproject.toml"), str(tmp_path))
    subprocess.run([sys.executable, *script], check=True)
    (of_image,) = importlib.metadata.distributions(path=[str(tmp_path)])
    (of_wheel,) = importlib.metadata.distributions(path=[str(wheel)])
    assert set(of_image.entry_points) == set(of_wheel.entry_points)
    groups = {point.group for point in of_wheel.entry_points}
    assert groups == {"console_scripts", "muster.commands"}


def test_a_command_without_its_extra_says_in_one_line_what_to_install() -> None:
    hide = """
import sys
class Hide:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {"cyclopts", "grpc"}:
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Hide())
from muster import commands
print(commands.muster(), commands.plugin())
"""
    command = [sys.executable, "-P", "-c", hide]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout == "1 1\n"
    assert done.stderr.splitlines() == [
        f"muster: required packages are not installed: run {commands.how_to_install('cli')}",
        (
            "muster-plugin: required packages are not installed: "
            f"run {commands.how_to_install('plugin')}"
        ),
    ]


def test_the_plugins_own_extra_brings_in_no_heavy_client(wheel: Path) -> None:
    packages = wheels.closure(wheel, "plugin")
    assert {"grpcio", "msgspec", "nats-py", "protobuf"} <= packages
    assert not packages & HEAVY


def test_the_walk_would_see_a_heavy_client(wheel: Path) -> None:
    assert wheels.closure(wheel, "all") >= HEAVY


def test_the_plugin_loads_no_heavy_client() -> None:
    code = LOADED.replace("{absent!r}", repr(HEAVY))
    done = subprocess.run(
        [sys.executable, "-P", "-c", code], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    loaded = set(done.stdout.split())
    assert {"muster", "muster_plugin", "nats"} <= loaded
    assert not loaded & HEAVY
