"""Pure: maps the settings of NVIDIA's plugin or its iktos fork (flags, variables, time-slicing).

A table lists every flag, variable and key with muster's key; functions convert sharing and
renaming. Sources: k8s-device-plugin v0.20, cmd/nvidia-device-plugin/main.go,
cmd/gpu-feature-discovery/main.go and api/config/v1; for the iktos fork (k8s-gpu-sharing-plugin
9394ddf0): its cmd/nvidia-device-plugin/main.go. docs/compatibility.md shows the table.

NVIDIA parses some of the sharing settings and drops them with a warning; with muster they work.
"""

import enum
import functools
from collections.abc import Mapping
from typing import Any, Final

import msgspec

from muster_plugin.config import gpus
from muster_plugin.config.importers import base
from muster_plugin.model import advertised, errors, gpu

_ANY_VALUE: Final[Mapping[str, str]] = {}
_LABELER: Final = "the labeler sets the labels and does not need this setting"
CDI_SPEC: Final = (
    "NVIDIA's plugin writes the CDI spec of the GPUs; for muster, run nvidia-ctk cdi generate "
    "with --vendor k8s.device-plugin.nvidia.com --class gpu on each node"
)
_CDI: Final = "muster writes no CDI spec for GPUs; pass the option to nvidia-ctk cdi generate"
_SHARING: Final = ("timeSlicing", "mps")
_SHARED: Final = ("renameByDefault", "failRequestsGreaterThanOne", "resources")
_REPLICATED: Final = ("name", "rename", "devices", "replicas")
_REPLICAS_MIN: Final = 2
_NAME_MAX: Final = 63
_WHOLE: Final = (
    "compared with the whole name, as in NVIDIA's v0.20; up to v0.19 it matched any part; "
    "to keep that, write a * before and after it"
)
_DROPS: Final = "NVIDIA drops it with a warning; with muster it works"
MPS: Final = (
    "MPS is not supported: muster shares GPUs by time-slicing only. Write it as timeSlicing, or "
    "keep NVIDIA's plugin on the nodes that need MPS"
)


class Kind(enum.StrEnum):
    """The type of a setting's value."""

    FLAG = "flag"
    TEXT = "text"
    LIST = "list"
    NUMBERS = "numbers"
    ANY = "any"


class Setting(msgspec.Struct, frozen=True, kw_only=True):
    """One NVIDIA setting: its names, and muster's path below `gpus` or what muster does instead.

    `values` maps all values that NVIDIA accepts to muster's; `refusal` is NVIDIA's text for any
    other value. `defaults` are values that change nothing and are not reported. `is_lost` is true
    if muster does not do what the setting requests.
    """

    key: str = ""
    flags: tuple[str, ...] = ()
    variables: tuple[str, ...] = ()
    kind: Kind = Kind.TEXT
    ours: str = ""
    instead: str = ""
    values: Mapping[str, str] = _ANY_VALUE
    refusal: str = ""
    defaults: tuple[object, ...] = ()
    is_lost: bool = False


def _same(*values: str) -> dict[str, str]:
    return {value: value for value in values}


def _setting(kind: Kind, names: str, ours: str = "", **more: Any) -> Setting:
    """Return a setting; `names` are its key in the file, its flags and its variables."""
    words = names.split()
    return Setting(
        key=next((word for word in words if "." in word), ""),
        flags=tuple(word for word in words if word.startswith("-")),
        variables=tuple(word for word in words if word.isupper() and not word.startswith("-")),
        kind=kind,
        ours=ours,
        **more,
    )


_flag: Final = functools.partial(_setting, Kind.FLAG)
_text: Final = functools.partial(_setting, Kind.TEXT)
_list: Final = functools.partial(_setting, Kind.LIST)
_numbers: Final = functools.partial(_setting, Kind.NUMBERS)
_any: Final = functools.partial(_setting, Kind.ANY)


