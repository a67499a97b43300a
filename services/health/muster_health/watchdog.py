"""Door to the clock: the leader says every few seconds that somebody watches.

It says so the way that alerts go, so that a tick that comes proves that an alert would.
"""

import asyncio
import functools
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from typing import Final

from muster import vocabulary
from muster_health import leader

_LOOK_S: Final = 0.5
"""A new leader ticks this soon."""

Publish = Callable[[vocabulary.WatchdogTicked, Callable[[], bool]], Awaitable[object]]
"""Publishes an event, unless the second says no before it has come through."""


async def tick(leading: leader.Leader, publish: Publish, *, holder: str, interval_s: float) -> None:
    """Publish a tick when we begin to lead and every `interval_s` of it, for ever."""
    clock = asyncio.get_running_loop().time
    ticked: int | None = None
    due = clock()
    while True:
        revision = leading.revision()
        if revision is not None and (revision != ticked or clock() >= due):
            ticked, due = revision, clock() + interval_s
            event = vocabulary.WatchdogTicked(
                node=vocabulary.FLEET,
                at=datetime.now(UTC),
                leader=revision,
                holder=holder,
                interval_s=interval_s,
            )
            await publish(event, functools.partial(leading.still, revision))
        await asyncio.sleep(min(_LOOK_S, interval_s))
