"""Diagnosis of a silent plugin: each row of the table, and its evidence."""

import dataclasses

import pytest

from muster.vocabulary import Verdict
from muster_health.model import config, signals
from muster_health.model.signals import Planned
from muster_health.model.steps import Rule
from muster_health.plugin import diagnosis, liveness

SETTINGS = config.Detection()
GPU = "nvidia.com/gpu"
POD = signals.Pod(name="muster/plugin-x", uid="1", phase="Running", ready=True)
WELL = signals.Facts(
    exists=True,
    lease_age_s=4.0,
    ready=True,
    pods=(POD,),
    offers={GPU: signals.Offer(capacity=8, allocatable=8)},
)
NOTHING: dict[str, object] = {}


def link(reason: str = "", *, seconds: float = 2.0) -> liveness.Connections:
    connections = liveness.Connections()
    if reason:
        connections.ended("nats-0", 7, reason, 100.0 - seconds)
    return connections


def scene(**other: object) -> diagnosis.Observations:
    whole = diagnosis.Observations(
        silent_s=13.0,
        interval_s=5.0,
        was_heard=True,
        is_expected=True,
        is_subscribed=False,
        connections=link(),
        has_cluster=True,
        cluster=WELL,
        healthy={GPU: 8},
        has_waited=False,
        now=100.0,
    )
    return dataclasses.replace(whole, **other)  # type: ignore[arg-type]  # keywords


def cluster_facts(**other: object) -> signals.Facts:
    return dataclasses.replace(WELL, **other)  # type: ignore[arg-type]  # keywords


def pod(**other: object) -> tuple[signals.Pod, ...]:
    return (dataclasses.replace(POD, **other),)  # type: ignore[arg-type]  # keywords


JUST_NOW = {"silent_s": 2.0}
LATER = {"silent_s": 28.0}
ALONE = {"has_cluster": False, "cluster": None}
OUTDATED = {"revision": "a", "current": "b"}


