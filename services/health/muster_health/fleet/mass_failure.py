"""Pure: mass failure: if many plugins fail at once, suspends verdicts and names the common cause.

A plugin is suspected when it is silent, or when a problem that it reports is about to lead to a
verdict. A mass failure begins when, within 10 s, more than 5 plugins and more than 10 % of the
fleet become suspected, or more than 5 that share a cause (a NATS server, a zone, a revision). While
it lasts, its members are suspended: they are not probed, and get no verdict. It ends when hardly
any are still suspected, or when they have had the time to recover and no others join. The plugins
that are then still suspected are resumed a few at a time, because each needs a probe and queries.
"""

import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from muster_health.model import config, steps
from muster_health.plugin import tracked_plugin

FLEET: Final = ""
"""The cause of a mass failure whose members have no known cause in common."""

_REMAIN_SHARE: Final = 0.02
_COMMON_SHARE: Final = 0.8
_LASTS_MAX: Final = 10


@dataclass(slots=True)
class MassFailure:
    """One mass failure; by `until` its members have had enough time to recover."""

    cause: str
    began_at: float
    until: float
    members: set[str]
    peak: int = 0
    joined_at: float = 0.0


@dataclass(frozen=True, slots=True)
class Ended:
    """A mass failure is over; the plugins in `left` are still suspected."""

    failure: MassFailure
    left: tuple[str, ...]


class SuspectCounts:
    """Which plugins are suspected, when that began, and the mass failures among them."""

    def __init__(self, settings: config.Detection) -> None:
        self.active: dict[str, MassFailure] = {}
        self._settings = settings
        self.suspects: dict[str, tuple[str, ...]] = {}
        self._recent: dict[str, float] = {}
        self._counts: Counter[str] = Counter()
        self._with_problem: set[str] = set()

    def suspected(
        self, key: str, causes: tuple[str, ...], now: float, *, silent: bool = True
    ) -> None:
        """Record that a plugin is suspected: it is silent, or reports a problem."""
        (self._with_problem.discard if silent else self._with_problem.add)(key)
        if key in self.suspects:
            return
        self.suspects[key] = causes
        self._recent[key] = now
        self._counts.update(causes)
        for failure in self.active.values():
            if failure.cause == FLEET or failure.cause in causes:
                self._join(failure, key, now)

    def cleared(self, key: str) -> None:
        """Record that a plugin is no longer suspected."""
        self._with_problem.discard(key)
        causes = self.suspects.pop(key, None)
        if causes is None:
            return
        self._age(key, causes)
        for failure in self.active.values():
            failure.members.discard(key)

    def holds(self, key: str) -> bool:
        """Return whether this plugin is part of a mass failure."""
        return any(key in failure.members for failure in self.active.values())

    def common(self, failure: MassFailure) -> str:
        """Return what nearly all members have in common; empty if they have nothing in common."""
        if failure.cause != FLEET:
            return failure.cause
        counts = Counter(cause for key in failure.members for cause in self.suspects.get(key, ()))
        best = counts.most_common(1)
        if best and best[0][1] >= _COMMON_SHARE * max(1, len(failure.members)):
            return best[0][0]
        return ""

    def how(self, failure: MassFailure) -> str:
        """Return a description of how the members failed."""
        troubled = len(failure.members & self._with_problem)
        if not troubled:
            return "went silent"
        return (
            "reported problems"
            if troubled == len(failure.members)
            else "went silent or reported problems"
        )

    def update(self, fleet: int, now: float) -> tuple[list[MassFailure], list[Ended]]:
        """Return which mass failures began and ended; `fleet` is the number of plugins."""
        while self._recent:
            key, at = next(iter(self._recent.items()))
            if now - at <= self._settings.storm_window_s:
                break
            self._age(key, self.suspects[key])
        causes = self._causes_over(fleet)
        began = [self._begin(cause, now) for cause in causes if self._is_new(cause)]
        over = [failure for failure in self.active.values() if self._is_over(failure, now)]
        for failure in over:
            del self.active[failure.cause]
        return began, [Ended(failure, tuple(sorted(failure.members))) for failure in over]

    def shift(self, seconds: float) -> None:
        """Postpone the ends by the time for which our own process was suspended."""
        for failure in self.active.values():
            failure.until += seconds
            failure.joined_at += seconds

    def clear(self) -> None:
        """Forget all suspicions and mass failures."""
        self.active.clear()
        self.suspects.clear()
        self._with_problem.clear()
        self._recent.clear()
        self._counts.clear()

    def _causes_over(self, fleet: int) -> list[str]:
        minimum = self._settings.storm_min
        if len(self._recent) <= minimum:
            return []
        common = [cause for cause, many in self._counts.items() if many > minimum]
        is_fleet = len(self._recent) > max(minimum, self._settings.storm_share * fleet)
        return [FLEET] if is_fleet else common

    def _is_new(self, cause: str) -> bool:
        # during a mass failure of the whole fleet, none begins for a single cause
        return cause not in self.active and FLEET not in self.active

    def _begin(self, cause: str, now: float) -> MassFailure:
        lasts_s = (
            self._settings.reconnect_s + self._settings.suspicion_beats * self._settings.interval_s
        )
        failure = MassFailure(cause, now, now + lasts_s, set())
        for key, causes in self.suspects.items():
            if cause == FLEET or cause in causes:
                self._join(failure, key, now)
        self.active[cause] = failure
        return failure

    def _join(self, failure: MassFailure, key: str, now: float) -> None:
        failure.members.add(key)
        failure.peak = max(failure.peak, len(failure.members))
        failure.joined_at = now

    def _end_of(self, failure: MassFailure) -> float:
        quiet = failure.joined_at + self._settings.storm_window_s
        longest = failure.began_at + _LASTS_MAX * (failure.until - failure.began_at)
        return min(max(failure.until, quiet), longest)

    def _is_over(self, failure: MassFailure, now: float) -> bool:
        few_left = len(failure.members) < _REMAIN_SHARE * failure.peak or not failure.members
        return few_left or now >= self._end_of(failure)

    def _age(self, key: str, causes: tuple[str, ...]) -> None:
        if self._recent.pop(key, None) is None:
            return
        self._counts.subtract(causes)
        for cause in causes:
            if self._counts[cause] <= 0:
                del self._counts[cause]


