"""Pure: implements server-side apply: ownership, conflicts and removal of fields.

A field is the path of a leaf, in the notation of `FieldsV1` (`f:labels`, `k:{"type":"Ready"}`), as
in structured-merge-diff `fieldpath/serialize-pe.go`. Items of lists with a merge key are owned
individually, other lists as a whole. Limitations: there is no schema, so maps that a real cluster
treats as one field (`nodeSelector`) are owned by key here, and each list has a single merge key
(`ports` by containerPort).
"""

import dataclasses
from collections.abc import Iterable, Iterator, Mapping

import orjson

from muster.local.kubernetes import refusals, trees

Path = tuple[str, ...]
Fields = frozenset[Path]

_SYSTEM = ("name", "generateName", "namespace", "uid", "resourceVersion", "creationTimestamp")
"""Metadata fields that have no owner."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Writer:
    """A manager and its kind of write; each combination owns its own fields."""

    manager: str
    applies: bool
    api_version: str
    subresource: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Entry:
    """The fields of an object that one writer owns, and when it last changed one of them."""

    writer: Writer
    fields: Fields
    time: str


def applied(live: trees.Tree, wanted: trees.Tree, writer: Writer, *, force: bool) -> trees.Tree:
    """Return `live` with `wanted` applied to it.

    Fields that the writer applied before and now omits are removed, unless another manager also
    owns them. Raises 409 Conflict with the names of the other managers, unless forced.
    """
    entries = _entries_before(live, writer, at="")
    named = leaves(wanted)
    now = leaves(live)
    changed = frozenset(path for path, value in named.items() if not _alike(now, path, value))
    if not force:
        contested = {e.writer: e.fields & changed for e in entries if e.writer != writer}
        _refuse_conflicts(contested, live)
    others = _union(entry.fields for entry in entries if entry.writer != writer)
    before = _union(entry.fields for entry in entries if entry.writer == writer)
    merged = trees.strategic(live, wanted)
    if not before:
        return merged
    return _pruned(merged, before=_members(before), managed=_members(others | named.keys()))


def recorded(
    old: trees.Tree, new: trees.Tree, writer: Writer, *, at: str, named: Fields | None
) -> trees.Tree:
    """Return `new` with updated `metadata.managedFields`.

    An update owns the fields it changed; an apply owns the fields it `named`. Removed fields have
    no owner. A writer's time is when it last changed anything, even if only the value of a field
    that it already owned (apimachinery util/managedfields/internal/managedfieldsupdater.go, 1.36).
    An object without owners gets its first owner with an apply (internal/skipnonapplied.go).
    """
    before, after = leaves(old), leaves(new)
    changed = _of_writer(
        writer, (path for path, value in after.items() if not _alike(before, path, value))
    )
    entries = _entries_before(old, writer, at=at)
    if old and not entries and not writer.applies:
        return _with_entries(new, [])
    if all(entry.writer != writer for entry in entries):
        entries.append(Entry(writer=writer, fields=frozenset(), time=at))
    kept = []
    for entry in entries:
        if entry.writer != writer:
            fields = entry.fields - changed
        else:
            fields = entry.fields | changed if named is None else named
        fields &= after.keys()
        wrote = entry.writer == writer and (changed or fields != entry.fields)
        if fields:
            time = at if wrote else entry.time
            kept.append(dataclasses.replace(entry, fields=fields, time=time))
    return _with_entries(new, kept)


def _entries_before(old: trees.Tree, writer: Writer, *, at: str) -> list[Entry]:
    """Return the owners of an object; before an apply, an object without owners gets one."""
    entries = read(old)
    if entries or not writer.applies:
        return entries
    unknown = dataclasses.replace(writer, manager="before-first-apply", applies=False)
    fields = _of_writer(unknown, leaves(old))
    return [Entry(writer=unknown, fields=fields, time=at)] if fields else []


def _of_writer(writer: Writer, fields: Iterable[Path]) -> Fields:
    """Return the fields that a writer can own: no status, or for `/status` no spec."""
    others = "f:spec" if writer.subresource else "f:status"
    return frozenset(path for path in fields if path[0] != others)


def read(tree: trees.Tree) -> list[Entry]:
    """Return the entries of `metadata.managedFields`."""
    entries = trees.value_at(tree, "metadata", "managedFields")
    if not isinstance(entries, list):
        return []
    return [_entry(item) for item in entries if isinstance(item, dict)]


def leaves(tree: trees.Tree) -> dict[Path, trees.Json]:
    """Return every ownable field of an object, with its value."""
    owned = trees.without(tree, "kind", "apiVersion", "metadata")
    metadata = trees.without(trees.object_at(tree, "metadata"), "managedFields", *_SYSTEM)
    return dict(_walk((), {**owned, "metadata": metadata}))


def _walk(path: Path, tree: trees.Tree) -> Iterator[tuple[Path, trees.Json]]:
    for key, value in tree.items():
        here = (*path, f"f:{key}")
        if isinstance(value, dict):
            if value:
                yield from _walk(here, value)
            elif path:
                yield here, value
        elif (merge_key := _merge_key(key, value)) and isinstance(value, list):
            for item in value:
                if isinstance(item, dict):
                    there = (*here, _item_step(merge_key, item))
                    yield (*there, "."), item[merge_key]
                    yield from _walk(there, item)
        elif value is not None:
            yield here, value


def _merge_key(name: str, value: trees.Json) -> str:
    """Return the merge key of a list if there is one and every item has it, else an empty text."""
    key = trees.MERGE_KEYS.get(name, "")
    if not isinstance(value, list) or not key:
        return ""
    return key if all(isinstance(item, dict) and key in item for item in value) else ""


def _item_step(merge_key: str, item: trees.Tree) -> str:
    return f"k:{orjson.dumps({merge_key: item[merge_key]}).decode()}"


def _alike(fields: Mapping[Path, trees.Json], path: Path, value: trees.Json) -> bool:
    return path in fields and trees.same(fields[path], value)


def _union(sets: Iterable[Fields]) -> Fields:
    return frozenset[Path]().union(*sets)


def _refuse_conflicts(taken: Mapping[Writer, Fields], live: trees.Tree) -> None:
    by_writer = {
        f'with "{writer.manager}"{_using(writer)}': [
            _dotted(path) for path in sorted(fields) if path[-1] != "."
        ]
        for writer, fields in sorted(taken.items(), key=lambda item: item[0].manager)
    }
    causes = tuple(
        refusals.Cause(field=field, message=f"conflict {who}", reason="FieldManagerConflict")
        for who, fields in by_writer.items()
        for field in fields
    )
    if not causes:
        return
    # apimachinery pkg/util/managedfields/internal/conflict.go
    text = f"1 conflict: {causes[0].message}: {causes[0].field}"
    if len(causes) > 1:
        lists = [
            "\n- ".join([f"conflicts {who}:", *fields])
            for who, fields in by_writer.items()
            if fields
        ]
        text = f"{len(causes)} conflicts: " + "\n".join(lists)
    raise refusals.RequestError(
        refusals.Reason.CONFLICT,
        f"Apply failed with {text}",
        name=trees.string_at(live, "metadata", "name"),
        causes=causes,
    )


def _using(writer: Writer) -> str:
    if writer.applies:
        return ""
    sub = f' with subresource "{writer.subresource}"' if writer.subresource else ""
    return f"{sub} using {writer.api_version}"


def _dotted(path: Path) -> str:
    """Return the path as written in conflicts: `.status.conditions[type="Ready"].reason`."""
    written = ""
    for step in path:
        if step.startswith("f:"):
            written += f".{step[2:]}"
        elif step.startswith("k:"):
            name, _, value = step[4:-1].partition('":')
            written += f"[{name}={value}]"
    return written


def _pruned(merged: trees.Tree, *, before: Fields, managed: Fields) -> trees.Tree:
    """Return `merged` without the fields that the writer owned `before` and that lost their owner.

    `managed` contains the fields with an owner.

    As in structured-merge-diff, merge/update.go (prune, addBackOwnedItems, addBackDanglingItems):
    first the parents of the previously owned fields are emptied, then fields with an owner are put
    back, then fields that were not owned `before`. A field without an owner comes back only if a
    field beside it has an owner: for example, a node's status disappears if this writer alone owned
    parts of it.
    """
    everything = _members(_fields(merged))
    managed |= {("f:metadata",), ("f:metadata", "f:name")}
    pruned = _without(merged, before)
    pruned = _without(merged, everything - _members(_fields(pruned)) - managed)
    pruned = _without(merged, (everything - _members(_fields(pruned))) & before)
    dense = trees.without_nulls(pruned)
    assert isinstance(dense, dict), "a tree stays a tree"
    return dense


def _members(fields: Fields) -> Fields:
    """Return the fields and their parents, except parents that are list items."""
    paths = {path[:-1] if path[-1] == "." else path for path in fields}
    above = {path[:end] for path in paths for end in range(1, len(path))}
    return frozenset(paths | {path for path in above if path[-1].startswith("f:")})


def _fields(tree: trees.Tree) -> Fields:
    """Return every leaf and empty object, and every item of a list with a merge key."""
    return frozenset(_all((), tree))


def _all(path: Path, tree: trees.Tree) -> Iterator[Path]:
    for key, value in tree.items():
        here = (*path, f"f:{key}")
        merge_key = _merge_key(key, value)
        if isinstance(value, dict) and value:
            yield from _all(here, value)
        elif merge_key and isinstance(value, list):
            for item in value:
                assert isinstance(item, dict), "items of such a list have a merge key"
                there = (*here, _item_step(merge_key, item))
                yield there
                yield from _all(there, item)
        else:
            yield here


def _without(tree: trees.Tree, gone: Fields) -> trees.Tree:
    """Return `tree` without these fields; an object or list that becomes empty turns into null."""
    touched = frozenset(path[:end] for path in gone for end in range(1, len(path)))
    return _left((), tree, gone, touched)


def _left(path: Path, tree: trees.Tree, gone: Fields, touched: Fields) -> trees.Tree:
    left: trees.Tree = {}
    for key, value in tree.items():
        here = (*path, f"f:{key}")
        if here in gone:
            continue
        merge_key = _merge_key(key, value)
        if here not in touched:
            left[key] = value
        elif isinstance(value, dict):
            left[key] = _left(here, value, gone, touched) or None
        elif merge_key and isinstance(value, list):
            left[key] = _left_items(here, merge_key, value, gone, touched) or None
        else:
            left[key] = value
    return left


def _left_items(
    path: Path, merge_key: str, items: list[trees.Json], gone: Fields, touched: Fields
) -> list[trees.Json]:
    left: list[trees.Json] = []
    for item in items:
        assert isinstance(item, dict), "items of such a list have a merge key"
        here = (*path, _item_step(merge_key, item))
        if here in gone:
            continue
        left.append(_left(here, item, gone, touched) if here in touched else item)
    return left


def _with_entries(tree: trees.Tree, entries: list[Entry]) -> trees.Tree:
    metadata = trees.without(trees.object_at(tree, "metadata"), "managedFields")
    if entries:
        metadata["managedFields"] = [_shown(entry) for entry in entries]
    return {**tree, "metadata": metadata}


def _shown(entry: Entry) -> trees.Tree:
    fields: trees.Tree = {}
    for path in sorted(entry.fields):
        here = fields
        for step in path:
            below = here.setdefault(step, {})
            assert isinstance(below, dict), "FieldsV1 holds objects only"
            here = below
    shown: trees.Tree = {
        "manager": entry.writer.manager,
        "operation": "Apply" if entry.writer.applies else "Update",
        "apiVersion": entry.writer.api_version,
        "time": entry.time,
        "fieldsType": "FieldsV1",
        "fieldsV1": fields,
    }
    if entry.writer.subresource:
        shown["subresource"] = entry.writer.subresource
    return shown


def _entry(item: trees.Tree) -> Entry:
    return Entry(
        writer=Writer(
            manager=trees.string_at(item, "manager"),
            applies=item.get("operation") == "Apply",
            api_version=trees.string_at(item, "apiVersion"),
            subresource=trees.string_at(item, "subresource"),
        ),
        fields=frozenset(_paths((), trees.object_at(item, "fieldsV1"))),
        time=trees.string_at(item, "time"),
    )


def _paths(path: Path, tree: trees.Tree) -> Iterator[Path]:
    for step, below in tree.items():
        if isinstance(below, dict) and below:
            yield from _paths((*path, step), below)
        else:
            yield (*path, step)
