"""Pure: decodes the checkpoint file of the kubelet's device manager.

The file is JSON (kubelet 1.37.2, pkg/kubelet/cm/devicemanager/checkpoint/checkpoint.go):

    {"Data": {"PodDeviceEntries": [{"PodUID", "ContainerName", "ResourceName",
                                    "DeviceIDs": {"<NUMA node>": [ids]}, "AllocResp": base64}],
              "RegisteredDevices": {"<resource>": [healthy ids]}},
     "Checksum": number}

Up to 1.19 `DeviceIDs` was a list. The checksum is the FNV-1a hash of the data as Go prints it, with
the names of Go's types, so only the same kubelet can verify it. The kubelet replaces the file
atomically, and a truncated file is not valid JSON.
"""

from collections.abc import Mapping
from typing import Final

import msgspec

BYTES_MAX: Final = 4 * 1024 * 1024
"""The largest file that is decoded.

A decoded file takes up to 20 times as much memory, and any process can replace the file.
"""


class Grant(msgspec.Struct, frozen=True):
    """The devices of one container, with the plugin's serialized answer to Allocate."""

    resource: str = msgspec.field(name="ResourceName", default="")
    answer: bytes | None = msgspec.field(name="AllocResp", default=None)


class _Data(msgspec.Struct, frozen=True):
    registered: dict[str, list[str] | None] | None = msgspec.field(name="RegisteredDevices")
    grants: tuple[Grant, ...] | None = msgspec.field(name="PodDeviceEntries")


class _File(msgspec.Struct, frozen=True):
    data: _Data = msgspec.field(name="Data")
    checksum: int = msgspec.field(name="Checksum")


class Checkpoint(msgspec.Struct, frozen=True):
    """How many Healthy devices each resource last had, and the devices granted to containers."""

    registered: Mapping[str, int]
    grants: tuple[Grant, ...]


def decode(text: bytes) -> Checkpoint:
    """Return the content of the file. Raises ValueError if it is too long or not as expected."""
    if len(text) > BYTES_MAX:
        raise ValueError(f"longer than {BYTES_MAX} bytes")
    try:
        data = msgspec.json.decode(text, type=_File).data
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(str(error)) from None
    registered = {name: len(ids or ()) for name, ids in (data.registered or {}).items()}
    return Checkpoint(registered, data.grants or ())
