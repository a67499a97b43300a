"""Pure: what one attempt to send came to: taken, to be tried again, or refused for good."""

import dataclasses
import enum
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from email import utils
from typing import Final

_PLACE: Final = re.compile(r"([a-z]+)://(?:[^/?#]*@)?([^/?#@]+)", re.IGNORECASE)
_BACKOFF_MIN_S: Final = 0.5
_BACKOFF_MAX_S: Final = 30.0
_ASKED_MAX_S: Final = 3600.0
"""Whoever asks for more is asked again after this: it may have been a mistake."""


class Kind(enum.StrEnum):
    """The three things an answer can mean."""

    TAKEN = "taken"
    TEMPORARY = "temporary"
    REFUSED = "refused"


class Outcome(enum.StrEnum):
    """Everything that an attempt can come to, by the name that log, metric and event give it."""

    TAKEN = "taken"
    RATE_LIMITED = "rate_limited"
    UNWELL = "unwell"
    TIMED_OUT = "timed_out"
    CLOSED = "closed"
    UNREACHABLE = "unreachable"
    NO_SUCH_HOST = "no_such_host"
    NOT_TRUSTED = "not_trusted"
    NONSENSE = "nonsense"
    NOT_WRITTEN = "not_written"
    FAILED = "failed"
    REJECTED = "rejected"
    MOVED = "moved"
    UNAUTHORIZED = "unauthorized"
    NOT_FOUND = "not_found"
    GONE = "gone"
    TOO_LARGE = "too_large"
    FORBIDDEN_ADDRESS = "forbidden_address"
    BROKEN = "broken"


_REFUSED: Final = frozenset(
    {
        Outcome.REJECTED,
        Outcome.MOVED,
        Outcome.UNAUTHORIZED,
        Outcome.NOT_FOUND,
        Outcome.GONE,
        Outcome.TOO_LARGE,
        Outcome.FORBIDDEN_ADDRESS,
        Outcome.BROKEN,
    }
)
_STATUSES: Final = {
    401: Outcome.UNAUTHORIZED,
    403: Outcome.UNAUTHORIZED,
    404: Outcome.NOT_FOUND,
    407: Outcome.UNAUTHORIZED,
    408: Outcome.UNWELL,
    410: Outcome.GONE,
    413: Outcome.TOO_LARGE,
    425: Outcome.UNWELL,
    429: Outcome.RATE_LIMITED,
}
_CLASSES: Final = {2: Outcome.TAKEN, 3: Outcome.MOVED, 5: Outcome.UNWELL}
"""RFC 9110 section 15."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What a receiver said to one attempt, and how long it asked us to stay away.

    `data` is what we must know to say more about the same group, such as the message to edit.
    `is_unknown` says that all of the message was sent, and nobody said whether it was taken.
    `requests` counts what was asked for one message.
    """

    outcome: Outcome
    detail: str
    retry_after_s: float | None = None
    data: Mapping[str, str] = field(default_factory=dict)
    is_unknown: bool = False
    requests: int = 1

    @property
    def kind(self) -> Kind:
        """Whether it was taken, may be taken later, or never will be."""
        if self.outcome is Outcome.TAKEN:
            return Kind.TAKEN
        return Kind.REFUSED if self.outcome in _REFUSED else Kind.TEMPORARY


def of_status(status: int, headers: Mapping[str, str]) -> Result:
    """Return what an HTTP status means; `headers` have lower-case names.

    Redirects are not followed: a webhook that moves must be configured anew, or an attacker who
    controls one could make us post anywhere. Of where it moved only the host is told: the rest is
    often the secret of the URL that was asked.
    """
    outcome = _STATUSES.get(status) or _CLASSES.get(status // 100, Outcome.REJECTED)
    detail = f"HTTP {status}"
    if outcome is Outcome.MOVED and "location" in headers:
        detail += f" to {_host(headers['location'])}"
    answer = Result(outcome=outcome, detail=detail)
    if answer.kind is not Kind.TEMPORARY:
        return answer
    return dataclasses.replace(answer, retry_after_s=_retry_after_s(headers))


def delay_s(attempts: int, answer: Result, *, chance: float) -> float:
    """Return how long to wait after so many attempts; `chance` is random, from 0 to 1.

    Full jitter under a doubling bound; what the receiver asked for wins.
    """
    bound = min(_BACKOFF_MAX_S, _BACKOFF_MIN_S * 2.0 ** min(attempts - 1, 16))
    if answer.retry_after_s is not None:
        return max(answer.retry_after_s, bound * chance)
    return bound * chance


def _retry_after_s(headers: Mapping[str, str]) -> float | None:
    """Read Retry-After (RFC 9110 section 10.2.3): seconds, or a date by the sender's own clock."""
    text = headers.get("retry-after", "").strip()
    if text.isascii() and text.isdigit():
        return min(_ASKED_MAX_S, float(text[:9]))
    until, sent = _date(text), _date(headers.get("date", ""))
    if until is None or sent is None:
        return None
    return min(_ASKED_MAX_S, max(0.0, (until - sent).total_seconds()))


def _host(location: str) -> str:
    found = _PLACE.match(location)
    return f"{found[1]}://{found[2]}"[:200] if found else "elsewhere on the same host"


def _date(text: str) -> datetime | None:
    try:
        # without a zone it is GMT, and so is -0000
        found = utils.parsedate_to_datetime(text)
        return found if found.tzinfo else found.replace(tzinfo=UTC)
    except (ValueError, TypeError, OverflowError):
        return None
