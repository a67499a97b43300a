"""Pure: investigates one plugin: probes and queries a suspected plugin, reviews a lost plugin.

Every answer has the number of its probe or query, so a late answer does no harm. If an answer never
arrives (a bug: our own code always returns one), the suspicion ends undecided. A lost plugin is
investigated again, and the wait doubles each time.
"""

import enum
import math
from collections.abc import Mapping
from typing import Final

import msgspec

from muster.vocabulary import Verdict
from muster_health.model import config, signals, steps
from muster_health.model.steps import Rule
from muster_health.plugin import diagnosis, liveness

_ASK_AGAIN_S: Final = 2.0
_ASK_AGAIN_MAX: Final = 8
_PROBE_AGAIN_S: Final = 1.0
_IN_VAIN_MAX: Final = 3
"""How often an inconclusive probe is repeated; more probes do not help while NATS is slow."""
_SOON_S: Final = 0.8
"""After a closed connection, the diagnosis waits this long for Kubernetes."""
_ANSWER_LOST_S: Final = 10.0
"""A missing result is abandoned this long after its timeout."""


class Reason(enum.StrEnum):
    """The reason for a suspicion."""

    SILENCE = "silence"
    DISCONNECT = "disconnect"
    ABSENCE = "absence"
    PROBLEM = "problem"
    REVIEW = "review"
    """A review of a lost plugin: whether it is still lost, or in a worse state."""


class Suspicion:
    """One suspicion: its probes and queries, and their answers or timeouts."""

    __slots__ = (
        "_asked_again",
        "_cluster_awaited",
        "_cluster_due",
        "_cluster_timeout_s",
        "_give_up_at",
        "_next_ask_at",
        "_probe_at",
        "_probes_in_vain",
        "cluster_number",
        "facts",
        "is_subscribed",
        "number",
        "opened_at",
        "probed_at",
        "reason",
    )

    def __init__(
        self,
        reason: Reason,
        number: int,
        settings: config.Detection,
        *,
        now: float,
        has_cluster: bool,
    ) -> None:
        self.reason = reason
        self.opened_at = now
        self.number = self.cluster_number = number
        self.is_subscribed: bool | None = None
        """Whether an unanswered probe reached a subscriber; None until a probe fails."""
        self.facts: signals.Facts | None = None
        is_disconnect = reason is Reason.DISCONNECT
        wait_s = settings.restart_s if is_disconnect else 0.0
        self._cluster_awaited = has_cluster and reason is not Reason.PROBLEM
        self._probe_at: float | None = now + wait_s
        self._probes_in_vain = 0
        self.probed_at = now
        """When the first failed probe was sent; a later disconnection is newer evidence."""
        # a query made too early shows a running pod: Kubernetes sees its end a second later
        self._next_ask_at: float | None = now + wait_s if self._cluster_awaited else None
        self._asked_again = 0
        self._cluster_timeout_s = min(
            settings.probe_timeout_s, _SOON_S if is_disconnect else math.inf
        )
        self._cluster_due = now + wait_s + self._cluster_timeout_s
        self._give_up_at = now + wait_s + settings.probe_timeout_s + _ANSWER_LOST_S

    def is_probe_due(self, now: float) -> bool:
        """Return whether to probe the plugin now; True only once for each planned probe."""
        if self._probe_at is None or self._probe_at > now:
            return False
        self._probe_at = None
        if self.is_subscribed is None:
            self.probed_at = now
        return True

    def is_cluster_due(self, now: float) -> bool:
        """Return whether to query Kubernetes now; True only once for each planned query."""
        if self._next_ask_at is None or self._next_ask_at > now:
            return False
        self._next_ask_at = None
        self._cluster_awaited, self._cluster_due = True, now + self._cluster_timeout_s
        return True

    def deadline(self) -> float:
        """Return when to check this suspicion again."""
        waits = [self._give_up_at]
        if self._probe_at is not None:
            waits.append(self._probe_at)
        if self._next_ask_at is not None:
            # Kubernetes is asked once more first, so the unanswered query no longer matters
            waits.append(self._next_ask_at)
        elif self.is_subscribed is not None and self._cluster_awaited:
            waits.append(self._cluster_due)
        return min(waits)

    def answered(self, answer: signals.Facts | None) -> None:
        """Record an answer from Kubernetes; None means that Kubernetes did not answer."""
        self._cluster_awaited = False
        if answer is not None:
            self.facts = answer

    def is_complete(self, now: float) -> bool:
        """Return whether a diagnosis is possible: all answers have arrived or timed out."""
        if self.is_subscribed is None or self._next_ask_at is not None:
            return False
        return not self._cluster_awaited or now >= self._cluster_due

    def is_hopeless(self, now: float) -> bool:
        """Return whether an answer is so late that it counts as lost."""
        return now >= self._give_up_at

    def probe_again(self, now: float) -> bool:
        """Schedule another probe soon; return False if that was done too often, or is too late."""
        if self._probes_in_vain >= _IN_VAIN_MAX or self.is_hopeless(now):
            return False
        self._probes_in_vain += 1
        self._probe_at = now + _PROBE_AGAIN_S
        self._give_up_at = max(self._give_up_at, self._probe_at + _ANSWER_LOST_S)
        return True

    @property
    def has_waited(self) -> bool:
        """Return whether Kubernetes was queried often enough to stop waiting."""
        return self._asked_again >= _ASK_AGAIN_MAX

    def ask_again(self, now: float) -> None:
        """Schedule another query to Kubernetes, because the answers so far allow no diagnosis.

        The plugin is probed again as well: it may be back long before its next heartbeat is due.
        The diagnosis does not wait for that probe; until it is answered, the last result counts.
        """
        self._asked_again += 1
        self._next_ask_at = self._probe_at = now + _ASK_AGAIN_S
        self._give_up_at = max(self._give_up_at, self._next_ask_at + _ANSWER_LOST_S)


