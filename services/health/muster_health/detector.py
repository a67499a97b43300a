"""Pure. Every plugin of the fleet: inputs find their plugin, deadlines find theirs.

The detector distrusts itself first. While its own link to the bus is gone it is blind: nothing is
due. When the link is back, or its own clockwork was late, every wait begins anew, so that a bus
that was away convicts nobody.
"""

from collections.abc import Iterable
from datetime import datetime, timedelta
from typing import Final, assert_never

from muster import vocabulary
from muster_health import config, deadlines, dossier, signals, steps

_STAMP_S: Final = 2e-6


class Detector:
    """A `muster.machine.Machine`. `at_zero` is UTC at second 0 of the receiver's clock."""

    def __init__(self, settings: config.Detection, *, runbook_url: str, at_zero: datetime) -> None:
        self._settings = settings
        self._runbook_url = runbook_url
        self._at_zero = at_zero
        self._dossiers: dict[str, dossier.Dossier] = {}
        self._deadlines = deadlines.Deadlines()
        self._blind = True
        self._blind_since: float | None = None
        self._stamped = 0.0

    def receive(self, event: signals.Input, now: float) -> list[signals.Output]:
        """Take one input."""
        match event:
            case signals.FromPlugin():
                return self._report(event, now)
            case signals.Restored(state=known):
                found = self._dossier(known.node, known.plugin, now)
                outs = found.restore(known, now)
                self._deadlines.set(found.key, found.state.deadline())
                return outs
            case signals.BusLost():
                if not self._blind:
                    self._blind, self._blind_since = True, now
                return []
            case signals.BusBack(at=at):
                self._see_again(at, now)
                return []
            case (
                signals.Beat()
                | signals.ProbeAnswered()
                | signals.ProbeFailed()
                | signals.ProbeInconclusive()
            ):
                return self._hear(event, now)
            case _:
                return []

    def tick(self, now: float) -> list[signals.Output]:
        """Do what is due."""
        earliest = self._deadlines.earliest()
        if self._blind or earliest is None:
            return []
        late_s = now - earliest
        due = self._deadlines.due(now)
        if late_s > self._settings.stall_s:
            self._rebase(now, paused_s=late_s)
            return [signals.Noted(note=signals.Note.STALLED, seconds=late_s)]
        outs: list[signals.Output] = []
        for key in due:
            found = self._dossiers[key]
            outs += self._take(found, found.state.tick(now), now)
        return outs

    def next_deadline(self) -> float | None:
        """Return when `tick` is next needed; never while blind."""
        return None if self._blind else self._deadlines.earliest()

    def dossiers(self) -> Iterable[dossier.Dossier]:
        """Return what is known, plugin by plugin."""
        return self._dossiers.values()

    def _dossier(self, node: str, plugin: str, now: float) -> dossier.Dossier:
        key = dossier.key_of(node, plugin)
        found = self._dossiers.get(key)
        if found is None:
            found = self._dossiers[key] = dossier.Dossier(
                node, plugin, self._settings, now=now, runbook_url=self._runbook_url
            )
        return found

    def _hear(
        self,
        event: signals.Beat
        | signals.ProbeAnswered
        | signals.ProbeFailed
        | signals.ProbeInconclusive,
        now: float,
    ) -> list[signals.Output]:
        match event:
            case signals.Beat(heartbeat=beat):
                found = self._dossier(beat.node, beat.plugin, now)
                taken = found.state.hear(beat, now)
            case signals.ProbeAnswered(heartbeat=beat, number=number):
                found = self._dossier(beat.node, beat.plugin, now)
                taken = found.state.answered(beat, number, now)
            case signals.ProbeFailed():
                found = self._dossier(event.node, event.plugin, now)
                taken = found.state.failed(event.number, now, subscribed=event.subscribed)
            case signals.ProbeInconclusive():
                found = self._dossier(event.node, event.plugin, now)
                taken = found.state.inconclusive(event.number, now)
            case _:
                assert_never(event)
        return self._take(found, taken, now)

    def _report(self, said: signals.FromPlugin, now: float) -> list[signals.Output]:
        event = said.event
        if not isinstance(event, vocabulary.PluginEvent):
            return []
        found = self._dossier(event.node, event.plugin, now)
        if not found.is_news(said.instance, said.sequence):
            return [signals.Noted(note=signals.Note.EVENT_STALE)]
        found.report(event, self._at(now))
        taken: list[steps.Step] = []
        match event:
            case vocabulary.PluginStarted():
                found.state.started()
            case vocabulary.PluginStopping():
                taken = found.state.goodbye(event, said.instance, now)
            case vocabulary.PluginDeregistered():
                taken = found.state.hint(event, now)
            case _:
                pass
        return self._take(found, taken, now)

    def _take(
        self, found: dossier.Dossier, taken: Iterable[steps.Step], now: float
    ) -> list[signals.Output]:
        """Turn the steps of one plugin's machine into what is to be done."""
        asked: list[signals.Output] = []
        for step in taken:
            match step:
                case signals.Noted():
                    asked.append(step)
                case steps.Question(number=number):
                    asked.append(
                        signals.Probe(
                            node=found.node,
                            plugin=found.plugin,
                            number=number,
                            timeout_s=self._settings.probe_timeout_s,
                        )
                    )
                case steps.Conclusion():
                    found.conclude(step, self._at(now))
                case steps.Overdue():
                    found.overdue(step, self._at(now))
                case _:
                    assert_never(step)
        self._deadlines.set(found.key, found.state.deadline())
        return [*asked, *found.commit()]

    def _see_again(self, at: datetime, now: float) -> None:
        paused_s = 0.0 if self._blind_since is None else now - self._blind_since
        self._blind, self._blind_since = False, None
        # the wall clock may have been set meanwhile
        self._at_zero = at - timedelta(seconds=now)
        self._rebase(now, paused_s=paused_s, window_s=self._settings.reconnect_s)

    def _rebase(self, now: float, *, paused_s: float, window_s: float = 0.0) -> None:
        self._deadlines.clear()
        for key, found in self._dossiers.items():
            found.state.rebase(now, paused_s=paused_s, window_s=window_s)
            self._deadlines.set(key, found.state.deadline())

    def _at(self, now: float) -> datetime:
        """Return UTC, never the same twice: it is part of an alert's identity."""
        self._stamped = max(now, self._stamped + _STAMP_S)
        return self._at_zero + timedelta(seconds=self._stamped)
