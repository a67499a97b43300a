"""Fuzz targets for data from NATS: events, heartbeats, advisories and the protocol itself."""

import contextlib
import json
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any, Final

import msgspec
import nats.errors

from muster import codec, inventory_pages, vocabulary
from muster.nats import assembly, compat
from muster.nats import heartbeat_reader as stream
from muster_health.bus import nats_connections
from muster_health.fleet import detector
from muster_health.model import config, signals
from muster_labeler.naming import feature_discovery
from tests.fuzz.target import compact, recorded, target

_ZERO: Final = datetime(2026, 1, 2, tzinfo=UTC)
_OF_PLUGINS: Final = ("muster.event.", "muster.inventory.")
_KINDS: Final[tuple[type[msgspec.Struct], ...]] = (*vocabulary.EVENTS, vocabulary.Heartbeat)
_WORDS: Final = tuple(f'"{name}":' for kind in _KINDS for name in kind.__struct_fields__)


def _events() -> Iterator[tuple[str, bytes]]:
    for subject, payload in recorded():
        if subject.startswith(_OF_PLUGINS):
            yield subject, payload


def _sent() -> Iterator[bytes]:
    """Yield the subject and payload of each event, on two lines."""
    for subject, payload in _events():
        yield f"{subject}\n".encode() + payload


def _inventory(devices: int) -> bytes:
    event = vocabulary.InventoryReported(
        node="a",
        at=_ZERO,
        plugin="p",
        devices=tuple(
            vocabulary.Device(id=f"d{number}", resource="a.com/x", health=vocabulary.Health.HEALTHY)
            for number in range(devices)
        ),
    )
    payload = codec.encode(
        event, event_id="i:1", producer="plugins/p", instance="i", sequence=1, boot="b"
    )
    return f"{event.subject}\n".encode() + payload


@target(
    seeds=_sent, words=(*_WORDS, *(f'"{kind.TYPE}"' for kind in vocabulary.EVENTS)), long=_inventory
)
def events(data: bytes) -> None:
    """Check that an event is malformed, or survives a round trip and is one printable line."""
    subject, _, payload = data.partition(b"\n")
    name = subject.decode("utf-8", "replace")
    try:
        event = codec.decode(name, payload, position=7)
    except codec.MalformedEvent:
        return
    assert codec.decode(name, codec.dump(event), position=7) == event
    assert str(event).isprintable()
    if isinstance(event.data, vocabulary.InventoryReported) and event.data.gpus is not None:
        for value in feature_discovery.labels(event.data.gpus).values():
            assert len(value) <= 63
            assert value.isascii()


def _pages() -> Iterator[bytes]:
    device = vocabulary.Device(id="d", resource="a.com/x", health=vocabulary.Health.HEALTHY)
    whole = vocabulary.InventoryReported(node="a", at=_ZERO, plugin="p", devices=(device,))
    yield _page(whole)
    for count in (2, 3):
        pages = [
            msgspec.structs.replace(whole, version=1, page=page, pages=count)
            for page in reversed(range(count))
        ]
        yield b"\n".join(map(_page, pages))


def _page(page: vocabulary.InventoryReported) -> bytes:
    return codec.encode(
        page, event_id=f"i:{page.page}", producer="p", instance="i", sequence=1, boot="b"
    )


@target(seeds=_pages, words=('"page":', '"pages":', '"version":', '"devices":', '"gpus":'))
def inventories(data: bytes) -> None:
    """Check that pages in any order make a whole inventory or none, and that few pages wait."""
    assembler = assembly.Assembler()
    pages = 0
    for position, line in enumerate(data.split(b"\n"), start=1):
        with contextlib.suppress(codec.MalformedEvent):
            event = codec.decode(_subject(line), line, position=position)
            pages += 1
            whole = assembler.add(event)
            if whole is None or not isinstance(whole.data, vocabulary.InventoryReported):
                continue
            assert (whole.data.page, whole.data.pages) == (0, 1)
            parts = inventory_pages.numbered(whole.data, 7)
            assert sum(len(part.devices) for part in parts) == len(whole.data.devices)
    assert assembler.forgotten <= pages
    assert assembler._waiting <= assembly.WAITING_MAX


