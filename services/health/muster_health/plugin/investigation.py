"""Pure: One suspicion: what was asked, what was answered, and what is still awaited.

Every answer bears the number of its question, so that a late one can do no harm. An answer that
never comes (ours to give, and a bug if it does not) ends the case undecided.
"""

import enum
import math
from typing import Final, assert_never

from muster_health.model import config, facts, steps

_ASK_AGAIN_S: Final = 2.0
_AGAIN_MAX: Final = 8
_SOON_S: Final = 0.8
"""A connection that ended is judged within 3 s, whether or not Kubernetes answers."""
_LOST_S: Final = 10.0
"""After its time, an answer is given up that must come in time."""


class Reason(enum.StrEnum):
    """What a suspicion is about."""

    SILENCE = "silence"
    DISCONNECT = "disconnect"
    ABSENCE = "absence"
    TROUBLE = "trouble"
    REVIEW = "review"
    """Of one that was found to be lost: is it still so, and is it worse?"""


class Question(enum.StrEnum):
    """Whom to ask now."""

    PLUGIN = "plugin"
    CLUSTER = "cluster"


class Suspicion:
    """One suspicion of one plugin."""

    __slots__ = (
        "_again",
        "_again_at",
        "_answers_s",
        "_cluster_awaited",
        "_facts_due",
        "_give_up_at",
        "_probe_at",
        "asked_at",
        "cluster_number",
        "doubt",
        "known",
        "listens",
        "number",
        "opened_at",
    )

    def __init__(
        self,
        doubt: Reason,
        number: int,
        settings: config.Detection,
        *,
        now: float,
        has_cluster: bool,
    ) -> None:
        self.doubt = doubt
        self.opened_at = now
        self.number = self.cluster_number = number
        self.listens: bool | None = None
        """What the probe found, if it found no sign of life: somebody who is mute, or nobody."""
        self.known: facts.Facts | None = None
        ended = doubt is Reason.DISCONNECT
        wait_s = settings.restart_s if ended else 0.0
        self._cluster_awaited = has_cluster and doubt is not Reason.TROUBLE
        self._probe_at: float | None = now + wait_s
        self.asked_at = now
        """When the plugin was asked; what happened to its connection since is newer than that."""
        # what is asked too early says that all is well: a pod's end takes a second to be seen
        self._again_at: float | None = now + wait_s if self._cluster_awaited else None
        self._again = 0
        self._answers_s = min(settings.probe_timeout_s, _SOON_S if ended else math.inf)
        self._facts_due = now + wait_s + self._answers_s
        self._give_up_at = now + wait_s + settings.probe_timeout_s + _LOST_S

    def due(self, now: float) -> list[Question]:
        """Return whom to ask now."""
        asked: list[Question] = []
        if self._probe_at is not None and self._probe_at <= now:
            self._probe_at, self.asked_at = None, now
            asked.append(Question.PLUGIN)
        if self._again_at is not None and self._again_at <= now:
            self._again_at = None
            self._cluster_awaited, self._facts_due = True, now + self._answers_s
            asked.append(Question.CLUSTER)
        return asked

    def deadline(self) -> float:
        """Return when to look at it again."""
        waits = [self._give_up_at]
        if self._probe_at is not None:
            waits.append(self._probe_at)
        if self._again_at is not None:
            # Kubernetes is asked once more first: what it did not say in time is of no use
            waits.append(self._again_at)
        elif self.listens is not None and self._cluster_awaited:
            waits.append(self._facts_due)
        return min(waits)

    def learned(self, known: facts.Facts | None) -> None:
        """Take what Kubernetes knows; None is no answer."""
        self._cluster_awaited = False
        if known is not None:
            self.known = known

    def is_complete(self, now: float) -> bool:
        """Tell whether it can be judged: all have answered, or have had their time."""
        if self.listens is None or self._again_at is not None:
            return False
        return not self._cluster_awaited or now >= self._facts_due

    def is_hopeless(self, now: float) -> bool:
        """Tell whether an answer was lost."""
        return now >= self._give_up_at

    @property
    def has_waited(self) -> bool:
        """Tell whether Kubernetes was asked often enough to wait no longer."""
        return self._again >= _AGAIN_MAX

    def ask_again(self, now: float) -> None:
        """Take that what Kubernetes knows is about to tell more: a lease is renewed, or not."""
        self._again += 1
        self._again_at = now + _ASK_AGAIN_S
        self._give_up_at = max(self._give_up_at, self._again_at + _LOST_S)


