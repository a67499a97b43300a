"""Door to the container runtime's CDI directory: one spec file for each resource that wants one."""

import contextlib
import os
from collections.abc import Mapping
from pathlib import Path

from muster import logs


class Specs:
    """The spec files of this process; what did not change is not written again."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._written: dict[str, bytes] = {}
        self._log = logs.logger().bind(directory=str(directory))

    def update(self, wanted: Mapping[str, bytes]) -> None:
        """Make the files what they should be, by name; says so in the log where it cannot."""
        for name in self._written.keys() - wanted.keys():
            self._remove(name)
        for name, content in wanted.items():
            if self._written.get(name) == content:
                continue
            try:
                _replace(self._directory / name, content)
            except OSError as error:
                self._log.warning("cdi_spec_not_written", file=name, error=str(error))
            else:
                self._written[name] = content

    def _remove(self, name: str) -> None:
        del self._written[name]
        with contextlib.suppress(OSError):
            (self._directory / name).unlink(missing_ok=True)


def _replace(path: Path, content: bytes) -> None:
    """Replace a file as a whole: runtimes read the directory whenever it changes."""
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_name(f".{path.name}.{os.getpid()}")
    new.write_bytes(content)
    new.chmod(0o644)
    new.replace(path)
