"""Problems that a plugin reports in its heartbeats, and what follows from them."""

from typing import Final

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from muster import vocabulary
from muster.vocabulary import AlertKind, AlertState, Verdict
from muster_health.model import config, signals
from muster_health.model.steps import Rule
from muster_health.plugin import problems, self_reported
from tests.worlds.detector_fleet import GPU, ZERO, Plugin, World

SETTINGS = config.Detection()
WELL = vocabulary.ResourceBeat(
    name=GPU,
    registered_age_s=600.0,
    streams=1,
    probe_ok=True,
    probe_age_s=2.0,
    devices=8,
    healthy=8,
)
OTHER = msgspec.structs.replace(WELL, name="x/y")
FIRING = AlertState.FIRING


def beat_of(*resources: vocabulary.ResourceBeat, **more: object) -> vocabulary.Heartbeat:
    beat = vocabulary.Heartbeat(
        node="a", plugin="p", instance="one", seq=1, interval_s=5.0, resources=resources
    )
    return msgspec.structs.replace(beat, **more)


def changed(**more: object) -> vocabulary.ResourceBeat:
    return msgspec.structs.replace(WELL, **more)


AGES: Final = st.sampled_from([-1.0, 0.0, 59.0, 61.0, 200.0, 1e6])
RESOURCES: Final = st.builds(
    vocabulary.ResourceBeat,
    name=st.sampled_from([GPU, "x/y"]),
    registered_age_s=AGES,
    streams=st.integers(0, 2),
    probe_ok=st.booleans(),
    probe_age_s=AGES,
    healthy=st.sampled_from([8, 8, 7]),
    problem=st.sampled_from(["", "", "refused"]),
    mismatch=st.sampled_from(["", "", "7 of 8"]),
    kubelet_away=st.booleans(),
    extended=st.booleans(),
)
OFFERS: Final = {GPU: signals.Offer(capacity=8, allocatable=8)}


@given(
    st.lists(st.just(WELL) | RESOURCES, max_size=2),
    st.sampled_from([1.0, 5.0, 60.0]),
    st.dictionaries(st.just("nvml"), AGES),
    st.sampled_from([0.3, 0.3, 1e5]),
    st.sampled_from([1.0, 1.0, 2.4]),
    st.sampled_from([None, OFFERS]),
)
def test_what_looks_well_in_few_steps_has_no_problem_in_many(
    resources: list[vocabulary.ResourceBeat],
    interval_s: float,
    checkers: dict[str, float],
    lag_ms: float,
    stretch: float,
    offers: dict[str, signals.Offer] | None,
) -> None:
    beat = beat_of(*resources, interval_s=interval_s, checkers=checkers, loop_lag_ms=lag_ms)
    if self_reported.is_well(beat, stretch, offers, SETTINGS):
        assert problems.worst(beat, SETTINGS, offers=offers, stretch=stretch) is None


@pytest.mark.parametrize(
    ("resource", "interval_s", "rule"),
    [
        (WELL, 5.0, None),
        (changed(probe_age_s=59.0), 5.0, None),
        (changed(probe_age_s=61.0), 5.0, Rule.SELF_PROBE_STALE),
        (changed(probe_age_s=100_000.0), 5.0, Rule.SELF_PROBE_STALE),
        (changed(probe_age_s=100.0), 60.0, None),
        (changed(probe_age_s=200.0), 60.0, Rule.SELF_PROBE_STALE),
        (changed(probe_age_s=-1.0, registered_age_s=10.0), 5.0, None),
        (changed(probe_age_s=-1.0), 5.0, Rule.SELF_PROBE_STALE),
        (changed(probe_age_s=-1.0, probe_ok=False), 5.0, Rule.SELF_PROBE_STALE),
        (changed(probe_age_s=70.0, probe_ok=False), 5.0, Rule.SELF_PROBE_FAILS),
        (changed(probe_age_s=70.0, problem="refused"), 5.0, Rule.NOT_REGISTERED),
        (changed(streams=0), 5.0, Rule.NOT_REGISTERED),
        (changed(streams=0, problem="missing", kubelet_away=True), 5.0, Rule.KUBELET_AWAY),
    ],
)
def test_a_heartbeat_shows_what_is_wrong(
    resource: vocabulary.ResourceBeat, interval_s: float, rule: Rule | None
) -> None:
    problem = problems.worst(beat_of(OTHER, resource, interval_s=interval_s), SETTINGS)
    assert (problem.rule if problem else None) is rule
    assert problem is None or problem.resources == (GPU,)


