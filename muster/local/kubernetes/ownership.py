"""Pure: server-side apply: who owns a field, who may change it, and when it is removed.

A field is the path of a leaf, in the notation of `FieldsV1` (`f:labels`, `k:{"type":"Ready"}`), as
in structured-merge-diff `fieldpath/serialize-pe.go`. Items of lists with a merge key are owned one
by one, other lists as a whole. Limits: no schema, so maps that a real cluster treats as one field
(`nodeSelector`) are owned by key here, and merge keys are single (`ports` by containerPort).
"""

import dataclasses
from collections.abc import Iterable, Iterator, Mapping

import orjson

from muster.local.kubernetes import refusals, trees

Path = tuple[str, ...]
Fields = frozenset[Path]

_SYSTEM = ("name", "generateName", "namespace", "uid", "resourceVersion", "creationTimestamp")
"""Metadata without owners."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Writer:
    """A manager and its kind of write; each combination owns fields of its own."""

    manager: str
    applies: bool
    api_version: str
    subresource: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Entry:
    """One writer's share of an object."""

    writer: Writer
    fields: Fields
    time: str


def applied(live: trees.Tree, wanted: trees.Tree, writer: Writer, *, force: bool) -> trees.Tree:
    """Return `live` with `wanted` applied to it.

    Fields that the writer applied before and does not name any more are removed, unless somebody
    else owns them too. Raises 409 Conflict naming the other managers, unless forced.
    """
    entries = read(live)
    named = leaves(wanted)
    now = leaves(live)
    changed = frozenset(path for path, value in named.items() if not _alike(now, path, value))
    if not force:
        contested = {e.writer: e.fields & changed for e in entries if e.writer != writer}
        _refuse_conflicts(contested, live)
    others = _union(entry.fields for entry in entries if entry.writer != writer)
    before = _union(entry.fields for entry in entries if entry.writer == writer)
    left = live
    for path in sorted(before - named.keys() - others, key=_removal_order):
        left = _without(left, path)
    return trees.strategic(left, wanted)


def recorded(
    old: trees.Tree, new: trees.Tree, writer: Writer, *, at: str, named: Fields | None
) -> trees.Tree:
    """Return `new` with `metadata.managedFields` brought up to date.

    An update owns what it changed; an apply owns what it `named`. Nobody owns what is gone. A
    writer's time is when it last changed something, be it only a value of what it owned already
    (apimachinery util/managedfields/internal/managedfieldsupdater.go, 1.36).
    """
    before, after = leaves(old), leaves(new)
    changed = frozenset(path for path, value in after.items() if not _alike(before, path, value))
    entries = read(old)
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


def read(tree: trees.Tree) -> list[Entry]:
    """Return the entries of `metadata.managedFields`."""
    entries = trees.value_at(tree, "metadata", "managedFields")
    if not isinstance(entries, list):
        return []
    return [_entry(item) for item in entries if isinstance(item, dict)]


def leaves(tree: trees.Tree) -> dict[Path, trees.Json]:
    """Return every field of an object that somebody can own, with its value."""
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
    """Return the merge key of a list, if there is one and every item has it, else nothing."""
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
    causes = tuple(
        refusals.Cause(
            field=_dotted(path),
            message=f'conflict with "{writer.manager}"{_using(writer)}',
            reason="FieldManagerConflict",
        )
        for writer, fields in taken.items()
        for path in sorted(fields)
        if path[-1] != "."
    )
    if not causes:
        return
    conflicts = "; ".join(f"{cause.message}: {cause.field}" for cause in causes)
    plural = "s" if len(causes) > 1 else ""
    raise refusals.RequestError(
        refusals.Reason.CONFLICT,
        f"Apply failed with {len(causes)} conflict{plural}: {conflicts}",
        name=trees.string_at(live, "metadata", "name"),
        causes=causes,
    )


def _using(writer: Writer) -> str:
    sub = f' with subresource "{writer.subresource}"' if writer.subresource else ""
    return f"{sub} using {writer.api_version}"


def _dotted(path: Path) -> str:
    """Return the path as conflicts spell it, such as `.status.conditions[type="Ready"].reason`."""
    written = ""
    for step in path:
        if step.startswith("f:"):
            written += f".{step[2:]}"
        elif step.startswith("k:"):
            name, _, value = step[4:-1].partition('":')
            written += f"[{name}={value}]"
    return written


def _removal_order(path: Path) -> tuple[int, bool]:
    """Return a sort key that puts the contents of a list item before the item."""
    return -len(path), path[-1] == "."


def _without(tree: trees.Tree, path: Path) -> trees.Tree:
    """Return `tree` without the field and without objects that become empty."""
    step, rest = path[0][2:], path[1:]
    child = tree.get(step)
    if not rest:
        return trees.without(tree, step)
    if isinstance(child, dict):
        left: trees.Json = _without(child, rest)
    elif isinstance(child, list):
        left = _without_item(child, trees.MERGE_KEYS[step], rest)
    else:
        return tree
    return {**tree, step: left} if left else trees.without(tree, step)


def _without_item(items: list[trees.Json], merge_key: str, path: Path) -> list[trees.Json]:
    left: list[trees.Json] = []
    for item in items:
        if not isinstance(item, dict) or _item_step(merge_key, item) != path[0]:
            left.append(item)
        elif path[1] == ".":
            # what others wrote into the item keeps it
            left.extend([item] if len(item) > 1 else [])
        elif path[1] == f"f:{merge_key}":
            left.append(item)
        else:
            left.append(_without(item, path[1:]))
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
