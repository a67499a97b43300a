"""Pure. False alarms: the real detector under a virtual clock, against plugins that are all well.

Plugins lose beats and pause; nobody is ever down. A beat that comes in time tells the detector
nothing new, so only what surrounds a gap of more than two intervals is played; between gaps a
plugin declares a long interval, as a plugin may.
"""

import functools
import heapq
import itertools
import random
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Final

from muster import vocabulary
from muster_health.fleet import detector
from muster_health.model import config, facts, signals

GPU: Final = "nvidia.com/gpu"
PLUGIN: Final = "device-plugin"
ZERO: Final = datetime(2026, 1, 1, tzinfo=UTC)
DAY_S: Final = 86_400.0
INTERVAL_S: Final = 5.0
JITTER_S: Final = 0.5
_IDLE_INTERVAL_S: Final = 3600.0
_IDLE_S: Final = 2.4 * _IDLE_INTERVAL_S
_AFTER: Final = 4
_FACTS: Final = facts.Facts(
    exists=True,
    lease_age_s=5.0,
    ready=True,
    pods=(facts.Pod(name="muster/plugin", uid="1", phase="Running", ready=True),),
    offers={GPU: facts.Offer(capacity=8, allocatable=8)},
)


@dataclass(frozen=True, kw_only=True)
class Model:
    """How plugins that are well fail to be heard.

    Each beat and each probe is lost with `loss`. A node pauses `pauses_per_day` times for
    exponential times of mean `pause_s`; `link_share` of these are its way to the bus, of which
    the server tells; in the others its process stands still.
    """

    loss: float = 0.001
    pauses_per_day: float = 0.2
    pause_s: float = 10.0
    link_share: float = 0.5


@dataclass(kw_only=True)
class Result:
    """What the detector made of it."""

    alerts: list[vocabulary.AlertChanged] = field(default_factory=list)
    verdicts: Counter[str] = field(default_factory=Counter)
    notes: Counter[str] = field(default_factory=Counter)
    gaps: int = 0
    inputs: int = 0
    seconds: float = 0.0


@dataclass(slots=True, kw_only=True)
class Gap:
    """A plugin is not heard from `begins_at` to `ends_at`; `busy` and `link` say why."""

    begins_at: float
    ends_at: float
    busy: bool = False
    link: bool = False


