"""Pure: Where one resource stands between us and the kubelet."""

import enum
import math
from typing import Final, assert_never

import msgspec


class State(enum.StrEnum):
    """Where the resource stands; the table of `registration` tells the ways between."""

    WAITING = "waiting"
    STARTING = "starting"
    REGISTERING = "registering"
    REFUSED = "refused"
    UNWATCHED = "unwatched"
    WATCHED = "watched"
    DROPPED = "dropped"
    ENDING = "ending"


SERVING: Final = frozenset(
    {State.REGISTERING, State.REFUSED, State.UNWATCHED, State.WATCHED, State.DROPPED}
)
REGISTERED: Final = frozenset({State.UNWATCHED, State.WATCHED, State.DROPPED})


def doing(state: State) -> str:
    """Say what is being done to have the resource listed; nothing where it is."""
    match state:
        case State.WAITING | State.STARTING:
            return "serving again"
        case State.REGISTERING | State.REFUSED | State.DROPPED:
            return "registering"
        case State.UNWATCHED:
            return "waiting for the kubelet's stream"
        case State.ENDING:
            return "ending the old server"
        case State.WATCHED:
            return ""
        case _:
            assert_never(state)


_DOUBLINGS_MAX: Final = 30


class Patience(msgspec.Struct, frozen=True, kw_only=True):
    """How long is waited for what, in seconds."""

    stream_after_register_s: float = 5.0
    stream_after_close_s: float = 1.0
    retry_first_s: float = 0.02
    retry_max_s: float = 5.0
    refused_for_good_s: float = 30.0
    refusals_max: float = math.inf
    """After so many refusals a new generation tries, which may go another way."""
    served_elsewhere_s: float = 0.2
    kubelet_new_s: float = 10.0
    """A kubelet that has come takes so long at most to take its plugins in, and is busy then."""
    stable_s: float = 2.0
    """A resource listed this long has no history: its next loss is repaired without delay."""

    def backoff_s(self, failures: int) -> float:
        """Return how long to wait after so many failures: 20 ms doubling to 5 s; below 0 none."""
        if failures < 0:
            return 0.0
        return min(self.retry_first_s * 2.0 ** min(failures, _DOUBLINGS_MAX), self.retry_max_s)


class Trouble(msgspec.Struct, frozen=True):
    """What happened and when; or, if it `lasts`, what is wrong since then."""

    text: str
    at: float
    detail: str = ""
    lasts: bool = False

    def told(self, now: float, *, then: str) -> str:
        """Say it in words, and what is done about it."""
        seconds = max(0.0, now - self.at)
        if not self.text:
            return f"not registered yet, {then}"
        if self.lasts:
            return f"{self.text} ({self.detail}), for {seconds:.1f} s; {then}"
        return f"{self.text} {seconds:.1f} s ago, {then}"


NO_TROUBLE: Final = Trouble("", -math.inf)
