import datetime as dt
from collections.abc import Mapping
from pathlib import Path

import pytest
from msgspec.structs import replace

from muster import codec, settings, vocabulary
from muster_labeler import config, desired, fleet
from muster_labeler.config import Mode
from muster_labeler.desired import Action, Decision, Node, Product, Unknown

T0 = dt.datetime(2026, 1, 1, tzinfo=dt.UTC)
L4 = Product("NVIDIA L4", 23034, is_mig=False, is_simulated=False)
L4_SIMULATED = Product("NVIDIA L4", 23034, is_mig=False, is_simulated=True)
L4_SLICED = Product("NVIDIA L4", 23034, is_mig=True, is_simulated=False)
L4_VIRTUAL = Product("NVIDIA L4", 23034, is_mig=False, is_simulated=False, is_vgpu=True)
T400 = Product("NVIDIA T400 4GB", 4096, is_mig=False, is_simulated=False)
BARE = Node("u", {})
WELL = Node("u", {desired.KEY: "l4", "other": "x"})
WRONG = Node("u", {desired.KEY: "t4"})
AWAY = Unknown("get node a: refused", is_passing=True)
GONE = Unknown("get node a: HTTP 404", is_passing=False)
LABEL = {desired.KEY: "l4"}
EXACT = "exact: 2 x NVIDIA L4 (23034 MiB)"
FALLBACK = "fallback: 1 x NVIDIA T400 4GB (4096 MiB)"


@pytest.mark.parametrize(
    ("mode", "products", "current", "decision"),
    [
        (Mode.OFF, {L4: 2}, BARE, Decision(Action.NOTHING, {}, "off")),
        (Mode.SUGGEST, {}, BARE, Decision(Action.NOTHING, {}, "no GPU")),
        (Mode.APPLY, {}, BARE, Decision(Action.NOTHING, {}, "no GPU")),
        (Mode.SUGGEST, {L4: 2}, WELL, Decision(Action.NOTHING, LABEL, "labelled already")),
        (Mode.APPLY, {L4: 2}, WELL, Decision(Action.NOTHING, LABEL, "labelled already")),
        (Mode.SUGGEST, {L4: 2}, BARE, Decision(Action.SUGGEST, LABEL, EXACT)),
        (Mode.SUGGEST, {L4: 2}, WRONG, Decision(Action.SUGGEST, LABEL, EXACT)),
        (Mode.SUGGEST, {L4: 2}, AWAY, Decision(Action.SUGGEST, LABEL, EXACT)),
        (Mode.SUGGEST, {L4: 2}, GONE, Decision(Action.SUGGEST, LABEL, EXACT)),
        (
            Mode.SUGGEST,
            {L4_SIMULATED: 2},
            BARE,
            Decision(Action.SUGGEST, LABEL, f"simulated, {EXACT}"),
        ),
        (
            Mode.SUGGEST,
            {L4_SLICED: 1},
            BARE,
            Decision(Action.NOTHING, {}, "mig: 1 x NVIDIA L4 (23034 MiB) partitioned"),
        ),
        (
            Mode.APPLY,
            {L4_VIRTUAL: 1},
            BARE,
            Decision(Action.REFUSE, {}, "vgpu: 1 x NVIDIA L4 (23034 MiB) virtual"),
        ),
        (Mode.APPLY, {L4: 2}, BARE, Decision(Action.APPLY, LABEL, EXACT)),
        (Mode.APPLY, {L4: 2}, WRONG, Decision(Action.APPLY, LABEL, EXACT)),
        (Mode.APPLY, {L4: 2}, AWAY, Decision(Action.WAIT, LABEL, AWAY.text)),
        (Mode.APPLY, {L4: 2}, GONE, Decision(Action.REFUSE, LABEL, GONE.text)),
        (
            Mode.APPLY,
            {L4_SIMULATED: 2},
            BARE,
            Decision(Action.SUGGEST, LABEL, f"simulated, {EXACT}"),
        ),
        (
            Mode.APPLY,
            {T400: 1},
            BARE,
            Decision(Action.SUGGEST, {desired.KEY: "t400"}, FALLBACK),
        ),
        (
            Mode.APPLY,
            {L4: 2, T400: 1},
            BARE,
            Decision(
                Action.REFUSE,
                {},
                "mixed: 1 x NVIDIA T400 4GB (4096 MiB), 2 x NVIDIA L4 (23034 MiB)",
            ),
        ),
    ],
)
def test_each_mode_does_what_the_table_says(
    mode: Mode, products: Mapping[Product, int], current: Node | Unknown, decision: Decision
) -> None:
    assert (
        desired.decide(products, current, mode=mode, aliases={}, may_label_simulated=False)
        == decision
    )


def test_simulated_gpus_are_labelled_when_the_settings_say_so() -> None:
    decision = desired.decide(
        {L4_SIMULATED: 2}, BARE, mode=Mode.APPLY, aliases={}, may_label_simulated=True
    )
    assert decision == Decision(Action.APPLY, LABEL, f"simulated, {EXACT}")


def test_an_alias_makes_a_guess_certain() -> None:
    aliases = {"NVIDIA T400 4GB": "t400"}
    decision = desired.decide(
        {T400: 1}, BARE, mode=Mode.APPLY, aliases=aliases, may_label_simulated=False
    )
    assert decision == Decision(
        Action.APPLY, {desired.KEY: "t400"}, "alias: 1 x NVIDIA T400 4GB (4096 MiB)"
    )


