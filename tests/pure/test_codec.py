"""Events and heartbeats are encoded and decoded; bytes that are neither are refused."""

import contextlib
import json
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

import jsonschema
import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import inspect

from muster import codec, vocabulary

SCHEMAS: Final = Path(__file__).parents[2] / "schemas"
NOW: Final = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
TEXT: Final = st.characters(exclude_categories=["Cs"])


def values(kind: inspect.Type) -> st.SearchStrategy[object]:
    """Return a strategy for all values that a type allows."""
    match kind:
        case inspect.StructType():
            return st.builds(kind.cls, **{f.name: values(f.type) for f in kind.fields})
        case inspect.VarTupleType():
            return st.lists(values(kind.item_type), max_size=3).map(tuple)
        case inspect.DictType():
            return st.dictionaries(values(kind.key_type), values(kind.value_type), max_size=3)
        case inspect.UnionType():
            return st.one_of([values(option) for option in kind.types])
        case inspect.StrType() | inspect.IntType() | inspect.FloatType():
            return scalars(kind)
        case _:
            return OTHERS[type(kind)](kind)


def scalars(
    kind: inspect.StrType | inspect.IntType | inspect.FloatType,
) -> st.SearchStrategy[object]:
    match kind:
        case inspect.StrType(pattern=str() as pattern):
            return st.from_regex(pattern.removesuffix("$") + r"\Z")
        case inspect.StrType():
            return st.text(TEXT, min_size=kind.min_length or 0, max_size=kind.max_length or 20)
        case inspect.IntType():
            return st.integers(kind.ge, kind.le)
        case inspect.FloatType(ge=None, gt=None):
            return st.floats(allow_nan=False, allow_infinity=False)
        case inspect.FloatType():
            return st.floats(0.001, kind.le or 1e9)


OTHERS: Final[Mapping[type[inspect.Type], Callable[[Any], st.SearchStrategy[object]]]] = {
    inspect.BoolType: lambda _: st.booleans(),
    inspect.NoneType: lambda _: st.none(),
    inspect.DateTimeType: lambda _: st.floats(0, 2e11).map(
        lambda seconds: datetime.fromtimestamp(seconds, UTC)
    ),
    inspect.EnumType: lambda kind: st.sampled_from(list(kind.cls)),
    # a pattern that only the JSON Schema has; other code checks it
    inspect.Metadata: lambda kind: scalars(
        inspect.StrType(pattern=kind.extra_json_schema["pattern"])
    ),
}


BY_KIND: Final = {kind: values(inspect.type_info(kind)) for kind in vocabulary.EVENTS}
BEAT: Final = values(inspect.type_info(vocabulary.Heartbeat))
STOPPING: Final = vocabulary.PluginStopping(
    node="gpu-1.example", at=NOW, plugin="device-plugin", reason=vocabulary.StopReason.UPGRADE
)
SUBJECT: Final = "muster.event.gpu-1_example.device-plugin.plugin.stopping"


def encoded(event: vocabulary.Event) -> bytes:
    return codec.encode(event, event_id="i:1", producer="p", instance="i", sequence=1, boot="b")


def changed(**attributes: object) -> bytes:
    tree = {**json.loads(encoded(STOPPING)), **attributes}
    return json.dumps({k: v for k, v in tree.items() if v is not ...}).encode()


def changed_data(**fields: object) -> bytes:
    return changed(data={**json.loads(encoded(STOPPING))["data"], **fields})


def reason_of(payload: bytes, subject: str = SUBJECT) -> codec.MalformedReason:
    with pytest.raises(codec.MalformedEvent) as refused:
        codec.decode(subject, payload)
    return refused.value.reason


@pytest.mark.parametrize("kind", vocabulary.EVENTS, ids=lambda kind: kind.TYPE)
@given(st.data())
@settings(max_examples=25)
def test_every_event_is_decoded_as_it_was_encoded(
    kind: type[vocabulary.Event], data: st.DataObject
) -> None:
    sent = data.draw(BY_KIND[kind])
    assert isinstance(sent, vocabulary.Event)
    back = codec.decode(sent.subject, encoded(sent), position=7)
    assert back == codec.CloudEvent(
        id="i:1",
        source=f"/nodes/{sent.node}/p",
        type=kind.TYPE,
        time=sent.at,
        instance="i",
        sequence=1,
        boot="b",
        data=sent,
        position=7,
    )
    assert codec.decode(sent.subject, codec.dump(back), position=7) == back
    assert str(back).isprintable()


@given(BEAT)
def test_every_heartbeat_is_decoded_as_it_was_encoded(sent: object) -> None:
    assert isinstance(sent, vocabulary.Heartbeat)
    sent = msgspec.structs.replace(sent, v=1)
    assert codec.decode_heartbeat(codec.encode_heartbeat(sent), subject=sent.subject) == sent


