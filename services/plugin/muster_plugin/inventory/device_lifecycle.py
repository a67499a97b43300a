"""Pure: the life cycle of each unit of one resource, from its first observation to its removal.

State of a unit (one device id) after each observation or check; `-` means no change:

    state     | there, same | not there | there, another | check failed | check passed
    ----------|-------------|-----------|----------------|--------------|-------------
    unknown   | New         | -         | -              | -            | -
    New       | -           | Gone      | Replaced       | Failing      | Healthy
    Healthy   | -           | Gone      | Replaced       | Failing      | -
    Failing   | -           | Gone      | Replaced       | -            | Healthy (1)
    Gone      | Back        | - (2)     | Replaced       | -            | -
    Replaced  | Back        | Gone      | - (3)          | -            | -
    Back      | -           | Gone      | Replaced       | Failing      | Healthy (1)

Without configured checks, New and Back are Healthy immediately; with checks, an unchecked unit is
not allocated. (1) After `good_checks` passed checks in a row; after one if the unit is Back and was
not Failing when it vanished. (2) The unit is removed `grace_s` after it vanished, but never while a
pod holds it. (3) Likewise, or immediately if it is certain that no pod holds it; then its
replacement is New under the same id.

A unit that is no longer configured is removed immediately if it is present.

Only the state Healthy is reported as Healthy; every other state is immediately Unhealthy, with the
reason. `another` is a device with the same id and another identity, such as another device number
at the same path. A running pod still has the old device in its cgroup, so the new device is not
offered before the old one is removed.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Final, TypeAlias, assert_never

import msgspec

from muster import vocabulary
from muster_plugin.config import resources
from muster_plugin.model import advertised

NOT_CONFIGURED: Final = "no longer configured"
MISSING: Final = "device-missing"
REPLACED: Final = "device-replaced"
CHECK_FAILED: Final = "check-failed"
NOT_CHECKED: Final = "not-checked"
HEALTHY: Final = "device-healthy"

_REASON_MAX: Final = 1000
_NEVER: Final = float("inf")
HealthState: TypeAlias = tuple[vocabulary.Health, str, str]
"""The health of a unit, the code of the reason, and the reason as text."""


class Policy(msgspec.Struct, frozen=True, kw_only=True):
    """The grace period, the checks, and the minimum number of devices (0: no minimum).

    With `of_gpus`, each GPU or MIG device counts once, even if it has several replicas.
    """

    grace_s: float = 60.0
    good_checks: int = 1
    checked: bool = False
    expected: int = 0
    of_gpus: bool = False


def policy(rule: resources.Resource) -> Policy:
    """Return the life-cycle policy that a rule configures."""
    return Policy(
        grace_s=rule.grace_s,
        good_checks=rule.checks.good,
        checked=rule.checks.open or bool(rule.checks.command),
        expected=rule.expect.min if rule.expect else 0,
        of_gpus=not rule.groups,
    )


class TrackedUnit:
    """One unit, and how many passed checks it still needs to be Healthy."""

    def __init__(self, unit: advertised.Unit, *, checks: int) -> None:
        self.unit = unit
        self.lost_at: float | None = None
        self.successor: advertised.Unit | None = None
        self._checks_left = checks
        self._problem = ""

    def state(self) -> HealthState:
        """Return the unit's health, the code of the reason, and the reason as text."""
        key = self.unit.physical
        if self.successor is not None:
            return _unhealthy(REPLACED, f"{key} is now another device: {self._difference()}")
        if self.lost_at is not None:
            return _unhealthy(MISSING, f"{key} is gone")
        if self._checks_left and self._problem:
            return _unhealthy(CHECK_FAILED, f"{key}: {self._problem}")
        if self._checks_left:
            return _unhealthy(NOT_CHECKED, f"{key} has not been checked since it appeared")
        return vocabulary.Health.HEALTHY, HEALTHY, "present and healthy"

    def observe(self, unit: advertised.Unit | None, now: float, *, policy: Policy) -> None:
        """Record one observation: no unit, the same unit, or a different unit with the same id."""
        if unit is not None and self.unit.is_same(unit):
            self.lost_at = self.successor = None
            self.unit = unit
            return
        if self.lost_at is None:
            self.lost_at = now
            self._checks_left = max(self._checks_left, int(policy.checked))
        self.successor = unit

    def record_check(self, problem: str, *, policy: Policy) -> None:
        """Record the result of a check, unless the unit is missing or replaced."""
        if self.lost_at is not None:
            return
        if problem:
            self._checks_left = policy.good_checks
            self._problem = problem
            return
        self._checks_left = max(self._checks_left - 1, 0)
        if not self._checks_left:
            self._problem = ""

    def _difference(self) -> str:
        assert self.successor is not None, "only a replaced unit differs"
        was, now = ({*unit.identity.values()} for unit in (self.unit, self.successor))
        return f"{', '.join(sorted(was - now))} became {', '.join(sorted(now - was))}"


