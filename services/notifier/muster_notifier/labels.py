"""Pure: The labels of an alert: what routes, groups, silences and inhibitions look at."""

from collections.abc import Collection, Iterable, Mapping
from typing import Final

from muster import matchers, silences, vocabulary

ALL: Final = "..."
"""In `group_by`: every label, so that each alert is a group of its own (as in Alertmanager)."""

NAMES: Final = silences.LABELS


def of(alert: vocabulary.AlertChanged) -> dict[str, str]:
    """Return the labels that are not empty; `alertname` says the same as `kind`.

    `device` is there where an alert is about exactly one.
    """
    found = {
        "alertname": str(alert.kind),
        "device": alert.devices[0] if len(alert.devices) == 1 else "",
        "kind": str(alert.kind),
        "node": alert.node,
        "plugin": alert.plugin,
        "resource": alert.resource,
        "severity": str(alert.severity),
    }
    return {name: value for name, value in found.items() if value}


def chosen(labels: Mapping[str, str], group_by: Collection[str]) -> dict[str, str]:
    """Return the labels that name an alert's group."""
    if ALL in group_by:
        return dict(labels)
    return {name: labels[name] for name in sorted(group_by) if name in labels}


def refuse_unknown(names: Collection[str], *, where: str = "group_by") -> None:
    """Raise ValueError for labels that no alert has."""
    unknown = sorted(set(names) - {*NAMES, ALL})
    if unknown:
        known = ", ".join((*NAMES, ALL))
        raise ValueError(f"{where}: no alert has a label {', '.join(unknown)}; there are: {known}")


def refuse_doubtful(texts: Iterable[str]) -> None:
    """Raise ValueError for matchers that are none, or that no alert can ever meet or miss."""
    for text in texts:
        for one in matchers.parse(text):
            if why := silences.doubt(one):
                raise ValueError(f"{one}: {why}")


def written(labels: Mapping[str, str]) -> str:
    """Return labels as Alertmanager writes them: `{kind="stuck",node="node-a"}`."""
    shown = (f'{name}="{_escaped(labels[name])}"' for name in sorted(labels))
    return "{" + ",".join(shown) + "}"


def read(text: str) -> dict[str, str]:
    """Return the labels in what `written` wrote."""
    return {} if text == "{}" else {one.name: one.value for one in matchers.parse(text)}


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
