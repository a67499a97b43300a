"""Pure: every flag, variable and key of NVIDIA's k8s-device-plugin (v0.20), and our key for it.

Sources: cmd/nvidia-device-plugin/main.go, cmd/gpu-feature-discovery/main.go and api/config/v1; for
the iktos fork: its cmd/nvidia-device-plugin/main.go. docs/compatibility.md shows the table.
"""

import enum
import functools
from collections.abc import Mapping
from typing import Final

import msgspec

_ANY_VALUE: Final[Mapping[str, str]] = {}


class Kind(enum.StrEnum):
    """The type of a value."""

    FLAG = "flag"
    TEXT = "text"
    LIST = "list"
    NUMBERS = "numbers"
    ANY = "any"


class Setting(msgspec.Struct, frozen=True, kw_only=True):
    """One NVIDIA setting: its names, our path below `gpus`, or what muster does instead.

    `values` maps all that NVIDIA accepts to ours; `refusal` is its text for others. `defaults` are
    values that change nothing, and so are not reported.
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


def _same(*values: str) -> dict[str, str]:
    return {value: value for value in values}


def _setting(
    kind: Kind,
    names: str,
    ours: str = "",
    *,
    instead: str = "",
    values: Mapping[str, str] = _ANY_VALUE,
    refusal: str = "",
    defaults: tuple[object, ...] = (),
) -> Setting:
    """Return a setting; `names` are its key in the file, its flags and its variables."""
    words = names.split()
    return Setting(
        key=next((word for word in words if "." in word), ""),
        flags=tuple(word for word in words if word.startswith("-")),
        variables=tuple(word for word in words if word.isupper() and not word.startswith("-")),
        kind=kind,
        ours=ours,
        instead=instead,
        values=values,
        refusal=refusal,
        defaults=defaults,
    )


_flag: Final = functools.partial(_setting, Kind.FLAG)
_text: Final = functools.partial(_setting, Kind.TEXT)
_list: Final = functools.partial(_setting, Kind.LIST)
_numbers: Final = functools.partial(_setting, Kind.NUMBERS)
_any: Final = functools.partial(_setting, Kind.ANY)

_LABELER: Final = "the labeler sets the labels, and needs no such setting"
_CDI: Final = "muster writes no CDI spec for GPUs; give the option to nvidia-ctk cdi generate"

TABLE: Final = (
    _text(
        "flags.migStrategy --mig-strategy MIG_STRATEGY GFD_MIG_STRATEGY",
        "migStrategy",
        values=_same("none", "single", "mixed"),
        refusal="unknown MIG strategy",
    ),
    _flag(
        "flags.failOnInitError --fail-on-init-error FAIL_ON_INIT_ERROR GFD_FAIL_ON_INIT_ERROR",
        instead="without a driver muster reports that, advertises 0 and starts once there is one",
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
        instead="the kubelet's directory is kubelet.directory, where muster is deployed",
    ),
    _text(
        "--config-file CONFIG_FILE GFD_CONFIG_FILE",
        instead="import that file too; this one takes precedence",
    ),
    _text("--cdi-feature-flags CDI_FEATURE_FLAGS", instead=_CDI),
    _text("--cdi-disable-hooks CDI_DISABLE_HOOKS", instead=_CDI),
    _text(
        "NVIDIA_VISIBLE_DEVICES",
        instead="muster finds every GPU; leave some out with gpus.exclude",
        defaults=("all",),
    ),
)
RESOURCE_CONFIG: Final = _text(
    "--resource-config NVIDIA_DRIVER_RESOURCE_CONFIG", "sharing.resources"
)
"""The iktos fork's, with a syntax of its own."""
EVERY: Final = (*TABLE, RESOURCE_CONFIG)
