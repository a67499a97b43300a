"""Pure: Every plugin of the fleet: inputs find their plugin, deadlines find theirs.

The detector distrusts itself first. While its own link to the bus is gone it is blind: nothing is
due. When the link is back every wait begins anew, and when its own clockwork stood still every
wait is longer by that, so that a bus that was away, or a busy host, convicts nobody.

It judges whether or not it leads, and tells only while it does. Who begins to lead is given first
what the former leader remembered, and tells the difference between that and what it knows.
"""

from collections.abc import Iterable
from datetime import datetime
from typing import Final, assert_never

from muster import vocabulary
from muster_health.fleet import (
    clock_skew,
    fleet_alerts,
    mass_failure,
    registry,
    self_check,
    startup_rate_limit,
    timer_queue,
)
from muster_health.fleet import remediation as fleet_remediation
from muster_health.model import alerts, config, signals, snapshot, steps
from muster_health.plugin import tracked_plugin

_POSITION_S: Final = 5.0
_TEND_S: Final = 1.0
_AHEAD_S: Final = 0.5
_AT_ONCE: Final = 1_000
_FLEET_DUE: Final = "fleet"
"""No plugin's key: those contain a dot."""
_POSITION_DUE: Final = "position"
_GREETINGS_DUE: Final = "greetings"
_NOT_EXPECTED: Final = (
    "it is silent, and not to be there any more: the node left, or is to have none"
)


