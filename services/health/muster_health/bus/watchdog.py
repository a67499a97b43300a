"""Adapter: the clock: publishes a watchdog tick every few seconds while this process leads.

It says so the way that alerts go and after all that is to be told, so that a tick that comes proves
that alerts do. What it cannot say over the bus, it says past it.
"""

import asyncio
import functools
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from typing import Final

from muster import vocabulary
from muster.nats import lock
from muster_health.model import signals

_LOOK_S: Final = 0.5
"""A new leader ticks this soon."""
STUCK_S: Final = 15.0
"""So long may one thing that is to be told take: then none that comes after it is told either."""

Publish = Callable[[vocabulary.WatchdogTicked, Callable[[], bool]], Awaitable[object]]
"""Publishes an event, unless the second says no before it has come through."""


async def tick(
    leading: lock.Lock,
    publish: Publish,
    *,
    holder: str,
    interval_s: float,
    leads: Callable[[int], bool] = lambda _: True,
) -> None:
    """Publish a tick when we begin to lead and every `interval_s` of it, for ever.

    `leads` tells whether whoever concludes knows that it leads under this revision.
    """
    clock = asyncio.get_running_loop().time
    ticked: int | None = None
    due = clock()
    while True:
        revision = leading.term()
        is_due = revision != ticked or clock() >= due
        if revision is not None and is_due and leads(revision):
            ticked, due = revision, clock() + interval_s
            event = vocabulary.WatchdogTicked(
                node=vocabulary.FLEET,
                at=datetime.now(UTC),
                leader=revision,
                holder=holder,
                interval_s=interval_s,
            )
            await publish(event, functools.partial(leading.is_term, revision))
        await asyncio.sleep(min(_LOOK_S, interval_s))


async def mind(
    stuck_s: Callable[[], float],
    tell: Callable[[signals.Alarm], Awaitable[None]],
    *,
    is_blind: Callable[[], bool],
    bound_s: float = STUCK_S,
    look_s: float = _LOOK_S,
) -> None:
    """Say past the bus that what is concluded cannot be told over it, and when it can; for ever.

    One that is blind says that already.
    """
    told = False
    while True:
        await asyncio.sleep(look_s)
        seconds = stuck_s()
        is_stuck = seconds > bound_s
        if is_blind() or is_stuck is told:
            # what is told of being blind takes the place of what was told of this
            told = told and not is_blind()
            continue
        told = is_stuck
        summary = (
            f"health has had an alert or verdict for {seconds:.0f} s that NATS does not take"
            if is_stuck
            else "health can tell what it concludes again"
        )
        await tell(signals.Alarm(firing=is_stuck, summary=summary, seconds=seconds))
