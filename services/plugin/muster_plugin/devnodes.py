"""Door to /dev: are the device nodes there, and what must be watched to know when that changes."""

import os
import stat
from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from muster_plugin import inventory

KIND: Final = "device_nodes"
CODE: Final = "device-missing"


class DeviceNodes:
    """The device nodes that the settings name; each look tells what changed since the last."""

    def __init__(self, paths: Iterable[str]) -> None:
        self._problems: dict[str, str] = dict.fromkeys(paths, "")

    def directories(self) -> set[Path]:
        """Return where nodes appear and vanish: beside the paths, and where links point to."""
        found = set()
        for path in self._problems:
            found.add(Path(path).parent)
            found.add(Path(os.path.realpath(path)).parent)
        return found

    def look(self) -> list[inventory.Change]:
        """Return what came and went."""
        changes: list[inventory.Change] = []
        for path, before in self._problems.items():
            now = _problem(path)
            if bool(now) == bool(before):
                continue
            self._problems[path] = now
            at = datetime.now(UTC)
            changes.append(
                inventory.Fault(physical=path, code=CODE, reason=now, at=at)
                if now
                else inventory.Mended(physical=path, code=CODE, at=at)
            )
        return changes


def _problem(path: str) -> str:
    try:
        mode = Path(path).stat().st_mode
    except OSError as error:
        return f"{path}: {(error.strerror or str(error)).lower()}"
    if stat.S_ISCHR(mode) or stat.S_ISBLK(mode):
        return ""
    return f"{path}: not a device node"
