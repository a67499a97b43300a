"""Pure: Reads the configuration of generic-device-plugin (0.1 and 0.2; deviceplugin/generic.go).

`devices:` (or `device:`) holds what its `--device` flag holds: a name and groups; a group's paths
or USB devices go into a container together. Before 0.1 the flag was `name,path,path`.
"""

import re
from collections.abc import Sequence
from typing import Final

import msgspec

from muster_plugin.config import document
from muster_plugin.config import resources as config_resources
from muster_plugin.config.importers import peer_file
from muster_plugin.model import errors, names

DOMAIN: Final = "squat.ai"
"""The default until 0.1; from 0.2.0 it is devic.es."""

_NAME: Final = re.compile(r"[a-z0-9][-a-z0-9]*[a-z0-9]")
_LISTS: Final = ("devices", "device")
_FLAGS: Final = ("domain", "plugin-directory", "log-level", "listen")
_PERMISSIONS: Final = "mrw"
_DIGITS: Final = range(1_000, 10_000)
_UNNAMED: Final = "unnamed"
_REFUSED: Final = "0000"
"""Each stands for a name or id that was refused already, so that nobody complains of it again."""
_Group = dict[str, object]
_Keys = dict[str, str]
"""The peer's key for each of ours that has another there."""

_GENERAL: Final = (
    "devices are found when they come and go; generic looks every 5 s while the kubelet listens",
    "a device that goes is Unhealthy for 60 s before it leaves the list; generic drops it at once",
    "device ids tell the device (ttyUSB0-0); generic's are hashes; each is stable",
    "containers also get MUSTER_DEVICES_<RESOURCE>, which names their devices; env: '' omits it",
)


def read(configuration: object, *, domain: str | None = None) -> peer_file.ImportedConfiguration:
    """Return the rules that a file of generic's stands for. Raises tree.Unreadable."""
    reader = peer_file.Reader("generic")
    given = reader.mapping(configuration, "", (*_LISTS, *_FLAGS))
    for flag in _FLAGS[1:]:
        if flag in given:
            reader.differ(flag, "a setting of the process; set it where muster is deployed")
    chosen = domain or reader.text(given.get("domain"), "domain") or None
    items = [
        (f"{key}[{at}]", item)
        for key in _LISTS
        for at, item in enumerate(reader.items(given.get(key), key))
    ]
    return _imported(reader, items, chosen, flags=False)


def read_flags(
    devices: Sequence[object], *, domain: str | None = None
) -> peer_file.ImportedConfiguration:
    """Return the rules that the values of `--device`, parsed, stand for. Raises Unreadable."""
    items = [(f"--device[{at}]", item) for at, item in enumerate(devices)]
    return _imported(peer_file.Reader("generic"), items, domain, flags=True)


def _imported(
    reader: peer_file.Reader, items: list[tuple[str, object]], domain: str | None, *, flags: bool
) -> peer_file.ImportedConfiguration:
    if domain is None:
        reader.differ(
            "domain",
            f"not given; {DOMAIN} is taken, which generic 0.1 takes; from 0.2.0 it takes devic.es",
        )
    for problem in names.name_problems(f"{domain or DOMAIN}/any"):
        reader.refuse("domain", problem.removeprefix("name: "))
    found = []
    for path, item in items:
        described = _device(reader, item, path, flags=flags)
        if described is None:
            continue
        name, groups, keys = described
        named = f"{DOMAIN if reader.problems else domain or DOMAIN}/{name}"
        resource = reader.resource({"name": named, "groups": groups}, path, keys)
        if resource:
            found.append(resource)
    if not found and not reader.problems:
        reader.refuse("", "no device is left to import")
    reader.differences.extend(_GENERAL)
    return reader.imported(_shared(reader, found))


def _device(
    reader: peer_file.Reader, item: object, path: str, *, flags: bool
) -> tuple[str, list[_Group], _Keys] | None:
    """Return the name and the groups of one device, or None if it never gives any device."""
    if isinstance(item, str) and "," in item:
        # the flag before 0.1: every path is a group of its own
        name, *paths = item.split(",")
        item = {"name": name, "groups": [{"paths": [{"path": one}]} for one in paths]}
    before = len(reader.problems)
    given = reader.mapping(item, path, ("name", "groups"))
    if len(reader.problems) > before:
        return None
    name = reader.text(given.get("name"), f"{path}.name").strip()
    if not _NAME.fullmatch(name):
        reader.refuse(f"{path}.name", f"{errors.quoted(name)} is not two or more of a-z 0-9 -")
        name = _UNNAMED
    groups: list[_Group] = []
    keys: _Keys = {}
    for at, inner in enumerate(reader.items(given.get("groups"), f"{path}.groups")):
        where = f"{path}.groups[{at}]"
        group = _group(reader, inner, where, flags=flags)
        if group in groups:
            reader.differ(where, "the same as one before it, and so with the same ids; left out")
        elif group:
            keys.update(_keys(where, f"groups[{len(groups)}]", group))
            groups.append(group)
    if not groups:
        reader.differ(path, "has no group with a device; left out")
        return None
    return name, groups, keys


