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

import msgspec

from muster import vocabulary
from muster_plugin.config import gpus
from muster_plugin.gpu import faults, poll_signals, recovery, xid_policy
from muster_plugin.model import gpu

OVERDUE_POLLS: Final = 3
OVERDUE_MIN_S: Final = 30.0
"""A GPU that was not polled for so many periods, and so long, is unmonitored."""

_STALL_S: Final = 5.0
"""Who comes so late to see that nobody polled stood still, and could hear of no poll."""
_NEVER: Final = float("inf")
_Seen: TypeAlias = gpu.Scan | gpu.Observation
_Stamp: TypeAlias = tuple[float, datetime]


class GpuHealth:
    """The health of all GPUs of a node. `judge` and `told` hold for what is seen from now on."""

    def __init__(self, judge: xid_policy.Policy, told: gpus.Health) -> None:
        self.judge = judge
        self.told = told
        self._gpus: dict[str, GpuCondition] = {}
        self._stamp: _Stamp | None = None

    def receive(self, event: _Seen, now: float) -> Sequence[gpu.FaultChange]:
        """Take what was seen; return what began and ended by it."""
        return [*self._received(event, now), *self.tick(now)]

    def tick(self, now: float) -> Sequence[gpu.FaultChange]:
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

    def _received(self, event: _Seen, now: float) -> Iterator[gpu.FaultChange]:
        if isinstance(event, gpu.Scan):
            yield from self._looked(event, now)
            return
        self._stamp = now, event.at
        match event:
            case gpu.Poll(gpu=name):
                yield from self._gpu(name).polled(event, now, self.told, self.judge)
            case gpu.Xid(part=part):
                yield from self._gpu(part.gpu).reported(event, now, self.judge)
            case gpu.MonitoringChanged(gpu=name):
                yield from self._gpu(name).watched(event, now)
            case gpu.RepairReported(gpu=name):
                yield from self._gpu(name).repaired(event, now, self.told)
            case _:
                assert_never(event)

    def _looked(self, look: gpu.Scan, now: float) -> Iterator[gpu.FaultChange]:
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

    def _tells_who_is_gone(self, look: gpu.Scan) -> bool:
        """Tell whether a GPU that a look does not name is gone; any nameless one could be it."""
        if look.driver is gpu.Driver.READY:
            return all(one.uuid for one in look.unreadable)
        return look.driver is gpu.Driver.NOT_LOADED

    def _unpolled(self, one: "GpuCondition", now: float) -> Iterator[gpu.FaultChange]:
        at = self._at(now)
        assert at is not None, "only who was seen can be late"
        yield from one.unpolled(now, at)

    def _due(self, one: "GpuCondition") -> float:
        if one.heard_at is None or one.is_blind or self._stamp is None:
            return _NEVER
        return one.heard_at + max(OVERDUE_MIN_S, OVERDUE_POLLS * self.told.poll_s)

    def _at(self, now: float) -> datetime | None:
        """Return the time of day at `now`, by the last fact that a door stamped."""
        if self._stamp is None:
            return None
        then, at = self._stamp
        return at + timedelta(seconds=now - then)

    def _gpu(self, name: str) -> "GpuCondition":
        return self._gpus.setdefault(name, GpuCondition(name))


UNANSWERED: Final = "unanswered"
UNWATCHED: Final = "unwatched"
UNPOLLED: Final = "unpolled"
UNANSWERED_POLLS: Final = 3

_BLIND: Final = frozenset({UNANSWERED, UNWATCHED, UNPOLLED})
_SAID_MAX: Final = 1000


