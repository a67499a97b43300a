"""Pure: decides how long an alert waits because the plugin may only be pausing, or recovering.

A process that is suspended, or briefly cut off, looks like one that has failed, and returns by
itself. Therefore an alert waits for `patience_s` after the latest failure if a pause could also
have caused what its rule describes:

    rule             | what a pause looks like
    -----------------|------------------------------------------------------------------
    NOT_BACK         | its connection has just ended, and it is not back yet
    NO_ANSWER        | its connection is open, but its process does not answer a probe
    POD_NOT_READY    | the kubelet's probes of its pod fail
    ONLY_BUS_SILENT  | its pod is Running and Ready, but it sends nothing to the bus
    CONNECTION_STALE | the server closed its connection, as it does if nobody reads it

The verdict itself does not wait: see docs/decisions/patience.md.
"""

from dataclasses import dataclass
from typing import Final

from muster_health.model import config, steps
from muster_health.model.snapshot import State

_PAUSE_RULES: Final = frozenset(
    {
        steps.Rule.NOT_BACK,
        steps.Rule.NO_ANSWER,
        steps.Rule.POD_NOT_READY,
        steps.Rule.ONLY_BUS_SILENT,
        steps.Rule.CONNECTION_STALE,
    }
)
"""The rules that a temporary pause of the plugin could also lead to."""


@dataclass(slots=True, eq=False)
class AlertDelay:
    """How long the alert about one plugin waits; times are health's monotonic seconds."""

    context: config.Context
    _restored_due: float = 0.0
    """The end of the wait for a verdict of a previous process; 0 for one of this process."""

    def restore(self, due: float) -> None:
        """Restore the wait for the verdict of a previous process."""
        self._restored_due = due

    def reset(self) -> None:
        """Drop the restored wait, because there is a new verdict."""
        self._restored_due = 0.0

    def due(self, standing: steps.Standing) -> float:
        """Return when a pause that began at the latest failure would be too long."""
        return max(self._restored_due, standing.failed_at + self.context.settings.patience_s)

    def waits(self, standing: steps.Standing, now: float) -> bool:
        """Return whether it is too early to alert: the plugin may be pausing, or recovering."""
        if standing.rule not in _PAUSE_RULES:
            return False
        return now < self.due(standing) or standing.state is State.RECOVERING
