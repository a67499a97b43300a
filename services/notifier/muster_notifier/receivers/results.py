"""Pure: the result of one attempt to send: accepted, to be retried, or refused for good."""

import dataclasses
import enum
import re
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from email import utils
from typing import Final, Self

from muster import pacing
from muster_notifier.routing import notifications

_HOST: Final = re.compile(r"([a-z]+)://(?:[^/?#]*@)?([^/?#@]+)", re.IGNORECASE)
_BACKOFF: Final = pacing.Backoff(first_s=0.5, max_s=30.0, jitter=1.0)
_RETRY_AFTER_MAX_S: Final = 3600.0
"""The maximum delay taken from Retry-After; a longer one may be a mistake of the receiver."""


class Kind(enum.StrEnum):
    """The kinds of results of an attempt, which decide how the delivery continues."""

    ACCEPTED = "accepted"
    TEMPORARY = "temporary"
    REFUSED = "refused"


class Outcome(enum.StrEnum):
    """All outcomes of an attempt, with the names that logs, metrics and events use."""

    kind: Kind

    def __new__(cls, name: str, kind: Kind = Kind.TEMPORARY) -> Self:
        """Create an outcome, by default a temporary failure."""
        outcome = str.__new__(cls, name)
        outcome._value_ = name
        outcome.kind = kind
        return outcome

    ACCEPTED = "accepted", Kind.ACCEPTED
    RATE_LIMITED = "rate_limited"
    SERVER_ERROR = "server_error"
    TIMED_OUT = "timed_out"
    CLOSED = "closed"
    UNREACHABLE = "unreachable"
    NO_SUCH_HOST = "no_such_host"
    NOT_TRUSTED = "not_trusted"
    INVALID_RESPONSE = "invalid_response"
    WRITE_FAILED = "write_failed"
    FAILED = "failed"
    REJECTED = "rejected", Kind.REFUSED
    REDIRECTED = "redirected", Kind.REFUSED
    UNAUTHORIZED = "unauthorized", Kind.REFUSED
    NOT_FOUND = "not_found", Kind.REFUSED
    GONE = "gone", Kind.REFUSED
    TOO_LARGE = "too_large", Kind.REFUSED
    FORBIDDEN_ADDRESS = "forbidden_address", Kind.REFUSED
    INTERNAL_ERROR = "internal_error", Kind.REFUSED


_STATUSES: Final = {
    401: Outcome.UNAUTHORIZED,
    403: Outcome.UNAUTHORIZED,
    404: Outcome.NOT_FOUND,
    407: Outcome.UNAUTHORIZED,
    408: Outcome.SERVER_ERROR,
    410: Outcome.GONE,
    413: Outcome.TOO_LARGE,
    425: Outcome.SERVER_ERROR,
    429: Outcome.RATE_LIMITED,
}
_CLASSES: Final = {2: Outcome.ACCEPTED, 3: Outcome.REDIRECTED, 5: Outcome.SERVER_ERROR}
"""The outcome for the first digit of an HTTP status (RFC 9110 section 15)."""


@dataclass(frozen=True, slots=True)
class Result:
    """The result of one attempt to send; `retry_after_s` is the delay that the receiver requested.

    `data` has what later messages about the group need, for example the id of the message to edit.
    `is_unknown`: the whole message was sent, but it is unknown whether it was accepted. `requests`
    counts the requests for this message.
    """

    outcome: Outcome
    detail: str
    retry_after_s: float | None = None
    data: Mapping[str, str] = field(default_factory=dict)
    is_unknown: bool = False
    requests: int = 1

    @property
    def kind(self) -> Kind:
        """Return whether the message was accepted, may be accepted later, or never will be."""
        return self.outcome.kind


Send = Callable[[notifications.Notification, Mapping[str, str]], Awaitable[Result]]
"""Makes one attempt to send; the mapping is `Result.data` of the group's last message."""


def of_status(status: int, headers: Mapping[str, str]) -> Result:
    """Return the result for an HTTP status; `headers` have lower-case names.

    Redirects are not followed: an attacker who controls a webhook could make us post anywhere. So a
    webhook that has moved must be configured again. Only the host of the new location is reported,
    because the rest of the URL often contains a secret.
    """
    outcome = _STATUSES.get(status) or _CLASSES.get(status // 100, Outcome.REJECTED)
    detail = f"HTTP {status}"
    if outcome is Outcome.REDIRECTED and "location" in headers:
        detail += f" to {_host(headers['location'])}"
    result = Result(outcome, detail)
    if result.kind is not Kind.TEMPORARY:
        return result
    return dataclasses.replace(result, retry_after_s=_retry_after_s(headers))


def delay_s(failures: int, result: Result, *, chance: float) -> float:
    """Return the delay after this many failures; `chance` is random, from 0 to 1.

    The delay is random below a limit that doubles (full jitter), but at least the delay that the
    receiver requested.
    """
    return max(result.retry_after_s or 0.0, _BACKOFF.delay_s(failures, chance=chance))


def _retry_after_s(headers: Mapping[str, str]) -> float | None:
    """Return the delay that Retry-After requests, in seconds; None if it is missing or invalid.

    Its value is a number of seconds or a date (RFC 9110 section 10.2.3).
    """
    text = headers.get("retry-after", "").strip()
    if text.isascii() and text.isdigit():
        return min(_RETRY_AFTER_MAX_S, float(text[:9]))
    until, sent = _date(text), _date(headers.get("date", ""))
    if until is None or sent is None:
        return None
    return min(_RETRY_AFTER_MAX_S, max(0.0, (until - sent).total_seconds()))


def _host(location: str) -> str:
    match = _HOST.match(location)
    return f"{match[1]}://{match[2]}"[:200] if match else "elsewhere on the same host"


def _date(text: str) -> datetime | None:
    try:
        # a date without a zone is GMT, as is -0000
        at = utils.parsedate_to_datetime(text)
        return at if at.tzinfo else at.replace(tzinfo=UTC)
    except (ValueError, TypeError, OverflowError):
        return None
