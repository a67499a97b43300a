import dataclasses
import datetime as dt
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from muster import codec, vocabulary
from muster.service import settings
from muster.vocabulary import Verdict
from muster_labeler import config, model
from muster_labeler.check import label_plan
from muster_labeler.config import Mode
from muster_labeler.kubernetes import cluster_api
from muster_labeler.naming import accelerators, node_labels, sources
from muster_labeler.naming.node_labels import LabelSet
from muster_labeler.naming.sources import Product
from muster_labeler.service import decision_publisher, decisions, fleet
from muster_labeler.service.decisions import Action, Decision, Report

T0 = dt.datetime(2026, 1, 1, tzinfo=dt.UTC)
KEY = decisions.KEY
GFD = accelerators.GFD_PRODUCT
AGENT = "agent inventory"
L4 = Product("NVIDIA L4", 23034)
L4_SLICED = Product("NVIDIA L4", 23034, is_mig=True)
L4_VIRTUAL = Product("NVIDIA L4", 23034, is_vgpu=True)
T400 = Product("NVIDIA T400 4GB", 4096)
NODE = model.Node(name="a", uid="u")
WELL = model.Node(name="a", labels={KEY: "l4"}, owners={KEY: ("kubectl",)})
WRONG = model.Node(
    name="a", labels={KEY: "t4"}, owners={KEY: (model.FIELD_MANAGER,)}, our_labels={KEY: "t4"}
)
FOREIGN = model.Node(name="a", labels={KEY: "t4"}, owners={KEY: ("kubectl",)})
ELSEWHERE = model.Node(name="a", is_selected=False)
LABEL = {KEY: "l4"}
EXACT = "exact: 2 x NVIDIA L4 (23034 MiB)"
OWNED = f"{KEY}=t4 is owned by kubectl"


def decide(
    mode: Mode,
    kinds: sources.Kinds | None,
    node: model.Node = NODE,
    *,
    aliases: Mapping[str, str] | None = None,
    policy: config.Policy | None = None,
    may_label_simulated: bool = False,
    simulated: bool = False,
    **more: Any,
) -> Decision:
    agents = {} if kinds is None else {"a": kinds}
    status = node_labels.label_status(node, sources.Evidence(agents, {}, aliases or {}))
    settings = config.Settings(
        mode=mode, policy=policy or config.Policy(), simulated=may_label_simulated
    )
    report = Report(kinds=kinds or {}, is_simulated=simulated)
    return decisions.decide(status, settings, report=report, **more)


def decision(action: Action, labels: Mapping[str, str], reason: str) -> Decision:
    return Decision(action, labels, reason, AGENT)