def _beats() -> Iterator[bytes]:
    return (payload for _, payload in recorded("heartbeat"))


def _beat_of(resources: int) -> bytes:
    return codec.encode_heartbeat(
        vocabulary.Heartbeat(
            node="a",
            plugin="p",
            instance="i",
            seq=1,
            interval_s=5.0,
            resources=tuple(vocabulary.ResourceBeat(name=f"a.com/{n}") for n in range(resources)),
        )
    )


@target(seeds=_beats, words=_WORDS, long=_beat_of)
def heartbeats(data: bytes) -> None:
    """Check that a heartbeat is malformed, or survives a round trip."""
    try:
        beat = codec.decode_heartbeat(data)
    except codec.MalformedEvent:
        return
    again = codec.decode_heartbeat(codec.encode_heartbeat(beat), subject=beat.subject)
    assert again == beat


def _headers() -> Iterator[bytes]:
    yield b"NATS/1.0\r\nNats-Msg-Id: i:1\r\nContent-Type: application/json\r\n\r\n"
    yield b"NATS/1.0 404 No Messages\r\n\r\n"
    yield b"NATS/1.0 100 Idle Heartbeat\r\nNats-Last-Consumer: 10\r\n\r\n"
    yield b"XXXXXXXX \xff\xff\xff\r\nA: b\r\n\r\n"


def _many_headers(count: int) -> bytes:
    lines = b"".join(b"A%d: b\r\n" % number for number in range(count))
    return b"NATS/1.0\r\n" + lines + b"\r\n"


@target(seeds=_headers, words=("NATS/1.0", "\r\n", ": ", " 404 "), long=_many_headers)
def headers(data: bytes) -> None:
    """Check that a header block becomes a dictionary of strings or None, without an exception."""
    client = compat.TolerantClient()
    client._error_cb = compat.ignore_error
    # the coroutine ends at the first step, because it has nothing to wait for
    reading = client._process_headers(data)
    try:
        reading.send(None)
    except StopIteration as end:
        headers = end.value
    else:
        raise AssertionError("it waits")
    assert headers is None or all(
        isinstance(text, str) for pair in headers.items() for text in pair
    )


def _story() -> Iterator[bytes]:
    """Yield sequences of messages that a plugin sends, one message a line."""
    beats = [*_beats()]
    changes = [payload for subject, payload in _events() if ".plugin." in subject]
    yield b"\n".join((*beats, *changes, *beats))
    for payload in changes:
        yield b"\n".join((*beats, payload))


@target(seeds=_story, words=_WORDS)
def detection(data: bytes) -> None:
    """Check that no messages of a plugin stop the detector, and that its outputs are bounded."""
    watched = detector.Detector(
        config.Detection(), runbook_url="", at_zero=_ZERO, bounds=_BOUNDS, has_cluster=False
    )
    now = 0.0
    watched.receive(signals.BusBack(at=_ZERO), now)
    watched.receive(signals.Leadership(revision=1), now)
    for position, line in enumerate(data.split(b"\n")[:40], start=1):
        now += 1.7
        for _ in range(100):
            due = watched.next_deadline()
            if due is None or due > now:
                break
            _check(watched.tick(now), now)
        else:
            raise AssertionError("the detector's timers never come to rest")
        with contextlib.suppress(codec.MalformedEvent):
            _check(watched.receive(_input(line, position), now), now)
    for plugin in watched.plugins():
        msgspec.json.encode(plugin.shown(now))


_BOUNDS: Final = config.Bounds(plugins_per_node=3, devices_per_plugin=5, alerts_per_plugin=4)


def _input(line: bytes, position: int) -> signals.Input:
    if b'"specversion"' not in line:
        return signals.HeartbeatArrived(heartbeat=codec.decode_heartbeat(line))
    event = codec.decode(_subject(line), line, position=position)
    if not event.data.subject.startswith(_OF_PLUGINS):
        raise codec.MalformedEvent(codec.MalformedReason.UNKNOWN_TYPE, event.type)
    return signals.FromPlugin(
        event=event.data, instance=event.instance, sequence=event.sequence, position=position
    )


