"""Pure: imports the resource config of the iktos fork of NVIDIA's plugin.

The format is `original:new:replicas,...`, where -1 means one replica for each 1000 MiB. muster
follows the fork's README, without the bugs of its code (k8s-gpu-sharing-plugin 9394ddf0).
"""

import re
from typing import Final

from muster_plugin.config import gpus
from muster_plugin.config.importers import base
from muster_plugin.model import errors

_PARTS: Final = 3
_PER_GB: Final = -1
_NUMBER: Final = re.compile(r"[+-]?[0-9]{1,9}")
_PROFILE = re.compile(r"mig-((?:[0-9]+c\.)?[0-9]+g\.[0-9]+gb)((?:\.[a-z]+)*)")
_GENERAL: Final = (
    "a resource that is not listed keeps its devices; with the fork it loses them",
    "a device id is <uuid>::<n>; the fork's is <uuid>-replica-<n>",
    "a new name also applies to MIG devices in migStrategy mixed; the fork ignores it there",
)


def read(text: str, path: str, reader: base.Reader) -> tuple[list[object], list[object]]:
    """Return the fork's shared and renamed resources in muster's format."""
    shared: list[object] = []
    renamed: list[object] = []
    originals: set[str] = set()
    for entry in (part.strip() for part in text.split(",")):
        if not entry:
            continue
        parts = entry.split(":")
        if len(parts) != _PARTS:
            reader.reject(path, f"{errors.quoted(entry)} is not original:new:replicas")
            continue
        original, renamed_to = (_qualified(part.strip()) for part in parts[:2])
        if original in originals:
            reader.reject(path, f"{original} is named twice")
            continue
        originals.add(original)
        count = parts[2].strip()
        if not _NUMBER.fullmatch(count):
            reader.reject(path, f"{errors.quoted(entry)}: replica must be an integer")
            continue
        _add(original, renamed_to, int(count), path, reader, shared, renamed)
    for difference in _GENERAL:
        reader.note_difference(path, difference)
    return shared, renamed


def _add(
    original: str,
    renamed_to: str,
    count: int,
    path: str,
    reader: base.Reader,
    shared: list[object],
    renamed: list[object],
) -> None:
    rename = {} if renamed_to == original else {"rename": renamed_to}
    match count:
        case 1:
            pattern = _pattern(original)
            if not pattern:
                reader.reject(
                    path, f"{original}: no GPU or MIG device has this name, so none can be renamed"
                )
            elif rename:
                renamed.append({"name": renamed_to, **pattern})
        case _ if count == _PER_GB:
            shared.append({"name": original, "perGb": True, **rename})
        case _ if 1 < count <= gpus.REPLICAS_MAX:
            shared.append({"name": original, "replicas": count, **rename})
        case _:
            what = f"{original}: {count} replicas"
            reader.reject(path, f"{what}; the number must be -1, or 1 to {gpus.REPLICAS_MAX}")


def _qualified(name: str) -> str:
    return name if "/" in name else f"{gpus.DOMAIN}/{name}"


def _pattern(name: str) -> dict[str, str]:
    """Return the pattern of the devices that have this name by default; empty if there are none."""
    profile = _PROFILE.fullmatch(name.removeprefix(f"{gpus.DOMAIN}/"))
    if profile:
        return {"mig": profile[1] + profile[2].replace(".", "+", 1)}
    return {"product": "*"} if name == gpus.DEFAULT_NAME else {}
