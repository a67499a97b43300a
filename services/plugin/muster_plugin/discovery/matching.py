"""Pure: Which of the seen nodes a rule means, in an order that is the same every time.

A node has several names: its own path and the links that lead to it. It is one match, under its
own path if that matches, else under the first link that does. With `every_name`, which is
smarter-device-manager's meaning, each name that matches is a match.

Where the peers differ, this is muster's meaning: a wildcard finds no directories for a `Device`
(generic-device-plugin hands out what lies in them), and nothing that no runtime could make a
device node of, such as a socket.
"""

import bisect
import re
from collections.abc import Iterable, Iterator
from typing import Final, assert_never

import msgspec

from muster_plugin.config import resources
from muster_plugin.model import patterns, scan_result

DEV: Final = "/dev/"
_ONE_NAME = re.compile(r"\^[\w/-]+\$")
_PERSISTENT: Final = "/by-"
_NODES: Final = frozenset({scan_result.Kind.CHAR, scan_result.Kind.BLOCK})


class Match(msgspec.Struct, frozen=True, kw_only=True):
    """A node that a rule means, under the name by which it was found.

    `plugged`: it was found as a USB device, whatever its path is at the moment.
    """

    path: str
    node: scan_result.Node
    is_usb: bool = False

    @property
    def key(self) -> str:
        """What the match is called: the same after a restart, and after it was plugged in again."""
        usb = self.node.usb
        if not self.is_usb or usb is None:
            return self.path
        return "-".join(
            part for part in ("usb", usb.vendor, usb.product, usb.serial, usb.port) if part
        )

    @property
    def identity(self) -> str:
        """What makes it this device and no other; another device may have the same key.

        A USB device is told by its ids and port, a persistent name of udev's (`/dev/disk/by-id/x`)
        by itself, anything else by its path, kind and device number.
        """
        if self.is_usb or _PERSISTENT in self.path.rpartition("/")[0] + "/":
            return self.key
        return f"{self.path} {self.node.kind} {self.node.major}:{self.node.minor}"


class NodeIndex:
    """Everything that was seen, by each of its names."""

    def __init__(self, nodes: Iterable[scan_result.Node]) -> None:
        self.nodes = tuple(nodes)
        self._nodes = {name: node for node in self.nodes for name in node.links}
        self._nodes |= {node.path: node for node in self.nodes}
        self._sorted = sorted(self._nodes)

    def with_prefix(self, prefix: str) -> Iterator[tuple[str, scan_result.Node]]:
        """Give every name that begins so, in order, with its node."""
        for at in range(bisect.bisect_left(self._sorted, prefix), len(self._sorted)):
            name = self._sorted[at]
            if not name.startswith(prefix):
                return
            yield name, self._nodes[name]

    def named(self, name: str) -> Iterator[tuple[str, scan_result.Node]]:
        """Give the name, if it was seen."""
        if name in self._nodes:
            yield name, self._nodes[name]


def matches(
    rule: resources.Entry, index: NodeIndex, *, every_name: bool = False
) -> tuple[Match, ...]:
    """Return what the rule means, sorted by key."""
    usable = [
        match
        for match in _matches(rule, index, every_name=every_name)
        if _is_usable(rule, match.node, every_name=every_name) and not _is_excluded(rule, match)
    ]
    return tuple(sorted(usable, key=lambda match: match.key))


def _matches(rule: resources.Entry, index: NodeIndex, *, every_name: bool) -> Iterable[Match]:
    if rule.usb is not None:
        usb_nodes = (node for node in index.nodes if _is_plugged(rule.usb, node))
        return (Match(path=node.path, node=node, is_usb=True) for node in usb_nodes)
    if rule.udev is not None:
        nodes = (node for node in index.nodes if _has(rule.udev, node))
        return (Match(path=node.path, node=node) for node in nodes)
    named = [Match(path=name, node=node) for name, node in _named(rule, index)]
    if every_name:
        return named
    named.sort(key=lambda match: (match.path != match.node.path, match.path))
    one_each: dict[str, Match] = {}
    for match in named:
        one_each.setdefault(match.node.path, match)
    return one_each.values()


def _named(rule: resources.Entry, index: NodeIndex) -> Iterator[tuple[str, scan_result.Node]]:
    if rule.regex:
        for name, node in index.with_prefix(DEV):
            if patterns.regex_matches(rule.regex, name.removeprefix(DEV)):
                yield name, node
    elif patterns.is_literal(rule.path):
        yield from index.named(rule.path)
    else:
        for name, node in index.with_prefix(patterns.literal_prefix(rule.path)):
            if patterns.glob(rule.path).fullmatch(name):
                yield name, node


def _is_usable(rule: resources.Entry, node: scan_result.Node, *, every_name: bool) -> bool:
    if rule.udev is not None or rule.usb is not None:
        return node.kind in _NODES
    match rule.type:
        case resources.NodeType.MOUNT:
            return True
        case resources.NodeType.DEVICE if node.kind is scan_result.Kind.DIRECTORY:
            return every_name or _names_directories(rule)
        case resources.NodeType.DEVICE:
            return node.kind in _NODES
        case _:
            assert_never(rule.type)


def _names_directories(rule: resources.Entry) -> bool:
    """Say whether the rule names a thing, not a pattern of things; the thing may be a directory.

    The container runtime then makes every device node that lies in it.
    """
    if rule.regex:
        return _ONE_NAME.fullmatch(rule.regex) is not None
    return patterns.is_literal(rule.path.rpartition("/")[2])


def _is_excluded(rule: resources.Entry, match: Match) -> bool:
    names = (match.path, match.node.path, *match.node.links)
    return any(patterns.first_match(rule.exclude, name) for name in names)


def _is_plugged(wanted: resources.Usb, node: scan_result.Node) -> bool:
    usb = node.usb
    return (
        usb is not None
        and (usb.vendor, usb.product) == (wanted.vendor, wanted.product)
        and wanted.serial in {"", usb.serial}
    )


def _has(wanted: resources.Udev, node: scan_result.Node) -> bool:
    """Compare with what sysfs says; ids are hexadecimal, so their case means nothing."""
    return (
        _agrees(wanted.subsystem, node.subsystem)
        and _agrees(wanted.driver, node.driver)
        and _agrees(wanted.vendor.lower(), node.vendor.lower())
        and _agrees(wanted.product.lower(), node.product.lower())
        and all(
            name in node.attrs and patterns.name_matches(pattern, node.attrs[name])
            for name, pattern in wanted.attrs.items()
        )
    )


def _agrees(pattern: str, value: str) -> bool:
    return not pattern or (bool(value) and patterns.name_matches(pattern, value))
