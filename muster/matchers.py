"""Pure. Matchers of labels, in Alertmanager's words: `severity="critical"`, `node=~"gpu-.*"`.

A label that an alert has not is empty. Regular expressions match whole values, as there
(prometheus/alertmanager pkg/labels/matcher.go).
"""

import enum
import functools
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final, assert_never

_NAME: Final = re.compile(r"\s*([A-Za-z_][A-Za-z0-9_]*)\s*(=~|!~|!=|=)\s*")
_QUOTED: Final = re.compile(r'"((?:[^"\\]|\\.)*)"\s*', re.DOTALL)
_BARE: Final = re.compile(r'[^\s,"{}]*(?:\s+[^\s,"{}]+)*\s*')
_ESCAPES: Final = {"\\": "\\", '"': '"', "n": "\n"}
_SHOWN_MAX: Final = 120


class Operator(enum.StrEnum):
    """How a matcher compares."""

    EQUAL = "="
    NOT_EQUAL = "!="
    MATCHES = "=~"
    MATCHES_NOT = "!~"


@dataclass(frozen=True, slots=True)
class Matcher:
    """One condition on one label."""

    name: str
    operator: Operator
    value: str

    def __str__(self) -> str:
        """Write it as Alertmanager does."""
        value = self.value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
        return f'{self.name}{self.operator}"{value}"'

    def holds(self, labels: Mapping[str, str]) -> bool:
        """Tell whether labels meet the condition."""
        value = labels.get(self.name, "")
        match self.operator:
            case Operator.EQUAL:
                return value == self.value
            case Operator.NOT_EQUAL:
                return value != self.value
            case Operator.MATCHES:
                return _pattern(self.value).fullmatch(value) is not None
            case Operator.MATCHES_NOT:
                return _pattern(self.value).fullmatch(value) is None
            case _:
                assert_never(self.operator)


def matcher(name: str, operator: Operator, value: str) -> Matcher:
    """Return a matcher. Raises ValueError for a regular expression that is none."""
    if operator in {Operator.MATCHES, Operator.MATCHES_NOT}:
        try:
            _pattern(value)
        except (re.error, OverflowError, RecursionError) as error:
            raise ValueError(f"{name}{operator}{value[:_SHOWN_MAX]!r}: {error}") from None
    return Matcher(name, operator, value)


def parse(text: str) -> tuple[Matcher, ...]:
    """Return the matchers in a text: one, or several with commas between, with or without `{}`.

    Raises ValueError that names what is wrong.
    """
    rest = text.strip()
    if rest.startswith("{"):
        if not rest.endswith("}"):
            raise ValueError(f"{text[:_SHOWN_MAX]!r}: a brace is not closed")
        rest = rest[1:-1].strip()
    found = []
    while rest:
        head = _NAME.match(rest)
        if head is None:
            raise ValueError(
                f'{text[:_SHOWN_MAX]!r}: a matcher such as severity="critical" is expected'
            )
        rest = rest[head.end() :]
        value = _QUOTED.match(rest)
        if value is not None:
            given = re.sub(r"\\(.)", _unescape, value[1], flags=re.DOTALL)
        else:
            value = _BARE.match(rest)
            if value is None or not value[0].strip():
                raise ValueError(f"{text[:_SHOWN_MAX]!r}: {head[1]}: a value is missing")
            given = value[0].strip()
        found.append(matcher(head[1], Operator(head[2]), given))
        rest = rest[value.end() :]
        if rest and not rest.startswith(","):
            raise ValueError(f"{text[:_SHOWN_MAX]!r}: a comma is expected before {rest[:20]!r}")
        rest = rest[1:].strip()
    if not found:
        raise ValueError(f"{text[:_SHOWN_MAX]!r}: no matcher")
    return tuple(found)


def parse_all(texts: Iterable[str]) -> tuple[Matcher, ...]:
    """Return the matchers in several texts; all of them must hold."""
    return tuple(found for text in texts for found in parse(text))


def all_hold(matchers: Iterable[Matcher], labels: Mapping[str, str]) -> bool:
    """Tell whether labels meet every condition."""
    return all(one.holds(labels) for one in matchers)


def _unescape(escaped: re.Match[str]) -> str:
    return _ESCAPES.get(escaped[1], escaped[0])


@functools.lru_cache(maxsize=1_000)
def _pattern(text: str) -> re.Pattern[str]:
    return re.compile(text, re.DOTALL)
