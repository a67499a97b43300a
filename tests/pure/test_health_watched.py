"""Plugins that muster does not run: verdicts and alerts from what an agent observes."""

import dataclasses
import random
from collections.abc import Callable
from typing import Final

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from muster import vocabulary
from muster.vocabulary import AlertKind, AlertState, Severity, Verdict, WatchedFinding, WatchedKind
from muster_health.model import config, limits, signals, snapshot
from muster_health.model.steps import Rule
from muster_health.plugin import watched_findings, watched_plugin
from tests.worlds.detector_fleet import World

FIRING, RESOLVED = AlertState.FIRING, AlertState.RESOLVED
AMD: Final = "amd.com/gpu"
NAME: Final = vocabulary.watched_plugin(AMD)
POD: Final = signals.Pod(
    name="kube-system/amdgpu-x", uid="u-1", phase="Running", ready=True, age_s=9_000.0
)
WELL: Final = vocabulary.Watched(name=AMD, socket="device-plugins/amd.sock", listed=4, expected=4)
DOWN: Final = msgspec.structs.replace(
    WELL, finding=WatchedFinding.NOT_SERVED, text="refused for 2 s", listed=0
)


def finds(finding: WatchedFinding) -> vocabulary.Watched:
    return msgspec.structs.replace(WELL, finding=finding)


def world_of(*nodes: str, **how: object) -> World:
    """Return a world in which the agent on each node watches a healthy plugin."""
    world = World(*nodes, **how)  # type: ignore[arg-type]  # keywords
    for node in nodes:
        world.plugins[node].others = (POD,)
        world.plugins[node].offers = {AMD: 4}
        world.offer_other(node, AMD, 4)
    world.run(5.0)
    for node in nodes:
        world.observe(node, WELL)
    world.run(5.0)
    assert [verdicts(world, node) for node in nodes] == [[Verdict.HEALTHY]] * len(nodes)
    return world


def published(world: World, node: str) -> list[vocabulary.VerdictChanged]:
    return [
        event
        for event in world.published.values()
        if isinstance(event, vocabulary.VerdictChanged)
        and (event.node, event.watched) == (node, AMD)
    ]


def verdicts(world: World, node: str) -> list[Verdict]:
    return [event.verdict for event in published(world, node)]


def tracked(world: World, node: str = "a") -> watched_plugin.WatchedPlugin:
    (plugin,) = (
        plugin
        for plugin in world.services[0].detector.plugins()
        if isinstance(plugin, watched_plugin.WatchedPlugin) and plugin.node == node
    )
    return plugin


# from a finding to a verdict


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


# planned stops


@pytest.mark.parametrize(
    ("others", "planned", "rule"),
    [
        ((dataclasses.replace(POD, deleting=True),), (), Rule.WATCHED_POD_DELETED),
        ((), (), Rule.WATCHED_POD_DELETED),
        ((dataclasses.replace(POD, age_s=3.0),), (), Rule.WATCHED_POD_REPLACED),
        ((POD,), (signals.Planned.UNSCHEDULABLE,), Rule.WATCHED_NODE_PLANNED),
        ((POD,), (signals.Planned.TO_BE_DELETED,), Rule.WATCHED_NODE_PLANNED),
    ],
)
@pytest.mark.parametrize("finding", ["not_served", "socket_removed", "no_answer"])
def test_a_planned_stop_is_maintenance_and_raises_no_alert(
    others: tuple[signals.Pod, ...], planned: tuple[signals.Planned, ...], rule: Rule, finding: str
) -> None:
    world = world_of("a")
    world.plugins["a"].others = others
    world.plugins["a"].planned = planned
    world.observe("a", finds(WatchedFinding(finding)))
    world.run(30.0)
    reached = published(world, "a")[-1]
    assert (reached.verdict, reached.rule) == (Verdict.MAINTENANCE, rule)
    world.report("a")
    world.run(200.0)
    assert (world.story("a"), verdicts(world, "a")[-1]) == ([], Verdict.MAINTENANCE)
    world.observe("a", WELL)
    world.run(20.0)
    assert (world.story("a"), verdicts(world, "a")[-1]) == ([], Verdict.HEALTHY)


