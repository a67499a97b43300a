"""Pure: determines the faults of each part of each GPU from observations: a `machine.Machine`.

Every fault has a code and is independent of the others:

    observed                          | begins, on the part that it concerns
    ----------------------------------|-------------------------------------------------------------
    XID: ignore                       | nothing; does not delay a recovery
    XID: degrade                      | Degraded   xid-<n>
    XID: unhealthy, reset, reboot     | Unhealthy  xid-<n>
    poll: GPU_IS_LOST, RESET_REQUIRED | Unhealthy  gpu-lost, reset-required
    poll: another error               | Unmonitored unanswered, after `UNANSWERED_POLLS` in a row
    poll: recovery action 1 2 4 6 7   | Unhealthy  recovery-reset, -reboot, -drain-and-reset, ...
    poll: recovery action 3 5         | Degraded   recovery-drain-p2p, recovery-imex
    poll: unknown recovery action     | Degraded   recovery-other
    poll: remap failed                | Unhealthy  remap-failed
    poll: fabric not ready            | Unhealthy  fabric-not-ready
    poll: remap or retirement pending | Degraded   remap-pending, retired-pending
    poll: uncorrected ECC rises       | Degraded   ecc-uncorrected
    polls: slowed down, in a row      | Degraded   slowdown
    poll: an NVLink is down           | Degraded   nvlink-down
    monitoring: a problem             | Unmonitored unwatched, until there is none
    no poll for too long              | Unmonitored unpolled, until there is one

A part is Healthy while it has no Unhealthy fault. The table in `faults` shows when each fault ends.
A poll with another error can begin only `unanswered`, and end only `unpolled`. All faults are lost
when the plugin restarts; a GPU that NVML still reports as bad is Unhealthy in the first scan.
"""

from collections.abc import Iterator, Sequence
from datetime import datetime, timedelta
from typing import Final, TypeAlias, assert_never

import msgspec

from muster import vocabulary
from muster_plugin.config import gpus
from muster_plugin.gpu import faults, xid_policy
from muster_plugin.model import gpu

OVERDUE_POLLS: Final = 3
OVERDUE_MIN_S: Final = 30.0
"""A GPU without a poll for this time, and for `OVERDUE_POLLS` intervals, is unmonitored."""
UNANSWERED: Final = "unanswered"
UNWATCHED: Final = "unwatched"
UNPOLLED: Final = "unpolled"
UNANSWERED_POLLS: Final = 3

_STALL_S: Final = 5.0
"""A tick that is later than this means that the process was stalled and could not receive polls."""
_NEVER: Final = float("inf")
_UNMONITORED: Final = frozenset({UNANSWERED, UNWATCHED, UNPOLLED})
_TEXT_MAX: Final = 1000
_Observed: TypeAlias = gpu.Scan | gpu.Observation


class GpuHealth:
    """The health of all GPUs of a node. Changes to `policy` and `rules` apply to later events."""

    def __init__(self, policy: xid_policy.Policy, rules: gpus.Health) -> None:
        self.policy = policy
        self.rules = rules
        self._gpus: dict[str, GpuCondition] = {}
        self._stamp: tuple[float, datetime] | None = None

    def receive(self, event: _Observed, now: float) -> Sequence[gpu.FaultChange]:
        """Return the faults that the event began or ended, and the faults of overdue GPUs."""
        return [*self._received(event, now), *self.tick(now)]

    def tick(self, now: float) -> Sequence[gpu.FaultChange]:
        """Begin and return the faults of GPUs whose polls are overdue.

        After a stall of the process no fault begins: the deadlines of these GPUs are restarted.
        """
        overdue = [condition for condition in self._gpus.values() if self._due(condition) <= now]
        if any(now - self._due(condition) > _STALL_S for condition in overdue):
            for condition in overdue:
                condition.last_heard_at = now
            return []
        at = self._at(now)
        assert at is not None or not overdue, "only a GPU that was observed can be overdue"
        return [change for condition in overdue if at for change in condition.on_overdue(now, at)]

    def next_deadline(self) -> float | None:
        """Return when the next GPU becomes overdue; None if no poll is expected."""
        due = min(map(self._due, self._gpus.values()), default=_NEVER)
        return due if due < _NEVER else None

    def _received(self, event: _Observed, now: float) -> Iterator[gpu.FaultChange]:
        if isinstance(event, gpu.Scan):
            yield from self._scanned(event, now)
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

    def _scanned(self, scan: gpu.Scan, now: float) -> Iterator[gpu.FaultChange]:
        for poll in scan.polls:
            yield from self._received(poll, now)
        polled = {poll.gpu for poll in scan.polls}
        at = self._at(now)
        for failed in scan.unreadable:
            if at is not None and failed.uuid and failed.uuid not in polled:
                poll = gpu.Poll(gpu=failed.uuid, at=at, error=failed.error)
                yield from self._received(poll, now)
        listed = {device.uuid for device in scan.gpus}
        listed |= {failed.uuid for failed in scan.unreadable if failed.uuid}
        for name in sorted(listed):
            condition = self._gpu(name)
            if condition.last_heard_at is None:
                # from now on polls of this GPU are expected
                condition.last_heard_at = now
        if at is not None and _is_exhaustive(scan):
            for name in sorted(self._gpus.keys() - listed):
                yield from self._gpus[name].on_gone(now, at)

    def _due(self, condition: "GpuCondition") -> float:
        if condition.last_heard_at is None or condition.is_unmonitored or self._stamp is None:
            return _NEVER
        return condition.last_heard_at + max(OVERDUE_MIN_S, OVERDUE_POLLS * self.rules.poll_s)

    def _at(self, now: float) -> datetime | None:
        """Return the date and time at `now`, from the last timestamp; None before the first."""
        if self._stamp is None:
            return None
        then, at = self._stamp
        return at + timedelta(seconds=now - then)

    def _gpu(self, name: str) -> "GpuCondition":
        return self._gpus.setdefault(name, GpuCondition(name))