def _keys(theirs: str, ours: str, group: _Group) -> _Keys:
    """Return where a group and its devices stand in generic's file."""
    devices = group["devices"]
    assert isinstance(devices, list), "made so"
    keys = {ours: theirs}
    for at, device in enumerate(devices):
        listed, below = ("usb", ".usb") if "usb" in device else ("paths", "")
        keys[f"{ours}.devices[{at}]{below}"] = f"{theirs}.{listed}[{at}]"
    return keys


def _group(reader: peer_file.Reader, value: object, path: str, *, flags: bool) -> _Group | None:
    given = reader.mapping(value, path, ("paths", "usb", "count"))
    paths = reader.items(given.get("paths"), f"{path}.paths")
    usb = reader.items(given.get("usb"), f"{path}.usb")
    if paths and usb:
        reader.refuse(path, "has paths and usb; generic refuses to start with both in one group")
        return None
    devices = [_path(reader, item, f"{path}.paths[{at}]") for at, item in enumerate(paths)]
    for at, item in enumerate(usb):
        found = _usb(reader, item, f"{path}.usb[{at}]", flags=flags)
        # generic makes a unit of whatever it finds
        devices.append({**found, "optional": True} if len(usb) > 1 else found)
    if usb:
        reader.differ(
            "usb",
            "two identical USB devices are two units here, each for a container of its own; generic"
            " gives one container all that match",
        )
    if not devices:
        reader.differ(path, "has neither paths nor usb; left out")
        return None
    count = reader.whole(given.get("count"), f"{path}.count") or 1
    return {"devices": devices, "count": count}


def _path(reader: peer_file.Reader, value: object, path: str) -> dict[str, object]:
    known = ("path", "mountPath", "permissions", "limit", "optional", "type", "readOnly")
    given = reader.mapping(value, path, known)
    found: dict[str, object] = {"path": reader.text(given.get("path"), f"{path}.path")}
    if not found["path"]:
        reader.refuse(f"{path}.path", "required, and missing")
    if mount_path := reader.text(given.get("mountPath"), f"{path}.mountPath"):
        found["mountPath"] = mount_path
    found["limit"] = reader.whole(given.get("limit"), f"{path}.limit") or 1
    found["optional"] = reader.flag(given.get("optional"), f"{path}.optional")
    read_only = reader.flag(given.get("readOnly"), f"{path}.readOnly")
    permissions = reader.text(given.get("permissions"), f"{path}.permissions")
    match reader.text(given.get("type"), f"{path}.type") or config_resources.NodeType.DEVICE:
        case config_resources.NodeType.MOUNT:
            found["type"] = config_resources.NodeType.MOUNT.value
            found["readOnly"] = read_only
            if permissions:
                reader.differ(f"{path}.permissions", "a Mount has none; left out")
        case other:
            found["type"] = other
            found["permissions"] = permissions or _PERMISSIONS
            if not permissions:
                reader.differ(
                    "permissions",
                    f"where none are given, {_PERMISSIONS} is written, as generic takes it; the "
                    "default here is rw",
                )
            if read_only:
                reader.differ(f"{path}.readOnly", "generic ignores it for a Device; left out")
    return found


def _usb(reader: peer_file.Reader, value: object, path: str, *, flags: bool) -> dict[str, object]:
    given = reader.mapping(value, path, ("vendor", "product", "serial"))
    usb = {
        "vendor": _usb_id(reader, given.get("vendor"), f"{path}.vendor", flags=flags),
        "product": _usb_id(reader, given.get("product"), f"{path}.product", flags=flags),
        "serial": reader.text(given.get("serial"), f"{path}.serial"),
    }
    return {"usb": usb}


def _usb_id(reader: peer_file.Reader, value: object, path: str, *, flags: bool) -> str:
    """Return four hexadecimal digits, as sysfs writes them."""
    if isinstance(value, int) and not isinstance(value, bool):
        if flags and value in _DIGITS:
            reader.differ(path, f"{value} is hexadecimal, as a --device flag reads it; quote it")
            return str(value)
        reader.refuse(
            path,
            f"{errors.quoted(value)} is not in quotes: a file of generic's reads that as a decimal "
            "number, its --device flag as hexadecimal; write four hexadecimal digits in quotes",
        )
        return _REFUSED
    return reader.text(value, path).removeprefix("0x").zfill(4)


def _shared(
    reader: peer_file.Reader, resources: list[config_resources.Resource]
) -> list[config_resources.Resource]:
    """Let resources have nodes in common, as generic does without a word."""
    common: dict[str, config_resources.Entry] = {}
    for one, other in document.overlaps(document.claims(resources)):
        if one.key not in common:
            common[one.key] = one.nodes
            reader.differ(one.key, f"{other.resource} counts the same nodes; marked as shared")
    shared = {id(nodes) for nodes in common.values()}
    return [
        msgspec.structs.replace(
            resource, groups=tuple(_with_shared(group, shared) for group in resource.groups)
        )
        for resource in resources
    ]


def _with_shared(group: config_resources.Group, shared: set[int]) -> config_resources.Group:
    devices = tuple(
        msgspec.structs.replace(nodes, shared=True) if id(nodes) in shared else nodes
        for nodes in group.devices
    )
    return msgspec.structs.replace(group, devices=devices)
