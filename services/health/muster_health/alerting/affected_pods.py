"""Pure: Which pods the alert of a failed plugin names: those of the moment when it is told.

Kubernetes is asked when there is something to tell, and its answer kept until that is told; from
then on the alert itself remembers them. Nobody waits for it for long: an alert that names no pods
is better than none. Where no answer comes it is asked again, and then the alert says more.
"""

from collections.abc import Sequence
from typing import Final

from muster_health.model import alerts, facts

_MARGIN_S: Final = 0.5
"""An answer comes within its time, and then has to be heard."""
_AGAIN_S: Final = (20.0, 60.0)
"""How long after a question that nobody answered it is asked once more."""


class PodsQuery:
    """What is asked for an alert about these resources; `number` is the answer's that counts.

    Until `due` the alert waits. Where no answer came until `again_due` it is asked once more, or
    dropped: a missing right is an answer.
    """

    __slots__ = ("_times", "again_due", "due", "found", "number", "resources")

    def __init__(
        self, number: int, resources: tuple[str, ...], now: float, *, timeout_s: float
    ) -> None:
        self.resources = resources
        self.due = now + timeout_s + _MARGIN_S
        self.found: tuple[str, ...] | None = None
        self.again_due: float | None = None
        self._times = 0
        self.asked(number, now)

    def asked(self, number: int, now: float) -> None:
        """Take that it is asked, for the first time or once more; for that nobody waits."""
        self.number = number
        self.again_due = now + _AGAIN_S[min(self._times, len(_AGAIN_S) - 1)]
        self._times += 1

    def answered(self, known: facts.Facts | None, now: float) -> None:
        """Take what Kubernetes says; from now on nobody waits."""
        self.due = min(self.due, now)
        if known is not None:
            self.found, self.again_due = known.holders, None

    def stood_still(self, seconds: float) -> None:
        """Wait longer: we stood still for so long."""
        self.due += seconds
        if self.again_due is not None:
            self.again_due += seconds

    def awaits(self, now: float) -> bool:
        """Tell whether its alert waits for the answer."""
        return now < self.due

    def is_due_again(self, now: float) -> bool:
        """Tell whether it is to be asked once more, which is done twice."""
        has_times = self._times <= len(_AGAIN_S)
        return has_times and self.again_due is not None and self.again_due <= now


def named(
    alert: alerts.Alert, asked: PodsQuery | None, told: Sequence[alerts.Alert]
) -> alerts.Alert:
    """Return an alert with its pods: as was answered, or else as was told of the plugin so far."""
    if asked is not None and asked.found is not None:
        return alert.naming(asked.found, len(asked.found))
    return alert.naming(told[-1].pods, told[-1].pods_total) if told else alert
