"""Pure: suspends the plugins of a mass failure, each for a limited time, and resumes them in turn.

While suspended, a silent plugin is not probed, but Kubernetes is queried to check that its pod and
its node still exist. No plugin is suspended for long: `Budget` limits the time over all mass
failures.
"""

import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Final

from muster_health.fleet import mass_failure, registry
from muster_health.model import config, steps
from muster_health.plugin import tracked_plugin

SOON_S: Final = 0.05
"""Delay of an evaluation that another evaluation causes, so that `tick` terminates."""
_CHECK_S: Final = 1.0
_TURN_S: Final = 0.5
_AT_ONCE: Final = 25
_ASKED_AT_ONCE: Final = 10
_SIZES_S: Final = 10.0
_MASS_FAILURES: Final = 3
_REFILL_S: Final = 0.1


def most_s(settings: config.Detection) -> float:
    """Return for how long a plugin may be suspended in total: as long as three mass failures."""
    return _MASS_FAILURES * mass_failure.lasts_s(settings)


class Budget:
    """How long each plugin may be suspended: in total as long as three mass failures last.

    With the default settings this is 52.5 s: enough if three NATS servers are restarted one after
    the other, or if others join a mass failure for a minute. Each second without suspension
    restores 0.1 s. However many mass failures there are, and whatever causes them, a failed plugin
    is suspended for at most 52.5 s plus a tenth of the elapsed time.
    """

    def __init__(self, settings: config.Detection) -> None:
        self._least_s = mass_failure.lasts_s(settings)
        self._most_s = most_s(settings)
        self._left: dict[str, tuple[float, float]] = {}
        """How many seconds of suspension each plugin had left, and when; the oldest entry first."""
        self._since: dict[str, float] = {}
        """When each suspended plugin was suspended."""

    def allows(self, key: str, now: float) -> bool:
        """Return whether a plugin may still be suspended for as long as a mass failure lasts."""
        return self._left_s(key, now) >= self._least_s

    def begin(self, key: str, now: float) -> None:
        """Record that a plugin is suspended."""
        if key not in self._since:
            self._left[key] = self._left_s(key, now), now
            self._since[key] = now

    def end(self, key: str, now: float) -> None:
        """Record that a plugin is no longer suspended."""
        if key in self._since:
            left_s = self._left_s(key, now)
            del self._since[key], self._left[key]
            self._left[key] = left_s, now
        for old in list(itertools.islice(self._left, 2)):
            if old not in self._since and self._left_s(old, now) >= self._most_s:
                del self._left[old]

    def end_all(self, now: float) -> None:
        """Record that no plugin is suspended any more."""
        for key in list(self._since):
            self.end(key, now)

    def forget(self, key: str) -> None:
        """Drop a plugin that is removed."""
        self._left.pop(key, None)
        self._since.pop(key, None)

    def spent(self, now: float) -> list[str]:
        """Return the suspended plugins that have used up their time."""
        return [key for key in self._since if self._left_s(key, now) <= 0]

    def _left_s(self, key: str, now: float) -> float:
        if key not in self._left:
            return self._most_s
        left_s, at = self._left[key]
        if key in self._since:
            return left_s - (now - at)
        return min(self._most_s, left_s + _REFILL_S * (now - at))


