"""Pure: A recording under a policy: the real detector on the recorded time.

What plugins, the bus and the cluster did is fed in as it came. A process that ended, ends here; the
next one begins with what the policy itself would have had remembered. Here one leads throughout:
whoever recorded may have followed another one, which told meanwhile.
"""

import bisect
import dataclasses
import heapq
import itertools
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Final, TypeVar

from muster import vocabulary
from muster_health.fleet import detector
from muster_health.model import config, signals, snapshot
from muster_health.replay import recording

_LAST_S: Final = 0.05
AS_THEN: Final = "as it was then"
UNKNOWN: Final = "not known, taken for no answer"
_NEAR_S: Final = 60.0
_SAME_S: Final = 0.5
_ANSWER_S: Final = 0.002

T = TypeVar("T")
Probed = signals.ProbeAnswered | signals.ProbeFailed | signals.ProbeInconclusive
Question = signals.Probe | signals.AskCluster
Answer = Probed | signals.ClusterAnswered
_About = tuple[str, str, type[Question], tuple[str, ...]]
Known = tuple[str, float, Answer | None]
"""How it is known, after how many seconds it comes, and the answer; None is that none ever came."""

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


@dataclass(frozen=True, kw_only=True)
class Policy:
    """What a policy consists of, as far as it is played."""

    detection: config.Detection
    bounds: config.Bounds


@dataclass(kw_only=True)
class Played:
    """What a policy made of a recording."""

    episodes: list[recording.Episode] = field(default_factory=list)
    questions: Counter[str] = field(default_factory=Counter)
    """How the questions were answered."""


def play(recorded: recording.Tape, policy: Policy | None = None) -> Played:
    """Return what a policy makes of a recording; without one, each process has its own of then."""
    return _Player(recorded, policy).run()


class _Player:
    """The recording's clock, the detector, and the answers that are under way."""

    def __init__(self, recorded: recording.Tape, policy: Policy | None) -> None:
        self._recorded = recorded
        self._policy = policy
        self._oracle = Oracle(recorded.entries)
        self._played = Played()
        self._episodes = recording.Episodes(recorded.zero)
        self._answers: list[tuple[float, int, Answer]] = []
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
                self._feed(played, _heard(event) if played.is_disconnected else event, now)

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

    def _ask(self, asked: Question, now: float) -> None:
        how, after_s, answer = self._oracle.ask(asked, now)
        self._played.questions[how] += 1
        if answer is not None:
            heapq.heappush(self._answers, (now + after_s, next(self._count), answer))


def _heard(event: Answer) -> Answer:
    """Return what comes of a question while our own link is gone."""
    if not isinstance(event, signals.ProbeFailed):
        return event
    return signals.ProbeInconclusive(node=event.node, plugin=event.plugin, number=event.number)


@dataclasses.dataclass(slots=True)
class _Asked:
    at: float
    answered_at: float = 0.0
    answer: Answer | None = None


class Oracle:
    """Answers questions from all that was recorded."""

    def __init__(self, entries: Iterable[tuple[float, recording.Entry]]) -> None:
        self._beats: dict[tuple[str, str], list[tuple[float, vocabulary.Heartbeat]]]
        self._beats = defaultdict(list)
        self._answers: dict[_About, list[tuple[float, Answer]]] = defaultdict(list)
        self._asked: dict[_About, list[_Asked]] = defaultdict(list)
        asked: dict[tuple[_About, int], _Asked] = {}
        for at, entry in entries:
            match entry:
                case recording.Header(begins=True):
                    asked.clear()
                case signals.Beat(heartbeat=beat):
                    self._beats[beat.node, beat.plugin].append((at, beat))
                case signals.Probe() | signals.AskCluster():
                    found = _Asked(at)
                    self._asked[_about(entry)].append(found)
                    asked[_about(entry), entry.number] = found
                case (
                    signals.ProbeAnswered()
                    | signals.ProbeFailed()
                    | signals.ProbeInconclusive()
                    | signals.ClusterAnswered()
                ):
                    about = _about(entry)
                    self._answers[about].append((at, entry))
                    known = asked.pop((about, entry.number), None)
                    if known is not None:
                        known.answered_at, known.answer = at, entry
                case _:
                    pass

    def ask(self, asked: Question, now: float) -> Known:
        """Return what is answered."""
        about = _about(asked)
        then = min(self._asked.get(about, ()), key=lambda found: abs(found.at - now), default=None)
        if then is not None and abs(then.at - now) <= _SAME_S:
            if then.answer is None:
                return AS_THEN, 0.0, None
            answer = dataclasses.replace(then.answer, number=asked.number)
            return AS_THEN, max(then.answered_at - now, _ANSWER_S), answer
        nearest = _nearest(self._answers.get(about, ()), now)
        if isinstance(asked, signals.Probe):
            return self._probe(asked, nearest, now)
        known = nearest.facts if isinstance(nearest, signals.ClusterAnswered) else None
        how = "by the cluster's nearest answer" if known else "the cluster: not known"
        told = signals.ClusterAnswered(
            node=asked.node,
            plugin=asked.plugin,
            number=asked.number,
            facts=known,
            resources=asked.resources,
        )
        return how, _ANSWER_S, told

    def _probe(self, asked: signals.Probe, nearest: Answer | None, now: float) -> Known:
        beats = self._beats.get((asked.node, asked.plugin), [])
        number = bisect.bisect_left(beats, now, key=lambda pair: pair[0])
        if number < len(beats) and beats[number][0] <= now + asked.timeout_s:
            at, beat = beats[number]
            answered = signals.ProbeAnswered(heartbeat=beat, number=asked.number)
            return "by a beat that came in time", max(at - now, _ANSWER_S), answered
        if nearest is None:
            failed = signals.ProbeFailed(
                node=asked.node, plugin=asked.plugin, number=asked.number, subscribed=True
            )
            return UNKNOWN, asked.timeout_s, failed
        is_slow = isinstance(nearest, signals.ProbeFailed) and nearest.subscribed
        answer = dataclasses.replace(nearest, number=asked.number)
        return (
            "as the nearest one of that plugin",
            asked.timeout_s if is_slow else _ANSWER_S,
            answer,
        )


def _about(one: Question | Answer) -> _About:
    match one:
        case signals.ProbeAnswered(heartbeat=beat):
            return beat.node, beat.plugin, signals.Probe, ()
        case signals.Probe() | signals.ProbeFailed() | signals.ProbeInconclusive():
            return one.node, one.plugin, signals.Probe, ()
        case signals.AskCluster() | signals.ClusterAnswered():
            return one.node, one.plugin, signals.AskCluster, one.resources


def _nearest(found: Sequence[tuple[float, T]], now: float) -> T | None:
    near = min(found, key=lambda pair: abs(pair[0] - now), default=None)
    return near[1] if near is not None and abs(near[0] - now) <= _NEAR_S else None
