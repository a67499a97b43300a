"""Pure: the state machine that decides what is wrong with one watched plugin.

A finding begins when its condition has held continuously for a time, and ends as soon as nothing is
wrong. The first matching row applies:

    server      | what else is known                | finding        | begins after
    ------------|-----------------------------------|----------------|-------------
    REMOVED     | anything                          | SOCKET_REMOVED |  2 s
    ENDED       | anything                          | NOT_SERVED     |  2 s
    HALTED      | anything                          | NO_ANSWER      |  3 s
    SILENT      | anything                          | NO_ANSWER      |  0 s
    WRONG       | anything                          | WRONG_ANSWER   | 20 s
    ABSENT      | anything                          | NOT_OFFERED    |  0 s
    other       | devices are expected, none listed | NOT_REGISTERED |  8 s
    ANSWERS     | another process serves it, too    | TWO_SERVERS    | 30 s
    other       | fewer devices listed than expected| FEWER_DEVICES  | 30 s
    other       | CDI files are missing             | FILES_MISSING  | 30 s
    UNKNOWN     | none of the above                 | as before      |
    ANSWERS     | none of the above                 | NONE           |  0 s

While the kubelet is away or has just restarted (`is_held`), no finding begins, but a finding that
has begun can end. A finding about a count lasts at least until the kubelet lists a count again.
"""

import enum
from typing import Final, assert_never

import msgspec

from muster import vocabulary, wording

_Finding = vocabulary.WatchedFinding


class Server(enum.StrEnum):
    """The known state of the process behind a plugin's socket."""

    UNKNOWN = "unknown"
    ANSWERS = "answers"
    REMOVED = "removed"
    """The socket file is gone, but the process still runs."""
    ENDED = "ended"
    HALTED = "halted"
    SILENT = "silent"
    WRONG = "wrong"
    ABSENT = "absent"
    """The node has the hardware, but nothing offers it."""


class Facts(msgspec.Struct, frozen=True, kw_only=True):
    """The current facts about one plugin; None means unknown.

    `listed` and `expected` are how many devices the kubelet lists and should list. `detail`
    describes the server's problem; `rival` describes two processes that serve the same resource.
    While `is_held`, no finding begins.
    """

    server: Server
    detail: str = ""
    listed: int | None = None
    expected: int | None = None
    rival: str = ""
    files_missing: tuple[str, ...] = ()
    is_held: bool = False


class Holds(msgspec.Struct, frozen=True, kw_only=True):
    """For how many seconds each condition must hold."""

    removed_s: float = 2.0
    ended_s: float = 2.0
    halted_s: float = 3.0
    """How long HALTED must last: two observations, because debuggers stop processes briefly."""
    wrong_s: float = 20.0
    """How long WRONG must last: two probes, because a stopping plugin may break a connection."""
    unregistered_s: float = 8.0
    other_s: float = 30.0


class Suspicion(msgspec.Struct, frozen=True):
    """A finding that begins when its condition has held for `hold_s`; `text` describes it."""

    finding: _Finding
    text: str
    hold_s: float


_ABOUT_COUNTS: Final = frozenset({_Finding.NOT_REGISTERED, _Finding.FEWER_DEVICES})
NOTHING: Final = Suspicion(_Finding.NONE, "", 0.0)
_SHOWN_MAX: Final = 3


def suspicion(facts: Facts, holds: Holds) -> Suspicion | None:
    """Return the finding of the first row that applies; None if the finding stays as before."""
    match facts.server:
        case Server.REMOVED:
            finding, hold_s = _Finding.SOCKET_REMOVED, holds.removed_s
        case Server.ENDED:
            finding, hold_s = _Finding.NOT_SERVED, holds.ended_s
        case Server.HALTED:
            finding, hold_s = _Finding.NO_ANSWER, holds.halted_s
        case Server.SILENT:
            finding, hold_s = _Finding.NO_ANSWER, 0.0
        case Server.WRONG:
            finding, hold_s = _Finding.WRONG_ANSWER, holds.wrong_s
        case Server.ABSENT:
            finding, hold_s = _Finding.NOT_OFFERED, 0.0
        case Server.ANSWERS | Server.UNKNOWN:
            return _while_served(facts, holds)
        case _:
            assert_never(facts.server)
    return Suspicion(finding, _text(facts), hold_s)


def _while_served(facts: Facts, holds: Holds) -> Suspicion | None:
    is_counted = facts.listed is not None and facts.expected is not None
    if is_counted and facts.listed == 0 and facts.expected:
        return Suspicion(_Finding.NOT_REGISTERED, _text(facts), holds.unregistered_s)
    if facts.rival and facts.server is Server.ANSWERS:
        return Suspicion(_Finding.TWO_SERVERS, f"{facts.rival}{_counts(facts)}", holds.other_s)
    if is_counted and (facts.listed or 0) < (facts.expected or 0):
        return Suspicion(_Finding.FEWER_DEVICES, _counts(facts).removeprefix("; "), holds.other_s)
    if facts.files_missing:
        names = ", ".join(facts.files_missing[:_SHOWN_MAX])
        more = len(facts.files_missing) - _SHOWN_MAX
        rest = f" and {more} more" if more > 0 else ""
        text = f"no CDI spec describes {names}{rest}; containers that use them cannot start again"
        return Suspicion(_Finding.FILES_MISSING, text, holds.other_s)
    return NOTHING if facts.server is Server.ANSWERS else None


def _text(facts: Facts) -> str:
    return f"{facts.detail}{_counts(facts)}".removeprefix("; ")


def _counts(facts: Facts) -> str:
    if facts.listed is None:
        return ""
    if not facts.expected:
        return f"; the kubelet lists {wording.counted(facts.listed, 'device')}"
    return f"; the kubelet lists {facts.listed} of {wording.counted(facts.expected, 'device')}"


class FindingMachine:
    """The finding about one plugin; `text` describes it, and is empty if nothing is wrong."""

    def __init__(self, holds: Holds) -> None:
        self.finding = _Finding.NONE
        self.text = ""
        self._holds = holds
        self._suspicion = NOTHING
        self._since = 0.0
        self._is_held = False

    def observe(self, facts: Facts, now: float) -> None:
        """Record the current facts, and evaluate them."""
        self._is_held = facts.is_held
        new = suspicion(facts, self._holds)
        is_uncounted = facts.listed is None and self.finding in _ABOUT_COUNTS
        if new is None or (new == NOTHING and is_uncounted):
            # an unconfirmed suspicion may have passed unobserved
            self._suspicion = Suspicion(self.finding, self.text, 0.0)
            return
        if new.finding is not self._suspicion.finding:
            self._since = now
        self._suspicion = new
        self.tick(now)

    def tick(self, now: float) -> None:
        """Change the finding if a change is due."""
        new = self._suspicion
        needs_no_wait = new.finding in {self.finding, _Finding.NONE}
        if needs_no_wait or (not self._is_held and now >= self._since + new.hold_s):
            self.finding, self.text = new.finding, new.text

    def next_deadline(self) -> float | None:
        """Return when `tick` is next needed; None if no change is pending."""
        if self._is_held or self._suspicion.finding is self.finding:
            return None
        return self._since + self._suspicion.hold_s
