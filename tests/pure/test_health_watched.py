"""Plugins that muster does not run: verdicts and alerts from what an agent observes."""

from typing import Final

import msgspec
import pytest

from muster import vocabulary
from muster.vocabulary import AlertKind, Severity, Verdict, WatchedFinding, WatchedKind
from muster_health.model import signals
from muster_health.model.steps import Rule
from muster_health.plugin import watched_findings
from tests.worlds.watched_fleet import (
    AMD,
    DOWN,
    FIRING,
    LAGS,
    NAME,
    RESOLVED,
    WELL,
    finds,
    published,
    tracked,
    verdicts,
    world_of,
)


@pytest.mark.parametrize(
    ("finding", "verdict", "rule", "severity"),
    [
        (WatchedFinding.NOT_SERVED, Verdict.PLUGIN_DOWN, Rule.WATCHED_NOT_SERVED, "critical"),
        (
            WatchedFinding.SOCKET_REMOVED,
            Verdict.DEREGISTERED,
            Rule.WATCHED_SOCKET_REMOVED,
            "critical",
        ),
        (WatchedFinding.NO_ANSWER, Verdict.STUCK, Rule.WATCHED_NO_ANSWER, "critical"),
        (WatchedFinding.WRONG_ANSWER, Verdict.STUCK, Rule.WATCHED_WRONG_ANSWER, "critical"),
        (
            WatchedFinding.NOT_REGISTERED,
            Verdict.DEREGISTERED,
            Rule.WATCHED_NOT_REGISTERED,
            "critical",
        ),
        (WatchedFinding.FEWER_DEVICES, Verdict.MISMATCH, Rule.WATCHED_FEWER_DEVICES, "critical"),
        (WatchedFinding.TWO_SERVERS, Verdict.SPLIT_BRAIN, Rule.WATCHED_TWO_SERVERS, "warning"),
        (WatchedFinding.NOT_OFFERED, Verdict.MISSING, Rule.WATCHED_NOT_OFFERED, "critical"),
        (WatchedFinding.FILES_MISSING, Verdict.DEGRADED, Rule.WATCHED_FILES_MISSING, "info"),
    ],
)
def test_a_finding_leads_to_its_verdict_within_a_second_and_ends_when_it_is_over(
    finding: WatchedFinding, verdict: Verdict, rule: Rule, severity: str
) -> None:
    world = world_of("a")
    world.observe("a", finds(finding))
    world.run(1.0)
    reached = published(world, "a")[-1]
    assert (reached.verdict, reached.rule, reached.plugin) == (verdict, rule, NAME)
    assert reached.resources == (AMD,)
    world.run(30.0)
    kind = AlertKind(verdict.lower())
    assert world.story("a") == [(kind, FIRING)]
    (alert,) = (e for e in world.published.values() if isinstance(e, vocabulary.AlertChanged))
    assert (alert.severity, alert.watched, alert.plugin) == (Severity(severity), AMD, NAME)
    assert alert.summary.startswith(f"watched plugin {AMD} on a ")
    assert alert.advice.startswith("muster does not run this plugin; ")
    assert alert.runbook == f"watched_plugin.html#{kind}"
    world.observe("a", WELL)
    world.run(14.0)
    assert world.alerts() == [("a", kind, "")]
    world.run(2.0)
    assert (verdicts(world, "a")[-1], world.alerts()) == (Verdict.HEALTHY, [])


def test_every_finding_but_none_has_a_verdict_and_a_rule_of_its_own() -> None:
    findings = set(WatchedFinding) - {WatchedFinding.NONE}
    assert watched_findings.VERDICTS.keys() == findings
    assert len({rule for _, rule in watched_findings.VERDICTS.values()}) == len(findings)