@pytest.mark.parametrize(
    ("mode", "kinds", "node", "expected"),
    [
        (Mode.OFF, {L4: 2}, NODE, Decision(Action.NOTHING, {}, "off")),
        (Mode.SUGGEST, {}, NODE, decision(Action.NOTHING, {}, "no GPU")),
        (Mode.APPLY, {}, NODE, decision(Action.NOTHING, {}, "no GPU")),
        (Mode.APPLY, None, NODE, Decision(Action.NOTHING, {}, "no source names its GPUs")),
        (Mode.SUGGEST, {L4: 2}, WELL, decision(Action.NOTHING, LABEL, "labelled already")),
        (Mode.APPLY, {L4: 2}, WELL, decision(Action.NOTHING, LABEL, "labelled already")),
        (Mode.SUGGEST, {L4: 2}, NODE, decision(Action.SUGGEST, LABEL, EXACT)),
        (Mode.SUGGEST, {L4: 2}, WRONG, decision(Action.SUGGEST, LABEL, EXACT)),
        (
            Mode.SUGGEST,
            {L4_SLICED: 1},
            NODE,
            decision(Action.NOTHING, {}, "mig: 1 x NVIDIA L4 (23034 MiB) partitioned"),
        ),
        (
            Mode.APPLY,
            {L4_VIRTUAL: 1},
            NODE,
            decision(Action.REFUSE, {}, "vgpu: 1 x NVIDIA L4 (23034 MiB) virtual"),
        ),
        (Mode.APPLY, {L4: 2}, NODE, decision(Action.APPLY, LABEL, EXACT)),
        (Mode.APPLY, {L4: 2}, WRONG, decision(Action.APPLY, LABEL, EXACT)),
        (Mode.APPLY, {L4: 2}, FOREIGN, decision(Action.REFUSE, LABEL, OWNED)),
        (Mode.APPLY, {L4: 2}, ELSEWHERE, decision(Action.SUGGEST, LABEL, EXACT)),
        (
            Mode.APPLY,
            {T400: 1},
            NODE,
            decision(Action.SUGGEST, {KEY: "t400"}, "fallback: 1 x NVIDIA T400 4GB (4096 MiB)"),
        ),
        (
            Mode.APPLY,
            {L4: 2, T400: 1},
            NODE,
            decision(
                Action.REFUSE,
                {},
                "mixed: 1 x NVIDIA T400 4GB (4096 MiB), 2 x NVIDIA L4 (23034 MiB)",
            ),
        ),
        (
            Mode.APPLY,
            {},
            WRONG,
            decision(Action.WITHDRAW, {}, "withdrawn: the node no longer has a GPU"),
        ),
        (Mode.SUGGEST, {}, WRONG, decision(Action.NOTHING, {}, "no GPU")),
        (Mode.APPLY, {}, FOREIGN, decision(Action.NOTHING, {}, "no GPU")),
    ],
)
def test_each_mode_does_what_the_table_says(
    mode: Mode, kinds: sources.Kinds | None, node: model.Node, expected: Decision
) -> None:
    assert decide(mode, kinds, node) == expected


def test_simulated_gpus_are_labelled_when_the_settings_say_so() -> None:
    reason = f"simulated, {EXACT}"
    unasked = decide(Mode.APPLY, {L4: 2}, simulated=True)
    applied = decide(Mode.APPLY, {L4: 2}, simulated=True, may_label_simulated=True)
    assert unasked == decision(Action.SUGGEST, LABEL, reason)
    assert applied == decision(Action.APPLY, LABEL, reason)


def test_an_alias_makes_a_guess_certain() -> None:
    decided = decide(Mode.APPLY, {T400: 1}, aliases={"NVIDIA T400 4GB": "t400"})
    reason = "alias: 1 x NVIDIA T400 4GB (4096 MiB)"
    assert decided == decision(Action.APPLY, {KEY: "t400"}, reason)


def test_sources_that_disagree_label_nothing() -> None:
    node = model.Node(name="a", labels={GFD: "Tesla-T4"})
    assert decide(Mode.APPLY, {L4: 2}, node) == decision(
        Action.REFUSE,
        {},
        "sources disagree: agent inventory: 2 x NVIDIA L4 (23034 MiB); "
        "GPU feature discovery: nvidia.com/gpu.product=Tesla-T4",
    )


def test_a_scheme_that_covers_the_cluster_leaves_nothing_to_do() -> None:
    decided = decide(Mode.APPLY, {L4: 2}, covering="x/y")
    reason = "x/y names every GPU node: nothing to label"
    assert decided == decision(Action.NOTHING, {}, reason)
    assert decide(Mode.APPLY, {L4: 2}, WRONG, covering="x/y").action is Action.APPLY
    # this concerns only SkyPilot's label
    both = config.Policy(labels=(LabelSet.SKYPILOT, LabelSet.MUSTER))
    beside = decide(Mode.APPLY, {L4: 2}, covering="x/y", policy=both)
    assert (beside.action, KEY in beside.labels, len(beside.labels)) == (Action.APPLY, False, 3)
    assert decide(Mode.APPLY, {L4: 2}, objection="held", covering="x/y", policy=both) == beside


