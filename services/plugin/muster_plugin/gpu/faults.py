"""Pure: determines which faults a GPU poll shows or rules out, and when an active fault ends.

A signal is a sign of a fault in what NVML reports. An unknown value neither shows nor rules out a
fault, nor does it interrupt a row of polls. Source of numbers: nvml.h 13.3.

    fault                            | is over after
    ---------------------------------|--------------------------------------------------------------
    a state that NVML reports        | `good` polls in a row that rule it out
    the fabric is not ready          | `good` good polls in a row that rule it out
    lost, requests a reset or reboot | `good` good polls in a row that rule it out, and quiet
    ECC; XID degrade, XID unhealthy  | `good` good polls in a row, and quiet
    XID reset                        | `good` good polls in a row, quiet, and evidence of a reset:
                                     | the driver reports that no action is needed, or the GPU
                                     | disappeared and came back, or its error counter was reset
    XID reboot                       | `good` good polls in a row, quiet, and the driver reports
                                     | that no action is needed
    a failed remap                   | (never)
    any other fault that is reported | one good poll since the last fault; the poll must rule it
    as repaired                      | out unless the fault is an XID

A good poll is an answer that requests no action and reports no failed remap. Quiet means that for
`cooldown_s` the fault is not observed again, no XID affects its part (except ignored XIDs), the GPU
is not lost, and no answer requests an action or reports a failed remap. Quiet has to last
`UNPROVEN_FACTOR` times as long if the driver cannot report a recovery action and nothing else
proves a reset. It doubles each time the part is unhealthy within `FLAP_WINDOW_S` of its recovery.
"""

import enum
from collections.abc import Iterator
from typing import Final

import msgspec

from muster import pacing
from muster_plugin.config import gpus
from muster_plugin.gpu import xid_policy
from muster_plugin.model import gpu

LOST: Final = "gpu-lost"
RESET_REQUIRED: Final = "reset-required"
ECC: Final = "ecc-uncorrected"
REMAP_PENDING: Final = "remap-pending"
REMAP_FAILED: Final = "remap-failed"
RETIRED_PENDING: Final = "retired-pending"
SLOWDOWN: Final = "slowdown"
NVLINK: Final = "nvlink-down"
FABRIC: Final = "fabric-not-ready"
RECOVERY_OTHER: Final = "recovery-other"
SLOW_POLLS: Final = 3
"""A slowdown is reported after this many polls in a row; shorter slowdowns are normal."""

_UNHEALTHY, _DEGRADED = gpu.Effect.UNHEALTHY, gpu.Effect.DEGRADED
CONCLUSIVE_ERRORS: Final = {
    "GPU_IS_LOST": (LOST, "NVML reports that the GPU is lost"),
    "RESET_REQUIRED": (RESET_REQUIRED, "NVML reports that the GPU has to be reset"),
}
"""The code and reason of each error that proves a fault; other errors only mean no answer."""
_ACTIONS: Final = {
    1: ("recovery-reset", _UNHEALTHY, "the driver requests a reset of the GPU"),
    2: ("recovery-reboot", _UNHEALTHY, "the driver requests a reboot of the node"),
    3: (
        "recovery-drain-p2p",
        _DEGRADED,
        "the driver requests that peer-to-peer work be drained; other work may continue",
    ),
    4: ("recovery-drain-and-reset", _UNHEALTHY, "the driver requests a drain and a reset"),
    5: (
        "recovery-imex",
        _DEGRADED,
        "the driver requests a recovery of the IMEX domain; work within the node may continue",
    ),
    6: ("recovery-bus-reset", _UNHEALTHY, "the driver requests a reset of the GPU's bus"),
    7: ("recovery-system-reboot", _UNHEALTHY, "the driver requests a reboot of the whole system"),
}
_RECOVERY: Final = frozenset({*(code for code, _, _ in _ACTIONS.values()), RECOVERY_OTHER})
_NOT_READY: Final = frozenset({"not_started", "in_progress", "failed"})
_READY: Final = frozenset({"completed", "not_supported"})
FLAP_WINDOW_S: Final = 600.0
DOUBLINGS_MAX: Final = 5
QUIET_MAX_S: Final = 3600.0
"""The longest quiet time that may be required, unless three times `cooldown_s` is longer."""
UNPROVEN_FACTOR: Final = 3
"""The factor that extends the quiet time if quiet is the only evidence of a recovery."""
_REAPPEARED: Final = "it disappeared and came back"
_COUNTER_RESET: Final = "its error counter was reset"