@given(st.sampled_from(vocabulary.EVENTS), st.data())
def test_what_is_sent_obeys_the_schemas_that_are_checked_in(
    kind: type[vocabulary.Event], data: st.DataObject
) -> None:
    event = data.draw(BY_KIND[kind])
    assert isinstance(event, vocabulary.Event)
    sent = json.loads(encoded(event))
    assert sent["dataschema"].endswith(f"/v1/{kind.TYPE}.json")
    VALIDATORS[kind.TYPE].validate(sent["data"])
    ASYNC_VALIDATORS[kind.__name__].validate(sent)


@given(BEAT)
def test_a_heartbeat_obeys_its_schema(beat: object) -> None:
    assert isinstance(beat, vocabulary.Heartbeat)
    VALIDATORS["heartbeat"].validate(json.loads(codec.encode_heartbeat(beat)))


def test_an_event_is_a_cloudevent_of_version_1() -> None:
    assert json.loads(encoded(STOPPING)) == {
        "specversion": "1.0",
        "id": "i:1",
        "source": "/nodes/gpu-1.example/p",
        "type": "dev.muster.plugin.stopping",
        "time": "2026-01-02T03:04:05Z",
        "dataschema": "https://muster.dev/schemas/v1/plugin.stopping.json",
        "datacontenttype": "application/json",
        "instance": "i",
        "sequence": "1",
        "boot": "b",
        "data": {
            "node": "gpu-1.example",
            "at": "2026-01-02T03:04:05Z",
            "plugin": "device-plugin",
            "reason": "upgrade",
            "expected_return_s": 0.0,
        },
    }


def test_an_event_is_one_readable_line() -> None:
    assert str(codec.decode(SUBJECT, encoded(STOPPING))) == (
        "03:04:05 gpu-1.example plugin.stopping plugin=device-plugin reason=upgrade"
    )


def test_the_heartbeat_of_one_resource_is_small() -> None:
    beat = vocabulary.Heartbeat(
        node="node-a",
        plugin="device-plugin",
        instance="0123456789abcdef",
        boot="0b4e4c1e",
        version="0.1.0",
        config_hash="0123abcd",
        seq=34_567,
        interval_s=5.0,
        uptime_s=172_835.1,
        wall=1_767_323_045.1,
        kubelet_socket="1234567.1767323045",
        resources=(
            vocabulary.ResourceBeat(
                name="example.com/fuse",
                registered_age_s=172_835.1,
                streams=1,
                last_send_age_s=172_835.0,
                registrations=1,
                probe_ok=True,
                probe_ms=1.25,
                probe_age_s=4.8,
                devices=8,
                healthy=8,
            ),
        ),
        loop_lag_ms=0.4,
    )
    assert len(codec.encode_heartbeat(beat)) <= 320


def test_unknown_fields_of_a_newer_sender_are_ignored() -> None:
    plain = codec.decode(SUBJECT, encoded(STOPPING))
    assert codec.decode(SUBJECT, changed(traceparent="00-ab", newer={"a": [1]})) == plain
    assert codec.decode(SUBJECT, changed_data(newer={"a": [1]})) == plain
    beat = b'{"node":"a","plugin":"p","i":"x","seq":1,"t":5,"newer":[1,{}]}'
    assert codec.decode_heartbeat(beat, subject="muster.heartbeat.a.p").seq == 1


def test_optional_attributes_that_a_foreign_sender_omits_are_no_malformation() -> None:
    bare = changed(dataschema=..., datacontenttype=..., instance=..., sequence=..., boot=...)
    assert codec.decode(SUBJECT, bare).data == STOPPING


