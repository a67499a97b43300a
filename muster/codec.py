"""Pure: encodes and decodes events and heartbeats; MalformedEvent reports why a message is invalid.

Events are encoded as CloudEvents 1.0 in structured JSON mode, so that any tool can read them;
heartbeats are compact JSON. The subject, not the payload, identifies the sender, because NATS
permissions restrict only subjects.
"""

import enum
import re
from datetime import datetime
from typing import Annotated, Final, Literal

import msgspec

from muster import vocabulary

EVENT_BYTES_MAX: Final = 512 * 1024
HEARTBEAT_BYTES_MAX: Final = 64 * 1024
CONTENT_TYPE: Final = "application/cloudevents+json"
TYPE_PREFIX: Final = "dev.muster."
SCHEMA_PREFIX: Final = "https://muster.dev/schemas/"

_SHOWN_MAX: Final = 120
_SCHEMA = re.compile(re.escape(SCHEMA_PREFIX) + r"v(\d{1,9})(?:\.\d{1,9})*/([a-z_.]+)\.json")
"""Matches any minor version: a later one only adds fields, which older readers ignore."""


class MalformedReason(enum.StrEnum):
    """Why a message was rejected."""

    OVERSIZED = "oversized"
    NOT_A_CLOUDEVENT = "not_a_cloudevent"
    UNKNOWN_TYPE = "unknown_type"
    UNKNOWN_VERSION = "unknown_version"
    INVALID_DATA = "invalid_data"
    WRONG_SUBJECT = "wrong_subject"


class MalformedEvent(ValueError):
    """A message that is not a valid event; metrics count `reason`, people read `detail`."""

    def __init__(self, reason: MalformedReason, detail: str) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason = reason
        self.detail = detail


