"""Pure: turns the effects of one plugin's state machine into outputs of the detector.

Verdicts are suspended while the plugins of many nodes fail at the same time. A plugin that is gone
and not expected is removed. Changes are published within rate limits, and a pod is restarted if
allowed.
"""

from collections.abc import Iterable
from datetime import datetime
from typing import Final, assert_never

from muster_health.fleet import (
    fleet_alerts,
    registry,
    remediation,
    self_check,
    suspension,
    timer_queue,
)
from muster_health.model import alerts, config, limits, signals, steps
from muster_health.plugin import tracked_plugin, watched_plugin

FLEET_DUE: Final = "fleet"
"""The timer's key for the whole fleet; plugins' keys contain a dot."""
STARTUP_DUE: Final = "startup"
_WATCHED_GONE: Final = "the agent on the node reports that it was removed as planned"


class Fleet:
    """All plugins, and the checks across plugins; `at_zero` is UTC at second 0 of `now`'s clock."""

    def __init__(
        self,
        settings: config.Detection,
        *,
        runbook_url: str,
        at_zero: datetime,
        bounds: config.Bounds | None = None,
        restarts: config.Remediation | None = None,
        has_cluster: bool = False,
        leader: int | None = 0,
    ) -> None:
        self._settings = settings
        self._context = config.Context(
            settings=settings,
            bounds=bounds or config.Bounds(),
            runbook_url=runbook_url,
            has_cluster=has_cluster,
            leader=leader,
            wall_zero=at_zero.timestamp(),
        )
        self._registry = registry.Registry(self._context)
        self._self_check = self_check.SelfCheck(settings, at_zero)
        self._timers = timer_queue.TimerQueue()
        self._fleet = fleet_alerts.FleetAlerts(self._context)
        self._suspensions = suspension.Suspensions(
            settings,
            self._registry,
            self._fleet.ended,
            self._reschedule,
            has_cluster=has_cluster,
        )
        self._clocks = self_check.FleetClocks(self._context, self._registry.plugins)
        self._remediator = remediation.Remediator(restarts or config.Remediation())
        self._may_restart = self._remediator.is_on
        self._startup = StartupRateLimit()

    def _act(
        self, plugin: tracked_plugin.TrackedPlugin, effects: Iterable[steps.Effect], now: float
    ) -> list[signals.Output]:
        """Turn the effects of one plugin's machine into outputs."""
        outs: list[signals.Output] = []
        is_decided = False
        for effect in effects:
            match effect:
                case signals.Noted() | signals.Probe() | signals.AskCluster():
                    outs.append(effect)
                    self._count_suspicion(plugin, effect, now)
                case steps.VerdictReached() | steps.VerdictConfirmed() | steps.ReturnOverdue():
                    is_decided = True
                case steps.ClockSkewChanged():
                    self._compare_clocks(plugin, now)
                case steps.Changed() | steps.WatchedReported():
                    pass
                case _:
                    assert_never(effect)
        if self._is_suspended(plugin, now):
            outs = [out for out in outs if isinstance(out, signals.Noted)]
            outs.append(signals.Noted(note=signals.Note.SUSPENDED))
        why = "" if plugin.is_alive else self._removal_reason(plugin, now)
        if why:
            return [*outs, *self._remove(plugin, why, now)]
        if is_decided:
            self._evaluate_soon(self._registry.inhibit(plugin), now)
        outs += self._publish(plugin, now)
        if self._may_restart:
            outs += self._remediate(plugin, now)
        self._reschedule(plugin)
        return outs

    def _follow_watched(
        self, agent: tracked_plugin.TrackedPlugin, report: steps.WatchedReported, now: float
    ) -> list[signals.Output]:
        """Apply an agent's report to the plugins that it watches."""
        outs: list[signals.Output] = []
        for watched in report.watched:
            plugin = self._registry.find_or_watch(agent.node, watched.name, now)
            if isinstance(plugin, limits.Refusal):
                outs.append(signals.refused(plugin, agent.node))
                continue
            event = steps.Observed(watched=watched, agent=agent.plugin, causes=agent.causes)
            outs += self._act(plugin, plugin.receive(event, now), now)
        names = {watched.name for watched in report.watched}
        for plugin in self._registry.watched_by(agent):
            if plugin.name in report.gone:
                outs += self._remove(plugin, _WATCHED_GONE, now)
            elif report.is_all and plugin.name not in names:
                plugin.unlisted(now)
                self._reschedule(plugin)
        return outs

    def _removal_reason(self, plugin: tracked_plugin.TrackedPlugin, now: float) -> str:
        is_placed = self._registry.is_placed(plugin.plugin)
        return plugin.removal_reason(now, is_placed=is_placed)

    def _compare_clocks(self, changed: tracked_plugin.TrackedPlugin, now: float) -> None:
        skewed = self._clocks.compare(changed)
        if skewed is not None:
            self._evaluate_soon(skewed, now)
            self._fleet.clock_skew = self._clocks.text()
            self._timers.set(FLEET_DUE, now + suspension.SOON_S)

    def _count_suspicion(
        self, plugin: tracked_plugin.TrackedPlugin, effect: signals.Output, now: float
    ) -> None:
        is_suspicion = effect == signals.Noted(note=signals.Note.SUSPECTED)
        if is_suspicion and self._fleet.noisy.suspected(plugin.node, now):
            self._timers.set(FLEET_DUE, now + suspension.SOON_S)

    def _is_suspended(self, plugin: tracked_plugin.TrackedPlugin, now: float) -> bool:
        """Return whether verdicts about a plugin are suspended during a mass failure."""
        if plugin.key not in self._suspensions.suspects and not plugin.is_suspect(now):
            return False
        is_suspended, due = self._suspensions.suspends(plugin, now)
        self._timers.set(FLEET_DUE, due)
        return is_suspended

    def _remediate(self, plugin: tracked_plugin.TrackedPlugin, now: float) -> list[signals.Output]:
        leader = self._context.leader
        if leader is None or (
            isinstance(plugin, watched_plugin.WatchedPlugin) and not self._is_observed(plugin)
        ):
            return []
        question = self._remediator.ask(plugin, now)
        if question is not None:
            return [question]
        at = self._self_check.at(now)
        is_mass_failure = bool(self._suspensions.active)
        return self._remediator.decide(plugin, leader, now, at, is_mass_failure=is_mass_failure)

    def _noisy(self, event: limits.NodeNoisy, now: float) -> None:
        if self._fleet.noisy.report(event, now):
            self._timers.set(FLEET_DUE, now)

    def _remediated(self, event: signals.Remediated, now: float) -> list[signals.Output]:
        plugin = self._registry.find(event.node, event.plugin)
        leader = self._context.leader
        if plugin is None or leader is None:
            return []
        return self._remediator.done(plugin, event, leader, self._self_check.at(now))

    def _is_observed(self, watched: watched_plugin.WatchedPlugin) -> bool:
        """Return whether the agent that observes a watched plugin is alive."""
        agent = self._registry.agent_of(watched)
        return agent is not None and agent.is_alive

    def _publish(self, plugin: tracked_plugin.TrackedPlugin, now: float) -> list[signals.Output]:
        """Publish a plugin's changes; changes that are not urgent may wait for their turn."""
        if not plugin.has_news(now):
            return []
        leads = self._context.leader is not None
        if leads and plugin.may_wait(now) and self._startup.must_wait(plugin.key, now):
            self._timers.set(STARTUP_DUE, self._startup.due)
            # a plugin that stays due would occupy every tick
            plugin.publication.wait_for_turn(now)
            return []
        return self._publish_now(plugin, now)

    def _publish_now(
        self, plugin: tracked_plugin.TrackedPlugin, now: float
    ) -> list[signals.Output]:
        def may_open(_: alerts.Key) -> bool:
            return self._registry.spend(plugin, now)

        outs, held = plugin.publish(now, self._self_check.at(now), may_open)
        if (held or plugin.key in self._fleet.held) and self._fleet.hold(plugin.key, held):
            outs += [signals.Noted(note=signals.Note.RATE_LIMITED) for _ in held]
            self._timers.set(FLEET_DUE, now + suspension.SOON_S)
        self._reschedule(plugin)
        return outs

    def _remove(
        self, plugin: tracked_plugin.TrackedPlugin, why: str, now: float
    ) -> list[signals.Output]:
        """Remove a plugin, and the plugins that only it watches; resolve their open alerts.

        A plugin that was already removed is ignored.
        """
        if plugin.key not in self._registry.plugins:
            return []
        outs: list[signals.Output] = []
        for watched in self._registry.watched_by(plugin):
            outs += self._remove(watched, why, now)
        self._evaluate_soon(self._registry.remove(plugin), now)
        self._suspensions.removed(plugin.key, now)
        self._clocks.forget(plugin)
        self._fleet.hold(plugin.key, ())
        return [*outs, *plugin.end(now, self._self_check.at(now), why)]

    def _evaluate_soon(self, plugins: Iterable[tracked_plugin.TrackedPlugin], now: float) -> None:
        for plugin in plugins:
            plugin.touch(now + suspension.SOON_S)
            self._timers.set(plugin.key, now + suspension.SOON_S)

    def _reschedule(self, plugin: tracked_plugin.TrackedPlugin) -> None:
        self._timers.set(plugin.key, plugin.next_deadline())


_TURN_S: Final = 0.1
_EACH_TURN: Final = 50


class StartupRateLimit:
    """Limits how many plugins publish non-urgent changes per turn; the others wait in order."""

    def __init__(self) -> None:
        self._waiting: dict[str, None] = {}
        self._left = 0
        self._until = 0.0

    @property
    def due(self) -> float | None:
        """Return when the next plugins may be published, if any are waiting."""
        return self._until if self._waiting else None

    def must_wait(self, key: str, now: float) -> bool:
        """Return whether this plugin must wait; if so, add it to the queue."""
        if self._waiting or not self._has_one(now):
            self._waiting[key] = None
            return True
        self._left -= 1
        return False

    def turn(self, now: float) -> list[str]:
        """Remove and return the keys of the plugins that may be published now."""
        self._has_one(now)
        keys = [key for key, _ in zip(self._waiting, range(self._left), strict=False)]
        self._left -= len(keys)
        for key in keys:
            del self._waiting[key]
        return keys

    def _has_one(self, now: float) -> bool:
        if now >= self._until:
            self._until, self._left = now + _TURN_S, _EACH_TURN
        return self._left > 0
