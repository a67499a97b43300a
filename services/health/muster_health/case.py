"""Pure. One suspicion: what was asked, what was answered, and what is still awaited.

Every answer bears the number of its question, so that a late one can do no harm. An answer that
never comes (ours to give, and a bug if it does not) ends the case undecided.
"""

import enum
from typing import Final

from muster_health import config, facts

_ASK_AGAIN_S: Final = 2.0
_AGAIN_MAX: Final = 6
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
        "_cluster_awaited",
        "_facts_due",
        "_give_up_at",
        "_has_cluster",
        "_probe_at",
        "_settings",
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
        self.known: facts.Facts | None = None
        self._settings = settings
        self._has_cluster = has_cluster and doubt is not Doubt.TROUBLE
        self._cluster_awaited = self._has_cluster
        wait_s = settings.restart_s if doubt is Doubt.DISCONNECT else 0.0
        self._probe_at: float | None = now + wait_s
        self._facts_due = now + max(settings.probe_timeout_s, wait_s)
        self._again_at: float | None = None
        self._again = 0
        self._give_up_at = now + wait_s + settings.probe_timeout_s + _LOST_S

    def begin(self, now: float) -> list[Ask]:
        """Return whom to ask first."""
        asked = [Ask.CLUSTER] if self._has_cluster else []
        return [*self.due(now), *asked]

    def due(self, now: float) -> list[Ask]:
        """Return whom to ask now."""
        asked: list[Ask] = []
        if self._probe_at is not None and self._probe_at <= now:
            self._probe_at = None
            asked.append(Ask.PLUGIN)
        if self._again_at is not None and self._again_at <= now:
            self._again_at = None
            self._cluster_awaited, self._facts_due = True, now + self._settings.probe_timeout_s
            asked.append(Ask.CLUSTER)
        return asked

    def deadline(self) -> float:
        """Return when to look at it again."""
        waits = [self._give_up_at]
        if self._probe_at is not None:
            waits.append(self._probe_at)
        if self._again_at is not None:
            waits.append(self._again_at)
        if self.listens is not None and self._cluster_awaited:
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
