"""Pure: imports the configuration of generic-device-plugin and of smarter-device-manager.

generic-device-plugin (0.1 and 0.2; deviceplugin/generic.go): `devices:` (or `device:`) has the same
content as its `--device` flag: a name and groups. The paths or USB devices of a group are allocated
together. Before 0.1 the flag was `name,path,path`.

smarter-device-manager (v1.20; main.go, findDevicesPattern): a list of `{devicematch,
nummaxdevices}`. `devicematch` is a Go regular expression, which may match any part of the path
below /dev unless it has anchors; `nummaxdevices` is the number of ids for each match. Each match
becomes a separate resource, named after its path; containers get the node with `rw`.
"""

import re
from collections.abc import Sequence
from typing import Final

import msgspec

from muster_plugin.config import resources as config_resources
from muster_plugin.config import settings
from muster_plugin.config.importers import base
from muster_plugin.model import advertised, errors

GENERIC_DOMAIN: Final = "squat.ai"
"""The default domain of generic-device-plugin until 0.1; from 0.2.0 it is devic.es."""

_NAME: Final = re.compile(r"[a-z0-9][-a-z0-9]*[a-z0-9]")
_LISTS: Final = ("devices", "device")
_FLAGS: Final = ("domain", "plugin-directory", "log-level", "listen")
_PERMISSIONS: Final = "mrw"
_DIGITS: Final = range(1_000, 10_000)
_UNNAMED: Final = "unnamed"
_REFUSED: Final = "0000"
"""Replaces a rejected id, so that it is reported only once; `_UNNAMED` replaces a rejected name."""
_Group = dict[str, object]
_Keys = dict[str, str]
"""The peer's key for each of muster's keys, where they differ."""

_GENERIC_DIFFERENCES: Final = (
    "devices are detected as soon as they appear or disappear; generic scans every 5 s",
    "a device that vanishes is Unhealthy for 60 s, then dropped; generic drops it immediately",
    "device ids name the device (ttyUSB0-0); generic's are hashes; both are stable",
    "containers also get MUSTER_DEVICES_<RESOURCE>, which names their devices; env: '' omits it",
)

SMARTER_DOMAIN: Final = "smarter-devices"
_JETSON: Final = "nvidia-gpu"
_SMARTER_DIFFERENCES: Final = (
    "devices are detected as soon as they appear or disappear; smarter reads /dev only at startup",
    "a device that vanishes is Unhealthy; smarter keeps allocating its path",
    "device ids are stable and name the device (video0-3); smarter's are 0 to N-1",
    "a name that the kubelet would refuse is changed; with smarter the kubelet refuses it",
    "containers also get MUSTER_DEVICES_<RESOURCE>, which names their devices; env: '' omits it",
)


def read_generic(configuration: object, *, domain: str | None = None) -> base.ImportedConfiguration:
    """Return the configuration of a generic-device-plugin file. Raises ImportRejected."""
    reader = base.Reader("generic")
    entries = reader.mapping(configuration, "", (*_LISTS, *_FLAGS))
    for flag in _FLAGS[1:]:
        if flag in entries:
            reader.note_difference(flag, "concerns the process; set it in muster's deployment")
    chosen_domain = domain or reader.text(entries.get("domain"), "domain") or None
    items = [
        (f"{key}[{at}]", item)
        for key in _LISTS
        for at, item in enumerate(reader.items(entries.get(key), key))
    ]
    return _imported_generic(reader, items, chosen_domain, flags=False)


def read_generic_flags(
    devices: Sequence[object], *, domain: str | None = None
) -> base.ImportedConfiguration:
    """Return the configuration from parsed `--device` values. Raises ImportRejected."""
    items = [(f"--device[{at}]", item) for at, item in enumerate(devices)]
    return _imported_generic(base.Reader("generic"), items, domain, flags=True)


def _imported_generic(
    reader: base.Reader,
    items: list[tuple[str, object]],
    domain: str | None,
    *,
    flags: bool,
) -> base.ImportedConfiguration:
    if domain is None:
        reader.note_difference(
            "domain",
            f"missing; {GENERIC_DOMAIN} is used, the default of generic 0.1; "
            "since 0.2.0 it is devic.es",
        )
    for problem in advertised.name_problems(f"{domain or GENERIC_DOMAIN}/any"):
        reader.reject("domain", problem)
    imported = []
    for path, item in items:
        described = _generic_device(reader, item, path, flags=flags)
        if described is None:
            continue
        name, groups, keys = described
        named = f"{GENERIC_DOMAIN if reader.problems else domain or GENERIC_DOMAIN}/{name}"
        resource = reader.resource({"name": named, "groups": groups}, path, keys)
        if resource:
            imported.append(resource)
    if not imported and not reader.problems:
        reader.reject("", "there is no device to import")
    reader.differences.extend(_GENERIC_DIFFERENCES)
    return reader.imported(_shared(reader, imported))


