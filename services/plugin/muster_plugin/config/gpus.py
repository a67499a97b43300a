"""Pure: the configuration of GPUs: names, sharing, container options, placement and health.

`importers.nvidia` converts the settings of NVIDIA's device plugin to these settings. A selector
(`model.gpu`) is the index of a GPU (`0` or "0"), the indexes of a GPU and its MIG device ("0:1"),
or a uuid ("GPU-...", "MIG-..."). In a pattern for a product's name, `*` matches anything. In a
file, keys are in camel case (`migStrategy`), except keys that end with a unit (`poll_s`).
"""

import enum
import itertools
import re
from collections.abc import Iterable, Iterator
from typing import Annotated, Final

import msgspec

from muster import vocabulary
from muster.service import sections
from muster_plugin.config import resources as config_resources
from muster_plugin.model import advertised, errors, gpu

DOMAIN: Final = "nvidia.com"
DEFAULT_NAME: Final = f"{DOMAIN}/gpu"
"""The resource of a GPU that no pattern matches."""
REPLICAS_MAX: Final = 1000
SHARED_SUFFIX: Final = ".shared"
"""The suffix that `rename_by_default` adds to a name (api/config/v1/consts.go, v0.20)."""

_PROFILE = re.compile(r"[0-9*][-0-9a-z.+*]*")
_UNIT: Final = "_s"

Selector = (
    Annotated[int, msgspec.Meta(ge=0, le=gpu.INDEX_MAX)]
    | Annotated[str, msgspec.Meta(min_length=1, max_length=128)]
)
Pattern = Annotated[str, msgspec.Meta(max_length=256)]
Path = Annotated[str, msgspec.Meta(min_length=1, max_length=4096)]


def key(field: str) -> str:
    """Return the key in a configuration file for a field of a section."""
    if field.endswith(_UNIT):
        return field
    first, *rest = field.split("_")
    return first + "".join(word.capitalize() for word in rest)


def _path_problems(field: str, path: str) -> Iterator[str]:
    # defined first: the defaults of Gpus are checked while this module loads
    if path not in {"", "/"}:
        yield from errors.prefixed(field, errors.path_problems(path))


class MigStrategy(enum.StrEnum):
    """How MIG devices are advertised: not at all, as GPUs if all are identical, or by profile."""

    NONE = "none"
    SINGLE = "single"
    MIXED = "mixed"


class DeviceList(enum.StrEnum):
    """How a container's GPUs are passed to the container runtime."""

    ENVVAR = "envvar"
    VOLUME_MOUNTS = "volume-mounts"
    CDI_ANNOTATIONS = "cdi-annotations"
    CDI_CRI = "cdi-cri"


class DeviceIds(enum.StrEnum):
    """How a GPU is identified to the container runtime: by UUID or by index."""

    UUID = "uuid"
    INDEX = "index"


class Placement(enum.StrEnum):
    """Which GPUs are preferred for a request.

    `aligned` prefers the best connected GPUs and spreads replicas. `distributed` spreads replicas
    over the GPUs, `packed` fills one GPU first, and `exclusive` spreads replicas and rejects a
    request for two replicas of one GPU.
    """

    ALIGNED = "aligned"
    DISTRIBUTED = "distributed"
    PACKED = "packed"
    EXCLUSIVE = "exclusive"


class Preset(enum.StrEnum):
    """Which XIDs make a GPU Unhealthy: those of NVIDIA's device plugin or NVIDIA's catalogue."""

    NVIDIA_COMPATIBLE = "nvidia-compatible"
    CATALOGUE = "catalogue"


class Naming(errors.Checked, frozen=True, kw_only=True, omit_defaults=True, rename=key):
    """The resource name for GPUs of a product, or for MIG devices of a profile.

    The first match applies; a device without a match keeps its default name.
    """

    name: vocabulary.Name
    product: Pattern = ""
    mig: Pattern = ""

    def problems(self) -> Iterator[str]:
        """Yield the problems of this section; a problem of one setting begins with its key."""
        yield from _name_problems("name", self.name)
        if bool(self.product) == bool(self.mig):
            yield "set either product (for GPUs) or mig (a profile)"
        if self.mig and not _PROFILE.fullmatch(self.mig):
            yield (
                f"mig: {errors.quoted(self.mig)} is not a profile; write it as 1g.10gb or "
                f"1g.10gb+me, with * as a wildcard"
            )
        if not self.product.isprintable():
            yield f"product: {errors.quoted(self.product)} is not a product name"