class Investigation(msgspec.Struct, eq=False, gc=False):
    """Opens suspicions, numbers probes and queries, and tracks which answers are missing."""

    node: str
    plugin: str
    settings: config.Detection
    has_cluster: bool
    suspicion: Suspicion | None = None
    review_due: float | None = None
    """When to review a lost plugin, if no suspicion is open."""
    _review_s: float = 0.0
    _number: int = 0

    def __post_init__(self) -> None:
        """Begin with the shortest wait."""
        self._review_s = self.settings.review_s

    @property
    def is_about_silence(self) -> bool:
        """Return False if the open suspicion is about a reported problem; otherwise True."""
        return self.suspicion is None or self.suspicion.reason is not Reason.PROBLEM

    def open(self, reason: Reason, now: float) -> list[steps.Step]:
        """Open a suspicion; return the probes and queries to send now."""
        self._number += 1
        self.suspicion = Suspicion(
            reason, self._number, self.settings, now=now, has_cluster=self.has_cluster
        )
        return self.questions(self.suspicion, now)

    def deadline(self) -> float | None:
        """Return when to check the suspicion or review the plugin; None if neither is planned."""
        return self.review_due if self.suspicion is None else self.suspicion.deadline()

    def questions(self, suspicion: Suspicion, now: float) -> list[steps.Step]:
        """Return the probes and queries to send now."""
        questions: list[steps.Step] = []
        if suspicion.is_probe_due(now):
            probe = signals.Probe(
                node=self.node,
                plugin=self.plugin,
                number=suspicion.number,
                timeout_s=self.settings.probe_timeout_s,
            )
            questions.append(probe)
        if suspicion.is_cluster_due(now):
            question = self.ask_kubernetes()
            suspicion.cluster_number = question.number
            questions.append(question)
        return questions

    def ask_kubernetes(self, resources: tuple[str, ...] = ()) -> signals.AskCluster:
        """Create a query for Kubernetes, with a new number."""
        self._number += 1
        return signals.AskCluster(
            node=self.node,
            plugin=self.plugin,
            number=self._number,
            timeout_s=self.settings.probe_timeout_s,
            resources=resources,
        )

    def awaited(self, number: int) -> Suspicion | None:
        """Return the suspicion that is waiting for this probe's answer, if any."""
        suspicion = self.suspicion
        return suspicion if suspicion is not None and suspicion.number == number else None

    def answered(self, answer: signals.Facts | None, number: int) -> Suspicion | None:
        """Record an answer from Kubernetes; return the suspicion that it belongs to, if any."""
        suspicion = self.suspicion
        if suspicion is None or suspicion.cluster_number != number:
            return None
        suspicion.answered(answer)
        return suspicion

    def diagnose(
        self,
        suspicion: Suspicion,
        alive: liveness.Liveness,
        healthy: Mapping[str, int],
        now: float,
        *,
        is_new: bool,
    ) -> steps.Diagnosis | None:
        """Return the diagnosis; None while answers are missing, or if it is better to wait.

        Also plan the next review, unless the diagnosis is MAINTENANCE. `healthy` is the number of
        Healthy devices by resource, as last reported. `is_new` means that the plugin was not
        already lost.
        """
        if not suspicion.is_complete(now):
            return None
        observed = diagnosis.Observations(
            silent_s=now - alive.silent_since,
            interval_s=alive.order.interval_s,
            was_heard=alive.was_heard,
            is_expected=alive.is_expected,
            # the plugin was subscribed when it was probed, but may have ended since
            is_subscribed=bool(suspicion.is_subscribed)
            and not alive.connections.has_ended_since(suspicion.probed_at),
            connections=alive.connections,
            has_cluster=self.has_cluster,
            cluster=suspicion.facts,
            healthy=healthy,
            has_waited=suspicion.has_waited,
            now=now,
        )
        reached = diagnosis.diagnose(observed, self.settings)
        if reached is None:
            suspicion.ask_again(now)
            return None
        self.suspicion = None
        if reached.verdict is not Verdict.MAINTENANCE:
            longer_s = min(2 * self._review_s, self.settings.review_max_s)
            self._review_s = self.settings.review_s if is_new else longer_s
            is_early = reached.rule is Rule.NOT_BACK
            wait_s = max(0.0, alive.timeout_s - observed.quiet_s) if is_early else self._review_s
            self.review_due = now + wait_s
        return reached

    def review(self, now: float) -> list[steps.Step]:
        """Begin to check whether a plugin is still lost; return the probes and queries to send."""
        self.review_due = None
        return self.open(Reason.REVIEW, now)

    def review_soon(self, now: float) -> None:
        """Plan an early review of a lost plugin, unless a suspicion is already open."""
        if self.suspicion is None:
            self.review_due = now + self.settings.restart_s

    def postpone(self, since: float) -> None:
        """Drop an undecided suspicion, and review the plugin some time after `since`."""
        self.suspicion, self.review_due = None, since + self._review_s

    def refuted(self) -> Suspicion | None:
        """Drop the suspicion, because the plugin is alive; return the suspicion or None."""
        suspicion, self.suspicion = self.suspicion, None
        return suspicion

    def end(self) -> None:
        """Cancel the planned review, and reset the wait before the next one."""
        self.review_due, self._review_s = None, self.settings.review_s

    def shift(self, seconds: float) -> None:
        """Postpone the review by the time during which we could receive nothing."""
        if self.review_due is not None:
            self.review_due += seconds