class GpuCondition:
    """One GPU, and what holds against its parts. `heard_at` is None while nobody need poll it."""

    def __init__(self, name: str) -> None:
        self.heard_at: float | None = None
        self._whole = gpu.Part(gpu=name)
        self._holds: dict[tuple[gpu.Part, str], recovery.ActiveFault] = {}
        self._histories: dict[gpu.Part, recovery.FlapHistory] = {}
        self._in_a_row: dict[str, int] = {}
        self._unanswered = 0
        self._is_lost = False
        self._ecc: int | None = None
        self._last = ""

    @property
    def is_blind(self) -> bool:
        """Whether it is said already that nobody knows how it is."""
        return any(code in _BLIND for _, code in self._holds)

    def listed(self, now: float) -> None:
        """Take that a look names it: it is to be polled from now on."""
        self.heard_at = now if self.heard_at is None else self.heard_at

    def listens_anew(self, now: float) -> None:
        """Take that until now nobody could have heard of it, which says nothing of it."""
        self.heard_at = now

    def went(self, now: float, at: datetime) -> Iterator[gpu.FaultChange]:
        """Take that it is not there."""
        self.heard_at = None
        self._unanswered = 0
        self._is_lost = True
        for code in (UNANSWERED, UNPOLLED):
            yield from self._end(self._whole, code, at, "the GPU is not there")
        for hold in self._holds.values():
            hold.went(now)

    def watched(self, watch: gpu.MonitoringChanged, now: float) -> Iterator[gpu.FaultChange]:
        """Take whether somebody can see what befalls it."""
        if watch.problem:
            rule = f"watch/{UNWATCHED}: {gpu.Effect.UNMONITORED}"
            yield from self._blind(UNWATCHED, watch.problem, now, watch.at, rule)
            return
        if self.heard_at is not None:
            self.heard_at = now
        yield from self._end(self._whole, UNWATCHED, watch.at, "it is watched again")

    def unpolled(self, now: float, at: datetime) -> Iterator[gpu.FaultChange]:
        """Take that nobody polls it."""
        assert self.heard_at is not None, "only who was seen can be late"
        reason = f"nobody has looked at it for {now - self.heard_at:.0f} s"
        rule = f"polled/{UNPOLLED}: {gpu.Effect.UNMONITORED}"
        yield from self._blind(UNPOLLED, reason, now, at, rule)

    def repaired(
        self, reset: gpu.RepairReported, now: float, told: gpus.Health
    ) -> Iterator[gpu.FaultChange]:
        """Take somebody's word that it was reset; what other XIDs did stays."""
        spared = "" if reset.xid is None else f"xid-{reset.xid}"
        for (_, code), hold in self._holds.items():
            if not spared or code == spared or not code.startswith("xid-"):
                hold.repaired(reset.by)
        yield from self._recover(now, reset.at, told)

    def reported(
        self, xid: gpu.Xid, now: float, judge: xid_policy.Policy
    ) -> Iterator[gpu.FaultChange]:
        """Take an XID."""
        verdict = faults.xid_verdict(xid.xid, judge)
        if verdict.effect is None:
            return
        for (part, code), hold in self._holds.items():
            if (part, code) == (xid.part, verdict.code):
                hold.seen(now)
            elif xid.part.covers(part):
                hold.disturbed(now)
        if (xid.part, verdict.code) in self._holds:
            return
        observed = [_evidence("nvml-events", f"XID {xid.xid}{_where(xid.part)}")]
        if self._last:
            observed.append(_evidence("nvml-poll", f"before: {self._last}"))
        began = gpu.FaultBegan(
            part=xid.part,
            effect=verdict.effect,
            code=verdict.code,
            reason=verdict.reason,
            at=xid.at,
            policy=verdict.policy,
            evidence=tuple(observed),
        )
        hold = recovery.ActiveFault(
            began, now, ends=poll_signals.EndsWhen.QUIET, action=verdict.action
        )
        if self._is_lost:
            hold.went(now)
        yield self._begin(hold, now)

    def polled(
        self, poll: gpu.Poll, now: float, told: gpus.Health, judge: xid_policy.Policy
    ) -> Iterator[gpu.FaultChange]:
        """Take what it answered, or that it did not."""
        self.heard_at = now
        self._last = poll_signals.summary(poll)
        yield from self._end(self._whole, UNPOLLED, poll.at, "it is polled again")
        if poll.error and not poll_signals.is_conclusive(poll.error):
            yield from self._not_answered(poll, now)
            return
        self._unanswered = 0
        yield from self._end(self._whole, UNANSWERED, poll.at, f"NVML answers: {self._last}")
        reading = poll_signals.interpret(poll, ecc_before=self._ecc)
        self._count(poll)
        yield from self._read(poll, reading, now, is_off=judge.is_off)
        yield from self._recover(now, poll.at, told)

    def _not_answered(self, poll: gpu.Poll, now: float) -> Iterator[gpu.FaultChange]:
        self._unanswered += 1
        for hold in self._holds.values():
            hold.unanswered()
        if self._unanswered >= UNANSWERED_POLLS:
            reason = f"NVML answered {poll.error} {self._unanswered} times in a row"
            rule = f"polled/{UNANSWERED}: {gpu.Effect.UNMONITORED}"
            yield from self._blind(UNANSWERED, reason, now, poll.at, rule)

    def _count(self, poll: gpu.Poll) -> None:
        """Remember the error counter; one that fell was reset, and its GPU with it."""
        if poll.ecc_uncorrected is None:
            return
        if self._ecc is not None and poll.ecc_uncorrected < self._ecc:
            for hold in self._holds.values():
                hold.started_anew()
        self._ecc = poll.ecc_uncorrected

    def _read(
        self, poll: gpu.Poll, reading: poll_signals.PollReading, now: float, *, is_off: bool
    ) -> Iterator[gpu.FaultChange]:
        """Take what a poll shows and denies."""
        shown = {sign.code: sign for sign in reading.shown}
        self._is_lost = bool(poll.error)
        for (_, code), hold in self._holds.items():
            if code in shown:
                hold.seen(now)
            elif poll.error:
                hold.went(now)
            else:
                hold.polled(reading, now)
        self._in_a_row = {code: self._in_a_row.get(code, 0) + 1 for code in shown}
        for code, sign in shown.items():
            if (self._whole, code) not in self._holds and self._in_a_row[code] >= sign.polls:
                began = _begun(self._whole, sign, poll, is_off=is_off)
                yield self._begin(recovery.ActiveFault(began, now, ends=sign.ends), now)

    def _blind(
        self, code: str, reason: str, now: float, at: datetime, rule: str
    ) -> Iterator[gpu.FaultChange]:
        if (self._whole, code) in self._holds:
            return
        began = gpu.FaultBegan(
            part=self._whole,
            effect=gpu.Effect.UNMONITORED,
            code=code,
            reason=reason[:_SAID_MAX],
            at=at,
            policy=rule,
        )
        yield self._begin(recovery.ActiveFault(began, now, ends=poll_signals.EndsWhen.NEVER), now)

    def _begin(self, hold: recovery.ActiveFault, now: float) -> gpu.FaultChange:
        began = hold.began
        if hold.is_unhealthy and not self._is_bad(began.part):
            flapped = self._history(began.part).fell(now)
            if flapped:
                evidence = (*began.evidence, _evidence("muster", flapped))
                began = hold.began = msgspec.structs.replace(began, evidence=evidence)
        self._holds[began.part, began.code] = hold
        return began

    def _recover(self, now: float, at: datetime, told: gpus.Health) -> Iterator[gpu.FaultChange]:
        for (part, code), hold in [*self._holds.items()]:
            reason = hold.over(now, told=told, doublings=self._history(part).doublings)
            if reason:
                yield from self._end(part, code, at, reason)
                if hold.is_unhealthy and not self._is_bad(part):
                    self._history(part).rose(now)

    def _end(
        self, part: gpu.Part, code: str, at: datetime, reason: str
    ) -> Iterator[gpu.FaultChange]:
        hold = self._holds.pop((part, code), None)
        if hold is not None:
            yield gpu.FaultEnded(
                part=part,
                effect=hold.began.effect,
                code=code,
                reason=f"{code} is over: {reason}",
                at=at,
                policy=hold.began.policy,
                evidence=(_evidence("nvml-poll", self._last),) if self._last else (),
            )

    def _is_bad(self, part: gpu.Part) -> bool:
        return any(hold.is_unhealthy for (of, _), hold in self._holds.items() if of == part)

    def _history(self, part: gpu.Part) -> recovery.FlapHistory:
        return self._histories.setdefault(part, recovery.FlapHistory())


def _begun(
    whole: gpu.Part, sign: poll_signals.Signal, poll: gpu.Poll, *, is_off: bool
) -> gpu.FaultBegan:
    """Return what a sign begins; nothing is taken out of use where all checks are disabled."""
    is_spared = is_off and sign.effect is gpu.Effect.UNHEALTHY
    return gpu.FaultBegan(
        part=whole,
        effect=gpu.Effect.DEGRADED if is_spared else sign.effect,
        code=sign.code,
        reason=sign.reason[:_SAID_MAX],
        at=poll.at,
        policy=f"{xid_policy.DISABLE}=all spares {sign.policy}" if is_spared else sign.policy,
        evidence=(_evidence("nvml-poll", poll_signals.summary(poll)),),
    )


def _evidence(source: str, observed: str) -> vocabulary.Evidence:
    return vocabulary.Evidence(source=source, observed=observed[:_SAID_MAX])


def _where(part: gpu.Part) -> str:
    if part.gi is None:
        return ""
    inner = "" if part.ci is None else f", compute instance {part.ci}"
    return f" on GPU instance {part.gi}{inner}"
