"""Pure: decides when to restart plugin pods: off by default, limited, not during a mass failure.

A pod is restarted only for a verdict that a restart may repair (STUCK, MISMATCH, or DEREGISTERED if
the plugin has not registered again by itself within a minute), once per verdict, after the alert
has been published. The pod of a watched plugin is restarted only if a separate setting allows that,
and only after PLUGIN_DOWN, STUCK or DEREGISTERED has lasted for a minute. On each node the wait
grows after each restart, and the fleet has a limit per hour. A restart over a limit is published as
refused, and is not executed later. Each restart is saved before it is executed, so that a restart
of health does not repeat it.
"""

from collections.abc import Sequence
from datetime import datetime
from typing import Final

from muster import pacing, vocabulary
from muster_health.model import config, signals, snapshot
from muster_health.plugin import tracked_plugin

_HOUR_S: Final = 3600.0
_DAY_S: Final = 86_400.0


class RestartBudget:
    """The limits on restarts, for the fleet and for each node."""

    def __init__(self, settings: config.Remediation) -> None:
        self._settings = settings
        self._times: dict[str, dict[str, tuple[float, ...]]] = {}
        """The times of recent restarts, by node and plugin."""

    def restore(self, node: str, plugin: str, times: tuple[float, ...]) -> None:
        """Record earlier restarts by any health process."""
        if times:
            self._times.setdefault(node, {})[plugin] = times

    def choose(
        self,
        node: str,
        plugin: str,
        pods: Sequence[signals.Pod],
        now: float,
        *,
        is_mass_failure: bool,
    ) -> signals.Pod | str:
        """Return the pod to restart, and count the restart; or return why no pod is restarted."""
        running = [pod for pod in pods if not pod.deleting]
        if is_mass_failure:
            return "mass failure: restarting plugins would hide the cause"
        if len(running) != 1:
            return f"expected one pod of the plugin on the node, not {len(running)}"
        self._forget(now)
        spent = self._spent(node, now)
        if spent:
            return spent
        home = self._times.setdefault(node, {})
        home[plugin] = (*home.get(plugin, ()), now)[-snapshot.REMEDIES_MAX :]
        return running[0]

    def _spent(self, node: str, now: float) -> str:
        lately = sum(now - at < _HOUR_S for each in self._times for at in self._of(each))
        if lately >= self._settings.per_hour:
            return f"{lately} restarts within an hour, which is the limit"
        times = self._of(node)
        if not times:
            return ""
        attempts = min(len(times), snapshot.REMEDIES_MAX)
        wait_s = pacing.Backoff(first_s=self._settings.node_backoff_s).delay_s(attempts)
        since_s = now - max(times)
        if since_s >= wait_s:
            return ""
        return (
            f"a plugin on this node was restarted {since_s:.0f} s ago; "
            f"the next restart is allowed {wait_s:.0f} s after that"
        )

    def _of(self, node: str) -> list[float]:
        return [at for times in self._times.get(node, {}).values() for at in times]

    def _forget(self, now: float) -> None:
        old = [node for node in self._times if now - max(self._of(node)) > _DAY_S]
        for node in old:
            del self._times[node]


class Remediator:
    """Queries Kubernetes for a plugin's pod, and decides whether to restart the pod."""

    def __init__(self, settings: config.Remediation) -> None:
        self._mode, self._restarts_watched = settings.mode, settings.watched
        self._budget = RestartBudget(settings)
        self._asked: dict[str, int] = {}
        self._answered: set[str] = set()

    @property
    def is_on(self) -> bool:
        """Return whether remediation is enabled at all."""
        return self._mode is not config.RemediationMode.OFF

    def restore(self, node: str, plugin: str, times: tuple[float, ...]) -> None:
        """Record earlier restarts of a plugin's pod; `times` are by our monotonic clock."""
        self._budget.restore(node, plugin, times)

    def answered(self, key: str, number: int) -> None:
        """Record that Kubernetes answered query `number`."""
        if self._asked.get(key) == number:
            self._answered.add(key)

    def ask(self, plugin: tracked_plugin.TrackedPlugin, now: float) -> signals.AskCluster | None:
        """Return the query for a plugin's pod, if that query is due."""
        is_allowed = self._restarts_watched or plugin.publication.watched is None
        if not is_allowed or not plugin.needs_restart(now):
            self._asked.pop(plugin.key, None)
            self._answered.discard(plugin.key)
            return None
        if plugin.key in self._asked:
            return None
        question = plugin.ask_kubernetes()
        self._asked[plugin.key] = question.number
        return question

    def decide(
        self,
        plugin: tracked_plugin.TrackedPlugin,
        leader: int,
        now: float,
        at: datetime,
        *,
        is_mass_failure: bool,
    ) -> list[signals.Output]:
        """Decide whether to restart a plugin, if Kubernetes has answered; return the outputs."""
        if plugin.key not in self._answered:
            return []
        self._answered.discard(plugin.key)
        del self._asked[plugin.key]
        chosen = self._budget.choose(
            plugin.node, plugin.plugin, plugin.pods, now, is_mass_failure=is_mass_failure
        )
        if isinstance(chosen, str):
            before = plugin.restart_decided(leader, acted_at=None)
            refused = vocabulary.Remedy.REFUSED
            return [before, _decided(plugin, refused, chosen, at=at, leader=leader)]
        before = plugin.restart_decided(leader, acted_at=at)
        act = signals.Remediate(
            node=plugin.node,
            plugin=plugin.plugin,
            pod=chosen.name,
            uid=chosen.uid,
            reason=f"{plugin.current_verdict}: {plugin.rule}",
            dry_run=self._is_dry,
        )
        return [before, act]

    def done(
        self,
        plugin: tracked_plugin.TrackedPlugin,
        result: signals.Remediated,
        leader: int,
        at: datetime,
    ) -> list[signals.Output]:
        """Return the event that reports the result of a restart."""
        done = vocabulary.Remedy.DRY_RUN if self._is_dry else vocabulary.Remedy.ACTED
        outcome = vocabulary.Remedy.FAILED if result.error else done
        mere = "the pod would be deleted" if self._is_dry else "the pod was deleted"
        reason = result.error or mere
        return [_decided(plugin, outcome, reason, result.pod, at=at, leader=leader)]

    @property
    def _is_dry(self) -> bool:
        return self._mode is config.RemediationMode.DRY_RUN


def _decided(
    plugin: tracked_plugin.TrackedPlugin,
    outcome: vocabulary.Remedy,
    reason: str,
    pod: str = "",
    *,
    at: datetime,
    leader: int,
) -> signals.Publish:
    """Return the event that reports a restart, or why it was refused."""
    event = vocabulary.RemediationDecided(
        node=plugin.node,
        at=at,
        plugin=plugin.plugin,
        verdict=plugin.current_verdict or vocabulary.Verdict.HEALTHY,
        outcome=outcome,
        reason=reason[:2000],
        pod=pod,
        leader=leader,
    )
    since = plugin.restart_decided_for or at
    return signals.Publish(event=event, event_id=f"{plugin.key}:remedy:{since.isoformat()}")