class EndsWhen(enum.StrEnum):
    """When a fault ends: if polls rule it out, after good polls and quiet, or never."""

    DENIED = "denied"
    QUIET = "quiet"
    NEVER = "never"


class Signal(msgspec.Struct, frozen=True, kw_only=True):
    """A sign of a fault in a poll; the fault begins after `polls_in_a_row` such polls.

    Each meaning has its own `code`: a different recovery action is a different signal.
    """

    code: str
    effect: gpu.Effect
    reason: str
    source: str
    ends: EndsWhen = EndsWhen.DENIED
    polls_in_a_row: int = 1

    @property
    def policy(self) -> str:
        """The rule that decided: its name, effect and source."""
        return f"polled/{self.code}: {self.effect} ({self.source})"


class PollReading(msgspec.Struct, frozen=True, kw_only=True):
    """The signals that a poll shows, and the fault codes that it rules out.

    A good poll is an answer that requests no action and reports no failed remap. A good poll is
    proven if the driver reports that no action is needed.
    """

    signals: tuple[Signal, ...]
    cleared: frozenset[str]
    is_good: bool
    is_proven_good: bool


def interpret(poll: gpu.Poll, *, ecc_before: int | None = None) -> PollReading:
    """Return what a poll shows and rules out; `ecc_before` is the previous count of ECC errors."""
    signals = tuple(_shown(poll, ecc_before))
    is_good = not poll.error and poll.recovery_action in {0, None} and not poll.remap_failed
    return PollReading(
        signals=signals,
        cleared=frozenset(_denied(poll)) - {signal.code for signal in signals},
        is_good=is_good,
        is_proven_good=is_good and poll.recovery_action == 0,
    )


def summary(poll: gpu.Poll) -> str:
    """Return a poll's error, or its main known values, as evidence of a fault or recovery."""
    if poll.error:
        return f"NVML answered {poll.error}"
    values = {
        "recovery action": poll.recovery_action,
        "uncorrected ECC errors": poll.ecc_uncorrected,
        "remap pending": poll.remap_pending,
        "remap failed": poll.remap_failed,
        "retired pages pending": poll.retired_pending,
        "fabric": poll.fabric,
        "temperature in C": poll.temperature_c,
    }
    parts = [f"{name} {value}".lower() for name, value in values.items() if value is not None]
    return ", ".join(["it answers", *parts])


def _shown(poll: gpu.Poll, ecc_before: int | None) -> Iterator[Signal]:
    if poll.error in CONCLUSIVE_ERRORS:
        code, reason = CONCLUSIVE_ERRORS[poll.error]
        source = f"NVML error {poll.error}"
        yield Signal(
            code=code, effect=_UNHEALTHY, reason=reason, source=source, ends=EndsWhen.QUIET
        )
    if poll.error:
        return
    if poll.recovery_action:
        yield _recovery(poll.recovery_action)
    yield from _memory(poll, ecc_before)
    yield from _surroundings(poll)


def _recovery(action: int) -> Signal:
    unknown = RECOVERY_OTHER, _DEGRADED, f"the driver requests an unknown recovery action: {action}"
    code, effect, reason = _ACTIONS.get(action, unknown)
    return Signal(
        code=code,
        effect=effect,
        reason=reason,
        source=f"NVML field 230, recovery action {action}",
        ends=EndsWhen.QUIET if effect is _UNHEALTHY else EndsWhen.DENIED,
    )


