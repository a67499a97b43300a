"""Pure: tracks a configuration that one plugin refused; alerts if it is not corrected in time.

| state   | refused                   | applied, another hash, or another process | after the wait |
|---------|---------------------------|-------------------------------------------|----------------|
| none    | waiting                   | none                                      |                |
| waiting | waiting, the wait goes on | none                                      | alert          |
| alert   | alert, with the new text  | none: the alert is resolved               |                |

The wait leaves time to correct the file. Heartbeats override events, because an event may be lost:
a heartbeat contains the hash of the active configuration, and a process that started after the
refusal has accepted its configuration.
"""

from collections.abc import Iterable
from datetime import datetime
from typing import Final

import msgspec

from muster import vocabulary
from muster.vocabulary import AlertKind
from muster_health.alerting import evidence
from muster_health.model import alerts, snapshot

_SHOWN_MAX: Final = 4
_TEXT_MAX: Final = 300
_IN_FLIGHT_S: Final = 10.0
"""For this long after a refusal, a heartbeat may still contain an earlier file's hash."""
_APPLIED: Final = "a configuration that it accepts is active"
_RESTARTED: Final = "the plugin has restarted, with a configuration that it accepts"


class RefusedConfiguration(msgspec.Struct, eq=False, gc=False):
    """The refused configuration of one plugin; `known` is None if there is none."""

    wait_s: float
    known: snapshot.KnownRefusal | None = None
    ended: str = _APPLIED
    """Why the last refusal is no longer relevant."""
    changes: int = 0
    _since: float = 0.0
    _refused_at: float = 0.0

    def restore(self, stored: snapshot.KnownRefusal | None, since: float) -> None:
        """Restore the state that a previous process saved, unless a newer event has arrived."""
        if not self.changes:
            self.known, self._since, self._refused_at = stored, since, since

    def apply(self, event: vocabulary.Event, instance: str, now: float, wall: float) -> None:
        """Record a plugin's event; `wall` is the current Unix time, which is saved."""
        match event:
            case vocabulary.ConfigurationRefused():
                before = self.known
                if before is None:
                    self._since = now
                texts = (text[:_TEXT_MAX] for text in event.problems[:_SHOWN_MAX])
                self.known = snapshot.KnownRefusal(
                    since=before.since if before else wall,
                    instance=instance,
                    config_hash=event.config_hash,
                    problems=tuple(texts),
                )
                self._refused_at = now
                self.changes += 1
            case vocabulary.ConfigurationApplied():
                self._end(_APPLIED)
            case _:
                pass

    def observe(self, heartbeat: vocabulary.Heartbeat, now: float) -> bool:
        """Evaluate a heartbeat; return whether the configuration has been corrected."""
        known = self.known
        if known is None or now < self._refused_at + _IN_FLIGHT_S:
            return False
        if known.instance and heartbeat.instance != known.instance:
            self._end(_RESTARTED)
        elif known.config_hash and heartbeat.config_hash not in {"", known.config_hash}:
            self._end(_APPLIED)
        return self.known is None

    def due(self, now: float) -> float | None:
        """Return when the wait ends; None if it has ended, or if nothing was refused."""
        if self.known is None or self.is_overdue(now):
            return None
        return self._since + self.wait_s

    def is_overdue(self, now: float) -> bool:
        """Return whether the configuration has remained uncorrected for too long."""
        return self.known is not None and now >= self._since + self.wait_s

    def alerts(self, *, node: str, plugin: str, now: float, at: datetime) -> Iterable[alerts.Alert]:
        """Yield the alert if the wait is over."""
        if self.known is None or not self.is_overdue(now):
            return
        problems = self.known.problems or ("no reason given",)
        applied = f"the active configuration is still {self.known.config_hash}"
        yield alerts.Alert(
            kind=AlertKind.CONFIGURATION_REFUSED,
            summary=f"{plugin} on {node} refused its new configuration: {problems[0]}",
            evidence=(
                *(evidence.of("plugin", problem) for problem in problems),
                evidence.of("plugin", applied),
            ),
            starts_at=at,
            changed_at=at,
        )

    def why_ended(self) -> tuple[vocabulary.Evidence, ...]:
        """Return the evidence that the configuration has been corrected."""
        return (evidence.of("plugin", self.ended),)

    def _end(self, why: str) -> None:
        if self.known is not None:
            self.known, self.ended = None, why
            self.changes += 1