class GpuCondition:
    """The faults of one GPU. `last_heard_at` is None while no poll of the GPU is expected."""

    def __init__(self, name: str) -> None:
        self.last_heard_at: float | None = None
        self._whole = gpu.Part(gpu=name)
        self._faults: dict[tuple[gpu.Part, str], faults.ActiveFault] = {}
        self._histories: dict[gpu.Part, faults.FlapHistory] = {}
        self._in_a_row: dict[str, int] = {}
        self._unanswered = 0
        self._is_lost = False
        self._ecc: int | None = None
        self._last_summary = ""

    @property
    def is_unmonitored(self) -> bool:
        """Whether the GPU has an Unmonitored fault."""
        return any(code in _UNMONITORED for _, code in self._faults)

    def on_gone(self, now: float, at: datetime) -> Iterator[gpu.FaultChange]:
        """Record that the GPU is gone, and end its faults `unanswered` and `unpolled`."""
        self.last_heard_at = None
        self._unanswered = 0
        self._is_lost = True
        for code in (UNANSWERED, UNPOLLED):
            yield from self._end(self._whole, code, at, "the GPU is gone")
        for fault in self._faults.values():
            fault.on_gone(now)

    def on_monitoring_changed(
        self, change: gpu.MonitoringChanged, now: float
    ) -> Iterator[gpu.FaultChange]:
        """Begin or end the fault `unwatched`."""
        if change.problem:
            yield from self._begin_unmonitored(UNWATCHED, change.problem, now, change.at, "watch")
            return
        if self.last_heard_at is not None:
            self.last_heard_at = now
        yield from self._end(self._whole, UNWATCHED, change.at, "it is monitored again")

    def on_overdue(self, now: float, at: datetime) -> Iterator[gpu.FaultChange]:
        """Begin the fault `unpolled`, because no poll arrived in time."""
        assert self.last_heard_at is not None, "only a GPU that was observed can be overdue"
        reason = f"it has not been polled for {now - self.last_heard_at:.0f} s"
        yield from self._begin_unmonitored(UNPOLLED, reason, now, at, "polled")

    def on_repair_reported(
        self, report: gpu.RepairReported, now: float, rules: gpus.Health
    ) -> Iterator[gpu.FaultChange]:
        """Record a repair; if the report names an XID, the faults of other XIDs remain."""
        repaired_code = "" if report.xid is None else f"xid-{report.xid}"
        for (_, code), fault in self._faults.items():
            if not repaired_code or code == repaired_code or not code.startswith("xid-"):
                fault.on_repair_reported(report.by)
        yield from self._recover(now, report.at, rules)

    def on_xid(
        self, xid: gpu.Xid, now: float, policy: xid_policy.Policy
    ) -> Iterator[gpu.FaultChange]:
        """Begin the fault of an XID; if the fault is already active, restart its recovery.

        The quiet times of other faults on the affected parts start again. An ignored XID has no
        effect.
        """
        rule, code = policy.rule(xid.xid), f"xid-{xid.xid}"
        if rule.action.effect is None:
            return
        for (part, other), fault in self._faults.items():
            if (part, other) == (xid.part, code):
                fault.on_repeated(now)
            elif xid.part.covers(part):
                fault.on_disturbance(now)
        if (xid.part, code) in self._faults:
            return
        evidence = [_evidence("nvml-events", f"XID {xid.xid}{_location(xid.part)}")]
        if self._last_summary:
            evidence.append(_evidence("nvml-poll", f"before: {self._last_summary}"))
        began = gpu.FaultBegan(
            part=xid.part,
            effect=rule.action.effect,
            code=code,
            reason=f"XID {xid.xid}: {rule.title}",
            at=xid.at,
            policy=str(rule),
            evidence=tuple(evidence),
        )
        ends = faults.EndsWhen.QUIET
        fault = faults.ActiveFault(began, now, ends=ends, action=rule.action)
        if self._is_lost:
            fault.on_gone(now)
        yield self._begin(fault, now)

    def on_poll(
        self, poll: gpu.Poll, now: float, rules: gpus.Health, policy: xid_policy.Policy
    ) -> Iterator[gpu.FaultChange]:
        """Begin and end faults after a poll, whether the GPU answered or NVML returned an error."""
        self.last_heard_at = now
        self._last_summary = faults.summary(poll)
        yield from self._end(self._whole, UNPOLLED, poll.at, "it is polled again")
        if poll.error and poll.error not in faults.CONCLUSIVE_ERRORS:
            yield from self._not_answered(poll, now)
            return
        self._unanswered = 0
        answers = f"NVML answers: {self._last_summary}"
        yield from self._end(self._whole, UNANSWERED, poll.at, answers)
        reading = faults.interpret(poll, ecc_before=self._ecc)
        self._count_ecc(poll)
        yield from self._apply(poll, reading, now, is_off=policy.is_off)
        yield from self._recover(now, poll.at, rules)

    def _not_answered(self, poll: gpu.Poll, now: float) -> Iterator[gpu.FaultChange]:
        self._unanswered += 1
        for fault in self._faults.values():
            fault.on_unanswered()
        if self._unanswered >= UNANSWERED_POLLS:
            reason = f"NVML answered {poll.error} {self._unanswered} times in a row"
            yield from self._begin_unmonitored(UNANSWERED, reason, now, poll.at, "polled")

    def _count_ecc(self, poll: gpu.Poll) -> None:
        """Record the error counter; if it has fallen, the GPU has been reset."""
        if poll.ecc_uncorrected is None:
            return
        if self._ecc is not None and poll.ecc_uncorrected < self._ecc:
            for fault in self._faults.values():
                fault.on_counter_reset()
        self._ecc = poll.ecc_uncorrected

    def _apply(
        self, poll: gpu.Poll, reading: faults.PollReading, now: float, *, is_off: bool
    ) -> Iterator[gpu.FaultChange]:
        """Begin the faults that a poll shows; update the evidence that active faults have ended."""
        signals = {signal.code: signal for signal in reading.signals}
        self._is_lost = bool(poll.error)
        for (_, code), fault in self._faults.items():
            if code in signals:
                fault.on_repeated(now)
            elif poll.error:
                fault.on_gone(now)
            else:
                fault.on_poll(reading, now)
        # an unknown value does not interrupt a row
        known = {code: n for code, n in self._in_a_row.items() if code not in reading.cleared}
        self._in_a_row = known | {code: known.get(code, 0) + 1 for code in signals}
        for code, signal in signals.items():
            is_new = (self._whole, code) not in self._faults
            if is_new and self._in_a_row[code] >= signal.polls_in_a_row:
                began = _began(self._whole, signal, poll, is_off=is_off)
                yield self._begin(faults.ActiveFault(began, now, ends=signal.ends), now)

    def _begin_unmonitored(
        self, code: str, reason: str, now: float, at: datetime, source: str
    ) -> Iterator[gpu.FaultChange]:
        if (self._whole, code) in self._faults:
            return
        began = gpu.FaultBegan(
            part=self._whole,
            effect=gpu.Effect.UNMONITORED,
            code=code,
            reason=reason[:_TEXT_MAX],
            at=at,
            policy=f"{source}/{code}: {gpu.Effect.UNMONITORED}",
        )
        never = faults.EndsWhen.NEVER
        yield self._begin(faults.ActiveFault(began, now, ends=never), now)

    def _begin(self, fault: faults.ActiveFault, now: float) -> gpu.FaultChange:
        began = fault.began
        if fault.is_unhealthy and not self._is_unhealthy(began.part):
            flapped = self._history(began.part).on_unhealthy(now)
            if flapped:
                evidence = (*began.evidence, _evidence("muster", flapped))
                began = fault.began = msgspec.structs.replace(began, evidence=evidence)
        self._faults[began.part, began.code] = fault
        return began

    def _recover(self, now: float, at: datetime, rules: gpus.Health) -> Iterator[gpu.FaultChange]:
        for (part, code), fault in [*self._faults.items()]:
            doublings = self._history(part).doublings
            reason = fault.end_reason(now, rules=rules, doublings=doublings)
            if reason:
                yield from self._end(part, code, at, reason)
                if fault.is_unhealthy and not self._is_unhealthy(part):
                    self._history(part).on_recovered(now)

    def _end(
        self, part: gpu.Part, code: str, at: datetime, reason: str
    ) -> Iterator[gpu.FaultChange]:
        fault = self._faults.pop((part, code), None)
        if fault is not None:
            summary = self._last_summary
            yield gpu.FaultEnded(
                part=part,
                effect=fault.began.effect,
                code=code,
                reason=f"{code} is over: {reason}",
                at=at,
                policy=fault.began.policy,
                evidence=(_evidence("nvml-poll", summary),) if summary else (),
            )

    def _is_unhealthy(self, part: gpu.Part) -> bool:
        return any(fault.is_unhealthy for (of, _), fault in self._faults.items() if of == part)

    def _history(self, part: gpu.Part) -> faults.FlapHistory:
        return self._histories.setdefault(part, faults.FlapHistory())


