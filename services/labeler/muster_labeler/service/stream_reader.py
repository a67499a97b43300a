"""Adapter for the bus: reads the reports of plugins and health within limits; measures its delay.

Unwanted messages are rejected by their subject alone, so that a node that floods the stream delays
other nodes as little as possible.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Final, NoReturn

from muster import codec, pacing, vocabulary
from muster.service import logs, metrics
from muster_labeler.service import decision_publisher, fleet, inventory_budget, limits

Wants = Callable[[str, int], bool]
"""Decides whether to read a message, from its subject and the number of later messages."""

_REFUSED: Final = metrics.counter(
    "muster_labeler_refused_total",
    "Inventories that were ignored, by reason.",
    "reason",
    limits.Refusal,
)
_BACKLOG_S: Final = 10.0
_LOGGED_EVERY_S: Final = 60.0
_AGAIN_S: Final = 0.2
_AGAIN_GAP_S: Final = 0.02
"""The pause between reads: each needs a consumer, which NATS removes only after a moment."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bus:
    """The bus: reads the newest event of each subject, follows new events, and publishes.

    `newest` yields the events of one node, or of all nodes if the name is empty. Both `newest` and
    `follow` skip the messages that `wants` rejects.
    """

    newest: Callable[[Wants, str], AsyncIterator[codec.CloudEvent]]
    follow: Sequence[Callable[[Wants], AsyncIterator[codec.CloudEvent]]]
    publish: decision_publisher.Publish


class StreamReader:
    """Passes the events of the bus to `observe`, within the limits."""

    def __init__(
        self, bus: Bus, nodes: fleet.Fleet, observe: Callable[[codec.CloudEvent], None]
    ) -> None:
        self._bus = bus
        self._fleet = nodes
        self._observe = observe
        self._budget = inventory_budget.InventoryBudget(nodes)
        self._lines: pacing.KeyedBuckets[str] = pacing.KeyedBuckets(
            per_s=1 / _LOGGED_EVERY_S, burst=1, keys_max=len(limits.Refusal)
        )
        self._backlogs: list[inventory_budget.Backlog] = []
        self._is_restored = False
        self._clock = asyncio.get_running_loop().time

    def problem(self) -> str | None:
        """Return why a new report would be handled late; None if it would be handled soon."""
        if not self._is_restored:
            return "inventories are still being read"
        late_s = max((late.age_s(self._clock()) for late in self._backlogs), default=0.0)
        if late_s <= _BACKLOG_S:
            return None
        return f"events have been waiting for more than {late_s:.0f} s"

    async def restore(self) -> None:
        """Read the newest event of each subject."""
        # the nodes that are known by now are read with all the others
        self._fleet.take_unread()
        async for event in self._bus.newest(self._wants, ""):
            self._pass_on(event)
        self._is_restored = True

    async def run(self) -> None:
        """Read new events until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            for follow in self._bus.follow:
                tasks.create_task(self._follow(follow))
            tasks.create_task(self._read_again())

    def forget(self, node: str) -> None:
        """Forget a node that no longer exists."""
        self._budget.forget(node)

    async def _follow(self, follow: Callable[[Wants], AsyncIterator[codec.CloudEvent]]) -> None:
        late = inventory_budget.Backlog()
        self._backlogs.append(late)

        def wants(subject: str, left: int) -> bool:
            late.note(left, self._clock())
            return self._wants(subject, left)

        async for event in follow(wants):
            self._pass_on(event)

    def _wants(self, subject: str, _left: int) -> bool:
        """Return whether to read a message; verdicts always, because health has its own limits."""
        is_earlier_form = subject.endswith(vocabulary.InventoryReported.TYPE)
        if not is_earlier_form and not subject.startswith("muster.inventory."):
            return True
        refusal = self._budget.refusal(subject, self._clock())
        if refusal is not None:
            self._note_refusal(refusal, self._budget.node_of(subject))
        return refusal is None

    def _pass_on(self, event: codec.CloudEvent) -> None:
        inventory = event.data
        if isinstance(inventory, vocabulary.InventoryReported) and limits.is_too_large(inventory):
            self._note_refusal(limits.Refusal.TOO_LARGE, event.node)
        else:
            self._observe(event)

    def _note_refusal(self, refusal: limits.Refusal, node: str) -> None:
        _REFUSED.labels(refusal).inc()
        if self._lines.try_take(refusal, self._clock()):
            logs.logger().warning("inventory_refused", reason=refusal, node=node)

    async def _read_again(self) -> NoReturn:
        """Read the stored events of new nodes, and of nodes that had sent too many messages."""
        while True:
            await asyncio.sleep(_AGAIN_S)
            for node in self._fleet.take_unread():
                self._budget.read_again(node, self._clock())
            for node in self._budget.take_due(self._clock()):
                async for event in self._bus.newest(_all, node):
                    self._pass_on(event)
                await asyncio.sleep(_AGAIN_GAP_S)


def _all(_subject: str, _left: int) -> bool:
    return True
