"""Pure: A recording under a policy: the real detector on the recorded time.

What plugins, the bus and the cluster did is fed in as it came. A process that ended, ends here; the
next one begins with what the policy itself would have had remembered. Here one leads throughout:
whoever recorded may have followed another one, which told meanwhile.
"""

import heapq
import itertools
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Final

from muster import vocabulary
from muster_health.fleet import detector
from muster_health.model import config, signals, snapshot
from muster_health.replay import oracle, recording, tapes

_LAST_S: Final = 0.05


@dataclass(frozen=True, kw_only=True)
class Policy:
    """What a policy consists of, as far as it is played."""

    detection: config.Detection
    bounds: config.Bounds


@dataclass(kw_only=True)
class Played:
    """What a policy made of a recording."""

    episodes: list[tapes.Episode] = field(default_factory=list)
    questions: Counter[str] = field(default_factory=Counter)
    """How the questions were answered."""


def play(recorded: tapes.Tape, policy: Policy | None = None) -> Played:
    """Return what a policy makes of a recording; without one, each process has its own of then."""
    return _Player(recorded, policy).run()


class _Player:
    """The recording's clock, the detector, and the answers that are under way."""

    def __init__(self, recorded: tapes.Tape, policy: Policy | None) -> None:
        self._recorded = recorded
        self._policy = policy
        self._oracle = oracle.Oracle(recorded.entries)
        self._played = Played()
        self._episodes = tapes.Episodes(recorded.zero)
        self._answers: list[tuple[float, int, oracle.Answer]] = []
        self._count = itertools.count()
        self._now = 0.0
        self._stalls = [
            (at - entry.seconds, at)
            for at, entry in recorded.entries
            if isinstance(entry, signals.ClockStalled)
        ]
        self._memory: dict[str, bytes] = {}
        self._pending: list[bytes] = []
        """What is remembered, and not yet given to the process that began."""
        self._detector: detector.Detector | None = None

    def run(self) -> Played:
        """Play it all."""
        for at, entry in self._recorded.entries:
            if isinstance(entry, recording.Header):
                if self._detector is None or entry.begins:
                    self._end()
                    self._begin(entry, at)
                continue
            assert self._detector is not None, "a tape begins with a header"
            self._advance(self._detector, at)
            if isinstance(entry, signals.Restored):
                self._recall(self._detector, entry, at)
            elif not isinstance(entry, _NOT_PLAYED):
                if isinstance(entry, _AFTER_MEMORY):
                    self._remind(self._detector, at)
                self._feed(self._detector, entry, at)
        self._end()
        self._played.episodes = self._episodes.all
        return self._played

    def _end(self) -> None:
        """Do what the last entry may have come from; what was due later nobody did."""
        if self._detector is not None:
            self._advance(self._detector, self._now + _LAST_S)

    def _begin(self, header: recording.Header, at: float) -> None:
        """Let the process that was recorded end, and another one begin."""
        self._pending = list(self._memory.values())
        self._answers.clear()
        policy = self._policy or Policy(detection=header.detection, bounds=header.bounds)
        self._detector = detector.Detector(
            policy.detection,
            runbook_url="",
            at_zero=self._recorded.zero,
            bounds=policy.bounds,
            has_cluster=header.has_cluster,
        )
        if header.sees:
            began = self._recorded.zero + timedelta(seconds=at)
            self._feed(self._detector, signals.BusBack(at=began), at)

    def _recall(self, played: detector.Detector, known: signals.Restored, at: float) -> None:
        """Give a process what is remembered, when it was given it then.

        What a process before this one told it told under its policy; but of what we never heard of
        we take its word.
        """
        self._remind(played, at)
        key = recording.key_of(known.state)
        if key not in self._memory:
            self._memory[key] = snapshot.encode(known.state)
            self._feed(played, known, at)

    def _remind(self, played: detector.Detector, at: float) -> None:
        pending, self._pending = self._pending, []
        for value in pending:
            self._feed(played, signals.Restored(state=snapshot.decode(value)), at)

    def _advance(self, played: detector.Detector, until: float) -> None:
        while True:
            due = played.next_deadline()
            answer = self._answers[0][0] if self._answers else None
            times = [time for time in (due, answer) if time is not None]
            now = self._awake(max(self._now, min(times))) if times else until + 1.0
            if now > until:
                self._now = until
                return
            self._now = now
            if due is not None and (answer is None or due <= answer):
                self._do(played.tick(now), now)
            else:
                _, _, event = heapq.heappop(self._answers)
                self._feed(played, _heard(event) if played.is_blind else event, now)

    def _awake(self, now: float) -> float:
        """Return when whoever recorded next ran: what it slept through, nobody did."""
        return next((end for begin, end in self._stalls if begin < now < end), now)

    def _feed(self, played: detector.Detector, event: signals.Input, now: float) -> None:
        self._do(played.receive(event, now), now)

    def _do(self, outs: Iterable[signals.Output], now: float) -> None:
        for out in outs:
            match out:
                case signals.Probe() | signals.AskCluster():
                    self._ask(out, now)
                case signals.Remember(key=key, value=value):
                    self._memory[key] = value
                    if not value:
                        del self._memory[key]
                case signals.Publish(event=vocabulary.AlertChanged() as alert):
                    self._episodes.take(alert, now)
                case _:
                    pass

    def _ask(self, asked: oracle.Question, now: float) -> None:
        how, after_s, answer = self._oracle.ask(asked, now)
        self._played.questions[how] += 1
        if answer is not None:
            heapq.heappush(self._answers, (now + after_s, next(self._count), answer))


_AFTER_MEMORY: Final = (signals.Beat, signals.FromPlugin)
"""What is heard only after all that is remembered was read."""
_NOT_PLAYED: Final = (
    recording.Told,
    signals.Probe,
    signals.AskCluster,
    signals.ProbeAnswered,
    signals.ProbeFailed,
    signals.ProbeInconclusive,
    signals.ClusterAnswered,
    signals.Leadership,
    signals.Remediated,
    signals.ClockStalled,
)
"""What was asked and answered, and who led then."""


def _heard(event: oracle.Answer) -> oracle.Answer:
    """Return what comes of a question while our own link is gone."""
    if not isinstance(event, signals.ProbeFailed):
        return event
    return signals.ProbeInconclusive(node=event.node, plugin=event.plugin, number=event.number)