SOON_S: Final = 0.05
"""Delay before other plugins are evaluated, so that `tick` terminates."""
_CHECK_S: Final = 1.0
_RESUME_S: Final = 0.5
_RESUMED_AT_ONCE: Final = 25


class MassFailures:
    """All mass failures, and the suspended plugins still to be resumed."""

    def __init__(
        self,
        settings: config.Detection,
        plugins: Mapping[str, tracked_plugin.TrackedPlugin],
        over: Callable[[Ended, float], None],
    ) -> None:
        self.counts = SuspectCounts(settings)
        self.suspects: Mapping[str, tuple[str, ...]] = self.counts.suspects
        """The suspected plugins, with the possible common causes of each."""
        self._plugins = plugins
        self._over = over
        self._to_resume: dict[str, None] = {}
        self._resume_at = 0.0

    @property
    def active(self) -> Mapping[str, MassFailure]:
        """Return the active mass failures, by cause."""
        return self.counts.active

    def suspends(
        self, plugin: tracked_plugin.TrackedPlugin, now: float
    ) -> tuple[bool, float | None]:
        """Evaluate a plugin; return whether it is suspended, and when to evaluate the fleet."""
        key = plugin.key
        if not plugin.is_suspect(now):
            self.counts.cleared(key)
            return False, None
        self.counts.suspected(key, plugin.common_causes(), now, silent=plugin.is_silent)
        began, over = self.counts.update(len(self._plugins), now)
        for failure in began:
            for member in failure.members:
                self._plugins[member].receive(steps.Suspend(), now)
        due = now + SOON_S if began or over else None
        self._end(over, now)
        if self.counts.holds(key):
            if not plugin.is_suspended:
                plugin.receive(steps.Suspend(), now)
        elif plugin.is_suspended:
            self._to_resume[key] = None
            due = max(self._resume_at, now + SOON_S) if due is None else due
        return plugin.is_suspended, due

    def resumed(self, now: float) -> list[tracked_plugin.TrackedPlugin]:
        """End the mass failures that are over; return the plugins to resume now."""
        _, over = self.counts.update(len(self._plugins), now)
        self._end(over, now)
        if now < self._resume_at or not self._to_resume:
            return []
        self._resume_at = now + _RESUME_S
        turn = list(itertools.islice(self._to_resume, _RESUMED_AT_ONCE))
        for key in turn:
            del self._to_resume[key]
        return [self._plugins[key] for key in turn if key in self._plugins]

    def dues(self, now: float) -> Iterable[float]:
        """Return the times at which to evaluate again."""
        if self.counts.active:
            yield now + _CHECK_S
        if self._to_resume:
            yield max(self._resume_at, now + SOON_S)

    def cleared(self, key: str) -> None:
        """Record that a plugin is removed."""
        self.counts.cleared(key)

    def shift(self, seconds: float) -> None:
        """Postpone the ends by the time for which our own process was suspended."""
        self.counts.shift(seconds)

    def clear(self) -> None:
        """Forget all suspicions."""
        self.counts.clear()
        self._to_resume.clear()

    def _end(self, over: Iterable[Ended], now: float) -> None:
        for ended in over:
            self._over(ended, now)
            self._to_resume |= {left: None for left in ended.left if not self.counts.holds(left)}