def test_an_objection_holds_new_labels_and_no_corrections() -> None:
    held = "held: no certain name for b"
    assert decide(Mode.APPLY, {L4: 2}, objection=held) == decision(Action.HOLD, LABEL, held)
    assert decide(Mode.APPLY, {L4: 2}, WRONG, objection=held).action is Action.APPLY
    assert decide(Mode.SUGGEST, {L4: 2}, objection=held).action is Action.SUGGEST


def test_a_policy_says_which_sets_of_labels_are_written() -> None:
    policy = config.Policy(labels=(LabelSet.MUSTER,))
    decided = decide(Mode.APPLY, {L4: 2}, policy=policy)
    assert decided.labels == {
        "muster.dev/accelerator": "l4",
        "muster.dev/accelerator-count": "2",
        "muster.dev/accelerator-memory-mib": "23034",
    }


def gpus(*products: str, **more: Any) -> vocabulary.GpuNode:
    gpus_ = tuple(
        vocabulary.Gpu(uuid=f"GPU-{index}", product=product, memory_mib=23034)
        for index, product in enumerate(products)
    )
    return vocabulary.GpuNode(gpus=gpus_, **more)


def test_all_sets_together_name_no_key_of_an_autoscalers() -> None:
    node = gpus("NVIDIA L4", driver_version="550.1")
    kinds = decisions.kinds_of(node)
    labels = node_labels.wanted_labels(list(LabelSet), "l4", kinds=kinds, gpus=node)
    assert labels.keys() >= {KEY, "muster.dev/accelerator", "nvidia.com/gpu.product"}
    assert not labels.keys() & accelerators.AUTOSCALER_KEYS
    lines = node_labels.feature_file(labels).splitlines()
    assert [line.partition("=")[0] for line in lines] == sorted(labels)


def report(
    *products: str, sequence: int, plugin: str = "device-plugin", node: str = "a", **more: Any
) -> codec.CloudEvent:
    gpu_node = gpus(*products, **more) if products or more else None
    data = vocabulary.InventoryReported(node=node, plugin=plugin, at=T0, devices=(), gpus=gpu_node)
    return codec.CloudEvent(
        id=f"i:{sequence}",
        source=f"/nodes/{node}/plugins/x",
        type=data.TYPE,
        time=T0,
        instance="i",
        sequence=sequence,
        boot="",
        data=data,
        position=sequence,
    )


L4_GPU = vocabulary.Gpu(uuid="GPU-0", product="NVIDIA L4", memory_mib=23034)
MIG = vocabulary.MigDevice(uuid="MIG-0", profile="1g.5gb", gi=3, ci=0)


@pytest.mark.parametrize(
    ("node", "kinds"),
    [(None, {}), (gpus(), {}), (gpus("NVIDIA L4", "NVIDIA L4"), {L4: 2})],
)
def test_a_nodes_gpus_are_counted_by_kind(
    node: vocabulary.GpuNode | None, kinds: Mapping[Product, int]
) -> None:
    assert decisions.kinds_of(node) == kinds


@pytest.mark.parametrize(
    ("gpu", "kind"),
    [
        (L4_GPU, L4),
        (replace(L4_GPU, mig_enabled=False), L4),
        (replace(L4_GPU, vgpu=False), L4),
        (replace(L4_GPU, vgpu=True), L4_VIRTUAL),
        (replace(L4_GPU, mig_enabled=True), L4_SLICED),
        (replace(L4_GPU, mig_enabled=True, mig=(MIG,)), L4_SLICED),
    ],
)
def test_a_gpu_in_mig_mode_is_partitioned_before_it_has_devices_and_a_virtual_one_is_marked(
    gpu: vocabulary.Gpu, kind: Product
) -> None:
    node = vocabulary.GpuNode(gpus=(gpu,), mig_strategy="mixed")
    assert decisions.kinds_of(node) == {kind: 1}


