"""Pure: Somebody else's configuration, as a tree: what is read of it, and what is left out."""

import re
from collections.abc import Collection, Mapping
from typing import Final

Tree = dict[str, object]

_DURATION: Final = re.compile(
    r"(?:(\d+)y)?(?:(\d+)w)?(?:(\d+)d)?(?:(\d+)h)?(?:(\d+)m)?(?:(\d+)s)?(?:(\d+)ms)?"
)
_UNITS: Final = (365 * 86_400.0, 7 * 86_400.0, 86_400.0, 3600.0, 60.0, 1.0, 0.001)
_WHY: Final = {
    "global.resolve_timeout": "not needed: health says itself when an alert is over",
    "templates": "not taken: templates of ours are in docs/notifier.md",
}


class Unreadable(ValueError):
    """The file is no configuration of its kind; the text says why."""


class Reader:
    """Reads one file; `left_out` holds a line for everything that is not taken."""

    def __init__(self, file: str) -> None:
        self.left_out: list[str] = []
        self._file = file

    def secret(self, given: Mapping[str, object], path: str, key: str) -> Tree | None:
        """Return where a secret is: in a file of its own, or in this one."""
        if given.get(f"{key}_file"):
            return {"file": str(given[f"{key}_file"])}
        return {"file": self._file, "at": f"{path}.{key}"} if given.get(key) else None

    def seconds(self, given: object, path: str) -> float:
        """Return a duration such as `5m`. Raises Unreadable."""
        found = _DURATION.fullmatch(str(given))
        if found is None or not any(found.groups()):
            raise Unreadable(f"{path}: {given!r} is no duration such as 5m")
        return sum(int(n or 0) * unit for n, unit in zip(found.groups(), _UNITS, strict=True))

    def leave(self, given: Mapping[str, object], path: str, known: Collection[str]) -> None:
        """Name what is not known."""
        for key in given:
            if key not in known:
                full = f"{path}.{key}".lstrip(".")
                self.differ(full, _WHY.get(full, "not taken"))

    def differ(self, path: str, text: str) -> None:
        """Say once what is not the same."""
        line = f"{path}: {text}"
        if line not in self.left_out:
            self.left_out.append(line)

    def mapping(self, given: object, path: str) -> dict[str, object]:
        """Return a mapping. Raises Unreadable."""
        if not isinstance(given, Mapping):
            raise Unreadable(f"{path}: a mapping is expected")
        return {str(key): value for key, value in given.items()}

    def items(self, given: object, path: str) -> list[object]:
        """Return a list, empty for nothing. Raises Unreadable."""
        if given is None:
            return []
        if not isinstance(given, list):
            raise Unreadable(f"{path}: a list is expected")
        return list(given)
