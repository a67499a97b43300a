"""Pure. A recording under another policy: the real detector on the recorded time.

What plugins, the bus and the cluster did is fed in as it came. But another policy asks at other
times, and what would have been answered then nobody recorded. A probe is taken as answered if the
plugin was heard within the time it had, and else as the nearest probe of that plugin went; the
cluster answers what it answered nearest to that time. What is left is counted: it is not known.
"""

import bisect
import heapq
import itertools
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Final, TypeVar

from muster import vocabulary
from muster_health import config, detector, recording, signals

_NEAR_S: Final = 60.0
_ANSWER_S: Final = 0.002

T = TypeVar("T")
Who = tuple[str, str]
Probed = signals.ProbeAnswered | signals.ProbeFailed | signals.ProbeInconclusive


@dataclass(slots=True, kw_only=True)
class Episode:
    """One alert from its first telling to its end."""

    alert: vocabulary.AlertChanged
    fired_at: datetime
    resolved_at: datetime | None = None

    @property
    def subject(self) -> tuple[str, str, str, str]:
        """What it is about."""
        one = self.alert
        return one.node, one.plugin, one.kind.value, one.resource


@dataclass(kw_only=True)
class Played:
    """What a policy made of a recording."""

    episodes: list[Episode] = field(default_factory=list)
    verdicts: Counter[str] = field(default_factory=Counter)
    questions: Counter[str] = field(default_factory=Counter)
    """How the questions were answered that nobody asked then."""


@dataclass(kw_only=True)
class Tape:
    """A recording, read: entries by virtual time, in seconds from `zero`."""

    header: recording.Header
    zero: datetime
    entries: list[tuple[float, recording.Entry]]

    @property
    def told(self) -> list[Episode]:
        """The alerts that were told then."""
        found = _Episodes(self.zero)
        for at, entry in self.entries:
            if isinstance(entry, recording.Told):
                found.take(entry.alert, at)
        return found.all


def tape(lines: Iterable[tuple[float, recording.Entry]]) -> Tape:
    """Return a recording on one clock. Raises NotARecording where it does not begin with a header.

    Each process counted by a clock of its own; UTC holds them together.
    """
    first: recording.Header | None = None
    offset_s = 0.0
    entries: list[tuple[float, recording.Entry]] = []
    for t, entry in lines:
        if isinstance(entry, recording.Header):
            first = first or entry
            offset_s = (entry.at_zero - first.at_zero).total_seconds()
        if first is None:
            raise recording.NotARecording("it does not begin with a header")
        # a wall clock that was set back must not turn time round
        at = max(t + offset_s, entries[-1][0] if entries else t + offset_s)
        entries.append((at, entry))
    if first is None:
        raise recording.NotARecording("it is empty")
    return Tape(header=first, zero=first.at_zero, entries=entries)


def play(recorded: Tape, detection: config.Detection, bounds: config.Bounds) -> Played:
    """Return what a policy makes of a recording."""
    return _Player(recorded, detection, bounds).run()


def matched(
    one: Sequence[Episode], other: Sequence[Episode]
) -> tuple[list[tuple[Episode, Episode]], list[Episode], list[Episode]]:
    """Return the alerts of both that are about the same at about the same time, and the others."""
    left = list(other)
    both: list[tuple[Episode, Episode]] = []
    alone: list[Episode] = []
    for episode in one:
        near = [found for found in left if _same(episode, found)]
        if not near:
            alone.append(episode)
            continue
        best = min(near, key=lambda found: abs(found.fired_at - episode.fired_at))
        left.remove(best)
        both.append((episode, best))
    return both, alone, left


def _same(one: Episode, other: Episode) -> bool:
    if one.subject != other.subject:
        return False
    first, last = sorted((one, other), key=lambda episode: episode.fired_at)
    overlap = first.resolved_at is None or last.fired_at <= first.resolved_at
    return overlap or last.fired_at - first.fired_at <= timedelta(seconds=_NEAR_S)


class _Episodes:
    def __init__(self, zero: datetime) -> None:
        self.all: list[Episode] = []
        self._zero = zero
        self._open: dict[str, Episode] = {}

    def take(self, alert: vocabulary.AlertChanged, at: float) -> None:
        when = self._zero + timedelta(seconds=at)
        known = self._open.get(alert.fingerprint)
        if alert.state is vocabulary.AlertState.RESOLVED:
            if known is not None:
                known.resolved_at = when
                del self._open[alert.fingerprint]
        elif known is None:
            self._open[alert.fingerprint] = Episode(alert=alert, fired_at=when)
            self.all.append(self._open[alert.fingerprint])
        else:
            # what it is about may change while it fires
            known.alert = alert


