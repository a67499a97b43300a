"""Pure: the nodes of a scan, and which of them an entry matches, always in the same order.

Paths are those of the host, wherever its root is mounted. A node has several names: its own path
and the links that lead to it. An entry matches a node only once: under the node's own path or, if
that does not match, under the first link that does. With `every_name`, as in
smarter-device-manager, each matching name is a separate match.

Without `every_name`, a wildcard for a `Device` matches no directory, although generic-device-plugin
passes on the content of directories. A `Device` never matches a file that a runtime cannot pass as
a device node, such as a socket.
"""

import bisect
import enum
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Final

import msgspec

from muster_plugin.config import resources
from muster_plugin.model import patterns

_NO_ATTRS: Final[Mapping[str, str]] = {}
DEV: Final = "/dev/"
_LITERAL_REGEX = re.compile(r"\^[\w/-]+\$")
_PERSISTENT: Final = "/by-"


class Kind(enum.StrEnum):
    """The type of a path, with links resolved."""

    CHAR = "char"
    BLOCK = "block"
    FILE = "file"
    DIRECTORY = "directory"
    OTHER = "other"


class Usb(msgspec.Struct, frozen=True, kw_only=True):
    """A USB device at a `port` such as `1-1.4`; `dev` increases whenever the device is plugged in.

    `port` is the device's name in /sys/bus/usb/devices; `vendor` and `product` are four lower-case
    hexadecimal digits.
    """

    vendor: str
    product: str
    serial: str = ""
    bus: int
    dev: int
    port: str


class Node(msgspec.Struct, frozen=True, kw_only=True):
    """One device node, file or directory. `links` are the scanned links that lead to it.

    `subsystem` is the device's own. `driver`, `vendor`, `product`, `serial` and each of the sysfs
    attributes in `attrs` are those of the device or of its nearest parent that has them.
    """

    path: str
    kind: Kind
    major: int = 0
    minor: int = 0
    links: tuple[str, ...] = ()
    numa: int | None = None
    subsystem: str = ""
    driver: str = ""
    vendor: str = ""
    product: str = ""
    serial: str = ""
    attrs: Mapping[str, str] = _NO_ATTRS
    usb: Usb | None = None


