"""Pure. Reads the configuration of NVIDIA's k8s-device-plugin (v0.20; api/config/v1).

Schema v1 describes device nodes and says nothing of GPUs yet, so no rule comes out of it. The file
is read all the same: what NVIDIA refuses or ignores without a word is told here, and so is every
setting that has no equivalent.
"""

from collections.abc import Mapping
from typing import Final

from muster_plugin import refusals
from muster_plugin.imports import tree

_TOP: Final = ("version", "flags", "resources", "sharing", "imex")
_PLUGIN: Final = (
    "passDeviceSpecs",
    "deviceListStrategy",
    "deviceIDStrategy",
    "cdiAnnotationPrefix",
    "nvidiaCTKPath",
    "containerDriverRoot",
    "sharedDevicesAllocationPolicy",
)
_GFD: Final = ("oneshot", "noTimestamp", "sleepInterval", "outputFile", "machineTypeFile")
_FLAGS: Final = (
    "migStrategy",
    "failOnInitError",
    "mpsRoot",
    "nvidiaDriverRoot",
    "nvidiaDevRoot",
    "gdrcopyEnabled",
    "gdsEnabled",
    "mofedEnabled",
    "useNodeFeatureAPI",
    "deviceDiscoveryStrategy",
    "plugin",
    "gfd",
)
_SHARING: Final = ("timeSlicing", "mps")
_SHARED: Final = ("renameByDefault", "failRequestsGreaterThanOne", "resources")
_REPLICATED: Final = ("name", "rename", "devices", "replicas")
_REPLICAS_MIN: Final = 2


def read(configuration: object) -> tree.Imported:
    """Return what there is to say about a file of NVIDIA's. Raises tree.Unreadable."""
    reader = tree.Reader("NVIDIA")
    given = reader.mapping(configuration, "", _TOP)
    version = given.get("version", "v1")
    if version != "v1":
        reader.refuse("version", f"unknown version: {refusals.said(version)}; it is v1")
    flags = _section(reader, given, "flags", "flags", _FLAGS)
    plugin = _section(reader, flags, "plugin", "flags.plugin", _PLUGIN)
    gfd = _section(reader, flags, "gfd", "flags.gfd", _GFD)
    _tell(reader, {key: flags[key] for key in flags if key not in {"plugin", "gfd"}}, "flags")
    _tell(reader, plugin, "flags.plugin")
    _tell(reader, gfd, "flags.gfd")
    sharing = _section(reader, given, "sharing", "sharing", _SHARING)
    for kind in sharing:
        _read_sharing(reader, sharing, kind)
    if len(sharing) == len(_SHARING):
        reader.differ("sharing.timeSlicing", "NVIDIA ignores it where mps is given")
    if "resources" in given:
        reader.differ("resources", "NVIDIA drops this section with a warning")
    if "imex" in given:
        reader.differ("imex", _untold(given["imex"]))
    if reader.problems:
        raise tree.Unreadable(reader.problems)
    return tree.Imported(rules=None, differences=tuple(reader.differences))


def _section(
    reader: tree.Reader,
    given: Mapping[str, object],
    key: str,
    path: str,
    known: tuple[str, ...],
) -> dict[str, object]:
    value = given.get(key)
    return {} if value is None else reader.mapping(value, path, known)


def _read_sharing(reader: tree.Reader, sharing: Mapping[str, object], kind: str) -> None:
    path = f"sharing.{kind}"
    given = _section(reader, sharing, kind, path, _SHARED)
    for key in ("renameByDefault", "failRequestsGreaterThanOne"):
        reader.flag(given.get(key), f"{path}.{key}")
    items = reader.items(given.get("resources"), f"{path}.resources")
    if not items:
        reader.refuse(f"{path}.resources", "no resources specified")
    for at, item in enumerate(items):
        where = f"{path}.resources[{at}]"
        entry = reader.mapping(item, where, _REPLICATED)
        if not reader.text(entry.get("name"), f"{where}.name"):
            reader.refuse(f"{where}.name", "required, and missing")
        if reader.whole(entry.get("replicas"), f"{where}.replicas") < _REPLICAS_MIN:
            reader.refuse(f"{where}.replicas", f"number of replicas must be >= {_REPLICAS_MIN}")
        for key in ("rename", "devices"):
            if key in entry:
                reader.differ(f"{where}.{key}", "NVIDIA drops it with a warning")
    reader.differ(path, _untold(given))


def _tell(reader: tree.Reader, settings: Mapping[str, object], path: str) -> None:
    for key, value in settings.items():
        reader.differ(f"{path}.{key}", _untold(value))


def _untold(value: object) -> str:
    return f"{refusals.said(value)} concerns GPUs, which muster.dev/v1 does not describe; left out"