def _memory(poll: gpu.Poll, ecc_before: int | None) -> Iterator[Signal]:
    if poll.remap_failed:
        yield Signal(
            code=REMAP_FAILED,
            effect=_UNHEALTHY,
            reason="a memory row could not be remapped: the GPU has to be replaced",
            source="NVML remapped rows, failure",
            ends=EndsWhen.NEVER,
        )
    if poll.remap_pending:
        yield Signal(
            code=REMAP_PENDING,
            effect=_DEGRADED,
            reason="a memory row is to be remapped at the next reset; new work may start",
            source="NVML remapped rows, pending",
        )
    if poll.retired_pending:
        yield Signal(
            code=RETIRED_PENDING,
            effect=_DEGRADED,
            reason="memory pages are to be retired at the next reboot; new work may start",
            source="NVML retired pages, pending",
        )
    if ecc_before is not None and (poll.ecc_uncorrected or 0) > ecc_before:
        yield Signal(
            code=ECC,
            effect=_DEGRADED,
            reason=f"uncorrected memory errors rose from {ecc_before} to {poll.ecc_uncorrected}",
            source="NVML volatile ECC counter",
            ends=EndsWhen.QUIET,
        )


def _surroundings(poll: gpu.Poll) -> Iterator[Signal]:
    if poll.slowdowns:
        yield Signal(
            code=SLOWDOWN,
            effect=_DEGRADED,
            reason=f"slowed down: {', '.join(poll.slowdowns)}{_heat(poll)}",
            source="NVML clocks event reasons",
            polls_in_a_row=SLOW_POLLS,
        )
    if poll.nvlinks_down:
        yield Signal(
            code=NVLINK,
            effect=_DEGRADED,
            reason=f"NVLinks down: {', '.join(map(str, poll.nvlinks_down))}",
            source="NVML NVLink state",
        )
    if poll.fabric in _NOT_READY:
        yield Signal(
            code=FABRIC,
            effect=_UNHEALTHY,
            reason=f"CUDA cannot start, because the GPU's fabric is not ready: {poll.fabric}",
            source="NVML GPU fabric state",
        )


def _heat(poll: gpu.Poll) -> str:
    if poll.temperature_c is None:
        return ""
    limit = f", slows down at {poll.slowdown_c} C" if poll.slowdown_c is not None else ""
    return f" ({poll.temperature_c} C{limit})"


def _denied(poll: gpu.Poll) -> Iterator[str]:
    """Yield the codes that an answered poll shows or rules out; none if it was not answered."""
    if poll.error:
        return
    yield from (LOST, RESET_REQUIRED)
    if poll.recovery_action is not None:
        yield from _RECOVERY
    values = {
        REMAP_PENDING: poll.remap_pending,
        RETIRED_PENDING: poll.retired_pending,
        ECC: poll.ecc_uncorrected,
        SLOWDOWN: poll.slowdowns,
        NVLINK: poll.nvlinks_down,
    }
    yield from (code for code, value in values.items() if value is not None)
    if poll.fabric in _READY:
        yield FABRIC


