"""Pure: checks the detector itself: its connection to NATS, its delays and its clock.

The detector counts as disconnected until its connection to NATS is up. If it is called much later
than requested, its process was suspended. If the clocks of most nodes differ from ours, our clock
is wrong. None of these is a fault of a plugin.
"""

from collections import Counter
from collections.abc import Mapping
from datetime import datetime, timedelta
from typing import Final

from muster_health.model import config, signals
from muster_health.plugin import tracked_plugin

_STAMP_S: Final = 2e-6


class SelfCheck:
    """Checks whether verdicts are possible now; `at_zero` is UTC at second 0 of `now`'s clock."""

    def __init__(self, settings: config.Detection, at_zero: datetime) -> None:
        self.is_disconnected = True
        self.alarm_due: float | None = None
        self._settings = settings
        self._at_zero = at_zero
        self.wall_zero = at_zero.timestamp()
        self._since: float | None = None
        self._alarmed = False
        self._promised: float | None = None
        self._called_at = 0.0
        self._stamped = 0.0

    def late_s(self, now: float) -> float:
        """Return how long our process was suspended; 0 if that is negligible."""
        if self._promised is None or self.is_disconnected:
            return 0.0
        late_s = now - max(self._promised, self._called_at)
        return late_s if late_s > self._settings.stall_s else 0.0

    def called(self, now: float, promised: float | None) -> None:
        """Record that we are running, and when we should be called next."""
        self._called_at, self._promised = now, promised

    def lost(self, now: float) -> None:
        """Record that our connection to NATS is down, or was never up."""
        self.is_disconnected = True
        if self._since is None:
            self._since = now
            self.alarm_due = now + self._settings.blind_s

    def alarm(self, now: float) -> list[signals.Output]:
        """Return the alarm about a long disconnection, if that alarm is due now."""
        if self.alarm_due is None or self.alarm_due > now:
            return []
        self.alarm_due, self._alarmed = None, True
        seconds = now - (now if self._since is None else self._since)
        summary = (
            f"health has been disconnected from NATS for {seconds:.0f} s; detection is suspended"
        )
        return [signals.Alarm(firing=True, summary=summary, seconds=seconds)]

    def back(self, at: datetime, now: float) -> tuple[float, list[signals.Output]]:
        """Record that our connection is up; return how long it was down, and the outputs."""
        seconds = 0.0 if self._since is None else now - self._since
        self.is_disconnected, self._since, self.alarm_due = False, None, None
        # someone may have set the wall clock meanwhile
        self._at_zero = at - timedelta(seconds=now)
        self.wall_zero = self._at_zero.timestamp()
        outs: list[signals.Output] = [
            signals.Noted(note=signals.Note.DISCONNECTED, seconds=seconds)
        ]
        if self._alarmed:
            self._alarmed = False
            summary = f"health is connected to NATS again after {seconds:.0f} s"
            outs.append(signals.Alarm(firing=False, summary=summary, seconds=seconds))
        return seconds, outs

    def at(self, now: float) -> datetime:
        """Return the UTC time, never the same twice, because it is part of an alert's identity."""
        self._stamped = max(now, self._stamped + _STAMP_S)
        return self._at_zero + timedelta(seconds=self._stamped)


class FleetClocks:
    """Counts the clocks that differ from ours, and decides whether ours is the wrong one."""

    def __init__(
        self, context: config.Context, plugins: Mapping[str, tracked_plugin.TrackedPlugin]
    ) -> None:
        self._context = context
        self._plugins = plugins
        self._skewed_keys: set[str] = set()
        self._skewed_nodes: Counter[str] = Counter()

    def compare(
        self, changed: tracked_plugin.TrackedPlugin
    ) -> list[tracked_plugin.TrackedPlugin] | None:
        """Record a clock's skew; if `is_our_clock_skewed` changes, return all skewed plugins."""
        self.forget(changed)
        if changed.clock.is_skewed:
            self._skewed_keys.add(changed.key)
            self._skewed_nodes[changed.node] += 1
        # the plugins of one node have one clock, and one sender
        are_many = len(self._skewed_nodes) > self._context.settings.storm_min
        is_ours = are_many and len(self._skewed_keys) > len(self._plugins) / 2
        if is_ours is self._context.is_our_clock_skewed:
            return None
        self._context.is_our_clock_skewed = is_ours
        return self._skewed

    def text(self) -> str:
        """Return how our clock is wrong; empty if it is not known to be wrong."""
        if not self._context.is_our_clock_skewed:
            return ""
        clocks = sorted((plugin.clock for plugin in self._skewed), key=lambda c: c.seconds)
        middle = clocks[len(clocks) // 2].text()
        skewed = f"{len(clocks)} of {len(self._plugins)} plugins have a skewed clock"
        return f"{skewed}; for the median plugin, {middle}"

    def forget(self, plugin: tracked_plugin.TrackedPlugin) -> None:
        """Stop counting the clock of a plugin."""
        if plugin.key not in self._skewed_keys:
            return
        self._skewed_keys.discard(plugin.key)
        self._skewed_nodes[plugin.node] -= 1
        if not self._skewed_nodes[plugin.node]:
            del self._skewed_nodes[plugin.node]

    @property
    def _skewed(self) -> list[tracked_plugin.TrackedPlugin]:
        return [self._plugins[key] for key in self._skewed_keys if key in self._plugins]
