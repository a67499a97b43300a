"""Pure. What a receiver's answer means: taken, try again, or never."""

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from email import utils
from typing import Final

_TEMPORARY: Final = frozenset({408, 425, 429})
_BACKOFF_MIN_S: Final = 0.5
_BACKOFF_MAX_S: Final = 30.0
_ASKED_MAX_S: Final = 86_400.0


class Kind(enum.StrEnum):
    """The three things an answer can mean."""

    TAKEN = "taken"
    TEMPORARY = "temporary"
    REFUSED = "refused"


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What a receiver said to one attempt, and how long it asked us to stay away.

    `data` is what we must know to say more about the same group, such as the message to edit.
    """

    kind: Kind
    detail: str
    retry_after_s: float | None = None
    data: Mapping[str, str] = field(default_factory=dict)


def of_status(status: int, headers: Mapping[str, str]) -> Answer:
    """Return what an HTTP status means; `headers` have lower-case names.

    Redirects are not followed: a webhook that moves must be configured anew, or an attacker who
    controls one could make us post anywhere.
    """
    if 200 <= status < 300:  # noqa: PLR2004  # RFC 9110 section 15: the class of success
        return Answer(kind=Kind.TAKEN, detail=f"HTTP {status}")
    if status >= 500 or status in _TEMPORARY:  # noqa: PLR2004  # the class of server errors
        return Answer(
            kind=Kind.TEMPORARY, detail=f"HTTP {status}", retry_after_s=_retry_after_s(headers)
        )
    moved = f" to {headers['location'][:200]}" if "location" in headers else ""
    return Answer(kind=Kind.REFUSED, detail=f"HTTP {status}{moved}")


def delay_s(attempts: int, answer: Answer, *, chance: float) -> float:
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
        return float(text[:9])
    until, sent = _date(text), _date(headers.get("date", ""))
    if until is None or sent is None:
        return None
    return min(_ASKED_MAX_S, max(0.0, (until - sent).total_seconds()))


def _date(text: str) -> datetime | None:
    try:
        # without a zone it is GMT, and so is -0000
        found = utils.parsedate_to_datetime(text)
        return found if found.tzinfo else found.replace(tzinfo=UTC)
    except (ValueError, TypeError, OverflowError):
        return None