class Shared(errors.Checked, frozen=True, kw_only=True, omit_defaults=True, rename=key):
    """A shared resource: `replicas` of each device, or one per GB of memory.

    `devices` selects the shared devices: all, a number of them, or a list. The other devices are
    advertised unshared as `name`. With an empty `rename`, the shared devices are also advertised as
    `name`, or with the suffix `.shared` if `rename_by_default` is set.
    """

    name: vocabulary.Name
    replicas: Annotated[int, msgspec.Meta(ge=2, le=REPLICAS_MAX)] | None = None
    per_gb: bool = False
    rename: str = ""
    devices: Annotated[int, msgspec.Meta(ge=1, le=1024)] | tuple[Selector, ...] | None = None

    @property
    def listed_devices(self) -> tuple[int | str, ...]:
        """The selectors of the entry's devices; empty if the entry does not list devices."""
        return self.devices if isinstance(self.devices, tuple) else ()

    def problems(self) -> Iterator[str]:
        """Yield the problems of this section; a problem of one setting begins with its key."""
        yield from _name_problems("name", self.name)
        if self.rename:
            yield from _name_problems("rename", self.rename)
        if (self.replicas is None) != self.per_gb:
            yield "set either replicas or perGb: true"
        if self.devices == ():
            yield "devices: the list is empty; leave the key out to share all devices"
        yield from (f"devices{problem}" for problem in gpu.selector_problems(self.listed_devices))


class Sharing(errors.Checked, frozen=True, kw_only=True, omit_defaults=True, rename=key):
    """The settings of time-slicing.

    If several entries have the same name, each device is shared by at most one of them.
    """

    resources: Annotated[tuple[Shared, ...], msgspec.Meta(max_length=256)] = ()
    rename_by_default: bool = False
    one_per_request: bool = False
    """Whether to refuse a container that requests several replicas (failRequestsGreaterThanOne)."""

    def advertised_name(self, shared: Shared) -> str:
        """Return the name under which an entry's devices are advertised."""
        by_default = shared.name + SHARED_SUFFIX if self.rename_by_default else shared.name
        return shared.rename or by_default

    def possible_names(self, name: str) -> tuple[str, ...]:
        """Return every name under which devices with this original name may be advertised."""
        of_it = [shared for shared in self.resources if shared.name == name]
        kept = () if any(shared.devices is None for shared in of_it) else (name,)
        return tuple(dict.fromkeys([*kept, *map(self.advertised_name, of_it)]))

    def problems(self) -> Iterator[str]:
        """Yield the problems of this section; a problem of one setting begins with its key."""
        for at, shared in enumerate(self.resources):
            if self.rename_by_default and not shared.rename:
                yield from _name_problems(f"resources[{at}].name", shared.name + SHARED_SUFFIX)
            for before, later in enumerate(self.resources[:at]):
                if later.name == shared.name and later.devices is None:
                    yield f"resources[{at}]: resources[{before}] already shares all {shared.name}"
                    break
        for (before, earlier), (at, later) in itertools.combinations(enumerate(self.resources), 2):
            if earlier.name == later.name:
                yield from (
                    f"resources[{at}].devices: {errors.quoted(selector)} is already shared by "
                    f"resources[{before}]"
                    for selector in _overlapping(earlier.listed_devices, later.listed_devices)
                )


class Imex(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, rename=key):
    """The IMEX channels of containers; NVIDIA allows either no channel or channel 0."""

    channels: tuple[int, ...] = ()
    required: bool = False

    def __post_init__(self) -> None:
        """Refuse the values that NVIDIA refuses (api/config/v1/imex.go, v0.20)."""
        if self.channels not in {(), (0,)}:
            raise ValueError(f"channels: {errors.quoted([*self.channels])} is neither [] nor [0]")


class ContainerOptions(errors.Checked, frozen=True, kw_only=True, omit_defaults=True, rename=key):
    """The options for containers with GPUs. An empty `dev_root` means the driver root."""

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

    def problems(self) -> Iterator[str]:
        """Yield the problems of this section; a problem of one setting begins with its key."""
        for repeated in errors.duplicates([*self.device_list]):
            yield f"deviceList: {repeated} is listed twice"
        for name, path in [
            ("driverRoot", self.driver_root),
            ("devRoot", self.dev_root),
            ("cdiHook", self.cdi_hook),
        ]:
            yield from _path_problems(name, path)


