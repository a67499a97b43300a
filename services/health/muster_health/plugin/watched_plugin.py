"""Pure: tracks a plugin that muster watches but does not run: its state machine and shown state.

`WatchedPlugin` has the parts of a tracked plugin, but receives nothing from the plugin itself: an
agent on the node observes the plugin (`steps.Observed`), and Kubernetes answers queries. While the
agent is silent, the verdict stays as it is; the agent's own alert reports the silence.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime
from typing import Any, ClassVar, Final

import msgspec

from muster import vocabulary
from muster.vocabulary import Verdict
from muster_health.alerting import evidence, plugin_alert, watched_alerts
from muster_health.model import config, signals, snapshot, steps
from muster_health.model.snapshot import State
from muster_health.model.steps import Rule
from muster_health.plugin import tracked_plugin, verdict_machine, watched_findings, watched_verdict

_UNLISTED_S: Final = 600.0
"""How long an unlisted plugin is kept: a new agent may not have observed every plugin yet."""
_SOON_S: Final = 0.05
"""Delay before an observation is evaluated again, so that the detector's `tick` terminates."""
_WEEK_S: Final = 7 * 86_400.0
_NOT_OBSERVED: Final = "it has not been observed for a week"
_NOT_LISTED: Final = "the agent on the node no longer watches it"
_CERTAIN: Final = frozenset({Verdict.PLUGIN_DOWN, Verdict.STUCK, Verdict.DEREGISTERED})


@dataclass(slots=True, eq=False)
class _Forgetting:
    """When and why to stop tracking a plugin that no agent lists or observes."""

    due: float
    why: str = _NOT_OBSERVED
    is_listed: bool = True