def test_the_evidence_says_what_the_agent_and_kubernetes_see() -> None:
    world = world_of("a")
    world.plugins["a"].others = (
        signals.Pod(
            name="kube-system/amdgpu-x",
            uid="u-1",
            phase="Running",
            ready=False,
            restarts=3,
            waiting="CrashLoopBackOff",
            age_s=9_000.0,
        ),
    )
    world.observe("a", DOWN)
    world.run(2.0)
    assert [(e.source, e.observed) for e in published(world, "a")[-1].evidence] == [
        ("agent", f"{AMD} (device-plugins/amd.sock): refused for 2 s"),
        ("agent", "devices: 0 listed by the kubelet, 4 expected"),
        ("kubernetes", "node lease renewed 0 s ago; node Ready"),
        (
            "kubernetes",
            "pod kube-system/amdgpu-x Running, not Ready, CrashLoopBackOff, 3 restarts",
        ),
        ("kubernetes", f"{AMD} allocatable 4 of 4"),
        (
            "health",
            (
                "the node's allocatable is older than the agent's count: "
                "the kubelet writes it every 10 s"
            ),
        ),
    ]
    (alert,) = (e for e in world.published.values() if isinstance(e, vocabulary.AlertChanged))
    assert (alert.summary, alert.advice, alert.pods) == (
        f"watched plugin {AMD} on a has ended and has not come back",
        (
            "muster does not run this plugin; check whether its pod kube-system/amdgpu-x exists, "
            "and why its process ended (kubectl logs --previous)"
        ),
        ("ml/train",),
    )


def test_a_driver_names_the_pods_that_the_agent_knows() -> None:
    world = world_of("a")
    driver = vocabulary.Watched(
        name="gpu.example.com",
        kind=WatchedKind.DRA_DRIVER,
        finding=WatchedFinding.NO_ANSWER,
        pods=("ml/claims",),
    )
    world.observe("a", driver)
    world.run(5.0)
    assert world.named("a") == [(AlertKind.STUCK, FIRING, ("ml/claims",))]
    assert [question.resources for question in world.asked if question.resources] == []


def test_without_a_cluster_the_finding_decides_alone() -> None:
    world = world_of("a", has_cluster=False)
    world.observe("a", DOWN)
    world.run(2.0)
    reached = published(world, "a")[-1]
    assert (reached.verdict, len(reached.evidence)) == (Verdict.PLUGIN_DOWN, 2)


def test_a_silent_kubernetes_api_delays_a_verdict_but_does_not_prevent_it() -> None:
    world = world_of("a")
    world.mute = True
    world.observe("a", DOWN)
    world.run(8.0)
    reached = published(world, "a")[-1]
    assert reached.verdict is Verdict.PLUGIN_DOWN
    assert reached.evidence[-1].observed == "no answer from the Kubernetes API"


def test_an_allocatable_that_differs_for_half_a_minute_is_a_mismatch() -> None:
    world = world_of("a")
    world.offer_other("a", AMD, 3)
    world.run(29.0)
    assert verdicts(world, "a") == [Verdict.HEALTHY]
    world.run(2.0)
    reached = published(world, "a")[-1]
    assert (reached.verdict, reached.rule) == (
        Verdict.MISMATCH,
        Rule.WATCHED_NODE_OFFERS_OTHERS,
    )
    text = f"{AMD}: the kubelet lists 4 devices, but the node's allocatable is 3 of 3"
    assert reached.evidence[0].observed == text
    world.offer_other("a", AMD, 4)
    world.run(20.0)
    assert (verdicts(world, "a")[-1], world.alerts()) == (Verdict.HEALTHY, [])


def test_an_allocatable_that_follows_in_time_is_none() -> None:
    world = world_of("a")
    for listed in (0, 4, 3, 4):
        world.observe("a", msgspec.structs.replace(WELL, listed=listed))
        world.run(10.0)
        world.offer_other("a", AMD, listed)
        world.run(30.0)
    assert verdicts(world, "a") == [Verdict.HEALTHY]


def test_a_watch_that_lags_is_corrected_before_the_verdict() -> None:
    world = world_of("a")
    world.offer_other("a", AMD, 3)
    world.plugins["a"].offers[AMD] = 4
    world.run(60.0)
    assert verdicts(world, "a") == [Verdict.HEALTHY]