class Detector:
    """A `muster.machine.Machine`. `at_zero` is UTC at second 0 of the receiver's clock.

    `leader` is the revision it leads under from the start, 0 where there is no lock.
    """

    def __init__(
        self,
        settings: config.Detection,
        *,
        runbook_url: str,
        at_zero: datetime,
        bounds: config.Bounds | None = None,
        remediation: config.Remediation | None = None,
        has_cluster: bool = False,
        leader: int | None = 0,
    ) -> None:
        self._settings = settings
        self._bounds = bounds or config.Bounds()
        self._around = config.Context(
            settings,
            self._bounds,
            runbook_url=runbook_url,
            has_cluster=has_cluster,
            leader=leader,
        )
        self._register = registry.Registry(self._around)
        self._sight = self_check.SelfCheck(settings, at_zero)
        self._deadlines = timer_queue.TimerQueue()
        self._fleet = fleet_alerts.FleetAlerts(self._around)
        self._weather = mass_failure.MassFailures(
            settings, self._register.dossiers, self._fleet.ended
        )
        self._clocks = clock_skew.FleetClocks(self._around, self._register.dossiers)
        self._cures = fleet_remediation.Remediator(remediation or config.Remediation())
        self._greetings = startup_rate_limit.StartupRateLimit()

    def receive(self, event: signals.Input, now: float) -> list[signals.Output]:
        """Take one input."""
        outs = self._wake(now)
        outs += self._take_input(event, now)
        self._sight.called(now, self.next_deadline())
        return outs

    def tick(self, now: float) -> list[signals.Output]:
        """Do what is due."""
        outs = self._wake(now)
        if self._sight.is_blind:
            outs += self._sight.alarm(now)
        else:
            for key in self._deadlines.due(now, most=_AT_ONCE):
                outs += self._due(key, now)
        promised = self.next_deadline()
        # what stays due waits for its turn, and nobody is late
        self._sight.called(now, promised if promised is None else max(promised, now))
        return outs

    def next_deadline(self) -> float | None:
        """Return when `tick` is next needed."""
        return self._sight.alarm_due if self._sight.is_blind else self._deadlines.earliest()

    def dossiers(self) -> Iterable[tracked_plugin.TrackedPlugin]:
        """Return what is known, plugin by plugin."""
        return self._register.dossiers.values()

    @property
    def storms(self) -> int:
        """Return how many storms there are."""
        return len(self._weather.storms.active)

    @property
    def suspects(self) -> int:
        """Return how many plugins are suspected of silence."""
        return self._weather.storms.suspects

    @property
    def held(self) -> int:
        """Return how many plugins have an alert that waits for its turn."""
        return len(self._fleet.held())

    @property
    def leader(self) -> int | None:
        """Return the revision it leads under; None while another one does."""
        return self._around.leader

    @property
    def is_blind(self) -> bool:
        """Tell whether it can hear nobody."""
        return self._sight.is_blind

    @property
    def position(self) -> int:
        """Return the last position in the stream of events that has been dealt with."""
        return self._fleet.position

    def fleet_alerts(self) -> tuple[vocabulary.AlertChanged, ...]:
        """Return the open alerts that concern no single plugin."""
        return self._fleet.view()

    # one input

    def _take_input(  # noqa: C901, PLR0911, PLR0912  # one line for each kind of input
        self, event: signals.Input, now: float
    ) -> list[signals.Output]:
        match event:
            case signals.Beat(heartbeat=beat):
                return self._hear(beat, now, self._sight.wall(now))
            case signals.Beats(heartbeats=beats):
                outs: list[signals.Output] = []
                wall = self._sight.wall(now)
                for beat in beats:
                    outs += self._hear(beat, now, wall)
                self._deadlines.follow(now + _AHEAD_S, self._actual)
                return outs
            case signals.FromPlugin():
                return self._report(event, now)
            case signals.ProbeAnswered(heartbeat=beat):
                found = self._register.find(beat.node, beat.plugin)
                if found is None:
                    return []
                return self._take(found, found.state.answered(beat, event.number, now), now)
            case (
                signals.ProbeFailed()
                | signals.ProbeInconclusive()
                | signals.ClusterAnswered()
                | signals.Connected()
                | signals.Disconnected()
            ):
                found = self._register.find(event.node, event.plugin)
                return [] if found is None else self._learn(found, event, now)
            case signals.Restored(state=known):
                if known.node == vocabulary.FLEET:
                    self._fleet.restore(known, now + self._grace_s)
                    self._deadlines.set(_FLEET_DUE, now + self._grace_s)
                    return []
                self._restore(known, now)
                return []
            case signals.BusLost():
                self._sight.lost(now)
                return []
            case signals.BusBack(at=at):
                return self._see_again(at, now)
            case signals.ServerEvent(server=server, what=what):
                self._fleet.server(server, what, now)
                return []
            case signals.ExpectedNodes():
                return self._expect(event, now)
            case signals.NodeOffers(node=node, offers=offers):
                for found in self._register.offer(node, offers, now):
                    self._deadlines.set(found.key, found.deadline())
                return []
            case signals.Leadership(revision=revision):
                return self._lead(revision, now)
            case signals.ClockStalled(seconds=seconds):
                return self._stand_still(seconds, now)
            case signals.Remediated():
                return self._remediated(event, now)
            case _:
                assert_never(event)

    def _hear(self, beat: vocabulary.Heartbeat, now: float, wall: float) -> list[signals.Output]:
        found = self._register.find_or_add(beat.node, beat.plugin, now)
        if found is None:
            return [signals.Noted(note=signals.Note.REFUSED)]
        state = found.state
        taken = state.hear(beat, now)
        if state.silence.heard_at == now:
            was_skewed = found.skew.is_skewed
            found.hear(beat, now, wall)
            if found.skew.is_skewed is not was_skewed:
                self._compare_clocks(found, now)
        if taken is None and not found.has_news(now):
            # as of nearly all beats: its next look is later now, and stays queued for before
            return []
        return self._take(found, taken or [], now)

    def _compare_clocks(self, changed: tracked_plugin.TrackedPlugin, now: float) -> None:
        """Take that a node's clock is apart from ours, or no more."""
        skewed = self._clocks.compare(changed)
        if skewed is not None:
            self._look_again(skewed, now)
            self._fleet.apart = self._clocks.words()
            self._deadlines.set(_FLEET_DUE, now + mass_failure.SOON_S)

    def _learn(
        self,
        found: tracked_plugin.TrackedPlugin,
        event: signals.ProbeFailed
        | signals.ProbeInconclusive
        | signals.ClusterAnswered
        | signals.Connected
        | signals.Disconnected,
        now: float,
    ) -> list[signals.Output]:
        state = found.state
        match event:
            case signals.ProbeFailed():
                taken = state.failed(event.number, now, subscribed=event.subscribed)
            case signals.ProbeInconclusive():
                taken = state.inconclusive(event.number, now)
            case signals.ClusterAnswered():
                self._cures.answered(found.key, event.number)
                taken = state.learned(event.facts, event.number, now)
                found.learned(event.facts, event.number, now)
            case signals.Connected():
                state.connected(event.server, event.client)
                taken = []
            case signals.Disconnected():
                taken = state.disconnected(event.server, event.client, event.reason, now)
            case _:
                assert_never(event)
        return self._take(found, taken, now)

    def _report(self, said: signals.FromPlugin, now: float) -> list[signals.Output]:
        event = said.event
        if said.position > self._fleet.position:
            self._fleet.position = said.position
            self._deadlines.set(_POSITION_DUE, now + _POSITION_S)
        if not isinstance(event, vocabulary.PluginEvent):
            return []
        found = self._register.find_or_add(event.node, event.plugin, now)
        if found is None:
            return [signals.Noted(note=signals.Note.REFUSED)]
        if not found.is_news(said.instance, said.sequence):
            return [signals.Noted(note=signals.Note.EVENT_STALE)]
        found.state.heard_of = True
        kept = found.report(event, now)
        outs: list[signals.Output] = [] if kept else [signals.Noted(note=signals.Note.REFUSED)]
        taken: list[steps.Step] = []
        match event:
            case vocabulary.PluginStopping():
                taken = found.state.goodbye(event, said.instance, now)
            case vocabulary.PluginDeregistered():
                taken = found.state.hint(event, now)
            case _:
                pass
        return [*outs, *self._take(found, taken, now)]

    def _restore(self, known: snapshot.Snapshot, now: float) -> None:
        found = self._register.find_or_add(known.node, known.plugin, now)
        if found is not None:
            at = self._sight.at(now)
            found.restore(known, now, at)
            times = (now - (at - acted).total_seconds() for acted in known.remedies)
            self._cures.restore(known.node, known.plugin, tuple(times))
            self._look_again(self._register.inhibit(found), now)
            self._deadlines.set(found.key, found.deadline())

    def _expect(self, event: signals.ExpectedNodes, now: float) -> list[signals.Output]:
        present, gone = self._register.expect(event.plugin, event.nodes, now)
        for found in present:
            self._deadlines.set(found.key, found.deadline())
        outs: list[signals.Output] = []
        for found in gone:
            found.state.expected, found.unwanted = False, True
            if not found.state.is_alive:
                outs += self._dismiss(found, _NOT_EXPECTED, now)
        return outs

    def _dismiss(
        self, found: tracked_plugin.TrackedPlugin, why: str, now: float
    ) -> list[signals.Output]:
        """Forget a plugin: what is open of it ends."""
        self._look_again(self._register.remove(found), now)
        self._weather.storms.cleared(found.key)
        self._clocks.forget(found.key)
        self._fleet.hold(found.key, ())
        return found.close(self._sight.at(now), why)

    def _look_again(self, changed: Iterable[tracked_plugin.TrackedPlugin], now: float) -> None:
        for other in changed:
            other.touch(now + mass_failure.SOON_S)
            self._deadlines.set(other.key, now + mass_failure.SOON_S)

    # one plugin

    def _take(
        self, found: tracked_plugin.TrackedPlugin, taken: Iterable[steps.Step], now: float
    ) -> list[signals.Output]:
        """Turn the steps of one plugin's machine into what is to be done."""
        outs: list[signals.Output] = []
        concluded = False
        for step in taken:
            match step:
                case signals.Noted():
                    outs.append(step)
                case steps.AskPlugin(number=number):
                    outs.append(self._probe(found, number))
                case steps.AskKubernetes(number=number):
                    outs.append(found.question(number))
                case steps.VerdictReached() | steps.VerdictConfirmed() | steps.ReturnOverdue():
                    concluded = True
                    found.decide(step, now, self._sight.at(now))
                case _:
                    assert_never(step)
        if self._is_held(found, now):
            asked = (signals.Probe, signals.AskCluster)
            outs = [out for out in outs if not isinstance(out, asked)]
            outs.append(signals.Noted(note=signals.Note.FROZEN))
        why = found.farewell(now, is_placed=self._register.is_placed(found.plugin))
        if why:
            return [*outs, *self._dismiss(found, why, now)]
        if concluded:
            self._look_again(self._register.inhibit(found), now)
        outs += self._commit(found, now)
        if self._cures.is_on:
            outs += self._cure(found, now)
        self._deadlines.set(found.key, found.deadline())
        return outs

    def _cure(self, found: tracked_plugin.TrackedPlugin, now: float) -> list[signals.Output]:
        leader = self._around.leader
        if leader is None:
            return []
        number = self._cures.asks(found, now)
        if number is not None:
            return [found.question(number)]
        storm = bool(self._weather.storms.active)
        return self._cures.decide(found, leader, now, self._sight.at(now), storm=storm)

    def _remediated(self, event: signals.Remediated, now: float) -> list[signals.Output]:
        found, leader = self._register.find(event.node, event.plugin), self._around.leader
        if found is None or leader is None:
            return []
        return self._cures.done(found, event, leader, self._sight.at(now))

    def _probe(self, found: tracked_plugin.TrackedPlugin, number: int) -> signals.Probe:
        return signals.Probe(
            node=found.node,
            plugin=found.plugin,
            number=number,
            timeout_s=self._settings.probe_timeout_s,
        )

    def _commit(self, found: tracked_plugin.TrackedPlugin, now: float) -> list[signals.Output]:
        if not found.has_news(now):
            return []
        if found.may_wait(now) and self._leads and self._greetings.must_wait(found.key, now):
            self._deadlines.set(_GREETINGS_DUE, self._greetings.due)
            return []
        return self._told(found, now)

    def _greet(self, now: float) -> list[signals.Output]:
        outs: list[signals.Output] = []
        for key in self._greetings.turn(now):
            found = self._register.dossiers.get(key)
            if found is not None and found.has_news(now):
                outs += self._told(found, now)
        self._deadlines.set(_GREETINGS_DUE, self._greetings.due)
        return outs

    def _told(self, found: tracked_plugin.TrackedPlugin, now: float) -> list[signals.Output]:
        def may_open(_: alerts.Key) -> bool:
            return self._register.spend(found.node, now)

        outs, held = found.commit(now, self._sight.at(now), may_open)
        if self._fleet.hold(found.key, held):
            outs += [signals.Noted(note=signals.Note.HELD) for _ in held]
            self._deadlines.set(_FLEET_DUE, now + mass_failure.SOON_S)
        return outs

    # all of them

    @property
    def _leads(self) -> bool:
        return self._around.leader is not None

    @property
    def _grace_s(self) -> float:
        beats_s = self._settings.suspicion_beats * self._settings.interval_s
        return self._settings.reconnect_s + beats_s

    def _due(self, key: str, now: float) -> list[signals.Output]:
        if key == _FLEET_DUE:
            return self._tend(now)
        if key == _POSITION_DUE:
            leader = self._around.leader
            moved = leader is not None and self._fleet.has_moved()
            return [self._fleet.remember(leader or 0)] if moved else []
        if key == _GREETINGS_DUE:
            return self._greet(now)
        found = self._register.dossiers.get(key)
        if found is None:
            return []
        due = found.deadline()
        if due is None or due > now:
            # a beat came since this was set
            self._deadlines.set(key, due)
            return []
        return self._take(found, found.state.tick(now), now)

    def _actual(self, key: str) -> float | None:
        found = self._register.dossiers.get(key)
        return None if found is None else found.deadline()

    def _is_held(self, found: tracked_plugin.TrackedPlugin, now: float) -> bool:
        """Tell whether a plugin is not to be judged, because many are suspect at once."""
        is_held, due = self._weather.holds(found, now)
        self._deadlines.set(_FLEET_DUE, due)
        return is_held

    def _tend(self, now: float) -> list[signals.Output]:
        """See after the fleet: storms that end, alerts that have their turn."""
        outs: list[signals.Output] = []
        for found in self._weather.tend(now):
            outs += self._take(found, found.state.thaw(now), now)
        for key in self._fleet.held():
            if not self._register.may_tell(now):
                break
            self._register.dossiers[key].touch(now)
            outs += self._commit(self._register.dossiers[key], now)
        plugins = len(self._register.dossiers)
        told, due = self._fleet.commit(self._weather.storms, plugins, now, self._sight.at(now))
        waits = [due, *self._weather.waits(now)]
        if self._fleet.held():
            waits.append(max(self._register.next_at(now), now + _TEND_S))
        for wait in waits:
            self._deadlines.set(_FLEET_DUE, wait)
        return [*outs, *told]

    def _lead(self, revision: int | None, now: float) -> list[signals.Output]:
        begins = self._around.leader is None
        self._around.leader = revision
        outs: list[signals.Output] = []
        for found in list(self._register.dossiers.values()):
            is_restored, found.is_restored = found.is_restored, False
            if revision is None:
                continue
            if begins and not is_restored:
                found.untell()
            found.touch(now)
            outs += self._commit(found, now)
            self._deadlines.set(found.key, found.deadline())
        if revision is not None:
            lasts = bool(self._weather.storms.active)
            self._deadlines.set(_FLEET_DUE, now + (0.0 if lasts else self._grace_s))
        return outs

    # ourselves

    def _wake(self, now: float) -> list[signals.Output]:
        """Notice that we were called later than we asked for."""
        late_s = self._sight.late_s(now)
        return self._stand_still(late_s, now) if late_s else []

    def _stand_still(self, seconds: float, now: float) -> list[signals.Output]:
        self._weather.storms.shift(seconds)
        for key, found in self._register.dossiers.items():
            if found.state.is_calm:
                # as nearly all; its deadline moved back, and stays queued
                found.state.shift(seconds, now)
                continue
            found.stood_still(seconds, now)
            self._is_held(found, now)
            self._deadlines.set(key, found.deadline())
        self._deadlines.set(_FLEET_DUE, now + 1.0)
        self._deadlines.set(_POSITION_DUE, now + _POSITION_S)
        self._deadlines.set(_GREETINGS_DUE, self._greetings.due)
        return [
            signals.Noted(note=signals.Note.STALLED, seconds=seconds),
            signals.Noted(note=signals.Note.REBASED),
        ]

    def _see_again(self, at: datetime, now: float) -> list[signals.Output]:
        paused_s, outs = self._sight.back(at, now)
        self._deadlines.clear()
        self._weather.clear()
        for key, found in self._register.dossiers.items():
            found.state.deaf(now, paused_s=paused_s, window_s=self._settings.reconnect_s)
            self._deadlines.set(key, found.deadline())
        self._deadlines.set(_FLEET_DUE, now + self._grace_s)
        self._deadlines.set(_POSITION_DUE, now + _POSITION_S)
        self._deadlines.set(_GREETINGS_DUE, self._greetings.due)
        return [*outs, signals.Noted(note=signals.Note.REBASED)]
