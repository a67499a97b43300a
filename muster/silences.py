"""Pure: silences: which alerts cause no notification, from when to when, who said so, and why.

Each is one value in the bucket `muster_silences`, under its id. An expired one is kept for a while,
so that people can see what was silenced.
"""

from collections.abc import Mapping
from datetime import datetime
from typing import Annotated, Final

import msgspec

from muster import codec, matchers, vocabulary
from muster.service import validation

LABELS: Final = ("alertname", "device", "kind", "node", "plugin", "resource", "severity")
"""The labels that alerts have."""

_KINDS: Final = tuple(map(str, vocabulary.AlertKind))
_VALUES: Final = {
    "alertname": _KINDS,
    "kind": _KINDS,
    "severity": tuple(map(str, vocabulary.Severity)),
}


class MalformedSilence(ValueError):
    """A value that is not a silence."""


class Silence(msgspec.Struct, frozen=True, kw_only=True):
    """While it is active, nobody is notified of alerts whose labels meet every matcher."""

    id: Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9][-A-Za-z0-9]{0,62}$")]
    matchers: Annotated[tuple[str, ...], msgspec.Meta(min_length=1, max_length=32)]
    starts_at: datetime
    ends_at: datetime
    author: Annotated[str, msgspec.Meta(min_length=1, max_length=200)]
    comment: Annotated[str, msgspec.Meta(min_length=1, max_length=2000)]

    def __post_init__(self) -> None:
        """Refuse a silence that could match nothing, or everything."""
        for name, at in (("starts_at", self.starts_at), ("ends_at", self.ends_at)):
            if at.tzinfo is None:
                raise ValueError(f"{name}: a time without a time zone")
        if self.ends_at < self.starts_at:
            raise ValueError("ends_at: before starts_at")
        empty: Mapping[str, str] = {}
        if matchers.all_hold(matchers.parse_all(self.matchers), empty):
            # Alertmanager's rule: at least one matcher must ask for something
            raise ValueError("matchers: these match everything; ask for at least one label")

    def is_active(self, at: datetime) -> bool:
        """Return whether it silences alerts at this time."""
        return self.starts_at <= at < self.ends_at

    def expired(self, at: datetime) -> "Silence":
        """Return a copy that ends at this time, if it has not ended before."""
        ends_at = min(self.ends_at, max(at, self.starts_at))
        return msgspec.structs.replace(self, ends_at=ends_at)


def doubt(matcher: matchers.Matcher) -> str:
    """Return why a matcher can match no alert: unknown label or value; empty if it can."""
    if matcher.name not in LABELS:
        hint = validation.near(matcher.name, LABELS) or f"there are: {', '.join(LABELS)}"
        return f"no alert has a label {matcher.name}; {hint}"
    values = _VALUES.get(matcher.name, ())
    is_one = matcher.operator in {matchers.Operator.EQUAL, matchers.Operator.NOT_EQUAL}
    if not is_one or not values or matcher.value in {"", *values}:
        return ""
    hint = validation.near(matcher.value, values) or f"there are: {', '.join(values)}"
    return f"no {matcher.name} is called {matcher.value}; {hint}"


def encode(silence: Silence) -> bytes:
    """Return the silence as JSON."""
    return msgspec.json.encode(silence)


def decode(value: bytes) -> Silence:
    """Return the silence. Raises MalformedSilence."""
    try:
        return msgspec.json.decode(value, type=Silence)
    except (*codec.UNREADABLE, ValueError) as error:
        raise MalformedSilence(str(error)) from None
