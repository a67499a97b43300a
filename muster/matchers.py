"""Pure: label matchers in Alertmanager's syntax: `severity="critical"`, `node=~"gpu-.*"`.

A missing label is empty. Regular expressions match whole values, as in Alertmanager
(prometheus/alertmanager pkg/labels/matcher.go), and are RE2's: nobody who may write a silence shall
be able to keep the notifier busy for ever with one expression.
"""

import enum
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, assert_never

if TYPE_CHECKING:
    import re2

_NAME: Final = re.compile(r"\s*([A-Za-z_][A-Za-z0-9_]*)\s*(=~|!~|!=|=)\s*")
_QUOTED: Final = re.compile(r'"((?:[^"\\]|\\.)*)"\s*', re.DOTALL)
_BARE: Final = re.compile(r'[^\s,"{}]*(?:\s+[^\s,"{}]+)*\s*')
_ESCAPES: Final = {"\\": "\\", '"': '"', "n": "\n"}
_SHOWN_MAX: Final = 120
_PATTERN_BYTES_MAX: Final = 1024 * 1024


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
    pattern: "re2._Regexp | None" = field(default=None, compare=False, repr=False)

    def __str__(self) -> str:
        """Return it in Alertmanager's syntax."""
        value = self.value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
        return f'{self.name}{self.operator}"{value}"'

    def holds(self, labels: Mapping[str, str]) -> bool:
        """Return whether the labels meet the condition."""
        value = labels.get(self.name, "")
        match self.operator:
            case Operator.EQUAL:
                return value == self.value
            case Operator.NOT_EQUAL:
                return value != self.value
            case Operator.MATCHES:
                return self._matches(value)
            case Operator.MATCHES_NOT:
                return not self._matches(value)
            case _:
                assert_never(self.operator)

    def _matches(self, value: str) -> bool:
        assert self.pattern is not None, "made by `matcher`"
        return self.pattern.fullmatch(value) is not None


def matcher(name: str, operator: Operator, value: str) -> Matcher:
    """Return a matcher. Raises ValueError for an invalid regular expression."""
    if operator in {Operator.EQUAL, Operator.NOT_EQUAL}:
        return Matcher(name, operator, value)
    try:
        return Matcher(name, operator, value, _pattern(value))
    except ValueError as error:
        raise ValueError(f"{name}{operator}{value[:_SHOWN_MAX]!r}: {error}") from None


def parse(text: str) -> tuple[Matcher, ...]:
    """Return the matchers in a text: one, or several separated by commas, with or without `{}`.

    Raises ValueError, whose text names the problem.
    """
    rest = text.strip()
    if rest.startswith("{"):
        if not rest.endswith("}"):
            raise ValueError(f"{text[:_SHOWN_MAX]!r}: unclosed brace")
        rest = rest[1:-1].strip()
    matchers = []
    while rest:
        head = _NAME.match(rest)
        if head is None:
            raise ValueError(
                f'{text[:_SHOWN_MAX]!r}: expected a matcher such as severity="critical"'
            )
        rest = rest[head.end() :]
        value = _QUOTED.match(rest)
        if value is not None:
            value_text = re.sub(r"\\(.)", _unescape, value[1], flags=re.DOTALL)
        else:
            value = _BARE.match(rest)
            if value is None or not value[0].strip():
                raise ValueError(f"{text[:_SHOWN_MAX]!r}: {head[1]}: missing value")
            value_text = value[0].strip()
        matchers.append(matcher(head[1], Operator(head[2]), value_text))
        rest = rest[value.end() :]
        if rest and not rest.startswith(","):
            raise ValueError(f"{text[:_SHOWN_MAX]!r}: expected a comma before {rest[:20]!r}")
        rest = rest[1:].strip()
    if not matchers:
        raise ValueError(f"{text[:_SHOWN_MAX]!r}: no matcher")
    return tuple(matchers)


def parse_all(texts: Iterable[str]) -> tuple[Matcher, ...]:
    """Return the matchers in several texts; all of them must hold."""
    return tuple(parsed for text in texts for parsed in parse(text))


def all_hold(matchers: Iterable[Matcher], labels: Mapping[str, str]) -> bool:
    """Return whether the labels meet every condition."""
    return all(condition.holds(labels) for condition in matchers)


def _unescape(escaped: re.Match[str]) -> str:
    return _ESCAPES.get(escaped[1], escaped[0])


def _pattern(text: str) -> "re2._Regexp":
    import re2  # noqa: PLC0415  # 3 MiB, for those who use regular expressions

    options = re2.Options()
    options.log_errors = False
    options.dot_nl = True
    options.max_mem = _PATTERN_BYTES_MAX
    try:
        return re2.compile(text, options)
    except re2.error as error:
        raise ValueError(error.args[0].decode(errors="replace")) from None
