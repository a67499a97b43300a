"""Pure: shows pods, nodes and events as the tables that kubectl requests.

The columns are those of kubernetes pkg/printers/internalversion/printers.go (v1.36); columns with
priority 1 are shown with `-o wide`. Other resources are sent as objects, which kubectl accepts.
"""

from datetime import datetime
from typing import Final

from muster.local.kubernetes import resources, trees

ACCEPT: Final = "as=Table"
"""Part of the Accept header of a client that wants tables."""

_COLUMNS: Final = {
    "pods": ("Name", "Ready", "Status", "Restarts", "Age", "*IP", "*Node"),
    "nodes": ("Name", "Status", "Roles", "Age", "Version"),
    "events": ("Last Seen", "Type", "Reason", "Object", "Message"),
}


def has_table(resource: resources.Resource) -> bool:
    """Return whether a resource is shown as a table."""
    return resource.plural in _COLUMNS


def table(resource: resources.Resource, shown: trees.Tree, *, now: str) -> trees.Tree:
    """Return an object or a list as a `meta.k8s.io/v1` Table with a row for each object."""
    is_list = "items" in shown
    items = _items(shown, "items") if is_list else [shown]
    metadata = shown["metadata"] if is_list else {}
    columns: list[trees.Json] = [
        {
            "name": name.removeprefix("*"),
            "type": "string",
            "format": "name" if name == "Name" else "",
            "description": "",
            "priority": int(name.startswith("*")),
        }
        for name in _COLUMNS[resource.plural]
    ]
    rows: list[trees.Json] = [
        {
            "cells": _cells(resource, item, now),
            "object": {
                "kind": "PartialObjectMetadata",
                "apiVersion": "meta.k8s.io/v1",
                "metadata": item.get("metadata"),
            },
        }
        for item in items
    ]
    return {
        "kind": "Table",
        "apiVersion": "meta.k8s.io/v1",
        "metadata": metadata,
        "columnDefinitions": columns,
        "rows": rows,
    }


def _cells(resource: resources.Resource, item: trees.Tree, now: str) -> list[trees.Json]:
    name = _text(item, "metadata", "name")
    age = _age(_text(item, "metadata", "creationTimestamp"), now)
    match resource.plural:
        case "pods":
            containers = _items(item, "spec", "containers")
            states = _items(item, "status", "containerStatuses")
            ready = sum(state.get("ready") is True for state in states)
            restarts = sum(
                count for state in states if isinstance(count := state.get("restartCount"), int)
            )
            status = _text(item, "status", "reason") or _text(item, "status", "phase")
            places = [_text(item, *path) for path in (("status", "podIP"), ("spec", "nodeName"))]
            shown = [place or "<none>" for place in places]
            return [name, f"{ready}/{len(containers)}", status, str(restarts), age, *shown]
        case "nodes":
            is_ready = any(
                (condition.get("type"), condition.get("status")) == ("Ready", "True")
                for condition in _items(item, "status", "conditions")
            )
            cordoned = ",SchedulingDisabled" * bool(trees.value_at(item, "spec", "unschedulable"))
            version = _text(item, "status", "nodeInfo", "kubeletVersion")
            status = "Ready" if is_ready else "NotReady"
            return [name, status + cordoned, "<none>", age, version]
        case _:
            about = "involvedObject" if "involvedObject" in item else "regarding"
            message = _text(item, "message") or _text(item, "note")
            seen = _text(item, "lastTimestamp") or _text(item, "metadata", "creationTimestamp")
            target = f"{_text(item, about, 'kind').lower()}/{_text(item, about, 'name')}"
            said: list[trees.Json] = [_text(item, "type"), _text(item, "reason"), target, message]
            return [_age(seen, now), *said]


def _age(since: str, now: str) -> str:
    """Return the age as kubectl shows it, in one unit; `<unknown>` if a time is invalid."""
    try:
        begun, ended = (datetime.fromisoformat(text) for text in (since, now))
        seconds = max(0, int((ended - begun).total_seconds()))
    except (ValueError, TypeError):
        return "<unknown>"
    for unit, length in (("d", 86_400), ("h", 3_600), ("m", 60)):
        if seconds >= 2 * length:
            return f"{seconds // length}{unit}"
    return f"{seconds}s"


def _text(tree: trees.Tree, *path: str) -> str:
    value = trees.value_at(tree, *path)
    return value if isinstance(value, str) else ""


def _items(tree: trees.Tree, *path: str) -> list[trees.Tree]:
    value = trees.value_at(tree, *path)
    return [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []
