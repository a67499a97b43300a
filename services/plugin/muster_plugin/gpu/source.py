"""Adapter: the node's GPUs: whoever sees them is heard, and what is seen of them is judged."""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Final, Protocol, TypeAlias

from muster import machine
from muster_plugin.model import gpu

if TYPE_CHECKING:
    from muster_plugin.config import gpus
    from muster_plugin.gpu import health_state, xid_policy

FIRST_SCAN_S: Final = 10.0
"""How long a resource waits for the first look before it is registered without devices."""

Observed: TypeAlias = gpu.Scan | gpu.Observation
Evaluated: TypeAlias = gpu.FaultChange | gpu.Scan


class Source(Protocol):
    """Whoever sees GPUs: NVML, or a simulation."""

    @property
    def checked_at(self) -> Mapping[str, float]:
        """When each kind of looking last succeeded, in monotonic seconds."""

    async def first(self, timeout_s: float) -> gpu.Scan:
        """Look for the first time; what cannot be seen in time is said in the look."""

    async def follow(self, seen: Callable[[Observed], None]) -> None:
        """Go on looking for ever."""

    def poll_every(self, seconds: float) -> None:
        """Ask each GPU so often from now on."""

    async def close(self) -> None:
        """Let go of the GPUs."""


class GpuEvaluator:
    """The GPUs of a node, judged; a `machine.Machine` around `gpu_health`."""

    def __init__(
        self,
        source: Source,
        health: "health_state.GpuHealth",
        line: machine.MachineRunner[Observed, Evaluated],
    ) -> None:
        self.source = source
        self.xids: Counter[int] = Counter()
        """How often the driver reported each XID."""
        self._health = health
        self._line = line

    def judge_by(self, judge: "xid_policy.Policy", told: "gpus.Health") -> None:
        """Judge by other rules what is seen from now on; what holds ends as it would have."""
        self._health.judge, self._health.told = judge, told
        self.source.poll_every(told.poll_s)

    async def watch(self, act: Callable[[Evaluated], Awaitable[None]]) -> None:
        """Have everything that is seen judged, for ever.

        What holds against a GPU comes before the look that shows it, so that what begins badly is
        never called Healthy.
        """
        self._line.send(await self.source.first(FIRST_SCAN_S))
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._line.drive(self, act))
            tasks.create_task(self.source.follow(self._line.send))

    def receive(self, event: Observed, now: float) -> Sequence[Evaluated]:
        """Judge what is seen."""
        if isinstance(event, gpu.Xid):
            self.xids[event.xid] += 1
        found = self._health.receive(event, now)
        return [*found, event] if isinstance(event, gpu.Scan) else found

    def tick(self, now: float) -> Sequence[Evaluated]:
        """Judge what time alone has changed."""
        return self._health.tick(now)

    def next_deadline(self) -> float | None:
        """Return when `tick` is next needed."""
        return self._health.next_deadline()
