"""Pure: label matchers in Alertmanager's syntax, and silences: matchers that apply for a time.

A matcher has the form `severity="critical"` or `node=~"gpu-.*"`; a missing label is empty. Regular
expressions match whole values, as in Alertmanager (prometheus/alertmanager pkg/labels/matcher.go).
They use RE2, so that an expression in a silence cannot block the notifier. Each silence is stored
in the bucket `muster_silences` under its id. An expired silence is kept for a while, so that people
can see which alerts were silenced.
"""

import enum
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Annotated, Final, assert_never

import msgspec

from muster import codec, vocabulary
from muster.service import validation

if TYPE_CHECKING:
    import re2

_NAME: Final = re.compile(r"\s*([A-Za-z_][A-Za-z0-9_]*)\s*(=~|!~|!=|=)\s*")
_QUOTED: Final = re.compile(r'"((?:[^"\\]|\\.)*)"\s*', re.DOTALL)
_BARE: Final = re.compile(r'[^\s,"{}]*(?:\s+[^\s,"{}]+)*\s*')
_ESCAPES: Final = {"\\": "\\", '"': '"', "n": "\n"}
_SHOWN_MAX: Final = 120
COMMENT_MAX: Final = 2_000
MATCHERS_MAX: Final = 32
_PATTERN_BYTES_MAX: Final = 1024 * 1024
_BYTES_MAX: Final = 16_000
"""The maximum size of a silence; the bucket `streams.SILENCES` accepts slightly larger values."""


class Operator(enum.StrEnum):
    """How a matcher compares the value of a label."""

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
        """Return the matcher in Alertmanager's syntax."""
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
                raise ValueError(f"{text[:_SHOWN_MAX]!r}: missing value of {head[1]}")
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
    """Parse several texts and return all their matchers."""
    return tuple(parsed for text in texts for parsed in parse(text))


def labels_of(alert: vocabulary.AlertChanged) -> dict[str, str]:
    """Return an alert's labels, as `labels` defines them."""
    return labels(
        kind=str(alert.kind),
        severity=str(alert.severity),
        node=alert.node,
        plugin=alert.plugin,
        resource=alert.resource,
        devices=alert.devices,
        is_flapping=alert.flapping,
        watched=alert.watched,
    )


def all_hold(matchers: Iterable[Matcher], labels: Mapping[str, str]) -> bool:
    """Return whether the labels meet every condition."""
    return all(condition.holds(labels) for condition in matchers)


def values_of(matchers: Iterable[Matcher], name: str) -> set[str]:
    """Return the non-empty values that matchers with `=` require of a label."""
    return {c.value for c in matchers if (c.name, c.operator) == (name, Operator.EQUAL)} - {""}


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
        what, _, near = error.args[0].decode(errors="replace").partition(": ")
        place = f", near {near!r}" if near else ""
        raise ValueError(f"not a regular expression{place}: {what}") from None


LABELS: Final = (
    *("alertname", "device", "flapping", "kind", "node", "plugin", "resource", "severity"),
    "watched",
)
"""The names of the labels that an alert may have."""


def labels(
    *,
    kind: str,
    severity: str,
    node: str,
    plugin: str,
    resource: str,
    devices: Sequence[str],
    is_flapping: bool,
    watched: str,
) -> dict[str, str]:
    """Return an alert's labels that are not empty; `alertname` equals `kind`.

    `device` is present if the alert is about exactly one device; `flapping` is "true" if the plugin
    fails repeatedly; `watched` is the resource or driver of a plugin that muster does not run.
    """
    every = {
        "alertname": kind,
        "device": devices[0] if len(devices) == 1 else "",
        "flapping": "true" if is_flapping else "",
        "kind": kind,
        "node": node,
        "plugin": plugin,
        "resource": resource,
        "severity": severity,
        "watched": watched,
    }
    return {name: value for name, value in every.items() if value}


_KINDS: Final = tuple(map(str, vocabulary.AlertKind))
_VALUES: Final = {
    "alertname": _KINDS,
    "kind": _KINDS,
    "severity": tuple(map(str, vocabulary.Severity)),
}


class MalformedSilence(ValueError):
    """A value that is not a silence."""


