"""Pure: self-check of the detector: its link to NATS, whether it ran late, the time.

It is disconnected while its link to NATS is gone, and at first. Its process was suspended if it was
called much later than it had asked for. Both concern the detector itself, and no plugin.
"""

from datetime import datetime, timedelta
from typing import Final

from muster_health.model import config, signals

_STAMP_S: Final = 2e-6


class SelfCheck:
    """Whether the detector may reach verdicts. `at_zero` is UTC at second 0 of its clock."""

    def __init__(self, settings: config.Detection, at_zero: datetime) -> None:
        self.is_disconnected = True
        self.alarm_due: float | None = None
        self._settings = settings
        self._at_zero = at_zero
        self.wall_zero = at_zero.timestamp()
        self._since: float | None = None
        self._alarmed = False
        self._promised: float | None = None
        self._called_at = 0.0
        self._stamped = 0.0

    def late_s(self, now: float) -> float:
        """Return for how long our process was suspended; 0 if negligible."""
        if self._promised is None or self.is_disconnected:
            return 0.0
        late_s = now - max(self._promised, self._called_at)
        return late_s if late_s > self._settings.stall_s else 0.0

    def called(self, now: float, promised: float | None) -> None:
        """Record that we ran, and when we asked to be called again."""
        self._called_at, self._promised = now, promised

    def lost(self, now: float) -> None:
        """Record that our link is gone, or not there yet."""
        self.is_disconnected = True
        if self._since is None:
            self._since = now
            self.alarm_due = now + self._settings.blind_s

    def alarm(self, now: float) -> list[signals.Output]:
        """Raise an alarm, once it has lasted."""
        if self.alarm_due is None or self.alarm_due > now:
            return []
        self.alarm_due, self._alarmed = None, True
        seconds = now - (now if self._since is None else self._since)
        summary = (
            f"health has been disconnected from NATS for {seconds:.0f} s; detection is suspended"
        )
        return [signals.Alarm(firing=True, summary=summary, seconds=seconds)]

    def back(self, at: datetime, now: float) -> tuple[float, list[signals.Output]]:
        """Record that our link is there; return for how long it was not, and what to do."""
        seconds = 0.0 if self._since is None else now - self._since
        self.is_disconnected, self._since, self.alarm_due = False, None, None
        # the wall clock may have been set meanwhile
        self._at_zero = at - timedelta(seconds=now)
        self.wall_zero = self._at_zero.timestamp()
        outs: list[signals.Output] = [
            signals.Noted(note=signals.Note.DISCONNECTED, seconds=seconds)
        ]
        if self._alarmed:
            self._alarmed = False
            summary = f"health is connected to NATS again after {seconds:.0f} s"
            outs.append(signals.Alarm(firing=False, summary=summary, seconds=seconds))
        return seconds, outs

    def at(self, now: float) -> datetime:
        """Return UTC, never the same twice: it is part of an alert's identity."""
        self._stamped = max(now, self._stamped + _STAMP_S)
        return self._at_zero + timedelta(seconds=self._stamped)
