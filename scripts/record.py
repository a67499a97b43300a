"""Adapter for files: records this version's messages, which later versions must understand.

    python scripts/record.py
        write tests/recorded/<minor version>, unless it exists
    NATS_URL=... python scripts/record.py SECONDS
        the same, and include messages that are received from a running muster

The recordings of released versions stay unchanged. To record this version again before its release,
first remove its directory.
"""

import asyncio
import os
import re
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

import msgspec
import nats
import orjson
from msgspec import inspect
from nats.aio.msg import Msg

import muster
from muster import codec, matching, vocabulary
from muster.nats import streams
from muster_health.model import snapshot
from muster_notifier.routing import notifications

ROOT: Final = Path(__file__).resolve().parent.parent
FOLDER: Final = ROOT / "tests/recorded" / muster.__version__.rpartition(".")[0]
STORED: Final = {
    "muster_state": snapshot.Snapshot,
    "muster_ledger": notifications.LedgerEntry,
    "muster_silences": matching.Silence,
    "outbox": notifications.Notification,
}
"""The messages that services store for themselves: the buckets and the outbox."""

Message = dict[str, object]

_AT: Final = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
_KINDS_MAX: Final = 4
_KEPT: Final = re.compile(rf"(?:\$KV\.|muster\.)({'|'.join(STORED)})\.")
_HEARD: Final = (
    *("$KV.>", "muster.heartbeat.>"),
    *(subject for stream in streams.STREAMS for subject in stream.subjects),
)
"""The recorded subjects, without requests.

A subscription to requests would make a plugin that has ended look slow instead of absent.
"""
_WORDS: Final = {"node": "gpu-1.example", "fingerprint": "0123456789abcdef"}
_NUMBERS: Final = {"v": 1, "page": 0}


def spoken() -> dict[str, list[Message]]:
    """Return messages of each kind with every field filled; together they have all enum values."""
    messages: dict[str, list[Message]] = {}
    for event in vocabulary.EVENTS:
        messages[event.TYPE] = [_event(filled) for filled in _filled(event)]
    messages["heartbeat"] = [
        {"subject": beat.subject, "body": orjson.loads(codec.encode_heartbeat(beat))}
        for beat in _filled(vocabulary.Heartbeat)
    ]
    for name, shape in STORED.items():
        messages[name] = [
            {"subject": "", "body": orjson.loads(msgspec.json.encode(filled))}
            for filled in _filled(shape)
        ]
    return messages


def _event(event: vocabulary.Event) -> Message:
    said = codec.encode(event, event_id="i:1", producer="p", instance="i", sequence=1, boot="b")
    return {"subject": event.subject, "body": orjson.loads(said)}


def _filled(shape: type[Any]) -> list[Any]:
    """Return as many values of a type as its longest enum has members."""
    made = inspect.type_info(shape)
    return [_value(made, "", number) for number in range(_words(made))]


def _words(kind: inspect.Type) -> int:
    match kind:
        case inspect.EnumType():
            return len(kind.cls)
        case inspect.StructType():
            return max((_words(field.type) for field in kind.fields), default=1)
        case inspect.VarTupleType():
            return _words(kind.item_type)
        case inspect.UnionType():
            return max(_words(member) for member in kind.types)
        case _:
            return 1


def _value(kind: inspect.Type, name: str, number: int) -> Any:  # noqa: C901, PLR0911  # one for each kind
    """Return a value of this type for a field of this name; enum members take turns."""
    match kind:
        case inspect.StructType() if kind.cls is matching.Silence:
            return matching.Silence(
                id="s-1", matchers=("node=a",), starts_at=_AT, ends_at=_AT, author="a", comment="c"
            )
        case inspect.StructType():
            fields = {field.name: _value(field.type, field.name, number) for field in kind.fields}
            if kind.cls is snapshot.Snapshot:
                fields["v"] = snapshot.VERSION
            return kind.cls(**fields)
        case inspect.EnumType():
            words = list(kind.cls)
            return words[number % len(words)]
        case inspect.VarTupleType():
            return (_value(kind.item_type, name, number),)
        case inspect.FrozenSetType():
            return frozenset({_value(kind.item_type, name, number)})
        case inspect.TupleType():
            return tuple(_value(member, name, number) for member in kind.item_types)
        case inspect.DictType():
            return {_value(kind.key_type, "key", number): _value(kind.value_type, name, number)}
        case inspect.Metadata():
            return _value(kind.type, name, number)
        case inspect.UnionType():
            there = [member for member in kind.types if not isinstance(member, inspect.NoneType)]
            return _value(there[0], name, number)
        case _:
            return _plain(kind, name)


def _plain(kind: inspect.Type, name: str) -> object:
    match kind:
        case inspect.StrType():
            text = _WORDS.get(name, name.replace("_", "-"))
            assert re.fullmatch(kind.pattern or ".*", text), f"{name}: {kind.pattern}"
            return text
        case inspect.IntType():
            return _NUMBERS.get(name, 7)
        case inspect.FloatType():
            return 0.5
        case inspect.BoolType():
            return True
        case inspect.DateTimeType():
            return _AT
        case _:
            raise AssertionError(f"{name}: {kind}: say here what to record")


class Heard:
    """The received messages by kind; for each kind a few that differ in their fields."""

    def __init__(self) -> None:
        self.messages: dict[str, dict[object, Message]] = {}

    def hear(self, subject: str, payload: bytes) -> None:
        """Store a message if it is one of ours and differs from earlier ones."""
        name = kind_of(subject, payload)
        if name is None:
            return
        body = orjson.loads(payload)
        known = self.messages.setdefault(name, {})
        if len(known) < _KINDS_MAX:
            known.setdefault(_shape(body), {"subject": subject, "body": body})


def kind_of(subject: str, payload: bytes) -> str | None:
    """Return a message's kind: an event type, `heartbeat`, or a bucket's name; otherwise None."""
    if kept := _KEPT.match(subject):
        return kept[1] if payload else None
    if subject.startswith("muster.heartbeat."):
        return "heartbeat"
    try:
        return codec.decode(subject, payload).type
    except codec.MalformedEvent:
        return None


def _shape(value: object) -> object:
    """Return the names of the fields that are not empty, with the types of their values."""
    match value:
        case dict():
            return tuple(sorted((key, _shape(item)) for key, item in value.items() if item))
        case list():
            return tuple(sorted({_shape(item) for item in value}, key=repr))
        case _:
            return type(value).__name__


async def _listen(heard: Heard, seconds: float) -> None:
    client = await nats.connect(os.environ["NATS_URL"], allow_reconnect=False)

    async def hear(message: Msg) -> None:
        heard.hear(message.subject, message.data)

    for subject in _HEARD:
        await client.subscribe(subject, cb=hear)
    await asyncio.sleep(seconds)
    await client.close()


def main() -> int:
    """Record; return the exit code."""
    if FOLDER.exists():
        print(f"{FOLDER.relative_to(ROOT)} already exists", file=sys.stderr)
        return 1
    heard = Heard()
    if "NATS_URL" in os.environ:
        asyncio.run(_listen(heard, float(sys.argv[1])))
    FOLDER.mkdir(parents=True)
    for name, said in spoken().items():
        messages = said + list(heard.messages.get(name, {}).values())
        lines = b",\n".join(orjson.dumps(message) for message in messages)
        (FOLDER / f"{name}.json").write_bytes(b"[\n" + lines + b"\n]\n")
        print(f"recorded {name}: {len(messages)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
