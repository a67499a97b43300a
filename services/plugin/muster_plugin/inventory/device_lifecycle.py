"""Pure: The life of each unit of one resource, from the first time it is seen until it leaves.

What becomes of a unit (an id), by what is seen or said of it; `-` is no change:

    it is     | there, same | not there | there, another | check failed | check good
    ----------|-------------|-----------|----------------|--------------|------------
    unknown   | New         | -         | -              | -            | -
    New       | -           | Gone      | Replaced       | Failing      | Healthy
    Healthy   | -           | Gone      | Replaced       | Failing      | -
    Failing   | -           | Gone      | Replaced       | -            | Healthy (1)
    Gone      | Back        | - (3)     | Replaced       | -            | -
    Replaced  | Back        | Gone      | - (4)          | -            | -
    Back      | Healthy (2) | Gone      | Replaced       | Failing      | Healthy (2)

New is Healthy at once where no checks are configured; where they are, what nobody has examined is
given to nobody. (1) After `good_checks` of them in a row. (2) After `good_looks` looks at which it
was there, the first of them included, and one good check where checks are configured; all of (1)
if it was Failing when it went. (3) It leaves the list `grace_s` after it went, or later: never
while a pod is known to hold it. (4) It leaves likewise, or at once if it is known that no pod holds
it; then what stands in its place is New under the same id.

What was there and is meant no longer, since the rules changed, leaves at once whatever it is.

Only Healthy is Healthy; everything else is Unhealthy at once, with the reason. `Another` has the
same id and another identity: at the same path, a device with another number. A running pod still
has the old one in its cgroup, so the new one is not offered before the old one has left.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Final, TypeAlias, assert_never

import msgspec

from muster import vocabulary
from muster_plugin.config import resources
from muster_plugin.model import advertised

CONFIGURATION: Final = "no longer configured"
MISSING: Final = "device-missing"
REPLACED: Final = "device-replaced"
SETTLING: Final = "device-settling"
CHECK_FAILED: Final = "check-failed"
NOT_CHECKED: Final = "not-checked"
HEALTHY: Final = "device-healthy"

_SAID_MAX: Final = 1000
_NEVER: Final = float("inf")
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

    def __init__(self, unit: advertised.Unit, *, checks: int) -> None:
        self.unit = unit
        self.lost_at: float | None = None
        self.successor: advertised.Unit | None = None
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

    def saw(self, unit: advertised.Unit | None, now: float, *, policy: Policy) -> None:
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


class Looked(msgspec.Struct, frozen=True):
    """These units are there now, and no others."""

    units: tuple[advertised.Unit, ...]


class Reconfigured(msgspec.Struct, frozen=True):
    """By rules that changed, these units are to be there; a look follows."""

    units: tuple[advertised.Unit, ...]


class Checked(msgspec.Struct, frozen=True):
    """A unit was examined, and so all replicas of it; `problem` is empty if it is well."""

    unit: advertised.Unit
    problem: str = ""


class Held(msgspec.Struct, frozen=True):
    """Pods hold these ids and no others; None: it is not known."""

    ids: frozenset[str] | None


class Added(msgspec.Struct, frozen=True):
    """A unit is advertised from now on."""

    device: vocabulary.Device


class Removed(msgspec.Struct, frozen=True):
    """A unit is advertised no longer."""

    device_id: vocabulary.DeviceId
    reason: vocabulary.Text
    physical: str = ""
    """The GPU or MIG device that it was of."""


class Turned(msgspec.Struct, frozen=True):
    """A unit turned Healthy or Unhealthy, or is Unhealthy for another reason now."""

    device_id: vocabulary.DeviceId
    health: vocabulary.Health
    reason: vocabulary.Text
    code: str


Signal: TypeAlias = Looked | Reconfigured | Checked | Held
Fact: TypeAlias = Added | Removed | Turned


class Lifecycle:
    """The units of one resource as the kubelet is told them; a `machine.Machine`.

    `policy` may be replaced at any time; it holds for what happens from then on.
    """

    def __init__(self, resource: str, policy: Policy) -> None:
        self.resource = resource
        self.policy = policy
        self._lives: dict[str, Life] = {}
        self._held: frozenset[str] | None = None

    def receive(self, event: Signal, now: float) -> Sequence[Fact]:
        """Take what was seen or said; return what changed by it."""
        match event:
            case Looked(units=seen):
                facts = [*self._looked({unit.id: unit for unit in seen}, now)]
            case Reconfigured(units=wanted):
                facts = [*self._reconfigured({unit.id: unit for unit in wanted})]
            case Checked(unit=unit, problem=problem):
                facts = [*self._checked(unit, problem)]
            case Held(ids=ids):
                self._held = ids
                facts = []
            case _:
                assert_never(event)
        return [*facts, *self.tick(now)]

    def tick(self, now: float) -> Sequence[Fact]:
        """Let go of what has been lost for long enough."""
        due = [life for life in self._lives.values() if self._leaves_at(life, now) <= now]
        return [fact for life in due for fact in self._leave(life)]

    def next_deadline(self) -> float | None:
        """Return when the next unit leaves the list if nothing happens."""
        lost = [life for life in self._lives.values() if life.lost_at is not None]
        return min(
            (at for life in lost if (at := self._leaves_at(life, 0.0)) < _NEVER), default=None
        )

    def devices(self) -> tuple[vocabulary.Device, ...]:
        """Return what is advertised, by id."""
        return tuple(self.device(name) for name in sorted(self._lives))

    def device(self, device_id: str) -> vocabulary.Device:
        """Return how an id that is advertised is advertised."""
        return self._device(self._lives[device_id])

    def offered(self) -> tuple[advertised.Unit, ...]:
        """Return what stands behind every id, by id."""
        return tuple(self._lives[name].unit for name in sorted(self._lives))

    def unit(self, device_id: str) -> advertised.Unit | None:
        """Return what stands behind an id, or None if it is not advertised."""
        life = self._lives.get(device_id)
        return life.unit if life else None

    def to_check(self) -> tuple[advertised.Unit, ...]:
        """Return one unit for each thing that is there to be examined."""
        first: dict[str, advertised.Unit] = {}
        for name in sorted(self._lives):
            life = self._lives[name]
            if life.lost_at is None:
                first.setdefault(life.unit.physical, life.unit)
        return tuple(first.values())

    @property
    def problem(self) -> str:
        """Say that there are fewer devices than expected; empty if there are enough."""
        if not self.policy.expected:
            return ""
        found = [life.unit for life in self._lives.values() if life.lost_at is None]
        there, what = len(found), "devices"
        if self.policy.of_gpus:
            there, what = len({unit.physical for unit in found}), "GPUs or MIG devices"
        if there >= self.policy.expected:
            return ""
        return f"expected at least {self.policy.expected} {what}, found {there}"

    def _looked(self, seen: dict[str, advertised.Unit], now: float) -> Iterator[Fact]:
        for name, life in self._lives.items():
            before = life.state()
            life.saw(seen.get(name), now, policy=self.policy)
            yield from _turn(life, before)
        for name in sorted(seen.keys() - self._lives.keys()):
            yield self._begin(seen[name])

    def leave(self) -> Sequence[Fact]:
        """Let go of everything: nothing of it is meant any more."""
        gone = [
            Removed(unit.id, CONFIGURATION, unit.physical if unit.gpu else "")
            for unit in self.offered()
        ]
        self._lives.clear()
        return gone

    def _reconfigured(self, wanted: dict[str, advertised.Unit]) -> Iterator[Fact]:
        """Let go of what was there, and is not meant any more; what was lost before, leaves so."""
        for name, life in [*self._lives.items()]:
            is_meant = name in wanted and life.unit.is_same(wanted[name])
            if life.lost_at is None and not is_meant:
                del self._lives[name]
                yield Removed(name, CONFIGURATION, life.unit.physical if life.unit.gpu else "")

    def _checked(self, examined: advertised.Unit, problem: str) -> Iterator[Fact]:
        for life in self._lives.values():
            if life.unit.physical == examined.physical and life.unit.is_same(examined):
                before = life.state()
                life.was_checked(problem, policy=self.policy)
                yield from _turn(life, before)

    def _leaves_at(self, life: Life, now: float) -> float:
        """Return when a unit leaves the list; never while it is there, or a pod holds it."""
        if life.lost_at is None or (self._held is not None and life.unit.id in self._held):
            return _NEVER
        if life.successor is not None and self._held is not None:
            return now
        return life.lost_at + self.policy.grace_s

    def _leave(self, life: Life) -> Iterator[Fact]:
        del self._lives[life.unit.id]
        yield Removed(life.unit.id, life.state()[2], life.unit.physical if life.unit.gpu else "")
        if life.successor is not None:
            yield self._begin(life.successor)

    def _begin(self, unit: advertised.Unit) -> Added:
        life = Life(unit, checks=int(self.policy.checked))
        self._lives[unit.id] = life
        return Added(self._device(life))

    def _device(self, life: Life) -> vocabulary.Device:
        health, _, reason = life.state()
        return vocabulary.Device(
            id=life.unit.id,
            resource=self.resource,
            health=health,
            reason="" if health is vocabulary.Health.HEALTHY else reason,
            numa_node=life.unit.numa,
        )


def _turn(life: Life, before: State) -> Iterable[Turned]:
    health, code, reason = life.state()
    if (health, code) != before[:2]:
        yield Turned(life.unit.id, health, reason, code)
