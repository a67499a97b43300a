"""Pure: When something that holds against a part of a GPU is over.

    what holds                       | is over after
    ---------------------------------|--------------------------------------------------------------
    a state that NVML tells          | `good` polls in a row that deny it
    lost, asks for reset or reboot   | `good` good polls in a row that deny it, and quiet
    ECC errors, XID degrade          | `good` good polls in a row, and quiet
    XID unhealthy                    | the same
    XID reset                        | the same, and evidence of a reset: the driver says that
                                     | nothing is needed, or the GPU was away and came back, or its
                                     | error counter started anew
    XID reboot                       | the same, and the driver says that nothing is needed
    a failed remap                   | nothing
    any but the last, said repaired  | one good poll since the last fault (that denies it)

A good poll was answered, and asks for nothing. Quiet is `cooldown_s` without another fault on the
part, or a poll that was answered and not good. It has to last `UNPROVEN` times as long where the
driver cannot say what it needs and nothing else proves a reset, and twice as long again for every
time that the part went bad within `FLAP_WINDOW_S` of being well.
"""

from typing import Final

from muster_plugin.config import gpus
from muster_plugin.gpu import poll_signals, xid_policy
from muster_plugin.model import gpu

FLAP_WINDOW_S: Final = 600.0
DOUBLINGS_MAX: Final = 5
QUIET_MAX_S: Final = 3600.0
"""No quiet is longer, unless `cooldown_s` itself is."""
UNPROVEN_FACTOR: Final = 3
"""How many times as long quiet has to be where it is the only evidence."""

_AWAY: Final = "it was away and came back"
_ANEW: Final = "its error counter started anew"


class ActiveFault:
    """One finding that holds, and what speaks for its end."""

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
        self._seen_at = now
        self._good = 0
        self._proven = 0
        self._is_away = False
        self._was_reset = ""
        self._repaired = ""

    @property
    def is_unhealthy(self) -> bool:
        """Whether it takes the part out of use."""
        return self.began.effect is gpu.Effect.UNHEALTHY

    def on_repeated(self, now: float) -> None:
        """Take that it is so again: whatever spoke for its end is void."""
        self.on_disturbance(now)
        self._is_away = False
        self._was_reset = ""

    def on_disturbance(self, now: float) -> None:
        """Take another fault on the same part, or a bad poll: all that has to pass begins anew."""
        self._seen_at = now
        self._good = self._proven = 0
        self._repaired = ""

    def on_unanswered(self) -> None:
        """Take a poll that says nothing."""
        self._good = self._proven = 0

    def on_gone(self, now: float) -> None:
        """Take that the GPU is lost, or not there."""
        self.on_disturbance(now)
        self._is_away = True

    def on_counter_reset(self) -> None:
        """Take that the GPU's error counter started anew, as after a reset."""
        self._was_reset = _ANEW

    def on_repair_reported(self, by: str) -> None:
        """Take somebody's word for it."""
        self._repaired = by

    def on_poll(self, reading: poll_signals.PollReading, now: float) -> None:
        """Take an answered poll that does not show it."""
        if self._is_away:
            self._is_away = False
            self._was_reset = _AWAY
        is_sign = self._action is None
        if is_sign and self.began.code not in reading.cleared:
            return
        if not reading.is_good and (
            self.is_unhealthy or self._ends is not poll_signals.EndsWhen.DENIED
        ):
            self.on_disturbance(now)
            return
        self._good += 1
        self._proven = self._proven + 1 if reading.is_proven_good else 0

    def end_reason(self, now: float, *, rules: gpus.Health, doublings: int) -> str:
        """Say why it is over; empty while it holds."""
        if self._ends is poll_signals.EndsWhen.NEVER:
            return ""
        if self._repaired:
            return f"{self._repaired} says it is repaired, and it answers" if self._good else ""
        if self._good < rules.good:
            return ""
        if self._ends is poll_signals.EndsWhen.DENIED:
            return f"no longer so in {self._good} polls in a row"
        return self._quiet(now, rules=rules, doublings=doublings)

    def _quiet(self, now: float, *, rules: gpus.Health, doublings: int) -> str:
        is_proven = self._proven >= rules.good
        has_reset_evidence = is_proven or bool(self._was_reset)
        required = required_quiet_s(
            rules.cooldown_s, doublings=doublings, has_evidence=has_reset_evidence
        )
        quiet_s = now - self._seen_at
        if not self._is_reset(is_proven=is_proven) or quiet_s < required:
            return ""
        proof = "the driver asks for nothing" if is_proven else "the driver cannot say more"
        words = [f"{self._good} good polls in a row", f"no fault for {quiet_s:.0f} s", proof]
        return ", ".join([*words, *([self._was_reset] if self._was_reset else [])])

    def _is_reset(self, *, is_proven: bool) -> bool:
        match self._action:
            case xid_policy.Action.RESET:
                return is_proven or bool(self._was_reset)
            case xid_policy.Action.REBOOT:
                return is_proven
            case _:
                return True


def required_quiet_s(cooldown_s: float, *, doublings: int, has_evidence: bool) -> float:
    """Return how long quiet has to be."""
    longest = max(QUIET_MAX_S, cooldown_s * UNPROVEN_FACTOR)
    return min(cooldown_s * 2.0**doublings * (1 if has_evidence else UNPROVEN_FACTOR), longest)


class FlapHistory:
    """How often a part of a GPU went bad soon after it was well."""

    def __init__(self) -> None:
        self.doublings = 0
        self._well_at: float | None = None

    def on_unhealthy(self, now: float) -> str:
        """Take that it went bad; return what is to be said of it, if it was not well for long."""
        if self._well_at is None or now - self._well_at >= FLAP_WINDOW_S:
            self.doublings = 0
            return ""
        self.doublings = min(self.doublings + 1, DOUBLINGS_MAX)
        return f"bad again {now - self._well_at:.0f} s after it was well"

    def on_recovered(self, now: float) -> None:
        """Take that it is well."""
        self._well_at = now
