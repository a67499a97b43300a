"""Pure: Reads what the iktos fork of NVIDIA's plugin is told to share: `gpu:gpu-mem-gb:-1,...`.

k8s-gpu-sharing-plugin 9394ddf0, cmd/nvidia-device-plugin/main.go: `original:new:replicas`, where -1
is one replica for each 1000 MiB. What its README promises is done here, and not its bugs.
"""

import re
from typing import Final

from muster_plugin.config import gpus, refusals
from muster_plugin.config.importers import tree

_PARTS: Final = 3
_PER_GB: Final = -1
_NUMBER: Final = re.compile(r"[+-]?[0-9]{1,9}")
_PROFILE = re.compile(r"mig-((?:[0-9]+c\.)?[0-9]+g\.[0-9]+gb)((?:\.[a-z]+)*)")
_GENERAL: Final = (
    "a resource that is not listed keeps its name and its devices; the fork gives it none",
    "a device id is <uuid>::<n>; the fork's is <uuid>-replica-<n>",
    "a new name holds for MIG devices in migStrategy mixed too; the fork ignores it there",
)


def read(text: str, path: str, reader: tree.Reader) -> tuple[list[object], list[object]]:
    """Return what is shared and what is only renamed, as trees of our configuration."""
    shared: list[object] = []
    renamed: list[object] = []
    seen: set[str] = set()
    for entry in (part.strip() for part in text.split(",")):
        if not entry:
            continue
        parts = entry.split(":")
        if len(parts) != _PARTS:
            reader.refuse(path, f"{refusals.said(entry)} is not original:new:replicas")
            continue
        was, now = (_named(part.strip()) for part in parts[:2])
        if was in seen:
            reader.refuse(path, f"{was} is named twice")
            continue
        seen.add(was)
        count = parts[2].strip()
        if not _NUMBER.fullmatch(count):
            reader.refuse(path, f"{refusals.said(entry)}: replica must be an integer")
            continue
        _add(was, now, int(count), path, reader, shared, renamed)
    for difference in _GENERAL:
        reader.differ(path, difference)
    return shared, renamed


def _add(
    was: str,
    now: str,
    count: int,
    path: str,
    reader: tree.Reader,
    shared: list[object],
    renamed: list[object],
) -> None:
    rename = {} if now == was else {"rename": now}
    match count:
        case 1:
            pattern = _pattern(was)
            if not pattern:
                reader.refuse(path, f"{was}: no GPU or MIG device is called so, so none is renamed")
            elif rename:
                renamed.append({"name": now, **pattern})
        case _ if count == _PER_GB:
            shared.append({"name": was, "perGb": True, **rename})
        case _ if 1 < count <= gpus.REPLICAS_MAX:
            shared.append({"name": was, "replicas": count, **rename})
        case _:
            what = f"{was}: {count} replicas"
            reader.refuse(path, f"{what}; it is -1, or 1 to {gpus.REPLICAS_MAX}")


def _named(name: str) -> str:
    return name if "/" in name else f"{gpus.DOMAIN}/{name}"


def _pattern(name: str) -> dict[str, str]:
    """Return which devices have a name without sharing; nothing if none can."""
    profile = _PROFILE.fullmatch(name.removeprefix(f"{gpus.DOMAIN}/"))
    if profile:
        return {"mig": profile[1] + profile[2].replace(".", "+", 1)}
    return {"product": "*"} if name == gpus.USUAL else {}