class Suspensions:
    """The active mass failures, and the plugins that are suspended or wait to be resumed."""

    def __init__(
        self,
        settings: config.Detection,
        nodes: registry.Registry,
        over: Callable[[mass_failure.Ended, float], None],
        reschedule: Callable[[tracked_plugin.TrackedPlugin], None],
        *,
        has_cluster: bool,
    ) -> None:
        self.counts = mass_failure.SuspectCounts(settings)
        self.suspects: Mapping[str, steps.Failure] = self.counts.suspects
        """The suspected plugins, and how they failed."""
        self._budget = Budget(settings)
        self._registry = nodes
        self._plugins: Mapping[str, tracked_plugin.TrackedPlugin] = nodes.plugins
        self._over = over
        self._reschedule = reschedule
        self._has_cluster = has_cluster
        self._asking_s = settings.restart_s
        self._held: set[str] = set()
        """The suspended plugins, except those that wait to be resumed."""
        self._to_ask: dict[str, float] = {}
        """The earliest time to query Kubernetes about each suspended plugin."""
        self._gone: dict[str, float] = {}
        """When to resume each plugin whose pod is gone, unless pods of many nodes are gone then."""
        self._to_resume: dict[str, None] = {}
        self._turn_at = 0.0
        self._sizes: tuple[float, Mapping[str, int]] = -_SIZES_S, {}

    @property
    def active(self) -> Mapping[mass_failure.Group, mass_failure.MassFailure]:
        """Return the active mass failures."""
        return self.counts.active

    def suspends(
        self, plugin: tracked_plugin.TrackedPlugin, now: float
    ) -> tuple[bool, float | None]:
        """Evaluate a plugin; return whether it is suspended, and when to evaluate the fleet."""
        key = plugin.key
        if not plugin.is_suspect(now):
            self._cleared(key, now)
            if plugin.is_suspended:
                # the plugin has a different problem now, which others do not share
                plugin.receive(steps.Resume(), now)
            return False, None
        has_grown = self._count(plugin, now)
        is_over = self._end(now)
        due = now + SOON_S if has_grown or is_over else None
        if not self.counts.has(key):
            # it now fails in a different manner than the others
            self._held.discard(key)
        if key in self._held:
            if not plugin.is_suspended:
                self._suspend(key, now)
            if plugin.verdict.is_gone:
                self.gone(key, now)
        elif plugin.is_suspended and key not in self._to_resume:
            self._to_resume[key] = None
            due = max(self._turn_at, now + SOON_S) if due is None else due
        if not plugin.is_suspended:
            self._budget.end(key, now)
        return plugin.is_suspended, due

    def gone(self, key: str, now: float) -> None:
        """Record that the pod of a suspended plugin, or its node, is gone."""
        if key in self._held and key not in self._gone:
            self.counts.gone(key)
            self._gone[key] = now + _CHECK_S

    def turn(
        self, now: float
    ) -> tuple[list[tracked_plugin.TrackedPlugin], list[tracked_plugin.TrackedPlugin]]:
        """End suspensions that are over.

        Returns the plugins to resume, and those about which Kubernetes must be queried.
        """
        self._end(now)
        self._release_gone(now)
        for key in self._budget.spent(now):
            if key in self._held:
                self._held.discard(key)
                self._to_resume[key] = None
        if now < self._turn_at:
            return [], []
        if self._to_resume or self._to_ask:
            self._turn_at = now + _TURN_S
        return self._to_resume_now(now), self._to_ask_now(now)

    def dues(self, now: float) -> Iterable[float]:
        """Return the times at which to evaluate again."""
        if self.counts.active:
            yield now + _CHECK_S
        if self._to_resume:
            yield max(self._turn_at, now + SOON_S)
        if self._to_ask:
            yield max(self._turn_at, next(iter(self._to_ask.values())), now + SOON_S)

    def removed(self, key: str, now: float) -> None:
        """Record that a plugin is removed."""
        self._cleared(key, now)
        self._budget.forget(key)

    def shift(self, seconds: float) -> None:
        """Postpone the ends of mass failures by the time for which our process was suspended."""
        self.counts.shift(seconds)

    def clear(self, now: float) -> None:
        """Discard all suspicions, mass failures and suspensions."""
        self.counts.clear()
        self._budget.end_all(now)
        self._held.clear()
        self._to_ask.clear()
        self._gone.clear()
        self._to_resume.clear()

    def _count(self, plugin: tracked_plugin.TrackedPlugin, now: float) -> bool:
        """Count a suspected plugin; return whether recent plugins joined a mass failure."""
        joins = self.counts.suspected(plugin.key, plugin.node, plugin.failure(now), now)
        grown = self.counts.grow(lambda: self._group_sizes(now), now)
        for key in [plugin.key, *grown] if joins else grown:
            if self._budget.allows(key, now):
                self._suspend(key, now)
        return bool(grown)

    def _suspend(self, key: str, now: float) -> None:
        plugin = self._plugins[key]
        plugin.receive(steps.Suspend(), now)
        self._reschedule(plugin)
        self._held.add(key)
        self._budget.begin(key, now)
        if self._has_cluster and self.suspects[key].manner is steps.Manner.SILENT:
            # a query made too early shows a running pod
            self._to_ask.pop(key, None)
            self._to_ask[key] = now + self._asking_s

    def _cleared(self, key: str, now: float) -> None:
        self.counts.cleared(key)
        self._budget.end(key, now)
        self._held.discard(key)
        self._to_ask.pop(key, None)
        self._gone.pop(key, None)
        self._to_resume.pop(key, None)

    def _end(self, now: float) -> bool:
        over = self.counts.end(now)
        for ended in over:
            held = self._held.intersection(ended.left)
            self._held -= held
            self._to_resume |= dict.fromkeys(sorted(held))
            self._over(ended, now)
        return bool(over)

    def _release_gone(self, now: float) -> None:
        for key in [key for key, due in self._gone.items() if due <= now]:
            del self._gone[key]
            if self.counts.has_own_reason(key):
                self._held.discard(key)
                # there are few of these, so they need not wait for all others
                self._to_resume = {key: None, **self._to_resume}

    def _to_resume_now(self, now: float) -> list[tracked_plugin.TrackedPlugin]:
        keys = list(itertools.islice(self._to_resume, _AT_ONCE))
        for key in keys:
            del self._to_resume[key]
            self._to_ask.pop(key, None)
            self._budget.end(key, now)
        return [self._plugins[key] for key in keys]

    def _to_ask_now(self, now: float) -> list[tracked_plugin.TrackedPlugin]:
        keys = [
            key for key, due in itertools.islice(self._to_ask.items(), _ASKED_AT_ONCE) if due <= now
        ]
        for key in keys:
            del self._to_ask[key]
        return [self._plugins[key] for key in keys if key in self._held]

    def _group_sizes(self, now: float) -> Mapping[str, int]:
        """Return the number of nodes with each cause, as counted at most 10 s ago."""
        counted_at, sizes = self._sizes
        if now - counted_at >= _SIZES_S:
            sizes = Counter(
                cause
                for node in self._registry.nodes.values()
                if node.everything
                for cause in {
                    mass_failure.FLEET,
                    *(cause for plugin in node.everything for cause in plugin.common_causes()),
                }
            )
            self._sizes = now, sizes
        return sizes
