"""Pure: the state machine of one plugin on one node, with `receive`, `tick` and `next_deadline`.

Its parts do not depend on `TrackedPlugin`, and only `TrackedPlugin` passes events to them. The
table of states is in the package's docstring.

| part          | contains                                                                         |
|---------------|----------------------------------------------------------------------------------|
| `alive`       | heartbeat order, silence, connections, clock offset (`liveness`)                 |
| `reported`    | the plugin's devices, and its reported problem with its start (`self_reported`)  |
| `verdict`     | state, suspicion, diagnosis, recovery, planned stops (`verdict_machine`)         |
| `faults`      | devices with faults (`device_alerts`)                                            |
| `mounts`      | FUSE mounts that do not work (`mount_alerts`)                                    |
| `counts`      | how many devices there are, and how many there should be (`device_counts`)       |
| `refused`     | a changed configuration that the plugin refused (`refused_configuration`)        |
| `publication` | published and pending alerts and verdicts (`publication`)                        |

`receive` accepts a `steps.Event` and returns `steps.Effect`s: queries, notes, decisions. An empty
list means that at most the next deadline moved back, as after nearly every heartbeat. The detector
calls `publish` separately, because publishing depends on whether this replica leads, and on the
fleet's rate limit for alerts.
"""

from collections.abc import Iterable
from datetime import datetime
from typing import Final, assert_never

from muster import pacing, vocabulary
from muster.vocabulary import Verdict
from muster_health.alerting import alert_lifecycle, publication
from muster_health.model import alerts, limits, signals, snapshot, steps
from muster_health.model.snapshot import State
from muster_health.plugin import liveness, parts

_LOOKS_PER_S: Final = 1.0
_LOOKS_BURST: Final = 32