@pytest.mark.parametrize(
    ("payload", "reason"),
    [
        (b" " * (codec.EVENT_BYTES_MAX + 1), codec.MalformedReason.OVERSIZED),
        (b"", codec.MalformedReason.NOT_A_CLOUDEVENT),
        (b"\xff\x00", codec.MalformedReason.NOT_A_CLOUDEVENT),
        (b"[]", codec.MalformedReason.NOT_A_CLOUDEVENT),
        (b'{"x":' + b"[" * 200_000, codec.MalformedReason.NOT_A_CLOUDEVENT),
        (b'{"x":' + b"[" * 9_000 + b"]" * 9_000 + b"}", codec.MalformedReason.NOT_A_CLOUDEVENT),
        (changed(specversion="0.3"), codec.MalformedReason.NOT_A_CLOUDEVENT),
        (changed(id=...), codec.MalformedReason.NOT_A_CLOUDEVENT),
        (changed(time="yesterday"), codec.MalformedReason.NOT_A_CLOUDEVENT),
        (changed(time="2026-01-02T03:04:05"), codec.MalformedReason.NOT_A_CLOUDEVENT),
        (changed(type="dev.muster.plugin.vanished"), codec.MalformedReason.UNKNOWN_TYPE),
        (changed(type="plugin.stopping"), codec.MalformedReason.UNKNOWN_TYPE),
        (changed(type="com.example.x"), codec.MalformedReason.UNKNOWN_TYPE),
        (
            changed(dataschema="https://muster.dev/schemas/v2/plugin.stopping.json"),
            codec.MalformedReason.UNKNOWN_VERSION,
        ),
        (changed(data=[]), codec.MalformedReason.INVALID_DATA),
        (changed(data=...), codec.MalformedReason.NOT_A_CLOUDEVENT),
        (changed(sequence="one"), codec.MalformedReason.INVALID_DATA),
        (changed(sequence="9" * 5_000), codec.MalformedReason.INVALID_DATA),
        (changed_data(reason="boredom"), codec.MalformedReason.INVALID_DATA),
        (changed_data(expected_return_s=-1), codec.MalformedReason.INVALID_DATA),
        (changed_data(at="2026-01-02T03:04:05"), codec.MalformedReason.INVALID_DATA),
        (changed_data(node="A_b"), codec.MalformedReason.INVALID_DATA),
        (changed_data(node="a\n"), codec.MalformedReason.INVALID_DATA),
        (changed_data(plugin="p\n"), codec.MalformedReason.INVALID_DATA),
        (changed_data(plugin="p.q"), codec.MalformedReason.INVALID_DATA),
        (changed_data(node="other"), codec.MalformedReason.WRONG_SUBJECT),
        (changed_data(plugin="other"), codec.MalformedReason.WRONG_SUBJECT),
    ],
    ids=lambda value: repr(value)[:40],
)
def test_each_malformation_has_its_reason(payload: bytes, reason: codec.MalformedReason) -> None:
    assert reason_of(payload) == reason


def test_an_event_on_the_subject_of_another_node_is_malformed() -> None:
    subject = "muster.event.gpu-2.device-plugin.plugin.stopping"
    assert reason_of(encoded(STOPPING), subject) == codec.MalformedReason.WRONG_SUBJECT


@pytest.mark.parametrize(
    ("payload", "reason"),
    [
        (b" " * (codec.HEARTBEAT_BYTES_MAX + 1), codec.MalformedReason.OVERSIZED),
        (b"", codec.MalformedReason.INVALID_DATA),
        (b'{"x":' + b"[" * 60_000, codec.MalformedReason.INVALID_DATA),
        (b'{"node":"a","plugin":"p","i":"x","seq":1,"t":0}', codec.MalformedReason.INVALID_DATA),
        (b'{"node":"a","plugin":"p","i":"x","seq":-1,"t":5}', codec.MalformedReason.INVALID_DATA),
        (
            b'{"node":"a\\n","plugin":"p","i":"x","seq":1,"t":5}',
            codec.MalformedReason.INVALID_DATA,
        ),
        (
            b'{"node":"a","plugin":"p\\n","i":"x","seq":1,"t":5}',
            codec.MalformedReason.INVALID_DATA,
        ),
        (
            b'{"v":2,"node":"a","plugin":"p","i":"x","seq":1,"t":5}',
            codec.MalformedReason.UNKNOWN_VERSION,
        ),
        (b'{"node":"b","plugin":"p","i":"x","seq":1,"t":5}', codec.MalformedReason.WRONG_SUBJECT),
    ],
    ids=lambda value: repr(value)[:40],
)
def test_each_malformed_heartbeat_has_its_reason(
    payload: bytes, reason: codec.MalformedReason
) -> None:
    with pytest.raises(codec.MalformedEvent) as refused:
        codec.decode_heartbeat(payload, subject="muster.heartbeat.a.p")
    assert refused.value.reason == reason


@pytest.mark.parametrize("name", ["node", "plugin"])
def test_an_answer_to_a_probe_must_have_the_same_names(name: str) -> None:
    tree = {"node": "a", "plugin": "p", "i": "x", "seq": 1, "t": 5, name: "a\n"}
    with pytest.raises(codec.MalformedEvent, match="invalid_data"):
        codec.decode_heartbeat(json.dumps(tree).encode())


@pytest.mark.parametrize(
    ("node", "plugin"), [("a_b", "p"), ("A", "p"), ("a", "P"), ("a", "p_q"), ("a", "p" * 64)]
)
def test_a_heartbeat_with_impossible_names_is_refused_though_they_match_its_subject(
    node: str, plugin: str
) -> None:
    payload = json.dumps({"node": node, "plugin": plugin, "i": "x", "seq": 1, "t": 5}).encode()
    with pytest.raises(codec.MalformedEvent, match="invalid_data"):
        codec.decode_heartbeat(payload, subject=f"muster.heartbeat.{node}.{plugin}")


