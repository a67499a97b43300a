"""Pure: What a detector's questions would have been answered, as far as a recording tells.

A question that was asked then, at that time, has the answer that it had then. Of others nobody
recorded any. A probe is then taken as answered if the plugin was heard within the time it had, and
else as the nearest probe of that plugin went; the cluster answers what it answered nearest to that
time.
"""

import bisect
import dataclasses
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Final, TypeVar

from muster import vocabulary
from muster_health.model import signals
from muster_health.replay import recording

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
