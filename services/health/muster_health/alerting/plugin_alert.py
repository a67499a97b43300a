"""Pure: The alert of a plugin itself: whether it is due, how urgent it is, whom it names.

It follows from the verdict that stands. One that may turn out to be a pause waits for a while, what
is told as FLAPPING is as urgent as what falls, and before anything new is told Kubernetes is asked
which pods that affects. Until these are known, all stays as it was told.
"""

from datetime import datetime
from typing import Final

from muster import vocabulary
from muster.vocabulary import AlertKind, Severity, Verdict
from muster_health.alerting import affected_pods, alert_lifecycle
from muster_health.model import alerts, config, facts
from muster_health.model.snapshot import State
from muster_health.plugin import diagnosis, verdict

_CURE_S: Final = 60.0
"""For so long a plugin tries by itself to be registered again; to end it would delay that."""
Evidence = tuple[vocabulary.Evidence, ...]
_SLOTS: Final = frozenset(severity.value for severity in Severity)


class PluginAlert:
    """There is one while the verdict is another than HEALTHY.

    `is_grave` is that FLAPPING needs a person at once. `overdue` says how a planned end lasts too
    long. Before `cure_due` a plugin may mend itself what a restart would.
    """

    __slots__ = (
        "_around",
        "_asked",
        "_due",
        "_node",
        "_plugin",
        "_state",
        "_suffers",
        "_telling",
        "cure_due",
        "has_turn",
        "is_grave",
        "overdue",
    )

    def __init__(
        self,
        node: str,
        plugin: str,
        state: verdict.VerdictMachine,
        told: alert_lifecycle.AlertLifecycle,
        about: config.Context,
    ) -> None:
        self.cure_due = self._due = 0.0
        self.overdue: Evidence = ()
        self.is_grave = False
        self.has_turn = False
        """It may be told when its pods are known: that was counted when they were asked for."""
        self._node, self._plugin = node, plugin
        self._state, self._telling, self._around = state, told, about
        self._asked: affected_pods.PodsQuery | None = None
        self._suffers: diagnosis.Diagnosis | None = None

    def restore(self, firing: tuple[alerts.Alert, ...], now: float, *, waited_s: float) -> None:
        """Go on where a former process stopped, which told of these."""
        overdue = [alert for alert in firing if alert.kind is AlertKind.MAINTENANCE_OVERDUE]
        self.overdue = overdue[0].evidence if overdue else ()
        self.is_grave = any(alert.grave for alert in firing)
        self._due = now + self._state.rest_s(self._around.settings.patience_s, waited_s)
        self.cure_due = now + self._state.rest_s(_CURE_S, waited_s)

    def concluded(self, verdict: Verdict, now: float) -> None:
        """Take another verdict."""
        self.overdue, self._due = (), 0.0
        self.is_grave &= verdict is Verdict.FLAPPING
        self.cure_due = now + _CURE_S

    def prepare(
        self, why: Evidence, now: float, at: datetime, may_open: alert_lifecycle.MayOpen
    ) -> bool:
        """Get ready what is to be told; return whether Kubernetes is to be asked first, or again.

        For a new alert that takes its turn: one that has to wait for it asks when that comes.
        """
        alert, resources, asked = self._alert(why, now, at), self._state.accused, self._asked
        if alert is None or not resources or not self._around.has_cluster:
            return False
        if asked is not None and asked.resources == resources:
            return asked.is_due_again(now)
        if not self._is_still_to_tell(affected_pods.named(alert, None, self._told)):
            return False
        if alert.key not in self._telling.told and not self.has_turn:
            self.has_turn = may_open(alert.key)
            return self.has_turn
        return True

    def may_open(self, others: alert_lifecycle.MayOpen, key: alerts.Key) -> bool:
        """Tell whether a new alert may be told now: by the turn that ours has, or as `others`."""
        if self.has_turn and is_of_plugin(key):
            self.has_turn = False
            return True
        return others(key)

    def expect(self, number: int, now: float) -> tuple[str, ...]:
        """Take that Kubernetes is asked under this number; return about which resources."""
        resources, asked = self._state.accused, self._asked
        if asked is not None and asked.resources == resources:
            asked.asked(number, now)
        else:
            timeout_s = self._around.settings.probe_timeout_s
            self._asked = affected_pods.PodsQuery(number, resources, now, timeout_s=timeout_s)
        return resources

    def learned(self, known: facts.Facts | None, number: int, now: float) -> bool:
        """Take Kubernetes' answer; return whether it is about whom the alert names."""
        if self._asked is None or self._asked.number != number:
            return False
        self._asked.answered(known, now)
        return True

    def stood_still(self, seconds: float) -> None:
        """Wait longer for an answer: we stood still for so long."""
        if self._asked is not None:
            self._asked.stood_still(seconds)

    def is_told_as(self, verdict: Verdict) -> bool:
        """Tell whether people were told of this verdict, as urgently as it is."""
        kind = alerts.kind_of(verdict)
        return kind is not None and self._is_told(kind)

    def has_news(self, now: float) -> bool:
        """Tell whether what is told as FLAPPING is another thing now, or needs a person now."""
        if self._state.verdict is not Verdict.FLAPPING:
            return False
        return self._state.suffers is not self._suffers or self._turns_grave(now)

    def _turns_grave(self, now: float) -> bool:
        due = self._grave_due
        return due is not None and due <= now

    @property
    def _grave_due(self) -> float | None:
        """When what is told as FLAPPING is as urgent as it would be by its own name."""
        suffers = self._state.suffers
        if self.is_grave or suffers is None or self._state.verdict is not Verdict.FLAPPING:
            return None
        kind = alerts.kind_of(suffers.verdict)
        if kind is None or alerts.severity_of(kind) is not Severity.CRITICAL:
            return None
        is_told = (Severity.CRITICAL.value, "") in self._telling.told
        if is_told or not diagnosis.may_pause(suffers.rule):
            return self._state.fell_at
        # one that beats again is not down
        return None if self._state.state is State.RECOVERING else self._patience_due

    def wanted(self, why: Evidence, now: float, at: datetime) -> list[alerts.Alert]:
        """Return what is to be open now; `why` is the verdict's evidence."""
        alert = self._alert(why, now, at)
        if alert is None:
            self.forget()
            return []
        if self._awaits_pods(now):
            return self._told
        return [affected_pods.named(alert, self._asked, self._told)]

    def followed(self, wanted: list[alerts.Alert], now: float) -> list[float]:
        """Take that what may be told is told; return when something is due of it.

        The pods are remembered by the alert that was told.
        """
        waits = [self._patience_due] if now < self._patience_due and self._waits(now) else []
        grave_due = self._grave_due
        if grave_due is not None and grave_due > now:
            waits.append(grave_due)
        asked = self._asked
        if asked is None:
            return waits
        if asked.awaits(now):
            return [*waits, asked.due]
        if asked.again_due is not None and now < asked.again_due:
            return [*waits, asked.again_due]
        if not any(map(self._is_still_to_tell, wanted)):
            self._asked = None
        return waits

    def forget(self) -> None:
        """Take that nobody is to be told: pods that are known now will not be then."""
        self._asked, self.has_turn = None, False

    def _alert(self, why: Evidence, now: float, at: datetime) -> alerts.Alert | None:
        verdict = self._state.verdict
        kind = None if verdict is None else alerts.kind_of(verdict)
        if self.overdue:
            kind, why = AlertKind.MAINTENANCE_OVERDUE, self.overdue
        if kind is None or (self._waits(now) and not self._is_told(kind)):
            return None
        self._suffers = self._state.suffers
        self.is_grave |= self._turns_grave(now)
        return alerts.Alert(
            kind=kind,
            summary=alerts.summary_of(
                kind, node=self._node, plugin=self._plugin, resources=self._state.accused
            ),
            evidence=why,
            starts_at=at,
            told_at=at,
            grave=self.is_grave,
        )

    def _waits(self, now: float) -> bool:
        """Tell whether it is not due: the plugin may only pause, or is on its way back."""
        rule = self._state.rule
        if rule is None or not diagnosis.may_pause(rule):
            return False
        return now < self._patience_due or self._state.state is State.RECOVERING

    @property
    def _patience_due(self) -> float:
        """When one that may only pause has been silent for too long, since it fell last."""
        return max(self._due, self._state.fell_at + self._around.settings.patience_s)

    def _is_told(self, kind: AlertKind) -> bool:
        return (alerts.slot_of(kind, grave=self.is_grave), "") in self._telling.told

    @property
    def _told(self) -> list[alerts.Alert]:
        return [alert for key, alert in self._telling.told.items() if is_of_plugin(key)]

    def _is_still_to_tell(self, alert: alerts.Alert) -> bool:
        told = self._telling.told.get(alert.key)
        return told is None or not told.says_the_same(alert)

    def _awaits_pods(self, now: float) -> bool:
        return self._asked is not None and self._asked.awaits(now)


def is_of_plugin(key: alerts.Key) -> bool:
    """Tell whether an alert is about a plugin itself: those have one place for each urgency."""
    return key[0] in _SLOTS
