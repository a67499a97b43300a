"""Pure: One suspicion: what was asked, what was answered, and what is still awaited.

Every answer bears the number of its question, so that a late one can do no harm. An answer that
never comes (ours to give, and a bug if it does not) ends the case undecided.
"""

import enum
import math
from typing import Final

from muster_health.model import cluster_facts, config

_ASK_AGAIN_S: Final = 2.0
_AGAIN_MAX: Final = 8
_SOON_S: Final = 0.8
"""A connection that ended is judged within 3 s, whether or not Kubernetes answers."""
_LOST_S: Final = 10.0
"""After its time, an answer is given up that must come in time."""


class Doubt(enum.StrEnum):
    """What a suspicion is about."""

    SILENCE = "silence"
    DISCONNECT = "disconnect"
    ABSENCE = "absence"
    TROUBLE = "trouble"
    REVIEW = "review"
    """Of one that was found to be lost: is it still so, and is it worse?"""


class Ask(enum.StrEnum):
    """Whom to ask now."""

    PLUGIN = "plugin"
    CLUSTER = "cluster"


class Case:
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
        doubt: Doubt,
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
        self.known: cluster_facts.Facts | None = None
        ended = doubt is Doubt.DISCONNECT
        wait_s = settings.restart_s if ended else 0.0
        self._cluster_awaited = has_cluster and doubt is not Doubt.TROUBLE
        self._probe_at: float | None = now + wait_s
        self.asked_at = now
        """When the plugin was asked; what happened to its connection since is newer than that."""
        # what is asked too early says that all is well: a pod's end takes a second to be seen
        self._again_at: float | None = now + wait_s if self._cluster_awaited else None
        self._again = 0
        self._answers_s = min(settings.probe_timeout_s, _SOON_S if ended else math.inf)
        self._facts_due = now + wait_s + self._answers_s
        self._give_up_at = now + wait_s + settings.probe_timeout_s + _LOST_S

    def due(self, now: float) -> list[Ask]:
        """Return whom to ask now."""
        asked: list[Ask] = []
        if self._probe_at is not None and self._probe_at <= now:
            self._probe_at, self.asked_at = None, now
            asked.append(Ask.PLUGIN)
        if self._again_at is not None and self._again_at <= now:
            self._again_at = None
            self._cluster_awaited, self._facts_due = True, now + self._answers_s
            asked.append(Ask.CLUSTER)
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

    def learned(self, known: cluster_facts.Facts | None) -> None:
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
