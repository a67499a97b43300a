"""Pure: the detector: dispatches inputs to the plugins' state machines, and calls each when due.

The detector first checks itself. While its own connection to NATS is down, nothing is due. When the
connection is back, all waits restart; when its own process was suspended, all waits are extended by
that time. So neither a NATS outage nor a busy host leads to a verdict.

The detector reaches verdicts whether or not it leads, but publishes only while it leads. A new
leader first restores the state that the previous leader saved, and publishes only the differences.
"""

from collections.abc import Collection, Iterable, Iterator
from datetime import datetime
from typing import Any, Final, assert_never

from muster import vocabulary
from muster_health.fleet import effects, verdict_series
from muster_health.model import limits, signals, snapshot, steps
from muster_health.plugin import tracked_plugin, watched_plugin

_POSITION_S: Final = 5.0
_FLEET_S: Final = 1.0
_AHEAD_S: Final = 0.5
_DUE_AT_ONCE: Final = 1_000
_POSITION_DUE: Final = "position"
_NOT_EXPECTED: Final = (
    "no heartbeat, and no longer expected: the node was removed or is no longer selected"
)
_NOT_IN_CLUSTER: Final = "the cluster has no node of this name"


class Detector(effects.Fleet):
    """The detector of failed plugins in the whole fleet, as a `muster.machine.Machine`.

    `at_zero` is UTC at second 0 of `now`'s clock. `leader` is the revision under which the
    detector leads from the start: 0 without leader election, None if it does not lead yet.
    """

    def receive(self, event: signals.Input, now: float) -> list[signals.Output]:
        """Handle one input."""
        outs = self._wake(now)
        outs += self._route(event, now)
        self._self_check.called(now, self.next_deadline())
        return outs

    def tick(self, now: float) -> list[signals.Output]:
        """Perform the actions whose deadline has passed, up to a maximum number."""
        outs = self._wake(now)
        if self._self_check.is_disconnected:
            outs += self._self_check.alarm(now)
        else:
            for key in self._timers.due(now, most=_DUE_AT_ONCE):
                outs += self._due(key, now)
        promised = self.next_deadline()
        # keys that are still due wait for their turn; this is not counted as a delay of our process
        self._self_check.called(now, promised if promised is None else max(promised, now))
        return outs

    def next_deadline(self) -> float | None:
        """Return the time at which `tick` must be called next; None if nothing is planned."""
        check = self._self_check
        return check.alarm_due if check.is_disconnected else self._timers.earliest()

    def plugins(self) -> Iterable[tracked_plugin.TrackedPlugin]:
        """Return all tracked plugins."""
        return self._registry.plugins.values()

    def reached(self) -> Iterator[verdict_series.Reached]:
        """Yield the verdict on each tracked plugin."""
        for plugin in self._registry.plugins.values():
            yield verdict_series.Reached(
                plugin.node, plugin.plugin, plugin.current_verdict, plugin.publication.since
            )

    def shown_plugins(self, now: float, nodes: Iterable[str]) -> Iterable[dict[str, Any]]:
        """Yield the `/state` entry of each plugin on these nodes."""
        for plugin in self._registry.plugins_on(nodes):
            shown = plugin.shown(now)
            if isinstance(plugin, watched_plugin.WatchedPlugin):
                shown["observed"] = not plugin.agent or self._is_observed(plugin)
            yield shown

    def shown(self) -> dict[str, object]:
        """Return the entries of `/state` about the whole fleet."""
        return {
            "alerts": list(self.fleet_alerts()),
            "storms": len(self._suspensions.active),
            "suspects": len(self._suspensions.suspects),
            "held": len(self._fleet.held),
        }

    def suspicions(self) -> tuple[int, int]:
        """Return the numbers of current mass failures and of suspected plugins."""
        return len(self._suspensions.active), len(self._suspensions.suspects)

    @property
    def leader(self) -> int | None:
        """Return the revision under which this process leads; None while it does not lead."""
        return self._context.leader

    @property
    def is_disconnected(self) -> bool:
        """Return whether our own connection to NATS is down."""
        return self._self_check.is_disconnected

    @property
    def position(self) -> int:
        """Return the last processed position in the stream of events."""
        return self._fleet.position

    def nodes(self) -> tuple[int, Collection[str]]:
        """Return a number that changes when a node is added or removed, and all nodes."""
        return self._registry.version, self._registry.nodes.keys()

    def fleet_alerts(self) -> tuple[vocabulary.AlertChanged, ...]:
        """Return the open alerts about the whole fleet."""
        return self._fleet.view()

    # one input

    def _route(  # noqa: C901, PLR0912  # one case for each kind of event
        self, event: signals.Input, now: float
    ) -> list[signals.Output]:
        outs: list[signals.Output] = []
        match event:
            case signals.HeartbeatArrived(heartbeat=heartbeat):
                outs = self._heartbeat(heartbeat, now)
            case signals.HeartbeatsArrived(heartbeats=heartbeats):
                for heartbeat in heartbeats:
                    outs += self._heartbeat(heartbeat, now)
                self._timers.follow(now + _AHEAD_S, self._actual)
            case signals.FromPlugin():
                outs = self._event(event, now)
            case signals.ProbeAnswered(heartbeat=heartbeat):
                outs = self._hand_on(heartbeat.node, heartbeat.plugin, event, now)
            case (
                signals.ProbeFailed()
                | signals.ProbeInconclusive()
                | signals.ClusterAnswered()
                | signals.Connected()
                | signals.Disconnected()
            ):
                outs = self._hand_on(event.node, event.plugin, event, now)
            case signals.Restored(state=before):
                outs = self._restore(event, before, now)
            case signals.BusLost():
                self._self_check.lost(now)
            case signals.BusBack(at=at):
                outs = self._reconnected(at, now)
            case signals.ServerEvent(server=server, what=what):
                self._fleet.server(server, what, now)
            case signals.ClusterObserved():
                outs = self._cluster_observed(event, now)
            case signals.ExpectedNodes():
                outs = self._expected(event, now)
            case signals.NodeOffers():
                for plugin in self._registry.offer(event, now):
                    if event.offers is None:
                        self._suspensions.gone(plugin.key, now)
                    self._reschedule(plugin)
            case signals.NodesListed():
                for plugin in self._registry.mark_nodes_complete():
                    outs += self._remove(plugin, _NOT_IN_CLUSTER, now)
            case signals.Leadership(revision=revision):
                outs = self._lead(revision, now)
            case signals.ClockStalled(seconds=seconds):
                outs = self._clock_stalled(seconds, now)
            case limits.NodeNoisy():
                self._noisy(event, now)
            case signals.StreamsChecked(early=early):
                if self._fleet.evictions != early:
                    self._fleet.evictions = early
                    self._timers.set(effects.FLEET_DUE, now)
            case signals.Remediated():
                outs = self._remediated(event, now)
            case _:
                assert_never(event)
        return outs

    def _heartbeat(self, heartbeat: vocabulary.Heartbeat, now: float) -> list[signals.Output]:
        plugin = self._find(heartbeat.node, heartbeat.plugin)
        if plugin is None:
            added = self._registry.find_or_add(heartbeat.node, heartbeat.plugin, now)
            if isinstance(added, limits.Refusal):
                return [signals.refused(added, heartbeat.node)]
            held = self._release(added, now)
            return [*held, *self._act(added, added.receive(heartbeat, now), now)]
        returned = plugin.receive(heartbeat, now)
        # nearly always there are no effects: the deadline is later, and its old entry stays queued
        return self._act(plugin, returned, now) if returned else []

    def _find(self, node: str, name: str) -> tracked_plugin.TrackedPlugin | None:
        # the same as `Registry.find`, but without another call for each heartbeat
        home = self._registry.nodes.get(node)
        if home is not None:
            for plugin in home.plugins:
                if plugin.plugin == name:
                    return plugin
        return None

    def _event(self, reported: signals.FromPlugin, now: float) -> list[signals.Output]:
        event = reported.event
        if reported.position > self._fleet.position:
            self._fleet.position = reported.position
            self._timers.set(_POSITION_DUE, now + _POSITION_S)
        if not isinstance(event, vocabulary.PluginEvent):
            return []
        plugin, outs = self._find(event.node, event.plugin), list[signals.Output]()
        if plugin is None:
            added: tracked_plugin.TrackedPlugin | limits.Refusal | None
            if isinstance(event, vocabulary.InventoryReported):
                added = self._registry.hold(event.node, event.plugin, reported)
            else:
                added = self._registry.find_or_add(event.node, event.plugin, now)
            if not isinstance(added, tracked_plugin.TrackedPlugin):
                return [] if added is None else [signals.refused(added, event.node)]
            plugin, outs = added, self._release(added, now)
        returned = plugin.receive(reported, now)
        outs += self._act(plugin, returned, now)
        for effect in returned:
            if isinstance(effect, steps.WatchedReported):
                outs += self._follow_watched(plugin, effect, now)
        return outs

    def _release(self, plugin: tracked_plugin.TrackedPlugin, now: float) -> list[signals.Output]:
        held = self._registry.release(plugin)
        return [] if held is None else self._event(held, now)

    def _cluster_observed(self, event: signals.ClusterObserved, now: float) -> list[signals.Output]:
        name = event.watched.name
        known = self._registry.find(event.node, vocabulary.watched_plugin(name))
        if known is None and event.watched.finding is vocabulary.WatchedFinding.NONE:
            return []
        plugin = self._registry.find_or_watch(event.node, name, now)
        if isinstance(plugin, limits.Refusal):
            return [signals.refused(plugin, event.node)]
        observed = steps.Observed(watched=event.watched, agent="")
        return self._act(plugin, plugin.receive(observed, now), now)

    def _hand_on(
        self, node: str, name: str, event: steps.Event, now: float
    ) -> list[signals.Output]:
        plugin = self._registry.find(node, name)
        if plugin is None:
            return []
        if isinstance(event, signals.ClusterAnswered):
            self._remediator.answered(plugin.key, event.number)
        return self._act(plugin, plugin.receive(event, now), now)

    def _restore(
        self, event: signals.Restored, before: snapshot.Snapshot, now: float
    ) -> list[signals.Output]:
        if before.node == vocabulary.FLEET:
            self._fleet.restore(before, now + self._settle_s)
            self._timers.set(effects.FLEET_DUE, now + self._settle_s)
            return []
        if before.watched is None:
            plugin = self._registry.find_or_add(before.node, before.plugin, now)
        else:
            name = before.watched.name
            plugin = self._registry.find_or_watch(before.node, name, now, is_restored=True)
        if isinstance(plugin, limits.Refusal):
            return [signals.refused(plugin, before.node)]
        plugin.receive(event, now)
        wall = self._context.wall_zero + now
        times = tuple(now - (wall - acted.timestamp()) for acted in before.remedies)
        self._remediator.restore(before.node, before.plugin, times)
        self._evaluate_soon(self._registry.inhibit(plugin), now)
        self._reschedule(plugin)
        return []

    def _expected(self, event: signals.ExpectedNodes, now: float) -> list[signals.Output]:
        present, gone = self._registry.expect(event.plugin, event.nodes, now)
        outs: list[signals.Output] = []
        for plugin in present:
            outs += self._release(plugin, now)
            self._reschedule(plugin)
        for plugin in gone:
            plugin.receive(steps.NotExpected(), now)
            if not plugin.is_alive:
                outs += self._remove(plugin, _NOT_EXPECTED, now)
        return outs

    # all plugins

    @property
    def _settle_s(self) -> float:
        """Return how long plugins may take to reconnect and send a heartbeat."""
        silent_s = self._settings.suspicion_beats * self._settings.interval_s
        return self._settings.reconnect_s + silent_s

    def _due(self, key: str, now: float) -> list[signals.Output]:
        if key == effects.FLEET_DUE:
            return self._fleet_due(now)
        if key == _POSITION_DUE:
            leader = self._context.leader
            has_moved = leader is not None and self._fleet.has_moved()
            return [self._fleet.store(leader or 0)] if has_moved else []
        if key == effects.STARTUP_DUE:
            return self._startup_due(now)
        plugin = self._registry.plugins.get(key)
        if plugin is None:
            return []
        due = plugin.next_deadline()
        if due is None or due > now:
            # a heartbeat has arrived since the timer was set
            self._timers.set(key, due)
            return []
        return self._act(plugin, plugin.tick(now), now)

    def _actual(self, key: str) -> float | None:
        plugin = self._registry.plugins.get(key)
        return None if plugin is None else plugin.next_deadline()

    def _startup_due(self, now: float) -> list[signals.Output]:
        outs: list[signals.Output] = []
        for key in self._startup.turn(now):
            plugin = self._registry.plugins.get(key)
            if plugin is not None and plugin.has_news(now):
                outs += self._publish_now(plugin, now)
        self._timers.set(effects.STARTUP_DUE, self._startup.due)
        return outs

    def _fleet_due(self, now: float) -> list[signals.Output]:
        """Resume suspended plugins, open delayed alerts, and update the alerts of the fleet."""
        outs: list[signals.Output] = []
        resumed, asked = self._suspensions.turn(now)
        for plugin in resumed:
            outs += self._act(plugin, plugin.receive(steps.Resume(), now), now)
        outs += [plugin.verdict.ask_while_suspended() for plugin in asked]
        for key in self._fleet.held_keys():
            if not self._registry.may_open(now):
                break
            self._registry.plugins[key].touch(now)
            outs += self._publish(self._registry.plugins[key], now)
        plugins = len(self._registry.plugins)
        at = self._self_check.at(now)
        published, due = self._fleet.commit(self._suspensions.counts, plugins, now, at)
        dues = [due, *self._suspensions.dues(now)]
        if self._fleet.held:
            dues.append(max(self._registry.next_open_at(now), now + _FLEET_S))
        for each in dues:
            self._timers.set(effects.FLEET_DUE, each)
        return [*outs, *published]

    def _lead(self, revision: int | None, now: float) -> list[signals.Output]:
        begins = self._context.leader is None
        self._context.leader = revision
        outs: list[signals.Output] = []
        for plugin in list(self._registry.plugins.values()):
            is_restored, plugin.is_restored = plugin.is_restored, False
            if revision is None:
                continue
            if begins and not is_restored:
                plugin.reset_published()
            plugin.touch(now)
            outs += self._publish(plugin, now)
            self._reschedule(plugin)
        if revision is not None:
            lasts = bool(self._suspensions.active)
            self._timers.set(effects.FLEET_DUE, now + (0.0 if lasts else self._settle_s))
        return outs

    # health itself

    def _wake(self, now: float) -> list[signals.Output]:
        """If we were called later than requested, extend all waits by that delay."""
        late_s = self._self_check.late_s(now)
        return self._clock_stalled(late_s, now) if late_s else []

    def _clock_stalled(self, seconds: float, now: float) -> list[signals.Output]:
        self._suspensions.shift(seconds)
        event = signals.ClockStalled(seconds=seconds)
        for plugin in self._registry.plugins.values():
            if plugin.receive(event, now):
                self._is_suspended(plugin, now)
                self._reschedule(plugin)
        self._timers.set(effects.FLEET_DUE, now + _FLEET_S)
        self._reset_timers(now)
        return [
            signals.Noted(note=signals.Note.STALLED, seconds=seconds),
            signals.Noted(note=signals.Note.WAITS_RESTARTED),
        ]

    def _reconnected(self, at: datetime, now: float) -> list[signals.Output]:
        paused_s, outs = self._self_check.back(at, now)
        self._context.wall_zero = self._self_check.wall_zero
        self._timers.clear()
        self._suspensions.clear(now)
        event = steps.Reconnected(window_s=self._settings.reconnect_s, paused_s=paused_s)
        for plugin in self._registry.plugins.values():
            plugin.receive(event, now)
            self._reschedule(plugin)
        self._timers.set(effects.FLEET_DUE, now + self._settle_s)
        self._reset_timers(now)
        return [*outs, signals.Noted(note=signals.Note.WAITS_RESTARTED)]

    def _reset_timers(self, now: float) -> None:
        self._timers.set(_POSITION_DUE, now + _POSITION_S)
        self._timers.set(effects.STARTUP_DUE, self._startup.due)