def replaced(pod: signals.Pod, **changes: object) -> signals.Pod:
    return dataclasses.replace(pod, **changes)  # type: ignore[arg-type]  # keywords


def test_a_plugin_that_is_not_back_after_maintenance_has_an_alert_that_says_so() -> None:
    world = world_of("a")
    world.plugins["a"].others = ()
    world.observe("a", DOWN)
    world.run(310.0)
    (alert,) = (e for e in world.published.values() if isinstance(e, vocabulary.AlertChanged))
    assert (alert.kind, alert.summary, alert.runbook) == (
        AlertKind.MAINTENANCE_OVERDUE,
        f"watched plugin {AMD} on a is overdue: it has not returned from a planned stop",
        "watched_plugin.html#maintenance_overdue",
    )
    assert alert.evidence[0].observed == "not back 300 s after its pod was deleted"


@pytest.mark.parametrize(
    "others",
    [
        (replaced(POD, age_s=3.0, restarts=2),),
        (replaced(POD, age_s=61.0),),
        (POD, replaced(POD, name="kube-system/other", deleting=True)),
        None,
    ],
)
def test_a_pod_that_was_not_replaced_explains_nothing(
    others: tuple[signals.Pod, ...] | None,
) -> None:
    world = world_of("a")
    world.plugins["a"].others = others
    world.observe("a", DOWN)
    world.run(2.0)
    assert verdicts(world, "a") == [Verdict.HEALTHY, Verdict.PLUGIN_DOWN]


@pytest.mark.parametrize(
    ("age_s", "verdict"), [(25.0, Verdict.PLUGIN_DOWN), (3.0, Verdict.MAINTENANCE)]
)
def test_a_new_pod_that_has_served_already_explains_nothing(age_s: float, verdict: Verdict) -> None:
    world = world_of("a")
    world.plugins["a"].others = (replaced(POD, age_s=3.0),)
    world.observe("a", DOWN)
    world.run(2.0)
    world.observe("a", WELL)
    world.run(20.0)
    world.plugins["a"].others = (replaced(POD, age_s=age_s),)
    world.observe("a", DOWN)
    world.run(15.0)
    assert verdicts(world, "a")[1:] == [Verdict.MAINTENANCE, Verdict.HEALTHY, verdict]


def test_a_process_that_runs_in_no_pod_is_not_excused_by_the_lack_of_one() -> None:
    world = world_of("a")
    world.plugins["a"].others = ()
    world.observe("a", msgspec.structs.replace(DOWN, process="nvidia-device-plugin (pid 77)"))
    world.run(2.0)
    assert verdicts(world, "a") == [Verdict.HEALTHY, Verdict.PLUGIN_DOWN]


def test_a_problem_that_needs_a_serving_process_is_not_excused_by_a_new_pod() -> None:
    world = world_of("a")
    world.plugins["a"].others = (replaced(POD, age_s=3.0),)
    world.observe("a", finds(WatchedFinding.NOT_REGISTERED))
    world.run(2.0)
    assert verdicts(world, "a") == [Verdict.HEALTHY, Verdict.DEREGISTERED]


# the node's allocatable


@pytest.mark.parametrize(("age_s", "deleting"), [(40.0, False), (9_000.0, True)])
def test_a_pod_that_is_replaced_while_it_still_serves_is_no_split_brain(
    *, age_s: float, deleting: bool
) -> None:
    world = world_of("a")
    other = dataclasses.replace(POD, name="kube-system/amdgpu-y", uid="u-2")
    world.plugins["a"].others = (
        POD,
        dataclasses.replace(other, age_s=age_s, deleting=deleting),
    )
    world.observe("a", finds(WatchedFinding.TWO_SERVERS))
    world.run(60.0)
    assert verdicts(world, "a") == [Verdict.HEALTHY]
    world.plugins["a"].others = (POD, other)
    world.run(15.0)
    assert verdicts(world, "a")[-1] is Verdict.SPLIT_BRAIN


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
LAGS: Final = "the node's allocatable is older than the agent's count"


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