def _generic_device(
    reader: base.Reader, item: object, path: str, *, flags: bool
) -> tuple[str, list[_Group], _Keys] | None:
    """Return the name of one device, its groups and their keys.

    None if it is not a mapping, or has no group with a device.
    """
    if isinstance(item, str) and "," in item:
        # the flag before 0.1, in which every path is a separate group
        name, *paths = item.split(",")
        item = {"name": name, "groups": [{"paths": [{"path": text}]} for text in paths]}
    before = len(reader.problems)
    entry = reader.mapping(item, path, ("name", "groups"))
    if len(reader.problems) > before:
        return None
    name = reader.text(entry.get("name"), f"{path}.name").strip()
    if not _NAME.fullmatch(name):
        reader.reject(
            f"{path}.name", f"{errors.quoted(name)}: expected two or more of a-z, 0-9 and -"
        )
        name = _UNNAMED
    groups: list[_Group] = []
    keys: _Keys = {}
    for at, inner in enumerate(reader.items(entry.get("groups"), f"{path}.groups")):
        where = f"{path}.groups[{at}]"
        group = _group(reader, inner, where, flags=flags)
        if group in groups:
            reader.note_difference(
                where, "the same as an earlier group, with the same ids; left out"
            )
        elif group:
            keys.update(_keys(where, f"groups[{len(groups)}]", group))
            groups.append(group)
    if not groups:
        reader.note_difference(path, "has no group with a device; left out")
        return None
    return name, groups, keys


def _keys(theirs: str, ours: str, group: _Group) -> _Keys:
    """Return generic-device-plugin's keys of a group and its devices, by muster's keys."""
    devices = group["devices"]
    assert isinstance(devices, list), "built by _group"
    keys = {ours: theirs}
    for at, device in enumerate(devices):
        listed, below = ("usb", ".usb") if "usb" in device else ("paths", "")
        keys[f"{ours}.devices[{at}]{below}"] = f"{theirs}.{listed}[{at}]"
    return keys


def _group(reader: base.Reader, value: object, path: str, *, flags: bool) -> _Group | None:
    keys = reader.mapping(value, path, ("paths", "usb", "count"))
    paths = reader.items(keys.get("paths"), f"{path}.paths")
    usb = reader.items(keys.get("usb"), f"{path}.usb")
    if paths and usb:
        reader.reject(path, "has paths and usb; generic-device-plugin refuses both in one group")
        return None
    devices = [_path(reader, item, f"{path}.paths[{at}]") for at, item in enumerate(paths)]
    for at, item in enumerate(usb):
        entry = _usb(reader, item, f"{path}.usb[{at}]", flags=flags)
        # generic-device-plugin makes a device from the paths that exist
        devices.append({**entry, "optional": True} if len(usb) > 1 else entry)
    if usb:
        reader.note_difference(
            "usb",
            "two identical USB devices count as two, for different containers; "
            "generic-device-plugin gives all matching devices to one container",
        )
    if not devices:
        reader.note_difference(path, "has neither paths nor usb; left out")
        return None
    count = reader.whole(keys.get("count"), f"{path}.count") or 1
    return {"devices": devices, "count": count}


def _path(reader: base.Reader, value: object, path: str) -> dict[str, object]:
    keys = ("path", "mountPath", "permissions", "limit", "optional", "type", "readOnly")
    theirs = reader.mapping(value, path, keys)
    ours: dict[str, object] = {"path": reader.text(theirs.get("path"), f"{path}.path")}
    if not ours["path"]:
        reader.reject(f"{path}.path", "required but missing")
    if mount_path := reader.text(theirs.get("mountPath"), f"{path}.mountPath"):
        ours["mountPath"] = mount_path
    ours["limit"] = reader.whole(theirs.get("limit"), f"{path}.limit") or 1
    ours["optional"] = reader.flag(theirs.get("optional"), f"{path}.optional")
    read_only = reader.flag(theirs.get("readOnly"), f"{path}.readOnly")
    permissions = reader.text(theirs.get("permissions"), f"{path}.permissions")
    match reader.text(theirs.get("type"), f"{path}.type") or config_resources.NodeType.DEVICE:
        case config_resources.NodeType.MOUNT:
            ours["type"] = config_resources.NodeType.MOUNT.value
            ours["readOnly"] = read_only
            if permissions:
                reader.note_difference(
                    f"{path}.permissions", "a Mount has no permissions; left out"
                )
        case other:
            ours["type"] = other
            ours["permissions"] = permissions or _PERMISSIONS
            if not permissions:
                reader.note_difference(
                    "permissions",
                    f"entries without it get generic's default, {_PERMISSIONS}; muster's is rw",
                )
            if read_only:
                reader.note_difference(
                    f"{path}.readOnly", "generic ignores it for a Device; left out"
                )
    return ours