def made(
    *nodes: model.Node, policy: config.Policy | None = None, simulated: bool = False
) -> fleet.Fleet:
    settings = config.Settings(
        mode=Mode.APPLY, policy=policy or config.Policy(), simulated=simulated
    )
    nodes_ = fleet.Fleet(settings, are_nodes_unknown=not nodes)
    nodes_.replace(nodes)
    return nodes_


def test_a_node_has_the_gpus_of_all_its_plugins_as_each_reported_last() -> None:
    nodes = made()
    assert nodes.observe_inventory(report("NVIDIA L4", "NVIDIA L4", sequence=1))
    assert nodes.observe_inventory(report(sequence=2, plugin="serial"))
    assert nodes.report("a").kinds == {L4: 2}
    assert nodes.observe_inventory(report("NVIDIA L4", sequence=3))
    assert not nodes.observe_inventory(report("NVIDIA L4", "NVIDIA L4", sequence=1))
    assert not nodes.observe_inventory(report("NVIDIA L4", sequence=3))
    assert nodes.report("a").kinds == {L4: 1}
    assert nodes.report("b") == decisions.NO_REPORT


def test_gpus_that_could_not_be_read_are_not_gone() -> None:
    nodes = made()
    nodes.observe_inventory(report("NVIDIA L4", sequence=1))
    nodes.observe_inventory(report(sequence=2, problem="NVML: driver not loaded"))
    assert nodes.report("a").kinds == {L4: 1}


def test_a_node_without_a_relevant_change_is_not_evaluated() -> None:
    nodes = made(NODE)
    ready = model.Node(name="a", uid="u", version="9", ready_since=T0)
    assert [nodes.put(ready), nodes.put(WRONG), nodes.put(WRONG)] == [False, True, False]
    assert nodes.replace([WRONG]) == []
    assert nodes.replace([]) == []
    assert nodes.status("a") is None


def test_a_suggestion_is_published_once_until_it_changes() -> None:
    nodes = made()
    suggests = Decision(Action.SUGGEST, LABEL, EXACT)
    nothing = Decision(Action.NOTHING, LABEL, "labelled already")
    story = [suggests, suggests, nothing, nothing, suggests]
    news = [nodes.record_decision("a", decision_, cause="c") for decision_ in story]
    assert news == [True, False, True, False, True]


def test_every_write_is_published_and_reading_it_back_is_not() -> None:
    nodes = made()
    applied = Decision(Action.APPLY, LABEL, EXACT)
    there = Decision(Action.NOTHING, LABEL, "labelled already")
    story = [applied, there, there, applied]
    assert [nodes.record_decision("a", decided, cause="c") for decided in story] == [
        True,
        False,
        False,
        True,
    ]


def test_a_node_that_waits_is_tried_again_until_it_is_settled() -> None:
    nodes = made()
    assert not nodes.record_decision("a", Decision(Action.WAIT, LABEL, "away"), cause="c1")
    assert nodes.pending(Action.WAIT) == {"a": "c1"}
    assert nodes.record_decision("a", Decision(Action.APPLY, LABEL, EXACT), cause="c1")
    assert nodes.pending(Action.WAIT) == {}


def test_no_node_is_labelled_before_every_gpu_node_has_a_name() -> None:
    here = [model.Node(name=name, capacity={"nvidia.com/gpu": 1}) for name in "ab"]
    nodes = made(*here)
    held = "on hold until all GPU nodes can be labelled; the policy does not label"
    assert nodes.objection() == f"{held} a, b"
    nodes.observe_inventory(report("NVIDIA L4", sequence=1))
    assert nodes.objection() == f"{held} b"
    nodes.observe_inventory(report("NVIDIA L4", sequence=1, node="b"))
    assert nodes.objection() is None
    nodes.put(WRONG)
    nodes.put(model.Node(name="c", capacity={"nvidia.com/gpu": 1}))
    # the cluster has the scheme now, so each further label is an improvement
    assert nodes.objection() is None