@pytest.mark.parametrize(
    ("what", "verdict", "rule"),
    [
        ({"cluster": cluster_facts(exists=False)}, Verdict.MAINTENANCE, Rule.NODE_GONE),
        (
            {"cluster": cluster_facts(pods=pod(deleting=True))},
            Verdict.MAINTENANCE,
            Rule.POD_DELETED,
        ),
        (
            {"cluster": cluster_facts(planned=(Planned.UNSCHEDULABLE,))},
            Verdict.MAINTENANCE,
            Rule.NODE_PLANNED,
        ),
        (
            {
                "cluster": cluster_facts(planned=(Planned.UNSCHEDULABLE,), pods=pod(ready=False)),
                "is_subscribed": True,
            },
            Verdict.STUCK,
            Rule.NO_ANSWER,
        ),
        (
            {"cluster": cluster_facts(planned=(Planned.TO_BE_DELETED,), lease_age_s=60.0)},
            Verdict.MAINTENANCE,
            Rule.NODE_PLANNED,
        ),
        ({"cluster": cluster_facts(lease_age_s=20.5)}, Verdict.NODE_DOWN, Rule.LEASE_STALE),
        (
            {"cluster": cluster_facts(lease_age_s=20.5), "is_subscribed": True},
            Verdict.NODE_DOWN,
            Rule.LEASE_STALE,
        ),
        (
            {
                "cluster": cluster_facts(lease_age_s=15.0, pods=pod(ready=False)),
                "is_subscribed": True,
                "has_waited": True,
            },
            Verdict.STUCK,
            Rule.NO_ANSWER,
        ),
        ({"cluster": cluster_facts(pods=pod(**OUTDATED))}, Verdict.MAINTENANCE, Rule.POD_REPLACED),
        ({"was_heard": False}, Verdict.MISSING, Rule.NEVER_HEARD),
        ({"cluster": cluster_facts(pods=())}, Verdict.PLUGIN_DOWN, Rule.POD_NOT_RUNNING),
        (
            {"cluster": cluster_facts(pods=pod(phase="Pending", ready=False))},
            Verdict.PLUGIN_DOWN,
            Rule.POD_NOT_RUNNING,
        ),
        (
            {"cluster": cluster_facts(pods=pod(ready=False, waiting="CrashLoopBackOff"))},
            Verdict.PLUGIN_DOWN,
            Rule.POD_NOT_RUNNING,
        ),
        (
            {"is_subscribed": True, "cluster": cluster_facts(pods=pod(ready=False))},
            Verdict.STUCK,
            Rule.NO_ANSWER,
        ),
        (
            {"is_subscribed": True, "cluster": cluster_facts(pods=None)},
            Verdict.STUCK,
            Rule.NO_ANSWER,
        ),
        ({"is_subscribed": True, **ALONE}, Verdict.STUCK, Rule.NO_ANSWER),
        ({"is_subscribed": True, **LATER}, Verdict.UNREACHABLE, Rule.ONLY_BUS_SILENT),
        (
            {
                "connections": link("Stale Connection"),
                "cluster": cluster_facts(pods=pod(ready=False)),
            },
            Verdict.STUCK,
            Rule.POD_NOT_READY,
        ),
        (LATER, Verdict.UNREACHABLE, Rule.ONLY_BUS_SILENT),
        ({"has_waited": True, **LATER}, Verdict.UNREACHABLE, Rule.ONLY_BUS_SILENT),
        (
            {"connections": link("Read Error", seconds=22.1), "silent_s": 23.0},
            Verdict.UNREACHABLE,
            Rule.ONLY_BUS_SILENT,
        ),
        (
            {"connections": link("Client Closed", seconds=6.0), **LATER},
            Verdict.UNREACHABLE,
            Rule.ONLY_BUS_SILENT,
        ),
        (
            {
                "connections": link("Read Error"),
                "cluster": cluster_facts(pods=pod(ready=False)),
                **JUST_NOW,
            },
            Verdict.PLUGIN_DOWN,
            Rule.NOT_BACK,
        ),
        (
            {
                "connections": link("Read Error"),
                "cluster": cluster_facts(pods=pod(ready=False, waiting="CrashLoopBackOff")),
                **JUST_NOW,
            },
            Verdict.PLUGIN_DOWN,
            Rule.POD_NOT_RUNNING,
        ),
        ({"connections": link("Read Error"), **ALONE}, Verdict.PLUGIN_DOWN, Rule.NOT_BACK),
        (
            {"connections": link("Client Closed", seconds=13.0)},
            Verdict.UNREACHABLE,
            Rule.ONLY_BUS_SILENT,
        ),
        (
            {"connections": link("Authentication Failure"), **LATER},
            Verdict.UNREACHABLE,
            Rule.ONLY_BUS_SILENT,
        ),
        ({"connections": link("Client Closed"), **JUST_NOW}, Verdict.PLUGIN_DOWN, Rule.NOT_BACK),
        (
            {"cluster": cluster_facts(offers={GPU: signals.Offer(capacity=8, allocatable=0)})},
            Verdict.PLUGIN_DOWN,
            Rule.NOBODY_LISTENS,
        ),
        ({"cluster": cluster_facts(pods=pod(ready=False))}, Verdict.STUCK, Rule.POD_NOT_READY),
        (
            {
                "cluster": cluster_facts(pods=pod(ready=False)),
                "connections": link("Client Closed", seconds=13.0),
            },
            Verdict.PLUGIN_DOWN,
            Rule.NOBODY_LISTENS,
        ),
        ({"connections": link("Stale Connection"), **ALONE}, Verdict.STUCK, Rule.CONNECTION_STALE),
        (ALONE, Verdict.PLUGIN_DOWN, Rule.NOBODY_LISTENS),
        ({"connections": link("Client Closed"), **ALONE}, Verdict.PLUGIN_DOWN, Rule.NOT_BACK),
        (
            {
                "connections": link("Client Closed"),
                "cluster": cluster_facts(pods=pod(ready=False)),
                **JUST_NOW,
            },
            Verdict.PLUGIN_DOWN,
            Rule.NOT_BACK,
        ),
        (
            {"connections": link("Client Closed", seconds=13.0), **ALONE},
            Verdict.PLUGIN_DOWN,
            Rule.NOBODY_LISTENS,
        ),
        ({"cluster": None, "has_waited": True}, Verdict.PLUGIN_DOWN, Rule.NOBODY_LISTENS),
        (
            {"cluster": None, "connections": link("Client Closed"), **JUST_NOW},
            Verdict.PLUGIN_DOWN,
            Rule.NOT_BACK,
        ),
        ({"cluster": signals.Facts(problem="403")}, Verdict.PLUGIN_DOWN, Rule.NOBODY_LISTENS),
    ],
)
def test_the_first_row_that_holds_decides(
    what: dict[str, object], verdict: Verdict, rule: Rule
) -> None:
    reached = diagnosis.diagnose(scene(**what), SETTINGS)

    assert reached is not None
    assert (reached.verdict, reached.rule) == (verdict, rule)
    assert len(reached.evidence) >= 2


@pytest.mark.parametrize(
    "what", [{"is_subscribed": True}, {"connections": link("Stale Connection")}, NOTHING]
)
def test_a_lease_no_newer_than_the_missing_heartbeat_is_waited_for(what: dict[str, object]) -> None:
    at_once = config.Detection(ready_s=0)
    assert (
        diagnosis.diagnose(scene(cluster=cluster_facts(lease_age_s=7.6), **what), at_once) is None
    )
    assert (
        diagnosis.diagnose(scene(cluster=cluster_facts(lease_age_s=7.4), **what), at_once)
        is not None
    )