def _usb(reader: base.Reader, value: object, path: str, *, flags: bool) -> dict[str, object]:
    theirs = reader.mapping(value, path, ("vendor", "product", "serial"))
    usb = {
        "vendor": _usb_id(reader, theirs.get("vendor"), f"{path}.vendor", flags=flags),
        "product": _usb_id(reader, theirs.get("product"), f"{path}.product", flags=flags),
        "serial": reader.text(theirs.get("serial"), f"{path}.serial"),
    }
    return {"usb": usb}


def _usb_id(reader: base.Reader, value: object, path: str, *, flags: bool) -> str:
    """Return a USB vendor or product id as four hexadecimal digits; 0000 if it is rejected."""
    if isinstance(value, int) and not isinstance(value, bool):
        if flags and value in _DIGITS:
            reader.note_difference(
                path, f"{value} is hexadecimal, as in a --device flag; put it in quotes"
            )
            return str(value)
        reader.reject(
            path,
            f"{errors.quoted(value)} is not in quotes: generic reads it as decimal in a file, but "
            "as hexadecimal in a --device flag; write four hexadecimal digits in quotes",
        )
        return _REFUSED
    return reader.text(value, path).removeprefix("0x").zfill(4)


def _shared(
    reader: base.Reader, resources: list[config_resources.Resource]
) -> list[config_resources.Resource]:
    """Return the resources, with entries marked as shared if another resource has their nodes."""
    common: dict[str, config_resources.Entry] = {}
    for narrow, wide in settings.overlaps(settings.claims(resources)):
        if narrow.key not in common:
            common[narrow.key] = narrow.entry
            reader.note_difference(
                narrow.key, f"{wide.resource} has the same nodes; marked as shared"
            )
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


def read_smarter(entries: object) -> base.ImportedConfiguration:
    """Return the configuration of a smarter-device-manager list. Raises ImportRejected."""
    reader = base.Reader("smarter")
    by_pattern: dict[str, config_resources.Resource] = {}
    for at, item in enumerate(reader.items(entries, "")):
        path, before = f"[{at}]", len(reader.problems)
        entry = reader.mapping(item, path, ("devicematch", "nummaxdevices"))
        pattern = reader.text(entry.get("devicematch"), f"{path}.devicematch")
        count = reader.whole(entry.get("nummaxdevices"), f"{path}.nummaxdevices")
        if len(reader.problems) > before:
            continue
        resource = _smarter_resource(reader, path, pattern, count)
        if resource and pattern in by_pattern:
            repeated = f"devicematch {errors.quoted(pattern)} is listed twice"
            reader.note_difference(
                path, f"{repeated}; the later one is kept, because the kubelet keeps it too"
            )
        if resource:
            by_pattern[pattern] = resource
    if not by_pattern and not reader.problems:
        reader.reject("", "there is no device to import")
    reader.differences.extend(_SMARTER_DIFFERENCES)
    return reader.imported([*by_pattern.values()])


def _smarter_resource(
    reader: base.Reader, path: str, pattern: str, count: int
) -> config_resources.Resource | None:
    if pattern == _JETSON:
        reader.note_loss(path, "Jetson GPUs (/sys/devices/gpu.N) have no device node")
        return None
    if not pattern:
        reader.reject(f"{path}.devicematch", "missing; smarter then matches everything in /dev")
        return None
    if not count:
        reader.note_difference(
            path, f"{errors.quoted(pattern)} has nummaxdevices 0, so no device; left out"
        )
        return None
    if not (pattern.startswith("^") and pattern.endswith("$")):
        reader.note_difference(
            path,
            f"devicematch {errors.quoted(pattern)} is not anchored: it matches any part of a path "
            "below /dev, with smarter and with muster; ^ and $ make it exact",
        )
    return reader.resource(
        {
            "name": f"{SMARTER_DOMAIN}/*",
            "perMatch": True,
            "groups": [{"devices": [{"regex": pattern}], "count": count}],
        },
        path,
        {
            "groups[0].devices[0].regex": f"{path}.devicematch",
            "groups[0].count": f"{path}.nummaxdevices",
        },
    )
