"""Pure: imports the sharing and renaming of NVIDIA's k8s-device-plugin (v0.20) and its iktos fork.

Sources: api/config/v1/replicas.go, sharing.go and resources.go. NVIDIA parses some of it and drops
it with a warning; here it works. The fork (k8s-gpu-sharing-plugin 9394ddf0,
cmd/nvidia-device-plugin/main.go) has `original:new:replicas`, where -1 is one replica for each
1000 MiB; muster implements its README, without its bugs.
"""

import re
from typing import Final

from muster_plugin.config import gpus
from muster_plugin.config.importers import peer_file
from muster_plugin.model import errors, names, selectors

_SHARING: Final = ("timeSlicing", "mps")
_SHARED: Final = ("renameByDefault", "failRequestsGreaterThanOne", "resources")
_REPLICATED: Final = ("name", "rename", "devices", "replicas")
_REPLICAS_MIN: Final = 2
_NAME_MAX: Final = 63
_DROPS: Final = "NVIDIA drops it with a warning; here it works"
_MPS: Final = (
    "MPS is not supported: muster shares GPUs by time-slicing only. Write it as timeSlicing, or "
    "keep NVIDIA's plugin on the nodes that need MPS"
)


def read_sharing(reader: peer_file.Reader, value: object, ours: dict[str, object]) -> None:
    """Set the sharing; MPS is rejected."""
    if value is None:
        return
    sharing = reader.mapping(value, "sharing", _SHARING)
    if sharing.get("mps") is not None:
        reader.reject("sharing.mps", _MPS)
    if sharing.get("timeSlicing") is None:
        return
    path = "sharing.timeSlicing"
    section = reader.mapping(sharing["timeSlicing"], path, _SHARED)
    by_default = reader.flag(section.get("renameByDefault"), f"{path}.renameByDefault")
    if by_default:
        peer_file.put(ours, "sharing.renameByDefault", by_default)
    key = "failRequestsGreaterThanOne"
    if reader.flag(section.get(key), f"{path}.{key}"):
        peer_file.put(ours, "sharing.onePerRequest", True)  # noqa: FBT003  # it is the value itself
    items = reader.items(section.get("resources"), f"{path}.resources")
    if not items:
        reader.reject(f"{path}.resources", "no resources specified")
    if "sharing" in ours and "resources" in peer_file.below(ours, "sharing"):
        reader.reject(f"{path}.resources", "the iktos fork's resource config sets the sharing too")
        return
    shared = [_replicated(reader, item, f"{path}.resources[{at}]") for at, item in enumerate(items)]
    peer_file.put(ours, "sharing.resources", shared)


def read_resources(reader: peer_file.Reader, value: object, ours: dict[str, object]) -> None:
    """Set the names of GPUs and MIG devices, once the MIG strategy is set."""
    if value is None:
        return
    sections = reader.mapping(value, "resources", ("gpus", "mig"))
    namings: list[object] = []
    for section, key, default in (("gpus", "product", "*"), ("mig", "mig", None)):
        path = f"resources.{section}"
        items = reader.items(sections.get(section), path)
        for at, item in enumerate(items):
            entry = reader.mapping(item, f"{path}[{at}]", ("pattern", "name"))
            pattern = reader.text(entry.get("pattern"), f"{path}[{at}].pattern")
            name = _name(reader, entry.get("name"), f"{path}[{at}].name")
            if not pattern:
                reader.reject(f"{path}[{at}].pattern", "required, and missing")
            if (pattern, name) != (default, gpus.DEFAULT_NAME):
                namings.append({"name": name, key: pattern})
        if items:
            reader.note_difference(
                path, f"{_DROPS}; a device that no pattern matches keeps its default name"
            )
            if section == "mig" and ours.get("migStrategy", "none") == "none":
                reader.note_difference(path, "with migStrategy none it has no effect; left out")
                namings = [
                    naming for naming in namings if isinstance(naming, dict) and "mig" not in naming
                ]
    if namings and "resources" in ours:
        reader.reject("resources", "the iktos fork's resource config sets names too")
    elif namings:
        ours["resources"] = namings


