"""The event table in services/README.md, and docs/architecture.md, agree with the code."""

import ast
import re
from pathlib import Path
from typing import Any

from muster import vocabulary
from tests.worlds import event_map

ROOT = Path(__file__).resolve().parents[2]
SPEAKER = {
    "event": "plugin",
    "inventory": "plugin",
    "heartbeat": "plugin",
    "verdict": "health",
    "alert": "health",
    "label": "labeler",
    "notification": "notifier",
    "sys": "health",
    "audit": "console",
}
"""The service that may publish a kind of subject."""
OTHER_SPEAKER = {
    "NodeLimited": "gate",
    **{kind: "fuse" for kind in vocabulary.__dict__ if kind.startswith("Fuse")},
}
OF_NODE = {"plugin", "fuse"}
"""Both report as plugins, and neither receives the events of the other."""
READERS = {"console"}
"""Services that show all events, which the table does not repeat in each row."""


def mentioned(service: str) -> set[str]:
    """Return the names of the vocabulary that a service's code uses."""
    files = [*(ROOT / "services" / service).rglob("*.py")]
    if service in OF_NODE:
        files.append(ROOT / "muster/nats/heartbeat_sender.py")
    nodes = [node for file in files for node in ast.walk(ast.parse(file.read_text("utf-8")))]
    return {
        node.attr
        for node in nodes
        if isinstance(node, ast.Attribute) and getattr(node.value, "id", "") == "vocabulary"
    }


def test_the_map_names_every_event_with_its_subject_its_maker_and_its_takers() -> None:
    uses = {service: mentioned(service) for service in event_map.SERVICES}
    expected = {}
    kinds: list[Any] = [*vocabulary.EVENTS, vocabulary.Heartbeat]
    for kind in kinds:
        name = kind.__name__
        speaker = OTHER_SPEAKER.get(name, SPEAKER[kind.SUBJECT.split(".")[1]])
        subject = kind.SUBJECT.replace("{", "<").replace("}", ">")
        own = {*(OF_NODE if speaker in OF_NODE else {speaker}), *READERS}
        takers = {
            service
            for service in event_map.SERVICES
            if name in uses[service] and service not in own
        }
        expected[name] = (subject, speaker if name in uses[speaker] else "-", takers)
    assert event_map.table() == expected


def test_every_module_and_function_that_the_architecture_names_exists() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text("utf-8")
    files = {
        f"/{path.relative_to(ROOT).with_suffix('')}": path.read_text("utf-8")
        for folder in ("muster", "services")
        for path in (ROOT / folder).rglob("*.py")
    }
    cells = re.findall(r"^\| \d+ \| (.*?) \|", text, re.MULTILINE)
    names = {name for cell in cells for name in re.findall(r"`(.*?)`", cell)}
    names |= set(re.findall(r"`([a-z_]+(?:/[a-z_]+)+(?::\w+)?)`", text))
    assert "muster/machine" in names, "modules outside the tables are checked too"
    missing = {
        name
        for name in names
        for module, _, function in [name.partition(":")]
        if not any(
            path.endswith(f"/{module}") and f"def {function}" in source
            for path, source in files.items()
        )
    }
    assert missing == set()
