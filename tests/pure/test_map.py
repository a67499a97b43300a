"""The flow table in services/README.md says what the code does."""

import ast
import re
from pathlib import Path
from typing import Any

from muster import vocabulary

ROOT = Path(__file__).resolve().parents[2]
ROOMS = ("plugin", "labeler", "health", "notifier", "gate")
SPEAKER = {
    "event": "plugin",
    "heartbeat": "plugin",
    "verdict": "health",
    "alert": "health",
    "label": "labeler",
    "notification": "notifier",
    "sys": "health",
}
"""Who may publish a kind of subject."""


def mentioned(room: str) -> set[str]:
    """Return the names of the vocabulary that a room's code uses."""
    files = (ROOT / "services" / room).rglob("*.py")
    nodes = [node for file in files for node in ast.walk(ast.parse(file.read_text("utf-8")))]
    return {
        node.attr
        for node in nodes
        if isinstance(node, ast.Attribute) and getattr(node.value, "id", "") == "vocabulary"
    }


def table() -> dict[str, tuple[str, str, set[str]]]:
    """Return the map's rows: event -> (subject, from, to)."""
    rows = {}
    for line in (ROOT / "services" / "README.md").read_text("utf-8").splitlines():
        row = re.fullmatch(r"\| `(\w+)` \| `([^`]+)` \| ([^|]*) \| ([^|]*) \|", line)
        if row:
            rows[row[1]] = (row[2], row[3], {room for room in ROOMS if room in row[4].split(", ")})
    return rows


def test_the_map_names_every_event_with_its_subject_its_maker_and_its_takers() -> None:
    uses = {room: mentioned(room) for room in ROOMS}
    expected = {}
    kinds: list[Any] = [*vocabulary.EVENTS, vocabulary.Heartbeat]
    for kind in kinds:
        name, speaker = kind.__name__, SPEAKER[kind.SUBJECT.split(".")[1]]
        subject = kind.SUBJECT.replace("{", "<").replace("}", ">")
        takers = {room for room in ROOMS if name in uses[room] and room != speaker}
        expected[name] = (subject, speaker if name in uses[speaker] else "-", takers)
    assert table() == expected