# the agent


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


# the Kubernetes API alone

SHOWN: Final = msgspec.structs.replace(DOWN, socket="", text="allocatable is 0 of 4")


def show(world: World, watched: vocabulary.Watched, node: str = "a") -> None:
    for service in world.services:
        service.feed(signals.ClusterObserved(node=node, watched=watched))


def test_what_the_api_alone_shows_leads_to_a_verdict_until_it_is_over() -> None:
    world = World("a")
    world.run(5.0)
    show(world, vocabulary.Watched(name=AMD))
    assert len(list(world.services[0].detector.plugins())) == 1
    world.plugins["a"].others = (POD,)
    show(world, SHOWN)
    world.run(2.0)
    reached = published(world, "a")[-1]
    assert (reached.verdict, reached.evidence[0].source) == (Verdict.PLUGIN_DOWN, "kubernetes")
    detector = world.services[0].detector
    plugins = detector.shown_plugins(world.services[0].clock, detector.nodes()[1])
    (shown,) = (plugin for plugin in plugins if "watched" in plugin)
    assert (shown["observed"], shown["agent"]) == (True, "")
    show(world, vocabulary.Watched(name=AMD))
    world.run(20.0)
    assert (verdicts(world, "a")[-1], world.alerts()) == (Verdict.HEALTHY, [])


def test_a_node_that_offers_devices_again_does_not_contradict_what_the_api_showed_before() -> None:
    world = World("a")
    world.run(5.0)
    world.plugins["a"].others = (POD,)
    world.offer_other("a", AMD, 0)
    show(world, msgspec.structs.replace(SHOWN, finding=WatchedFinding.NOT_REGISTERED))
    world.run(5.0)
    # the plugin is back; the API is read only every minute
    world.offer_other("a", AMD, 4)
    world.run(55.0)
    show(world, vocabulary.Watched(name=AMD))
    world.run(30.0)
    assert verdicts(world, "a") == [Verdict.DEREGISTERED, Verdict.HEALTHY]
    assert not any(
        LAGS in each.observed for event in published(world, "a") for each in event.evidence
    )


def test_an_agent_on_the_node_knows_better_than_the_api() -> None:
    world = world_of("a")
    show(world, SHOWN)
    world.run(60.0)
    assert verdicts(world, "a") == [Verdict.HEALTHY]
    world.observe("a", DOWN)
    world.run(5.0)
    show(world, vocabulary.Watched(name=AMD))
    world.crash(3.0)
    show(world, vocabulary.Watched(name=AMD))
    world.run(60.0)
    assert world.alerts() == [("a", AlertKind.PLUGIN_DOWN, "")]


def test_what_only_the_api_shows_of_a_driver_counts_beside_the_agent() -> None:
    world = world_of("a")
    world.observe("a", msgspec.structs.replace(WELL, kind=WatchedKind.DRA_DRIVER))
    stale = vocabulary.Watched(
        name=AMD, kind=WatchedKind.DRA_DRIVER, finding=WatchedFinding.FEWER_DEVICES
    )
    show(world, stale)
    world.run(5.0)
    assert verdicts(world, "a")[-1] is Verdict.MISMATCH


def test_an_observation_of_an_unknown_node_is_refused() -> None:
    world = world_of("a")
    world.services[0].feed(signals.NodeOffers(node="a", offers={}))
    world.services[0].feed(signals.NodesListed())
    show(world, SHOWN, "elsewhere")
    refused = [out for out in world.noted if isinstance(out, signals.Noted) and out.refusal]
    assert {out.refusal for out in refused} == {limits.Refusal.UNKNOWN_NODE}


# restarts of health