class ScanResult(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a scan. `problems` name the paths that were not fully scanned, with reasons."""

    nodes: tuple[Node, ...] = ()
    problems: tuple[str, ...] = ()


def merged(first: ScanResult, second: ScanResult) -> ScanResult:
    """Combine two results; a node that is in both keeps the links of both."""
    nodes = {node.path: node for node in first.nodes}
    for node in second.nodes:
        existing = nodes.get(node.path, node)
        links = tuple(sorted({*existing.links, *node.links}))
        nodes[node.path] = msgspec.structs.replace(existing, links=links)
    problems = tuple(dict.fromkeys((*first.problems, *second.problems)))
    return ScanResult(nodes=tuple(nodes[path] for path in sorted(nodes)), problems=problems)


_NODES: Final = frozenset({Kind.CHAR, Kind.BLOCK})


class Match(msgspec.Struct, frozen=True, kw_only=True):
    """A node that an entry matches, under the name that matched.

    `is_usb` is whether the node matched as a USB device, whatever its current path.
    """

    path: str
    node: Node
    is_usb: bool = False

    @property
    def key(self) -> str:
        """The stable name of the match, unchanged by a restart or a new connection."""
        usb = self.node.usb
        if not self.is_usb or usb is None:
            return self.path
        return "-".join(
            part for part in ("usb", usb.vendor, usb.product, usb.serial, usb.port) if part
        )

    @property
    def identity(self) -> str:
        """The identity that distinguishes this device from another with the same key.

        A USB device is identified by its ids and port, a device with a persistent name from udev
        (`/dev/disk/by-id/x`) by that name, and anything else by its path, kind and device number.
        """
        if self.is_usb or _PERSISTENT in self.path.rpartition("/")[0] + "/":
            return self.key
        return f"{self.path} {self.node.kind} {self.node.major}:{self.node.minor}"


class NodeIndex:
    """All scanned nodes, by each of their names."""

    def __init__(self, nodes: Iterable[Node]) -> None:
        self.nodes = tuple(nodes)
        self._nodes = {name: node for node in self.nodes for name in node.links}
        self._nodes |= {node.path: node for node in self.nodes}
        self._sorted = sorted(self._nodes)

    def with_prefix(self, prefix: str) -> Iterator[tuple[str, Node]]:
        """Yield every name with this prefix, in order, with its node."""
        for at in range(bisect.bisect_left(self._sorted, prefix), len(self._sorted)):
            name = self._sorted[at]
            if not name.startswith(prefix):
                return
            yield name, self._nodes[name]

    def named(self, name: str) -> Iterator[tuple[str, Node]]:
        """Yield the name and its node, if a node has this name."""
        if name in self._nodes:
            yield name, self._nodes[name]


def matches(
    entry: resources.Entry, index: NodeIndex, *, every_name: bool = False
) -> tuple[Match, ...]:
    """Return the matches of an entry, sorted by key."""
    usable = [
        match
        for match in _matches(entry, index, every_name=every_name)
        if _is_usable(entry, match.node, every_name=every_name) and not _is_excluded(entry, match)
    ]
    return tuple(sorted(usable, key=lambda match: match.key))


def _matches(entry: resources.Entry, index: NodeIndex, *, every_name: bool) -> Iterable[Match]:
    if entry.usb is not None:
        usb_nodes = (node for node in index.nodes if _is_usb_device(entry.usb, node))
        return (Match(path=node.path, node=node, is_usb=True) for node in usb_nodes)
    if entry.udev is not None:
        nodes = (node for node in index.nodes if _has_attributes(entry.udev, node))
        return (Match(path=node.path, node=node) for node in nodes)
    named = [Match(path=name, node=node) for name, node in _named(entry, index)]
    if every_name:
        return named
    named.sort(key=lambda match: (match.path != match.node.path, match.path))
    first_of: dict[str, Match] = {}
    for match in named:
        first_of.setdefault(match.node.path, match)
    return first_of.values()


def _named(entry: resources.Entry, index: NodeIndex) -> Iterator[tuple[str, Node]]:
    if entry.regex:
        for name, node in index.with_prefix(DEV):
            if patterns.regex_matches(entry.regex, name.removeprefix(DEV)):
                yield name, node
    elif patterns.is_literal(entry.path):
        yield from index.named(entry.path)
    else:
        for name, node in index.with_prefix(patterns.literal_prefix(entry.path)):
            if patterns.glob(entry.path).fullmatch(name):
                yield name, node


def _is_usable(entry: resources.Entry, node: Node, *, every_name: bool) -> bool:
    if entry.udev is None and entry.usb is None:
        if entry.type is resources.NodeType.MOUNT:
            return True
        if node.kind is Kind.DIRECTORY:
            return every_name or _names_directories(entry)
    return node.kind in _NODES


def _names_directories(entry: resources.Entry) -> bool:
    """Return whether the entry's regular expression, or the last part of its path, is literal.

    Only such an entry may name a directory. The container runtime then passes every device node in
    it.
    """
    if entry.regex:
        return _LITERAL_REGEX.fullmatch(entry.regex) is not None
    return patterns.is_literal(entry.path.rpartition("/")[2])


def _is_excluded(entry: resources.Entry, match: Match) -> bool:
    names = (match.path, match.node.path, *match.node.links)
    return any(patterns.first_match(entry.exclude, name) for name in names)


def _is_usb_device(wanted: resources.Usb, node: Node) -> bool:
    usb = node.usb
    return (
        usb is not None
        and (usb.vendor, usb.product) == (wanted.vendor, wanted.product)
        and wanted.serial in {"", usb.serial}
    )


def _has_attributes(wanted: resources.Udev, node: Node) -> bool:
    """Return whether a node has these sysfs attributes; hexadecimal ids match in either case."""
    return (
        _matches_value(wanted.subsystem, node.subsystem)
        and _matches_value(wanted.driver, node.driver)
        and _matches_value(wanted.vendor.lower(), node.vendor.lower())
        and _matches_value(wanted.product.lower(), node.product.lower())
        and all(
            name in node.attrs and patterns.name_matches(pattern, node.attrs[name])
            for name, pattern in wanted.attrs.items()
        )
    )


def _matches_value(pattern: str, value: str) -> bool:
    return not pattern or (bool(value) and patterns.name_matches(pattern, value))
