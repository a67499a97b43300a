"""What health concludes from the Kubernetes API about plugins that muster does not run."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from muster import vocabulary
from muster.kubernetes import plugin_facts
from muster.vocabulary import WatchedFinding, WatchedKind
from muster_health.kubernetes import observed_plugins
from tests.worlds import plugin_view as world
from tests.worlds.plugin_view import DRIVER, GPU, ago, claim, driver, node, plugin, published, user

LOST = {GPU: (8, 0)}
FINE = vocabulary.Watched(name=GPU)
LOST_TEXT = (
    f"offers no {GPU}: NVIDIA k8s-device-plugin runs and is Ready, but the kubelet has lost its "
    f"connection to it, or it reports all devices Unhealthy; {GPU}: 0 of 8 allocatable; "
    "kube-system/plugin-a: Ready for 60 minutes"
)


def observe(
    observed: observed_plugins.ObservedPlugins, *nodes: Any, **more: Any
) -> list[tuple[str, vocabulary.Watched]]:
    facts = plugin_facts.gather(world.view(*nodes, **more))
    return [(each.node, each.watched) for each in observed.observe(facts)]


def twice(*nodes: Any, **more: Any) -> list[tuple[str, WatchedKind, WatchedFinding]]:
    """Observe the same cluster in two rounds; return the findings of the second."""
    observed = observed_plugins.ObservedPlugins()
    observe(observed, *nodes, **more)
    each = observe(observed, *nodes, **more)
    return [(watched.name, watched.kind, watched.finding) for _, watched in each]


def test_a_lost_plugin_is_a_finding_from_the_second_round_until_devices_are_back() -> None:
    observed, pods = observed_plugins.ObservedPlugins(), [plugin("a")]
    lost = vocabulary.Watched(
        name=GPU, finding=WatchedFinding.NOT_REGISTERED, text=LOST_TEXT, listed=0
    )
    assert observe(observed, node("a", LOST), pods=pods) == []
    assert observe(observed, node("a", LOST), pods=pods) == [("a", lost)]
    # the kubelet removes the resource after 5 minutes; the pod restarts; the node is drained
    assert observe(observed, node("a", {GPU: (0, 0)}), pods=pods) == []
    assert observe(observed, node("a", LOST), pods=[plugin("a", ready_s=5)]) == []
    assert observe(observed, node("a", unschedulable=True), pods=pods) == []
    assert observe(observed, node("a"), pods=pods) == [("a", FINE)]
    assert observe(observed, node("a"), pods=pods) == []


def test_the_first_round_says_what_is_fine_so_that_old_verdicts_end() -> None:
    observed = observed_plugins.ObservedPlugins()
    pods = [plugin("a"), driver("b")]
    nodes = (node("a"), node("b", {}))
    slices = [published("b", "gpu-0")]
    fine = [("a", FINE), ("b", vocabulary.Watched(name=DRIVER))]
    assert observe(observed, *nodes, pods=pods, slices=slices) == fine
    assert observe(observed, *nodes, pods=pods, slices=slices) == []
    observed.forget()
    assert observe(observed, *nodes, pods=pods, slices=slices) == fine


def test_the_findings_of_a_node_that_is_gone_end() -> None:
    observed = observed_plugins.ObservedPlugins()
    for _ in range(2):
        observe(observed, node("a", LOST), pods=[plugin("a")])
    assert observe(observed) == [("a", FINE)]


CRASH = {"restartCount": 7, "state": {"waiting": {"reason": "CrashLoopBackOff"}}}
SLICE = published("a", "gpu-0")


@pytest.mark.parametrize(
    ("here", "read", "result"),
    [
        (
            node("a", LOST),
            {"pods": [plugin("a", ready="False", container=CRASH)]},
            [(GPU, WatchedKind.DEVICE_PLUGIN, WatchedFinding.NOT_SERVED)],
        ),
        (
            node("a", {}),
            {"pods": [driver("a", ready="False"), user()], "claims": [claim("p")]},
            [(DRIVER, WatchedKind.DRA_DRIVER, WatchedFinding.NOT_SERVED)],
        ),
        (
            node("a", {}),
            {"pods": [driver("a")], "slices": [published("a", "gpu-0", count=2)]},
            [(DRIVER, WatchedKind.DRA_DRIVER, WatchedFinding.FEWER_DEVICES)],
        ),
        # conditions that may have another cause, or are about pods
        (node("a", {GPU: (0, 0)}), {"pods": [plugin("a")]}, []),
        (node("a", {GPU: (8, 6)}), {"pods": [plugin("a")]}, []),
        (node("a", {}), {"pods": [driver("a")]}, []),
        (
            node("a", {}),
            {
                "pods": [user(metadata={"deletionTimestamp": ago(600)})],
                "slices": [SLICE],
            },
            [],
        ),
    ],
)
def test_only_what_is_certain_is_a_finding(here: Any, read: Any, result: Any) -> None:
    assert twice(here, **read) == result


@given(
    rounds=st.lists(
        st.tuples(
            st.sampled_from([(8, 8), (8, 0), (0, 0), (8, 3)]),
            st.sampled_from(["True", "False"]),
            st.floats(0, 7200),
            st.booleans(),
        ),
        max_size=20,
    )
)
def test_what_ends_had_begun_and_nothing_begins_within_one_round(rounds: Any) -> None:
    observed = observed_plugins.ObservedPlugins()
    observe(observed, node("a"), pods=[plugin("a")])
    is_open, doubted = False, 0
    for counts, ready, since_s, is_cordoned in rounds:
        here = node("a", {GPU: counts}, unschedulable=is_cordoned)
        results = observe(observed, here, pods=[plugin("a", ready=ready, ready_s=since_s)])
        doubted = doubted + 1 if counts[1] == 0 else 0
        for _, watched in results:
            assert watched.name == GPU
            if watched.finding is WatchedFinding.NONE:
                assert is_open
                assert counts[1] > 0
            else:
                assert doubted >= (1 if is_open else 2)
            is_open = watched.finding is not WatchedFinding.NONE
