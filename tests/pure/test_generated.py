"""The generated files, schemas and the AsyncAPI document, agree with the code."""

import json
import re
from pathlib import Path
from typing import Final

import jsonschema
import pytest

from muster import __version__, vocabulary
from scripts import generate

ROOT: Final = Path(__file__).parents[2]
WANTED: Final = generate.documents()


def test_what_is_checked_in_is_what_the_types_say() -> None:
    there = {p.relative_to(ROOT): p.read_bytes() for p in (ROOT / "schemas").iterdir()}
    assert there == WANTED, "stale; run: make generate"


def test_there_is_a_schema_for_every_event_and_the_beat() -> None:
    types = {*vocabulary.BY_TYPE, vocabulary.Heartbeat.TYPE}
    assert {p.stem for p in WANTED} == {*types, "asyncapi", "config"}


@pytest.mark.parametrize("path", sorted(WANTED), ids=str)
def test_every_reference_leads_somewhere(path: Path) -> None:
    document = json.loads(WANTED[path])
    references = set(re.findall(rb'"\$ref": "([^"]+)"', WANTED[path]))
    for reference in references:
        target = document
        for step in reference.decode().removeprefix("#/").split("/"):
            target = target[step]
        assert isinstance(target, dict)


@pytest.mark.parametrize("path", sorted(WANTED.keys() - {Path("schemas/asyncapi.json")}), ids=str)
def test_every_schema_is_one(path: Path) -> None:
    schema = json.loads(WANTED[path])
    jsonschema.Draft202012Validator.check_schema(schema)
    assert schema["$id"] == f"https://muster.dev/schemas/v1/{path.stem}.json"


def test_the_asyncapi_document_names_each_channel_with_its_address_and_message() -> None:
    document = json.loads(WANTED[Path("schemas/asyncapi.json")])
    assert (document["asyncapi"], document["info"]["version"]) == ("3.0.0", __version__)
    kinds: list[type[vocabulary.Event | vocabulary.Heartbeat]] = [
        *vocabulary.EVENTS,
        vocabulary.Heartbeat,
    ]
    assert {n: c["address"] for n, c in document["channels"].items()} == {
        k.__name__: k.SUBJECT for k in kinds
    }
    assert {n: m["name"] for n, m in document["components"]["messages"].items()} == {
        k.__name__: k.TYPE for k in kinds
    }
    for channel in document["channels"].values():
        assert set(re.findall(r"{(\w+)}", channel["address"])) == set(channel["parameters"])