class WatchedPlugin(tracked_plugin.TrackedPlugin):
    """One watched plugin on one node; `now` is the receiver's monotonic time in seconds."""

    __slots__ = (
        "_by_agent",
        "_by_cluster",
        "_evaluate_due",
        "_forgetting",
        "_repair_due",
        "_saved",
        "agent",
        "machine",
        "name",
        "subject",
    )

    _machine: ClassVar[type[verdict_machine.VerdictMachine]] = watched_verdict.WatchedMachine

    def __init__(self, node: str, name: str, context: config.Context, *, now: float) -> None:
        super().__init__(node, vocabulary.watched_plugin(name), context, now=now)
        assert isinstance(self.verdict, watched_verdict.WatchedMachine), "the class sets `_machine`"
        self.machine = self.verdict
        self.name, self.machine.name = name, name
        self.subject = self.publication.watched = watched_alerts.Subject(name)
        self.agent = ""
        """The muster plugin that observes this plugin."""
        self._evaluate_due: float | None = None
        self._repair_due: float | None = None
        self._forgetting = _Forgetting(now + _WEEK_S)
        self._by_agent: vocabulary.Watched | None = None
        self._by_cluster = vocabulary.Watched(name=name)
        """The last observation in the Kubernetes API."""
        self._saved = vocabulary.Watched(name=name)
        """The last observation that a previous process saved."""

    def receive(self, event: steps.Event | steps.Observed, now: float) -> list[steps.Effect]:
        """Handle one event; ignore those that concern only plugins that send heartbeats."""
        match event:
            case steps.Observed():
                return self._observe(event, now)
            case signals.ClusterAnswered() | signals.ClockStalled() | steps.Suspend():
                return super().receive(event, now)
            case signals.NodeOffers() | signals.Restored() | steps.Resume() | steps.Reconnected():
                effects = super().receive(event, now)
                self._evaluate_due = now + _SOON_S
                return effects
            case _:
                return []

    def tick(self, now: float) -> list[steps.Effect]:
        """Perform all actions whose deadline has passed."""
        steps_taken: list[steps.Step] = []
        if self._evaluate_due is not None and self._evaluate_due <= now:
            self._evaluate_due = None
            steps_taken = self.machine.evaluate(now)
        if self._repair_due is not None and self._repair_due <= now:
            self._repair_due = None
        return self._effects([*steps_taken, *self.machine.tick(now)], now)

    def next_deadline(self) -> float | None:
        """Return the time at which `tick` or `publish` must be called next."""
        dues = (
            self.machine.next_deadline(),
            self.publication.look_due,
            self._evaluate_due,
            self._repair_due,
            self._forgetting.due,
        )
        return min(due for due in dues if due is not None)

    @property
    def is_alive(self) -> bool:
        """Return False: no heartbeats arrive from a watched plugin."""
        return False

    def removal_reason(self, now: float, *, is_placed: bool) -> str:
        """Return why the plugin is dropped from tracking, or '' to keep it."""
        del is_placed
        if self.rule is Rule.WATCHED_NODE_GONE:
            return "the node is no longer in the cluster"
        return self._forgetting.why if now >= self._forgetting.due else ""

    def unlisted(self, now: float) -> None:
        """Record that the agent's inventory does not list this plugin."""
        if self._forgetting.is_listed:
            self._forgetting = _Forgetting(now + _UNLISTED_S, _NOT_LISTED, is_listed=False)

    def end(self, now: float, at: datetime, why: str) -> list[signals.Output]:
        """End the tracking: resolve all open alerts and remove the saved state."""
        self._effects(self.machine.removed(evidence.of("health", why)), now)
        return super().end(now, at, why)

    def common_causes(self) -> tuple[str, ...]:
        """Return possible common causes, which plugins on other nodes may share."""
        return self.causes

    def ask_kubernetes(self) -> signals.AskCluster:
        """Return a query to Kubernetes for the plugin's pods."""
        return self.machine.ask()

    def needs_restart(self, now: float) -> bool:
        """Return whether the published verdict is certain and needs a decision about a restart.

        By the time it is certain, the agent has probed a hanging process at least three more times.
        An observation in the Kubernetes API alone is not certain enough: it includes events, which
        can be forged.
        """
        standing = self.standing()
        is_observed = self.machine.watched is not None and self.machine.source == "agent"
        if (
            not is_observed
            or standing.state is not State.FAILING
            or standing.verdict not in _CERTAIN
        ):
            return False
        is_decided = self.restart_decided_for == self.publication.since
        own = self.publication.alert
        if is_decided or own is None or now < own.repair_due:
            return False
        is_plugin = standing.rule is not Rule.WATCHED_WRONG_ANSWER
        return is_plugin and own.is_published_as(standing.verdict)

    def shown(self, now: float) -> dict[str, Any]:
        """Return the state that `/state` shows; ages are in seconds by our clock."""
        watched = self.observed
        listed = {} if watched.listed is None else {self.name: watched.listed}
        return super().shown(now) | {
            "resources": (self.name,),
            "devices": listed,
            "watched": self.name,
            "agent": self.agent,
            "kind": watched.kind,
            "finding": watched.finding,
            "text": watched.text,
            "socket": watched.socket,
            "expected_devices": watched.expected,
            "allocated": watched.allocated,
            "process": watched.process,
        }

    def stored(self, leader: int) -> snapshot.Snapshot:
        """Return the state to save."""
        return msgspec.structs.replace(
            super().stored(leader),
            # the agent's next inventory names the pods again
            watched=msgspec.structs.replace(self.observed, pods=()),
            agent=self.agent,
        )

    def restore(self, before: snapshot.Snapshot, now: float) -> None:
        """Restore the published state, and other saved state unless newer state is known."""
        super().restore(before, now)
        self._saved = before.watched or self._saved
        self.agent = self.agent or before.agent

    @property
    def observed(self) -> vocabulary.Watched:
        """Return the last observation, by this process or a previous one."""
        return self.machine.watched or self._saved

    def _observe(self, observed: steps.Observed, now: float) -> list[steps.Effect]:
        watched = watched_findings.bounded(observed.watched)
        self._forgetting = _Forgetting(now + _WEEK_S)
        if observed.agent:
            self.agent, self._by_agent = observed.agent, watched
            self.causes = (f"resource={self.name}", *observed.causes)
        else:
            self._by_cluster = watched
        if self._by_agent is None and self.agent:
            # the agent that a previous process knew reports soon, and takes precedence
            return [steps.CHANGED]
        watched, source = watched_findings.combined(self._by_agent, self._by_cluster)
        self.machine.watched, self.machine.source = watched, source
        self.reported.resources = watched_findings.resources_of(watched)
        self.subject.holders = watched.pods
        return self._effects(self.machine.evaluate(now), now)

    def _cluster_answered(
        self, answer: signals.Facts | None, number: int, now: float
    ) -> list[steps.Step]:
        steps_taken = super()._cluster_answered(answer, number, now)
        self.subject.pods = tuple(pod.name for pod in self.pods)
        return steps_taken

    def _effects(self, steps_taken: Iterable[steps.Step], now: float) -> list[steps.Effect]:
        effects = super()._effects(steps_taken, now)
        if any(isinstance(effect, steps.VerdictReached) for effect in effects):
            self._repair_due = now + plugin_alert.SELF_REPAIR_S
        return effects
