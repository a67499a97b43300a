"""Pure: The questions about one plugin: one case at a time, and the next review of what was found.

Of one that was found to be lost all is asked again, and each time that it still is, the wait until
the next time is twice as long.
"""

from typing import assert_never

from muster_health.model import cluster_facts, config, steps
from muster_health.plugin import suspicion
from muster_health.plugin.suspicion import Ask, Doubt


class Inquest:
    """Opens cases, numbers questions, and knows which answers are still awaited."""

    __slots__ = ("_has_cluster", "_number", "_review_s", "_settings", "case", "review_due")

    def __init__(self, settings: config.Detection, *, has_cluster: bool) -> None:
        self.case: suspicion.Case | None = None
        self.review_due: float | None = None
        """When to ask anew about one that is lost, while nobody is asked."""
        self._review_s = settings.review_s
        self._settings = settings
        self._has_cluster = has_cluster
        self._number = 0

    @property
    def is_about_silence(self) -> bool:
        """Tell whether the plugin is not known to be alive; so too while nobody is asked."""
        return self.case is None or self.case.doubt is not Doubt.TROUBLE

    @property
    def has_cluster(self) -> bool:
        """Tell whether there is a Kubernetes API to ask."""
        return self._has_cluster

    def open(self, doubt: Doubt, now: float) -> list[steps.Step]:
        """Begin a case; return what to ask at once."""
        self._number += 1
        self.case = suspicion.Case(
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
        return self.open(Doubt.REVIEW, now)

    def refuted(self) -> suspicion.Case | None:
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

    def ask(self, asked: suspicion.Case, now: float) -> list[steps.Step]:
        """Return what to ask now."""
        taken: list[steps.Step] = []
        for ask in asked.due(now):
            match ask:
                case Ask.PLUGIN:
                    taken.append(steps.Question(number=asked.number))
                case Ask.CLUSTER:
                    inquiry = self.inquire()
                    asked.cluster_number = inquiry.number
                    taken.append(inquiry)
                case _:
                    assert_never(ask)
        return taken

    def inquire(self) -> steps.Inquiry:
        """Ask Kubernetes, under a number of its own."""
        self._number += 1
        return steps.Inquiry(number=self._number)

    def awaited(self, number: int) -> suspicion.Case | None:
        """Return the case that a probe's answer belongs to, if it still does."""
        asked = self.case
        return asked if asked is not None and asked.number == number else None

    def learned(self, known: cluster_facts.Facts | None, number: int) -> suspicion.Case | None:
        """Take what Kubernetes knows; return the case that it belongs to, if it still does."""
        asked = self.case
        if asked is None or asked.cluster_number != number:
            return None
        asked.learned(known)
        return asked
