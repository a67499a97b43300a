"""Adapter: the clock: publishes a watchdog tick every few seconds while this process leads.

The tick takes the same way as alerts and goes after all of them, so a tick that arrives proves that
alerts do. If publishing is stuck, people are notified without the bus.
"""

import asyncio
import functools
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from typing import Final

from muster import leadership, vocabulary
from muster_health.model import signals

_CHECK_S: Final = 0.5
"""How soon a new leader publishes its first tick."""
STUCK_S: Final = 15.0
"""How long one publication may take; it delays all later ones."""

Publish = Callable[[vocabulary.WatchdogTicked, Callable[[], bool]], Awaitable[object]]
"""Publishes an event, retrying while the second argument returns True."""


async def publish_ticks(
    election: leadership.Election,
    publish: Publish,
    *,
    holder: str,
    interval_s: float,
    is_detector_leading: Callable[[int], bool] = lambda _: True,
) -> None:
    """Publish a tick when we start to lead and then every `interval_s`, forever.

    `is_detector_leading` returns whether the detector has learned that it leads in this term.
    """
    clock = asyncio.get_running_loop().time
    ticked_term: int | None = None
    due = clock()
    while True:
        term = election.term()
        is_due = term != ticked_term or clock() >= due
        if term is not None and is_due and is_detector_leading(term):
            ticked_term, due = term, clock() + interval_s
            event = vocabulary.WatchdogTicked(
                node=vocabulary.FLEET,
                at=datetime.now(UTC),
                leader=term,
                holder=holder,
                interval_s=interval_s,
            )
            await publish(event, functools.partial(election.is_term, term))
        await asyncio.sleep(min(_CHECK_S, interval_s))


async def watch_publishing(
    stuck_s: Callable[[], float],
    notify: Callable[[signals.Alarm], Awaitable[None]],
    *,
    is_disconnected: Callable[[], bool],
    stuck_max_s: float = STUCK_S,
    check_s: float = _CHECK_S,
) -> None:
    """Notify people without NATS when publishing is stuck and when it works again; forever.

    While health is disconnected from NATS the detector raises its own alarm, which replaces this
    one.
    """
    is_notified = False
    while True:
        await asyncio.sleep(check_s)
        seconds = stuck_s()
        is_stuck = seconds > stuck_max_s
        if is_disconnected():
            is_notified = False
            continue
        if is_stuck is is_notified:
            continue
        is_notified = is_stuck
        summary = (
            f"NATS has not accepted an alert or verdict from health for {seconds:.0f} s"
            if is_stuck
            else "NATS accepts alerts and verdicts from health again"
        )
        await notify(signals.Alarm(firing=is_stuck, summary=summary, seconds=seconds))
