"""Pure. Which pods the alert of a failed plugin names.

Kubernetes is asked when there is something to tell, and its answer kept until that is told; from
then on the alert itself remembers them. Nobody waits for it for long: an alert that names no pods
is better than none.
"""

from collections.abc import Sequence
from typing import Final

from muster_health import alerts, facts

_MARGIN_S: Final = 0.5
"""An answer comes within its time, and then has to be heard."""


class Question:
    """One question, for an alert about these resources; `number` is its answer's."""

    __slots__ = ("due", "found", "number", "resources")

    def __init__(self, number: int, resources: tuple[str, ...], *, due: float) -> None:
        self.number = number
        self.resources = resources
        self.due = due
        self.found: tuple[str, ...] | None = None

    def answered(self, known: facts.Facts | None, now: float) -> None:
        """Take what Kubernetes says; from now on nobody waits."""
        self.due = now
        self.found = None if known is None else known.holders


def due(now: float, timeout_s: float) -> float:
    """Return for how long an alert waits for the answer to a question that is asked now."""
    return now + timeout_s + _MARGIN_S


def named(
    alert: alerts.Alert, asked: Question | None, told: Sequence[alerts.Alert]
) -> alerts.Alert:
    """Return an alert with its pods: as was answered, or else as was told of the plugin so far."""
    if asked is not None and asked.found is not None:
        return alert.naming(asked.found, len(asked.found))
    return alert.naming(told[-1].pods, told[-1].pods_total) if told else alert
