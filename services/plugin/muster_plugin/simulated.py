"""Door to a fault script: XIDs that a file says occur on simulated GPUs.

Each line of the file is a JSON object: `{"device": 0, "xid": 79}` or `{"device": 0, "clear": 79}`.
The whole file is read at every look, so it may be appended to, rewritten or removed.
"""

from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from muster import logs
from muster_plugin import faults, inventory

KIND: Final = "fault_script"

_BYTES_MAX: Final = 1024 * 1024


class FaultScript:
    """A fault script for the GPUs with these uuids; each look tells what changed."""

    def __init__(self, file: Path, uuids: tuple[str, ...]) -> None:
        self._file = file
        self._uuids = uuids
        self._script = faults.Script()
        self._log = logs.logger().bind(file=str(file))

    def directories(self) -> set[Path]:
        """Return where the file appears, changes and vanishes."""
        return {self._file.parent}

    def look(self) -> list[inventory.Change]:
        """Return the faults that began and ended since the last look."""
        before, self._script = self._script, faults.script(self._read())
        if self._script.bad_lines not in {(), before.bad_lines}:
            self._log.warning("fault_script_unreadable", lines=self._script.bad_lines[:5])
        at = datetime.now(UTC)
        changes: list[inventory.Change] = []
        for index, xid in sorted(self._script.holding ^ before.holding):
            verdict = faults.verdict(xid)
            if index >= len(self._uuids):
                self._log.warning("fault_script_unknown_gpu", device=index, xid=xid)
            elif (index, xid) not in self._script.holding:
                physical = self._uuids[index]
                changes.append(inventory.Mended(physical=physical, code=verdict.code, at=at))
            elif verdict.unhealthy:
                changes.append(
                    inventory.Fault(
                        physical=self._uuids[index],
                        code=verdict.code,
                        reason=verdict.reason,
                        at=at,
                    )
                )
            else:
                self._log.info("xid_ignored", device=index, reason=verdict.reason)
        return changes

    def _read(self) -> bytes:
        try:
            with self._file.open("rb") as opened:
                return opened.read(_BYTES_MAX)
        except FileNotFoundError:
            return b""
        except OSError as error:
            self._log.warning("fault_script_unreadable", error=str(error))
            return b""