class Simulation:
    """A fleet, a virtual clock, and the detector."""

    def __init__(self, nodes: int, days: float, model: Model, seed: int) -> None:
        self.result = Result()
        self._model = model
        self._random = random.Random(seed)  # noqa: S311  # a simulation
        self._end = days * DAY_S
        self._nodes = [f"node-{number}" for number in range(nodes)]
        self._gaps: dict[str, Gap] = {}
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._count = itertools.count()
        self._now = 0.0
        self._detector = detector.Detector(
            config.Detection(), runbook_url="", at_zero=ZERO, has_cluster=True
        )

    def run(self) -> Result:
        """Play it all."""
        began_at = time.perf_counter()
        self._feed(signals.BusBack(at=ZERO))
        for node in self._nodes:
            self._at(self._random.random() * INTERVAL_S, functools.partial(self._start, node))
        while self._step():
            pass
        self.result.seconds = time.perf_counter() - began_at
        return self.result

    def _step(self) -> bool:
        due = self._detector.next_deadline()
        first = self._events[0][0] if self._events else self._end
        now = first if due is None else min(first, due)
        if now >= self._end:
            return False
        self._now = now
        if due is not None and due <= now:
            self._do(self._detector.tick(now))
        else:
            heapq.heappop(self._events)[2]()
        return True

    def _at(self, when: float, do: Callable[[], None]) -> None:
        heapq.heappush(self._events, (when, next(self._count), do))

    def _feed(self, event: signals.Input) -> None:
        self.result.inputs += 1
        self._do(self._detector.receive(event, self._now))

    def _start(self, node: str) -> None:
        self._feed(signals.Connected(node=node, plugin=PLUGIN, server="nats-0", client=1))
        self._keep(node)
        self._plan(node)

    def _plan(self, node: str) -> None:
        """Draw when this node is next not heard for more than two intervals."""
        model = self._model
        beats_per_day = DAY_S / INTERVAL_S
        lost_per_day = beats_per_day * model.loss**2 * (1 - model.loss)
        each_day = lost_per_day + model.pauses_per_day
        begins_at = self._now + self._random.expovariate(each_day) * DAY_S
        if self._random.random() * each_day < lost_per_day:
            lost = 2
            while self._random.random() < model.loss:
                lost += 1
            jitter_s = self._random.uniform(-JITTER_S, JITTER_S)
            gap = Gap(begins_at=begins_at, ends_at=begins_at + (lost + 1) * INTERVAL_S + jitter_s)
        else:
            pause_s = self._random.expovariate(1 / model.pause_s)
            since_beat_s = self._random.random() * INTERVAL_S
            link = self._random.random() < model.link_share
            back_s = self._random.random() * INTERVAL_S if link else 0.0
            ends_at = begins_at + since_beat_s + pause_s + back_s
            gap = Gap(begins_at=begins_at, ends_at=ends_at, busy=not link, link=link)
        if gap.ends_at - gap.begins_at <= 2 * INTERVAL_S and not gap.link:
            self._at(gap.ends_at, lambda: self._plan(node))
        else:
            self._at(gap.begins_at, lambda: self._begin(node, gap))

    def _begin(self, node: str, gap: Gap) -> None:
        self.result.gaps += 1
        self._gaps[node] = gap
        self._beat(node, INTERVAL_S)
        if gap.link:
            self._feed(
                signals.Disconnected(
                    node=node, plugin=PLUGIN, server="nats-0", client=1, reason="Read Error"
                )
            )
        self._at(gap.ends_at, lambda: self._over(node, gap))

    def _over(self, node: str, gap: Gap) -> None:
        del self._gaps[node]
        if gap.link:
            self._feed(signals.Connected(node=node, plugin=PLUGIN, server="nats-0", client=1))
        for number in range(_AFTER):
            self._at(self._now + number * INTERVAL_S, lambda: self._beat(node, INTERVAL_S))
        after = self._now + _AFTER * INTERVAL_S
        self._at(after, lambda: self._rest(node))
        self._at(after, lambda: self._plan(node))

    def _rest(self, node: str) -> None:
        if node not in self._gaps:
            self._beat(node, _IDLE_INTERVAL_S)

    def _keep(self, node: str) -> None:
        self._rest(node)
        self._at(self._now + _IDLE_S, lambda: self._keep(node))

    def _beat(self, node: str, interval_s: float) -> None:
        self._feed(signals.Beat(heartbeat=self._heartbeat(node, interval_s)))

    def _heartbeat(self, node: str, interval_s: float) -> vocabulary.Heartbeat:
        return vocabulary.Heartbeat(
            node=node,
            plugin=PLUGIN,
            instance="one",
            seq=int(self._now * 1000),
            interval_s=interval_s,
            resources=(
                vocabulary.ResourceBeat(
                    name=GPU, streams=1, probe_ok=True, probe_age_s=1.0, devices=8, healthy=8
                ),
            ),
        )

    def _do(self, outs: list[signals.Output]) -> None:
        for out in outs:
            match out:
                case signals.Probe():
                    self._answer(out)
                case signals.AskCluster():
                    answer = signals.ClusterAnswered(
                        node=out.node, plugin=out.plugin, number=out.number, facts=_FACTS
                    )
                    self._at(self._now + 0.02, functools.partial(self._feed, answer))
                case signals.Publish(event=event):
                    if isinstance(event, vocabulary.AlertChanged):
                        self.result.alerts.append(event)
                    elif isinstance(event, vocabulary.VerdictChanged):
                        self.result.verdicts[f"{event.verdict} {event.rule}"] += 1
                case signals.Noted(note=note):
                    self.result.notes[note] += 1
                case _:
                    pass

    def _answer(self, probe: signals.Probe) -> None:
        gap = self._gaps.get(probe.node)
        lost = self._random.random() < self._model.loss
        away_s = gap.ends_at - self._now if gap is not None and (gap.busy or gap.link) else 0.0
        if gap is not None and gap.link:
            self._fail(probe, 0.001, subscribed=False)
        elif lost or away_s > probe.timeout_s:
            self._fail(probe, probe.timeout_s, subscribed=True)
        else:
            self._at(self._now + away_s + 0.002, lambda: self._say(probe))

    def _say(self, probe: signals.Probe) -> None:
        beat = self._heartbeat(probe.node, INTERVAL_S)
        self._feed(signals.ProbeAnswered(heartbeat=beat, number=probe.number))

    def _fail(self, probe: signals.Probe, after_s: float, *, subscribed: bool) -> None:
        failed = signals.ProbeFailed(
            node=probe.node, plugin=probe.plugin, number=probe.number, subscribed=subscribed
        )
        self._at(self._now + after_s, lambda: self._feed(failed))


def simulate(nodes: int, days: float, model: Model, *, seed: int = 1) -> Result:
    """Return what the detector tells of `nodes` plugins that are well, in so many days."""
    return Simulation(nodes, days, model, seed).run()
