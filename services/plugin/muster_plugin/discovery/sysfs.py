"""Adapter: /sys: the kernel's attributes of a device node.

A device is a directory below /sys/devices, and the directories above it are its parents: the USB
interface of a serial port, the USB device, the controller. An attribute is the device's own, or
that of its nearest parent that has it.
"""

import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Final

import msgspec

from muster_plugin.config import resources
from muster_plugin.model import scan_result

_VIRTUAL: Final = "/devices/virtual/"
_BYTES_MAX: Final = 4096
_USB_MAX: Final = 4096


class Sysfs:
    """Reads what these entries need, below `root`."""

    def __init__(self, root: Path, wanted: Iterable[resources.Entry]) -> None:
        entries = tuple(wanted)
        udev_rules = [entry.udev for entry in entries if entry.udev is not None]
        self._sys = f"{str(root).rstrip('/')}/sys"
        self._wants_attributes = bool(udev_rules)
        self._attributes = sorted(
            {name for udev in udev_rules for name in udev.attrs if _is_safe(name)}
        )
        self._usb_devices: dict[str, scan_result.Usb] = {}
        if any(entry.usb for entry in entries):
            self._usb_devices.update(_usb_devices(Path(self._sys) / "bus/usb/devices"))

    def describe(self, node: scan_result.Node) -> scan_result.Node:
        """Return the node with its attributes."""
        levels = self._levels(node)
        described = msgspec.structs.replace(
            node, numa=_numa(levels), usb=self._usb_devices.get(node.path)
        )
        if not levels or not self._wants_attributes:
            return described
        vendor, product = _ids(levels)
        return msgspec.structs.replace(
            described,
            subsystem=_link_name(f"{levels[0]}/subsystem"),
            driver=next(filter(None, (_link_name(f"{level}/driver") for level in levels)), ""),
            vendor=vendor,
            product=product,
            serial=_nearest(levels, "serial") or "",
            attrs={
                name: value
                for name in self._attributes
                if (value := _nearest(levels, name)) is not None
            },
        )

    def _levels(self, node: scan_result.Node) -> tuple[str, ...]:
        """Return the directories of the device and its parents, nearest first."""
        kind = "block" if node.kind is scan_result.Kind.BLOCK else "char"
        link = f"{self._sys}/dev/{kind}/{node.major}:{node.minor}"
        target = _link(link)
        if target is None:
            return ()
        top, levels = f"{self._sys}/devices", []
        device = os.path.normpath(f"{link}/../{target}")
        while device.startswith(f"{top}/"):
            levels.append(device)
            device = device.rpartition("/")[0]
        return tuple(levels)


def _usb_devices(ports: Path) -> Iterator[tuple[str, scan_result.Usb]]:
    """Yield every USB device with the path of its node; interfaces have no vendor, and no node."""
    try:
        names = sorted(path.name for path in ports.iterdir())[:_USB_MAX]
    except OSError:
        return
    for name in names:
        port = f"{ports}/{name}"
        vendor, product = _read(f"{port}/idVendor"), _read(f"{port}/idProduct")
        bus, dev = _number(_read(f"{port}/busnum")), _number(_read(f"{port}/devnum"))
        if vendor and product and bus is not None and dev is not None:
            usb = scan_result.Usb(
                vendor=vendor.lower(),
                product=product.lower(),
                serial=_read(f"{port}/serial") or "",
                bus=bus,
                dev=dev,
                port=name,
            )
            yield f"/dev/bus/usb/{bus:03}/{dev:03}", usb


def _numa(levels: Sequence[str]) -> int | None:
    """Return the NUMA node of the nearest parent that has one; the kernel's -1 is unknown."""
    if levels and _VIRTUAL in levels[0]:
        return None  # not hardware, as most of /dev
    return next(
        (n for level in levels if (n := _number(_read(f"{level}/numa_node"))) is not None), None
    )


def _ids(levels: Iterable[str]) -> tuple[str, str]:
    """Return vendor and product, four hex digits: the USB device's, else the PCI device's."""
    for level in levels:
        if vendor := _read(f"{level}/idVendor"):
            return vendor.lower(), (_read(f"{level}/idProduct") or "").lower()
        vendor = _read(f"{level}/vendor") or ""
        if vendor.startswith("0x"):
            product = _read(f"{level}/device") or ""
            return vendor.removeprefix("0x").lower(), product.removeprefix("0x").lower()
    return "", ""


def _nearest(levels: Iterable[str], name: str) -> str | None:
    return next((v for level in levels if (v := _read(f"{level}/{name}")) is not None), None)


def _link_name(path: str) -> str:
    return (_link(path) or "").rpartition("/")[2]


def _link(path: str) -> str | None:
    try:
        return os.readlink(path)  # noqa: PTH115  # a Path for each of thousands costs more than the call
    except OSError:
        return None


def _read(path: str) -> str | None:
    try:
        opened = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        return os.read(opened, _BYTES_MAX).decode(errors="replace").strip()
    except OSError:
        return None
    finally:
        os.close(opened)


def _number(text: str | None) -> int | None:
    return int(text) if text is not None and text.isdecimal() else None


def _is_safe(attribute: str) -> bool:
    """Return whether the name stays within the device's directory."""
    return not attribute.startswith("/") and ".." not in attribute.split("/")
