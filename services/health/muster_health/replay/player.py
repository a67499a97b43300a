"""Pure: replays a recording under a policy, with the real detector and the recorded time.

The recorded inputs from plugins, the bus and the cluster are fed in as they arrived. Where a
recorded process ended, the detector ends, too; the next one begins with the state that the replayed
policy would have saved. The replayed detector always leads, even if the recorded one did not.

A probe or query that was also recorded at that time gets the recorded answer. Any other probe
counts as answered if a heartbeat arrived within its timeout; otherwise it gets the result of the
plugin's nearest recorded probe. Any other query to Kubernetes gets the recorded answer nearest in
time. If there is none within a minute, the probe or query counts as unanswered.
"""

import bisect
import heapq
import itertools
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from typing import Final

from muster import vocabulary
from muster_health.fleet import detector
from muster_health.model import config, signals, snapshot
from muster_health.replay import recording

_LAST_S: Final = 0.05
_NEAR_S: Final = 60.0
_SAME_S: Final = 0.5
_ANSWER_S: Final = 0.002
_AFTER_RESTORE: Final = (signals.HeartbeatArrived, signals.FromPlugin)
"""Inputs that arrive only after all saved state has been read."""
_NOT_REPLAYED: Final = (
    recording.PublishedAlert,
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
"""The recorded entries that are not passed to the detector, such as queries and answers."""

ProbeResult = signals.ProbeAnswered | signals.ProbeFailed | signals.ProbeInconclusive
Question = signals.Probe | signals.AskCluster
Answer = ProbeResult | signals.ClusterAnswered
_Subject = tuple[str, str, type[Question], tuple[str, ...]]


@dataclass(kw_only=True)
class Result:
    """The outcome of a replay under one policy."""

    episodes: list[recording.Episode] = field(default_factory=list)
    questions: Counter[str] = field(default_factory=Counter)
    """The number of probes and queries, by how they were answered."""


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """The alerts of a recording under its own policy and under another one, after a given time.

    `not_replayed` and `not_published` are the differences between the published alerts and a replay
    of the recorded policy; `questions` counts how the other policy's probes and queries were
    answered.
    """

    published: int
    not_replayed: Sequence[recording.Episode]
    not_published: Sequence[recording.Episode]
    both: Sequence[tuple[recording.Episode, recording.Episode]]
    only_recorded_policy: Sequence[recording.Episode]
    only_other_policy: Sequence[recording.Episode]
    questions: Counter[str]


@dataclass(frozen=True, slots=True)
class Reply:
    """An answer that arrives `after_s` later, or never (None); `how` names its source."""

    how: str
    after_s: float
    answer: Answer | None


@dataclass(slots=True)
class _RecordedQuestion:
    at: float
    answered_at: float = 0.0
    answer: Answer | None = None


def play(recorded: recording.Recording, policy: config.Settings | None = None) -> Result:
    """Replay a recording under a policy, by default under the one that each process recorded.

    Only `detection` and `bounds` of the settings are used. Raises UnreadableRecording if a recorded
    value is one that health would not have accepted.
    """
    try:
        return _Player(recorded, policy).run()
    except (ValueError, ArithmeticError) as error:
        raise recording.UnreadableRecording(f"the recording cannot be replayed: {error}") from error


def compare(
    recorded: recording.Recording, other: config.Settings, shown_from: datetime
) -> Comparison:
    """Replay a recording under its own policy and another one, and compare the alerts."""
    then, now = play(recorded), play(recorded, other)
    both, only_recorded, only_other = recording.match(then.episodes, now.episodes)
    not_replayed, not_published = recording.differences(recorded, then.episodes)

    def shown(episodes: Iterable[recording.Episode]) -> list[recording.Episode]:
        return [episode for episode in episodes if episode.fired_at >= shown_from]

    return Comparison(
        published=len(shown(recorded.published)),
        not_replayed=shown(not_replayed),
        not_published=shown(not_published),
        both=[pair for pair in both if shown(pair)],
        only_recorded_policy=shown(only_recorded),
        only_other_policy=shown(only_other),
        questions=now.questions,
    )


class _Player:
    """Replays a recording; holds its clock, the current detector and the pending answers."""

    def __init__(self, recorded: recording.Recording, policy: config.Settings | None) -> None:
        self._recorded = recorded
        self._policy = policy
        self._answer_book = AnswerBook(recorded.entries)
        self._result = Result()
        self._episodes = recording.EpisodeTracker(recorded.zero)
        self._answers: list[tuple[float, int, Answer]] = []
        self._count = itertools.count()
        self._now = 0.0
        self._stalls = [
            (at - entry.seconds, at)
            for at, entry in recorded.entries
            if isinstance(entry, signals.ClockStalled)
        ]
        self._saved: dict[str, bytes] = {}
        self._to_restore: list[bytes] = []
        """Saved state that a restarted process has not read yet."""
        self._detector: detector.Detector | None = None

    def run(self) -> Result:
        """Replay the whole recording."""
        for at, entry in self._recorded.entries:
            if isinstance(entry, recording.Header):
                if self._detector is None or entry.begins:
                    self._end()
                    self._begin(entry, at)
                continue
            assert self._detector is not None, "a recording begins with a header"
            self._advance(self._detector, at)
            if isinstance(entry, signals.Restored):
                self._restore_recorded(self._detector, entry, at)
            elif not isinstance(entry, _NOT_REPLAYED):
                if isinstance(entry, _AFTER_RESTORE):
                    self._restore_saved(self._detector, at)
                self._feed(self._detector, entry, at)
        self._end()
        self._result.episodes = self._episodes.all
        return self._result

    def _end(self) -> None:
        """Handle the deadlines up to the last entry, as the recorded process did."""
        if self._detector is not None:
            self._advance(self._detector, self._now + _LAST_S)

    def _begin(self, header: recording.Header, at: float) -> None:
        """Begin the next recorded process, with a new detector and no pending answers."""
        self._to_restore = list(self._saved.values())
        self._answers.clear()
        policy = self._policy or header
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

    def _restore_recorded(
        self, replayed: detector.Detector, restored: signals.Restored, at: float
    ) -> None:
        """Restore state at the moment when the recorded process did.

        If the replayed policy has saved state, that is used instead of the recorded state.
        """
        self._restore_saved(replayed, at)
        key = recording.key_of(restored.state)
        if key not in self._saved:
            self._saved[key] = snapshot.encode(restored.state)
            self._feed(replayed, restored, at)

    def _restore_saved(self, replayed: detector.Detector, at: float) -> None:
        values, self._to_restore = self._to_restore, []
        for value in values:
            self._feed(replayed, signals.Restored(state=snapshot.decode(value)), at)

    def _advance(self, replayed: detector.Detector, until: float) -> None:
        while True:
            due = replayed.next_deadline()
            answer_at = self._answers[0][0] if self._answers else None
            times = [time for time in (due, answer_at) if time is not None]
            now = self._awake(max(self._now, min(times))) if times else until + 1.0
            if now > until:
                self._now = until
                return
            self._now = now
            if due is not None and (answer_at is None or due <= answer_at):
                self._execute(replayed.tick(now), now)
            else:
                _, _, answer = heapq.heappop(self._answers)
                if replayed.is_disconnected:
                    answer = _while_disconnected(answer)
                self._feed(replayed, answer, now)

    def _awake(self, now: float) -> float:
        """Return when the recorded process ran next; while suspended, it did nothing."""
        return next((end for begin, end in self._stalls if begin < now < end), now)

    def _feed(self, replayed: detector.Detector, event: signals.Input, now: float) -> None:
        self._execute(replayed.receive(event, now), now)

    def _execute(self, outputs: Iterable[signals.Output], now: float) -> None:
        for output in outputs:
            match output:
                case signals.Probe() | signals.AskCluster():
                    self._ask(output, now)
                case signals.Store(key=key, value=value):
                    self._saved[key] = value
                    if not value:
                        del self._saved[key]
                case signals.Publish(event=vocabulary.AlertChanged() as alert):
                    self._episodes.add(alert, now)
                case _:
                    pass

    def _ask(self, question: Question, now: float) -> None:
        reply = self._answer_book.reply(question, now)
        self._result.questions[reply.how] += 1
        if reply.answer is not None:
            at = now + reply.after_s
            heapq.heappush(self._answers, (at, next(self._count), reply.answer))


class AnswerBook:
    """Answers probes and queries from the recording."""

    def __init__(self, entries: Iterable[tuple[float, recording.Entry]]) -> None:
        self._heartbeats: dict[tuple[str, str], list[tuple[float, vocabulary.Heartbeat]]]
        self._heartbeats = defaultdict(list)
        self._answers: dict[_Subject, list[tuple[float, Answer]]] = defaultdict(list)
        self._questions: dict[_Subject, list[_RecordedQuestion]] = defaultdict(list)
        pending: dict[tuple[_Subject, int], _RecordedQuestion] = {}
        for at, entry in entries:
            match entry:
                case recording.Header(begins=True):
                    pending.clear()
                case signals.HeartbeatArrived(heartbeat=heartbeat):
                    self._heartbeats[heartbeat.node, heartbeat.plugin].append((at, heartbeat))
                case signals.Probe() | signals.AskCluster():
                    question = _RecordedQuestion(at)
                    self._questions[_subject(entry)].append(question)
                    pending[_subject(entry), entry.number] = question
                case (
                    signals.ProbeAnswered()
                    | signals.ProbeFailed()
                    | signals.ProbeInconclusive()
                    | signals.ClusterAnswered()
                ):
                    subject = _subject(entry)
                    self._answers[subject].append((at, entry))
                    answered = pending.pop((subject, entry.number), None)
                    if answered is not None:
                        answered.answered_at, answered.answer = at, entry
                case _:
                    pass

    def reply(self, question: Question, now: float) -> Reply:
        """Return how a probe or query is answered."""
        subject = _subject(question)
        recorded = min(
            self._questions.get(subject, ()),
            key=lambda recorded: abs(recorded.at - now),
            default=None,
        )
        if recorded is not None and abs(recorded.at - now) <= _SAME_S:
            return _as_recorded(question, recorded, now)
        nearest = _nearest(self._answers.get(subject, ()), now)
        if isinstance(question, signals.Probe):
            return self._probe_reply(question, nearest, now)
        facts = nearest.facts if isinstance(nearest, signals.ClusterAnswered) else None
        answer = signals.ClusterAnswered(
            node=question.node,
            plugin=question.plugin,
            number=question.number,
            facts=facts,
            resources=question.resources,
        )
        how = "cluster query: nearest recorded answer" if facts else "cluster query: no answer"
        return Reply(how, _ANSWER_S, answer)

    def _probe_reply(self, probe: signals.Probe, nearest: Answer | None, now: float) -> Reply:
        heartbeats = self._heartbeats.get((probe.node, probe.plugin), [])
        index = bisect.bisect_left(heartbeats, now, key=lambda pair: pair[0])
        if index < len(heartbeats) and heartbeats[index][0] <= now + probe.timeout_s:
            at, heartbeat = heartbeats[index]
            answered = signals.ProbeAnswered(heartbeat=heartbeat, number=probe.number)
            how = "probe: answered, as a heartbeat arrived in time"
            return Reply(how, max(at - now, _ANSWER_S), answered)
        if nearest is None:
            failed = signals.ProbeFailed(
                node=probe.node, plugin=probe.plugin, number=probe.number, subscribed=True
            )
            return Reply("probe: nothing recorded, so no answer", probe.timeout_s, failed)
        timed_out = isinstance(nearest, signals.ProbeFailed) and nearest.subscribed
        return Reply(
            "probe: like the nearest recorded probe",
            probe.timeout_s if timed_out else _ANSWER_S,
            replace(nearest, number=probe.number),
        )


def _as_recorded(question: Question, recorded: _RecordedQuestion, now: float) -> Reply:
    how = "as recorded"
    if recorded.answer is None:
        return Reply(how, 0.0, None)
    answer = replace(recorded.answer, number=question.number)
    return Reply(how, max(recorded.answered_at - now, _ANSWER_S), answer)


def _subject(entry: Question | Answer) -> _Subject:
    match entry:
        case signals.ProbeAnswered(heartbeat=heartbeat):
            return heartbeat.node, heartbeat.plugin, signals.Probe, ()
        case signals.Probe() | signals.ProbeFailed() | signals.ProbeInconclusive():
            return entry.node, entry.plugin, signals.Probe, ()
        case signals.AskCluster() | signals.ClusterAnswered():
            return entry.node, entry.plugin, signals.AskCluster, entry.resources


def _nearest(answers: Sequence[tuple[float, Answer]], now: float) -> Answer | None:
    nearest = min(answers, key=lambda pair: abs(pair[0] - now), default=None)
    return nearest[1] if nearest is not None and abs(nearest[0] - now) <= _NEAR_S else None


def _while_disconnected(answer: Answer) -> Answer:
    """Return the answer as the detector gets it if it arrives while disconnected from NATS."""
    if not isinstance(answer, signals.ProbeFailed):
        return answer
    return signals.ProbeInconclusive(node=answer.node, plugin=answer.plugin, number=answer.number)
