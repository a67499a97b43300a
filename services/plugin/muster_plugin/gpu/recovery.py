"""Pure: decides when a fault of a GPU, or of a part of a GPU, is over.

    fault                            | is over after
    ---------------------------------|--------------------------------------------------------------
    a state that NVML reports        | `good` polls in a row that deny it
    lost, asks for reset or reboot   | `good` good polls in a row that deny it, and quiet
    ECC errors, XID degrade          | `good` good polls in a row, and quiet
    XID unhealthy                    | the same
    XID reset                        | the same, and evidence of a reset: the driver says that
                                     | nothing is needed, or the GPU disappeared and came back, or
                                     | its error counter was reset
    XID reboot                       | the same, and the driver says that nothing is needed
    a failed remap                   | nothing
    any but the last, with a report  | one good poll since the last fault (that denies it)
    that it was repaired             |

A good poll was answered, and asks for nothing. Quiet is `cooldown_s` without another fault on the
part, or a poll that was answered and not good. It has to last `UNPROVEN_FACTOR` times as long where
the driver cannot say what it needs and nothing else proves a reset, and twice as long again for
every time that the part became unhealthy within `FLAP_WINDOW_S` of its recovery.
"""

from typing import Final

from muster import pacing
from muster_plugin.config import gpus
from muster_plugin.gpu import poll_signals, xid_policy
from muster_plugin.model import gpu

FLAP_WINDOW_S: Final = 600.0
DOUBLINGS_MAX: Final = 5
QUIET_MAX_S: Final = 3600.0
"""No quiet is longer, unless `cooldown_s` itself is."""
UNPROVEN_FACTOR: Final = 3
"""How many times as long quiet has to be where it is the only evidence."""

_REAPPEARED: Final = "it disappeared and came back"
_COUNTER_RESET: Final = "its error counter was reset"


class ActiveFault:
    """One active fault, and the evidence that it is over."""

    def __init__(
        self,
        began: gpu.FaultBegan,
        now: float,
        *,
        ends: poll_signals.EndsWhen,
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
        """Whether the fault takes the part out of use."""
        return self.began.effect is gpu.Effect.UNHEALTHY

    def on_repeated(self, now: float) -> None:
        """Drop all evidence for the end: the same fault was observed again."""
        self.on_disturbance(now)
        self._is_away = False
        self._reset_evidence = ""

    def on_disturbance(self, now: float) -> None:
        """Count quiet and good polls from zero: another fault on the part, or a bad poll."""
        self._disturbed_at = now
        self._good_polls = self._proven_polls = 0
        self._repaired_by = ""

    def on_unanswered(self) -> None:
        """Count good polls from zero: a poll had no answer."""
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

    def on_poll(self, reading: poll_signals.PollReading, now: float) -> None:
        """Count an answered poll that does not show the fault."""
        if self._is_away:
            self._is_away = False
            self._reset_evidence = _REAPPEARED
        is_signal = self._action is None
        if is_signal and self.began.code not in reading.cleared:
            return
        needs_good = self.is_unhealthy or self._ends is not poll_signals.EndsWhen.DENIED
        if needs_good and not reading.is_good:
            self.on_disturbance(now)
            return
        self._good_polls += 1
        self._proven_polls = self._proven_polls + 1 if reading.is_proven_good else 0

    def end_reason(self, now: float, *, rules: gpus.Health, doublings: int) -> str:
        """Return why the fault is over; empty while it is active."""
        if self._ends is poll_signals.EndsWhen.NEVER:
            return ""
        if self._repaired_by:
            report = f"reported as repaired by {self._repaired_by}, and it answers"
            return report if self._good_polls else ""
        if self._good_polls < rules.good:
            return ""
        if self._ends is poll_signals.EndsWhen.DENIED:
            return f"no longer so in {self._good_polls} polls in a row"
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
            "the driver asks for nothing" if is_proven else "the driver cannot say what it needs",
            self._reset_evidence,
        ]
        return ", ".join(filter(None, parts))

    def _was_reset(self, *, is_proven: bool) -> bool:
        match self._action:
            case xid_policy.Action.RESET:
                return is_proven or bool(self._reset_evidence)
            case xid_policy.Action.REBOOT:
                return is_proven
            case _:
                return True


def required_quiet_s(cooldown_s: float, *, doublings: int, has_evidence: bool) -> float:
    """Return how long a GPU must be without faults before it counts as recovered."""
    longest = max(QUIET_MAX_S, cooldown_s * UNPROVEN_FACTOR)
    first_s = cooldown_s * (1 if has_evidence else UNPROVEN_FACTOR)
    return pacing.Backoff(first_s=first_s, max_s=longest).delay_s(doublings + 1)


class FlapHistory:
    """Counts how often a part of a GPU became unhealthy soon after it had recovered."""

    def __init__(self) -> None:
        self.doublings = 0
        self._recovered_at: float | None = None

    def on_unhealthy(self, now: float) -> str:
        """Return the evidence of flapping; empty if the part was healthy for long."""
        if self._recovered_at is None or now - self._recovered_at >= FLAP_WINDOW_S:
            self.doublings = 0
            return ""
        self.doublings = min(self.doublings + 1, DOUBLINGS_MAX)
        return f"unhealthy again {now - self._recovered_at:.0f} s after it recovered"

    def on_recovered(self, now: float) -> None:
        """Note that the part is healthy."""
        self._recovered_at = now
