"""Pure. Every plugin of the fleet: inputs find their plugin, deadlines find theirs.

The detector distrusts itself first. While its own link to the bus is gone it is blind: nothing is
due. When the link is back every wait begins anew, and when its own clockwork stood still every
wait is longer by that, so that a bus that was away, or a busy host, convicts nobody.

It judges whether or not it leads, and tells only while it does. Who begins to lead is given first
what the former leader remembered, and tells the difference between that and what it knows.
"""

from collections.abc import Iterable, Mapping
from datetime import datetime, timedelta
from typing import Final, assert_never

from muster import vocabulary
from muster.vocabulary import Verdict
from muster_health import (
    budget,
    config,
    deadlines,
    dossier,
    facts,
    fleet,
    remedy,
    signals,
    snapshot,
    steps,
    storm,
)

_STAMP_S: Final = 2e-6
_POSITION_S: Final = 5.0
_TEND_S: Final = 1.0
_SOON_S: Final = 0.05
"""For what one plugin's input means for others: later than now, so that `tick` comes to an end."""
_ANSWERED: Final = -1
"""Instead of the number of a question for a plugin's pods."""
_FLEET_DUE: Final = "fleet"
"""No plugin's key: those contain a dot."""
_POSITION_DUE: Final = "position"


class Node:
    """What is kept of one node: its plugins, and what it offers."""

    __slots__ = ("bucket", "offers", "plugins")

    def __init__(self) -> None:
        self.plugins: dict[str, dossier.Dossier] = {}
        self.offers: Mapping[str, facts.Offer] | None = None
        self.bucket: budget.Bucket | None = None


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
        self._around = dossier.Around(
            settings,
            self._bounds,
            runbook_url=runbook_url,
            has_cluster=has_cluster,
            leader=leader,
        )
        self._at_zero = at_zero
        self._wall_zero = at_zero.timestamp()
        self._dossiers: dict[str, dossier.Dossier] = {}
        self._nodes: dict[str, Node] = {}
        self._expected: dict[str, Mapping[str, facts.Expected]] = {}
        self._deadlines = deadlines.Deadlines()
        self._storms = storm.Storms(settings)
        self._fleet = fleet.Fleet(self._around)
        self._remedies = remedy.Remedies(remediation or config.Remediation())
        self._bucket: budget.Bucket | None = None
        self._leftover: list[str] = []
        self._inquired: dict[str, int] = {}
        self._blind = True
        self._blind_since: float | None = None
        self._alarm_due: float | None = None
        self._alarmed = False
        self._promised: float | None = None
        self._called_at = 0.0
        self._stamped = 0.0

    def receive(self, event: signals.Input, now: float) -> list[signals.Output]:
        """Take one input."""
        outs = self._wake(now)
        outs += self._take_input(event, now)
        self._sleep(now)
        return outs

    def tick(self, now: float) -> list[signals.Output]:
        """Do what is due."""
        outs = self._wake(now)
        if self._blind:
            outs += self._alarm(now)
        else:
            for key in self._deadlines.due(now):
                outs += self._due(key, now)
        self._sleep(now)
        return outs

    def next_deadline(self) -> float | None:
        """Return when `tick` is next needed."""
        return self._alarm_due if self._blind else self._deadlines.earliest()

    def dossiers(self) -> Iterable[dossier.Dossier]:
        """Return what is known, plugin by plugin."""
        return self._dossiers.values()

    @property
    def storms(self) -> int:
        """Return how many storms there are."""
        return len(self._storms.active)

    @property
    def suspects(self) -> int:
        """Return how many plugins are suspected of silence."""
        return self._storms.suspects

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
        return self._blind

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
                return self._hear(beat, now)
            case signals.FromPlugin():
                return self._report(event, now)
            case signals.ProbeAnswered(heartbeat=beat):
                found = self._dossiers.get(dossier.key_of(beat.node, beat.plugin))
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
                found = self._dossiers.get(dossier.key_of(event.node, event.plugin))
                return [] if found is None else self._learn(found, event, now)
            case signals.Restored(state=known):
                if known.node == vocabulary.FLEET:
                    self._fleet.restore(known, now + self._grace_s)
                    self._deadlines.set(_FLEET_DUE, now + self._grace_s)
                    return []
                self._restore(known, now)
                return []
            case signals.BusLost():
                return self._lose_sight(now)
            case signals.BusBack(at=at):
                return self._see_again(at, now)
            case signals.ServerEvent(server=server, what=what):
                self._fleet.server(server, what, now)
                return []
            case signals.ExpectedNodes():
                return self._expect(event, now)
            case signals.NodeOffers(node=node, offers=offers):
                self._offer(node, offers)
                return []
            case signals.Leadership(revision=revision):
                return self._lead(revision, now)
            case signals.ClockStalled(seconds=seconds):
                return self._stand_still(seconds, now)
            case signals.Remediated():
                return self._remediated(event, now)
            case _:
                assert_never(event)

    def _hear(self, beat: vocabulary.Heartbeat, now: float) -> list[signals.Output]:
        found = self._dossier(beat.node, beat.plugin, now)
        if found is None:
            return [signals.Noted(note=signals.Note.REFUSED)]
        taken = found.state.hear(beat, now)
        if found.state.silence.heard_at == now:
            found.hear(beat, self._wall_zero + now)
        if not taken and found.state.is_calm and not found.has_news(now):
            # as nearly all beats: all that changed is when it is looked at again, to be later
            return []
        return self._take(found, taken, now)

    def _learn(
        self,
        found: dossier.Dossier,
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
                if self._inquired.get(found.key) == event.number:
                    self._inquired[found.key] = _ANSWERED
                taken = state.learned(event.facts, event.number, now)
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
        found = self._dossier(event.node, event.plugin, now)
        if found is None:
            return [signals.Noted(note=signals.Note.REFUSED)]
        if not found.is_news(said.instance, said.sequence):
            return [signals.Noted(note=signals.Note.EVENT_STALE)]
        found.state.heard_of = True
        kept = found.report(event)
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
        found = self._dossier(known.node, known.plugin, now)
        if found is not None:
            found.restore(known, now)
            self._deadlines.set(found.key, found.deadline())

    def _expect(self, event: signals.ExpectedNodes, now: float) -> list[signals.Output]:
        before = self._expected.get(event.plugin, {})
        self._expected[event.plugin] = event.nodes
        outs: list[signals.Output] = []
        for node, expected in event.nodes.items():
            found = self._dossier(node, event.plugin, now)
            if found is not None:
                found.causes = _causes(expected)
                found.state.expect(expected.age_s, now)
                self._deadlines.set(found.key, found.deadline())
        for node in before.keys() - event.nodes.keys():
            outs += self._unexpect(dossier.key_of(node, event.plugin), now)
        return outs

    def _unexpect(self, key: str, now: float) -> list[signals.Output]:
        found = self._dossiers.get(key)
        if found is None:
            return []
        found.state.expected = False
        if found.state.is_alive:
            return []
        del self._dossiers[key]
        node = self._nodes[found.node]
        del node.plugins[found.plugin]
        if not node.plugins:
            del self._nodes[found.node]
        self._storms.cleared(key)
        self._fleet.hold(key, ())
        why = "silent, and no longer expected: the node left, or is to have no plugin"
        return found.close(self._at(now), why)

    def _offer(self, name: str, offers: Mapping[str, facts.Offer] | None) -> None:
        node = self._nodes.setdefault(name, Node())
        node.offers = offers
        if offers is None and not node.plugins:
            del self._nodes[name]
        for found in node.plugins.values():
            found.state.offers = offers

    # one plugin

    def _dossier(self, node: str, plugin: str, now: float) -> dossier.Dossier | None:
        """Return what is known of a plugin, new if need be; None if its node has too many."""
        home = self._nodes.get(node)
        if home is None:
            home = self._nodes[node] = Node()
        found = home.plugins.get(plugin)
        if found is not None:
            return found
        if len(home.plugins) >= self._bounds.plugins_per_node:
            return None
        found = dossier.Dossier(node, plugin, self._around, now=now)
        found.state.offers = home.offers
        self._dossiers[found.key] = home.plugins[plugin] = found
        return found

    def _take(
        self, found: dossier.Dossier, taken: Iterable[steps.Step], now: float
    ) -> list[signals.Output]:
        """Turn the steps of one plugin's machine into what is to be done."""
        outs: list[signals.Output] = []
        concluded = False
        for step in taken:
            match step:
                case signals.Noted():
                    outs.append(step)
                case steps.Question(number=number):
                    outs.append(self._probe(found, number))
                case steps.Inquiry(number=number):
                    outs.append(self._ask_cluster(found, number))
                case steps.Conclusion() | steps.Confirmed() | steps.Overdue():
                    concluded = True
                    found.decide(step, now, self._at(now))
                case _:
                    assert_never(step)
        if self._weather(found, now):
            asked = (signals.Probe, signals.AskCluster)
            outs = [out for out in outs if not isinstance(out, asked)]
            outs.append(signals.Noted(note=signals.Note.FROZEN))
        if concluded:
            self._inhibit(found, now)
        outs += self._commit(found, now)
        if self._remedies.mode is not config.Remedies.OFF:
            outs += self._consider(found, now)
        self._deadlines.set(found.key, found.deadline())
        return outs

    def _consider(self, found: dossier.Dossier, now: float) -> list[signals.Output]:
        """Restart a plugin that a new process may mend, or say why not."""
        leader = self._around.leader
        if leader is None or not found.needs_remedy():
            self._inquired.pop(found.key, None)
            return []
        number = self._inquired.get(found.key)
        if number is None:
            number = found.state.inquire().number
            self._inquired[found.key] = number
            return [self._ask_cluster(found, number)]
        if number != _ANSWERED:
            return []
        del self._inquired[found.key]
        storm = bool(self._storms.active)
        chosen = self._remedies.choose(found.node, found.state.pods, now, storm=storm)
        before = found.remedied(leader)
        if isinstance(chosen, remedy.Refused):
            refused = vocabulary.Remedy.REFUSED
            at = self._at(now)
            return [before, found.decided(refused, chosen.reason, "", at=at, leader=leader)]
        act = signals.Remediate(
            node=found.node,
            plugin=found.plugin,
            pod=chosen.name,
            uid=chosen.uid,
            reason=f"{found.state.verdict}: {found.state.rule}",
            dry_run=self._remedies.mode is config.Remedies.DRY_RUN,
        )
        return [before, act]

    def _remediated(self, event: signals.Remediated, now: float) -> list[signals.Output]:
        found = self._dossiers.get(dossier.key_of(event.node, event.plugin))
        leader = self._around.leader
        if found is None or leader is None:
            return []
        dry = self._remedies.mode is config.Remedies.DRY_RUN
        done = vocabulary.Remedy.DRY_RUN if dry else vocabulary.Remedy.ACTED
        outcome = vocabulary.Remedy.FAILED if event.error else done
        reason = event.error or ("the pod would be deleted" if dry else "the pod was deleted")
        return [found.decided(outcome, reason, event.pod, at=self._at(now), leader=leader)]

    def _probe(self, found: dossier.Dossier, number: int) -> signals.Probe:
        return signals.Probe(
            node=found.node,
            plugin=found.plugin,
            number=number,
            timeout_s=self._settings.probe_timeout_s,
        )

    def _ask_cluster(self, found: dossier.Dossier, number: int) -> signals.AskCluster:
        return signals.AskCluster(
            node=found.node,
            plugin=found.plugin,
            number=number,
            timeout_s=self._settings.probe_timeout_s,
        )

    def _commit(self, found: dossier.Dossier, now: float) -> list[signals.Output]:
        if not found.has_news(now):
            return []

        def may_open() -> bool:
            return self._spend(found.node, now)

        outs, held = found.commit(now, self._at(now), may_open)
        if self._fleet.hold(found.key, held):
            outs += [signals.Noted(note=signals.Note.HELD) for _ in held]
            self._deadlines.set(_FLEET_DUE, now + _SOON_S)
        return outs

    def _inhibit(self, changed: dossier.Dossier, now: float) -> None:
        """Let one alert say that a node is down, for all its plugins."""
        plugins = self._nodes[changed.node].plugins
        if len(plugins) == 1:
            return
        down = [n for n, found in sorted(plugins.items()) if _is_down(found)]
        for name, found in plugins.items():
            inhibited = bool(down) and name != down[0]
            if inhibited is not found.inhibited:
                found.inhibited = inhibited
                found.touch(now + _SOON_S)
                self._deadlines.set(found.key, now + _SOON_S)

    def _spend(self, name: str, now: float) -> bool:
        """Tell whether one more alert may open now, and count it."""
        if self._bucket is None:
            self._bucket = budget.Bucket(self._bounds.alerts_per_minute, now)
        node = self._nodes[name]
        if node.bucket is None:
            node.bucket = budget.Bucket(self._bounds.alerts_per_node_minute, now)
        if not (self._bucket.has(now) and node.bucket.has(now)):
            return False
        self._bucket.take()
        node.bucket.take()
        return True

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
        found = self._dossiers.get(key)
        if found is None:
            return []
        due = found.deadline()
        if due is None or due > now:
            # a beat came since this was set
            self._deadlines.set(key, due)
            return []
        return self._take(found, found.state.tick(now), now)

    def _weather(self, found: dossier.Dossier, now: float) -> bool:
        """Watch who becomes suspect; return whether this one has just been frozen."""
        key = found.key
        if not found.state.is_silent:
            self._storms.cleared(key)
            return False
        server = found.state.link.server
        causes = (*found.causes, f"server={server}") if server else found.causes
        self._storms.suspected(key, causes, now)
        began, over = self._storms.update(len(self._dossiers), now)
        for new in began:
            for member in new.members:
                self._dossiers[member].state.freeze()
        if began or over:
            self._deadlines.set(_FLEET_DUE, now + _SOON_S)
        for ended in over:
            self._fleet.ended(ended, now)
            self._leftover += [left for left in ended.left if not self._storms.holds(left)]
        if self._storms.holds(key) and not found.state.is_frozen:
            found.state.freeze()
        return found.state.is_frozen

    def _tend(self, now: float) -> list[signals.Output]:
        """See after the fleet: storms that end, alerts that have their turn."""
        _, over = self._storms.update(len(self._dossiers), now)
        for ended in over:
            self._fleet.ended(ended, now)
            self._leftover += [left for left in ended.left if not self._storms.holds(left)]
        outs: list[signals.Output] = []
        left, self._leftover = self._leftover, []
        for key in left:
            found = self._dossiers.get(key)
            if found is not None:
                outs += self._take(found, found.state.thaw(now), now)
        for key in self._fleet.held():
            if self._bucket is not None and not self._bucket.has(now):
                break
            self._dossiers[key].touch(now)
            outs += self._commit(self._dossiers[key], now)
        told, due = self._fleet.commit(self._storms, len(self._dossiers), now, self._at(now))
        waits = [due, now + _TEND_S if self._storms.active else None]
        if self._fleet.held() and self._bucket is not None:
            waits.append(max(self._bucket.next_at(), now + _TEND_S))
        for wait in waits:
            self._deadlines.set(_FLEET_DUE, wait)
        return [*outs, *told]

    def _lead(self, revision: int | None, now: float) -> list[signals.Output]:
        self._around.leader = revision
        outs: list[signals.Output] = []
        if revision is None:
            return outs
        for found in list(self._dossiers.values()):
            found.touch(now)
            outs += self._commit(found, now)
            self._deadlines.set(found.key, found.deadline())
        self._deadlines.set(_FLEET_DUE, now + (0.0 if self._storms.active else self._grace_s))
        return outs

    # ourselves

    def _wake(self, now: float) -> list[signals.Output]:
        """Notice that we were called later than we asked for."""
        if self._promised is None or self._blind:
            return []
        late_s = now - max(self._promised, self._called_at)
        return self._stand_still(late_s, now) if late_s > self._settings.stall_s else []

    def _sleep(self, now: float) -> None:
        self._called_at = now
        self._promised = self.next_deadline()

    def _stand_still(self, seconds: float, now: float) -> list[signals.Output]:
        self._deadlines.clear()
        self._storms.shift(seconds)
        for key, found in self._dossiers.items():
            found.state.stood_still(seconds, now)
            self._weather(found, now)
            self._deadlines.set(key, found.deadline())
        self._deadlines.set(_FLEET_DUE, now + 1.0)
        self._deadlines.set(_POSITION_DUE, now + _POSITION_S)
        return [
            signals.Noted(note=signals.Note.STALLED, seconds=seconds),
            signals.Noted(note=signals.Note.REBASED),
        ]

    def _lose_sight(self, now: float) -> list[signals.Output]:
        self._blind = True
        if self._blind_since is None:
            self._blind_since = now
            self._alarm_due = now + self._settings.blind_s
        return []

    def _alarm(self, now: float) -> list[signals.Output]:
        if self._alarm_due is None or self._alarm_due > now:
            return []
        self._alarm_due, self._alarmed = None, True
        seconds = now - (self._blind_since or now)
        summary = f"health has had no NATS for {seconds:.0f} s and judges nobody"
        return [signals.Alarm(firing=True, summary=summary, seconds=seconds)]

    def _see_again(self, at: datetime, now: float) -> list[signals.Output]:
        paused_s = 0.0 if self._blind_since is None else now - self._blind_since
        self._blind, self._blind_since, self._alarm_due = False, None, None
        # the wall clock may have been set meanwhile
        self._at_zero = at - timedelta(seconds=now)
        self._wall_zero = self._at_zero.timestamp()
        self._deadlines.clear()
        self._storms.clear()
        for key, found in self._dossiers.items():
            found.state.deaf(now, paused_s=paused_s, window_s=self._settings.reconnect_s)
            self._deadlines.set(key, found.deadline())
        self._deadlines.set(_FLEET_DUE, now + self._grace_s)
        self._deadlines.set(_POSITION_DUE, now + _POSITION_S)
        outs: list[signals.Output] = [
            signals.Noted(note=signals.Note.BLIND, seconds=paused_s),
            signals.Noted(note=signals.Note.REBASED),
        ]
        if self._alarmed:
            self._alarmed = False
            summary = f"health hears NATS again, after {paused_s:.0f} s"
            outs.append(signals.Alarm(firing=False, summary=summary, seconds=paused_s))
        return outs

    def _at(self, now: float) -> datetime:
        """Return UTC, never the same twice: it is part of an alert's identity."""
        self._stamped = max(now, self._stamped + _STAMP_S)
        return self._at_zero + timedelta(seconds=self._stamped)


def _is_down(found: dossier.Dossier) -> bool:
    return found.state.verdict is Verdict.NODE_DOWN


def _causes(expected: facts.Expected) -> tuple[str, ...]:
    revision = (f"revision={expected.revision}",) if expected.revision else ()
    return (*expected.causes, *revision)