GPU = {"nvidia.com/gpu": 1}
HELD = "on hold until all GPU nodes can be labelled; the policy does not label b"


@pytest.mark.parametrize(
    ("policy", "other", "more", "held"),
    [
        (config.Policy(), model.Node(name="b", capacity=GPU), {}, None),
        # if the policy does not label one GPU node, it labels none
        (
            config.Policy(nodes={"pool": "x"}),
            model.Node(name="b", capacity=GPU, is_selected=False),
            {},
            HELD,
        ),
        (config.Policy(), model.Node(name="b", capacity=GPU), {"simulated": True}, HELD),
        (
            config.Policy(reasons=(accelerators.Reason.ALIAS,)),
            model.Node(name="b", capacity=GPU),
            {},
            "on hold until all GPU nodes can be labelled; the policy does not label a, b",
        ),
        (config.Policy(), model.Node(name="b", capacity=GPU, labels={KEY: ""}), {}, HELD),
        (
            config.Policy(),
            model.Node(name="b", capacity=GPU, labels={GFD: "Tesla-T4"}),
            {},
            HELD,
        ),
    ],
)
def test_the_service_labels_all_gpu_nodes_or_none_whatever_the_policy_says(
    policy: config.Policy, other: model.Node, more: dict[str, Any], held: str | None
) -> None:
    nodes = made(model.Node(name="a", capacity=GPU), other, policy=policy)
    nodes.observe_inventory(report("NVIDIA L4", sequence=1))
    nodes.observe_inventory(report("NVIDIA L4", sequence=1, node="b", **more))
    assert nodes.objection() == held


def test_a_policy_that_accepts_guesses_is_held_by_none() -> None:
    reasons = (accelerators.Reason.EXACT, accelerators.Reason.FALLBACK)
    nodes = made(model.Node(name="a", capacity=GPU), policy=config.Policy(reasons=reasons))
    nodes.observe_inventory(report("NVIDIA T400 4GB", sequence=1))
    assert nodes.objection() is None


def test_what_was_reported_of_a_node_is_dropped_with_it() -> None:
    born = model.Node(name="a", uid="1", created=T0, capacity=GPU)
    nodes = made(born)
    nodes.observe_inventory(report("NVIDIA L4", sequence=1))
    assert nodes.reported()[0] == {"a": {L4: 1}}
    nodes.drop("a")
    nodes.put(dataclasses.replace(born, uid="2"))
    assert nodes.report("a") == decisions.NO_REPORT
    # a late inventory is that of the former node
    later = T0 + dt.timedelta(hours=1)
    nodes.put(dataclasses.replace(born, uid="3", created=later))
    assert not nodes.observe_inventory(report("NVIDIA L4", sequence=2))
    assert nodes.reported()[0] == {}


def test_a_node_that_was_recreated_unnoticed_is_another_one_and_an_older_inventory_is_not_its() -> (
    None
):
    born = model.Node(name="a", uid="1", created=T0, capacity=GPU)
    nodes = made(born)
    nodes.observe_inventory(report("NVIDIA L4", sequence=1))
    nodes.put(dataclasses.replace(born, uid="2"))
    assert nodes.report("a") == decisions.NO_REPORT
    blind = made()
    blind.observe_inventory(report("NVIDIA L4", sequence=1))
    blind.are_nodes_unknown = False
    blind.replace([dataclasses.replace(born, created=T0 + dt.timedelta(hours=1))])
    assert blind.report("a") == decisions.NO_REPORT


OURS = {KEY: (model.FIELD_MANAGER,)}


def ours(value: str, product: str, **labels: str) -> model.Node:
    """Return a node with labels that we wrote for this product."""
    return model.Node(
        name="a",
        labels={KEY: value, **labels},
        owners=dict.fromkeys((KEY, *labels), (model.FIELD_MANAGER,)),
        our_labels={KEY: value, **labels},
        labelled_from=(AGENT, product),
    )


