"""Pure: counts a plugin's devices, and detects devices that are missing for no known reason.

This detects a failure that nothing else reports: the pod runs, its log is clean, and the node
offers 0 devices. A restarted plugin has no record of how many devices there were before.

| the heartbeat's devices of one resource            | expected number from then on        |
|----------------------------------------------------|-------------------------------------|
| more are Healthy than ever before                  | the new number                      |
| fewer; `device.removed` was published for each     | the new number: they were unplugged |
| fewer, with a new configuration                    | the new number after 60 s: intended |
| no device at all, with a new configuration         | as before: devices are missing      |
| fewer; MIG devices replace GPUs, or vice versa     | the new number: repartitioned       |
| fewer                                              | as before: devices are missing      |

Unhealthy devices are not missing. But they do not raise the expected number: a device that is
plugged in again under another name is counted twice for a while.

Missing devices are reported after 60 s, because drivers and buses may start later than the plugin.
Only extended resources are counted, and nothing is counted while a plugin drains.
"""

import functools
from collections.abc import Iterable, Mapping
from typing import Any, Final

import msgspec

from muster import vocabulary

_WAIT_S: Final = 60.0
_IN_FLIGHT_S: Final = 10.0
"""For this long after a removal, a heartbeat may still count the removed device."""
_RESOURCES_MAX: Final = 64
_LONG_AGO: Final = float("-inf")
_NOTHING: Final[Mapping[str, Any]] = {}
"""An empty mapping, which most plugins share."""
_PART: Final = "/mig-"


def _nothing() -> Mapping[str, Any]:
    return _NOTHING