@pytest.mark.parametrize("finding", [DOWN, WELL, finds(WatchedFinding.TWO_SERVERS)])
def test_a_new_health_neither_repeats_nor_ends_an_alert(finding: vocabulary.Watched) -> None:
    world = world_of("a", services=2)
    world.observe("a", finding)
    world.run(5.0)
    before = dict(world.published)
    world.crash(3.0)
    world.run(60.0)
    world.report("a")
    world.run(60.0)
    assert {key: event for key, event in world.published.items() if key not in before} == {}
    if finding is not WELL:
        world.observe("a", WELL)
        world.run(60.0)
        assert (world.alerts(), verdicts(world, "a")[-1]) == ([], Verdict.HEALTHY)


def test_a_restarted_health_with_no_agent_keeps_the_alert_and_shows_it() -> None:
    world = world_of("a")
    world.observe("a", DOWN)
    world.run(5.0)
    world.kill("a")
    world.crash(3.0)
    world.run(60.0)
    assert ("a", AlertKind.PLUGIN_DOWN, "") in world.alerts()
    shown = tracked(world).shown(world.services[0].clock)
    assert (shown["verdict"], shown["text"], shown["agent"]) == (
        Verdict.PLUGIN_DOWN,
        "refused for 2 s",
        "p",
    )


def test_a_planned_stop_is_overdue_on_time_after_a_restart_of_health() -> None:
    world = world_of("a")
    world.plugins["a"].others = ()
    world.observe("a", DOWN)
    world.run(100.0)
    world.crash(3.0)
    world.run(190.0)
    assert world.story("a") == []
    world.run(20.0)
    assert world.story("a") == [(AlertKind.MAINTENANCE_OVERDUE, FIRING)]


def test_alerts_that_outlive_all_saved_state_stay_until_the_agent_reports() -> None:
    world = world_of("a")
    world.observe("a", DOWN)
    world.run(5.0)
    alerts = [e for e in world.published.values() if isinstance(e, vocabulary.AlertChanged)]
    (state,) = snapshot.of_alerts(alerts)
    assert (state.watched, state.plugin) == (vocabulary.Watched(name=AMD), NAME)
    world.stored = {state_key(state): snapshot.encode(state)}
    world.crash(3.0)
    world.run(60.0)
    assert world.story("a") == [(AlertKind.PLUGIN_DOWN, FIRING)]
    world.report("a")
    world.run(5.0)
    assert world.story("a") == [(AlertKind.PLUGIN_DOWN, FIRING)]
    world.observe("a", WELL)
    world.run(60.0)
    assert world.story("a")[-1] == (AlertKind.PLUGIN_DOWN, RESOLVED)


def state_key(state: snapshot.Snapshot) -> str:
    return snapshot.key_of(state.node, state.plugin)


def test_a_state_of_another_name_is_not_used() -> None:
    state = snapshot.Snapshot(
        node="a",
        plugin="watched-other-0000",
        state=snapshot.State.FAILING,
        interval_s=5.0,
        watched=DOWN,
    )
    with pytest.raises(ValueError, match="is not the plugin of amd"):
        snapshot.decode(snapshot.encode(state))


# limits


def test_a_node_cannot_have_more_watched_plugins_than_the_limit() -> None:
    world = world_of("a", "b")
    for number in range(200):
        world.observe("a", vocabulary.Watched(name=f"x.example/{number}"))
    world.run(10.0)
    detector = world.services[0].detector
    on_a = [plugin for plugin in detector.plugins() if plugin.node == "a"]
    assert len(on_a) == 1 + vocabulary.WATCHED_MAX
    refused = [out for out in world.noted if isinstance(out, signals.Noted) and out.refusal]
    assert {out.refusal for out in refused} == {limits.Refusal.WATCHED}
    assert len(refused) == 200 + 1 - vocabulary.WATCHED_MAX
    world.observe("b", DOWN)
    world.run(5.0)
    assert verdicts(world, "b")[-1] is Verdict.PLUGIN_DOWN


