"""Everything that earlier versions wrote can be read: events, heartbeats, the services' state.

Each folder of tests/recorded is a minor version of muster; scripts/record.py writes the newest.
"""

import json
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

import msgspec
import pytest

import muster
from muster import codec, matching, vocabulary
from muster_health.fleet import detector
from muster_health.model import config, signals, snapshot
from muster_notifier.routing import notifications
from scripts import record

FILES: Final = sorted((Path(__file__).resolve().parents[1] / "recorded").rglob("*.json"))
STORED: Final[dict[str, Callable[[bytes], object]]] = {
    "muster_state": snapshot.decode,
    "muster_ledger": notifications.decode_entry,
    "muster_silences": matching.decode_silence,
    "outbox": notifications.decode,
}
EVENTS: Final = [file for file in FILES if file.stem not in {*STORED, "heartbeat"}]


def messages(file: Path) -> list[tuple[str, Any]]:
    return [(message["subject"], message["body"]) for message in json.loads(file.read_bytes())]


def encoded(body: object) -> bytes:
    return json.dumps(body).encode()


def lost(recorded: object, decoded: object, where: str = "") -> list[str]:
    """Return where the decoded value differs from the recorded one; additional fields are fine."""
    match recorded, decoded:
        case dict(), dict():
            return [
                place
                for key, value in recorded.items()
                for place in lost(value, decoded.get(key), f"{where}.{key}")
            ]
        case list(), list() if len(recorded) == len(decoded):
            pairs = enumerate(zip(recorded, decoded, strict=True))
            return [place for i, (a, b) in pairs for place in lost(a, b, f"{where}[{i}]")]
        case _:
            return [] if recorded == decoded else [where]


def newer(value: object) -> object:
    """Return a value as a later version might write it: with an additional field in each object."""
    match value:
        case dict():
            # their keys are data: an additional key would be a label or a receiver, not a field
            fields = {
                key: field if key in {"labels", "receivers"} else newer(field)
                for key, field in value.items()
            }
            return {**fields, "newer": {"a": [1]}}
        case list():
            return [newer(item) for item in value]
        case _:
            return value


def test_everything_that_this_version_writes_is_recorded() -> None:
    folder = muster.__version__.rpartition(".")[0]
    recorded = {file.stem for file in FILES if file.parent.name == folder}
    assert recorded == set(record.spoken()), "run scripts/record.py"


@pytest.mark.parametrize("file", EVENTS, ids=lambda file: f"{file.parent.name}-{file.stem}")
def test_recorded_events_are_decoded_and_nothing_is_lost(file: Path) -> None:
    for subject, body in messages(file):
        event = codec.decode(subject, encoded(body))
        assert event.type == file.stem
        assert lost(body, json.loads(codec.dump(event))) == []


@pytest.mark.parametrize("file", EVENTS, ids=lambda file: f"{file.parent.name}-{file.stem}")
def test_fields_of_a_later_minor_version_are_ignored(file: Path) -> None:
    for subject, body in messages(file):
        later = {**body, "data": newer(body["data"]), "newer": 1}
        later["dataschema"] = later["dataschema"].replace("/v1/", "/v1.9/")
        assert codec.decode(subject, encoded(later)) == codec.decode(subject, encoded(body))


def test_recorded_heartbeats_are_decoded_with_fields_of_a_later_version() -> None:
    for file in (file for file in FILES if file.stem == "heartbeat"):
        for subject, body in messages(file):
            heartbeat = codec.decode_heartbeat(encoded(body), subject=subject)
            assert (
                lost(body, json.loads(codec.encode_heartbeat(heartbeat)) | {"v": heartbeat.v}) == []
            )
            later = {**body, "newer": 1, "res": newer(body.get("res", []))}
            assert codec.decode_heartbeat(encoded(later), subject=subject) == heartbeat


@pytest.mark.parametrize("name", STORED)
def test_state_that_a_service_saved_is_decoded(name: str) -> None:
    for file in (file for file in FILES if file.stem == name):
        for _, body in messages(file):
            decoded = STORED[name](encoded(body))
            assert lost(body, json.loads(msgspec.json.encode(decoded))) == []


def test_health_continues_from_the_state_and_events_of_earlier_versions() -> None:
    watched = detector.Detector(
        config.Detection(), runbook_url="", at_zero=datetime(2026, 1, 2, tzinfo=UTC), leader=1
    )
    for file in FILES:
        for number, (subject, body) in enumerate(messages(file)):
            # a record without a subject has all fields set, which health would never save
            if file.stem == "muster_state" and subject:
                watched.receive(signals.Restored(state=snapshot.decode(encoded(body))), 0.0)
            elif file.stem == "heartbeat":
                heartbeat = codec.decode_heartbeat(encoded(body), subject=subject)
                watched.receive(signals.HeartbeatArrived(heartbeat=heartbeat), 1.0)
            elif subject.startswith("muster.event."):
                event = codec.decode(subject, encoded(body), position=number)
                report = signals.FromPlugin(
                    event=event.data, instance="i", sequence=number, position=number
                )
                watched.receive(report, 2.0)
    known = {(plugin.node, plugin.plugin) for plugin in watched.plugins()}
    assert ("gpu-1.example", "plugin") in known
    assert vocabulary.FLEET not in {node for node, _ in known}