CONFIG_FILE: Final = _text(
    "--config-file CONFIG_FILE GFD_CONFIG_FILE",
    instead="its settings are read if a ConfigMap in the same manifests has that file",
    is_lost=True,
)
TABLE: Final = (
    _text(
        "flags.migStrategy --mig-strategy MIG_STRATEGY GFD_MIG_STRATEGY",
        "migStrategy",
        values=_same("none", "single", "mixed"),
        refusal="unknown MIG strategy",
    ),
    _flag(
        "flags.failOnInitError --fail-on-init-error FAIL_ON_INIT_ERROR GFD_FAIL_ON_INIT_ERROR",
        instead="without a driver, muster reports this and advertises 0 GPUs until it is loaded",
    ),
    _text(
        "flags.nvidiaDriverRoot --driver-root --nvidia-driver-root NVIDIA_DRIVER_ROOT",
        "given.driverRoot",
    ),
    _text("flags.nvidiaDevRoot --dev-root --nvidia-dev-root NVIDIA_DEV_ROOT", "given.devRoot"),
    _flag("flags.gdrcopyEnabled --gdrcopy-enabled GDRCOPY_ENABLED", "given.gdrcopy"),
    _flag("flags.gdsEnabled --gds-enabled GDS_ENABLED", "given.gds"),
    _flag("flags.mofedEnabled --mofed-enabled MOFED_ENABLED", "given.mofed"),
    _flag(
        "flags.plugin.passDeviceSpecs --pass-device-specs PASS_DEVICE_SPECS", "given.deviceSpecs"
    ),
    _list(
        "flags.plugin.deviceListStrategy --device-list-strategy DEVICE_LIST_STRATEGY",
        "given.deviceList",
        values=_same("envvar", "volume-mounts", "cdi-annotations", "cdi-cri"),
        refusal="invalid --device-list-strategy option",
        defaults=(["envvar"],),
    ),
    _text(
        "flags.plugin.deviceIDStrategy --device-id-strategy DEVICE_ID_STRATEGY",
        "given.deviceIds",
        values=_same("uuid", "index"),
        refusal="invalid --device-id-strategy option",
    ),
    _text(
        "flags.plugin.cdiAnnotationPrefix --cdi-annotation-prefix CDI_ANNOTATION_PREFIX",
        "given.cdiAnnotationPrefix",
    ),
    _text(
        "flags.plugin.nvidiaCTKPath --nvidia-cdi-hook-path "
        "--nvidia-ctk-path NVIDIA_CDI_HOOK_PATH NVIDIA_CTK_PATH",
        "given.cdiHook",
    ),
    _text(
        "flags.plugin.containerDriverRoot --driver-root-ctr-path "
        "--container-driver-root DRIVER_ROOT_CTR_PATH CONTAINER_DRIVER_ROOT",
        instead="mount the driver root at /driver-root, or name the library in gpus.library",
        defaults=("/driver-root",),
        is_lost=True,
    ),
    _text(
        "flags.plugin.sharedDevicesAllocationPolicy --shared-devices-allocation-policy "
        "SHARED_DEVICES_ALLOCATION_POLICY",
        "placement",
        values={"distributed": "aligned", "packed": "packed"},
        refusal="invalid --shared-devices-allocation-policy option",
    ),
    _text(
        "flags.deviceDiscoveryStrategy --device-discovery-strategy DEVICE_DISCOVERY_STRATEGY",
        instead="muster finds GPUs through NVML only; it finds neither Tegra nor VFIO devices",
        defaults=("auto", "nvml"),
        is_lost=True,
    ),
    _numbers("imex.channelIDs --imex-channel-ids IMEX_CHANNEL_IDS", "given.imex.channels"),
    _flag("imex.required --imex-required IMEX_REQUIRED", "given.imex.required"),
    _text("DP_DISABLE_HEALTHCHECKS", "health.disable"),
    _text("DP_ENABLE_HEALTHCHECKS", "health.enable"),
    _text("flags.mpsRoot --mps-root MPS_ROOT", instead="muster does not support MPS"),
    _flag(
        "flags.useNodeFeatureAPI --use-node-feature-api "
        "USE_NODE_FEATURE_API GFD_USE_NODE_FEATURE_API",
        instead=_LABELER,
    ),
    _flag("flags.gfd.oneshot --oneshot GFD_ONESHOT", instead=_LABELER),
    _flag("flags.gfd.noTimestamp --no-timestamp GFD_NO_TIMESTAMP", instead=_LABELER),
    _any("flags.gfd.sleepInterval --sleep-interval GFD_SLEEP_INTERVAL", instead=_LABELER),
    _text("flags.gfd.outputFile --output-file --output -o GFD_OUTPUT_FILE", instead=_LABELER),
    _text("flags.gfd.machineTypeFile --machine-type-file GFD_MACHINE_TYPE_FILE", instead=_LABELER),
    _text(
        "--kubelet-socket KUBELET_SOCKET",
        instead="set the kubelet's directory as kubelet.directory in muster's deployment",
        defaults=("/var/lib/kubelet/device-plugins/kubelet.sock",),
        is_lost=True,
    ),
    CONFIG_FILE,
    _text("--cdi-feature-flags CDI_FEATURE_FLAGS", instead=_CDI, defaults=("",), is_lost=True),
    _text("--cdi-disable-hooks CDI_DISABLE_HOOKS", instead=_CDI, defaults=("",), is_lost=True),
    _text(
        "NVIDIA_VISIBLE_DEVICES",
        instead="muster finds every GPU; exclude GPUs with gpus.exclude",
        defaults=("all", "void"),
        is_lost=True,
    ),
)
RESOURCE_CONFIG: Final = _text(
    "--resource-config NVIDIA_DRIVER_RESOURCE_CONFIG", "sharing.resources"
)
"""The iktos fork's setting, which has its own syntax."""
EVERY: Final = (*TABLE, RESOURCE_CONFIG)