def test_a_plugin_cannot_call_itself_a_watched_one() -> None:
    world = world_of("a")
    heartbeat = msgspec.structs.replace(world.plugins["a"].beat(world.now), plugin=NAME)
    world.services[0].feed(signals.HeartbeatArrived(heartbeat=heartbeat))
    other = msgspec.structs.replace(heartbeat, plugin="watched-x-0000")
    world.services[0].feed(signals.HeartbeatArrived(heartbeat=other))
    refused = [out for out in world.noted if isinstance(out, signals.Noted) and out.refusal]
    assert {out.refusal for out in refused} == {limits.Refusal.RESERVED}
    assert len(list(world.services[0].detector.plugins())) == 2


def test_a_node_that_alternates_between_findings_is_asked_about_seldom() -> None:
    world = world_of("a")
    before = len(world.asked)
    for number in range(300):
        world.observe("a", [DOWN, finds(WatchedFinding.NO_ANSWER)][number % 2])
        world.run(0.2)
    assert len(world.asked) - before <= 60.0 / 10.0 + 3
    assert len(published(world, "a")) <= 60.0 / 15.0 + 2


def test_an_agent_that_makes_up_names_without_end_is_refused() -> None:
    world = world_of("a")
    for number in range(200):
        name = f"x.example/{number}"
        world.observe("a", vocabulary.Watched(name=name))
        world.unwatch("a", name)
    world.run(60.0)
    verdicts = [e for e in world.published.values() if isinstance(e, vocabulary.VerdictChanged)]
    assert 0 < len([event for event in verdicts if event.watched]) <= (vocabulary.WATCHED_MAX + 1)
    refused = [out for out in world.noted if isinstance(out, signals.Noted) and out.refusal]
    assert len(refused) == 200 - vocabulary.WATCHED_MAX


def test_made_up_names_do_not_keep_out_a_resource_that_the_node_offers() -> None:
    world = World("a")
    world.run(5.0)
    for number in range(200):
        name = f"x.example/{number}"
        world.observe("a", vocabulary.Watched(name=name))
        world.unwatch("a", name)
    world.offer_other("a", AMD, 4)
    world.observe("a", WELL)
    world.observe("a", DOWN)
    world.run(5.0)
    assert verdicts(world, "a")[-1] is Verdict.PLUGIN_DOWN


def test_alerts_of_made_up_plugins_do_not_delay_that_of_the_agent_itself() -> None:
    world = World("a")
    world.run(5.0)
    for number in range(vocabulary.WATCHED_MAX):
        finding = WatchedFinding.NO_ANSWER
        world.observe("a", vocabulary.Watched(name=f"x.example/{number}", finding=finding))
    world.run(10.0)
    assert len(world.alerts()) < vocabulary.WATCHED_MAX
    world.part("a")
    world.run(10.0)
    assert ("a", AlertKind.DEREGISTERED, "") in world.alerts()


def test_an_agent_that_does_not_know_what_to_expect_hides_nothing_that_the_api_shows() -> None:
    world = World("a")
    world.run(5.0)
    world.observe("a", vocabulary.Watched(name=AMD, listed=0))
    show(world, SHOWN)
    world.run(5.0)
    assert verdicts(world, "a")[-1] is Verdict.PLUGIN_DOWN
    world.offer_other("a", AMD, 4)
    world.observe("a", WELL)
    world.run(20.0)
    assert verdicts(world, "a")[-1] is Verdict.HEALTHY


def test_no_name_can_be_made_up_that_stands_for_another_plugin() -> None:
    names = [
        f"nvidia.com/gpu{'!' * (number % 97)}{'.' * (number // 97)}" for number in range(9_000)
    ]
    plugins = {vocabulary.watched_plugin(name) for name in names}
    assert len(plugins) == len(names)
    assert {plugin.rpartition("-")[0] for plugin in plugins} == {"watched-nvidia-com-gpu"}
    assert len(vocabulary.watched_plugin("x" * 253)) <= 63


def test_what_is_kept_of_an_observation_is_bounded() -> None:
    world = world_of("a")
    long = "x" * 2048
    huge = msgspec.structs.replace(
        DOWN, text=long, socket=long, process=long, pod=long, pods=(long,) * 20
    )
    world.observe("a", huge)
    world.run(5.0)
    assert len(world.stored[tracked(world).key]) < 8_000