class ActiveFault:
    """One active fault, and the evidence that it has ended."""

    def __init__(
        self,
        began: gpu.FaultBegan,
        now: float,
        *,
        ends: EndsWhen,
        action: xid_policy.Action | None = None,
    ) -> None:
        self.began = began
        self._ends = ends
        self._action = action
        self._disturbed_at = now
        self._good_polls = 0
        self._proven_polls = 0
        self._is_away = False
        self._reset_evidence = ""
        self._repaired_by = ""

    @property
    def is_unhealthy(self) -> bool:
        """Whether the fault makes the part Unhealthy."""
        return self.began.effect is gpu.Effect.UNHEALTHY

    def on_repeated(self, now: float) -> None:
        """Discard all evidence of recovery, because the fault was observed again."""
        self.on_disturbance(now)
        self._is_away = False
        self._reset_evidence = ""

    def on_disturbance(self, now: float) -> None:
        """Restart the quiet time and the count of good polls, and discard a reported repair."""
        self._disturbed_at = now
        self._good_polls = self._proven_polls = 0
        self._repaired_by = ""

    def on_unanswered(self) -> None:
        """Restart the count of good polls, because a poll had no answer."""
        self._good_polls = self._proven_polls = 0

    def on_gone(self, now: float) -> None:
        """Record that the GPU is lost or gone."""
        self.on_disturbance(now)
        self._is_away = True

    def on_counter_reset(self) -> None:
        """Record that the GPU's error counter fell, as it does after a reset."""
        self._reset_evidence = _COUNTER_RESET

    def on_repair_reported(self, by: str) -> None:
        """Record that a person or a program reports a repair."""
        self._repaired_by = by

    def on_poll(self, reading: PollReading, now: float) -> None:
        """Evaluate, as evidence of recovery, an answered poll that does not show the fault."""
        if self._is_away:
            self._is_away = False
            self._reset_evidence = _REAPPEARED
        if self._action is None and self.began.code not in reading.cleared:
            return
        needs_good = self.is_unhealthy or self._ends is not EndsWhen.DENIED
        if needs_good and not reading.is_good:
            self.on_disturbance(now)
            return
        self._good_polls += 1
        self._proven_polls = self._proven_polls + 1 if reading.is_proven_good else 0

    def end_reason(self, now: float, *, rules: gpus.Health, doublings: int) -> str:
        """Return why the fault has ended; empty while it is active."""
        if self._ends is EndsWhen.NEVER:
            return ""
        if self._repaired_by:
            report = f"reported as repaired by {self._repaired_by}, and the GPU answers"
            return report if self._good_polls else ""
        if self._good_polls < rules.good:
            return ""
        if self._ends is EndsWhen.DENIED:
            return f"not seen in {self._good_polls} polls in a row"
        return self._quiet_reason(now, rules=rules, doublings=doublings)

    def _quiet_reason(self, now: float, *, rules: gpus.Health, doublings: int) -> str:
        is_proven = self._proven_polls >= rules.good
        has_evidence = is_proven or bool(self._reset_evidence)
        required_s = required_quiet_s(
            rules.cooldown_s, doublings=doublings, has_evidence=has_evidence
        )
        quiet_s = now - self._disturbed_at
        if not self._was_reset(is_proven=is_proven) or quiet_s < required_s:
            return ""
        parts = [
            f"{self._good_polls} good polls in a row",
            f"no fault for {quiet_s:.0f} s",
            "the driver requests no action"
            if is_proven
            else "the driver cannot report a recovery action",
            self._reset_evidence,
        ]
        return ", ".join(filter(None, parts))

    def _was_reset(self, *, is_proven: bool) -> bool:
        if self._action is xid_policy.Action.RESET:
            return is_proven or bool(self._reset_evidence)
        return is_proven or self._action is not xid_policy.Action.REBOOT


def required_quiet_s(cooldown_s: float, *, doublings: int, has_evidence: bool) -> float:
    """Return how long quiet has to last before a fault counts as ended."""
    longest = max(QUIET_MAX_S, cooldown_s * UNPROVEN_FACTOR)
    first_s = cooldown_s * (1 if has_evidence else UNPROVEN_FACTOR)
    return pacing.Backoff(first_s=first_s, max_s=longest).delay_s(doublings + 1)


class FlapHistory:
    """Counts how often a part of a GPU became unhealthy soon after it had recovered."""

    def __init__(self) -> None:
        self.doublings = 0
        self._recovered_at: float | None = None

    def on_unhealthy(self, now: float) -> str:
        """Count a relapse and return it as evidence; if there is none, reset the count."""
        if self._recovered_at is None or now - self._recovered_at >= FLAP_WINDOW_S:
            self.doublings = 0
            return ""
        self.doublings = min(self.doublings + 1, DOUBLINGS_MAX)
        return f"unhealthy again {now - self._recovered_at:.0f} s after it recovered"

    def on_recovered(self, now: float) -> None:
        """Record that the part has recovered."""
        self._recovered_at = now
