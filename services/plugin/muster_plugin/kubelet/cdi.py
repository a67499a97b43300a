"""Adapter: writes CDI specs for the container runtime, one file for each resource that uses CDI.

The runtime reads the spec (Container Device Interface 0.6.0, SPEC.md) and resolves the device names
that the kubelet passes on. A runtime without CDI support cannot start containers with these
devices. The files remain when the plugin ends: the kubelet stores the plugin's answers, so a
restarted container still has device names that only these files define.
"""

import contextlib
import os
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Final

import msgspec

from muster.service import logs
from muster_plugin.config import settings
from muster_plugin.model import advertised

_VERSION: Final = "0.6.0"
_FILE: Final = re.compile(r"muster-(.+)\.json")


def file_name(resource: str) -> str:
    """Return the name of a resource's spec file."""
    return f"muster-{settings.slug(resource)}.json"


def slug_of(file_name: str) -> str:
    """Return the slug of the resource whose spec file has this name; empty if not muster's."""
    matched = _FILE.fullmatch(file_name)
    return matched[1] if matched else ""


def spec(resource: str, resource_units: Iterable[advertised.Unit]) -> bytes:
    """Return the spec of all units of a resource, as JSON."""
    devices = [{"name": unit.id, "containerEdits": _edits(unit)} for unit in resource_units]
    return msgspec.json.encode({"cdiVersion": _VERSION, "kind": resource, "devices": devices})


def _edits(unit: advertised.Unit) -> dict[str, object]:
    return {
        "deviceNodes": [
            {
                "path": device.container_path,
                "hostPath": device.host_path,
                "permissions": device.permissions,
            }
            for device in unit.devices
        ],
        "mounts": [
            {
                "hostPath": mount.host_path,
                "containerPath": mount.container_path,
                "options": ["bind", "ro" if mount.read_only else "rw"],
            }
            for mount in unit.mounts
        ],
    }


class SpecDirectory:
    """Writes the spec files of this plugin's resources; `problems` lists the failures."""

    def __init__(self, directory: Path) -> None:
        self.problems: dict[str, str] = {}
        """Why spec files cannot be written, by resource."""
        self._directory = directory

    def write(self, specs: Mapping[str, bytes]) -> bool:
        """Write the file of each resource if it differs; return whether any was written.

        The files themselves are compared, because other programs may have removed them.
        """
        problems: dict[str, str] = {}
        has_written = False
        for resource, content in specs.items():
            path = self._directory / file_name(resource)
            try:
                if _content(path) != content:
                    _replace(path, content)
                    has_written = True
            except OSError as error:
                problems[resource] = f"its CDI spec {path} cannot be written: {error.strerror}"
        for resource, text in problems.items():
            if self.problems.get(resource) != text:
                logs.logger().warning("cdi_spec_not_written", resource=resource, error=text)
        self.problems = problems
        return has_written

    def directories(self) -> frozenset[Path]:
        """Return the directory of the spec files, to watch it; empty if it does not exist."""
        return frozenset({self._directory} if self._directory.is_dir() else ())

    def remove_stale(self, is_free: Callable[[str], bool]) -> None:
        """Remove the spec files of resources that no plugin serves (`is_free(slug)` is true)."""
        with contextlib.suppress(OSError):
            for path in sorted(self._directory.iterdir()):
                slug = slug_of(path.name)
                if slug and is_free(slug):
                    path.unlink()
                    logs.logger().info("stale_cdi_spec_removed", file=str(path))


def _content(path: Path) -> bytes | None:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return None


def _replace(path: Path, content: bytes) -> None:
    """Replace a file atomically, because runtimes read the directory whenever it changes."""
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        new.write_bytes(content)
        new.chmod(0o644)
        new.replace(path)
    except OSError:
        new.unlink(missing_ok=True)
        raise