class _Oracle:
    """What would have been answered, as far as the recording tells."""

    def __init__(self, recorded: Tape) -> None:
        self._beats: dict[Who, list[tuple[float, vocabulary.Heartbeat]]] = defaultdict(list)
        self._probes: dict[Who, list[tuple[float, Probed]]] = defaultdict(list)
        self._cluster: dict[Who, list[tuple[float, signals.ClusterAnswered]]] = defaultdict(list)
        for at, entry in recorded.entries:
            match entry:
                case signals.Beat(heartbeat=beat):
                    self._beats[beat.node, beat.plugin].append((at, beat))
                case signals.ProbeAnswered(heartbeat=beat):
                    self._probes[beat.node, beat.plugin].append((at, entry))
                case signals.ProbeFailed() | signals.ProbeInconclusive():
                    self._probes[entry.node, entry.plugin].append((at, entry))
                case signals.ClusterAnswered():
                    self._cluster[entry.node, entry.plugin].append((at, entry))
                case _:
                    pass

    def probe(self, asked: signals.Probe, now: float) -> tuple[str, float, signals.Input]:
        """Return how it is known, after how many seconds, and the answer."""
        who = asked.node, asked.plugin
        beats = self._beats.get(who, [])
        number = bisect.bisect_left(beats, now, key=lambda pair: pair[0])
        nearest = _nearest(self._probes.get(who, []), now)
        if number < len(beats) and beats[number][0] <= now + asked.timeout_s:
            at, beat = beats[number]
            answer = signals.ProbeAnswered(heartbeat=beat, number=asked.number)
            return "by a beat that came in time", max(at - now, _ANSWER_S), answer
        match nearest:
            case signals.ProbeAnswered(heartbeat=beat):
                answered = signals.ProbeAnswered(heartbeat=beat, number=asked.number)
                return "as the nearest one of that plugin", _ANSWER_S, answered
            case signals.ProbeInconclusive():
                unclear = signals.ProbeInconclusive(
                    node=asked.node, plugin=asked.plugin, number=asked.number
                )
                return "as the nearest one of that plugin", _ANSWER_S, unclear
            case signals.ProbeFailed(subscribed=subscribed):
                how = "as the nearest one of that plugin"
            case _:
                how, subscribed = "not known, taken for no answer", True
        failed = signals.ProbeFailed(
            node=asked.node, plugin=asked.plugin, number=asked.number, subscribed=subscribed
        )
        return how, asked.timeout_s if subscribed else _ANSWER_S, failed

    def cluster(
        self, asked: signals.AskCluster, now: float
    ) -> tuple[str, float, signals.ClusterAnswered]:
        """Return how it is known, after how many seconds, and the answer."""
        nearest = _nearest(self._cluster.get((asked.node, asked.plugin), []), now)
        known = nearest.facts if nearest is not None else None
        how = "by the cluster's nearest answer" if known else "the cluster: not known"
        answer = signals.ClusterAnswered(
            node=asked.node, plugin=asked.plugin, number=asked.number, facts=known
        )
        return how, _ANSWER_S, answer


class _Player:
    """The recording's clock, the detector, and the answers that are under way."""

    def __init__(self, recorded: Tape, detection: config.Detection, bounds: config.Bounds) -> None:
        self._recorded = recorded
        self._oracle = _Oracle(recorded)
        self._played = Played()
        self._episodes = _Episodes(recorded.zero)
        self._answers: list[tuple[float, int, signals.Input]] = []
        self._count = itertools.count()
        self._stalls = [
            (at - entry.seconds, at)
            for at, entry in recorded.entries
            if isinstance(entry, signals.ClockStalled)
        ]
        self._detector = detector.Detector(
            detection,
            runbook_url="",
            at_zero=recorded.zero,
            bounds=bounds,
            has_cluster=recorded.header.has_cluster,
        )

    def run(self) -> Played:
        """Play it all."""
        entries = self._recorded.entries
        begin = entries[0][0]
        if self._recorded.header.sees:
            began = self._recorded.zero + timedelta(seconds=begin)
            self._feed(signals.BusBack(at=began), begin)
        headers = 0
        for at, entry in entries:
            headers += isinstance(entry, recording.Header)
            if isinstance(entry, signals.Restored) and headers > 1:
                continue  # by another process, which told it under the other policy
            if not isinstance(entry, _NOT_PLAYED):
                self._advance(at)
                self._feed(entry, at)
        self._played.episodes = self._episodes.all
        return self._played

    def _advance(self, until: float) -> None:
        while True:
            due = self._detector.next_deadline()
            answer = self._answers[0][0] if self._answers else None
            now = min((time for time in (due, answer) if time is not None), default=until)
            now = self._awake(now)
            if now >= until:
                return
            if answer is not None and answer <= now:
                _, _, event = heapq.heappop(self._answers)
                self._feed(event, now)
            else:
                self._do(self._detector.tick(now), now)

    def _awake(self, now: float) -> float:
        """Return when whoever recorded next ran: what it slept through, nobody did."""
        return next((end for begin, end in self._stalls if begin < now < end), now)

    def _feed(self, event: signals.Input, now: float) -> None:
        self._do(self._detector.receive(event, now), now)

    def _do(self, outs: Iterable[signals.Output], now: float) -> None:
        for out in outs:
            match out:
                case signals.Probe():
                    self._answer(*self._oracle.probe(out, now), now)
                case signals.AskCluster():
                    self._answer(*self._oracle.cluster(out, now), now)
                case signals.Publish(event=vocabulary.AlertChanged() as alert):
                    self._episodes.take(alert, now)
                case signals.Publish(event=vocabulary.VerdictChanged() as found):
                    self._played.verdicts[found.verdict.value] += 1
                case _:
                    pass

    def _answer(self, how: str, after_s: float, event: signals.Input, now: float) -> None:
        self._played.questions[how] += 1
        heapq.heappush(self._answers, (now + after_s, next(self._count), event))


_NOT_PLAYED: Final = (
    recording.Header,
    recording.Told,
    signals.ProbeAnswered,
    signals.ProbeFailed,
    signals.ProbeInconclusive,
    signals.ClusterAnswered,
    signals.Leadership,
    signals.Remediated,
    signals.ClockStalled,
)
"""What answers another's questions, and who led then: here one leads throughout."""


def _nearest(found: Sequence[tuple[float, T]], now: float) -> T | None:
    near = min(found, key=lambda pair: abs(pair[0] - now), default=None)
    return near[1] if near is not None and abs(near[0] - now) <= _NEAR_S else None
