"""Pure: JSON trees of unknown shape: decode, read, change and patch them.

Trees are never changed in place: the watch log or a page of a list may share them.
"""

from collections.abc import Iterator
from typing import TypeAlias

import orjson

from muster.local.kubernetes import refusals

Json: TypeAlias = "dict[str, Json] | list[Json] | str | int | float | bool | None"
Tree: TypeAlias = dict[str, Json]

DEPTH_MAX = 100
"""Deeper trees are refused, because functions that walk a tree are recursive."""

MERGE_KEYS = {
    "conditions": "type",
    "addresses": "type",
    "ownerReferences": "uid",
    "containers": "name",
    "initContainers": "name",
    "ephemeralContainers": "name",
    "volumes": "name",
    "env": "name",
    "ports": "containerPort",
    "volumeMounts": "mountPath",
    "volumeDevices": "devicePath",
    "imagePullSecrets": "name",
    "hostAliases": "ip",
    "podIPs": "ip",
    "hostIPs": "ip",
    "resourceClaims": "name",
    "schedulingGates": "name",
    "topologySpreadConstraints": "topologyKey",
}
"""The lists whose items are identified by a field, with the name of that field."""

PRIMITIVE_SETS = ("finalizers", "podCIDRs")
"""Lists of strings to which a strategic patch appends."""

OPERATIONS_MAX = 1000
_DELETE_FROM = "$deleteFromPrimitiveList/"
_ORDER = "$setElementOrder/"


def from_json(body: bytes) -> Json:
    """Decode JSON."""
    try:
        value: Json = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise refusals.bad_request(f"the body is not JSON: {error}") from error
    refuse_depth(value)
    return value


def refuse_depth(value: Json) -> None:
    """Refuse a tree that is nested too deeply for recursion."""
    level: list[Json] = [value]
    for _ in range(DEPTH_MAX):
        level = [child for node in level for child in _children(node)]
        if not level:
            return
    raise refusals.bad_request(f"the object is nested deeper than {DEPTH_MAX} levels")


def object_at(tree: Tree, *path: str) -> Tree:
    """Return the object at `path`, empty if there is none."""
    value = value_at(tree, *path)
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise refusals.bad_request(f"{'.'.join(path)}: expected an object, got {kind(value)}")
    return value


def string_at(tree: Tree, *path: str) -> str:
    """Return the string at `path`, empty if there is none."""
    value = value_at(tree, *path)
    if value is None:
        return ""
    if not isinstance(value, str):
        raise refusals.bad_request(f"{'.'.join(path)}: expected a string, got {kind(value)}")
    return value


def value_at(tree: Tree, *path: str) -> Json:
    """Return the value at `path`, or None."""
    here: Json = tree
    for step in path:
        if not isinstance(here, dict):
            return None
        here = here.get(step)
    return here


def with_value(tree: Tree, value: Json, *path: str) -> Tree:
    """Return a copy of `tree` with `value` at `path`; missing parents are created."""
    head, *rest = path
    if not rest:
        return {**tree, head: value}
    return {**tree, head: with_value(object_at(tree, head), value, *rest)}


def without(tree: Tree, *names: str) -> Tree:
    """Return a copy of `tree` without these top-level names."""
    return {key: value for key, value in tree.items() if key not in names}


