"""Adapter: the bus and to Kubernetes Events: what was decided is told, without anybody waiting.

Labels are kept right while NATS is away: what is to be told waits in a queue with an end. What does
not fit any more is counted; a plugin's next inventory has everything looked at again.
"""

import asyncio
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Final, NoReturn

import prometheus_client

from muster import vocabulary
from muster_labeler import desired, facts

if TYPE_CHECKING:
    # it loads the Kubernetes client, which not everybody has use for
    from muster_labeler import notes

Publish = Callable[[vocabulary.Event, str], Awaitable[None]]

_WAITING_MAX: Final = 20_000
_UNTOLD: Final = prometheus_client.Counter(
    "muster_labeler_untold_total", "Decisions that were not told: too many waited.", ["to"]
)


class Telling:
    """Tells of decisions on the bus, and in the cluster if there are `notes`; `run` it."""

    def __init__(self, publish: Publish, notes: "notes.Notes | None") -> None:
        self._publish = publish
        self._notes = notes
        self._news: asyncio.Queue[tuple[vocabulary.Event, str]] = asyncio.Queue(_WAITING_MAX)
        self._events: asyncio.Queue[tuple[facts.Node, desired.Decision]] = asyncio.Queue(
            _WAITING_MAX
        )

    def tell(self, decision: desired.Decision, *, node: str, cause: str) -> None:
        """Have a decision told on the bus, once for each cause; not every decision is."""
        event = desired.event_of(decision, node=node, at=datetime.now(UTC))
        if event is None:
            return
        if self._news.full():
            _UNTOLD.labels("bus").inc()
            self._news.get_nowait()
        self._news.put_nowait((event, f"{cause}:{event.TYPE}"))

    def note(self, node: facts.Node, decision: desired.Decision) -> None:
        """Have a Kubernetes Event written about it."""
        if self._events.full():
            _UNTOLD.labels("kubernetes").inc()
            self._events.get_nowait()
        self._events.put_nowait((node, decision))

    async def run(self) -> None:
        """Tell, for ever."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._to_bus())
            tasks.create_task(self._to_cluster())

    async def _to_bus(self) -> NoReturn:
        while True:
            await self._publish(*await self._news.get())

    async def _to_cluster(self) -> NoReturn:
        while True:
            node, decision = await self._events.get()
            if self._notes is not None:
                await self._notes.tell(node, decision)