def _is_exhaustive(scan: gpu.Scan) -> bool:
    """Return whether all GPUs that the scan does not list are gone.

    This is uncertain if the driver does not answer, or if the uuid of an unreadable GPU is unknown:
    it may be any of them.
    """
    if scan.driver is gpu.Driver.READY:
        return all(failed.uuid for failed in scan.unreadable)
    return scan.driver is gpu.Driver.NOT_LOADED


def _began(
    whole: gpu.Part, signal: faults.Signal, poll: gpu.Poll, *, is_off: bool
) -> gpu.FaultBegan:
    """Return the fault that a signal begins; it is only Degraded if all health checks are off."""
    is_downgraded = is_off and signal.effect is gpu.Effect.UNHEALTHY
    spared = f"{xid_policy.DISABLE}=all overrides {signal.policy}"
    return gpu.FaultBegan(
        part=whole,
        effect=gpu.Effect.DEGRADED if is_downgraded else signal.effect,
        code=signal.code,
        reason=signal.reason[:_TEXT_MAX],
        at=poll.at,
        policy=spared if is_downgraded else signal.policy,
        evidence=(_evidence("nvml-poll", faults.summary(poll)),),
    )


def _evidence(source: str, observed: str) -> vocabulary.Evidence:
    return vocabulary.Evidence(source=source, observed=observed[:_TEXT_MAX])


def _location(part: gpu.Part) -> str:
    if part.gi is None:
        return ""
    inner = "" if part.ci is None else f", compute instance {part.ci}"
    return f" on GPU instance {part.gi}{inner}"
