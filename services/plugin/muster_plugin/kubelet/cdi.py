"""Pure: A resource's devices as a CDI spec (Container Device Interface 0.6.0, SPEC.md).

The container runtime reads the spec and makes what a name in it stands for. The kubelet hands the
names over; runtimes without CDI fail such a container.
"""

import re
from collections.abc import Iterable
from typing import Final

import msgspec

from muster_plugin.config import settings
from muster_plugin.discovery import units

_VERSION: Final = "0.6.0"
_FILE: Final = re.compile(r"muster-(.+)\.json")


def qualified(resource: str, device_id: str) -> str:
    """Return the name of a device: `vendor/class=name`, which a resource name's two parts give."""
    return f"{resource}={device_id}"


def file_name(resource: str) -> str:
    """Return the name of a resource's spec file."""
    return f"muster-{settings.slug(resource)}.json"


def slug_of(file_name: str) -> str:
    """Return the slug of the resource whose spec file is called so; empty if it is none of ours."""
    found = _FILE.fullmatch(file_name)
    return found[1] if found else ""


def spec(resource: str, given: Iterable[units.Unit]) -> bytes:
    """Return the spec of all units of a resource, as JSON."""
    devices = [{"name": unit.id, "containerEdits": _edits(unit)} for unit in given]
    return msgspec.json.encode({"cdiVersion": _VERSION, "kind": resource, "devices": devices})


def _edits(unit: units.Unit) -> dict[str, object]:
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
