"""On any input, the detector continues, stays within its limits, and publishes evidence."""

from datetime import UTC, datetime

import hypothesis
from hypothesis import strategies as st

from muster import vocabulary
from muster.vocabulary import Condition, Health, StopReason
from muster_health.fleet import detector
from muster_health.model import config, limits, signals

ZERO = datetime(2026, 11, 21, tzinfo=UTC)
BOUNDS = config.Bounds(plugins_per_node=3, devices_per_plugin=5, alerts_per_plugin=4)
NODES = st.sampled_from(["a", "a.b", "x" * 253, "c"])
PLUGINS = st.sampled_from(["p", "q", "r", "s", "t"])
NAMES = st.text(min_size=1, max_size=20)
TEXTS = st.text(max_size=600)
NUMBERS = st.floats(allow_nan=False, allow_infinity=False)
COUNTS = st.integers(0, 2**53)
RESOURCES = st.builds(
    vocabulary.ResourceBeat,
    name=NAMES,
    streams=COUNTS,
    probe_ok=st.booleans(),
    probe_age_s=NUMBERS,
    devices=COUNTS,
    healthy=COUNTS,
    problem=TEXTS,
    short=TEXTS,
    mismatch=TEXTS,
    degraded=COUNTS,
    unmonitored=COUNTS,
)
BEATS = st.builds(
    vocabulary.Heartbeat,
    node=NODES,
    plugin=PLUGINS,
    instance=st.sampled_from(["one", "two", "three"]),
    seq=COUNTS,
    interval_s=st.floats(1e-9, 3600.0),
    uptime_s=st.floats(0.0, 1e300),
    wall=NUMBERS,
    phase=st.sampled_from(vocabulary.Phase),
    resources=st.lists(RESOURCES, max_size=4).map(tuple),
    checkers=st.dictionaries(NAMES, NUMBERS, max_size=3),
    loop_lag_ms=NUMBERS,
)
PLACE = {"node": NODES, "plugin": PLUGINS, "at": st.just(ZERO)}
DEVICES = st.builds(
    vocabulary.Device,
    id=st.text("01234567", min_size=1, max_size=3),
    resource=NAMES,
    health=st.sampled_from(Health),
    reason=TEXTS,
)
EVENTS = st.one_of(
    st.builds(
        vocabulary.InventoryReported, **PLACE, devices=st.lists(DEVICES, max_size=9).map(tuple)
    ),
    st.builds(
        vocabulary.DeviceHealthChanged,
        **PLACE,
        resource=NAMES,
        device_id=st.text("0123", min_size=1, max_size=3),
        health=st.sampled_from(Health),
        reason=TEXTS,
    ),
    st.builds(
        vocabulary.DeviceConditionChanged,
        **PLACE,
        resource=NAMES,
        device_id=st.text("0123", min_size=1, max_size=3),
        condition=st.sampled_from(Condition),
        holds=st.booleans(),
        reason=TEXTS,
    ),
    st.builds(vocabulary.ExpectationChanged, **PLACE, resource=NAMES, short=TEXTS),
    st.builds(vocabulary.DeviceAdded, **PLACE, device=DEVICES),
    st.builds(
        vocabulary.DeviceRemoved, **PLACE, resource=NAMES, device_id=st.just("0"), reason=TEXTS
    ),
    st.builds(vocabulary.PluginStarted, **PLACE, version=TEXTS, instance=NAMES),
    st.builds(
        vocabulary.PluginStopping,
        **PLACE,
        reason=st.sampled_from(StopReason),
        expected_return_s=st.floats(0.0, 86_400.0),
    ),
    st.builds(
        vocabulary.PluginDeregistered,
        **PLACE,
        resource=NAMES,
        reason=st.sampled_from(vocabulary.RegistrationReason),
        detail=TEXTS,
    ),
)
LINK = {"node": NODES, "plugin": PLUGINS, "server": NAMES, "client": COUNTS}
ASKED = {"node": NODES, "plugin": PLUGINS, "number": st.integers(0, 9)}
FACTS = st.builds(
    signals.Facts,
    exists=st.none() | st.booleans(),
    lease_age_s=st.none() | NUMBERS,
    planned=st.lists(st.sampled_from(signals.Planned), max_size=2).map(tuple),
    pods=st.none()
    | st.lists(
        st.builds(signals.Pod, name=NAMES, uid=NAMES, phase=NAMES, ready=st.booleans()),
        max_size=3,
    ).map(tuple),
    problem=TEXTS,
)
INPUTS = st.one_of(
    st.builds(signals.HeartbeatArrived, heartbeat=BEATS),
    st.builds(signals.FromPlugin, event=EVENTS, instance=NAMES, sequence=COUNTS, position=COUNTS),
    st.builds(signals.ProbeAnswered, heartbeat=BEATS, number=st.integers(0, 9)),
    st.builds(signals.ProbeFailed, **ASKED, subscribed=st.booleans()),
    st.builds(signals.ProbeInconclusive, **ASKED),
    st.builds(signals.ClusterAnswered, **ASKED, facts=st.none() | FACTS),
    st.builds(signals.Connected, **LINK),
    st.builds(signals.Disconnected, **LINK, reason=TEXTS),
    st.builds(signals.ServerEvent, server=NAMES, what=TEXTS),
    st.builds(signals.NodesListed),
    st.builds(signals.Leadership, revision=st.none() | st.integers(1, 9)),
    st.builds(signals.BusLost),
    st.builds(signals.BusBack, at=st.just(ZERO)),
    st.builds(signals.ClockStalled, seconds=st.floats(0.0, 1e6)),
    st.builds(signals.NodeOffers, node=NODES, offers=st.none() | st.just({})),
    st.builds(
        signals.ExpectedNodes,
        plugin=PLUGINS,
        nodes=st.dictionaries(
            NODES, st.builds(signals.Expected, age_s=NUMBERS, causes=st.just(("zone=1",)))
        ),
    ),
    st.builds(
        limits.NodeNoisy, node=NODES, messages=COUNTS, bytes=COUNTS, senders=st.tuples(NAMES)
    ),
    st.builds(signals.StreamsChecked, early=st.lists(TEXTS, max_size=3).map(tuple)),
    st.builds(signals.Remediated, node=NODES, plugin=PLUGINS, pod=NAMES, error=TEXTS),
)


