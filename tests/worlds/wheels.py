"""The wheel as a release builds it, and the distributions that its installation requires."""

import email
import functools
import importlib.metadata
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT: Final = Path(__file__).resolve().parents[2]


def build(out: Path) -> Path:
    """Build the wheel from the tree, as a release does."""
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(out)]
    done = subprocess.run([*command, "."], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,) = out.glob("*.whl")
    return wheel


def closure(wheel: Path, *extras: str) -> set[str]:
    """Return the names of all distributions that an installation with these extras requires."""
    visited: set[tuple[str, str]] = set()
    left = [("muster-k8s", extra) for extra in ("", *extras)]
    while left:
        distribution = left.pop()
        if distribution not in visited:
            visited.add(distribution)
            left.extend(_required(*distribution, wheel))
    return {name for name, _ in visited}


def _required(name: str, extra: str, wheel: Path) -> Iterator[tuple[str, str]]:
    lines = _ours(wheel) if name == "muster-k8s" else importlib.metadata.requires(name) or []
    for line in lines:
        requirement = Requirement(line)
        if requirement.marker is None or requirement.marker.evaluate({"extra": extra}):
            for wanted_extra in ("", *requirement.extras):
                yield canonicalize_name(requirement.name), wanted_extra


@functools.cache
def _ours(wheel: Path) -> list[str]:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
        return email.message_from_bytes(archive.read(name)).get_all("Requires-Dist") or []
