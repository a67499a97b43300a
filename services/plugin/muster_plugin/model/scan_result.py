"""Pure: what a scan found on the node: device nodes, files to mount, and their sysfs attributes.

Paths are the host's, wherever its root is mounted.
"""

import enum
from collections.abc import Mapping
from typing import Final

import msgspec

_NO_ATTRS: Final[Mapping[str, str]] = {}


class Kind(enum.StrEnum):
    """The type of a path, with links resolved."""

    CHAR = "char"
    BLOCK = "block"
    FILE = "file"
    DIRECTORY = "directory"
    OTHER = "other"


class Usb(msgspec.Struct, frozen=True, kw_only=True):
    """A USB device. `port` is where it is plugged in (`1-1.4`); `dev` grows at each plugging.

    Names are those of /sys/bus/usb/devices; vendor and product are four lower-case hex digits.
    """

    vendor: str
    product: str
    serial: str = ""
    bus: int
    dev: int
    port: str


class Node(msgspec.Struct, frozen=True, kw_only=True):
    """One device node, file or directory. `links` are other paths that lead to it.

    `subsystem`, `driver` and the ids are those of the device or of its nearest parent that has
    them; `attrs` are sysfs attributes, the device's own before its parents'.
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
    """The result of a scan. `problems` name what could not be read, and why."""

    nodes: tuple[Node, ...] = ()
    problems: tuple[str, ...] = ()


def merged(first: ScanResult, second: ScanResult) -> ScanResult:
    """Return both results; a node that is in both has the links of both."""
    nodes = {node.path: node for node in first.nodes}
    for node in second.nodes:
        existing = nodes.get(node.path, node)
        links = tuple(sorted({*existing.links, *node.links}))
        nodes[node.path] = msgspec.structs.replace(existing, links=links)
    problems = tuple(dict.fromkeys((*first.problems, *second.problems)))
    return ScanResult(nodes=tuple(nodes[path] for path in sorted(nodes)), problems=problems)
