"""Pure. The configuration of GPUs: what they are called, how shared, given, placed and judged.

What NVIDIA's device plugin can be told can be told here; `imports.nvidia` translates. A reference
names devices: `0` or "0" a GPU by its index, "0:1" a MIG device by both, "GPU-..." and "MIG-..." by
uuid, and where a pattern is taken, `*` stands for anything in a product's name.
"""

import enum
from collections.abc import Iterator
from typing import Annotated, Final

import msgspec

from muster import sections, vocabulary
from muster_plugin import names, refusals, rules

DOMAIN: Final = "nvidia.com"
REPLICAS_MAX: Final = 1000

Reference = (
    Annotated[int, msgspec.Meta(ge=0, le=1023)]
    | Annotated[str, msgspec.Meta(min_length=1, max_length=128)]
)
Pattern = Annotated[str, msgspec.Meta(min_length=1, max_length=256)]
Path = Annotated[str, msgspec.Meta(min_length=1, max_length=4096)]


class MigStrategy(enum.StrEnum):
    """Whole GPUs only; MIG devices as `gpu`, all alike; or each profile as its own resource."""

    NONE = "none"
    SINGLE = "single"
    MIXED = "mixed"


class DeviceList(enum.StrEnum):
    """How the container runtime is told which GPUs a container gets."""

    ENVVAR = "envvar"
    VOLUME_MOUNTS = "volume-mounts"
    CDI_ANNOTATIONS = "cdi-annotations"
    CDI_CRI = "cdi-cri"


class DeviceIds(enum.StrEnum):
    """What GPUs are called towards the container runtime."""

    UUID = "uuid"
    INDEX = "index"


class Placement(enum.StrEnum):
    """Which GPUs are advised for a request.

    `aligned` takes those best joined, and spreads replicas; `exclusive` spreads them and refuses
    two of one GPU in one request.
    """

    ALIGNED = "aligned"
    DISTRIBUTED = "distributed"
    PACKED = "packed"
    EXCLUSIVE = "exclusive"


class Preset(enum.StrEnum):
    """Which XIDs take a GPU out of use: NVIDIA's plugin's choice, or NVIDIA's catalogue's."""

    NVIDIA_COMPATIBLE = "nvidia-compatible"
    CATALOGUE = "catalogue"


class Naming(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """GPUs whose product, or MIG devices whose profile, matches are this resource."""

    name: vocabulary.Name
    product: Pattern = ""
    mig: Pattern = ""


class Shared(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A resource that several pods may hold: `replicas` of each device, or one per GB of memory.

    `devices` are how many of them, or which, or all; the others keep the name `name`, unshared.
    An empty `rename` keeps the name too.
    """

    name: vocabulary.Name
    replicas: Annotated[int, msgspec.Meta(ge=2, le=REPLICAS_MAX)] | None = None
    per_gb: bool = False
    rename: str = ""
    devices: Annotated[int, msgspec.Meta(ge=1, le=1024)] | tuple[Reference, ...] | None = None


class Sharing(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Time-slicing."""

    resources: Annotated[tuple[Shared, ...], msgspec.Meta(max_length=256)] = ()
    rename_by_default: bool = False
    one_per_request: bool = False
    """Refuse a container that asks for more than one replica (failRequestsGreaterThanOne)."""


class Imex(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """IMEX channels; NVIDIA allows none or channel 0."""

    channels: tuple[int, ...] = ()
    required: bool = False


class Given(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a container is given with its GPUs. An empty `dev_root` is the driver root."""

    device_list: Annotated[tuple[DeviceList, ...], msgspec.Meta(min_length=1)] = (
        DeviceList.ENVVAR,
    )
    device_ids: DeviceIds = DeviceIds.UUID
    device_specs: bool = False
    driver_root: Path = "/"
    dev_root: str = ""
    cdi_annotation_prefix: Path = "cdi.k8s.io/"
    cdi_hook: Path = "/usr/bin/nvidia-ctk"
    gdrcopy: bool = False
    gds: bool = False
    mofed: bool = False
    imex: Imex = Imex()


class Health(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How GPUs are judged. `policy` is a file that overrides the preset, XID by XID.

    `disable` and `enable` are NVIDIA's DP_DISABLE_HEALTHCHECKS and DP_ENABLE_HEALTHCHECKS. A GPU is
    Healthy again after `good` good polls and `cooldown_s` without a new fault.
    """

    preset: Preset = Preset.NVIDIA_COMPATIBLE
    policy: str = ""
    disable: str = ""
    enable: str = ""
    poll_s: sections.Period = 10.0
    good: Annotated[int, msgspec.Meta(ge=1, le=100)] = 3
    cooldown_s: Annotated[float, msgspec.Meta(ge=0, le=86_400)] = 60.0


class Gpus(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Everything about the NVIDIA GPUs of a node; with no resources they are `nvidia.com/gpu`.

    `library` is the path of libnvidia-ml.so.1, where it is neither below the driver root nor known
    to the loader. Others are as for any resource.
    """

    mig_strategy: MigStrategy = MigStrategy.NONE
    exclude: Annotated[tuple[Reference, ...], msgspec.Meta(max_length=256)] = ()
    resources: Annotated[tuple[Naming, ...], msgspec.Meta(max_length=256)] = ()
    sharing: Sharing = Sharing()
    given: Given = Given()
    placement: Placement = Placement.ALIGNED
    health: Health = Health()
    expect: rules.Expect | None = None
    grace_s: rules.GracePeriod = 60.0
    registration: rules.Registration = rules.Registration.REGISTER
    library: str = ""

    def __post_init__(self) -> None:
        """Refuse what the kubelet would refuse, or what cannot be meant."""
        refusals.refuse(self._problems())

    def _problems(self) -> Iterator[str]:
        for at, naming in enumerate(self.resources):
            yield from refusals.under(f"resources[{at}].name", names.problems(naming.name))