def test_a_self_probe_that_is_never_made_again_is_a_plugin_that_is_stuck() -> None:
    problem = problems.worst(beat_of(changed(probe_age_s=75.4)), SETTINGS)
    assert problem is not None
    assert (problem.verdict, [each.observed for each in problem.evidence]) == (
        Verdict.STUCK,
        [f"{GPU}: its socket has not been probed for 75 s"],
    )


def test_a_refused_resource_counts_beside_one_whose_kubelet_is_new() -> None:
    away = changed(streams=0, problem="missing", kubelet_away=True)
    refused = msgspec.structs.replace(OTHER, streams=0, problem="refused")
    problem = problems.worst(beat_of(away, refused), SETTINGS)
    assert problem is not None
    assert (problem.rule, problem.resources) == (Rule.NOT_REGISTERED, ("x/y",))


class Fleet(World):
    """A world with one plugin with two resources; a test sets what its heartbeats report."""

    def __init__(self, **how: object) -> None:
        super().__init__(**how)  # type: ignore[arg-type]  # keywords
        self.seq = 0
        self.said: tuple[vocabulary.ResourceBeat, ...] = (WELL, OTHER)
        self.phase = vocabulary.Phase.SERVING

    def live(self, seconds: int) -> None:
        for _ in range(0, seconds, 5):
            self.seq += 1
            beat = beat_of(*self.said, seq=self.seq, phase=self.phase)
            for service in self.services:
                service.feed(signals.HeartbeatArrived(heartbeat=beat))
            self.run(5.0)

    def answer(self, probe: signals.Probe) -> tuple[float, signals.Input]:
        self.seq += 1
        beat = beat_of(*self.said, seq=self.seq, phase=self.phase)
        return self.now + 0.01, signals.ProbeAnswered(heartbeat=beat, number=probe.number)


def published(world: World) -> list[tuple[AlertState, str]]:
    return [
        (event.state, event.summary)
        for event in world.published.values()
        if isinstance(event, vocabulary.AlertChanged)
    ]


def test_an_alert_names_the_resources_that_it_is_about() -> None:
    world = Fleet()
    world.live(30)
    world.said = (WELL, msgspec.structs.replace(OTHER, streams=0))
    world.live(30)
    apart = "on a is not registered with the kubelet"
    assert published(world) == [(FIRING, f"x/y {apart}")]
    verdict = [e for e in world.published.values() if isinstance(e, vocabulary.VerdictChanged)][-1]
    assert (verdict.verdict, verdict.resources) == (Verdict.DEREGISTERED, ("x/y",))
    world.crash(5.0)
    world.live(30)
    assert published(world) == [(FIRING, f"x/y {apart}")]
    world.said = (changed(streams=0), msgspec.structs.replace(OTHER, streams=0))
    world.live(30)
    world.said = (changed(streams=0), OTHER)
    world.live(30)
    assert published(world) == [(FIRING, f"x/y {apart}"), (FIRING, f"{GPU}, x/y {apart}")]


@pytest.mark.parametrize(("away_s", "kinds"), [(20, []), (60, [AlertKind.DEREGISTERED])])
def test_a_kubelet_has_its_time_to_be_upgraded(away_s: int, kinds: list[AlertKind]) -> None:
    world = Fleet()
    world.live(30)
    lost = vocabulary.PluginDeregistered(
        node="a",
        at=ZERO,
        plugin="p",
        resource=GPU,
        reason=vocabulary.RegistrationReason.STREAM_CLOSED,
    )
    world.said = (changed(streams=0, problem="missing", kubelet_away=True), OTHER)
    world.services[0].feed(signals.FromPlugin(event=lost, instance="one", sequence=1))
    world.live(away_s)
    world.said = (WELL, OTHER)
    world.live(60)
    assert [kind for kind, state in world.story("a") if state is FIRING] == kinds
    assert world.alerts() == []


@pytest.mark.parametrize(("apart_s", "acts"), [(50, 0), (100, 1)])
def test_a_plugin_has_a_minute_to_register_before_it_is_restarted(apart_s: int, acts: int) -> None:
    world = Fleet(remediation=config.Remediation(mode=config.RemediationMode.RESTART_PLUGIN))
    world.plugins["a"] = Plugin("a", alive=False)
    world.live(30)
    world.said = (changed(streams=0), OTHER)
    world.live(apart_s)
    decided = [e for e in world.published.values() if isinstance(e, vocabulary.RemediationDecided)]
    assert len(decided) == acts


def test_a_plugin_that_drains_and_does_not_end_is_believed_for_a_while_only() -> None:
    world = Fleet()
    world.live(30)
    world.said = (changed(streams=0, problem="draining"),)
    world.phase = vocabulary.Phase.DRAINING
    world.live(290)
    assert published(world) == []
    world.live(30)
    assert published(world) == [(FIRING, f"{GPU} on a is not registered with the kubelet")]
