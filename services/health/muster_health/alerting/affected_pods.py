"""Pure: the pods that the alert of a failed plugin names: those at the moment it is published.

Kubernetes is asked when there is something to publish, and its answer is kept until then; from then
on the alert itself has them. The alert does not wait for long: one that names no pods is better
than none. Where no answer comes Kubernetes is asked again, and then the alert is updated.
"""

from collections.abc import Sequence
from typing import Final

from muster_health.model import alerts, facts

_MARGIN_S: Final = 0.5
"""An answer arrives within its time, and then has to be processed."""
_AGAIN_S: Final = (20.0, 60.0)
"""How long after a question without an answer it is asked again."""


class PodsQuery:
    """What is asked for an alert about these resources; `number` is that of the valid answer.

    Until `due` the alert waits. Where no answer came until `again_due` it is asked again, or
    dropped: a missing right is an answer.
    """

    __slots__ = ("_asked_times", "again_due", "due", "number", "pods", "resources")

    def __init__(
        self, number: int, resources: tuple[str, ...], now: float, *, timeout_s: float
    ) -> None:
        self.resources = resources
        self.due = now + timeout_s + _MARGIN_S
        self.pods: tuple[str, ...] | None = None
        self.again_due: float | None = None
        self._asked_times = 0
        self.ask(number, now)

    def ask(self, number: int, now: float) -> None:
        """Record that it is asked, for the first time or again; the alert waits only once."""
        self.number = number
        self.again_due = now + _AGAIN_S[min(self._asked_times, len(_AGAIN_S) - 1)]
        self._asked_times += 1

    def answered(self, answer: facts.Facts | None, now: float) -> None:
        """Record Kubernetes' answer; from now on the alert does not wait."""
        self.due = min(self.due, now)
        if answer is not None:
            self.pods, self.again_due = answer.holders, None

    def clock_stalled(self, seconds: float) -> None:
        """Wait longer by the time that our own process was suspended."""
        self.due += seconds
        if self.again_due is not None:
            self.again_due += seconds

    def is_awaited(self, now: float) -> bool:
        """Return whether its alert waits for the answer."""
        return now < self.due

    def is_due_again(self, now: float) -> bool:
        """Return whether to ask again, which is done twice."""
        has_attempts = self._asked_times <= len(_AGAIN_S)
        return has_attempts and self.again_due is not None and self.again_due <= now


def named(
    alert: alerts.Alert, query: PodsQuery | None, published: Sequence[alerts.Alert]
) -> alerts.Alert:
    """Return an alert with its pods: as answered, or else as published of the plugin so far."""
    if query is not None and query.pods is not None:
        return alert.naming(query.pods, len(query.pods))
    last = published[-1] if published else None
    return alert if last is None else alert.naming(last.pods, last.pods_total)
