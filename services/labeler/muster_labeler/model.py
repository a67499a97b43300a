"""Pure: the labeler's model of nodes, pods, Kubernetes Events and ResourceSlices."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Final

FIELD_MANAGER: Final = "muster-labeler"
"""The field manager of both the service and the commands, so that each may change all labels."""
PROVENANCE: Final = "muster.dev/label-provenance"
VGPU_LABEL: Final = "nvidia.com/vgpu.present"
CONDITION: Final = "DevicePluginHealthy"
DIRECTX: Final = "microsoft.com/directx"
"""A resource that the Cluster Autoscaler counts as a GPU, but muster does not."""
FUSE_ANNOTATION: Final = "fuse.muster.dev/device"

_ACCELERATORS: Final = re.compile(
    r"nvidia\.com/(gpu(\.shared)?|mig-[-a-z0-9.]+)|amd\.com/gpu|gpu\.intel\.com/(i915|xe)"
    r"|habana\.ai/gaudi|google\.com/tpu"
)
"""Resources that show that a node has accelerators; `*_monitoring` only allows monitoring."""
_PARTS: Final = "nvidia.com/mig-"
_PCI: Final = re.compile(
    r"feature\.node\.kubernetes\.io/pci-((03|12|0b40)[0-9a-f]*_)?(10de|1002)\.present"
)
"""Labels of NVIDIA's and AMD's PCI devices, with or without class (NFD, deviceLabelFields)."""
_FUSE: Final = re.compile(r"[-a-z0-9.]+/fuse([-_.][-A-Za-z0-9_.]*)?")


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """A node: its labels and their owners, its resources and its runtime.

    `owners` are the field managers of each accelerator label that muster may write; `our_labels`
    are all labels that muster owns; `labelled_from` is the source and product in their provenance.
    `ready_since` is None while the node is not Ready. `is_selected` means that the policy's
    selector matches.
    """

    name: str
    uid: str = ""
    version: str = ""
    labels: Mapping[str, str] = field(default_factory=dict)
    owners: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    our_labels: Mapping[str, str] = field(default_factory=dict)
    labelled_from: tuple[str, str] = ("", "")
    created: datetime | None = None
    has_condition: bool = False
    is_selected: bool = True
    capacity: Mapping[str, int] = field(default_factory=dict)
    allocatable: Mapping[str, int] = field(default_factory=dict)
    ready_since: datetime | None = None
    runtime: str = ""
    kubelet: str = ""
    kernel: str = ""
    provider_id: str = ""

    @property
    def accelerators(self) -> frozenset[str]:
        """Return the node's accelerator resources, whatever their count."""
        names = self.capacity.keys() | self.allocatable.keys()
        return frozenset(name for name in names if _ACCELERATORS.fullmatch(name))

    @property
    def fuse(self) -> dict[str, int]:
        """Return the node's fuse resources, and how many of each are allocatable."""
        names = self.capacity.keys() | self.allocatable.keys()
        return {name: self.allocatable.get(name, 0) for name in sorted(names) if is_fuse(name)}

    @property
    def has_accelerators(self) -> bool:
        """Return whether resources or PCI labels show accelerators.

        A resource at 0 of 0 does not count: it remains on a node after its plugin is removed.
        """
        is_counted = any(
            self.capacity.get(name, 0) or self.allocatable.get(name, 0)
            for name in self.accelerators
        )
        return is_counted or any(_PCI.fullmatch(key) for key in self.labels)

    @property
    def may_have_accelerators(self) -> bool:
        """Return whether the node has accelerators, or had them earlier."""
        return bool(self.accelerators) or self.has_accelerators

    @property
    def has_partitions(self) -> bool:
        """Return whether the node offers parts of GPUs (MIG strategy `mixed`)."""
        return any(count and name.startswith(_PARTS) for name, count in self.capacity.items())

    @property
    def is_virtual(self) -> bool:
        """Return whether GPU feature discovery reports that the node's GPUs are virtual."""
        return self.labels.get(VGPU_LABEL) == "true"

    @property
    def is_written(self) -> bool:
        """Return whether the node has labels of muster, or at least their provenance."""
        return bool(self.our_labels) or self.labelled_from != ("", "")

    def is_ours_alone(self, key: str) -> bool:
        """Return whether muster is the only owner of a label."""
        return key in self.our_labels and self.owners.get(key) == (FIELD_MANAGER,)

    @property
    def usable(self) -> int:
        """Return how many accelerators are allocatable."""
        return sum(self.allocatable.get(name, 0) for name in self.accelerators)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pod:
    """A pod that uses fuse, or that provides devices to pods.

    `is_agent` means that it is a device plugin, `is_nri` that it adds devices to annotated pods.
    `messages` are those messages of its conditions and containers that mention fuse.
    """

    namespace: str
    name: str
    node: str
    phase: str
    annotations: Mapping[str, str]
    requests: tuple[str, ...]
    is_agent: bool
    is_nri: bool
    is_ready: bool
    started: datetime | None
    messages: tuple[str, ...]

    @property
    def is_annotated(self) -> bool:
        """Return whether the pod requests fuse by annotation."""
        return any(
            (key == FUSE_ANNOTATION or key.startswith(f"{FUSE_ANNOTATION}.container."))
            and value == "true"
            for key, value in self.annotations.items()
        )


@dataclass(frozen=True, slots=True)
class KubernetesEvent:
    """A Kubernetes Event: its object, reason and text."""

    kind: str
    namespace: str
    name: str
    reason: str
    text: str


@dataclass(frozen=True, slots=True)
class ResourceSlice:
    """A DRA ResourceSlice.

    `products` has the product, its memory in MiB, and whether it is a part of a GPU, for each
    device whose product is known.
    """

    node: str
    driver: str
    products: tuple[tuple[str, int | None, bool], ...]
    devices: tuple[str, ...]


def is_accelerator(resource: str) -> bool:
    """Return whether a resource shows that a node has accelerators."""
    return _ACCELERATORS.fullmatch(resource) is not None


def is_pci_label(key: str) -> bool:
    """Return whether a label shows that a node has NVIDIA or AMD hardware."""
    return _PCI.fullmatch(key) is not None


def is_fuse(resource: str) -> bool:
    """Return whether an extended resource represents /dev/fuse."""
    return _FUSE.fullmatch(resource) is not None