def read_sharing(reader: base.Reader, value: object, ours: dict[str, object]) -> None:
    """Convert NVIDIA's section `sharing` to muster's keys in `ours`; MPS is rejected."""
    if value is None:
        return
    sharing = reader.mapping(value, "sharing", _SHARING)
    if sharing.get("mps") is not None:
        reader.reject("sharing.mps", MPS)
    if sharing.get("timeSlicing") is None:
        return
    path = "sharing.timeSlicing"
    section = reader.mapping(sharing["timeSlicing"], path, _SHARED)
    by_default = reader.flag(section.get("renameByDefault"), f"{path}.renameByDefault")
    if by_default:
        base.put(ours, "sharing.renameByDefault", by_default)
    key = "failRequestsGreaterThanOne"
    if reader.flag(section.get(key), f"{path}.{key}"):
        base.put(ours, "sharing.onePerRequest", True)  # noqa: FBT003  # it is the value itself
    items = reader.items(section.get("resources"), f"{path}.resources")
    if not items:
        reader.reject(f"{path}.resources", "no resources specified")
    if "sharing" in ours and "resources" in base.below(ours, "sharing"):
        reader.reject(f"{path}.resources", "the iktos fork's resource config sets the sharing too")
        return
    shared = [_replicated(reader, item, f"{path}.resources[{at}]") for at, item in enumerate(items)]
    base.put(ours, "sharing.resources", shared)


def read_resources(reader: base.Reader, value: object, ours: dict[str, object]) -> None:
    """Convert the names of GPUs and MIG devices; `ours` must already have the MIG strategy."""
    if value is None:
        return
    sections = reader.mapping(value, "resources", ("gpus", "mig"))
    namings: list[object] = []
    for section, key, default in (("gpus", "product", "*"), ("mig", "mig", None)):
        path = f"resources.{section}"
        items = reader.items(sections.get(section), path)
        for at, item in enumerate(items):
            entry = reader.mapping(item, f"{path}[{at}]", ("pattern", "name"))
            pattern = _glob(reader, entry.get("pattern"), f"{path}[{at}].pattern")
            name = _name(reader, entry.get("name"), f"{path}[{at}].name")
            if (pattern, name) != (default, gpus.DEFAULT_NAME):
                namings.append({"name": name, key: pattern})
        if items:
            reader.note_difference(
                path, f"{_DROPS}; a device that no pattern matches keeps its default name"
            )
            if section == "mig" and ours.get("migStrategy", "none") == "none":
                reader.note_difference(path, "it has no effect with migStrategy none; left out")
                namings = [
                    naming for naming in namings if isinstance(naming, dict) and "mig" not in naming
                ]
    if namings and "resources" in ours:
        reader.reject("resources", "the iktos fork's resource config sets names too")
    elif namings:
        ours["resources"] = namings


def _glob(reader: base.Reader, value: object, path: str) -> str:
    """Return the pattern of a product or a MIG profile (api/config/v1/resources.go, #1807)."""
    pattern = reader.text(value, path)
    if not pattern:
        reader.reject(path, "required but missing")
    elif not (pattern.startswith("*") and pattern.endswith("*")):
        reader.note_difference(path, f"{errors.quoted(pattern)}: {_WHOLE}")
    return pattern


def _replicated(reader: base.Reader, item: object, path: str) -> dict[str, object]:
    entry = reader.mapping(item, path, _REPLICATED)
    ours: dict[str, object] = {"name": _name(reader, entry.get("name"), f"{path}.name")}
    replicas = reader.whole(entry.get("replicas"), f"{path}.replicas")
    ours["replicas"] = replicas
    if not _REPLICAS_MIN <= replicas <= gpus.REPLICAS_MAX:
        problem = f"number of replicas must be >= {_REPLICAS_MIN}"
        reader.reject(f"{path}.replicas", f"{problem}, and for muster <= {gpus.REPLICAS_MAX}")
    if entry.get("rename"):
        ours["rename"] = _name(reader, entry["rename"], f"{path}.rename")
        reader.note_difference(f"{path}.rename", _DROPS)
    devices = entry.get("devices", "all")
    if devices != "all":
        ours["devices"] = _devices(reader, devices, f"{path}.devices")
        reader.note_difference(f"{path}.devices", _DROPS)
    return ours


def _devices(reader: base.Reader, value: object, path: str) -> object:
    """Return the number of shared devices, or a list of them, as NVIDIA's parser does."""
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
            gpu.parse_selector(item)
        except ValueError as error:
            reader.reject(f"{path}[{at}]", str(error))
    return value


def _name(reader: base.Reader, value: object, path: str) -> str:
    """Return a resource name with its domain (api/config/v1/resources.go, NewResourceName)."""
    text = reader.text(value, path)
    if not text:
        reader.reject(path, "required but missing")
        return gpus.DEFAULT_NAME
    prefix = f"{gpus.DOMAIN}/"
    name = text if text.startswith(prefix) else prefix + text
    if len(name) > _NAME_MAX:
        problem = f"must be {_NAME_MAX} characters or less"
        reader.reject(path, f"fully-qualified resource name {problem}: {errors.quoted(name)}")
    elif name != name.lower() or "_" in name:
        reader.reject(path, f"incorrect format for resource name {errors.quoted(name)}")
    else:
        for problem in advertised.name_problems(name):
            reader.reject(path, problem)
    return name
