"""Pure: every flag, variable and key of NVIDIA's k8s-device-plugin (v0.20), and our key for it.

Sources: cmd/nvidia-device-plugin/main.go, cmd/gpu-feature-discovery/main.go and api/config/v1; for
the iktos fork: its cmd/nvidia-device-plugin/main.go. docs/compatibility.md shows the table.
"""

import enum
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
    """One setting: its names there, our path below `gpus`, or what muster does instead.

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


_LABELER: Final = "the labeler sets the labels, and needs no such setting"
_CDI: Final = "muster writes no CDI spec for GPUs; give the option to nvidia-ctk cdi generate"

TABLE: Final = (
    Setting(
        key="flags.migStrategy",
        flags=("--mig-strategy",),
        variables=("MIG_STRATEGY", "GFD_MIG_STRATEGY"),
        ours="migStrategy",
        values=_same("none", "single", "mixed"),
        refusal="unknown MIG strategy",
    ),
    Setting(
        key="flags.failOnInitError",
        flags=("--fail-on-init-error",),
        variables=("FAIL_ON_INIT_ERROR", "GFD_FAIL_ON_INIT_ERROR"),
        kind=Kind.FLAG,
        instead="without a driver muster reports that, advertises 0 and starts once there is one",
    ),
    Setting(
        key="flags.nvidiaDriverRoot",
        flags=("--driver-root", "--nvidia-driver-root"),
        variables=("NVIDIA_DRIVER_ROOT",),
        ours="given.driverRoot",
    ),
    Setting(
        key="flags.nvidiaDevRoot",
        flags=("--dev-root", "--nvidia-dev-root"),
        variables=("NVIDIA_DEV_ROOT",),
        ours="given.devRoot",
    ),
    Setting(
        key="flags.gdrcopyEnabled",
        flags=("--gdrcopy-enabled",),
        variables=("GDRCOPY_ENABLED",),
        kind=Kind.FLAG,
        ours="given.gdrcopy",
    ),
    Setting(
        key="flags.gdsEnabled",
        flags=("--gds-enabled",),
        variables=("GDS_ENABLED",),
        kind=Kind.FLAG,
        ours="given.gds",
    ),
    Setting(
        key="flags.mofedEnabled",
        flags=("--mofed-enabled",),
        variables=("MOFED_ENABLED",),
        kind=Kind.FLAG,
        ours="given.mofed",
    ),
    Setting(
        key="flags.plugin.passDeviceSpecs",
        flags=("--pass-device-specs",),
        variables=("PASS_DEVICE_SPECS",),
        kind=Kind.FLAG,
        ours="given.deviceSpecs",
    ),
    Setting(
        key="flags.plugin.deviceListStrategy",
        flags=("--device-list-strategy",),
        variables=("DEVICE_LIST_STRATEGY",),
        kind=Kind.LIST,
        ours="given.deviceList",
        defaults=(["envvar"],),
        values=_same("envvar", "volume-mounts", "cdi-annotations", "cdi-cri"),
        refusal="invalid --device-list-strategy option",
    ),
    Setting(
        key="flags.plugin.deviceIDStrategy",
        flags=("--device-id-strategy",),
        variables=("DEVICE_ID_STRATEGY",),
        ours="given.deviceIds",
        values=_same("uuid", "index"),
        refusal="invalid --device-id-strategy option",
    ),
    Setting(
        key="flags.plugin.cdiAnnotationPrefix",
        flags=("--cdi-annotation-prefix",),
        variables=("CDI_ANNOTATION_PREFIX",),
        ours="given.cdiAnnotationPrefix",
    ),
    Setting(
        key="flags.plugin.nvidiaCTKPath",
        flags=("--nvidia-cdi-hook-path", "--nvidia-ctk-path"),
        variables=("NVIDIA_CDI_HOOK_PATH", "NVIDIA_CTK_PATH"),
        ours="given.cdiHook",
    ),
    Setting(
        key="flags.plugin.containerDriverRoot",
        flags=("--driver-root-ctr-path", "--container-driver-root"),
        variables=("DRIVER_ROOT_CTR_PATH", "CONTAINER_DRIVER_ROOT"),
        defaults=("/driver-root",),
        instead="mount the driver root at /driver-root, or name the library in gpus.library",
    ),
    Setting(
        key="flags.plugin.sharedDevicesAllocationPolicy",
        flags=("--shared-devices-allocation-policy",),
        variables=("SHARED_DEVICES_ALLOCATION_POLICY",),
        ours="placement",
        values={"distributed": "aligned", "packed": "packed"},
        refusal="invalid --shared-devices-allocation-policy option",
    ),
    Setting(
        key="flags.deviceDiscoveryStrategy",
        flags=("--device-discovery-strategy",),
        variables=("DEVICE_DISCOVERY_STRATEGY",),
        defaults=("auto", "nvml"),
        instead="muster finds GPUs through NVML only; it finds neither Tegra nor VFIO devices",
    ),
    Setting(
        key="imex.channelIDs",
        flags=("--imex-channel-ids",),
        variables=("IMEX_CHANNEL_IDS",),
        kind=Kind.NUMBERS,
        ours="given.imex.channels",
    ),
    Setting(
        key="imex.required",
        flags=("--imex-required",),
        variables=("IMEX_REQUIRED",),
        kind=Kind.FLAG,
        ours="given.imex.required",
    ),
    Setting(variables=("DP_DISABLE_HEALTHCHECKS",), ours="health.disable"),
    Setting(variables=("DP_ENABLE_HEALTHCHECKS",), ours="health.enable"),
    Setting(
        key="flags.mpsRoot",
        flags=("--mps-root",),
        variables=("MPS_ROOT",),
        instead="muster does not support MPS",
    ),
    Setting(
        key="flags.useNodeFeatureAPI",
        flags=("--use-node-feature-api",),
        variables=("USE_NODE_FEATURE_API", "GFD_USE_NODE_FEATURE_API"),
        kind=Kind.FLAG,
        instead=_LABELER,
    ),
    Setting(
        key="flags.gfd.oneshot",
        flags=("--oneshot",),
        variables=("GFD_ONESHOT",),
        kind=Kind.FLAG,
        instead=_LABELER,
    ),
    Setting(
        key="flags.gfd.noTimestamp",
        flags=("--no-timestamp",),
        variables=("GFD_NO_TIMESTAMP",),
        kind=Kind.FLAG,
        instead=_LABELER,
    ),
    Setting(
        key="flags.gfd.sleepInterval",
        flags=("--sleep-interval",),
        variables=("GFD_SLEEP_INTERVAL",),
        kind=Kind.ANY,
        instead=_LABELER,
    ),
    Setting(
        key="flags.gfd.outputFile",
        flags=("--output-file", "--output", "-o"),
        variables=("GFD_OUTPUT_FILE",),
        instead=_LABELER,
    ),
    Setting(
        key="flags.gfd.machineTypeFile",
        flags=("--machine-type-file",),
        variables=("GFD_MACHINE_TYPE_FILE",),
        instead=_LABELER,
    ),
    Setting(
        flags=("--kubelet-socket",),
        variables=("KUBELET_SOCKET",),
        instead="the kubelet's directory is kubelet.directory, where muster is deployed",
    ),
    Setting(
        flags=("--config-file",),
        variables=("CONFIG_FILE", "GFD_CONFIG_FILE"),
        instead="import that file too; this one takes precedence",
    ),
    Setting(flags=("--cdi-feature-flags",), variables=("CDI_FEATURE_FLAGS",), instead=_CDI),
    Setting(flags=("--cdi-disable-hooks",), variables=("CDI_DISABLE_HOOKS",), instead=_CDI),
    Setting(
        variables=("NVIDIA_VISIBLE_DEVICES",),
        defaults=("all",),
        instead="muster finds every GPU; leave some out with gpus.exclude",
    ),
)
RESOURCE_CONFIG: Final = Setting(
    flags=("--resource-config",),
    variables=("NVIDIA_DRIVER_RESOURCE_CONFIG",),
    ours="sharing.resources",
)
"""The iktos fork's, with a syntax of its own."""
EVERY: Final = (*TABLE, RESOURCE_CONFIG)
