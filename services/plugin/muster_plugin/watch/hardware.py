"""Pure: which hardware should be offered by a plugin, from what is on the PCI bus.

Only accelerators with the vendor's driver count: a GPU that is passed through to a virtual machine
has another driver, and nearly every network card could do RDMA or SR-IOV without anybody wanting a
resource of it. Vendors, classes: pci-ids.ucw.cz; drivers: their sources.
"""

import collections
from collections.abc import Iterable
from typing import Final, NamedTuple

import msgspec

_DISPLAY, _DISPLAY_3D, _DISPLAY_OTHER, _ACCELERATOR = 0x0300, 0x0302, 0x0380, 0x1200


class PciDevice(msgspec.Struct, frozen=True):
    """A device on the PCI bus; `kind` is its class without the interface."""

    vendor: int
    kind: int
    driver: str


class _Accelerator(NamedTuple):
    """What a plugin offers as `resource`, by vendor, classes and driver."""

    resource: str
    name: str
    vendor: int
    kinds: frozenset[int]
    driver: str


_ACCELERATORS: Final = (
    _Accelerator(
        "nvidia.com/gpu", "NVIDIA GPU", 0x10DE, frozenset({_DISPLAY, _DISPLAY_3D}), "nvidia"
    ),
    # a class of its own keeps the GPUs of desktop processors out
    _Accelerator(
        "amd.com/gpu",
        "AMD GPU",
        0x1002,
        frozenset({_DISPLAY_3D, _DISPLAY_OTHER, _ACCELERATOR}),
        "amdgpu",
    ),
    _Accelerator("habana.ai/gaudi", "Gaudi", 0x1DA3, frozenset({_ACCELERATOR}), "habanalabs"),
)


def offered_as(devices: Iterable[PciDevice]) -> dict[str, str]:
    """Return the resource that should offer hardware of this node, with the hardware in words."""
    counts: collections.Counter[_Accelerator] = collections.Counter()
    for device in devices:
        for known in _ACCELERATORS:
            if device.vendor == known.vendor and device.kind in known.kinds:
                counts[known] += device.driver == known.driver
    return {
        known.resource: (
            f"{count} {known.name}s on the PCI bus with the driver {known.driver}, "
            "and nothing on the node has offered them"
        )
        for known, count in counts.items()
        if count
    }
