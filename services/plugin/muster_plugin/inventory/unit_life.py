"""Pure: One unit, and how many good looks and checks it still needs before it is Healthy.

The table is that of `lifecycle`.
"""

from typing import Final, TypeAlias

import msgspec

from muster import vocabulary
from muster_plugin.config import resources
from muster_plugin.discovery import units

MISSING: Final = "device-missing"
REPLACED: Final = "device-replaced"
SETTLING: Final = "device-settling"
CHECK_FAILED: Final = "check-failed"
NOT_CHECKED: Final = "not-checked"
HEALTHY: Final = "device-healthy"

_SAID_MAX: Final = 1000
State: TypeAlias = tuple[vocabulary.Health, str, str]
"""Health, code and reason."""


class Policy(msgspec.Struct, frozen=True, kw_only=True):
    """How patient to be, and how many devices are right here (0: any number).

    Of GPUs (`of_gpus`) each counts once, whatever the number of its replicas.
    """

    grace_s: float = 60.0
    good_looks: int = 1
    good_checks: int = 1
    checked: bool = False
    expected: int = 0
    of_gpus: bool = False


def policy(rule: resources.Resource) -> Policy:
    """Return what a rule says about patience."""
    return Policy(
        grace_s=rule.grace_s,
        good_checks=rule.checks.good,
        checked=rule.checks.open or bool(rule.checks.command),
        expected=rule.expect.min if rule.expect else 0,
        of_gpus=not rule.groups,
    )


class Life:
    """One unit, and how many good looks and checks it still needs before it is Healthy."""

    def __init__(self, unit: units.Unit, *, checks: int) -> None:
        self.unit = unit
        self.lost_at: float | None = None
        self.successor: units.Unit | None = None
        self._looks = 0
        self._checks = checks
        self._problem = ""

    def state(self) -> State:
        """Return health, code and reason."""
        key = self.unit.physical
        if self.successor is not None:
            return _unhealthy(REPLACED, f"{key} is another device now: {self._difference()}")
        if self.lost_at is not None:
            return _unhealthy(MISSING, f"{key} is gone")
        if self._looks:
            return _unhealthy(
                SETTLING, f"{key} is back; it has to stay for {self._looks} looks more"
            )
        if self._checks and self._problem:
            return _unhealthy(CHECK_FAILED, f"{key}: {self._problem}")
        if self._checks:
            return _unhealthy(NOT_CHECKED, f"{key} has not been checked since it was plugged in")
        return vocabulary.Health.HEALTHY, HEALTHY, "there and well"

    def saw(self, unit: units.Unit | None, now: float, *, policy: Policy) -> None:
        """Take one look: nothing, the same, or another under the same id."""
        if unit is not None and self.unit.is_same(unit):
            if self.lost_at is not None:
                self.lost_at = self.successor = None
                self._looks = policy.good_looks
            self._looks = max(self._looks - 1, 0)
            self.unit = unit
            return
        if self.lost_at is None:
            self.lost_at = now
            self._checks = max(self._checks, int(policy.checked))
        self.successor = unit

    def was_checked(self, problem: str, *, policy: Policy) -> None:
        """Take the result of a check; of what is not there it says nothing."""
        if self.lost_at is not None:
            return
        if problem:
            self._checks = policy.good_checks
            self._problem = problem
            return
        self._checks = max(self._checks - 1, 0)
        if not self._checks:
            self._problem = ""

    def _difference(self) -> str:
        assert self.successor is not None, "only what was replaced differs"
        was, now = ({*unit.identity.values()} for unit in (self.unit, self.successor))
        return f"{', '.join(sorted(was - now))} became {', '.join(sorted(now - was))}"


def _unhealthy(code: str, reason: str) -> State:
    return vocabulary.Health.UNHEALTHY, code, reason[:_SAID_MAX]
