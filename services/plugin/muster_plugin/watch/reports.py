"""Pure: stores the finding about every watched plugin, and decides which changes to publish.

A process on the node can fake plugins by creating and removing sockets. The number of watched
plugins and the rate of changes are therefore limited: a node that publishes too much is cut off
from the bus. Plugins in `watch.expect` come first, then those whose devices are listed or expected.
"""

from collections.abc import Mapping
from typing import Final

import msgspec

from muster import pacing, vocabulary
from muster_plugin.watch import finding, observation

FactsByName = dict[str, tuple[finding.Facts, vocabulary.Watched]]
_NONE: Final = vocabulary.WatchedFinding.NONE
_PER_S: Final = 20.0
_BURST: Final = 2 * vocabulary.WATCHED_MAX


class _Plugin:
    """One watched plugin: its finding, and its last published state."""

    def __init__(self, holds: finding.Holds) -> None:
        self.machine = finding.FindingMachine(holds)
        self.watched: vocabulary.Watched | None = None
        self.published: vocabulary.Watched | None = None
        self.due_at = 0.0
        """When the next change may be published."""


class Reports:
    """All watched plugins; at most one change of each is published in `period_s`."""

    def __init__(
        self, expect: Mapping[str, int], holds: finding.Holds, *, period_s: float, now: float
    ) -> None:
        self.left_out = 0
        """How many plugins are not watched because there are too many."""
        self._expect = expect
        self._holds = holds
        self._period_s = period_s
        self._plugins: dict[str, _Plugin] = {}
        self._changes = pacing.TokenBucket(per_s=_PER_S, burst=_BURST, now=now)

    @property
    def watched(self) -> tuple[vocabulary.Watched, ...]:
        """All watched plugins, at most WATCHED_MAX: those with a finding first."""
        known = [plugin.watched for plugin in self._plugins.values() if plugin.watched is not None]
        known.sort(key=lambda each: (each.finding is _NONE, each.name))
        return tuple(known[: vocabulary.WATCHED_MAX])

    def update(
        self, facts: FactsByName, now: float
    ) -> tuple[list[observation.Action], list[float]]:
        """Evaluate the facts about all plugins; return the changes, and when to call this again."""
        ranked = sorted(facts, key=lambda name: self._rank(name, facts[name][1]))
        watched = ranked[: vocabulary.WATCHED_MAX]
        self.left_out = len(ranked) - len(watched)
        actions = self._forget_all_but(frozenset(watched), now)
        deadlines = [self._changes.ready_at(now)] if len(self._plugins) > len(watched) else []
        for name in watched:
            plugin = self._plugins.setdefault(name, _Plugin(self._holds))
            deadlines += self._observe(plugin, *facts[name], now)
            if plugin.watched is None or plugin.watched == plugin.published:
                continue
            if now >= plugin.due_at and self._changes.try_take(now):
                plugin.published, plugin.due_at = plugin.watched, now + self._period_s
                actions.append(observation.Change(plugin.watched))
            else:
                deadlines.append(max(plugin.due_at, self._changes.ready_at(now)))
        return actions, deadlines

    def _rank(self, name: str, watched: vocabulary.Watched) -> tuple[bool, bool, bool, str]:
        """Return a sort key: first those in `expect`, then with devices, then already watched."""
        is_offered = bool(watched.listed or watched.expected)
        return name not in self._expect, not is_offered, name not in self._plugins, name

    def _forget_all_but(self, kept: frozenset[str], now: float) -> list[observation.Action]:
        """Stop watching plugins not in `kept`, within the rate limit; return the changes."""
        actions: list[observation.Action] = []
        for name in sorted(self._plugins.keys() - kept):
            gone = self._plugins[name].published
            if gone is not None:
                if not self._changes.try_take(now):
                    break
                cleared = msgspec.structs.replace(gone, finding=_NONE, text="")
                actions.append(observation.Change(cleared, gone=True))
            del self._plugins[name]
        return actions

    def _observe(
        self, plugin: _Plugin, facts: finding.Facts, watched: vocabulary.Watched, now: float
    ) -> list[float]:
        """Update a plugin's finding; return when the next update is due; empty if none is."""
        machine = plugin.machine
        machine.observe(facts, now)
        plugin.watched = msgspec.structs.replace(
            watched, finding=machine.finding, text=machine.text
        )
        due_at = machine.next_deadline()
        return [] if due_at is None else [due_at]