@pytest.mark.parametrize(
    "what", [{"connections": link("Stale Connection")}, {"is_subscribed": True}, NOTHING]
)
def test_kubernetes_is_asked_again_where_it_did_not_answer(what: dict[str, object]) -> None:
    assert diagnosis.diagnose(scene(cluster=None, **what), SETTINGS) is None
    reached = diagnosis.diagnose(scene(cluster=None, has_waited=True, **what), SETTINGS)
    assert reached is not None
    assert ("health", "no answer from the Kubernetes API") in [
        (each.source, each.observed) for each in reached.evidence
    ]


def test_kubernetes_is_asked_again_about_a_plugin_that_does_not_come_back() -> None:
    gone = scene(cluster=None, connections=link("Client Closed", seconds=13.0), silent_s=14.0)
    assert diagnosis.diagnose(gone, SETTINGS) is None
    reached = diagnosis.diagnose(dataclasses.replace(gone, has_waited=True), SETTINGS)
    assert reached is not None
    assert (reached.verdict, reached.rule) == (Verdict.PLUGIN_DOWN, Rule.NOBODY_LISTENS)


@pytest.mark.parametrize(
    "what", [{"connections": link("Stale Connection")}, {"is_subscribed": True}, NOTHING]
)
def test_a_pod_that_is_ready_is_believed_when_its_probes_have_had_their_time(
    what: dict[str, object],
) -> None:
    assert diagnosis.diagnose(scene(silent_s=27.4, **what), SETTINGS) is None
    assert diagnosis.diagnose(scene(silent_s=27.4, has_waited=True, **what), SETTINGS) is None
    reached = diagnosis.diagnose(scene(silent_s=27.6, **what), SETTINGS)
    assert reached is not None
    assert reached.verdict is Verdict.UNREACHABLE


def test_a_connection_that_was_reset_is_waited_for_while_the_pod_is_well() -> None:
    reset = scene(connections=link("Read Error", seconds=2.0), silent_s=3.0)
    assert diagnosis.diagnose(reset, SETTINGS) is None
    assert diagnosis.diagnose(dataclasses.replace(reset, cluster=None), SETTINGS) is None
    # its earlier heartbeats may have been lost, too
    assert diagnosis.diagnose(dataclasses.replace(reset, silent_s=27.4), SETTINGS) is None


def test_a_plugin_that_closes_its_connection_after_a_silence_may_only_have_been_cut_off() -> None:
    hung_up = scene(connections=link("Client Closed", seconds=2.0), silent_s=14.4)
    reached = diagnosis.diagnose(hung_up, SETTINGS)
    assert reached is not None
    assert (reached.verdict, reached.rule) == (Verdict.PLUGIN_DOWN, Rule.NOT_BACK)

    silent_before = dataclasses.replace(hung_up, silent_s=14.6)
    assert diagnosis.diagnose(silent_before, SETTINGS) is None


def test_a_node_that_closed_a_connection_was_alive_to_do_so() -> None:
    reached = diagnosis.diagnose(
        scene(
            cluster=cluster_facts(lease_age_s=9.0), connections=link("Client Closed"), silent_s=2.0
        ),
        SETTINGS,
    )

    assert reached is not None
    assert reached.verdict is Verdict.PLUGIN_DOWN


def test_evidence_names_its_source() -> None:
    last = "exit code 1 (Error)"
    crashed = pod(ready=False, restarts=3, waiting="CrashLoopBackOff", last_exit=last)
    what = cluster_facts(pods=crashed)
    reached = diagnosis.diagnose(scene(cluster=what, connections=link("Client Closed")), SETTINGS)

    assert reached is not None
    assert [(each.source, each.observed) for each in reached.evidence] == [
        ("heartbeat", "none for 13.0 s, 2.6 intervals of 5 s"),
        ("probe", "no process is subscribed to the plugin's subject in NATS"),
        ("bus", "connection closed 2.0 s ago (Client Closed)"),
        ("kubernetes", "node lease renewed 4 s ago; node Ready"),
        (
            "kubernetes",
            f"pod muster/plugin-x Running, not Ready, CrashLoopBackOff, 3 restarts, last {last}",
        ),
        ("kubernetes", "nvidia.com/gpu allocatable 8 of 8"),
    ]


@pytest.mark.parametrize(
    ("reason", "said"),
    [
        (
            "Stale Connection",
            (
                "without the Kubernetes API, a hanging process cannot be distinguished from a "
                "network failure"
            ),
        ),
        (
            "",
            ("without the Kubernetes API, a dead plugin cannot be distinguished from a dead node"),
        ),
    ],
)
def test_without_a_cluster_the_evidence_names_what_cannot_be_decided(
    reason: str, said: str
) -> None:
    reached = diagnosis.diagnose(
        scene(connections=link(reason), has_cluster=False, cluster=None), SETTINGS
    )

    assert reached is not None
    assert (reached.evidence[-1].source, reached.evidence[-1].observed) == ("health", said)