class CloudEvent(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One event as a subscriber receives it: CloudEvents' attributes, and muster's typed `data`.

    `id` is unique; it is used again only when the same fact is sent again. `instance` and
    `sequence` order the events of one producer; `boot` distinguishes a restart of the process from
    a restart of the node. `position` is the event's sequence number in `stream`; 0 if the event is
    not from a stream.
    """

    id: str
    source: str
    type: str
    time: datetime
    instance: str
    sequence: int
    boot: str
    data: vocabulary.Event
    position: int = 0
    stream: str = ""

    @property
    def node(self) -> str:
        """The node that this event concerns."""
        return self.data.node

    def precedes(self, other: "CloudEvent") -> bool:
        """Return whether this event is older than `other`; the order of arrival may differ.

        Events with the same source and instance are ordered by their sequence numbers, which
        continue even if the stream is lost and created again. Other events are ordered by their
        position in the stream, or by time if they are in different streams.
        """
        if (self.source, self.instance) == (other.source, other.instance):
            return self.sequence < other.sequence
        if self.stream == other.stream:
            return self.position < other.position
        return self.time < other.time

    def __str__(self) -> str:
        """Return the event as one readable line."""
        names = [f for f in self.data.__struct_fields__ if f not in {"node", "at"}]
        facts = {name: msgspec.to_builtins(getattr(self.data, name)) for name in names}
        shown = " ".join(f"{name}={_short(value)}" for name, value in facts.items() if value)
        return f"{self.time:%H:%M:%S} {self.node} {self.type} {shown}"


class _Envelope(msgspec.Struct, kw_only=True):
    specversion: Literal["1.0"]
    id: str
    source: str
    type: str
    time: Annotated[datetime, msgspec.Meta(tz=True)]
    data: msgspec.Raw
    dataschema: str = ""
    datacontenttype: str = "application/json"
    instance: str = ""
    # CloudEvents' Sequence extension is a string
    sequence: str = "0"
    boot: str = ""


_ENVELOPE = msgspec.json.Decoder(_Envelope)
_DATA = {event.TYPE: msgspec.json.Decoder(event) for event in vocabulary.EVENTS}
_HEARTBEAT = msgspec.json.Decoder(vocabulary.Heartbeat)


def encode(
    event: vocabulary.Event,
    *,
    event_id: str,
    producer: str,
    instance: str,
    sequence: int,
    boot: str,
) -> bytes:
    """Return the event as CloudEvents 1.0 JSON.

    `producer` is a path such as `plugins/device-plugin`; `source` consists of it and the node.
    """
    return dump(
        CloudEvent(
            id=event_id,
            source=f"/nodes/{event.node}/{producer}",
            type=event.TYPE,
            time=event.at,
            instance=instance,
            sequence=sequence,
            boot=boot,
            data=event,
        )
    )


def dump(event: CloudEvent) -> bytes:
    """Return an event as CloudEvents 1.0 JSON; fields unknown to this version are lost."""
    return msgspec.json.encode(
        _Envelope(
            specversion="1.0",
            id=event.id,
            source=event.source,
            type=TYPE_PREFIX + event.type,
            time=event.time,
            dataschema=schema_uri(event.type),
            instance=event.instance,
            sequence=str(event.sequence),
            boot=event.boot,
            data=msgspec.Raw(msgspec.json.encode(event.data)),
        )
    )


def decode(subject: str, payload: bytes, *, position: int = 0, stream: str = "") -> CloudEvent:
    """Return the event, validated against its type and its subject.

    Raises MalformedEvent.
    """
    if len(payload) > EVENT_BYTES_MAX:
        raise MalformedEvent(MalformedReason.OVERSIZED, f"{len(payload)} bytes")
    try:
        envelope = _ENVELOPE.decode(payload)
    except UNREADABLE as error:
        raise MalformedEvent(MalformedReason.NOT_A_CLOUDEVENT, str(error)) from None
    event_type = envelope.type.removeprefix(TYPE_PREFIX)
    schema = _SCHEMA.fullmatch(envelope.dataschema)
    if schema and int(schema.group(1)) != vocabulary.SCHEMA_VERSION:
        raise MalformedEvent(MalformedReason.UNKNOWN_VERSION, envelope.dataschema)
    if not envelope.type.startswith(TYPE_PREFIX) or event_type not in _DATA:
        raise MalformedEvent(MalformedReason.UNKNOWN_TYPE, envelope.type[:200])
    try:
        data = _DATA[event_type].decode(envelope.data)
        expected = data.subject
        is_expected = subject in {expected, data.earlier_subject}
        sequence = int(envelope.sequence)
    except (*UNREADABLE, ValueError) as error:
        raise MalformedEvent(MalformedReason.INVALID_DATA, str(error)) from None
    if envelope.time != data.at:
        raise MalformedEvent(MalformedReason.INVALID_DATA, "time differs from the time in the data")
    if not is_expected:
        problem = f"received on {subject}, but its data belongs to {expected}"
        raise MalformedEvent(MalformedReason.WRONG_SUBJECT, problem)
    return CloudEvent(
        id=envelope.id,
        source=envelope.source,
        type=event_type,
        time=envelope.time,
        instance=envelope.instance,
        sequence=sequence,
        boot=envelope.boot,
        data=data,
        position=position,
        stream=stream,
    )


def encode_heartbeat(heartbeat: vocabulary.Heartbeat) -> bytes:
    """Return the heartbeat as compact JSON: about 250 bytes with one resource."""
    return msgspec.json.encode(heartbeat)


def decode_heartbeat(payload: bytes, *, subject: str | None = None) -> vocabulary.Heartbeat:
    """Return the heartbeat; if `subject` is given, it must be the sender's subject.

    Raises MalformedEvent.
    """
    if len(payload) > HEARTBEAT_BYTES_MAX:
        raise MalformedEvent(MalformedReason.OVERSIZED, f"{len(payload)} bytes")
    try:
        heartbeat = _HEARTBEAT.decode(payload)
        expected = heartbeat.subject
    except (*UNREADABLE, ValueError) as error:
        raise MalformedEvent(MalformedReason.INVALID_DATA, str(error)) from None
    if heartbeat.v != vocabulary.SCHEMA_VERSION:
        raise MalformedEvent(MalformedReason.UNKNOWN_VERSION, f"v={heartbeat.v}")
    if subject is not None and subject != expected:
        problem = f"received on {subject}, but its data belongs to {expected}"
        raise MalformedEvent(MalformedReason.WRONG_SUBJECT, problem)
    return heartbeat


def schema_uri(event_type: str) -> str:
    """Return the address of the JSON Schema for an event type, including the version."""
    return f"{SCHEMA_PREFIX}v{vocabulary.SCHEMA_VERSION}/{event_type}.json"


def _short(value: object) -> str:
    text = value if isinstance(value, str) else msgspec.json.encode(value).decode()
    text = text if text.isprintable() else repr(text)
    return text if len(text) <= _SHOWN_MAX else text[: _SHOWN_MAX - 3] + "..."


UNREADABLE: Final = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
"""The errors that msgspec raises for invalid input; RecursionError is for input that is nested too
deeply.
"""