def without_nulls(value: Json) -> Json:
    """Return the tree without null members, which decoding into a Go type drops as well."""
    if isinstance(value, dict):
        return {key: without_nulls(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [without_nulls(item) for item in value]
    return value


def same(left: Json, right: Json) -> bool:
    """Return whether two trees are the same JSON (in Python, 1 equals True)."""
    if isinstance(left, dict) and isinstance(right, dict):
        return left.keys() == right.keys() and all(same(left[key], right[key]) for key in left)
    if isinstance(left, list) and isinstance(right, list):
        return len(left) == len(right) and all(map(same, left, right))
    return isinstance(left, bool) == isinstance(right, bool) and left == right


def kind(value: Json) -> str:
    """Return the JSON name of the type of `value`."""
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


def merge(target: Json, patch: Json) -> Json:
    """Return `target` after a JSON merge patch (RFC 7386): null deletes, lists are replaced."""
    if not isinstance(patch, dict):
        return patch
    merged = dict(target) if isinstance(target, dict) else {}
    for key, value in patch.items():
        if value is None:
            merged.pop(key, None)
        else:
            merged[key] = merge(merged.get(key), value)
    return merged


def strategic(target: Tree, patch: Tree) -> Tree:
    """Return `target` after a strategic merge patch.

    Supported are `$patch: replace` and `delete`, `$retainKeys`, and
    `$deleteFromPrimitiveList/<list>`. `$setElementOrder/<list>` is ignored: merged lists keep their
    order, and new items come last.
    """
    match patch.get("$patch"):
        case None | "merge":
            merged = _retained(target, patch.get("$retainKeys"))
        case "replace":
            return _without_directives(without(patch, "$patch"))
        case "delete":
            return {}
        case other:
            raise refusals.bad_request(f"Unknown patch type found: $patch: {other}")
    for key, value in patch.items():
        if key in {"$patch", "$retainKeys"} or key.startswith(_ORDER):
            continue
        if key.startswith(_DELETE_FROM):
            _delete_primitives(merged, key.removeprefix(_DELETE_FROM), value)
        elif key.startswith("$"):
            raise refusals.bad_request(f"unknown directive {key} in a strategic merge patch")
        elif value is None:
            merged.pop(key, None)
        else:
            merged[key] = _strategic_value(key, merged.get(key), value)
    return merged


def json_patch(target: Json, operations: Json) -> Json:
    """Return `target` after a JSON patch (RFC 6902): add, replace, remove, test, move.

    `copy` is not supported: a few dozen copies could double an object to gigabytes.
    """
    if not isinstance(operations, list) or len(operations) > OPERATIONS_MAX:
        raise refusals.bad_request(f"a JSON patch is a list of up to {OPERATIONS_MAX} operations")
    for operation in operations:
        if not isinstance(operation, dict):
            raise refusals.bad_request("a JSON patch is a list of objects")
        target = _operated(target, operation)
    return target


def _strategic_value(key: str, old: Json, new: Json) -> Json:
    if isinstance(new, dict):
        if isinstance(old, dict):
            return strategic(old, new)
        return strategic({}, new)
    if isinstance(new, list) and key in PRIMITIVE_SETS:
        kept = old if isinstance(old, list) else []
        return [*kept, *(item for item in new if item not in kept)]
    if isinstance(new, list) and key in MERGE_KEYS:
        return _merged_items(MERGE_KEYS[key], old if isinstance(old, list) else [], new)
    return new


def _merged_items(merge_key: str, old: list[Json], new: list[Json]) -> list[Json]:
    patches = [_item(item, merge_key) for item in new]
    if any(patch == {"$patch": "replace"} for patch in patches):
        return [_without_directives(patch) for patch in patches if patch != {"$patch": "replace"}]
    merged = list(old)
    for patch in patches:
        value = patch[merge_key]
        at = [i for i, item in enumerate(merged) if _has(item, merge_key, value)]
        if patch.get("$patch") == "delete":
            merged = [item for i, item in enumerate(merged) if i not in at]
        elif at:
            merged[at[0]] = strategic(_tree(merged[at[0]]), patch)
        else:
            merged.append(strategic({}, patch))
    return merged


def _item(item: Json, merge_key: str) -> Tree:
    if not isinstance(item, dict):
        raise refusals.bad_request(f"expected an object with {merge_key}, got {kind(item)}")
    if item.get(merge_key) is None and item != {"$patch": "replace"}:
        raise refusals.bad_request(f"map does not contain declared merge key: {merge_key}")
    return item


def _has(item: Json, merge_key: str, value: Json) -> bool:
    return isinstance(item, dict) and same(item.get(merge_key), value)


def _tree(value: Json) -> Tree:
    return value if isinstance(value, dict) else {}


def _retained(target: Tree, keep: Json) -> Tree:
    if keep is None:
        return dict(target)
    if not isinstance(keep, list):
        raise refusals.bad_request("$retainKeys is a list of names")
    return {key: value for key, value in target.items() if key in keep}


def _delete_primitives(merged: Tree, name: str, gone: Json) -> None:
    kept = merged.get(name)
    if not isinstance(gone, list):
        raise refusals.bad_request(f"{_DELETE_FROM}{name} is a list")
    if isinstance(kept, list):
        merged[name] = [item for item in kept if item not in gone]


def _without_directives(patch: Tree) -> Tree:
    return {
        key: _without_directives(value) if isinstance(value, dict) else value
        for key, value in patch.items()
        if not key.startswith("$") and value is not None
    }


def _operated(target: Json, operation: Tree) -> Json:
    path = _pointer(operation, "path")
    match operation.get("op"):
        case "add":
            return _put(target, path, _value(operation), insert=True)
        case "replace":
            return _put(target, path, _value(operation), insert=False)
        case "remove":
            return _removed(target, path)
        case "test":
            if not same(_resolved(target, path), _value(operation)):
                raise _failed(f"testing value {operation['path']} failed")
            return target
        case "move":
            origin = _pointer(operation, "from")
            moved = _resolved(target, origin)
            return _put(_removed(target, origin), path, moved, insert=True)
        case other:
            raise refusals.bad_request(f"Unexpected kind: {other}")


def _pointer(operation: Tree, member: str) -> list[str]:
    pointer = operation.get(member)
    if not isinstance(pointer, str) or (pointer and not pointer.startswith("/")):
        raise refusals.bad_request(f"a JSON patch needs a JSON pointer as {member}")
    steps = pointer.split("/")[1:]
    if len(steps) > DEPTH_MAX:
        raise refusals.bad_request(f"{member} is deeper than {DEPTH_MAX} levels")
    return [step.replace("~1", "/").replace("~0", "~") for step in steps]


def _value(operation: Tree) -> Json:
    if "value" not in operation:
        raise refusals.bad_request(f"operation {operation.get('op')} needs a value")
    return operation["value"]


def _put(target: Json, path: list[str], value: Json, *, insert: bool) -> Json:
    if not path:
        return value
    step, rest = path[0], path[1:]
    if isinstance(target, dict):
        if step not in target and (rest or not insert):
            raise _failed(f"doc is missing key: {step}")
        return {**target, step: _put(target.get(step), rest, value, insert=insert)}
    if isinstance(target, list):
        if insert and not rest:
            at = len(target) if step == "-" else _index(step, len(target) + 1)
            return [*target[:at], value, *target[at:]]
        at = _index(step, len(target))
        return [*target[:at], _put(target[at], rest, value, insert=insert), *target[at + 1 :]]
    raise _failed(f"doc is missing path: {step}")


def _removed(target: Json, path: list[str]) -> Json:
    if not path:
        raise _failed("the whole object cannot be removed")
    step, rest = path[0], path[1:]
    if isinstance(target, dict) and step in target:
        if not rest:
            return without(target, step)
        return {**target, step: _removed(target[step], rest)}
    if isinstance(target, list):
        at = _index(step, len(target))
        kept = [_removed(target[at], rest)] if rest else []
        return [*target[:at], *kept, *target[at + 1 :]]
    raise _failed(f"Unable to remove nonexistent key: {step}")


def _resolved(target: Json, path: list[str]) -> Json:
    for step in path:
        if isinstance(target, dict):
            target = target.get(step)
        elif isinstance(target, list):
            target = target[_index(step, len(target))]
        else:
            raise _failed(f"doc is missing path: {step}")
    return target


def _index(step: str, length: int) -> int:
    # RFC 6901: digits only and no leading zero, so "01" and "-1" are not indexes
    if step.isascii() and step.isdigit() and str(int(step[:9])) == step and int(step) < length:
        return int(step)
    raise _failed(f"Unable to access invalid index: {step}")


def _failed(why: str) -> refusals.RequestError:
    message = f"the server rejected our request due to an error in our request: {why}"
    return refusals.RequestError(refusals.Reason.INVALID, message)