def test_the_end_of_fewer_devices_is_not_reported_as_another_mismatch_meanwhile() -> None:
    world = world_of("a")
    world.offer_other("a", AMD, 3)
    world.observe("a", msgspec.structs.replace(finds(WatchedFinding.FEWER_DEVICES), listed=3))
    world.run(20.0)
    world.observe("a", WELL)
    world.run(10.0)
    world.offer_other("a", AMD, 4)
    world.run(20.0)
    assert world.story("a") == [(AlertKind.MISMATCH, FIRING), (AlertKind.MISMATCH, RESOLVED)]


UNREGISTERED: Final = msgspec.structs.replace(
    WELL, finding=WatchedFinding.NOT_REGISTERED, text="it answers", listed=0
)


@pytest.mark.parametrize("lag_s", [0.0, 1.0, 10.0, 29.0])
def test_a_node_that_follows_the_kubelet_confirms_that_the_plugin_is_not_registered(
    lag_s: float,
) -> None:
    world = world_of("a")
    world.observe("a", UNREGISTERED)
    world.run(lag_s)
    is_explained = any(LAGS in each.observed for each in published(world, "a")[-1].evidence)
    assert is_explained == (lag_s > 0)
    world.offer_other("a", AMD, 0)
    world.run(120.0)
    assert verdicts(world, "a") == [Verdict.HEALTHY, Verdict.DEREGISTERED]


def test_a_node_that_goes_on_offering_devices_contradicts_that_the_plugin_is_not_registered() -> (
    None
):
    world = world_of("a")
    world.observe("a", UNREGISTERED)
    world.run(60.0)
    reached = published(world, "a")[-1]
    assert (reached.verdict, reached.rule) == (Verdict.MISMATCH, Rule.WATCHED_NODE_OFFERS_OTHERS)
    text = f"{AMD}: the kubelet lists 0 devices, but the node's allocatable is 4 of 4"
    assert [each.observed for each in reached.evidence] == [text]
    assert world.alerts() == [("a", AlertKind.MISMATCH, "")]
    # the agent repeats its report
    world.report("a")
    world.run(60.0)
    assert verdicts(world, "a") == [Verdict.HEALTHY, Verdict.DEREGISTERED, Verdict.MISMATCH]
    world.offer_other("a", AMD, 0)
    world.run(30.0)
    assert verdicts(world, "a")[-1] is Verdict.DEREGISTERED
    world.observe("a", WELL)
    world.offer_other("a", AMD, 4)
    world.run(30.0)
    assert (verdicts(world, "a")[-1], world.alerts()) == (Verdict.HEALTHY, [])


def test_a_node_that_its_kubelet_no_longer_writes_contradicts_nothing() -> None:
    world = world_of("a")
    world.plugins["a"].kubelet_dead = True
    world.observe("a", UNREGISTERED)
    world.run(120.0)
    assert verdicts(world, "a") == [Verdict.HEALTHY, Verdict.DEREGISTERED]


def test_while_the_agent_is_silent_the_verdict_stays_and_is_shown_as_not_observed() -> None:
    world = world_of("a")
    world.observe("a", DOWN)
    world.run(5.0)
    world.kill("a")
    world.run(300.0)
    assert verdicts(world, "a") == [Verdict.HEALTHY, Verdict.PLUGIN_DOWN]
    detector = world.services[0].detector
    plugins = detector.shown_plugins(world.services[0].clock, detector.nodes()[1])
    (shown,) = (plugin for plugin in plugins if "watched" in plugin)
    assert (shown["watched"], shown["observed"], shown["agent"]) == (AMD, False, "p")
    assert (shown["finding"], shown["devices"]) == (WatchedFinding.NOT_SERVED, {AMD: 0})
    world.mend("a")
    world.run(20.0)
    plugins = detector.shown_plugins(world.services[0].clock, detector.nodes()[1])
    (shown,) = (plugin for plugin in plugins if "watched" in plugin)
    assert shown["observed"]


def test_a_node_that_is_down_has_one_alert() -> None:
    world = world_of("a")
    world.down("a")
    world.run(60.0)
    assert world.alerts() == [("a", AlertKind.NODE_DOWN, "")]
    assert tracked(world).publication.inhibited


