"""Adapter: reads the node's files outside the kubelet's directory: the PCI bus, and CDI specs."""

import contextlib
import itertools
import os
import stat
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Final

from muster_plugin.watch import hardware

PCI: Final = Path("/sys/bus/pci/devices")
STATIC_SPECS: Final = Path("/etc/cdi")
_DEVICES_MAX: Final = 4096
_SPECS_MAX: Final = 1024
_SPEC_BYTES_MAX: Final = 1024 * 1024
_ALL_BYTES_MAX: Final = 32 * 1024 * 1024


def pci_devices(folder: Path = PCI) -> list[hardware.PciDevice]:
    """Return the devices on the PCI bus; an empty list if it cannot be read."""
    with contextlib.suppress(OSError):
        folders = itertools.islice(folder.iterdir(), _DEVICES_MAX)
        return [*filter(None, map(_pci_device, folders))]
    return []


def _pci_device(folder: Path) -> hardware.PciDevice | None:
    with contextlib.suppress(OSError, ValueError):
        vendor = int((folder / "vendor").read_text("ascii"), 16)
        kind = int((folder / "class").read_text("ascii"), 16) >> 8
        driver = ""
        with contextlib.suppress(OSError):
            driver = (folder / "driver").readlink().name
        return hardware.PciDevice(vendor, kind, driver)
    return None


def undescribed(names: Collection[str], folders: Collection[Path]) -> tuple[str, ...]:
    """Return the CDI devices (`vendor/class=name`) that no spec in these folders describes.

    The result is empty if a folder is not visible or the specs are too large, because then nothing
    is certain. A spec may be JSON or YAML; it describes each device whose kind and name it
    contains.
    """
    if not all(folder.is_dir() for folder in folders):
        return ()
    missing = set(names)
    total = 0
    for spec in itertools.chain.from_iterable(map(_specs, folders)):
        total += len(spec)
        if total > _ALL_BYTES_MAX:
            return ()
        for name in [*missing]:
            kind, _, device = name.partition("=")
            if kind.encode() in spec and device.encode() in spec:
                missing.discard(name)
    return tuple(sorted(missing))


def _specs(folder: Path) -> Iterator[bytes]:
    for path in itertools.islice(folder.iterdir(), _SPECS_MAX):
        if path.suffix in {".json", ".yaml", ".yml"}:
            with contextlib.suppress(OSError):
                descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
                with os.fdopen(descriptor, "rb") as opened:
                    if stat.S_ISREG(os.fstat(descriptor).st_mode):
                        yield opened.read(_SPEC_BYTES_MAX)