class Investigation:
    """Opens cases, numbers questions, and knows which answers are still awaited."""

    __slots__ = ("_has_cluster", "_number", "_review_s", "_settings", "case", "review_due")

    def __init__(self, settings: config.Detection, *, has_cluster: bool) -> None:
        self.case: Suspicion | None = None
        self.review_due: float | None = None
        """When to ask anew about one that is lost, while nobody is asked."""
        self._review_s = settings.review_s
        self._settings = settings
        self._has_cluster = has_cluster
        self._number = 0

    @property
    def is_about_silence(self) -> bool:
        """Tell whether the plugin is not known to be alive; so too while nobody is asked."""
        return self.case is None or self.case.doubt is not Reason.TROUBLE

    @property
    def has_cluster(self) -> bool:
        """Tell whether there is a Kubernetes API to ask."""
        return self._has_cluster

    def open(self, doubt: Reason, now: float) -> list[steps.Step]:
        """Begin a case; return what to ask at once."""
        self._number += 1
        self.case = Suspicion(
            doubt, self._number, self._settings, now=now, has_cluster=self._has_cluster
        )
        return self.ask(self.case, now)

    def deadline(self) -> float | None:
        """Return when to look at the case, or at what was found, again."""
        return self.review_due if self.case is None else self.case.deadline()

    def found(self, now: float, *, fresh: bool, wait_s: float | None = None) -> None:
        """Take that it is lost, or (not `fresh`) still is, to be reviewed in its time."""
        self.case = None
        longer_s = min(2 * self._review_s, self._settings.review_max_s)
        self._review_s = self._settings.review_s if fresh else longer_s
        self.review_due = now + (self._review_s if wait_s is None else wait_s)

    def put_off(self, since: float) -> None:
        """Take that nothing was found: ask again a review's time after `since`."""
        self.case, self.review_due = None, since + self._review_s

    def review(self, now: float) -> list[steps.Step]:
        """Ask whether what was found still is so."""
        self.review_due = None
        return self.open(Reason.REVIEW, now)

    def refuted(self) -> Suspicion | None:
        """Take that it lives; return the case that was about it, if there was one."""
        asked, self.case = self.case, None
        return asked

    def end(self) -> None:
        """Take that nothing is to be reviewed any more."""
        self.review_due, self._review_s = None, self._settings.review_s

    def shift(self, seconds: float) -> None:
        """Take that we heard nothing for so long."""
        if self.review_due is not None:
            self.review_due += seconds

    def ask(self, asked: Suspicion, now: float) -> list[steps.Step]:
        """Return what to ask now."""
        taken: list[steps.Step] = []
        for ask in asked.due(now):
            match ask:
                case Question.PLUGIN:
                    taken.append(steps.AskPlugin(number=asked.number))
                case Question.CLUSTER:
                    inquiry = self.inquire()
                    asked.cluster_number = inquiry.number
                    taken.append(inquiry)
                case _:
                    assert_never(ask)
        return taken

    def inquire(self) -> steps.AskKubernetes:
        """Ask Kubernetes, under a number of its own."""
        self._number += 1
        return steps.AskKubernetes(number=self._number)

    def awaited(self, number: int) -> Suspicion | None:
        """Return the case that a probe's answer belongs to, if it still does."""
        asked = self.case
        return asked if asked is not None and asked.number == number else None

    def learned(self, known: facts.Facts | None, number: int) -> Suspicion | None:
        """Take what Kubernetes knows; return the case that it belongs to, if it still does."""
        asked = self.case
        if asked is None or asked.cluster_number != number:
            return None
        asked.learned(known)
        return asked
