"""Pure: counts wrong and late verdicts of the real detector under a virtual clock.

Most plugins are healthy: they lose heartbeats, pause, or are disconnected for a while, and a
verdict on them may be wrong. Others fail for so long that there must be a verdict, which may be
late. A heartbeat that arrives in time does not change the detector's view, so the simulation covers
only the surroundings of gaps of more than two intervals; between gaps a plugin declares a long
interval, as it may. `plugin_gaps` has what happens in a gap.
"""

import functools
import heapq
import itertools
import math
import random
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Final

from muster import vocabulary
from muster.vocabulary import Verdict
from muster_health.fleet import detector
from muster_health.model import config, signals
from tests.worlds import plugin_gaps
from tests.worlds.plugin_gaps import DAY_S, GPU, INTERVAL_S, RIGHT_VERDICT, SHORT_S, Gap, Kind

PLUGIN: Final = "device-plugin"
ZERO: Final = datetime(2026, 1, 1, tzinfo=UTC)
_IDLE_INTERVAL_S: Final = 3600.0
_IDLE_S: Final = 2.4 * _IDLE_INTERVAL_S
_AFTER: Final = 4


@dataclass(kw_only=True)
class Result:
    """The result of a simulation.

    `wrong`, `standing` and `short_lived` count the verdicts on healthy plugins, by verdict, rule
    and kind of gap. A verdict is in `short_lived` if it was right about a pause or a disconnection
    of at least `SHORT_S`; in `standing` if it was STUCK in a shorter pause, while the process stood
    still and its kubelet showed it as not ready; otherwise in `wrong`. `delays` are the seconds
    from a failure to the right verdict on it; `misnamed` counts other verdicts on failed plugins.
    """

    alerts: list[vocabulary.AlertChanged] = field(default_factory=list)
    verdicts: Counter[str] = field(default_factory=Counter)
    wrong: Counter[str] = field(default_factory=Counter)
    standing: Counter[str] = field(default_factory=Counter)
    short_lived: Counter[str] = field(default_factory=Counter)
    delays: dict[Kind, list[float]] = field(
        default_factory=lambda: {kind: [] for kind in RIGHT_VERDICT}
    )
    misnamed: Counter[str] = field(default_factory=Counter)
    notes: Counter[str] = field(default_factory=Counter)
    gaps: int = 0
    inputs: int = 0
    seconds: float = 0.0


