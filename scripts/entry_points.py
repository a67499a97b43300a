"""Adapter for files: writes the entry points of pyproject.toml as an installer would.

`python entry_points.py PYPROJECT DIRECTORY` is for a directory on Python's path that was copied,
not installed, as in the image. `muster` finds the services' commands by entry points.
"""

import sys
import tomllib
from pathlib import Path


def main() -> int:
    """Write DIRECTORY/<distribution>.dist-info; return the exit code."""
    source, directory = map(Path, sys.argv[1:])
    project = tomllib.loads(source.read_text("utf-8"))["project"]
    groups = {"console_scripts": project["scripts"], **project["entry-points"]}
    lines = [
        line
        for group, points in groups.items()
        for line in (f"[{group}]", *(f"{name} = {target}" for name, target in points.items()), "")
    ]
    info = directory / f"{project['name'].replace('-', '_')}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {project['name']}\n", "utf-8")
    (info / "entry_points.txt").write_text("\n".join(lines), "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
