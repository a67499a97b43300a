"""Pure: builds the messages of each attack of `bench.hostile` by one compromised node.

The attacker has only its own node's token; nats-server refuses some of these messages. A message is
built once, and then only its placeholders are replaced, so that the attacker needs little CPU.
"""

import enum
import itertools
import os
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from typing import Final

from muster import codec, inventory_pages, vocabulary
from muster.nats.auth import permissions

PLUGIN: Final = "device-plugin"
NAMES: Final = 150_000
"""The number of plugin names that the attack `names` invents."""
STORM_NAMES: Final = 15
LISTED: Final = permissions.PLUGIN_NAMES_MAX
STORM_BEAT_S: Final = 0.5
STORM_TURN_S: Final = 1.8
CHURN_NAMES: Final = 9
LINKS: Final = 3
"""The number of connections of a flood, one to each server."""
_MANY: Final = 500
_DEVICES: Final = 10_000
_VERSION: Final = 10**9
_LARGE: Final = 900_000
_MEDIUM: Final = 65_536
_EVENT: Final = 1_000_000
_ALLOWED_EVENT: Final = 8_000
_MARK: Final = "p000000"
_ID: Final = "00000000-mark"
_BEAT: Final = 0x5EED


class Attack(enum.StrEnum):
    """The attacks; the numbers are those of docs/threat-model.md."""

    LARGE = "large"
    MEDIUM = "medium"
    TINY = "tiny"
    BEATS = "beats"
    NAMES = "names"
    INVENTORIES = "inventories"
    EVENTS = "events"
    SMALL_EVENTS = "small-events"
    ALLOWED_EVENTS = "allowed-events"
    NODES = "nodes"
    STORM = "storm"
    LISTED_STORM = "listed-storm"
    RECONNECTS = "reconnects"
    CONNECTIONS = "connections"
    SUBSCRIPTIONS = "subscriptions"
    HEADERS = "headers"


WHAT: Final = {
    Attack.LARGE: "1: messages of 900 kB on its heartbeat subject",
    Attack.MEDIUM: "1: messages of 64 KiB on its heartbeat subject",
    Attack.TINY: "1: messages of 2 bytes on its heartbeat subject",
    Attack.BEATS: "1: heartbeats of its plugin, each newer than the last",
    Attack.NAMES: f"2: its inventory under {NAMES:,} plugin names",
    Attack.INVENTORIES: f"2: inventories of its plugin with {_DEVICES:,} devices each",
    Attack.EVENTS: "3: events of 1 MB",
    Attack.SMALL_EVENTS: "3: small events of its plugin",
    Attack.ALLOWED_EVENTS: "3: events of 8 KB of each type that a plugin publishes",
    Attack.NODES: "4: heartbeats of invented nodes",
    Attack.STORM: f"9: {STORM_NAMES} plugin names of one server in two groups, each silent in turn",
    Attack.LISTED_STORM: f"9: the same with {LISTED} plugin names, which the gate lists",
    Attack.RECONNECTS: f"9: {CHURN_NAMES} plugin names of one server that connect again and again",
    Attack.CONNECTIONS: "as many connections as it can open, closed at once",
    Attack.SUBSCRIPTIONS: "subscriptions that come and go",
    Attack.HEADERS: "events and inventories with headers that no client can decode",
}


def flood(attack: Attack, node: str, link: int) -> Iterator[bytes]:
    """Yield a flood's messages for one of its connections, forever."""
    token = vocabulary.node_token(node)
    own = f"muster.heartbeat.{token}.{PLUGIN}"
    made: dict[Attack, Callable[[], Iterator[bytes]]] = {
        Attack.LARGE: lambda: itertools.repeat(_published(own, bytes(_LARGE))),
        Attack.MEDIUM: lambda: itertools.repeat(_published(own, b"x" * _MEDIUM) * 8),
        Attack.TINY: lambda: itertools.repeat(_published(own, b"{}") * 4096),
        Attack.BEATS: lambda: _beats(node),
        Attack.NAMES: lambda: _names(node, link),
        Attack.INVENTORIES: lambda: _inventories(node, link),
        Attack.EVENTS: lambda: _large_events(token, link),
        Attack.SMALL_EVENTS: lambda: _small_events(node, link),
        Attack.ALLOWED_EVENTS: lambda: _allowed_events(token),
        Attack.NODES: lambda: _nodes(link),
        Attack.SUBSCRIPTIONS: lambda: _subscriptions(token),
        Attack.HEADERS: lambda: _headers(token),
    }
    return made[attack]()


def storm_names(attack: Attack) -> tuple[str, ...]:
    """Return the plugin names of a storm."""
    count = LISTED - 1 if attack is Attack.LISTED_STORM else STORM_NAMES
    return tuple(f"p{number}" for number in range(count))


def listed(attack: Attack) -> tuple[str, ...]:
    """Return the plugin names that the gate allows: the default, or the maximum."""
    return (PLUGIN, *storm_names(attack)) if attack is Attack.LISTED_STORM else (PLUGIN,)


