"""Adapter: applies the configured XID policy to the observations of a GPU source."""

import asyncio
import functools
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Final, Protocol, TypeAlias

from muster import machine
from muster.service import logs, settings
from muster_plugin.config import gpus
from muster_plugin.gpu import gpu_health, xid_policy
from muster_plugin.model import gpu

FIRST_SCAN_S: Final = 10.0
"""How long a resource waits for the first scan before it is registered without devices."""

Observed: TypeAlias = gpu.Scan | gpu.Observation
Evaluated: TypeAlias = gpu.FaultChange | gpu.Scan
_PACKAGE: Final = Path(__file__).parents[1]
_POLICY_BYTES_MAX: Final = 1024 * 1024
_PROBLEMS_LOGGED_MAX: Final = 100


class Source(Protocol):
    """A source of GPU observations: NVML or a simulation."""

    @property
    def checked_at(self) -> Mapping[str, float]:
        """When each kind of check last succeeded, in monotonic seconds."""

    async def first_scan(self, timeout_s: float) -> gpu.Scan:
        """Return the first scan; if it takes too long, return a scan that reports this."""

    async def observe(self, observer: Callable[[Observed], None]) -> None:
        """Report every observation until cancelled."""

    def set_poll_interval(self, seconds: float) -> None:
        """Change the interval at which each GPU is polled."""

    async def close(self) -> None:
        """Release the GPUs."""


class GpuEvaluator:
    """Runs `gpu_health.GpuHealth` on a source's observations, as a `machine.Machine`."""

    def __init__(
        self,
        source: Source,
        health: gpu_health.GpuHealth,
        runner: machine.MachineRunner[Observed, Evaluated],
    ) -> None:
        self.source = source
        self.xids: Counter[int] = Counter()
        """How many times the driver reported each XID."""
        self._health = health
        self._runner = runner

    def use_rules(self, policy: xid_policy.Policy, rules: gpus.Health) -> None:
        """Evaluate later events by this policy and these rules; change the poll interval.

        Active faults keep their recovery action.
        """
        self._health.policy, self._health.rules = policy, rules
        self.source.set_poll_interval(rules.poll_s)

    async def watch(self, act: Callable[[Evaluated], Awaitable[None]]) -> None:
        """Evaluate every observation until cancelled; pass the results to `act`.

        The faults of a GPU are passed on before the scan that lists it, so that a GPU that is
        broken from the start is never reported as Healthy.
        """
        self._runner.send(await self.source.first_scan(FIRST_SCAN_S))
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._runner.drive(self, act))
            tasks.create_task(self.source.observe(self._runner.send))

    def receive(self, event: Observed, now: float) -> Sequence[Evaluated]:
        """Return the faults that began or ended, then the event itself if it is a scan."""
        if isinstance(event, gpu.Xid):
            self.xids[event.xid] += 1
        changes = self._health.receive(event, now)
        return [*changes, event] if isinstance(event, gpu.Scan) else changes

    def tick(self, now: float) -> Sequence[Evaluated]:
        """Return the faults that began because GPUs were not polled in time."""
        return self._health.tick(now)

    def next_deadline(self) -> float | None:
        """Return when `tick` is next needed; None if no deadline is pending."""
        return self._health.next_deadline()


def read_policy(rules: gpus.Health) -> xid_policy.Policy:
    """Return the configured policy. Raises settings.BadSettings with every problem."""
    return xid_policy.Policy(
        xid_policy.catalogue((_PACKAGE / xid_policy.CATALOGUE).read_bytes()),
        xid_policy.preset((_PACKAGE / xid_policy.preset_file(rules.preset)).read_bytes()),
        overrides=_overrides(Path(rules.policy)) if rules.policy else None,
        disable=rules.disable,
        enable=rules.enable,
    )


def load_policy(rules: gpus.Health) -> xid_policy.Policy:
    """Return the configured policy, and log each of its problems once. Raises BadSettings."""
    policy = read_policy(rules)
    for problem in policy.problems:
        _log_problem(problem)
    return policy


@functools.lru_cache(_PROBLEMS_LOGGED_MAX)
def _log_problem(problem: str) -> None:
    logs.logger().warning("xid_policy_problem", problem=problem)


def _overrides(file: Path) -> xid_policy.Overrides:
    if file.is_fifo():
        raise settings.BadSettings([f"{file}: not a regular file"])
    try:
        with file.open("rb") as opened:
            text = opened.read(_POLICY_BYTES_MAX + 1)
    except OSError as error:
        raise settings.BadSettings([f"{file}: {error.strerror}"]) from None
    documents = settings.parse(text, source=str(file))
    try:
        return settings.validate(xid_policy.Overrides, documents[0] if documents else {})
    except settings.BadSettings as error:
        raise settings.BadSettings([f"{file}: {problem}" for problem in error.problems]) from None
