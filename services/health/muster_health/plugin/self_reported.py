"""Pure: tracks a plugin's own reports: its devices, its problem, and when the problem began.

`problems` evaluates one heartbeat. This module adds facts from earlier heartbeats: how long the
plugin's devices have been unchanged, and whether the plugin is about to stop. A problem leads to a
verdict only after it has lasted for its grace period.
"""

import functools
import math
from collections.abc import Mapping
from typing import Final

import msgspec

from muster import vocabulary
from muster.vocabulary import Verdict
from muster_health.model import config, signals
from muster_health.model.steps import Rule
from muster_health.plugin import liveness, problems

_COMMON: Final = frozenset(
    {Verdict.DEREGISTERED, Verdict.MISMATCH, Verdict.STUCK, Verdict.PLUGIN_DOWN}
)
"""The verdicts that a faulty kubelet or revision causes for many plugins at the same time."""
_RECHECK_S: Final = 10.0
"""The minimum time between two queries for the node's offer."""
_NOTHING: Final[Mapping[str, int]] = {}


class SelfReported(msgspec.Struct, eq=False, gc=False):
    """The reports of one plugin. `due` is when to check its problem without a heartbeat.

    While `suspended`, no problem leads to a verdict, because many plugins have a problem.
    """

    settings: config.Detection
    unchanged_since: float
    """When `healthy` last changed."""
    resources: tuple[str, ...] = ()
    healthy: Mapping[str, int] = msgspec.field(default_factory=lambda: _NOTHING)
    """The number of Healthy devices by extended resource, from the last heartbeat."""
    problem: problems.Problem | None = None
    since: float = 0.0
    due: float | None = None
    suspended: bool = False
    offers: Mapping[str, signals.Offer] | None = None
    """The node's offer, according to Kubernetes."""
    _draining_since: float | None = None
    _recheck_number: int | None = None
    """The number of the current query for the node's offer."""
    _recheck_not_before: float = -math.inf

    def observe(
        self, heartbeat: vocabulary.Heartbeat, order: liveness.HeartbeatOrder, now: float
    ) -> problems.Problem | None:
        """Record the devices; return the worst problem, or None.

        While the plugin drains, for at most `maintenance_s`, nothing counts as a problem.
        """
        self._record_devices(heartbeat, now)
        is_draining = heartbeat.phase is vocabulary.Phase.DRAINING
        if (is_draining or self._draining_since is not None) and self._drains(heartbeat, now):
            return None
        if not order.alternations and is_well(heartbeat, order.stretch, self.offers, self.settings):
            return None
        return problems.worst(
            heartbeat,
            self.settings,
            offers=self.offers,
            unchanged_s=now - self.unchanged_since,
            two_instances=order.two_instances(now),
            stretch=order.stretch,
        )

    def registration_lost(
        self, event: vocabulary.PluginDeregistered, interval_s: float, now: float
    ) -> None:
        """Record that a registration was lost just now."""
        grace_s = problems.repair_s(self.settings, interval_s)
        self.record_problem(problems.deregistered(event, grace_s), now)

    def offers_changed(self, interval_s: float, now: float) -> None:
        """Record a problem if the node's offer differs from devices that did not just change."""
        if self.offers is None or now - self.unchanged_since < self.settings.mismatch_s:
            return
        grace_s = problems.repair_s(self.settings, interval_s)
        problem = problems.offered(self.healthy, self.offers, grace_s)
        if problem is not None:
            self.record_problem(problem, now)

    def record_problem(self, problem: problems.Problem, now: float) -> bool:
        """Record a problem; return whether it has lasted longer than its grace period.

        A different problem restarts the wait only if its rule and its grace period both differ.
        """
        before = self.problem
        if before is None or (
            before.grace_s != problem.grace_s and before.rule is not problem.rule
        ):
            self.since = now
        self.problem = problem
        due = self.since + problem.grace_s
        self.due = due if now < due and not self.suspended else None
        return self.due is None and not self.suspended

    def is_common(self, interval_s: float, now: float) -> bool:
        """Return whether a problem that other plugins may share is about to lead to a verdict."""
        problem = self.problem
        if problem is None or problem.verdict not in _COMMON:
            return False
        return self.since + problem.grace_s - now <= self.settings.trouble_s + interval_s

    def may_recheck(self, now: float) -> bool:
        """Return whether to query Kubernetes again for the node's offer.

        The last state from a watch may be outdated, and the watch cannot detect that.
        """
        return now >= self._recheck_not_before

    def rechecking(self, number: int, now: float) -> None:
        """Record the number of the new query for the node's offer."""
        self._recheck_number, self._recheck_not_before = number, now + _RECHECK_S

    def is_recheck(self, number: int) -> bool:
        """Return whether this is the number of the query for the node's offer."""
        return number == self._recheck_number

    def rechecked(self, answer: signals.Facts | None, *, is_alive: bool) -> problems.Problem | None:
        """Record an answer from Kubernetes; return a confirmed problem or None; drop a refuted one.

        Whether the kubelet is down is not asked again, because this answer shows it.
        """
        self._recheck_number = None
        problem = self.problem
        is_believed = is_alive and not self.suspended
        if problem is not None and problem.rule is Rule.KUBELET_AWAY and is_believed:
            return problems.with_lease(problem, answer, self.settings.lease_stale_s)
        if answer is None or answer.offers is None:
            return None
        self.offers = answer.offers
        if problem is None or problem.rule is not Rule.NODE_OFFERS_OTHERS or not is_alive:
            return None
        confirmed = problems.offered(self.healthy, answer.offers, problem.grace_s)
        if confirmed is None:
            self.clear()
        return confirmed

    def suspend(self) -> None:
        """Prevent problems from leading to a verdict before `resume`."""
        self.suspended, self.due = True, None

    def resume(self) -> None:
        """Accept problems again, from the next report on."""
        self.suspended = False

    def shift(self, seconds: float) -> None:
        """Postpone the deadline by the time for which our own process was suspended."""
        if self.due is not None:
            self.since += seconds
            self.due += seconds

    def clear(self) -> None:
        """Record that there is no problem, and that problems may lead to a verdict again."""
        self.problem, self.due, self.suspended = None, None, False

    def _record_devices(self, heartbeat: vocabulary.Heartbeat, now: float) -> None:
        before = self.healthy
        if len(before) == len(heartbeat.resources):
            for resource in heartbeat.resources:
                if before.get(resource.name) != resource.healthy:
                    break
            else:
                return
        counted = tuple(
            (resource.name, resource.healthy if resource.extended else None)
            for resource in heartbeat.resources
        )
        self.resources, self.healthy = _shared(counted)
        self.unchanged_since = now

    def _drains(self, heartbeat: vocabulary.Heartbeat, now: float) -> bool:
        """Return whether the plugin is about to stop; False if it has taken too long to do so."""
        if heartbeat.phase is not vocabulary.Phase.DRAINING:
            self._draining_since = None
            return False
        if self._draining_since is None:
            self._draining_since = now
        return now - self._draining_since < self.settings.maintenance_s