def gpus(*products: str, simulated: bool = False) -> vocabulary.GpuNode:
    found = tuple(
        vocabulary.Gpu(uuid=f"GPU-{index}", product=product, memory_mib=23034)
        for index, product in enumerate(products)
    )
    return vocabulary.GpuNode(gpus=found, simulated=simulated)


def report(
    *products: str, sequence: int, plugin: str = "device-plugin", instance: str = "i"
) -> codec.CloudEvent:
    data = vocabulary.InventoryReported(
        node="a", plugin=plugin, at=T0, devices=(), gpus=gpus(*products) if products else None
    )
    return codec.CloudEvent(
        id=f"{instance}:{sequence}",
        source="/nodes/a/plugins/x",
        type=data.TYPE,
        time=T0,
        instance=instance,
        sequence=sequence,
        boot="",
        data=data,
        position=sequence,
    )


L4_GPU = vocabulary.Gpu(uuid="GPU-0", product="NVIDIA L4", memory_mib=23034)
MIG = vocabulary.MigDevice(uuid="MIG-0", profile="1g.5gb", gi=3, ci=0)


@pytest.mark.parametrize(
    ("node", "products"),
    [
        (None, {}),
        (gpus(), {}),
        (gpus("NVIDIA L4", "NVIDIA L4"), {L4: 2}),
        (gpus("NVIDIA L4", simulated=True), {L4_SIMULATED: 1}),
    ],
)
def test_a_nodes_gpus_are_counted_by_kind(
    node: vocabulary.GpuNode | None, products: Mapping[Product, int]
) -> None:
    assert desired.products_of(node) == products


@pytest.mark.parametrize(
    ("gpu", "product"),
    [
        (L4_GPU, L4),
        (replace(L4_GPU, mig_enabled=False), L4),
        (replace(L4_GPU, vgpu=False), L4),
        (replace(L4_GPU, vgpu=True), L4_VIRTUAL),
        (replace(L4_GPU, mig_enabled=True), L4_SLICED),
        (replace(L4_GPU, mig_enabled=True, mig=(MIG,)), L4_SLICED),
    ],
)
def test_a_gpu_in_mig_mode_is_partitioned_before_it_has_devices_and_a_virtual_one_is_told(
    gpu: vocabulary.Gpu, product: Product
) -> None:
    node = vocabulary.GpuNode(gpus=(gpu,), mig_strategy="mixed")
    assert desired.products_of(node) == {product: 1}


def test_a_node_has_the_gpus_of_all_its_plugins_as_each_reported_last() -> None:
    found = fleet.Fleet()
    assert found.take(report("NVIDIA L4", "NVIDIA L4", sequence=1))
    assert found.take(report(sequence=2, plugin="serial"))
    assert found.products("a") == {L4: 2}
    assert found.take(report("NVIDIA L4", sequence=3))
    assert not found.take(report("NVIDIA L4", "NVIDIA L4", sequence=1))
    assert not found.take(report("NVIDIA L4", sequence=3))
    assert found.products("a") == {L4: 1}
    assert found.products("b") == {}


def test_a_suggestion_is_news_once_until_something_else_is_true() -> None:
    found = fleet.Fleet()
    suggests = Decision(Action.SUGGEST, LABEL, EXACT)
    nothing = Decision(Action.NOTHING, LABEL, "labelled already")
    story = [suggests, suggests, nothing, nothing, suggests]
    news = [found.settle("a", decision, cause="c") for decision in story]
    assert news == [True, False, True, False, True]


def test_every_write_is_news() -> None:
    found = fleet.Fleet()
    applied = Decision(Action.APPLY, LABEL, EXACT)
    assert [found.settle("a", applied, cause="c") for _ in range(2)] == [True, True]


def test_a_node_that_waits_is_tried_again_until_it_is_settled() -> None:
    found = fleet.Fleet()
    assert not found.settle("a", Decision(Action.WAIT, LABEL, "away"), cause="c1")
    assert found.waiting() == {"a": "c1"}
    assert found.settle("a", Decision(Action.APPLY, LABEL, EXACT), cause="c1")
    assert found.waiting() == {}


@pytest.mark.parametrize(
    ("action", "shape"),
    [
        (Action.SUGGEST, vocabulary.LabelsSuggested),
        (Action.APPLY, vocabulary.LabelsApplied),
        (Action.REFUSE, vocabulary.LabelsRefused),
    ],
)
def test_what_was_done_is_told_as_its_fact(
    action: Action, shape: type[vocabulary.LabelEvent]
) -> None:
    told = desired.event_of(Decision(action, LABEL, "why"), node="a", at=T0)
    assert told == shape(node="a", at=T0, labels=LABEL, reason="why", source="agent inventory")


@pytest.mark.parametrize("action", [Action.NOTHING, Action.WAIT])
def test_what_was_not_done_is_no_fact(action: Action) -> None:
    assert desired.event_of(Decision(action, LABEL, "why"), node="a", at=T0) is None


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("mode: aply", "mode: expected off, suggest or apply, found 'aply'"),
        ("aliases: {X: Not A Label}", "aliases: 'X': 'Not A Label' is no accelerator"),
        (
            "kubernetes: {context: c}",
            "kubernetes.context: names a context of no kubeconfig",
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
    told = [found.removeprefix(f"{file}: ") for found in refused.value.problems]
    assert [found[: len(problem)] for found in told] == [problem]
