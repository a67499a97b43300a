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

    def __init__(self, policy: xid_policy.Policy, rules: gpus.Health) -> None:
        self.policy = policy
        self.rules = rules
        self._gpus: dict[str, GpuCondition] = {}
        self._stamp: _Stamp | None = None

    def receive(self, event: _Seen, now: float) -> Sequence[gpu.FaultChange]:
        """Take what was seen; return what began and ended by it."""
        return [*self._received(event, now), *self.tick(now)]

    def tick(self, now: float) -> Sequence[gpu.FaultChange]:
        """Find who has not been polled for long; begin anew if we have not been here for long."""
        overdue = [condition for condition in self._gpus.values() if self._due(condition) <= now]
        if any(now - self._due(condition) > _STALL_S for condition in overdue):
            for condition in overdue:
                condition.restart_deadline(now)
            return []
        return [change for condition in overdue for change in self._unpolled(condition, now)]

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
                yield from self._gpu(name).on_poll(event, now, self.rules, self.policy)
            case gpu.Xid(part=part):
                yield from self._gpu(part.gpu).on_xid(event, now, self.policy)
            case gpu.MonitoringChanged(gpu=name):
                yield from self._gpu(name).on_monitoring_changed(event, now)
            case gpu.RepairReported(gpu=name):
                yield from self._gpu(name).on_repair_reported(event, now, self.rules)
            case _:
                assert_never(event)

    def _looked(self, scan: gpu.Scan, now: float) -> Iterator[gpu.FaultChange]:
        for poll in scan.polls:
            yield from self._received(poll, now)
        polled = {poll.gpu for poll in scan.polls}
        at = self._at(now)
        for device in scan.unreadable:
            if at is not None and device.uuid and device.uuid not in polled:
                yield from self._received(gpu.Poll(gpu=device.uuid, at=at, error=device.error), now)
        named = {device.uuid for device in scan.gpus} | {
            device.uuid for device in scan.unreadable if device.uuid
        }
        for name in sorted(named):
            self._gpu(name).on_listed(now)
        if at is not None and self._tells_who_is_gone(scan):
            for name in sorted(self._gpus.keys() - named):
                yield from self._gpus[name].on_gone(now, at)

    def _tells_who_is_gone(self, scan: gpu.Scan) -> bool:
        """Tell whether a GPU that a look does not name is gone; any nameless one could be it."""
        if scan.driver is gpu.Driver.READY:
            return all(device.uuid for device in scan.unreadable)
        return scan.driver is gpu.Driver.NOT_LOADED

    def _unpolled(self, condition: "GpuCondition", now: float) -> Iterator[gpu.FaultChange]:
        at = self._at(now)
        assert at is not None, "only who was seen can be late"
        yield from condition.on_overdue(now, at)

    def _due(self, condition: "GpuCondition") -> float:
        if condition.last_heard_at is None or condition.is_unmonitored or self._stamp is None:
            return _NEVER
        return condition.last_heard_at + max(OVERDUE_MIN_S, OVERDUE_POLLS * self.rules.poll_s)

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
        self.last_heard_at: float | None = None
        self._whole = gpu.Part(gpu=name)
        self._holds: dict[tuple[gpu.Part, str], recovery.ActiveFault] = {}
        self._histories: dict[gpu.Part, recovery.FlapHistory] = {}
        self._in_a_row: dict[str, int] = {}
        self._unanswered = 0
        self._is_lost = False
        self._ecc: int | None = None
        self._last = ""

    @property
    def is_unmonitored(self) -> bool:
        """Whether it is said already that nobody knows how it is."""
        return any(code in _BLIND for _, code in self._holds)

    def on_listed(self, now: float) -> None:
        """Take that a look names it: it is to be polled from now on."""
        self.last_heard_at = now if self.last_heard_at is None else self.last_heard_at

    def restart_deadline(self, now: float) -> None:
        """Take that until now nobody could have heard of it, which says nothing of it."""
        self.last_heard_at = now

    def on_gone(self, now: float, at: datetime) -> Iterator[gpu.FaultChange]:
        """Take that it is not there."""
        self.last_heard_at = None
        self._unanswered = 0
        self._is_lost = True
        for code in (UNANSWERED, UNPOLLED):
            yield from self._end(self._whole, code, at, "the GPU is not there")
        for fault in self._holds.values():
            fault.on_gone(now)

    def on_monitoring_changed(
        self, change: gpu.MonitoringChanged, now: float
    ) -> Iterator[gpu.FaultChange]:
        """Take whether somebody can see what befalls it."""
        if change.problem:
            rule = f"watch/{UNWATCHED}: {gpu.Effect.UNMONITORED}"
            yield from self._blind(UNWATCHED, change.problem, now, change.at, rule)
            return
        if self.last_heard_at is not None:
            self.last_heard_at = now
        yield from self._end(self._whole, UNWATCHED, change.at, "it is watched again")

    def on_overdue(self, now: float, at: datetime) -> Iterator[gpu.FaultChange]:
        """Take that nobody polls it."""
        assert self.last_heard_at is not None, "only who was seen can be late"
        reason = f"nobody has looked at it for {now - self.last_heard_at:.0f} s"
        rule = f"polled/{UNPOLLED}: {gpu.Effect.UNMONITORED}"
        yield from self._blind(UNPOLLED, reason, now, at, rule)

    def on_repair_reported(
        self, report: gpu.RepairReported, now: float, rules: gpus.Health
    ) -> Iterator[gpu.FaultChange]:
        """Take somebody's word that it was reset; what other XIDs did stays."""
        repaired_code = "" if report.xid is None else f"xid-{report.xid}"
        for (_, code), fault in self._holds.items():
            if not repaired_code or code == repaired_code or not code.startswith("xid-"):
                fault.on_repair_reported(report.by)
        yield from self._recover(now, report.at, rules)

    def on_xid(
        self, xid: gpu.Xid, now: float, policy: xid_policy.Policy
    ) -> Iterator[gpu.FaultChange]:
        """Take an XID."""
        verdict = faults.xid_verdict(xid.xid, policy)
        if verdict.effect is None:
            return
        for (part, code), fault in self._holds.items():
            if (part, code) == (xid.part, verdict.code):
                fault.on_repeated(now)
            elif xid.part.covers(part):
                fault.on_disturbance(now)
        if (xid.part, verdict.code) in self._holds:
            return
        evidence = [_evidence("nvml-events", f"XID {xid.xid}{_where(xid.part)}")]
        if self._last:
            evidence.append(_evidence("nvml-poll", f"before: {self._last}"))
        began = gpu.FaultBegan(
            part=xid.part,
            effect=verdict.effect,
            code=verdict.code,
            reason=verdict.reason,
            at=xid.at,
            policy=verdict.policy,
            evidence=tuple(evidence),
        )
        fault = recovery.ActiveFault(
            began, now, ends=poll_signals.EndsWhen.QUIET, action=verdict.action
        )
        if self._is_lost:
            fault.on_gone(now)
        yield self._begin(fault, now)

    def on_poll(
        self, poll: gpu.Poll, now: float, rules: gpus.Health, policy: xid_policy.Policy
    ) -> Iterator[gpu.FaultChange]:
        """Take what it answered, or that it did not."""
        self.last_heard_at = now
        self._last = poll_signals.summary(poll)
        yield from self._end(self._whole, UNPOLLED, poll.at, "it is polled again")
        if poll.error and not poll_signals.is_conclusive(poll.error):
            yield from self._not_answered(poll, now)
            return
        self._unanswered = 0
        yield from self._end(self._whole, UNANSWERED, poll.at, f"NVML answers: {self._last}")
        reading = poll_signals.interpret(poll, ecc_before=self._ecc)
        self._count(poll)
        yield from self._read(poll, reading, now, is_off=policy.is_off)
        yield from self._recover(now, poll.at, rules)

    def _not_answered(self, poll: gpu.Poll, now: float) -> Iterator[gpu.FaultChange]:
        self._unanswered += 1
        for fault in self._holds.values():
            fault.on_unanswered()
        if self._unanswered >= UNANSWERED_POLLS:
            reason = f"NVML answered {poll.error} {self._unanswered} times in a row"
            rule = f"polled/{UNANSWERED}: {gpu.Effect.UNMONITORED}"
            yield from self._blind(UNANSWERED, reason, now, poll.at, rule)

    def _count(self, poll: gpu.Poll) -> None:
        """Remember the error counter; one that fell was reset, and its GPU with it."""
        if poll.ecc_uncorrected is None:
            return
        if self._ecc is not None and poll.ecc_uncorrected < self._ecc:
            for fault in self._holds.values():
                fault.on_counter_reset()
        self._ecc = poll.ecc_uncorrected

    def _read(
        self, poll: gpu.Poll, reading: poll_signals.PollReading, now: float, *, is_off: bool
    ) -> Iterator[gpu.FaultChange]:
        """Take what a poll shows and denies."""
        signals = {signal.code: signal for signal in reading.signals}
        self._is_lost = bool(poll.error)
        for (_, code), fault in self._holds.items():
            if code in signals:
                fault.on_repeated(now)
            elif poll.error:
                fault.on_gone(now)
            else:
                fault.on_poll(reading, now)
        self._in_a_row = {code: self._in_a_row.get(code, 0) + 1 for code in signals}
        for code, signal in signals.items():
            if (self._whole, code) not in self._holds and self._in_a_row[
                code
            ] >= signal.polls_in_a_row:
                began = _begun(self._whole, signal, poll, is_off=is_off)
                yield self._begin(recovery.ActiveFault(began, now, ends=signal.ends), now)

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

    def _begin(self, fault: recovery.ActiveFault, now: float) -> gpu.FaultChange:
        began = fault.began
        if fault.is_unhealthy and not self._is_bad(began.part):
            flapped = self._history(began.part).on_unhealthy(now)
            if flapped:
                evidence = (*began.evidence, _evidence("muster", flapped))
                began = fault.began = msgspec.structs.replace(began, evidence=evidence)
        self._holds[began.part, began.code] = fault
        return began

    def _recover(self, now: float, at: datetime, rules: gpus.Health) -> Iterator[gpu.FaultChange]:
        for (part, code), fault in [*self._holds.items()]:
            reason = fault.end_reason(now, rules=rules, doublings=self._history(part).doublings)
            if reason:
                yield from self._end(part, code, at, reason)
                if fault.is_unhealthy and not self._is_bad(part):
                    self._history(part).on_recovered(now)

    def _end(
        self, part: gpu.Part, code: str, at: datetime, reason: str
    ) -> Iterator[gpu.FaultChange]:
        fault = self._holds.pop((part, code), None)
        if fault is not None:
            yield gpu.FaultEnded(
                part=part,
                effect=fault.began.effect,
                code=code,
                reason=f"{code} is over: {reason}",
                at=at,
                policy=fault.began.policy,
                evidence=(_evidence("nvml-poll", self._last),) if self._last else (),
            )

    def _is_bad(self, part: gpu.Part) -> bool:
        return any(fault.is_unhealthy for (of, _), fault in self._holds.items() if of == part)

    def _history(self, part: gpu.Part) -> recovery.FlapHistory:
        return self._histories.setdefault(part, recovery.FlapHistory())


def _begun(
    whole: gpu.Part, signal: poll_signals.Signal, poll: gpu.Poll, *, is_off: bool
) -> gpu.FaultBegan:
    """Return what a sign begins; nothing is taken out of use where all checks are disabled."""
    is_downgraded = is_off and signal.effect is gpu.Effect.UNHEALTHY
    return gpu.FaultBegan(
        part=whole,
        effect=gpu.Effect.DEGRADED if is_downgraded else signal.effect,
        code=signal.code,
        reason=signal.reason[:_SAID_MAX],
        at=poll.at,
        policy=f"{xid_policy.DISABLE}=all spares {signal.policy}"
        if is_downgraded
        else signal.policy,
        evidence=(_evidence("nvml-poll", poll_signals.summary(poll)),),
    )


def _evidence(source: str, observed: str) -> vocabulary.Evidence:
    return vocabulary.Evidence(source=source, observed=observed[:_SAID_MAX])


def _where(part: gpu.Part) -> str:
    if part.gi is None:
        return ""
    inner = "" if part.ci is None else f", compute instance {part.ci}"
    return f" on GPU instance {part.gi}{inner}"
