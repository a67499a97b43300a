"""Pure: which faults one poll of a GPU shows, and which it rules out.

A signal is something that NVML itself reports about the GPU. A value that it does not report is
unknown: it shows nothing and rules nothing out. Numbers and names are those of nvml.h 13.3.
"""

import enum
from collections.abc import Iterator
from typing import Final

import msgspec

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
"""A short slowdown is normal; only one that lasts so many polls is reported."""

_UNHEALTHY, _DEGRADED = gpu.Effect.UNHEALTHY, gpu.Effect.DEGRADED
_ERRORS: Final = {
    "GPU_IS_LOST": (LOST, "NVML reports that the GPU is lost"),
    "RESET_REQUIRED": (RESET_REQUIRED, "NVML reports that the GPU has to be reset"),
}
_ACTIONS: Final = {
    1: ("recovery-reset", _UNHEALTHY, "the driver asks for a reset of the GPU"),
    2: ("recovery-reboot", _UNHEALTHY, "the driver asks for a reboot of the node"),
    3: (
        "recovery-drain-p2p",
        _DEGRADED,
        "the driver asks for peer-to-peer work to be drained; other work goes on",
    ),
    4: ("recovery-drain-and-reset", _UNHEALTHY, "the driver asks for a drain and a reset"),
    5: (
        "recovery-imex",
        _DEGRADED,
        "the driver asks for the IMEX domain to be recovered; work within the node goes on",
    ),
    6: ("recovery-bus-reset", _UNHEALTHY, "the driver asks for a reset of the GPU's bus"),
    7: ("recovery-system-reboot", _UNHEALTHY, "the driver asks for a reboot of the whole system"),
}
_RECOVERY: Final = frozenset({*(code for code, _, _ in _ACTIONS.values()), RECOVERY_OTHER})
_NONE: Final[frozenset[str]] = frozenset()
_NOT_READY: Final = frozenset({"not_started", "in_progress", "failed"})
_READY: Final = frozenset({"completed", "not_supported"})


class EndsWhen(enum.StrEnum):
    """When a signal's fault ends: after polls rule it out, also after a quiet time, or never."""

    DENIED = "denied"
    QUIET = "quiet"
    NEVER = "never"


class Signal(msgspec.Struct, frozen=True, kw_only=True):
    """A sign of a fault in a poll; the fault begins after `polls_in_a_row` such polls.

    The `code` is unique for its meaning: another recovery action is another signal.
    """

    code: str
    effect: gpu.Effect
    reason: str
    source: str
    ends: EndsWhen = EndsWhen.DENIED
    polls_in_a_row: int = 1

    @property
    def policy(self) -> str:
        """Return the name of the deciding rule with its source."""
        return f"polled/{self.code}: {self.effect} ({self.source})"


class PollReading(msgspec.Struct, frozen=True, kw_only=True):
    """The signals that a poll shows, and the fault codes that it rules out.

    A good poll was answered, and asks for nothing; it is proven if the driver can say what it
    needs, and says that it needs nothing.
    """

    signals: tuple[Signal, ...]
    cleared: frozenset[str]
    is_good: bool
    is_proven_good: bool


def interpret(poll: gpu.Poll, *, ecc_before: int | None = None) -> PollReading:
    """Interpret a poll; `ecc_before` is the previous count of uncorrected errors."""
    signals = tuple(_shown(poll, ecc_before))
    is_good = not poll.error and poll.recovery_action in {0, None} and not poll.remap_failed
    return PollReading(
        signals=signals,
        cleared=frozenset(_denied(poll)) - {sign.code for sign in signals}
        if not poll.error
        else _NONE,
        is_good=is_good,
        is_proven_good=is_good and poll.recovery_action == 0,
    )


def is_conclusive(error: str) -> bool:
    """Return whether an error proves a fault of the GPU, and not just a missing answer."""
    return error in _ERRORS


def summary(poll: gpu.Poll) -> str:
    """Return a poll's values, as evidence."""
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
    if poll.error:
        if poll.error in _ERRORS:
            code, reason = _ERRORS[poll.error]
            yield Signal(
                code=code,
                effect=_UNHEALTHY,
                reason=reason,
                source=f"NVML error {poll.error}",
                ends=EndsWhen.QUIET,
            )
        return
    if poll.recovery_action:
        yield _recovery(poll.recovery_action)
    yield from _memory(poll, ecc_before)
    yield from _surroundings(poll)


def _recovery(action: int) -> Signal:
    unknown = RECOVERY_OTHER, _DEGRADED, f"the driver asks for an unknown recovery action: {action}"
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
            reason=f"not ready: CUDA cannot start, the GPU's fabric is {poll.fabric}",
            source="NVML GPU fabric state",
        )


def _heat(poll: gpu.Poll) -> str:
    if poll.temperature_c is None:
        return ""
    limit = f", slows down at {poll.slowdown_c} C" if poll.slowdown_c is not None else ""
    return f" ({poll.temperature_c} C{limit})"


def _denied(poll: gpu.Poll) -> Iterator[str]:
    """Yield the codes that an answered poll rules out."""
    yield from (LOST, RESET_REQUIRED)
    if poll.recovery_action is not None:
        yield from _RECOVERY
    if poll.remap_pending is not None:
        yield REMAP_PENDING
    if poll.retired_pending is not None:
        yield RETIRED_PENDING
    if poll.ecc_uncorrected is not None:
        yield ECC
    if poll.fabric in _READY:
        yield FABRIC
    yield from (SLOWDOWN, NVLINK)
