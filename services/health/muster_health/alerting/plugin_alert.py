"""Pure: decides when to alert about a plugin itself, how severely, and with which affected pods.

The alert follows from the current verdict. If the plugin may only be pausing, the alert waits (see
`alert_delay`); meanwhile, a plugin that keeps failing gets an alert about flapping. Before a new
alert is published, Kubernetes is queried for the affected pods. Until they are known, the alert is
not changed.

This wait is short: an alert without pods is better than no alert. If Kubernetes does not answer,
the query is repeated, and the alert is updated later.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Final

from muster import vocabulary
from muster.vocabulary import AlertKind, Severity, Verdict
from muster_health.alerting import alert_delay, alert_lifecycle, watched_alerts
from muster_health.model import alerts, config, signals, steps

_MARGIN_S: Final = 0.5
"""Allowance for processing an answer that arrives just in time."""
_AGAIN_S: Final = (20.0, 60.0)
"""The delays before an unanswered query is repeated."""


@dataclass(slots=True, eq=False)
class PodsQuery:
    """The query for the pods that an alert affects; `number` identifies the valid answer.

    The alert waits until `due`. If there is no answer by `again_due`, the query is repeated or
    dropped; a missing permission counts as an answer.
    """

    resources: tuple[str, ...]
    due: float
    number: int = 0
    pods: tuple[str, ...] | None = None
    again_due: float | None = None
    _asked_times: int = 0

    def asked(self, number: int, now: float) -> None:
        """Record that the query is sent or repeated; a repetition does not delay the alert."""
        self.number = number
        self.again_due = now + _AGAIN_S[min(self._asked_times, len(_AGAIN_S) - 1)]
        self._asked_times += 1

    def answered(self, answer: signals.Facts | None, now: float) -> None:
        """Record the answer from Kubernetes; the alert no longer waits for it."""
        self.due = min(self.due, now)
        if answer is not None:
            self.pods, self.again_due = answer.holders, None

    def clock_stalled(self, seconds: float) -> None:
        """Extend the wait by the time for which our own process was suspended."""
        self.due += seconds
        if self.again_due is not None:
            self.again_due += seconds

    def is_awaited(self, now: float) -> bool:
        """Return whether the alert still waits for the list of affected pods."""
        return now < self.due

    def is_due_again(self, now: float) -> bool:
        """Return whether to repeat the query; it is repeated at most twice."""
        has_attempts = self._asked_times <= len(_AGAIN_S)
        return has_attempts and self.again_due is not None and self.again_due <= now


def named(
    alert: alerts.Alert, query: PodsQuery | None, published: Sequence[alerts.Alert]
) -> alerts.Alert:
    """Return the alert with the pods from the query or, if unknown, from the published alert."""
    if query is not None and query.pods is not None:
        return alert.naming(query.pods, len(query.pods))
    last = published[-1] if published else None
    return alert if last is None else alert.naming(last.pods, last.pods_total)


_SHOWN_MAX: Final = 4
_OF_KUBELET: Final[Mapping[steps.Rule | None, tuple[str, str]]] = {
    steps.Rule.KUBELET_DEAD: (
        "the kubelet on {node} is not running; {plugin} cannot register",
        (
            "start the kubelet on the node: systemctl status kubelet, journalctl -u kubelet; "
            "the plugin then registers by itself"
        ),
    ),
    steps.Rule.KUBELET_AWAY: (
        "{plugin} on {node} cannot reach the kubelet's socket",
        (
            "check that the kubelet is running (systemctl status kubelet), and that its directory "
            "/var/lib/kubelet/device-plugins is mounted into the plugin's pod"
        ),
    ),
}
"""Summary and advice if the kubelet is at fault, not the plugin."""
SELF_REPAIR_S: Final = 60.0
"""How long a plugin is given to register again by itself; a restart would only delay that."""
Evidence = tuple[vocabulary.Evidence, ...]
_SLOTS: Final = frozenset(severity.value for severity in Severity)


@dataclass(slots=True, eq=False)
class PluginAlert:
    """The alert about a plugin itself, which may be needed while the verdict is not HEALTHY.

    `overdue` is the evidence that a planned stop is taking too long. Before `repair_due`, the
    plugin may still repair itself without a restart.
    """

    node: str
    plugin: str
    lifecycle: alert_lifecycle.AlertLifecycle
    context: config.Context
    delay: alert_delay.AlertDelay
    watched: watched_alerts.Subject | None = None
    repair_due: float = 0.0
    overdue: Evidence = ()
    _has_permit: bool = False
    """Whether the rate limit already permits the alert, which opens once its pods are known."""
    _query: PodsQuery | None = None

    def restore(
        self, firing: tuple[alerts.Alert, ...], *, pause_due: float, repair_due: float
    ) -> None:
        """Restore the state that a previous process saved."""
        overdue = [alert for alert in firing if alert.kind is AlertKind.MAINTENANCE_OVERDUE]
        self.overdue = overdue[0].evidence if overdue else ()
        self.delay.restore(pause_due)
        self.repair_due = repair_due

    def concluded(self, now: float) -> None:
        """Record a new verdict."""
        self.overdue = ()
        self.delay.reset()
        self.repair_due = now + SELF_REPAIR_S

    def prepare(
        self,
        standing: steps.Standing,
        why: Evidence,
        now: float,
        at: datetime,
        may_open: alert_lifecycle.MayOpen,
    ) -> bool:
        """Return whether to query Kubernetes for the affected pods now, or to repeat that query.

        A new alert first needs a permit from `may_open`: while the rate limit holds the alert back,
        the query waits as well.
        """
        alert, query = self._evaluate(standing, why, now, at), self._query
        if alert is None or not standing.resources or not self.context.has_cluster:
            return False
        if query is not None and query.resources == standing.resources:
            return query.is_due_again(now)
        if not self._is_news(named(alert, None, self._published)):
            return False
        if alert.key not in self.lifecycle.published and not self._has_permit:
            self._has_permit = may_open(alert.key)
            return self._has_permit
        return True

    def may_open(self, others: alert_lifecycle.MayOpen) -> alert_lifecycle.MayOpen:
        """Return a function that decides whether an alert may open.

        An alert about the plugin itself uses the permit that we hold, if any. In all other cases,
        `others` decides.
        """

        def may(key: alerts.Key) -> bool:
            if self._has_permit and is_of_plugin(key):
                self._has_permit = False
                return True
            return others(key)

        return may

    def asked(self, standing: steps.Standing, number: int, now: float) -> None:
        """Record that query `number` about the verdict's resources is sent to Kubernetes."""
        if self._query is None or self._query.resources != standing.resources:
            due = now + self.context.settings.probe_timeout_s + _MARGIN_S
            self._query = PodsQuery(standing.resources, due)
        self._query.asked(number, now)

    def cluster_answered(self, answer: signals.Facts | None, number: int, now: float) -> bool:
        """Record an answer from Kubernetes; return whether it belongs to our query for pods."""
        if self._query is None or self._query.number != number:
            return False
        self._query.answered(answer, now)
        return True

    def clock_stalled(self, seconds: float) -> None:
        """Extend the wait for an answer by the time for which our own process was suspended."""
        if self._query is not None:
            self._query.clock_stalled(seconds)

    def is_published_as(self, verdict: Verdict) -> bool:
        """Return whether a plugin alert of this verdict's severity is open, except FLAPPING."""
        kind = alerts.kind_of(verdict)
        return kind is not None and self._is_published(kind)

    def wanted(
        self, standing: steps.Standing, why: Evidence, now: float, at: datetime
    ) -> list[alerts.Alert]:
        """Return the alerts that should be open now; `why` is the evidence for the verdict."""
        alert = self._evaluate(standing, why, now, at)
        if alert is None:
            self.forget()
            return []
        if self._query is not None and self._query.is_awaited(now):
            return self._published
        if self.watched is not None and not standing.resources:
            # Kubernetes cannot list the pods of a driver by a resource, but the agent knows them
            return [alert]
        return [named(alert, self._query, self._published)]

    def followed(
        self, standing: steps.Standing, wanted: list[alerts.Alert], now: float
    ) -> list[float]:
        """Drop the list of pods once it is published; return the times to evaluate again."""
        pause_due = self.delay.due(standing)
        dues = [pause_due] if now < pause_due and self.delay.waits(standing, now) else []
        query = self._query
        if query is None:
            return dues
        if query.is_awaited(now):
            return [*dues, query.due]
        if query.again_due is not None and now < query.again_due:
            return [*dues, query.again_due]
        if not any(map(self._is_news, wanted)):
            self._query = None
        return dues

    def forget(self) -> None:
        """Drop the query and the permit: no alert is published now, and they would be outdated."""
        self._query, self._has_permit = None, False

    def _evaluate(
        self, standing: steps.Standing, why: Evidence, now: float, at: datetime
    ) -> alerts.Alert | None:
        verdict = standing.verdict
        kind = None if verdict is None else alerts.kind_of(verdict)
        if self.overdue:
            kind, why = AlertKind.MAINTENANCE_OVERDUE, self.overdue
        if kind is None or verdict is None:
            return None
        if self.delay.waits(standing, now) and not self._is_published(kind):
            if not standing.is_flapping:
                return None
            kind = AlertKind.FLAPPING
        summary, advice = self._texts(kind, standing)
        if standing.is_flapping:
            summary = alerts.often(summary, kind, verdict)
        alert = alerts.Alert(
            kind=kind,
            summary=summary,
            evidence=why,
            starts_at=at,
            changed_at=at,
            flapping=standing.is_flapping,
            advice=advice,
        )
        holders = self.watched.holders if self.watched and not standing.resources else ()
        return alert.naming(holders, len(holders)) if holders else alert

    def _texts(self, kind: AlertKind, standing: steps.Standing) -> tuple[str, str]:
        """Return the summary, and the advice if it differs from that of the alert's kind."""
        names, rule = {"node": self.node, "plugin": self.plugin}, standing.rule
        if self.watched is not None:
            return watched_alerts.texts(kind, rule, self.watched, node=self.node)
        if kind is AlertKind.DEREGISTERED and rule in _OF_KUBELET:
            summary, advice = _OF_KUBELET[rule]
            resources = ", ".join(standing.resources[:_SHOWN_MAX])
            return f"{summary.format(**names)}: {resources}", advice
        return alerts.summary_of(kind, **names, resources=standing.resources), ""

    def _is_published(self, kind: AlertKind) -> bool:
        published = self.lifecycle.published.get((alerts.slot_of(kind), ""))
        # an alert about flapping alone may use the same slot
        return published is not None and published.kind is not AlertKind.FLAPPING

    @property
    def _published(self) -> list[alerts.Alert]:
        return of_plugin(self.lifecycle.published)

    def _is_news(self, alert: alerts.Alert) -> bool:
        published = self.lifecycle.published.get(alert.key)
        return published is None or not published.says_the_same(alert)


def of_plugin(published: Mapping[alerts.Key, alerts.Alert]) -> list[alerts.Alert]:
    """Return the alerts that are about a plugin itself."""
    return [alert for key, alert in published.items() if is_of_plugin(key)]


def is_of_plugin(key: alerts.Key) -> bool:
    """Return whether an alert is about a plugin itself: its slot is then a severity."""
    return key[0] in _SLOTS