# many nodes at once


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


# repair


@pytest.mark.parametrize("allowed", [True, False])
def test_a_pod_of_a_watched_plugin_is_restarted_only_if_that_is_allowed(allowed: bool) -> None:  # noqa: FBT001
    remediation = config.Remediation(mode=config.RemediationMode.RESTART_PLUGIN, watched=allowed)
    world = world_of("a", remediation=remediation)
    world.observe("a", finds(WatchedFinding.NO_ANSWER))
    world.run(59.0)
    assert remedies(world) == []
    world.run(5.0)
    acted = [(vocabulary.Remedy.ACTED, POD.name)]
    assert remedies(world) == (acted if allowed else [])
    world.run(300.0)
    assert len(remedies(world)) == int(allowed)


def test_what_only_the_api_shows_restarts_nothing() -> None:
    remediation = config.Remediation(mode=config.RemediationMode.RESTART_PLUGIN, watched=True)
    world = world_of("a", remediation=remediation)
    world.observe("a", msgspec.structs.replace(WELL, kind=WatchedKind.DRA_DRIVER))
    # this finding uses events, which every client that may create events can forge
    show(world, msgspec.structs.replace(SHOWN, kind=WatchedKind.DRA_DRIVER))
    world.run(120.0)
    assert verdicts(world, "a")[-1] is Verdict.PLUGIN_DOWN
    assert remedies(world) == []


@pytest.mark.parametrize(
    ("observed", "others"),
    [
        (finds(WatchedFinding.WRONG_ANSWER), (POD,)),
        (finds(WatchedFinding.FEWER_DEVICES), (POD,)),
        (finds(WatchedFinding.TWO_SERVERS), (POD,)),
        (finds(WatchedFinding.NOT_OFFERED), (POD,)),
    ],
)
def test_an_uncertain_verdict_restarts_nothing(
    observed: vocabulary.Watched, others: tuple[signals.Pod, ...]
) -> None:
    world = world_of(
        "a",
        remediation=config.Remediation(mode=config.RemediationMode.RESTART_PLUGIN, watched=True),
    )
    world.plugins["a"].others = others
    world.observe("a", observed)
    world.run(300.0)
    assert remedies(world) == []


@pytest.mark.parametrize("others", [(), None, (POD, replaced(POD, name="k/2", uid="u-2"))])
def test_without_exactly_one_known_pod_the_restart_is_refused(
    others: tuple[signals.Pod, ...] | None,
) -> None:
    world = world_of(
        "a",
        remediation=config.Remediation(mode=config.RemediationMode.RESTART_PLUGIN, watched=True),
    )
    world.plugins["a"].others = others
    world.observe("a", finds(WatchedFinding.NOT_REGISTERED))
    world.run(100.0)
    assert remedies(world) == [(vocabulary.Remedy.REFUSED, "")]


def test_while_the_agent_is_silent_nothing_is_restarted() -> None:
    world = world_of(
        "a",
        remediation=config.Remediation(mode=config.RemediationMode.RESTART_PLUGIN, watched=True),
    )
    world.observe("a", finds(WatchedFinding.NO_ANSWER))
    world.run(20.0)
    world.cut("a")
    world.run(200.0)
    assert remedies(world) == []


def remedies(world: World) -> list[tuple[vocabulary.Remedy, str]]:
    return [
        (event.outcome, event.pod)
        for event in world.published.values()
        if isinstance(event, vocabulary.RemediationDecided)
    ]


# any sequence


def test_healthy_plugins_with_rolling_updates_raise_no_alert_in_a_day() -> None:
    nodes = [f"n{number}" for number in range(6)]
    world = world_of(*nodes)
    for node in nodes:
        world.plugins[node].interval_s = 600.0
    world.interval_s = 600.0
    world.run(1.0)
    chance = random.Random(18)  # noqa: S311  # a simulation
    for _ in range(25):
        for node in nodes:
            roll(world, node, chance)
        world.run(3_600.0 - 30.0 * len(nodes))
        for node in nodes:
            world.report(node)
    assert {event.kind for event in alert_events(world)} == set()
    assert {verdicts(world, node)[-1] for node in nodes} == {Verdict.HEALTHY}
    assert world.now > 24 * 3_600.0
    rolled = [verdict for node in nodes for verdict in verdicts(world, node)]
    assert rolled.count(Verdict.MAINTENANCE) > 100