def _subject(line: bytes) -> str:
    """Return the only subject that permissions allow for this event; empty if it is malformed."""
    try:
        tree: Any = json.loads(line)
        data, kind = tree["data"], tree["type"].removeprefix(codec.TYPE_PREFIX)
        fields = {**data, "node": vocabulary.node_token(data["node"])}
        template = vocabulary.BY_TYPE[kind].SUBJECT
        return template.format_map({"page": 0, **fields})
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return ""


def _check(outputs: list[signals.Output], now: float) -> None:
    for output in outputs:
        match output:
            case signals.Store(value=value):
                assert len(value) <= 1_000_000
            case signals.Publish(event=event):
                sent = codec.encode(
                    event,
                    event_id="e",
                    producer="services/health",
                    instance="h",
                    sequence=1,
                    boot="b",
                )
                assert codec.decode(event.subject, sent).data == event
                assert abs(event.at - _ZERO) <= timedelta(seconds=now + 1)
            case _:
                pass


def _advisories() -> Iterator[bytes]:
    server = {"name": "n", "host": "127.0.0.1", "id": "NABC", "ver": "2.15.1"}
    client = {"id": 7, "acc": "PLUGINS", "user": "plugin_node-a", "name": "device-plugin node-a"}
    for subject, more in (
        (nats_connections.CONNECT, {}),
        (nats_connections.DISCONNECT, {"reason": "Client Closed"}),
    ):
        tree = {"type": "io.nats.server.advisory.v1.client", "server": server, "client": client}
        yield f"{subject}\n".encode() + compact(tree | more)
        leaf = client | {"kind": "Leafnode", "name": "leaf"}
        yield f"{subject}\n".encode() + compact(tree | more | {"client": leaf})
    yield b"muster.nats.shutdown.NABC\n{}"


@target(seeds=_advisories, words=('"client":', '"server":', '"kind":', '"Leafnode"', '"user":'))
def advisories(data: bytes) -> None:
    """Check that an advisory about a connection is unreadable, or names a valid node."""
    subject, _, payload = data.partition(b"\n")
    try:
        advisory = nats_connections.decode(subject.decode("utf-8", "replace"), payload)
    except nats_connections.Unreadable:
        return
    if isinstance(advisory, signals.Connected | signals.Disconnected):
        vocabulary.node_token(advisory.node)


def _wire() -> Iterator[bytes]:
    yield b"MSG muster.heartbeat.a.p 1 5\r\nhello\r\n"
    yield b"MSG muster.heartbeat.a.p 1 _INBOX.x 0\r\n\r\nPING\r\n"
    yield b"HMSG muster.heartbeat.a.p 1 12 17\r\nNATS/1.0\r\n\r\nhello\r\nPONG\r\n"
    yield b'INFO {"server_id":"N","max_payload":1048576}\r\n+OK\r\n-ERR \'Permissions\'\r\nMSG a 1 9\r\nhal'


@target(
    seeds=_wire,
    words=("MSG ", "HMSG ", "\\x0d\\x0a", " -1", "PING", "INFO ", "-ERR "),
    long=lambda size: b"MSG muster.heartbeat.a.p 1 5\r\nhello\r\n" * size,
)
def protocol(data: bytes) -> None:
    """Check that bytes are split into the same messages wherever a read ends, and none twice."""
    try:
        messages, others, rest = stream.split_messages(data)
    except nats.errors.ProtocolError:
        return
    payloads = sum(len(subject) + len(payload) for subject, _, payload in messages)
    assert payloads + sum(map(len, others)) + len(rest) <= len(data)
    assert data.endswith(rest)
    middle = len(data) // 2
    first, *_, left = stream.split_messages(data[:middle])
    second, *_ = stream.split_messages(left + data[middle:])
    assert first + second == messages
