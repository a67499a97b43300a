"""Adapter: scans paths such as /dev with their sysfs attributes, and lists directories to watch.

Everything is read below `root`, where the host's root directory is mounted; arguments and results
are paths of the host. Links are resolved, and absolute links stay below `root` too.

In /sys a device is a directory below /sys/devices, and the directories above it are its parents:
the USB interface of a serial port, the USB device, the controller. The value of an attribute is the
device's own, or that of the nearest parent that has it.
"""

import itertools
import os
import stat
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Final

import msgspec

from muster_plugin.config import resources
from muster_plugin.discovery import scan_result
from muster_plugin.model import patterns

ENTRIES_MAX: Final = 20_000
DEPTH_MAX: Final = 10

_USB_NODES: Final = "/dev/bus/usb/*/*"
_EVERYTHING: Final = "/dev/**"
_NOT_WALKED: Final = frozenset(f"/dev/{name}" for name in ("pts", "shm", "mqueue", "hugepages"))
"""Directories that are not scanned: they have many short-lived files and no devices."""
_PER_PROCESS: Final = "/proc/"
"""The directory to which links such as /dev/fd lead, with different files in each process."""
_LINKS_MAX: Final = 40
"""The longest chain of links that Linux follows (MAXSYMLINKS in include/linux/namei.h)."""


class Scan(msgspec.Struct, frozen=True, kw_only=True):
    """The nodes of the host, and the directories whose changes may change the result.

    A directory that does not exist is replaced by its nearest existing parent. The directories of
    link targets are included.
    """

    result: scan_result.ScanResult = scan_result.ScanResult()
    directories: frozenset[Path] = frozenset()


def scan(
    entries: Iterable[resources.Entry],
    *,
    root: Path = Path("/"),
    entries_max: int = ENTRIES_MAX,
    depth_max: int = DEPTH_MAX,
) -> Scan:
    """Return the nodes that these entries may match, sorted by path, and the directories to watch.

    Attributes and USB devices are read only if an entry needs them; `scan_result` selects nodes.
    """
    entries = tuple(entries)
    walk = _Walk(root, entries_max=entries_max, depth_max=depth_max)
    walk.find(entries)
    names: dict[str, set[str]] = {}
    for name in walk.names:
        real = walk.resolve(name)
        if real is not None:
            names.setdefault(real, set()).add(name)
    sysfs = Sysfs(root, entries)
    nodes = (_node(real, names[real], root=root, sysfs=sysfs) for real in sorted(names))
    result = scan_result.ScanResult(
        nodes=tuple(node for node in nodes if node is not None),
        problems=tuple(sorted(set(walk.problems))),
    )
    above = walk.directories | {real.rpartition("/")[0] for real in names}
    return Scan(result=result, directories=frozenset(Path(walk.mounted(p) or "/") for p in above))


