"""Pure. The questions about one plugin: at most one case at a time, and what is made of it."""

from typing import assert_never

from muster_health import case, config, facts, steps
from muster_health.case import Ask, Doubt


class Inquest:
    """Opens cases, numbers questions, and knows which answers are still awaited."""

    __slots__ = ("_has_cluster", "_number", "_settings", "case")

    def __init__(self, settings: config.Detection, *, has_cluster: bool) -> None:
        self.case: case.Case | None = None
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
        self.case = case.Case(
            doubt, self._number, self._settings, now=now, has_cluster=self._has_cluster
        )
        return self.ask(self.case, now)

    def ask(self, asked: case.Case, now: float) -> list[steps.Step]:
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

    def awaited(self, number: int) -> case.Case | None:
        """Return the case that a probe's answer belongs to, if it still does."""
        asked = self.case
        return asked if asked is not None and asked.number == number else None

    def learned(self, known: facts.Facts | None, number: int) -> case.Case | None:
        """Take what Kubernetes knows; return the case that it belongs to, if it still does."""
        asked = self.case
        if asked is None or asked.cluster_number != number:
            return None
        asked.learned(known)
        return asked