@hypothesis.given(st.lists(st.tuples(INPUTS, st.floats(0.0, 40.0)), max_size=40))
@hypothesis.settings(
    max_examples=150,
    deadline=None,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
def test_whatever_is_received_the_detector_goes_on_and_stays_within_its_limits(
    inputs: list[tuple[signals.Input, float]],
) -> None:
    watched = detector.Detector(
        config.Detection(),
        runbook_url="",
        at_zero=ZERO,
        bounds=BOUNDS,
        has_cluster=True,
        restarts=config.Remediation(mode=config.RemediationMode.RESTART_PLUGIN),
    )
    now = 0.0
    watched.receive(signals.BusBack(at=ZERO), now)
    for event, wait_s in inputs:
        now += wait_s
        for _ in range(100):
            due = watched.next_deadline()
            if due is None or due > now:
                break
            _check(watched.tick(now))
        else:
            raise AssertionError("its clock never comes to rest")
        _check(watched.receive(event, now))

    dossiers = list(watched.plugins())
    assert len(dossiers) <= 4 * BOUNDS.plugins_per_node
    for dossier in dossiers:
        shown = dossier.shown(now)
        assert len(shown["unhealthy"]) <= BOUNDS.devices_per_plugin
        assert len(shown["alerts"]) <= BOUNDS.alerts_per_plugin


def _check(outs: list[signals.Output]) -> None:
    for out in outs:
        if isinstance(out, signals.Store):
            assert len(out.value) < 200_000
        if isinstance(out, signals.Publish) and not isinstance(
            out.event, vocabulary.RemediationDecided
        ):
            assert out.event.evidence