def _replicated(reader: peer_file.Reader, item: object, path: str) -> dict[str, object]:
    entry = reader.mapping(item, path, _REPLICATED)
    ours: dict[str, object] = {"name": _name(reader, entry.get("name"), f"{path}.name")}
    replicas = reader.whole(entry.get("replicas"), f"{path}.replicas")
    ours["replicas"] = replicas
    if not _REPLICAS_MIN <= replicas <= gpus.REPLICAS_MAX:
        problem = f"number of replicas must be >= {_REPLICAS_MIN}"
        reader.reject(f"{path}.replicas", f"{problem}, and here <= {gpus.REPLICAS_MAX}")
    if entry.get("rename"):
        ours["rename"] = _name(reader, entry["rename"], f"{path}.rename")
        reader.note_difference(f"{path}.rename", _DROPS)
    devices = entry.get("devices", "all")
    if devices != "all":
        ours["devices"] = _devices(reader, devices, f"{path}.devices")
        reader.note_difference(f"{path}.devices", _DROPS)
    return ours


def _devices(reader: peer_file.Reader, value: object, path: str) -> object:
    """Return how many or which devices are shared, as NVIDIA's parser does."""
    if isinstance(value, int) and not isinstance(value, bool) and value > 0:
        return value
    if not isinstance(value, list) or not value:
        quoted = errors.quoted(value)
        reader.reject(path, f"{quoted} is not all, a number above 0, or a list of devices")
        return 1
    for at, item in enumerate(value):
        if not isinstance(item, str | int) or isinstance(item, bool):
            reader.reject(f"{path}[{at}]", f"{errors.quoted(item)} does not name a device")
            continue
        try:
            selectors.parse(item)
        except ValueError as error:
            reader.reject(f"{path}[{at}]", str(error))
    return value


def _name(reader: peer_file.Reader, value: object, path: str) -> str:
    """Return a resource name with its domain (api/config/v1/resources.go, NewResourceName)."""
    text = reader.text(value, path)
    if not text:
        reader.reject(path, "required, and missing")
        return gpus.DEFAULT_NAME
    prefix = f"{gpus.DOMAIN}/"
    name = text if text.startswith(prefix) else prefix + text
    if len(name) > _NAME_MAX:
        problem = f"must be {_NAME_MAX} characters or less"
        reader.reject(path, f"fully-qualified resource name {problem}: {errors.quoted(name)}")
    elif name != name.lower() or "_" in name:
        reader.reject(path, f"incorrect format for resource name {errors.quoted(name)}")
    else:
        for problem in names.name_problems(name):
            reader.reject(path, problem.removeprefix("name: "))
    return name


_PARTS: Final = 3
_PER_GB: Final = -1
_NUMBER: Final = re.compile(r"[+-]?[0-9]{1,9}")
_PROFILE = re.compile(r"mig-((?:[0-9]+c\.)?[0-9]+g\.[0-9]+gb)((?:\.[a-z]+)*)")
_GENERAL: Final = (
    "a resource that is not listed keeps its devices; with the fork it has none",
    "a device id is <uuid>::<n>; the fork's is <uuid>-replica-<n>",
    "a new name also applies to MIG devices in migStrategy mixed; the fork ignores it there",
)


def read_iktos(text: str, path: str, reader: peer_file.Reader) -> tuple[list[object], list[object]]:
    """Return the shared and renamed resources of the iktos fork in our format."""
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
    reader: peer_file.Reader,
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
            reader.reject(path, f"{what}; it is -1, or 1 to {gpus.REPLICAS_MAX}")


def _qualified(name: str) -> str:
    return name if "/" in name else f"{gpus.DOMAIN}/{name}"


def _pattern(name: str) -> dict[str, str]:
    """Return the pattern of the devices that have a name by default; empty without any."""
    profile = _PROFILE.fullmatch(name.removeprefix(f"{gpus.DOMAIN}/"))
    if profile:
        return {"mig": profile[1] + profile[2].replace(".", "+", 1)}
    return {"product": "*"} if name == gpus.DEFAULT_NAME else {}
