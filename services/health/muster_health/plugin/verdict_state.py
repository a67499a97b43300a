"""Pure: the state of one plugin between a suspicion and a verdict, and what follows from it alone.

`verdict` adds the transitions.
"""

from dataclasses import dataclass, field
from typing import Final

from muster import vocabulary
from muster_health.model import config, snapshot
from muster_health.model.snapshot import State
from muster_health.plugin import investigation, liveness, self_reported, standing_verdict
from muster_health.plugin.investigation import Reason

_IN_FLIGHT_S: Final = 0.5
"""A heartbeat may be in flight when its sender's connection ends."""
_NOT_LOST: Final = frozenset({State.UNKNOWN, State.HEALTHY, State.RECOVERING, State.SUSPECT})


@dataclass(slots=True, kw_only=True, eq=False)
class VerdictState:
    """State and verdict of one plugin.

    It reads `alive` and `reported`, which the tracked plugin updates first.
    """

    context: config.Context
    alive: liveness.Liveness
    reported: self_reported.SelfReported
    standing: standing_verdict.StandingVerdict
    recovery: standing_verdict.Recovery
    investigation: investigation.Investigation
    planned: standing_verdict.PlannedStop = field(default_factory=standing_verdict.PlannedStop)
    state: State = State.UNKNOWN
    is_suspended: bool = False
    """It is silent, and not diagnosed: many are suspect at once."""
    before: State = State.UNKNOWN
    """The state in which a suspicion began."""
    is_resumed: bool = False
    """The suspicion was opened again after a mass failure."""

    @property
    def settled(self) -> State:
        """The state without a suspicion that may be pending."""
        return self.before if self.state is State.SUSPECT else self.state

    @property
    def is_calm(self) -> bool:
        """Return whether it waits for nothing but the next heartbeat."""
        return self.state is State.HEALTHY and self.reported.problem is None

    @property
    def is_silent(self) -> bool:
        """Return whether it is suspected of silence, and nothing is decided."""
        return self.state is State.SUSPECT and self.investigation.is_about_silence

    def is_suspect(self, now: float) -> bool:
        """Return whether it is silent, or has a problem that many may share."""
        if self.is_silent:
            return True
        is_common = self.reported.is_common(self.alive.order.interval_s, now)
        return is_common and self.state in _NOT_LOST

    def restore(
        self, before: snapshot.Snapshot, now: float, *, waited_s: float, is_overdue: bool
    ) -> None:
        """Go on where a former process stopped; `is_overdue` has been reported already.

        Its verdict stood for `waited_s`, as far as clocks of several machines can tell.
        """
        self.state = before.state
        self.planned.instance, self.planned.return_s = before.leaving, before.return_s
        self.standing.restore(before, now, waited_s=waited_s)
        if self.state is State.MAINTENANCE and not is_overdue:
            return_s = self.alive.remaining_s(before.return_s, waited_s)
            self.planned.due = now + return_s
        if self.state is State.LOST:
            self.investigation.postpone(now)
        if self.state is State.RECOVERING:
            self.recovery.good(now, counts=False, hold_s=self.standing.damping.hold_s)

    @property
    def may_have_problem(self) -> bool:
        """Return whether a first problem would be news."""
        is_heard = self.state in {State.UNKNOWN, State.HEALTHY, State.RECOVERING}
        return is_heard and self.reported.problem is None

    def proves_nothing(
        self, heartbeat: vocabulary.Heartbeat, freshness: liveness.Freshness, now: float
    ) -> bool:
        """Return whether a heartbeat is no sign of life: a last one, or out of a backlog."""
        if self.state is State.MAINTENANCE:
            is_last = heartbeat.phase is vocabulary.Phase.DRAINING
            return is_last or heartbeat.instance == self.planned.instance
        suspicion = self.investigation.suspicion
        is_disconnect = suspicion is not None and suspicion.reason is Reason.DISCONNECT
        if suspicion is not None and is_disconnect and not self.alive.connections.is_open:
            return now - suspicion.opened_at < _IN_FLIGHT_S
        is_doubtful = freshness is liveness.Freshness.DOUBTFUL
        return is_doubtful and (self.is_silent or self.state is State.LOST)