def is_well(
    heartbeat: vocabulary.Heartbeat,
    stretch: float,
    offers: Mapping[str, signals.Offer] | None,
    settings: config.Detection,
) -> bool:
    """Check quickly that `problems.worst` would return None; a False result is not conclusive."""
    for resource in heartbeat.resources:
        if not resource.streams or not resource.probe_ok or resource.problem or resource.mismatch:
            return False
        age_s = resource.probe_age_s
        if age_s < 0 or (
            age_s > problems.PROBE_MAX_AGE_S and age_s > problems.probe_max_age_s(heartbeat)
        ):
            return False
    for age_s in heartbeat.checkers.values():
        if not 0 <= age_s <= settings.checker_age_s:
            return False
    if heartbeat.loop_lag_ms > settings.lag_ms or stretch > settings.stretch_max:
        return False
    return offers is None or _is_offered(heartbeat, offers)


def _is_offered(heartbeat: vocabulary.Heartbeat, offers: Mapping[str, signals.Offer]) -> bool:
    for resource in heartbeat.resources:
        offer = offers.get(resource.name)
        if resource.extended and (offer is None or offer.allocatable != resource.healthy):
            return False
    return True


@functools.lru_cache(maxsize=1024)
def _shared(
    counted: tuple[tuple[str, int | None], ...],
) -> tuple[tuple[str, ...], Mapping[str, int]]:
    """Return names and counts; nodes with identical devices share one copy (0.5 KiB a node)."""
    healthy = {name: count for name, count in counted if count is not None}
    return tuple(name for name, _ in counted), healthy
