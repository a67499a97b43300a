"""Pure: what is wrong with one watched plugin, as a state machine.

A finding begins when its condition has held without a break, and ends as soon as all is well. The
first row that applies counts:

    server      | the kubelet lists       | finding        | held for
    ------------|-------------------------|----------------|---------
    REMOVED     | anything                | SOCKET_REMOVED |  2 s
    ENDED       | anything                | NOT_SERVED     |  2 s
    HALTED      | anything                | NO_ANSWER      |  3 s
    SILENT      | anything                | NO_ANSWER      |  0 s
    WRONG       | anything                | WRONG_ANSWER   | 20 s
    ABSENT      | anything                | NOT_OFFERED    |  0 s
    other       | none of those expected  | NOT_REGISTERED |  8 s
    ANSWERS     | by two processes        | TWO_SERVERS    | 30 s
    other       | some of those expected  | FEWER_DEVICES  | 30 s
    other       | CDI files are missing   | FILES_MISSING  | 30 s
    UNKNOWN     | all, or that is unknown | as before      |
    ANSWERS     | all, or that is unknown | NONE           | at once

While the facts are `held`, because the kubelet is away or has just restarted, no finding begins;
one that has begun can end. One about a count lasts until the kubelet says another count.
"""

import enum
from typing import Final, assert_never

import msgspec

from muster import vocabulary

_Finding = vocabulary.WatchedFinding


class Server(enum.StrEnum):
    """What is known of the process behind a plugin's socket."""

    UNKNOWN = "unknown"
    ANSWERS = "answers"
    REMOVED = "removed"
    """The file of its socket is gone, and it goes on without."""
    ENDED = "ended"
    HALTED = "halted"
    SILENT = "silent"
    WRONG = "wrong"
    ABSENT = "absent"
    """There is hardware, and nothing that offers it."""


class Facts(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of one plugin now; None means unknown.

    `expected` is what the kubelet should list. `detail` describes the server, `rival` the other
    process that serves the same.
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
    """Two looks at the process: a debugger or a snapshot may stop it for a moment."""
    wrong_s: float = 20.0
    """Two probes: a plugin that ends may cut a single connection."""
    unregistered_s: float = 8.0
    other_s: float = 30.0


class Suspicion(msgspec.Struct, frozen=True):
    """The finding that the facts lead to, in words, once they have held for `hold_s`."""

    finding: _Finding
    text: str
    hold_s: float


_OF_COUNTS: Final = frozenset({_Finding.NOT_REGISTERED, _Finding.FEWER_DEVICES})
NOTHING: Final = Suspicion(_Finding.NONE, "", 0.0)
_SHOWN_MAX: Final = 3


def suspicion(facts: Facts, holds: Holds) -> Suspicion | None:
    """Return the row of the table that applies; None if the finding stays as before."""
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
    lacks = facts.listed is not None and facts.expected is not None
    if lacks and facts.listed == 0 and facts.expected:
        return Suspicion(_Finding.NOT_REGISTERED, _text(facts), holds.unregistered_s)
    if facts.rival and facts.server is Server.ANSWERS:
        return Suspicion(_Finding.TWO_SERVERS, f"{facts.rival}{_counts(facts)}", holds.other_s)
    if lacks and (facts.listed or 0) < (facts.expected or 0):
        return Suspicion(_Finding.FEWER_DEVICES, _counts(facts).removeprefix("; "), holds.other_s)
    if facts.files_missing:
        names = ", ".join(facts.files_missing[:_SHOWN_MAX])
        more = len(facts.files_missing) - _SHOWN_MAX
        others = f" and {more} more" if more > 0 else ""
        text = f"no CDI spec describes {names}{others}; containers with them cannot start again"
        return Suspicion(_Finding.FILES_MISSING, text, holds.other_s)
    return NOTHING if facts.server is Server.ANSWERS else None


def _text(facts: Facts) -> str:
    return f"{facts.detail}{_counts(facts)}".removeprefix("; ")


def _counts(facts: Facts) -> str:
    if facts.listed is None:
        return ""
    if not facts.expected:
        return f"; the kubelet lists {facts.listed} devices"
    return f"; the kubelet lists {facts.listed} of {facts.expected} devices"


class FindingMachine:
    """The finding about one plugin; `text` says what was observed, empty if nothing is wrong."""

    def __init__(self, holds: Holds) -> None:
        self.finding = _Finding.NONE
        self.text = ""
        self._holds = holds
        self._suspicion = NOTHING
        self._since = 0.0
        self._is_held = False

    def observe(self, facts: Facts, now: float) -> None:
        """Take in the facts as they are from now on."""
        self._is_held = facts.is_held
        new = suspicion(facts, self._holds)
        is_uncounted = facts.listed is None and self.finding in _OF_COUNTS
        if new is None or (new == NOTHING and is_uncounted):
            # what was suspected, and is not certain yet, may have passed unseen
            self._suspicion = Suspicion(self.finding, self.text, 0.0)
            return
        if new.finding is not self._suspicion.finding:
            self._since = now
        self._suspicion = new
        self.tick(now)

    def tick(self, now: float) -> None:
        """Begin the finding that is due."""
        new = self._suspicion
        has_begun = new.finding in {self.finding, _Finding.NONE}
        if has_begun or (not self._is_held and now >= self._since + new.hold_s):
            self.finding, self.text = new.finding, new.text

    def next_deadline(self) -> float | None:
        """Return when `tick` is next needed."""
        if self._is_held or self._suspicion.finding is self.finding:
            return None
        return self._since + self._suspicion.hold_s
