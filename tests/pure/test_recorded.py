"""What earlier versions said is understood: events, beats, what services left for themselves.

Each folder of tests/recorded is a minor version of muster; scripts/record.py makes the newest.
"""

import json
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

import msgspec
import pytest

import muster
from muster import codec, silences, vocabulary
from muster_health.fleet import detector
from muster_health.model import config, signals, snapshot
from muster_notifier.routing import ledger, notifications
from scripts import record

FILES: Final = sorted((Path(__file__).resolve().parents[1] / "recorded").rglob("*.json"))
STORED: Final[dict[str, Callable[[bytes], object]]] = {
    "muster_state": snapshot.decode,
    "muster_ledger": ledger.decode,
    "muster_silences": silences.decode,
    "outbox": notifications.decode,
}
EVENTS: Final = [file for file in FILES if file.stem not in {*STORED, "heartbeat"}]


def said(file: Path) -> list[tuple[str, Any]]:
    return [(one["subject"], one["body"]) for one in json.loads(file.read_bytes())]


def encoded(body: object) -> bytes:
    return json.dumps(body).encode()


def lost(recorded: object, understood: object, where: str = "") -> list[str]:
    """Return where something recorded is not what was understood; what is new besides is none."""
    match recorded, understood:
        case dict(), dict():
            return [
                place
                for key, value in recorded.items()
                for place in lost(value, understood.get(key), f"{where}.{key}")
            ]
        case list(), list() if len(recorded) == len(understood):
            pairs = enumerate(zip(recorded, understood, strict=True))
            return [place for i, (a, b) in pairs for place in lost(a, b, f"{where}[{i}]")]
        case _:
            return [] if recorded == understood else [where]


def newer(value: object) -> object:
    """Return it as a later version might say it: with a field more, everywhere."""
    match value:
        case dict():
            # a label more would be a label, not a field
            told = {key: one if key == "labels" else newer(one) for key, one in value.items()}
            return {**told, "newer": {"a": [1]}}
        case list():
            return [newer(one) for one in value]
        case _:
            return value


def test_this_version_is_recorded_with_all_that_it_says() -> None:
    folder = muster.__version__.rpartition(".")[0]
    there = {file.stem for file in FILES if file.parent.name == folder}
    assert there == set(record.spoken()), "run scripts/record.py"


@pytest.mark.parametrize("file", EVENTS, ids=lambda file: f"{file.parent.name}-{file.stem}")
def test_recorded_events_are_understood_and_nothing_of_them_is_lost(file: Path) -> None:
    for subject, body in said(file):
        event = codec.decode(subject, encoded(body))
        assert event.type == file.stem
        assert lost(body, json.loads(codec.dump(event))) == []


@pytest.mark.parametrize("file", EVENTS, ids=lambda file: f"{file.parent.name}-{file.stem}")
def test_fields_of_a_later_minor_version_are_ignored(file: Path) -> None:
    for subject, body in said(file):
        later = {**body, "data": newer(body["data"]), "newer": 1}
        later["dataschema"] = later["dataschema"].replace("/v1/", "/v1.9/")
        assert codec.decode(subject, encoded(later)) == codec.decode(subject, encoded(body))


def test_recorded_beats_are_understood_with_fields_of_a_later_version() -> None:
    for file in (file for file in FILES if file.stem == "heartbeat"):
        for subject, body in said(file):
            beat = codec.decode_heartbeat(encoded(body), subject=subject)
            assert lost(body, json.loads(codec.encode_heartbeat(beat)) | {"v": beat.v}) == []
            later = {**body, "newer": 1, "res": newer(body.get("res", []))}
            assert codec.decode_heartbeat(encoded(later), subject=subject) == beat


@pytest.mark.parametrize("name", STORED)
def test_what_a_service_left_for_itself_is_understood(name: str) -> None:
    for file in (file for file in FILES if file.stem == name):
        for _, body in said(file):
            understood = STORED[name](encoded(body))
            assert lost(body, json.loads(msgspec.json.encode(understood))) == []


def test_health_goes_on_from_what_earlier_versions_said_and_left() -> None:
    watched = detector.Detector(
        config.Detection(), runbook_url="", at_zero=datetime(2026, 1, 2, tzinfo=UTC), leader=1
    )
    for file in FILES:
        for number, (subject, body) in enumerate(said(file)):
            # without a subject it is every field filled, and not what health would remember
            if file.stem == "muster_state" and subject:
                watched.receive(signals.Restored(state=snapshot.decode(encoded(body))), 0.0)
            elif file.stem == "heartbeat":
                beat = codec.decode_heartbeat(encoded(body), subject=subject)
                watched.receive(signals.Beat(heartbeat=beat), 1.0)
            elif subject.startswith("muster.event."):
                event = codec.decode(subject, encoded(body), position=number)
                report = signals.FromPlugin(
                    event=event.data, instance="i", sequence=number, position=number
                )
                watched.receive(report, 2.0)
    known = {(one.node, one.plugin) for one in watched.plugins()}
    assert ("gpu-1.example", "plugin") in known
    assert vocabulary.FLEET not in {node for node, _ in known}