def _unhealthy(code: str, reason: str) -> HealthState:
    return vocabulary.Health.UNHEALTHY, code, reason[:_REASON_MAX]


class Observed(msgspec.Struct, frozen=True):
    """An observation: exactly these units are present now."""

    units: tuple[advertised.Unit, ...]


class Reconfigured(msgspec.Struct, frozen=True):
    """The rules changed, and now configure these units; an `Observed` event follows."""

    units: tuple[advertised.Unit, ...]


class Checked(msgspec.Struct, frozen=True):
    """A unit's device, with all replicas, was checked; `problem` is empty if the check passed."""

    unit: advertised.Unit
    problem: str = ""


class AllocationsChanged(msgspec.Struct, frozen=True):
    """Pods hold exactly these ids; None if that is unknown."""

    ids: frozenset[str] | None


class Added(msgspec.Struct, frozen=True):
    """A unit is now advertised."""

    device: vocabulary.Device


class Removed(msgspec.Struct, frozen=True):
    """A unit is no longer advertised."""

    device_id: vocabulary.DeviceId
    reason: vocabulary.Text
    physical: str = ""
    """The uuid of the GPU or MIG device to which the unit belonged; empty for device nodes."""


class HealthChanged(msgspec.Struct, frozen=True):
    """A unit became Healthy or Unhealthy, or is now Unhealthy for a different reason."""

    device_id: vocabulary.DeviceId
    health: vocabulary.Health
    reason: vocabulary.Text
    code: str


Signal: TypeAlias = Observed | Reconfigured | Checked | AllocationsChanged
Fact: TypeAlias = Added | Removed | HealthChanged