OF_L4 = "2 x NVIDIA L4 (23034 MiB)"
A100 = Product("NVIDIA A100")


@pytest.mark.parametrize(
    ("node", "kinds", "action"),
    [
        # the GPUs were replaced by others with a certain name: the label is corrected
        (ours("t4", "2 x Tesla T4 (15360 MiB)"), {L4: 2}, Action.APPLY),
        # they were replaced by GPUs with no name or only a guessed one: our label is removed
        (ours("l4", OF_L4), {L4_SLICED: 2}, Action.WITHDRAW),
        (ours("l4", OF_L4), {L4_VIRTUAL: 2}, Action.WITHDRAW),
        (ours("l4", OF_L4), {L4: 1, T400: 1}, Action.WITHDRAW),
        (ours("l4", OF_L4), {T400: 2}, Action.WITHDRAW),
        (ours("l4", OF_L4), {A100: 2}, Action.WITHDRAW),
        (ours("l4", OF_L4), {Product(""): 2}, Action.REFUSE),
        # a person's alias or option named the same GPUs: it stays, also for another number
        (ours("t400-small", "2 x NVIDIA T400 4GB (4096 MiB)"), {T400: 1}, Action.SUGGEST),
        (ours("a100", "1 x NVIDIA A100"), {A100: 2}, Action.NOTHING),
        # a label of another owner is not removed
        (FOREIGN, {L4_SLICED: 2}, Action.REFUSE),
        (FOREIGN, {T400: 2}, Action.SUGGEST),
    ],
)
def test_a_label_of_ours_never_outlives_the_gpus_it_was_written_of(
    node: model.Node, kinds: sources.Kinds, action: Action
) -> None:
    assert decide(Mode.APPLY, kinds, node).action is action
    assert decide(Mode.SUGGEST, kinds, node).action in {Action.SUGGEST, Action.NOTHING}


def test_a_label_without_a_known_owner_is_not_changed() -> None:
    node = model.Node(name="a", labels={KEY: "t4"})
    reason = f"{KEY}=t4 is owned by an unknown manager"
    assert decide(Mode.APPLY, {L4: 2}, node) == decision(Action.REFUSE, LABEL, reason)


def test_our_own_labels_are_no_second_opinion() -> None:
    node = ours("t4", "1 x Tesla T4", **{GFD: "Tesla-T4"})
    policy = config.Policy(labels=(LabelSet.SKYPILOT, LabelSet.NVIDIA))
    assert decide(Mode.APPLY, {L4: 2}, node, policy=policy).action is Action.APPLY
    bare = dataclasses.replace(node, labels={GFD: "Tesla-T4"}, capacity=GPU)
    assert made(bare).covering_scheme() is None
    assert made(dataclasses.replace(bare, our_labels={})).covering_scheme() == GFD


def test_labels_of_ours_that_no_longer_apply_are_removed() -> None:
    memory, count = accelerators.MEMORY, accelerators.COUNT
    node = ours("l4", OF_L4, **{"muster.dev/accelerator": "l4", count: "2", memory: "1"})
    both = config.Policy(labels=(LabelSet.SKYPILOT, LabelSet.MUSTER))
    kinds = {L4: 1, Product("NVIDIA L4", 1): 1}
    decided = decide(Mode.APPLY, kinds, node, policy=both)
    assert (decided.action, decided.drop) == (Action.APPLY, frozenset({memory}))
    shrunk = decide(Mode.APPLY, {L4: 2}, node)
    assert shrunk.action is Action.APPLY
    assert shrunk.drop == {memory, count, "muster.dev/accelerator"}
    # SkyPilot's label is from a command; this policy does not include its set
    alone = decide(Mode.APPLY, {L4: 2}, node, policy=config.Policy(labels=(LabelSet.MUSTER,)))
    assert alone.drop == frozenset()