class Silence(msgspec.Struct, frozen=True, kw_only=True):
    """A silence: while it is active, alerts that match all its matchers cause no notifications."""

    id: Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9][-A-Za-z0-9]{0,62}$")]
    matchers: Annotated[tuple[str, ...], msgspec.Meta(min_length=1, max_length=MATCHERS_MAX)]
    starts_at: Annotated[datetime, msgspec.Meta(tz=True)]
    ends_at: Annotated[datetime, msgspec.Meta(tz=True)]
    author: Annotated[str, msgspec.Meta(min_length=1, max_length=200)]
    comment: Annotated[str, msgspec.Meta(min_length=1, max_length=COMMENT_MAX)]

    def __post_init__(self) -> None:
        """Reject a silence that ends before it starts, or that matches an alert without labels."""
        if self.ends_at < self.starts_at:
            raise ValueError("ends_at: must not be before starts_at")
        empty: Mapping[str, str] = {}
        if all_hold(parse_all(self.matchers), empty):
            # Alertmanager's rule: at least one matcher must require something
            raise ValueError(
                "matchers: none requires a label to have a value; add one such as node=NAME"
            )

    def is_active(self, at: datetime) -> bool:
        """Return whether the silence is active at this time."""
        return self.starts_at <= at < self.ends_at

    def is_sent_again(self, earlier: "Silence") -> bool:
        """Return whether this silence is `earlier`, requested a second time."""
        ends_at = earlier.starts_at + (self.ends_at - self.starts_at)
        return earlier == msgspec.structs.replace(
            self, starts_at=earlier.starts_at, ends_at=ends_at
        )

    def text(self) -> str:
        """Return a text for people: who silenced the alerts, until when, and why."""
        return f"by {self.author} until {self.ends_at.astimezone():%Y-%m-%d %H:%M}: {self.comment}"

    def expired(self, at: datetime) -> "Silence":
        """Return a copy that ends at `at`, but not before its start, and not after its end."""
        ends_at = min(self.ends_at, max(at, self.starts_at))
        return msgspec.structs.replace(self, ends_at=ends_at)


def new_silence(
    silence_id: str,
    expressions: Sequence[str],
    *,
    starts_at: datetime,
    lasts: timedelta,
    author: str,
    comment: str,
) -> Silence:
    """Return a new silence. Raises ValueError if it is invalid or a label or value is unknown."""
    if not expressions:
        raise ValueError("name the alerts to silence, such as node=node-a")
    if not comment:
        raise ValueError("comment: required; say why the alerts are silenced")
    if len(comment) > COMMENT_MAX:
        raise ValueError(
            f"comment: at most {COMMENT_MAX:,} characters; this one has {len(comment):,}"
        )
    doubts = [f"{each}: {why}" for each in parse_all(expressions) if (why := doubt(each))]
    if doubts:
        raise ValueError("; ".join(doubts))
    fields = {
        "id": silence_id,
        "matchers": tuple(expressions),
        "starts_at": starts_at,
        "ends_at": starts_at + lasts,
        "author": author,
        "comment": comment,
    }
    try:
        silence = msgspec.convert(fields, Silence)
    except msgspec.ValidationError as error:
        raise ValueError(str(error)) from None
    if len(encode_silence(silence)) > _BYTES_MAX:
        raise ValueError("the matchers are too long to be stored")
    return silence


def silenced(
    labels: Mapping[str, Mapping[str, str]], silences: Iterable[Silence], at: datetime
) -> dict[str, Silence]:
    """Return the active silence of each silenced alert; if several match, the one that ends last.

    `labels` and the result have fingerprints as keys.
    """
    ordered = sorted(silences, key=lambda each: each.ends_at, reverse=True)
    active = [(each, parse_all(each.matchers)) for each in ordered if each.is_active(at)]
    matched = (
        (name, next((each for each, parsed in active if all_hold(parsed, of)), None))
        for name, of in labels.items()
    )
    return {name: silence for name, silence in matched if silence is not None}


def doubt(matcher: Matcher) -> str:
    """Return a problem with a matcher: an unknown label or value; empty if there is none."""
    if matcher.name not in LABELS:
        hint = validation.near(matcher.name, LABELS) or f"the labels are: {', '.join(LABELS)}"
        return f"no alert has a label {matcher.name}; {hint}"
    values = _VALUES.get(matcher.name, ())
    is_one = matcher.operator in {Operator.EQUAL, Operator.NOT_EQUAL}
    if not is_one or not values or matcher.value in {"", *values}:
        return ""
    hint = validation.near(matcher.value, values) or f"the values are: {', '.join(values)}"
    return f"no {matcher.name} is called {matcher.value}; {hint}"


def encode_silence(silence: Silence) -> bytes:
    """Return the silence as JSON."""
    return msgspec.json.encode(silence)


def decode_silence(value: bytes) -> Silence:
    """Return the silence. Raises MalformedSilence."""
    try:
        return msgspec.json.decode(value, type=Silence)
    except (*codec.UNREADABLE, ValueError) as error:
        raise MalformedSilence(str(error)) from None