class DeviceCounts(msgspec.Struct, eq=False, gc=False):
    """Device counts by resource: how many the plugin `has`, and how many it should have (`had`)."""

    has: Mapping[str, int] = msgspec.field(default_factory=_nothing)
    """The counts in the last heartbeat."""
    short: Mapping[str, str] = msgspec.field(default_factory=_nothing)
    """Resources with too few devices for too long, each with a description."""
    changes: int = 0
    """How often the saved counts have changed."""
    had: Mapping[str, int] = msgspec.field(default_factory=_nothing)
    """The expected number of devices by resource."""
    configuration: str = ""
    """The hash of the configuration to which the expected counts belong."""
    _newer: str = ""
    _newer_at: float = 0.0
    _removed_at: float = _LONG_AGO
    _since: Mapping[str, float] = msgspec.field(default_factory=_nothing)
    _is_calm: bool = False

    def restore(
        self, had: Iterable[tuple[str, int]], configuration: str, published: Mapping[str, str]
    ) -> None:
        """Restore the saved counts; `published` are the shortages that are already reported."""
        self.had, self.configuration = _shared(tuple(had)), _same(configuration)
        self._since = dict.fromkeys(published, _LONG_AGO) or _NOTHING
        self.short = dict(published) or _NOTHING
        self._is_calm = False

    def lacks(self, resource: str) -> bool:
        """Return whether devices of a resource are missing now, even if only briefly."""
        return self.has.get(resource, 0) < self.had.get(resource, 0)

    def removed(self, resource: str, count: int, now: float) -> None:
        """Record that devices were unplugged while the plugin was running."""
        count_before = self.had.get(resource, 0)
        if not count_before:
            return
        left = {**self.had, resource: count_before - count}
        self._update({name: n for name, n in left.items() if n > 0}, self.configuration)
        self._removed_at, self._is_calm = now, False

    def observe(self, heartbeat: vocabulary.Heartbeat, now: float) -> bool:
        """Record the counts in a heartbeat; return whether `short` changed."""
        if self._is_calm and self._is_as_before(heartbeat):
            return False
        if heartbeat.phase is vocabulary.Phase.DRAINING:
            return False
        self._is_calm = False
        counted = sorted(
            (each.name, each.devices, each.healthy) for each in heartbeat.resources if each.extended
        )
        counted = counted[:_RESOURCES_MAX]
        self.has = _shared(tuple((name, devices) for name, devices, _ in counted))
        healthy_counts = {name: healthy for name, _, healthy in counted if healthy}
        if self._is_reconfigured(heartbeat.config_hash, healthy_counts, now):
            return False
        self._count(healthy_counts, now)
        before, self.short = self.short, self._words(now)
        is_counted = all(healthy_counts[name] <= self.had.get(name, 0) for name in healthy_counts)
        self._is_calm = is_counted and not (self._since or self._newer)
        return before != self.short

    def _is_as_before(self, heartbeat: vocabulary.Heartbeat) -> bool:
        """Return whether a heartbeat leaves all counts unchanged, as nearly all do."""
        if heartbeat.config_hash != self.configuration or len(heartbeat.resources) != len(self.has):
            return False
        for each in heartbeat.resources:
            if self.has.get(each.name) != each.devices:
                return False
            if each.healthy > self.had.get(each.name, 0):
                return False
        return True

    def _is_reconfigured(self, configuration: str, healthy: Mapping[str, int], now: float) -> bool:
        """Record the current configuration; return whether it is too new to judge device counts."""
        if configuration in {"", self.configuration}:
            self._newer = ""
            return False
        if not self.configuration:
            self._update(self.had, configuration)
            return False
        if configuration != self._newer:
            if self._newer and now - self._newer_at >= _WAIT_S:
                # the configuration before this one had no devices at all
                self._update(healthy, self._newer)
            self._newer, self._newer_at = configuration, now
        if now - self._newer_at < _WAIT_S:
            return True
        if any(self.has.values()) or not any(self.had.get(name) for name in self.has):
            self._update(healthy, configuration)
            self._newer = ""
        return False

    def _count(self, healthy: Mapping[str, int], now: float) -> None:
        gained = {name for name, count in healthy.items() if count > self.had.get(name, 0)}
        lost = {name for name in self.had if self.lacks(name)}
        if _is_divided(gained, lost):
            self._update(healthy, self.configuration)
        elif gained and now - self._removed_at >= _IN_FLIGHT_S:
            more = {name: healthy[name] for name in gained}
            self._update({**self.had, **more}, self.configuration)

    def _words(self, now: float) -> Mapping[str, str]:
        is_newer = bool(self._newer)
        lacking = [
            name for name in self.had if self.lacks(name) and (not is_newer or name in self.has)
        ]
        if not lacking:
            self._since = _NOTHING
            return _NOTHING
        first = self._newer_at if is_newer else now
        self._since = {name: self._since.get(name, first) for name in lacking}
        after = " before its configuration changed" if is_newer else ""
        return {
            name: f"{self.has.get(name, 0)} of the {self.had[name]} devices that it had{after}"
            for name in lacking
            if now - self._since[name] >= _WAIT_S
        }

    def _update(self, had: Mapping[str, int], configuration: str) -> None:
        if had != self.had or configuration != self.configuration:
            self.had = _shared(tuple(sorted(had.items())[:_RESOURCES_MAX]))
            self.configuration = _same(configuration)
            self.changes += 1


def _is_divided(gained: set[str], lost: set[str]) -> bool:
    """Return whether GPUs were repartitioned, which replaces resources with other resources."""
    if not any(_PART in name for name in gained | lost):
        return False
    domains = {name.partition("/")[0] for name in gained}
    return bool(lost) and all(name.partition("/")[0] in domains for name in lost)


@functools.lru_cache(maxsize=1024)
def _shared(counted: tuple[tuple[str, int], ...]) -> Mapping[str, int]:
    """Return the counts by name; nodes with equal counts share one copy."""
    return dict(counted)


@functools.lru_cache(maxsize=64)
def _same(configuration: str) -> str:
    """Return one shared string for all nodes with the same configuration."""
    return configuration
