"""Pure: parses label and field selectors, as in `kubectl -l` and `--field-selector`.

Grammar and meaning: apimachinery `pkg/labels/selector.go`, `pkg/fields/selector.go`. An object
without the key passes `!=` and `notin`.
"""

import dataclasses
import enum
import re
from collections.abc import Mapping
from typing import assert_never

from muster.local.kubernetes import refusals


class Operator(enum.StrEnum):
    """The operator of a selector's requirement."""

    IN = "in"
    NOT_IN = "notin"
    EXISTS = "exists"
    ABSENT = "!"
    GREATER = ">"
    LESS = "<"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Requirement:
    """One term of a selector."""

    key: str
    operator: Operator
    values: frozenset[str] = frozenset()

    def accepts(self, values: Mapping[str, str]) -> bool:
        """Return whether labels or fields match this term."""
        value = values.get(self.key)
        match self.operator:
            case Operator.IN:
                return value in self.values
            case Operator.NOT_IN:
                return value not in self.values
            case Operator.EXISTS:
                return value is not None
            case Operator.ABSENT:
                return value is None
            case Operator.GREATER | Operator.LESS:
                return value is not None and self._compares(value)
            case _:
                assert_never(self.operator)

    def _compares(self, value: str) -> bool:
        if not _INTEGER.fullmatch(value):
            return False
        (bound,) = self.values
        greater = self.operator is Operator.GREATER
        return int(value) > int(bound) if greater else int(value) < int(bound)


@dataclasses.dataclass(frozen=True)
class Selector:
    """A selector, all of whose terms must match; without terms it accepts everything."""

    requirements: tuple[Requirement, ...] = ()

    def accepts(self, values: Mapping[str, str]) -> bool:
        """Return whether every term accepts these labels or fields."""
        return all(requirement.accepts(values) for requirement in self.requirements)

    def keys(self) -> frozenset[str]:
        """Return every key of the selector."""
        return frozenset(requirement.key for requirement in self.requirements)


EVERYTHING = Selector()


def labels(text: str) -> Selector:
    """Parse a label selector."""
    return Selector(tuple(_label_term(term) for term in _terms(text)))


def fields(text: str) -> Selector:
    """Parse a field selector: `=`, `==` and `!=` only."""
    return Selector(tuple(_field_term(term) for term in _terms(text)))


_NAME = r"[A-Za-z0-9](?:[A-Za-z0-9_.-]*[A-Za-z0-9])?"
_KEY = rf"(?P<key>(?:{_NAME}/)?{_NAME})"
_VALUE = rf"(?:{_NAME})?"
_SET = re.compile(rf"{_KEY}\s+(?P<operator>in|notin)\s*\((?P<values>[^()]*)\)")
_COMPARISON = re.compile(rf"{_KEY}\s*(?P<operator>==|=|!=|>|<)\s*(?P<value>{_VALUE})")
_PRESENCE = re.compile(rf"(?P<operator>!?)\s*{_KEY}")
_FIELD = re.compile(r"(?P<key>[A-Za-z0-9.]+)(?P<operator>==|=|!=)(?P<value>[^=!]*)")
_INTEGER = re.compile(r"-?\d{1,18}")
_COMMA = re.compile(r",(?![^(]*\))")


def _terms(text: str) -> list[str]:
    if not text.strip():
        return []
    return [term.strip() for term in _COMMA.split(text)]


def _label_term(term: str) -> Requirement:
    if parsed := _SET.fullmatch(term):
        values = frozenset(value.strip() for value in parsed["values"].split(","))
        if all(re.fullmatch(_VALUE, value) for value in values):
            return Requirement(
                key=parsed["key"], operator=Operator(parsed["operator"]), values=values
            )
    elif parsed := _COMPARISON.fullmatch(term):
        return _comparison(parsed["key"], parsed["operator"], parsed["value"])
    elif parsed := _PRESENCE.fullmatch(term):
        operator = Operator.ABSENT if parsed["operator"] else Operator.EXISTS
        return Requirement(key=parsed["key"], operator=operator)
    raise refusals.bad_request(f'unable to parse requirement: "{term}"')


def _comparison(key: str, operator: str, value: str) -> Requirement:
    values = frozenset({value})
    match operator:
        case "=" | "==":
            return Requirement(key=key, operator=Operator.IN, values=values)
        case "!=":
            return Requirement(key=key, operator=Operator.NOT_IN, values=values)
        case _:
            if not _INTEGER.fullmatch(value):
                raise refusals.bad_request(f"{key}{operator}{value}: the value must be an integer")
            return Requirement(key=key, operator=Operator(operator), values=values)


def _field_term(term: str) -> Requirement:
    if parsed := _FIELD.fullmatch(term):
        return _comparison(parsed["key"], parsed["operator"], parsed["value"])
    raise refusals.bad_request(f'invalid selector: "{term}"; can\'t understand it')
