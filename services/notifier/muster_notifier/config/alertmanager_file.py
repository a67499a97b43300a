"""Pure: reads sections of an Alertmanager configuration, and records what is not imported.

Settings refer to a secret by its path in the file, so a Kubernetes manifest that embeds the file is
refused. Relative paths are relative to the file's directory.
"""

import posixpath
import re
from collections.abc import Collection, Mapping
from typing import Final

Tree = dict[str, object]

_DURATION: Final = re.compile(
    r"(?:(\d+)y)?(?:(\d+)w)?(?:(\d+)d)?(?:(\d+)h)?(?:(\d+)m)?(?:(\d+)s)?(?:(\d+)ms)?"
)
_UNITS: Final = (365 * 86_400.0, 7 * 86_400.0, 86_400.0, 3600.0, 60.0, 1.0, 0.001)
_WHY: Final = {
    "global.resolve_timeout": "not needed, because health reports when an alert is resolved",
    "templates": "not imported; docs/notifier.md describes muster's templates",
}
_MANIFESTS: Final = {
    "Secret": (
        "this is a Secret manifest; extract the file first: kubectl get secret NAME -n NAMESPACE "
        r"-o jsonpath='{.data.alertmanager\.yaml}' | base64 -d > alertmanager.yaml"
    ),
    "ConfigMap": (
        "this is a ConfigMap manifest; extract the file first: "
        "kubectl get configmap NAME -n NAMESPACE "
        r"-o jsonpath='{.data.alertmanager\.yml}' > alertmanager.yml"
    ),
}


class Unreadable(ValueError):
    """The file is not an Alertmanager configuration; the message gives the reason."""


class Section:
    """A mapping in the file, and its path; `left_out` and `losses` collect what is not imported.

    It records which keys were read, so that unread keys can be reported as left out.
    """

    def __init__(
        self, value: object, path: str, file: str, left_out: list[str], losses: list[str]
    ) -> None:
        if not isinstance(value, Mapping):
            raise Unreadable(f"{path or 'the file'}: expected a mapping")
        self.path = path
        self._values = {str(key): item for key, item in value.items()}
        self._file = file
        self._left_out = left_out
        self._losses = losses
        self._known: set[str] = set()

    def __contains__(self, key: str) -> bool:
        self._known.add(key)
        return key in self._values

    def names(self) -> list[str]:
        """Return all keys of the mapping."""
        return list(self._values)

    @property
    def has_integrations(self) -> bool:
        """Whether a receiver has at least one integration."""
        return any(key.endswith("_configs") and self._values[key] for key in self._values)

    def get(self, key: str, default: object = None) -> object:
        """Return the value of a key, or the default."""
        self._known.add(key)
        return self._values.get(key, default)

    def pairs(self) -> list[tuple[str, object]]:
        """Return all keys and values of the mapping."""
        return list(self._values.items())

    def section(self, key: str) -> "Section":
        """Return the mapping under a key; empty if the key is missing. Raises Unreadable."""
        return Section(self.get(key) or {}, self._at(key), self._file, self._left_out, self._losses)

    def sections(self, key: str) -> "list[Section]":
        """Return the mappings in a key's list; empty if the key is missing. Raises Unreadable."""
        return [
            Section(item, f"{self._at(key)}.{index}", self._file, self._left_out, self._losses)
            for index, item in enumerate(self.items(key))
        ]

    def items(self, key: str) -> list[object]:
        """Return the list under a key; empty if the key is missing. Raises Unreadable."""
        value = self.get(key)
        if value is None:
            return []
        if not isinstance(value, list):
            raise Unreadable(f"{self._at(key)}: expected a list")
        return list(value)

    def labels(self, key: str, known: Collection[str]) -> tuple[list[str], list[str]]:
        """Split the labels under a key into those in `known` and the others. Raises Unreadable."""
        names = [str(name) for name in self.items(key)]
        return [name for name in names if name in known], [n for n in names if n not in known]

    def secret(self, key: str) -> Tree | None:
        """Return where a secret is: a separate file, or a path in this file; None if missing."""
        file, value = self.get(f"{key}_file"), self.get(key)
        if file:
            return {"file": self.resolved(str(file))}
        return {"file": self._file, "at": self._at(key)} if value else None

    def resolved(self, path: str) -> str:
        """Return a path, resolved relative to the file's directory."""
        return posixpath.join(posixpath.dirname(self._file), path)

    def seconds(self, key: str) -> float:
        """Return a duration such as `5m` in seconds. Raises Unreadable."""
        value = self.get(key)
        match = _DURATION.fullmatch(str(value))
        if match is None or not any(match.groups()):
            raise Unreadable(f"{self._at(key)}: {value!r} is not a duration such as 5m")
        return sum(int(n or 0) * unit for n, unit in zip(match.groups(), _UNITS, strict=True))

    def leave_out_others(self, *known: str) -> None:
        """Report as left out every key that is not in `known` and was not read."""
        for key in self._values:
            if key not in self._known.union(known):
                self.differ(key, _WHY.get(self._at(key), "not imported"))

    def differ(self, key: str, text: str) -> None:
        """Report, once, that a part is left out or has a different effect in muster."""
        line = f"{self._at(key)}: {text}"
        if line not in self._left_out:
            self._left_out.append(line)

    def lose(self, key: str, text: str) -> None:
        """Report, once, an omission that can leave somebody without notifications."""
        line = f"{self._at(key)}: {text}"
        if line not in self._losses:
            self._losses.append(line)

    def _at(self, key: str) -> str:
        return ".".join(part for part in (self.path, key) if part)


def refuse_manifest(document: object) -> None:
    """Raise Unreadable for a Kubernetes manifest: settings cannot refer to secrets inside it."""
    if isinstance(document, Mapping) and "kind" in document and "apiVersion" in document:
        kind = str(document["kind"])
        raise Unreadable(
            _MANIFESTS.get(
                kind, f"this is a Kubernetes manifest ({kind}), not an Alertmanager configuration"
            )
        )