class Simulation:
    """A fleet, a virtual clock, and the detector."""

    def __init__(
        self, nodes: int, days: float, model: plugin_gaps.Model, seed: int, failures: int
    ) -> None:
        self.result = Result()
        self._model = model
        self._random = random.Random(seed)  # noqa: S311  # a simulation
        self._draw = plugin_gaps.Draw(model, self._random)
        self._end = days * DAY_S
        self._nodes = [f"node-{number}" for number in range(nodes)]
        self._failing = {
            f"{kind.replace(' ', '-')}-{number}": kind
            for kind in RIGHT_VERDICT
            for number in range(failures)
        }
        self._gaps: dict[str, Gap] = {}
        self._phases: dict[str, float] = {}
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._count = itertools.count()
        self._now = 0.0
        self._detector = detector.Detector(
            config.Detection(), runbook_url="", at_zero=ZERO, has_cluster=True
        )

    def run(self) -> Result:
        """Run the simulation; return its result."""
        began_at = time.perf_counter()
        self._feed(signals.BusBack(at=ZERO))
        for node in (*self._nodes, *self._failing):
            self._phases[node] = self._random.random()
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
        self._connect(node)
        self._keep(node)
        if node in self._failing:
            self._plan_failure(node, self._failing[node])
        else:
            self._plan(node)

    # what happens to a plugin

    def _plan_failure(self, node: str, kind: Kind) -> None:
        """Draw when this node fails; it is repaired long after the verdict."""
        begins_at = self._random.uniform(60.0, self._end - 600.0)
        gap = self._draw.failure(kind, begins_at)
        self._at(begins_at, lambda: self._begin(node, gap))

    def _plan(self, node: str) -> None:
        """Draw the next gap in this node's heartbeats; skip it if it is too short to matter."""
        gap = self._draw.next_gap(self._now)
        if gap.ends_at - gap.begins_at <= 2 * INTERVAL_S and gap.kind is not Kind.RESET:
            self._at(gap.ends_at, lambda: self._plan(node))
        else:
            self._at(gap.begins_at, lambda: self._begin(node, gap))

    def _begin(self, node: str, gap: Gap) -> None:
        self.result.gaps += node not in self._failing
        self._gaps[node] = gap
        self._beat(node, INTERVAL_S)
        if gap.kind is Kind.RESET:
            self._at(gap.since, lambda: self._close(node, gap, "Read Error"))
        elif gap.kind is Kind.CRASHED:
            reason = self._draw.crash_reason()
            self._at(gap.since, lambda: self._close(node, gap, reason))
        elif gap.stale_at < math.inf:
            by_client = gap.stale_at == gap.until
            reason = "Client Closed" if by_client else "Stale Connection"
            self._at(gap.stale_at, lambda: self._close(node, gap, reason))
        if gap.ends_at < math.inf:
            if gap.kind is not Kind.LOST:
                self._at(gap.back_at, lambda: self._reconnect(node, gap))
            self._at(gap.ends_at, lambda: self._over(node))

    def _close(self, node: str, gap: Gap, reason: str) -> None:
        gap.is_closed = True
        self._feed(
            signals.Disconnected(node=node, plugin=PLUGIN, server="nats-0", client=1, reason=reason)
        )

    def _reconnect(self, node: str, gap: Gap) -> None:
        if gap.is_closed:
            gap.is_closed = False
            self._connect(node)

    def _connect(self, node: str) -> None:
        self._feed(signals.Connected(node=node, plugin=PLUGIN, server="nats-0", client=1))

    def _over(self, node: str) -> None:
        del self._gaps[node]
        for number in range(_AFTER):
            self._at(self._now + number * INTERVAL_S, lambda: self._beat(node, INTERVAL_S))
        after = self._now + _AFTER * INTERVAL_S
        self._at(after, lambda: self._rest(node))
        if node not in self._failing:
            self._at(after, lambda: self._plan(node))

    def _rest(self, node: str) -> None:
        if node not in self._gaps:
            self._beat(node, _IDLE_INTERVAL_S)

    def _keep(self, node: str) -> None:
        self._rest(node)
        self._at(self._now + _IDLE_S, lambda: self._keep(node))

    def _beat(self, node: str, interval_s: float) -> None:
        self._feed(signals.HeartbeatArrived(heartbeat=self._heartbeat(node, interval_s)))

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

    # what the detector asks and publishes

    def _do(self, outs: list[signals.Output]) -> None:
        for out in outs:
            match out:
                case signals.Probe():
                    self._answer(out)
                case signals.AskCluster():
                    answer = signals.ClusterAnswered(
                        node=out.node,
                        plugin=out.plugin,
                        number=out.number,
                        facts=self._facts(out.node),
                    )
                    self._at(self._now + 0.02, functools.partial(self._feed, answer))
                case signals.Publish(event=event):
                    if isinstance(event, vocabulary.AlertChanged):
                        if event.node not in self._failing:
                            self.result.alerts.append(event)
                    elif isinstance(event, vocabulary.VerdictChanged):
                        self._count_verdict(event)
                case signals.Noted(note=note):
                    self.result.notes[note] += 1
                case _:
                    pass

    def _answer(self, probe: signals.Probe) -> None:
        gap = self._gaps.get(probe.node)
        lost = self._random.random() < self._model.loss
        is_away = gap is not None and gap.kind is not Kind.LOST and gap.since <= self._now
        away_s = max(0.0, gap.back_at - self._now) if gap is not None and is_away else 0.0
        if gap is not None and gap.is_closed:
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

    def _facts(self, node: str) -> signals.Facts:
        return plugin_gaps.cluster_facts(self._gaps.get(node), self._phases[node], self._now)

    # how verdicts are counted

    def _count_verdict(self, event: vocabulary.VerdictChanged) -> None:
        if event.node not in self._failing:
            self.result.verdicts[f"{event.verdict} {event.rule}"] += 1
        if event.verdict is Verdict.HEALTHY:
            return
        gap = self._gaps.get(event.node)
        if gap is not None and event.node in self._failing:
            if event.verdict is RIGHT_VERDICT[gap.kind]:
                self.result.delays[gap.kind].append(self._now - gap.since)
            else:
                self.result.misnamed[f"{gap.kind}: {event.verdict} {event.rule}"] += 1
            return
        kind = "well" if gap is None else gap.kind
        is_short = gap is None or gap.lasts_s < SHORT_S
        is_so = gap is not None and plugin_gaps.SHORT_LIVED.get(gap.kind) is event.verdict
        name = f"{event.verdict} {event.rule}: {kind}"
        if is_so and not is_short:
            self.result.short_lived[name] += 1
        elif (
            gap is not None
            and is_so
            and gap.kind is Kind.PAUSED
            and gap.until > self._now
            and plugin_gaps.is_seen_standing(gap, self._phases[event.node], self._now)
        ):
            self.result.standing[name] += 1
        else:
            self.result.wrong[f"{name}{'' if not is_short else ' < 20 s'}"] += 1


def simulate(
    nodes: int, days: float, model: plugin_gaps.Model, *, seed: int = 1, failures: int = 0
) -> Result:
    """Return the detector's verdicts on `nodes` healthy plugins, in `days` days.

    In addition, `failures` plugins crash, as many freeze, and as many lose their node.
    """
    return Simulation(nodes, days, model, seed, failures).run()