def test_what_only_an_own_plugin_receives_changes_nothing() -> None:
    world = world_of("a")
    service = world.services[0]
    before = tracked(world).shown(service.clock) | {"evidence_age_s": None}
    named = {"node": "a", "plugin": NAME}
    for event in (
        signals.Connected(**named, server="s", client=1),
        signals.Disconnected(**named, server="s", client=1, reason="Client Closed"),
        signals.ProbeFailed(**named, number=1, subscribed=True),
        signals.ClusterAnswered(node="a", plugin=NAME, number=7, facts=None),
    ):
        service.feed(event)
    world.run(60.0)
    assert tracked(world).shown(service.clock) | {"evidence_age_s": None} == before
    assert verdicts(world, "a") == [Verdict.HEALTHY]


def test_a_plugin_that_was_removed_is_forgotten_and_its_alert_resolved() -> None:
    world = world_of("a")
    world.observe("a", DOWN)
    world.run(5.0)
    world.unwatch("a", AMD)
    world.run(5.0)
    assert (world.alerts(), [p.plugin for p in world.services[0].detector.plugins()]) == ([], ["p"])
    assert (verdicts(world, "a")[-1], published(world, "a")[-1].rule) == (
        Verdict.HEALTHY,
        Rule.WATCHED_REMOVED,
    )
    assert [key for key in world.stored if "watched" in key] == []


def test_a_plugin_that_the_agent_no_longer_lists_is_forgotten_after_ten_minutes() -> None:
    world = world_of("a")
    world.observe("a", DOWN)
    world.run(5.0)
    del world.plugins["a"].watched[AMD]
    world.report("a")
    world.run(590.0)
    world.report("a")
    assert world.alerts() == [("a", AlertKind.PLUGIN_DOWN, "")]
    world.run(20.0)
    assert (world.alerts(), len(list(world.services[0].detector.plugins()))) == ([], 1)


def test_an_agent_that_starts_and_lists_it_later_changes_nothing() -> None:
    world = world_of("a")
    world.observe("a", DOWN)
    world.run(5.0)
    listed = world.plugins["a"].watched
    world.plugins["a"].watched = {}
    world.replace("a", 2)
    world.run(300.0)
    world.plugins["a"].watched = listed
    world.report("a")
    world.run(700.0)
    assert world.story("a") == [(AlertKind.PLUGIN_DOWN, FIRING)]


def test_with_the_agent_the_plugins_that_it_watches_are_forgotten() -> None:
    world = world_of("a")
    world.observe("a", DOWN)
    world.run(5.0)
    service = world.services[0]
    world.kill("a")
    service.feed(signals.ExpectedNodes(plugin="p", nodes={}))
    world.run(60.0)
    assert (list(service.detector.plugins()), world.alerts()) == ([], [])


def test_the_same_failure_on_many_nodes_at_once_is_one_alert() -> None:
    nodes = [f"n{number:02}" for number in range(40)]
    world = world_of(*nodes)
    for node in nodes:
        world.observe(node, finds(WatchedFinding.NOT_REGISTERED))
    world.run(5.0)
    assert world.alerts() == [(vocabulary.FLEET, AlertKind.STORM, "")]
    assert all(verdicts(world, node) == [Verdict.HEALTHY] for node in nodes)
    (storm,) = (e for e in world.published.values() if isinstance(e, vocabulary.AlertChanged))
    assert f"resource={AMD}" in storm.summary
    world.run(120.0)
    assert {verdicts(world, node)[-1] for node in nodes} == {Verdict.DEREGISTERED}
    assert tracked(world, nodes[0]).is_suspended is False


def test_a_mass_failure_that_is_over_leaves_no_verdict() -> None:
    nodes = [f"n{number:02}" for number in range(40)]
    world = world_of(*nodes)
    for node in nodes:
        world.observe(node, DOWN)
    world.run(5.0)
    for node in nodes:
        world.observe(node, WELL)
    world.run(60.0)
    assert [verdicts(world, node) for node in nodes] == [[Verdict.HEALTHY]] * len(nodes)
    assert world.alerts() == []