class TrackedPlugin(parts.PluginState):
    """One plugin on one node; `now` is the receiver's monotonic time in seconds."""

    __slots__ = ()

    def receive(  # noqa: C901, PLR0912  # one case for each kind of event
        self, event: steps.Event, now: float
    ) -> list[steps.Effect]:
        """Handle one event."""
        steps_taken: list[steps.Step] = []
        match event:
            case vocabulary.Heartbeat():
                return self._heartbeat(event, now)
            case signals.FromPlugin():
                return self._event(event, now)
            case signals.ProbeAnswered():
                if self.verdict.investigation.awaited(event.number) is not None:
                    self.alive.confirm(now)
                    problem = self.reported.observe(event.heartbeat, self.alive.order, now)
                    steps_taken = self.verdict.sign_of_life(problem, now, counts=False)
            case signals.ProbeFailed():
                steps_taken = self.verdict.probe_failed(
                    event.number, now, subscribed=event.subscribed
                )
            case signals.ProbeInconclusive():
                steps_taken = self.verdict.probe_inconclusive(event.number, now)
            case signals.ClusterAnswered():
                steps_taken = self._cluster_answered(event.facts, event.number, now)
            case signals.Connected():
                self.alive.connections.opened(event.server, event.client)
            case signals.Disconnected():
                closed = event.server, event.client, event.reason
                if self.alive.connections.ended(*closed, now):
                    steps_taken = self.verdict.disconnected(now)
            case signals.Restored():
                self.restore(event.state, now)
            case signals.NodeOffers():
                self.reported.offers = event.offers
                if self.verdict.may_have_problem:
                    self.reported.offers_changed(self.alive.order.interval_s, now)
            case signals.Expected():
                self._expected(event, now)
            case steps.NotExpected():
                self.alive.is_expected, self.removal.was_dropped = False, True
            case steps.Suspend():
                self.verdict.suspend()
            case steps.Resume():
                steps_taken = self.verdict.resume(now)
            case steps.Reconnected():
                self.verdict.reconnected(now, window_s=event.window_s, paused_s=event.paused_s)
            case signals.ClockStalled() if self.verdict.is_calm and not self.alive.is_due_sooner:
                # only the deadline moves back
                self.verdict.clock_stalled(event.seconds, now)
                return []
            case signals.ClockStalled():
                self.verdict.clock_stalled(event.seconds, now)
                self.publication.clock_stalled(event.seconds)
            case _:
                assert_never(event)
        return self._effects(steps_taken, now)

    def tick(self, now: float) -> list[steps.Effect]:
        """Perform all actions whose deadline has passed."""
        return self._effects(self.verdict.tick(now), now)

    def next_deadline(self) -> float | None:
        """Return when `tick` or `publish` must be called next; None if nothing is planned."""
        due, look_due = self.verdict.next_deadline(), self.publication.look_due
        if self.removal.due is not None:
            is_expected = self.alive.is_expected
            forget_due = self.removal.next_due(self.verdict.state, is_expected=is_expected)
            due = forget_due if due is None else min(due, forget_due or due)
        if look_due is None or due is None:
            return due if look_due is None else look_due
        return min(due, look_due)

    # for the detector

    @property
    def is_alive(self) -> bool:
        """Return whether heartbeats are arriving."""
        return self.verdict.state in {State.HEALTHY, State.FAILING, State.RECOVERING}

    @property
    def is_silent(self) -> bool:
        """Return whether the plugin is silent and suspected, without a verdict so far."""
        return self.verdict.is_silent

    def is_suspect(self, now: float) -> bool:
        """Return whether the plugin is silent, or has a problem that other plugins may share."""
        if self.verdict.state is State.HEALTHY and self.reported.problem is None:
            return False
        return self.verdict.is_suspect(now)

    def failure(self, now: float) -> steps.Failure:
        """Return how and when the suspected plugin failed."""
        alive = self.alive
        if not self.is_silent:
            return steps.Failure(steps.Manner.PROBLEM, self.reported.since, self.causes)
        closed = alive.connections.closed
        if closed is not None and closed.by_process:
            return steps.Failure(steps.Manner.ENDED, closed.at, self.common_causes())
        at = alive.silent_since if alive.was_heard else now
        return steps.Failure(steps.Manner.SILENT, at, self.common_causes())

    def common_causes(self) -> tuple[str, ...]:
        """Return possible causes of the plugin's silence that other plugins may share."""
        server = liveness.short_server(self.alive.connections.server)
        return (*self.causes, f"server={server}") if server else self.causes

    @property
    def reports_node(self) -> bool:
        """Return whether this plugin's alert reports that the node is down."""
        return self.publication.reports_node

    def inhibit(self, *, inhibited: bool) -> bool:
        """Record whether another alert reports the node as down; return whether that changed."""
        is_news, self.publication.inhibited = inhibited is not self.publication.inhibited, inhibited
        return is_news

    def restart_decided(self, leader: int, *, acted_at: datetime | None) -> signals.Store:
        """Record and save a decision about a restart; `acted_at` is None if it was refused."""
        self.restart_decided_for = self.publication.since
        if acted_at is not None:
            self.restarts = (*self.restarts, acted_at)[-snapshot.REMEDIES_MAX :]
        return self._store(leader)

    def touch(self, now: float) -> None:
        """Schedule a check at time `now` for changes to publish."""
        self.publication.touch(now)

    def reset_published(self) -> None:
        """Reset the published state: another replica led, so our publications were dropped."""
        self.publication.reset_published()

    # publishing

    def has_news(self, now: float) -> bool:
        """Return whether `publish` must be called."""
        return self.has_counts_to_store or self._is_publish_due(now)

    def may_wait(self, now: float) -> bool:
        """Return whether publishing may wait: a first HEALTHY or state to save is not urgent."""
        return self._is_new or not self._is_publish_due(now)

    def _is_publish_due(self, now: float) -> bool:
        publication = self.publication
        due = publication.look_due
        return publication.is_dirty or (due is not None and due <= now)

    def publish(
        self, now: float, at: datetime, may_open: alert_lifecycle.MayOpen
    ) -> tuple[list[signals.Output], list[alerts.Alert]]:
        """Return the outputs for all changes, in order, and the alerts that must wait.

        While we do not lead, nothing is published: a new leader checks every plugin.
        """
        leader = self.context.leader
        if leader is None:
            self.has_counts_to_store = False
            self.publication.skip(now, at)
            return [], []
        questions, held = self.publication.update(
            self.standing(),
            self._observed(now),
            now=now,
            at=at,
            may_open=may_open,
            ask=self.verdict.investigation.ask_kubernetes,
        )
        return [*self._publish_pending(leader, now), *questions], held

    def end(self, now: float, at: datetime, why: str) -> list[signals.Output]:
        """Return the outputs that resolve all alerts and remove the saved state, if we lead."""
        leader = self.context.leader
        if leader is None:
            return []
        self.publication.end_all(self.standing(), now, at, why)
        events = self.publication.pending()
        self.publication.clear_pending()
        return [*events, signals.Store(key=self.key, value=b"")]

    # events

    def _heartbeat(self, heartbeat: vocabulary.Heartbeat, now: float) -> list[steps.Effect]:
        alive, machine = self.alive, self.verdict
        former = alive.order.instance
        freshness = alive.observe(heartbeat, now)
        if freshness is liveness.Freshness.STALE:
            return [signals.Noted(note=signals.Note.HEARTBEAT_STALE)]
        is_healthy = machine.state is State.HEALTHY
        if not is_healthy and machine.proves_nothing(heartbeat, freshness, now):
            return [steps.CHANGED]
        had_problem = self.reported.problem is not None
        alive.confirm(now)
        problem = self.reported.observe(heartbeat, alive.order, now)
        is_healthy = is_healthy and machine.standing.verdict is Verdict.HEALTHY
        effects: list[steps.Effect] = []
        if is_healthy and problem is None and former == heartbeat.instance:
            # nearly every heartbeat ends here: only the deadline moves back
            if had_problem or self.reported.suspended:
                self.reported.clear()
            if had_problem or alive.is_due_sooner:
                effects.append(steps.CHANGED)
        elif former and alive.order.is_new_instance and machine.replaced(former, now):
            effects = self._effects(machine.flapping(now), now)
        else:
            counts = freshness is liveness.Freshness.FRESH
            effects = self._effects(machine.sign_of_life(problem, now, counts=counts), now)
        self.problems = heartbeat.problems
        if alive.observe_clock(heartbeat, now):
            self.publication.is_dirty = True
            effects.append(steps.ClockSkewChanged())
        self._observe_devices(heartbeat, now)
        if not effects and self.has_news(now):
            effects.append(steps.CHANGED)
        return effects

    def _has_changed(self, now: float) -> None:
        """Evaluate the alerts immediately or, after many changes, once a second.

        The cost of an evaluation grows with the number of faulty devices.
        """
        if self.looks is None:
            self.looks = pacing.TokenBucket(per_s=_LOOKS_PER_S, burst=_LOOKS_BURST, now=now)
        if self.looks.try_take(now):
            self.publication.is_dirty = True
        else:
            self._look_at(self.looks.ready_at(now))

    def _observe_devices(self, heartbeat: vocabulary.Heartbeat, now: float) -> None:
        changes = self.counts.changes
        has_changed = self.counts.observe(heartbeat, now)
        self.has_counts_to_store |= changes != self.counts.changes
        if self.faults.has_any or _reports_faults(heartbeat):
            has_changed |= self.faults.observe(heartbeat)
            has_changed |= self.faults.settle(self.counts.lacks)
        if self.refused.known is not None and self.refused.observe(heartbeat, now):
            has_changed = self.is_unsaved = True
        if has_changed:
            self._has_changed(now)

    def _event(self, reported: signals.FromPlugin, now: float) -> list[steps.Effect]:
        event = reported.event
        if not self.alive.is_next_event(event, reported.instance, reported.sequence):
            return [signals.Noted(note=signals.Note.EVENT_STALE)]
        self.alive.is_known = True
        self._has_changed(now)
        changes = self._changes
        is_kept = self.faults.apply(event, self.counts.had)
        if isinstance(event, vocabulary.FuseMountChanged | vocabulary.InventoryReported):
            is_kept &= self.mounts.apply(event)
        steps_taken: list[steps.Step] = []
        if not is_kept:
            steps_taken.append(signals.refused(limits.Refusal.DEVICES, self.node))
        match event:
            case vocabulary.DeviceRemoved():
                self.counts.removed(event.resource, event.count, now)
            case vocabulary.PluginStarted() if self.verdict.planned.instance:
                # even the instance that announced its stop may have returned
                self.verdict.planned.instance = ""
                self.is_unsaved = True
            case vocabulary.PluginStopping():
                steps_taken += self.verdict.stopping(event, reported.instance, now)
            case vocabulary.PluginDeregistered():
                if self.verdict.may_have_problem:
                    self.reported.registration_lost(event, self.alive.order.interval_s, now)
            case vocabulary.ConfigurationRefused() | vocabulary.ConfigurationApplied():
                self.refused.apply(event, reported.instance, now, self.context.wall_zero + now)
            case _:
                pass
        self.is_unsaved |= changes != self._changes
        return [*self._effects(steps_taken, now), *steps.watched_reports(event)]

    @property
    def _changes(self) -> int:
        return sum(part.changes for part in (self.faults, self.mounts, self.counts, self.refused))

    def _cluster_answered(
        self, answer: signals.Facts | None, number: int, now: float
    ) -> list[steps.Step]:
        if answer is not None and answer.pods is not None:
            self.pods, self.removal.has_no_pod = answer.pods, not answer.pods
        steps_taken = self.verdict.cluster_answered(answer, number, now)
        self.publication.cluster_answered(answer, number, now)
        return steps_taken

    def _expected(self, expected: signals.Expected, now: float) -> None:
        revision = (f"revision={expected.revision}",) if expected.revision else ()
        self.causes, self.removal.was_dropped = (*expected.causes, *revision), False
        self.alive.expect(expected.age_s, now)

    def _effects(self, steps_taken: Iterable[steps.Step], now: float) -> list[steps.Effect]:
        effects: list[steps.Effect] = []
        for step in steps_taken:
            match step:
                case signals.Noted() | signals.Probe() | signals.AskCluster():
                    effects.append(step)
                case steps.VerdictReached() | steps.VerdictConfirmed() | steps.ReturnOverdue():
                    self.publication.decided(step, self.standing(), now)
                    if isinstance(step, steps.VerdictReached):
                        is_expected = self.alive.is_expected
                        self.removal.restart(self.verdict.state, now, is_expected=is_expected)
                    effects.append(step)
                case _:
                    assert_never(step)
        return effects or [steps.CHANGED]

    # saved state

    @property
    def _is_new(self) -> bool:
        """Return whether the only news is that the plugin exists and is healthy."""
        lifecycle = self.publication.lifecycle
        return (
            self.publication.published_verdict is None
            and self.verdict.standing.verdict is Verdict.HEALTHY
            and not (self.is_unsaved or self.faults.by_group or self.mounts.changes)
            and not (self.counts.short or self.refused.known)
            and not self.alive.clock.is_skewed
            and not (lifecycle.published or lifecycle.pending)
        )

    def _observed(self, now: float) -> publication.Observed:
        clock, clock_text, due = self.alive.clock, self.alive.clock.text(), None
        if clock.is_skewed:
            # until then we do not know whether most nodes' clocks differ, or only this node's
            known_at = clock.since + self.context.settings.storm_window_s
            due = known_at if now < known_at else None
        is_skewed = clock.is_skewed and due is None and not self.context.is_our_clock_skewed
        dues = [at for at in (due, self.refused.due(now)) if at is not None]
        return publication.Observed(
            faults=self.faults,
            mounts=self.mounts,
            refused=self.refused,
            short=self.counts.short,
            clock_text=clock_text,
            is_clock_skewed=is_skewed,
            due=min(dues, default=None),
        )

    def _publish_pending(self, leader: int, now: float) -> list[signals.Output]:
        events = self.publication.pending()
        if not events:
            # the event that caused this is acknowledged afterwards, and is not delivered again
            is_due = self.is_unsaved or self.has_counts_to_store
            return [self._store(leader)] if is_due and self._may_save(now) else []
        # publishing a first verdict twice, after a crash, does no harm
        before = [] if self.publication.is_first_verdict else [self._store(leader)]
        self.publication.clear_pending()
        return [*before, *events, self._store(leader)]

    def _store(self, leader: int) -> signals.Store:
        self.is_unsaved = self.has_counts_to_store = False
        stored = self.stored(leader)
        return signals.Store(key=self.key, value=snapshot.encode(stored))


def _reports_faults(heartbeat: vocabulary.Heartbeat) -> bool:
    for resource in heartbeat.resources:
        if resource.short or resource.degraded or resource.unmonitored:
            return True
    return False
