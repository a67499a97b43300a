"""Pure: What holds against each part of each GPU, by what was seen of it: a `machine.Machine`.

What a GPU is told, and what becomes of it; every finding has a code, and holds on its own:

    seen                              | begins, on the part that it is about
    ----------------------------------|-------------------------------------------------------------
    XID: ignore                       | nothing; it disturbs nothing
    XID: degrade                      | Degraded   xid-<n>
    XID: unhealthy, reset, reboot     | Unhealthy  xid-<n>
    poll: GPU_IS_LOST, RESET_REQUIRED | Unhealthy  gpu-lost, reset-required
    poll: another error               | Unmonitored unanswered, after `UNANSWERED_POLLS` in a row
    poll: recovery action 1 2 4 6 7   | Unhealthy  recovery-reset, -reboot, -drain-and-reset, ...
    poll: recovery action 3 5         | Degraded   recovery-drain-p2p, recovery-imex
    poll: remap failed                | Unhealthy  remap-failed
    poll: fabric not completed        | Unhealthy  fabric-not-ready
    poll: remap or retirement pending | Degraded   remap-pending, retired-pending
    poll: uncorrected ECC rises       | Degraded   ecc-uncorrected
    poll: slowed down, some in a row  | Degraded   slowdown
    poll: an NVLink is down           | Degraded   nvlink-down
    watch: a problem                  | Unmonitored unwatched, until there is none
    no poll for long                  | Unmonitored unpolled, until there is one

A part is Healthy while nothing Unhealthy holds against it (`findings`). When each ends:
`gpu_recovery`. What is not known begins nothing but Unmonitored, and ends nothing. Nothing is
remembered over a restart but what NVML says: a GPU that it calls bad is bad at the first look.
"""

from collections.abc import Iterator, Sequence
from datetime import datetime, timedelta
from typing import Final, TypeAlias, assert_never

from muster_plugin.config import gpus
from muster_plugin.gpu import health_condition, xid_policy
from muster_plugin.model import gpu

OVERDUE_POLLS: Final = 3
OVERDUE_MIN_S: Final = 30.0
"""A GPU that was not polled for so many periods, and so long, is unmonitored."""

_STALL_S: Final = 5.0
"""Who comes so late to see that nobody polled stood still, and could hear of no poll."""
_NEVER: Final = float("inf")
_Seen: TypeAlias = gpu.Look | gpu.Observation
_Stamp: TypeAlias = tuple[float, datetime]


class GpuHealth:
    """The health of all GPUs of a node. `judge` and `told` hold for what is seen from now on."""

    def __init__(self, judge: xid_policy.Policy, told: gpus.Health) -> None:
        self.judge = judge
        self.told = told
        self._gpus: dict[str, health_condition.Condition] = {}
        self._stamp: _Stamp | None = None

    def receive(self, event: _Seen, now: float) -> Sequence[gpu.Finding]:
        """Take what was seen; return what began and ended by it."""
        return [*self._received(event, now), *self.tick(now)]

    def tick(self, now: float) -> Sequence[gpu.Finding]:
        """Find who has not been polled for long; begin anew if we have not been here for long."""
        late = [one for one in self._gpus.values() if self._due(one) <= now]
        if any(now - self._due(one) > _STALL_S for one in late):
            for one in late:
                one.listens_anew(now)
            return []
        return [found for one in late for found in self._unpolled(one, now)]

    def next_deadline(self) -> float | None:
        """Return when the next GPU will not have been polled for long."""
        due = min(map(self._due, self._gpus.values()), default=_NEVER)
        return due if due < _NEVER else None

    def _received(self, event: _Seen, now: float) -> Iterator[gpu.Finding]:
        if isinstance(event, gpu.Look):
            yield from self._looked(event, now)
            return
        self._stamp = now, event.at
        match event:
            case gpu.Poll(gpu=name):
                yield from self._gpu(name).polled(event, now, self.told, self.judge)
            case gpu.Xid(part=part):
                yield from self._gpu(part.gpu).reported(event, now, self.judge)
            case gpu.Watch(gpu=name):
                yield from self._gpu(name).watched(event, now)
            case gpu.Reset(gpu=name):
                yield from self._gpu(name).repaired(event, now, self.told)
            case _:
                assert_never(event)

    def _looked(self, look: gpu.Look, now: float) -> Iterator[gpu.Finding]:
        for poll in look.polls:
            yield from self._received(poll, now)
        polled = {poll.gpu for poll in look.polls}
        at = self._at(now)
        for one in look.unreadable:
            if at is not None and one.uuid and one.uuid not in polled:
                yield from self._received(gpu.Poll(gpu=one.uuid, at=at, error=one.error), now)
        named = {one.uuid for one in look.gpus} | {one.uuid for one in look.unreadable if one.uuid}
        for name in sorted(named):
            self._gpu(name).listed(now)
        if at is not None and self._tells_who_is_gone(look):
            for name in sorted(self._gpus.keys() - named):
                yield from self._gpus[name].went(now, at)

    def _tells_who_is_gone(self, look: gpu.Look) -> bool:
        """Tell whether a GPU that a look does not name is gone; any nameless one could be it."""
        if look.driver is gpu.Driver.READY:
            return all(one.uuid for one in look.unreadable)
        return look.driver is gpu.Driver.NOT_LOADED

    def _unpolled(self, one: health_condition.Condition, now: float) -> Iterator[gpu.Finding]:
        at = self._at(now)
        assert at is not None, "only who was seen can be late"
        yield from one.unpolled(now, at)

    def _due(self, one: health_condition.Condition) -> float:
        if one.heard_at is None or one.is_blind or self._stamp is None:
            return _NEVER
        return one.heard_at + max(OVERDUE_MIN_S, OVERDUE_POLLS * self.told.poll_s)

    def _at(self, now: float) -> datetime | None:
        """Return the time of day at `now`, by the last fact that a door stamped."""
        if self._stamp is None:
            return None
        then, at = self._stamp
        return at + timedelta(seconds=now - then)

    def _gpu(self, name: str) -> health_condition.Condition:
        return self._gpus.setdefault(name, health_condition.Condition(name))