def heartbeat(
    node: str, plugin: str = PLUGIN, *, seq: int, interval_s: float = 5.0, uptime_s: float = 0.0
) -> bytes:
    """Return a heartbeat as a protocol message."""
    beat = vocabulary.Heartbeat(
        node=node,
        plugin=plugin,
        instance=f"{_BEAT:016x}",
        seq=seq,
        interval_s=interval_s,
        uptime_s=uptime_s,
        resources=(vocabulary.ResourceBeat(name="nvidia.com/gpu", registered_age_s=100.0),),
    )
    return _published(beat.subject, codec.encode_heartbeat(beat))


def _published(subject: str, payload: bytes) -> bytes:
    return b"PUB %b %d\r\n%b\r\n" % (subject.encode(), len(payload), payload)


def _beats(node: str) -> Iterator[bytes]:
    for first in itertools.count(1, _MANY):
        yield b"".join(heartbeat(node, seq=seq) for seq in range(first, first + _MANY))


def _names(node: str, link: int) -> Iterator[bytes]:
    template = _event(_inventory(node, _MARK, devices=8))
    for count in itertools.count(0, _MANY):
        yield b"".join(
            _named(template, f"p{number % NAMES:06d}", link, number)
            for number in range(count * LINKS + link, (count + _MANY) * LINKS, LINKS)
        )


def _inventories(node: str, link: int) -> Iterator[bytes]:
    """Yield complete inventories in pages, each inventory with its own version."""
    pages = inventory_pages.numbered(_inventory(node, PLUGIN, devices=_DEVICES), _VERSION)
    whole = b"".join(_event(page) for page in pages)
    for number in itertools.count(link, LINKS):
        version = b'"version":%d' % (_VERSION + number % _VERSION)
        yield _named(whole, _MARK, link, number).replace(b'"version":%d' % _VERSION, version)


def _large_events(token: str, link: int) -> Iterator[bytes]:
    body = os.urandom(_EVENT)  # the server compresses what it stores
    for number in itertools.count():
        yield _published(f"muster.event.{token}.{PLUGIN}.x.t{link}-{number % 1000}", body)


def _small_events(node: str, link: int) -> Iterator[bytes]:
    template = _event(
        vocabulary.ProblemChanged(
            node=node, plugin=PLUGIN, at=datetime.now(UTC), problem=_MARK, holds=True
        )
    )
    for count in itertools.count(0, _MANY):
        yield b"".join(
            _named(template, f"p{number % 1_000_000:06d}", link, number)
            for number in range(count, count + _MANY)
        )


def _allowed_events(token: str) -> Iterator[bytes]:
    body = os.urandom(_ALLOWED_EVENT)
    chunk = b"".join(
        _published(f"muster.event.{token}.{PLUGIN}.{kind}", body)
        for kind in permissions.PLUGIN_EVENTS
    )
    return itertools.repeat(chunk * 4)


def _nodes(link: int) -> Iterator[bytes]:
    for count in itertools.count(0, _MANY):
        yield b"".join(
            heartbeat(f"invented-{link}-{number}.example", seq=1)
            for number in range(count, count + _MANY)
        )


def _subscriptions(token: str) -> Iterator[bytes]:
    for count in itertools.count(2, _MANY):
        yield b"".join(
            b"SUB muster.rpc.%b.x%d.probe %d\r\nUNSUB %d\r\n" % (token.encode(), n, n, n)
            for n in range(count, count + _MANY)
        )


def _headers(token: str) -> Iterator[bytes]:
    block = b"XXXXXXXX \xff\xff\xff\r\nA: b\r\n\r\n"
    subjects = (f"event.{token}.{PLUGIN}.device.added", f"inventory.{token}.{PLUGIN}.0")
    size = len(block)
    return itertools.repeat(
        b"".join(
            b"HPUB muster.%b %d %d\r\n%b{}\r\n" % (subject.encode(), size, size + 2, block)
            for subject in subjects
        )
    )


def _inventory(node: str, plugin: str, *, devices: int) -> vocabulary.InventoryReported:
    return vocabulary.InventoryReported(
        node=node,
        plugin=plugin,
        at=datetime.now(UTC),
        devices=tuple(
            vocabulary.Device(id=f"device-{number:06d}", resource="nvidia.com/gpu")
            for number in range(devices)
        ),
        resources=("nvidia.com/gpu",),
        gpus=vocabulary.GpuNode(
            gpus=(vocabulary.Gpu(uuid="GPU-1", product="NVIDIA L4", memory_mib=23_034),)
        ),
    )


def _event(event: vocabulary.Event) -> bytes:
    payload = codec.encode(
        event, event_id=_ID, producer="plugins/x", instance="x", sequence=1, boot=""
    )
    return _published(event.subject, payload)


def _named(template: bytes, name: str, link: int, number: int) -> bytes:
    """Return a message with a new plugin name and event id of the same lengths."""
    event_id = f"{link}{number % 10**7:07d}-mark"
    return template.replace(_ID.encode(), event_id.encode()).replace(_MARK.encode(), name.encode())
