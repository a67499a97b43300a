"""Pure: JSON trees: reading a request's body, and walking it without trusting its shape.

Trees are never changed in place: whoever holds one (the watch log, a page of a list) may keep it.
"""

from collections.abc import Iterator
from typing import TypeAlias

import orjson

from muster.local.kubernetes import refusals

Json: TypeAlias = "dict[str, Json] | list[Json] | str | int | float | bool | None"
Tree: TypeAlias = dict[str, Json]

DEPTH_MAX = 100
"""Deeper trees are refused: everything that walks a tree recurses."""


def from_json(body: bytes) -> Json:
    """Return the tree that the JSON text `body` spells."""
    try:
        value: Json = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise refusals.bad_request(f"the body is not JSON: {error}") from error
    refuse_depth(value)
    return value


def refuse_depth(value: Json) -> None:
    """Refuse a tree that is nested too deep to be walked."""
    level: list[Json] = [value]
    for _ in range(DEPTH_MAX):
        level = [child for node in level for child in _children(node)]
        if not level:
            return
    raise refusals.bad_request(f"the object is nested deeper than {DEPTH_MAX} levels")


def branch(tree: Tree, *path: str) -> Tree:
    """Return the object at `path`, empty if there is none."""
    found = look(tree, *path)
    if found is None:
        return {}
    if not isinstance(found, dict):
        raise refusals.bad_request(f"{'.'.join(path)}: expected an object, got {kind(found)}")
    return found


def text(tree: Tree, *path: str) -> str:
    """Return the string at `path`, empty if there is none."""
    found = look(tree, *path)
    if found is None:
        return ""
    if not isinstance(found, str):
        raise refusals.bad_request(f"{'.'.join(path)}: expected a string, got {kind(found)}")
    return found


def look(tree: Tree, *path: str) -> Json:
    """Return whatever lies at `path`, or None."""
    here: Json = tree
    for step in path:
        if not isinstance(here, dict):
            return None
        here = here.get(step)
    return here


def planted(tree: Tree, value: Json, *path: str) -> Tree:
    """Return a copy of `tree` with `value` at `path`; objects on the way are made."""
    head, *rest = path
    if not rest:
        return {**tree, head: value}
    return {**tree, head: planted(branch(tree, head), value, *rest)}


def pruned(tree: Tree, *names: str) -> Tree:
    """Return a copy of `tree` without these top-level names."""
    return {key: value for key, value in tree.items() if key not in names}


def dense(value: Json) -> Json:
    """Return the tree without null members: decoding into a Go type drops them, too."""
    if isinstance(value, dict):
        return {key: dense(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [dense(item) for item in value]
    return value


def same(one: Json, other: Json) -> bool:
    """Tell whether two trees are the same JSON (in Python alone, 1 equals True)."""
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(same, one, other))
    return isinstance(one, bool) == isinstance(other, bool) and one == other


def kind(value: Json) -> str:
    """Return JSON's own word for the type of `value`."""
    match value:
        case None:
            return "null"
        case bool():
            return "a boolean"
        case int() | float():
            return "a number"
        case str():
            return "a string"
        case list():
            return "a list"
        case dict():
            return "an object"


def _children(value: Json) -> Iterator[Json]:
    match value:
        case dict():
            yield from value.values()
        case list():
            yield from value
        case _:
            return