class Health(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, rename=key):
    """How the health of GPUs is evaluated. `policy` is a file that overrides the preset.

    `disable` and `enable` are NVIDIA's DP_DISABLE_HEALTHCHECKS and DP_ENABLE_HEALTHCHECKS. A GPU is
    Healthy again at the earliest after `good` good polls and `cooldown_s` without a new fault.
    """

    preset: Preset = Preset.NVIDIA_COMPATIBLE
    policy: str = ""
    disable: str = ""
    enable: str = ""
    poll_s: sections.Period = 10.0
    good: Annotated[int, msgspec.Meta(ge=1, le=100)] = 3
    cooldown_s: Annotated[float, msgspec.Meta(ge=0, le=86_400)] = 60.0

    def __post_init__(self) -> None:
        """Refuse an invalid path."""
        errors.raise_if_any(_path_problems("policy", self.policy))


class Gpus(errors.Checked, frozen=True, kw_only=True, omit_defaults=True, rename=key):
    """The NVIDIA GPUs of a node, advertised as `nvidia.com/gpu` unless `resources` names them.

    `library` is the path of libnvidia-ml.so.1, needed if it is neither below the driver root nor
    found by the loader. `expect` is the minimum number of GPUs or MIG devices, not replicas, of
    each resource. `grace_s` and `registration` mean the same as for device nodes.
    """

    mig_strategy: MigStrategy = MigStrategy.NONE
    exclude: Annotated[tuple[Selector, ...], msgspec.Meta(max_length=256)] = ()
    resources: Annotated[tuple[Naming, ...], msgspec.Meta(max_length=256)] = ()
    sharing: Sharing = Sharing()
    given: ContainerOptions = ContainerOptions()
    placement: Placement = Placement.ALIGNED
    health: Health = Health()
    expect: config_resources.Expect | None = None
    grace_s: config_resources.GracePeriod = 60.0
    registration: config_resources.Registration = config_resources.Registration.REGISTER
    library: str = ""

    def always_advertised(self) -> tuple[str, ...]:
        """Return the resources that are advertised even without devices."""
        whole = [naming.name for naming in self.resources if naming.product] or [DEFAULT_NAME]
        parts = [naming.name for naming in self.resources if naming.mig]
        return _flat(map(self.sharing.possible_names, [*whole, *parts]))

    def names(self) -> tuple[str, ...]:
        """Return all resources that may exist, except those named after a MIG profile."""
        renamed = [self.sharing.advertised_name(shared) for shared in self.sharing.resources]
        usual = () if self._all_named() else self.sharing.possible_names(DEFAULT_NAME)
        return _flat([self.always_advertised(), usual, renamed])

    def _all_named(self) -> bool:
        """Return whether patterns name every device, so that none gets the default name."""
        products = any(naming.product == gpu.ANYTHING for naming in self.resources)
        parts = any(naming.mig == gpu.ANYTHING for naming in self.resources)
        return products and (parts or self.mig_strategy is not MigStrategy.SINGLE)

    def problems(self) -> Iterator[str]:
        """Yield the problems of this section; a problem of one setting begins with its key."""
        yield from (
            f"exclude{problem}" for problem in gpu.selector_problems(self.exclude, products=True)
        )
        for at, naming in enumerate(self.resources):
            if naming.mig and self.mig_strategy is MigStrategy.NONE:
                yield f"resources[{at}].mig: with migStrategy none only whole GPUs are advertised"
            for before, other in enumerate(self.resources[:at]):
                if _matches_all(other, naming):
                    pattern = naming.product or naming.mig
                    yield (
                        f"resources[{at}]: resources[{before}] matches everything that "
                        f"{errors.quoted(pattern)} matches; put the narrower pattern first"
                    )
                    break
        yield from _path_problems("library", self.library)


def _name_problems(field: str, name: str) -> Iterator[str]:
    if "/" not in name:
        yield f"{field}: {errors.quoted(name)} has no domain; write it as {DOMAIN}/{name[:63]}"
        return
    yield from errors.prefixed(field, advertised.name_problems(name))


def _matches_all(earlier: Naming, later: Naming) -> bool:
    if earlier.product and later.product:
        return gpu.matches_pattern(earlier.product, later.product)
    return bool(earlier.mig and later.mig) and gpu.matches_pattern(earlier.mig, later.mig)


def _overlapping(earlier: Iterable[int | str], later: Iterable[int | str]) -> Iterator[int | str]:
    selectors_before = [gpu.parse_selector(text) for text in earlier]
    for text in later:
        meant = gpu.parse_selector(text)
        if any(gpu.includes(b, meant) or gpu.includes(meant, b) for b in selectors_before):
            yield text


def _flat(lists: Iterable[Iterable[str]]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(itertools.chain.from_iterable(lists)))