def test_with_one_set_alone_skypilots_label_decides_nothing() -> None:
    policy = config.Policy(labels=(LabelSet.MUSTER,))
    for node in (NODE, FOREIGN):
        decided = decide(
            Mode.APPLY, {L4: 2}, node, policy=policy, covering="x/y", objection="held: b"
        )
        assert (decided.action, KEY in decided.labels) == (Action.APPLY, False)


def test_a_held_node_says_why_and_is_not_retried() -> None:
    nodes = made()
    assert not nodes.record_decision("a", Decision(Action.HOLD, LABEL, "held: b"), cause="c")
    assert (nodes.pending(Action.WAIT), nodes.pending(Action.HOLD)) == ({}, {"a": "c"})
    shown = nodes.view()["a"]
    assert (shown.is_waiting, shown.reason) == (True, "held: b")


def test_what_the_api_refused_is_published_once_and_retried() -> None:
    nodes = made()
    refused = Decision(Action.REFUSE, LABEL, "label node a: HTTP 403 no")
    assert nodes.record_decision("a", refused, cause="c", is_retriable=True)
    assert not nodes.record_decision("a", refused, cause="c", is_retriable=True)
    assert nodes.pending(Action.REFUSE) == {"a": "c"}
    assert nodes.record_decision("a", Decision(Action.APPLY, LABEL, EXACT), cause="c")
    assert nodes.pending(Action.REFUSE) == {}


@given(st.lists(st.tuples(st.sampled_from("ab"), st.floats(0, 20)), max_size=60))
def test_one_node_is_never_written_more_often_than_that_in_twice_the_time(
    story: list[tuple[str, float]],
) -> None:
    limit = cluster_api.WriteLimit(3, 60.0)
    now, written = 0.0, list[tuple[str, float]]()
    for node, later in story:
        now += later
        if limit.may_write(node, now):
            limit.note_write(node, now)
            written.append((node, now))
        limit.forget(now)
    for node, first in written:
        within = [at for name, at in written if name == node and first <= at < first + 60]
        assert len(within) <= 6
    # slightly more than 60 s, because sums of such times are rounded
    assert all(limit.may_write(node, now + 60.001) for node in "ab")


LABELS = st.sampled_from(
    [{}, {KEY: "l4"}, {KEY: ""}, {GFD: "NVIDIA-L4"}, {"nebius.com/gpu-name": "L4"},
     {KEY: "l4", GFD: "NVIDIA-L4"}, {GFD: "NVIDIA-T400-4GB"}]
)  # fmt: skip
CLUSTERS = st.dictionaries(st.sampled_from("abcde"), st.tuples(LABELS, st.integers(0, 2)))


def cluster(drawn: Mapping[str, tuple[dict[str, str], int]]) -> list[node_labels.LabelStatus]:
    nodes = [
        model.Node(
            name=name,
            labels=labels,
            capacity={"nvidia.com/gpu": count} if count else {},
            allocatable={"nvidia.com/gpu": count} if count else {},
        )
        for name, (labels, count) in drawn.items()
    ]
    return node_labels.label_statuses(nodes)


@given(CLUSTERS)
def test_after_a_plan_that_is_not_refused_all_gpu_nodes_are_visible_or_none_was_changed(
    drawn: Mapping[str, tuple[dict[str, str], int]],
) -> None:
    standings = cluster(drawn)
    rows = label_plan.plan(standings, label_plan.Allowed())
    refused = label_plan.objection(
        rows, label_plan.Allowed(), covering=node_labels.covering_scheme(standings)
    )
    before = {status.node.name for status in standings if status.current}
    after = {row.node for row in rows if row.is_labelled_after}
    if refused is None and after - before:
        assert after == {status.node.name for status in standings}


