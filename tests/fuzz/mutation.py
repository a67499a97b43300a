"""Changes one value in JSON, so that the input is still JSON and reaches later checks."""

import json
import random
from typing import Any, Final

_VALUES: Final[tuple[Any, ...]] = (
    *(None, True, False, 0, -1, 1, 2**31, 2**53, 2**63, -(2**63), 10**30, 0.5, 1e308, -1e-9),
    *("", "a", "a/b", "0", "\n", "\x00", "\x1b[31m", "\u202e", "x" * 300, "_fleet", "*", ">", ".."),
    *("0001-01-01T00:00:00+23:59", "9999-12-31T23:59:59-23:59", "2026-01-02T03:04:05Z"),
    *([], {}, [[]], {"a": 1}),
)


def mutated(data: bytes, seed: int) -> bytes | None:
    """Return the input with one value of one of its lines changed; None if no line is JSON."""
    chance = random.Random(seed)
    lines = data.split(b"\n")
    places = [at for at, line in enumerate(lines) if line[:1] in {b"{", b"["}]
    if not places:
        return None
    at = chance.choice(places)
    try:
        tree = json.loads(lines[at])
        _change(tree, chance)
        lines[at] = json.dumps(tree, separators=(",", ":")).encode()
    except (ValueError, RecursionError):
        return None
    return b"\n".join(lines)


def _change(tree: Any, chance: random.Random) -> None:
    """Replace, remove, copy or swap one value somewhere in a tree."""
    containers = [*_containers(tree)]
    box = chance.choice(containers)
    keys = [*box] if isinstance(box, dict) else [*range(len(box))]
    if not keys:
        return
    key, other = chance.choice(keys), chance.choice(keys)
    match chance.randrange(5):
        case 0:
            box[key] = chance.choice(_VALUES)
        case 1:
            del box[key]
        case 2:
            box[key], box[other] = box[other], box[key]
        case 3 if isinstance(box, list):
            box.append(box[key])
        case _:
            donor = chance.choice(containers)
            values = [*donor.values()] if isinstance(donor, dict) else donor
            box[key] = json.loads(json.dumps(chance.choice(values))) if values else None


def _containers(tree: Any) -> list[Any]:
    boxes, waiting = [], [tree]
    while waiting:
        box = waiting.pop()
        if isinstance(box, dict | list):
            boxes.append(box)
            waiting += box.values() if isinstance(box, dict) else box
    return boxes
