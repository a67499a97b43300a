"""Pure: decides which hardware on the PCI bus a plugin should offer.

Only accelerators with the vendor's driver count. A GPU that is passed through to a virtual machine
has another driver, and nearly every network card supports RDMA or SR-IOV, but few are meant to be
offered. Vendors, classes: pci-ids.ucw.cz; drivers: their sources.
"""

import collections
from collections.abc import Iterable
from typing import Final, NamedTuple

import msgspec

_DISPLAY, _DISPLAY_3D, _DISPLAY_OTHER, _ACCELERATOR = 0x0300, 0x0302, 0x0380, 0x1200


class PciDevice(msgspec.Struct, frozen=True):
    """A device on the PCI bus; `kind` is its class code without the programming interface."""

    vendor: int
    kind: int
    driver: str


class _Accelerator(NamedTuple):
    """Hardware that a plugin offers as `resource`, identified by vendor, classes and driver."""

    resource: str
    name: str
    vendor: int
    kinds: frozenset[int]
    driver: str


_ACCELERATORS: Final = (
    _Accelerator(
        "nvidia.com/gpu", "NVIDIA GPU", 0x10DE, frozenset({_DISPLAY, _DISPLAY_3D}), "nvidia"
    ),
    # without the class of VGA controllers, because integrated GPUs have it
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
    """Return descriptions of the node's hardware, by the resource that should offer it."""
    counts: collections.Counter[_Accelerator] = collections.Counter()
    for device in devices:
        for known in _ACCELERATORS:
            if device.vendor == known.vendor and device.kind in known.kinds:
                counts[known] += device.driver == known.driver
    return {
        known.resource: (
            f"{known.name}: {count} on the PCI bus with the driver {known.driver}, "
            "but no plugin on the node has offered any"
        )
        for known, count in counts.items()
        if count
    }