def decoded(payload: bytes) -> codec.CloudEvent | vocabulary.Heartbeat | None:
    """Decode as an event and as a heartbeat; any error but MalformedEvent fails the test."""
    decoded_event: codec.CloudEvent | vocabulary.Heartbeat | None = None
    with contextlib.suppress(codec.MalformedEvent):
        decoded_event = codec.decode(SUBJECT, payload)
    with contextlib.suppress(codec.MalformedEvent):
        decoded_event = codec.decode_heartbeat(payload)
    return decoded_event


JSON: Final = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(TEXT),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(TEXT), inner),
    max_leaves=8,
)


@given(st.binary() | JSON.map(lambda tree: json.dumps(tree).encode()))
def test_arbitrary_bytes_are_at_worst_malformed(payload: bytes) -> None:
    assert decoded(payload) is None


@given(
    st.sampled_from(
        [encoded(STOPPING), b'{"node":"a","plugin":"p","i":"x","seq":1,"t":5,"res":[{"r":"a"}]}']
    ),
    st.lists(st.tuples(st.floats(0, 1), st.integers(0, 2), st.binary(max_size=3)), max_size=4),
)
def test_a_damaged_message_is_at_worst_malformed(
    payload: bytes, damages: list[tuple[float, int, bytes]]
) -> None:
    for place, lost, put in damages:
        start = int(place * len(payload))
        payload = payload[:start] + put + payload[start + lost :]
    decoded_event = decoded(payload)
    if isinstance(decoded_event, codec.CloudEvent):
        assert decoded_event.data.subject == SUBJECT


@given(
    st.sampled_from(["id", "source", "type", "time", "dataschema", "instance", "sequence", "data"]),
    JSON,
)
def test_an_attribute_of_any_other_shape_is_at_worst_malformed(name: str, value: object) -> None:
    decoded(changed(**{name: value}))


@given(st.sampled_from(["node", "at", "plugin", "reason", "expected_return_s"]), JSON)
def test_a_field_of_any_other_shape_is_at_worst_malformed(name: str, value: object) -> None:
    decoded(changed_data(**{name: value}))


def test_events_of_one_producer_are_ordered_by_its_sequence() -> None:
    first = codec.decode(SUBJECT, encoded(STOPPING), position=9)
    second = msgspec.structs.replace(first, sequence=2, position=8)
    assert (first.precedes(second), second.precedes(first)) == (True, False)


def test_events_of_two_producers_are_ordered_by_their_stream_position() -> None:
    first = codec.decode(SUBJECT, encoded(STOPPING), position=8)
    second = msgspec.structs.replace(first, instance="other", sequence=0, position=9)
    assert (first.precedes(second), second.precedes(first)) == (True, False)


def _validators() -> Mapping[str, jsonschema.Draft202012Validator]:
    decoded_event = {}
    kinds: list[type[vocabulary.Event | vocabulary.Heartbeat]] = [
        *vocabulary.EVENTS,
        vocabulary.Heartbeat,
    ]
    for kind in kinds:
        schema = json.loads((SCHEMAS / f"{kind.TYPE}.json").read_bytes())
        jsonschema.Draft202012Validator.check_schema(schema)
        decoded_event[kind.TYPE] = jsonschema.Draft202012Validator(
            schema, format_checker=jsonschema.Draft202012Validator.FORMAT_CHECKER
        )
    return decoded_event


def _async_validators() -> Mapping[str, jsonschema.Draft202012Validator]:
    document = json.loads((SCHEMAS / "asyncapi.json").read_bytes())
    return {
        name: jsonschema.Draft202012Validator(
            {**message["payload"], "components": document["components"]}
        )
        for name, message in document["components"]["messages"].items()
    }


VALIDATORS: Final = _validators()
ASYNC_VALIDATORS: Final = _async_validators()


@pytest.mark.parametrize("at", ["0001-01-01T00:00:00+23:00", "9999-12-31T23:59:59-23:00"])
def test_a_time_that_overflows_in_another_zone_is_malformed(at: str) -> None:
    event = vocabulary.PluginStopping(
        node="a.b", plugin="p", at=datetime.now(UTC), reason=vocabulary.StopReason.SIGNAL
    )
    sent = codec.encode(
        event, event_id="1", producer="plugins/p", instance="i", sequence=1, boot="b"
    )
    shown = json.loads(sent)
    shown["time"] = shown["data"]["at"] = at
    with pytest.raises(codec.MalformedEvent) as caught:
        codec.decode(event.subject, json.dumps(shown).encode())
    assert caught.value.reason is codec.MalformedReason.INVALID_DATA