def alert_events(world: World) -> list[vocabulary.AlertChanged]:
    return [e for e in world.published.values() if isinstance(e, vocabulary.AlertChanged)]


def roll(world: World, node: str, chance: random.Random) -> None:
    """Replace a node's plugin as a DaemonSet does; the agent reports most of the stages."""
    away = finds(chance.choice([WatchedFinding.NOT_SERVED, WatchedFinding.SOCKET_REMOVED]))
    stages: list[tuple[signals.Pod, ...]] = [(replaced(POD, deleting=True),), ()]
    stages.append((replaced(POD, name="kube-system/new", uid="u-2", age_s=2.0, ready=False),))
    for pods in stages:
        world.plugins[node].others = pods
        if chance.random() < 0.7:
            world.observe(node, away)
            world.deliver()
        world.run(chance.uniform(0.1, 8.0))
    world.observe(node, WELL)
    world.deliver()
    world.run(6.0)
    world.plugins[node].others = (POD,)


OBSERVATIONS: Final = st.builds(
    lambda finding, listed, text: msgspec.structs.replace(
        WELL, finding=finding, listed=listed, text=text
    ),
    st.sampled_from(WatchedFinding),
    st.sampled_from([None, 0, 3, 4]),
    st.sampled_from(["", "seen"]),
)
PODS: Final = st.sampled_from(
    [None, (), (POD,), (replaced(POD, deleting=True),), (replaced(POD, age_s=1.0),)]
)
Step = Callable[[World], None]


def _steps() -> st.SearchStrategy[Step]:
    seconds = st.sampled_from([0.1, 0.6, 2.0, 8.0, 31.0, 120.0, 400.0])
    return st.one_of(
        OBSERVATIONS.map(lambda watched: lambda world: world.observe("a", watched)),
        PODS.map(lambda pods: lambda world: setattr(world.plugins["a"], "others", pods)),
        st.sampled_from([0, 3, 4]).map(
            lambda count: lambda world: world.offer_other("a", AMD, count)
        ),
        st.booleans().map(lambda mute: lambda world: world.hush(mute)),
        seconds.map(lambda seconds: lambda world: world.run(seconds)),
        seconds.map(lambda seconds: lambda world: world.outage(seconds)),
        seconds.map(lambda seconds: lambda world: world.crash(seconds)),
        st.sampled_from(["report", "kill", "mend", "freeze"]).map(
            lambda act: lambda world: getattr(world, act)("a")
        ),
    )


@settings(max_examples=60)
@given(st.lists(_steps(), max_size=14), OBSERVATIONS)
def test_after_any_sequence_the_alert_is_that_of_the_last_observation(
    sequence: list[Step], last: vocabulary.Watched
) -> None:
    world = world_of("a")
    for step in sequence:
        step(world)
    world.hush(mute=False)
    world.plugins["a"].others = (POD,)
    world.plugins["a"].planned = ()
    world.mend("a")
    world.observe("a", WELL)
    world.offer_other("a", AMD, 4)
    world.run(200.0)
    assert world.alerts() == []
    assert tracked(world).current_verdict is Verdict.HEALTHY
    last = msgspec.structs.replace(last, listed=4)
    world.observe("a", last)
    world.run(60.0)
    expected = watched_findings.VERDICTS.get(last.finding, (Verdict.HEALTHY, None))[0]
    assert tracked(world).current_verdict is expected
    kinds = [] if expected is Verdict.HEALTHY else [AlertKind(expected.lower())]
    assert [kind for _, kind, _ in world.alerts()] == kinds
    world.observe("a", WELL)
    world.run(200.0)
    assert (world.alerts(), tracked(world).current_verdict) == ([], Verdict.HEALTHY)
