"""Pure: Where one resource stands between us and the kubelet."""

import enum
from typing import Final, assert_never


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