class DeviceLifecycle:
    """The units of one resource as they are advertised; a `machine.Machine`.

    `policy` may be replaced at any time and applies from then on.
    """

    def __init__(self, resource: str, policy: Policy) -> None:
        self.resource = resource
        self.policy = policy
        self._tracked: dict[str, TrackedUnit] = {}
        self._allocated: frozenset[str] | None = None

    def receive(self, event: Signal, now: float) -> Sequence[Fact]:
        """Handle one signal; return the resulting changes."""
        match event:
            case Observed(units=present):
                facts = [*self._observed({unit.id: unit for unit in present}, now)]
            case Reconfigured(units=configured):
                facts = [*self._reconfigured({unit.id: unit for unit in configured})]
            case Checked(unit=unit, problem=problem):
                facts = [*self._checked(unit, problem)]
            case AllocationsChanged(ids=ids):
                self._allocated = ids
                facts = []
            case _:
                assert_never(event)
        return [*facts, *self.tick(now)]

    def tick(self, now: float) -> Sequence[Fact]:
        """Remove units that have been missing or replaced for long enough; return the changes.

        The replacement of a removed unit is then added.
        """
        due = [
            tracked for tracked in self._tracked.values() if self._leaves_at(tracked, now) <= now
        ]
        return [fact for tracked in due for fact in self._remove(tracked)]

    def next_deadline(self) -> float | None:
        """Return when the next missing or replaced unit is to be removed; None if none is."""
        lost = [tracked for tracked in self._tracked.values() if tracked.lost_at is not None]
        return min(
            (at for tracked in lost if (at := self._leaves_at(tracked, 0.0)) < _NEVER), default=None
        )

    def device(self, device_id: str) -> vocabulary.Device:
        """Return the advertised device with this id."""
        return self._device(self._tracked[device_id])

    def offered(self) -> tuple[advertised.Unit, ...]:
        """Return every unit, sorted by id."""
        return tuple(self._tracked[name].unit for name in sorted(self._tracked))

    def unit(self, device_id: str) -> advertised.Unit | None:
        """Return the unit with this id, or None if it is not advertised."""
        tracked = self._tracked.get(device_id)
        return tracked.unit if tracked else None

    def units_to_check(self) -> tuple[advertised.Unit, ...]:
        """Return one unit of each present physical device."""
        first: dict[str, advertised.Unit] = {}
        for name in sorted(self._tracked):
            tracked = self._tracked[name]
            if tracked.lost_at is None:
                first.setdefault(tracked.unit.physical, tracked.unit)
        return tuple(first.values())

    @property
    def problem(self) -> str:
        """A description of the shortage of devices; empty if there are enough."""
        if not self.policy.expected:
            return ""
        present = [tracked.unit for tracked in self._tracked.values() if tracked.lost_at is None]
        count, what = len(present), "devices"
        if self.policy.of_gpus:
            count, what = len({unit.physical for unit in present}), "GPUs or MIG devices"
        if count >= self.policy.expected:
            return ""
        return f"expected at least {self.policy.expected} {what}, found {count}"

    def _observed(self, present: dict[str, advertised.Unit], now: float) -> Iterator[Fact]:
        for name, tracked in self._tracked.items():
            before = tracked.state()
            tracked.observe(present.get(name), now, policy=self.policy)
            yield from _health_changes(tracked, before)
        for name in sorted(present.keys() - self._tracked.keys()):
            yield self._add(present[name])

    def remove_all(self) -> Sequence[Fact]:
        """Remove all units of a resource that is no longer configured; return the changes."""
        removed = [_removed(unit, NOT_CONFIGURED) for unit in self.offered()]
        self._tracked.clear()
        return removed

    def _reconfigured(self, configured: dict[str, advertised.Unit]) -> Iterator[Fact]:
        """Remove present units that are no longer configured; missing units expire as before."""
        for name, tracked in [*self._tracked.items()]:
            is_configured = name in configured and tracked.unit.is_same(configured[name])
            if tracked.lost_at is None and not is_configured:
                del self._tracked[name]
                yield _removed(tracked.unit, NOT_CONFIGURED)

    def _checked(self, checked: advertised.Unit, problem: str) -> Iterator[Fact]:
        for tracked in self._tracked.values():
            if tracked.unit.physical == checked.physical and tracked.unit.is_same(checked):
                before = tracked.state()
                tracked.record_check(problem, policy=self.policy)
                yield from _health_changes(tracked, before)

    def _leaves_at(self, tracked: TrackedUnit, now: float) -> float:
        """Return when a unit is to be removed; infinity while it is present or a pod holds it."""
        if tracked.lost_at is None or (
            self._allocated is not None and tracked.unit.id in self._allocated
        ):
            return _NEVER
        if tracked.successor is not None and self._allocated is not None:
            return now
        return tracked.lost_at + self.policy.grace_s

    def _remove(self, tracked: TrackedUnit) -> Iterator[Fact]:
        del self._tracked[tracked.unit.id]
        yield _removed(tracked.unit, tracked.state()[2])
        if tracked.successor is not None:
            yield self._add(tracked.successor)

    def _add(self, unit: advertised.Unit) -> Added:
        tracked = TrackedUnit(unit, checks=int(self.policy.checked))
        self._tracked[unit.id] = tracked
        return Added(self._device(tracked))

    def _device(self, tracked: TrackedUnit) -> vocabulary.Device:
        health, _, reason = tracked.state()
        return vocabulary.Device(
            id=tracked.unit.id,
            resource=self.resource,
            health=health,
            reason="" if health is vocabulary.Health.HEALTHY else reason,
            numa_node=tracked.unit.numa,
        )


def _removed(unit: advertised.Unit, reason: str) -> Removed:
    return Removed(unit.id, reason, unit.physical if unit.gpu else "")


def _health_changes(tracked: TrackedUnit, before: HealthState) -> Iterable[HealthChanged]:
    health, code, reason = tracked.state()
    if (health, code) != before[:2]:
        yield HealthChanged(tracked.unit.id, health, reason, code)