@given(st.lists(CLUSTERS, max_size=3))
def test_all_or_nothing_kept_up_to_date_agrees_with_one_made_from_scratch(
    story: list[Mapping[str, tuple[dict[str, str], int]]],
) -> None:
    kept = decisions.AllOrNothing()
    for drawn in story:
        standings = {status.node.name: status for status in cluster(drawn)}
        fresh = decisions.AllOrNothing()
        for name in "abcde":
            status = standings.get(name)
            kept.update(name, status, may_label=status is not None and status.wanted is not None)
            fresh.update(name, status, may_label=status is not None and status.wanted is not None)
        assert (kept.objection(), kept.covering_scheme()) == (
            fresh.objection(),
            fresh.covering_scheme(),
        )
        assert kept.covering_scheme() == node_labels.covering_scheme(list(standings.values()))


@pytest.mark.parametrize(
    ("action", "shape"),
    [
        (Action.SUGGEST, vocabulary.LabelsSuggested),
        (Action.APPLY, vocabulary.LabelsApplied),
        (Action.WITHDRAW, vocabulary.LabelsApplied),
        (Action.REFUSE, vocabulary.LabelsRefused),
    ],
)
def test_each_action_has_its_event(action: Action, shape: type[vocabulary.LabelEvent]) -> None:
    event = decisions.to_event(decision(action, LABEL, "why"), node="a", at=T0)
    assert event == shape(node="a", at=T0, labels=LABEL, reason="why", source=AGENT)


@pytest.mark.parametrize("action", [Action.NOTHING, Action.WAIT])
def test_what_was_not_done_is_no_fact(action: Action) -> None:
    assert decisions.to_event(Decision(action, LABEL, "why"), node="a", at=T0) is None


@pytest.mark.parametrize(
    ("verdicts", "status", "reason", "message"),
    [
        ({"p": Verdict.HEALTHY}, "True", "Healthy", "p: HEALTHY"),
        ({"p": Verdict.DEGRADED}, "True", "Degraded", "p: DEGRADED"),
        ({"p": Verdict.PLUGIN_DOWN, "q": Verdict.HEALTHY}, "False", "PluginDown", "p: PLUGIN_DOWN"),
        ({"p": Verdict.NODE_DOWN}, "Unknown", "NodeDown", "p: NODE_DOWN"),
        ({"p": Verdict.NODE_DOWN, "q": Verdict.STUCK}, "False", "Stuck", "q: STUCK"),
        ({}, "Unknown", "Unreachable", ""),
    ],
)
def test_a_nodes_condition_is_that_of_its_worst_plugin(
    verdicts: Mapping[str, Verdict], status: str, reason: str, message: str
) -> None:
    assert decision_publisher.condition_of(verdicts) == decision_publisher.Condition(
        status=status, reason=reason, message=message
    )


@pytest.mark.parametrize("verdict", list(Verdict))
def test_every_verdict_makes_a_condition(verdict: Verdict) -> None:
    assert decision_publisher.condition_of({"p": verdict}).status in {"True", "False", "Unknown"}


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("mode: aply", "mode: expected off, suggest or apply, found 'aply'"),
        (
            "aliases: {X: Not A Label}",
            "aliases: 'Not A Label', the name of 'X', is not an accelerator",
        ),
        (
            "kubernetes: {context: c}",
            "kubernetes.context requires kubernetes.kubeconfig; set both",
        ),
        ("kubernetes: {kubconfig: c}", "kubernetes.kubconfig: unknown key (value 'c'); did you"),
    ],
)
def test_settings_that_cannot_be_used_are_refused_with_their_path(
    text: str, problem: str, tmp_path: Path
) -> None:
    file = tmp_path / "labeler.yaml"
    file.write_text(text)
    with pytest.raises(settings.BadSettings) as refused:
        settings.load(config.Settings, prefix="MUSTER_LABELER", file=file, environment={})
    problems = [line.removeprefix(f"{file}: ") for line in refused.value.problems]
    assert [line[: len(problem)] for line in problems] == [problem]
