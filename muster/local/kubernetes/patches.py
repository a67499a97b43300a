"""Pure: The three patch formats that change an object: merge, strategic merge, JSON patch.

Sources: RFC 7386, RFC 6902, and apimachinery `pkg/util/strategicpatch/patch.go` with the
`patchMergeKey` tags of `k8s.io/api/core/v1/types.go` (v1.36). The tags are looked up by the name
of the list alone, which is unambiguous for the kinds served here. A node's `taints` have no such
tag: a strategic patch replaces the whole list, here as in a real cluster.
"""

from muster.local.kubernetes import refusals, trees

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
"""Lists whose items are told apart by one of their fields."""

PRIMITIVE_SETS = ("finalizers", "podCIDRs")
"""Lists of strings that a strategic patch adds to."""

OPERATIONS_MAX = 1000

_DELETE_FROM = "$deleteFromPrimitiveList/"
_ORDER = "$setElementOrder/"


def merge(target: trees.Json, patch: trees.Json) -> trees.Json:
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


def strategic(target: trees.Tree, patch: trees.Tree) -> trees.Tree:
    """Return `target` after a strategic merge patch.

    Knows `$patch: replace` and `delete`, `$retainKeys`, `$deleteFromPrimitiveList/<list>`; accepts
    and ignores `$setElementOrder/<list>`: merged lists keep their order, new items come last.
    """
    match patch.get("$patch"):
        case None | "merge":
            merged = _retained(target, patch.get("$retainKeys"))
        case "replace":
            return _without_directives(trees.pruned(patch, "$patch"))
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


def json_patch(target: trees.Json, operations: trees.Json) -> trees.Json:
    """Return `target` after a JSON patch (RFC 6902): add, replace, remove, test, move.

    `copy` is left out: a few of them double an object into gigabytes.
    """
    if not isinstance(operations, list) or len(operations) > OPERATIONS_MAX:
        raise refusals.bad_request(f"a JSON patch is a list of up to {OPERATIONS_MAX} operations")
    for operation in operations:
        if not isinstance(operation, dict):
            raise refusals.bad_request("a JSON patch is a list of objects")
        target = _operated(target, operation)
    return target


def _strategic_value(key: str, old: trees.Json, new: trees.Json) -> trees.Json:
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


def _merged_items(merge_key: str, old: list[trees.Json], new: list[trees.Json]) -> list[trees.Json]:
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


def _item(item: trees.Json, merge_key: str) -> trees.Tree:
    if not isinstance(item, dict):
        raise refusals.bad_request(f"expected an object with {merge_key}, got {trees.kind(item)}")
    if item.get(merge_key) is None and item != {"$patch": "replace"}:
        raise refusals.bad_request(f"map does not contain declared merge key: {merge_key}")
    return item


def _has(item: trees.Json, merge_key: str, value: trees.Json) -> bool:
    return isinstance(item, dict) and trees.same(item.get(merge_key), value)


def _tree(value: trees.Json) -> trees.Tree:
    return value if isinstance(value, dict) else {}


def _retained(target: trees.Tree, keep: trees.Json) -> trees.Tree:
    if keep is None:
        return dict(target)
    if not isinstance(keep, list):
        raise refusals.bad_request("$retainKeys is a list of names")
    return {key: value for key, value in target.items() if key in keep}


def _delete_primitives(merged: trees.Tree, name: str, gone: trees.Json) -> None:
    kept = merged.get(name)
    if not isinstance(gone, list):
        raise refusals.bad_request(f"{_DELETE_FROM}{name} is a list")
    if isinstance(kept, list):
        merged[name] = [item for item in kept if item not in gone]


def _without_directives(patch: trees.Tree) -> trees.Tree:
    return {
        key: _without_directives(value) if isinstance(value, dict) else value
        for key, value in patch.items()
        if not key.startswith("$") and value is not None
    }


def _operated(target: trees.Json, operation: trees.Tree) -> trees.Json:
    path = _pointer(operation, "path")
    match operation.get("op"):
        case "add":
            return _put(target, path, _value(operation), insert=True)
        case "replace":
            return _put(target, path, _value(operation), insert=False)
        case "remove":
            return _removed(target, path)
        case "test":
            if not trees.same(_found(target, path), _value(operation)):
                raise _failed(f"testing value {operation['path']} failed")
            return target
        case "move":
            origin = _pointer(operation, "from")
            moved = _found(target, origin)
            return _put(_removed(target, origin), path, moved, insert=True)
        case other:
            raise refusals.bad_request(f"Unexpected kind: {other}")


def _pointer(operation: trees.Tree, member: str) -> list[str]:
    written = operation.get(member)
    if not isinstance(written, str) or (written and not written.startswith("/")):
        raise refusals.bad_request(f"a JSON patch needs a JSON pointer as {member}")
    steps = written.split("/")[1:]
    if len(steps) > trees.DEPTH_MAX:
        raise refusals.bad_request(f"{member} is deeper than {trees.DEPTH_MAX} levels")
    return [step.replace("~1", "/").replace("~0", "~") for step in steps]


def _value(operation: trees.Tree) -> trees.Json:
    if "value" not in operation:
        raise refusals.bad_request(f"operation {operation.get('op')} needs a value")
    return operation["value"]


def _put(target: trees.Json, path: list[str], value: trees.Json, *, insert: bool) -> trees.Json:
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


def _removed(target: trees.Json, path: list[str]) -> trees.Json:
    if not path:
        raise _failed("the whole object cannot be removed")
    step, rest = path[0], path[1:]
    if isinstance(target, dict) and step in target:
        if not rest:
            return trees.pruned(target, step)
        return {**target, step: _removed(target[step], rest)}
    if isinstance(target, list):
        at = _index(step, len(target))
        kept = [_removed(target[at], rest)] if rest else []
        return [*target[:at], *kept, *target[at + 1 :]]
    raise _failed(f"Unable to remove nonexistent key: {step}")


def _found(target: trees.Json, path: list[str]) -> trees.Json:
    for step in path:
        if isinstance(target, dict):
            target = target.get(step)
        elif isinstance(target, list):
            target = target[_index(step, len(target))]
        else:
            raise _failed(f"doc is missing path: {step}")
    return target


def _index(step: str, length: int) -> int:
    # RFC 6901: digits only, no leading zero, so that "01" and "-1" are no indexes
    if step.isascii() and step.isdigit() and str(int(step[:9])) == step and int(step) < length:
        return int(step)
    raise _failed(f"Unable to access invalid index: {step}")


def _failed(why: str) -> refusals.RequestError:
    message = f"the server rejected our request due to an error in our request: {why}"
    return refusals.RequestError(refusals.Reason.INVALID, message)