class _Walk:
    """One scan of the file system; every directory is read at most once."""

    def __init__(self, root: Path, *, entries_max: int, depth_max: int) -> None:
        self.names: dict[str, None] = {}
        self.directories: set[str] = set()
        self.problems: list[str] = []
        self._root = str(root).rstrip("/")
        self._entries_max = entries_max
        self._entries_left = entries_max
        self._depth_max = depth_max
        self._read: dict[str, tuple[str, ...]] = {}
        self._real: dict[str, str | None] = {"": ""}

    def find(self, entries: Iterable[resources.Entry]) -> None:
        """Find everything that the entries and their exclusions could match."""
        globs: set[str] = set()
        for entry in entries:
            globs.update(glob for glob in (entry.path, *entry.exclude) if glob)
            if entry.usb:
                globs.add(_USB_NODES)
            if entry.regex or entry.udev:
                globs.add(_EVERYTHING)
        for glob in sorted(globs):
            self._expand("", patterns.glob(glob).components)

    def mounted(self, path: str) -> str:
        """Return where a host path is mounted in this container."""
        return self._root + path

    def resolve(self, path: str) -> str | None:
        """Resolve every link in a path; return None if links form a loop or lead into /proc."""
        if path not in self._real:
            above, _, name = path.rpartition("/")
            real = self.resolve(above)
            self._real[path] = None if real is None else self._resolved(real, name)
        return self._real[path]

    def _resolved(self, directory: str, name: str) -> str | None:
        """Resolve links as the kernel would below `root`; None for a loop, or a link to /proc."""
        done, left, followed = directory, [name], 0
        while left:
            part = left.pop()
            if part == "..":
                done = done.rpartition("/")[0]
            elif part not in {"", "."}:
                target = _link(self.mounted(f"{done}/{part}"))
                if target is None:
                    done = f"{done}/{part}"
                    continue
                followed += 1
                if followed > _LINKS_MAX or target.startswith(_PER_PROCESS):
                    return None
                done = "" if target.startswith("/") else done
                left.extend(reversed(target.split("/")))
        return done

    def _expand(self, at: str, components: tuple[str, ...], depth: int = 0) -> None:
        """Add the directories to watch, and the nodes below them that match the components."""
        component, rest = components[0], components[1:]
        if at or not self._is_directory(f"/{component}"):
            self.directories.add(at)
        if component == "**":
            self._expand_deep(at, components, depth)
            return
        if patterns.is_literal(component):
            matched: Iterable[str] = (component,)
        else:
            matched = (n for n in self._list(at) if patterns.component_matches(component, n))
        for name in matched:
            path = f"{at}/{name}"
            if not rest:
                self._add(path)
            elif self._is_directory(path):
                self._expand(path, rest, depth)

    def _expand_deep(self, at: str, components: tuple[str, ...], depth: int) -> None:
        """Descend into directories, but do not follow links, which may lead up again."""
        rest = components[1:]
        if rest:
            self._expand(at, rest, depth)
        for name in self._list(at):
            path = f"{at}/{name}"
            if not rest:
                self._add(path)
            if self.resolve(path) != path or path in _NOT_WALKED or not self._is_directory(path):
                continue
            if depth < self._depth_max:
                self._expand(path, components, depth + 1)
            else:
                self.problems.append(
                    f"{path}: more than {self._depth_max} directories deep; not scanned"
                )

    def _add(self, path: str) -> None:
        try:
            path.encode()
        except UnicodeEncodeError:
            self.problems.append(f"{path!a}: not UTF-8, so it cannot be sent to the kubelet")
        else:
            self.names[path] = None

    def _is_directory(self, path: str) -> bool:
        real = self.resolve(path)
        return real is not None and os.path.isdir(self.mounted(real))  # noqa: PTH112  # a Path for each of thousands costs more than the call

    def _list(self, at: str) -> tuple[str, ...]:
        if at not in self._read:
            self._read[at] = self._names_in(at)
        return self._read[at]

    def _names_in(self, at: str) -> tuple[str, ...]:
        real = self.resolve(at)
        try:
            with os.scandir(self.mounted(real or at)) as opened:
                names = tuple(e.name for e in itertools.islice(opened, self._entries_left + 1))
        except (FileNotFoundError, NotADirectoryError):
            return ()
        except OSError as error:
            self.problems.append(f"{at}: {(error.strerror or str(error)).lower()}")
            return ()
        if len(names) > self._entries_left:
            self.problems.append(
                f"{at}: more than {self._entries_max} entries; not all were scanned"
            )
            names = names[: self._entries_left]
        self._entries_left -= len(names)
        return names


def _node(path: str, names: set[str], *, root: Path, sysfs: "Sysfs") -> scan_result.Node | None:
    try:
        status = os.stat(f"{str(root).rstrip('/')}{path}", follow_symlinks=False)  # noqa: PTH116  # as above
    except OSError:
        return None  # vanished during the scan, or a dangling link
    kind = _kind(status.st_mode)
    major, minor = os.major(status.st_rdev), os.minor(status.st_rdev)
    node = scan_result.Node(
        path=path, kind=kind, major=major, minor=minor, links=tuple(sorted(names - {path}))
    )
    if kind in {scan_result.Kind.CHAR, scan_result.Kind.BLOCK}:
        return sysfs.describe(node)
    return node


def _kind(mode: int) -> scan_result.Kind:
    if stat.S_ISCHR(mode):
        return scan_result.Kind.CHAR
    if stat.S_ISBLK(mode):
        return scan_result.Kind.BLOCK
    if stat.S_ISDIR(mode):
        return scan_result.Kind.DIRECTORY
    return scan_result.Kind.FILE if stat.S_ISREG(mode) else scan_result.Kind.OTHER


_VIRTUAL: Final = "/devices/virtual/"
_BYTES_MAX: Final = 4096
_USB_MAX: Final = 4096


class Sysfs:
    """Reads the sysfs attributes that these entries need, below `root`."""

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
    """Yield every USB device with the path of its node; USB interfaces are skipped."""
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
    """Return the device's NUMA node, or its nearest parent's; None if unknown (in sysfs, -1)."""
    if levels and _VIRTUAL in levels[0]:
        return None  # not hardware, like most of /dev
    return next(
        (n for level in levels if (n := _number(_read(f"{level}/numa_node"))) is not None), None
    )


def _ids(levels: Iterable[str]) -> tuple[str, str]:
    """Return the vendor and product ids of the nearest USB or PCI device; empty if none exists."""
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
    """Return whether an attribute's name stays within the device's directory in sysfs."""
    return not attribute.startswith("/") and ".." not in attribute.split("/")
