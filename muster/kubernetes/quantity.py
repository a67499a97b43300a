"""Pure: quantities of resources, and devices of ResourceSlices, as Kubernetes writes them: `8`, `500m`, `16Gi`, `1e3`.

Source: apimachinery pkg/api/resource, quantity.go and suffix.go.
"""

import re
from collections.abc import Mapping
from fractions import Fraction
from typing import Final

from muster.kubernetes import objects

_SUFFIXES: Final[Mapping[str, Fraction]] = {
    "": Fraction(1),
    **{name: Fraction(1000) ** power for power, name in enumerate(("n", "u", "m"), -3)},
    **{name: Fraction(1000) ** power for power, name in enumerate("kMGTPE", 1)},
    **{f"{name}i": Fraction(1024) ** power for power, name in enumerate("KMGTPE", 1)},
}
_QUANTITY: Final = re.compile(
    r"([+-]?(?:[0-9]{1,24}(?:\.[0-9]{0,24})?|\.[0-9]{1,24}))(?:[eE]([+-]?[0-9]{1,2})|(\w{0,2}))"
)


class DeviceAttribute(objects.Object, frozen=True):
    """An attribute of a DRA device, if it is text."""

    string: str | None = None


class DeviceCapacity(objects.Object, frozen=True):
    """A quantity."""

    value: str = ""


class SliceDevice(objects.Object, frozen=True):
    """A device of a ResourceSlice; v1beta1 keeps all but its name in `basic`."""

    name: str = ""
    attributes: dict[str, DeviceAttribute] | None = None
    capacity: dict[str, DeviceCapacity] | None = None
    basic: "SliceDevice | None" = None


class ResourceSliceSpec(objects.Object, frozen=True):
    """Which devices a driver offers, on one node or on all."""

    driver: str = ""
    node_name: str = ""
    all_nodes: bool = False
    devices: tuple[SliceDevice, ...] | None = None


class ResourceSlice(objects.HasMetadata, frozen=True):
    """A ResourceSlice of Dynamic Resource Allocation."""

    spec: ResourceSliceSpec | None = None


def parse(text: str | int) -> Fraction | None:
    """Return the exact value of a quantity; None if this is none.

    JSON may have a bare number where the API writes text.
    """
    if isinstance(text, int):
        return Fraction(text)
    match = _QUANTITY.fullmatch(text)
    if match is None or (match[3] or "") not in _SUFFIXES:
        return None
    scale = Fraction(10) ** int(match[2]) if match[2] else _SUFFIXES[match[3] or ""]
    return Fraction(match[1].rstrip(".")) * scale


def whole(text: str | int) -> int | None:
    """Return a quantity without its fraction, so `2500m` is 2; None if this is none."""
    value = parse(text)
    return None if value is None else int(value)


def count(text: str | int) -> int:
    """Return how many whole things a quantity is, such as devices; 0 for what is no such number."""
    return max(0, whole(text) or 0)
