"""What the plugins of a node may report, and what is left out beyond the limits."""

import datetime as dt
from collections.abc import Iterable

import msgspec
import pytest

from muster import codec, vocabulary
from muster_labeler import config, model
from muster_labeler.naming.sources import Product
from muster_labeler.service import decision_publisher, fleet, inventory_budget, limits
from muster_labeler.service.limits import Refusal

T0 = dt.datetime(2026, 1, 1, tzinfo=dt.UTC)
L4 = Product("NVIDIA L4", 23034)


def known(*names: str) -> fleet.Fleet:
    nodes = fleet.Fleet(config.Settings(), are_nodes_unknown=not names)
    nodes.replace([model.Node(name=name) for name in names])
    return nodes


def inventory(
    node: str, plugin: str, products: Iterable[str] = ("NVIDIA L4",), *, sequence: int = 1
) -> codec.CloudEvent:
    gpus = tuple(
        vocabulary.Gpu(uuid=f"GPU-{number}", product=product, memory_mib=23034)
        for number, product in enumerate(products)
    )
    data = vocabulary.InventoryReported(
        node=node, plugin=plugin, at=T0, devices=(), gpus=vocabulary.GpuNode(gpus=gpus)
    )
    return codec.CloudEvent(
        id=f"{plugin}:{sequence}",
        source=f"/nodes/{node}/plugins/{plugin}",
        type=data.TYPE,
        time=T0,
        instance="i",
        sequence=sequence,
        boot="",
        data=data,
        position=sequence,
    )


def subject(node: str, plugin: str) -> str:
    return inventory(node, plugin).data.subject


def test_the_first_plugins_of_a_node_count_and_stay_current() -> None:
    nodes = known("a", "b")
    stored = [nodes.observe_inventory(inventory("a", f"p{number}")) for number in range(20)]
    assert stored == [True] * vocabulary.PLUGINS_MAX + [False] * (20 - vocabulary.PLUGINS_MAX)
    assert nodes.report("a").kinds == {L4: vocabulary.PLUGINS_MAX}
    assert nodes.refusal("a", "p19") is Refusal.TOO_MANY_PLUGINS
    assert nodes.observe_inventory(inventory("a", "p0", ("NVIDIA L4",) * 3, sequence=2))
    assert nodes.report("a").kinds == {L4: vocabulary.PLUGINS_MAX + 2}
    assert nodes.observe_inventory(inventory("b", "p19"))


def test_a_node_counts_once_the_api_shows_it_and_is_then_read_again() -> None:
    nodes = known("a")
    assert nodes.refusal("b", "p") is Refusal.UNKNOWN_NODE
    assert not nodes.observe_inventory(inventory("b", "p"))
    assert nodes.take_unread() == ["a"]
    nodes.put(model.Node(name="b"))
    assert (nodes.take_unread(), nodes.take_unread()) == (["b"], [])
    assert nodes.observe_inventory(inventory("b", "p"))
    assert nodes.report("b").kinds == {L4: 1}


def test_without_the_api_every_node_counts_until_it_shows_which_exist() -> None:
    nodes = known()
    for name in ("a", "invented"):
        assert nodes.observe_inventory(inventory(name, "p"))
    nodes.are_nodes_unknown = False
    nodes.replace([model.Node(name="a")])
    assert (nodes.names(), nodes.report("invented").kinds) == (["a"], {})


def test_without_the_api_the_number_of_nodes_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "NODES_MAX", 3)
    nodes = known()
    stored = [nodes.observe_inventory(inventory(name, "p")) for name in "abcdea"]
    assert stored == [True, True, True, False, False, False]
    assert nodes.refusal("e", "p") is Refusal.TOO_MANY_NODES
    assert nodes.observe_inventory(inventory("a", "q"))


@pytest.mark.parametrize(
    ("products", "is_too_large"),
    [
        (["NVIDIA L4"] * limits.GPUS_MAX, False),
        (["NVIDIA L4"] * (limits.GPUS_MAX + 1), True),
        ([f"NVIDIA L{number}" for number in range(32)], False),
        ([f"NVIDIA L{number}" for number in range(33)], True),
        (["x" * 300], False),
        (["x" * 301], True),
    ],
)
def test_a_node_has_only_so_many_gpus(products: list[str], *, is_too_large: bool) -> None:
    data = inventory("a", "p", products).data
    assert isinstance(data, vocabulary.InventoryReported)
    assert limits.is_too_large(data) is is_too_large


def test_a_plugin_has_only_so_many_devices() -> None:
    devices = tuple(
        vocabulary.Device(id=f"{number}", resource="a/b") for number in range(limits.DEVICES_MAX)
    )
    whole = vocabulary.InventoryReported(node="a", plugin="p", at=T0, devices=devices)
    assert not limits.is_too_large(whole)
    assert limits.is_too_large(msgspec.structs.replace(whole, devices=(*devices, devices[0])))


def test_verdicts_count_for_as_many_plugins() -> None:
    conditions = decision_publisher.NodeConditionWriter(None)
    stored = [
        conditions.observe_verdict(
            vocabulary.VerdictChanged(
                node="a",
                plugin=f"p{number}",
                at=T0,
                verdict=vocabulary.Verdict.HEALTHY,
                rule="test",
            )
        )
        for number in range(10)
    ]
    assert stored == [True] * vocabulary.PLUGINS_MAX + [False] * 2


def test_verdicts_on_watched_plugins_have_a_limit_of_their_own_and_those_well_make_room() -> None:
    conditions = decision_publisher.NodeConditionWriter(None)

    def stored(count: int, verdict: vocabulary.Verdict, prefix: str) -> list[bool]:
        names = [f"{prefix}.example/{number}" for number in range(count)]
        return [
            conditions.observe_verdict(
                vocabulary.VerdictChanged(
                    node="a",
                    plugin=vocabulary.watched_plugin(name),
                    at=T0,
                    verdict=verdict,
                    rule="test",
                    watched=name,
                )
            )
            for name in names
        ]

    most = vocabulary.WATCHED_MAX
    assert stored(most + 3, vocabulary.Verdict.HEALTHY, "x") == [True] * (most + 3)
    assert stored(most + 3, vocabulary.Verdict.STUCK, "y") == [True] * most + [False] * 3
    own = vocabulary.VerdictChanged(
        node="a", plugin="p", at=T0, verdict=vocabulary.Verdict.STUCK, rule="test"
    )
    assert conditions.observe_verdict(own)


def test_a_node_that_sends_too_much_is_read_again_later_and_the_others_at_once() -> None:
    budget = inventory_budget.InventoryBudget(known("a", "b.c"))
    sent = [budget.refusal(subject("a", "p"), 0.0) for _ in range(300)]
    assert sent == [None] * 256 + [Refusal.TOO_OFTEN] * 44
    assert budget.refusal(subject("b.c", "p"), 0.0) is None
    # it has tokens again, but inventories were skipped, so it is not read before 10 s
    assert budget.refusal(subject("a", "p"), 9.0) is Refusal.TOO_OFTEN
    assert (budget.take_due(9.9), budget.take_due(10.0), budget.take_due(10.0)) == ([], ["a"], [])
    sent = [budget.refusal(subject("a", "p"), 10.0) for _ in range(300)]
    assert sent.count(None) == 160


def test_a_node_without_a_right_to_count_does_not_use_up_anybodys_rate() -> None:
    nodes = known("a")
    budget = inventory_budget.InventoryBudget(nodes)
    assert {budget.refusal(subject("b", "p"), 0.0) for _ in range(500)} == {Refusal.UNKNOWN_NODE}
    nodes.put(model.Node(name="b"))
    budget.read_again("b", 1.0)
    assert budget.refusal(subject("b", "p"), 1.0) is Refusal.TOO_OFTEN
    assert budget.take_due(1.0) == ["b"]
    assert budget.refusal(subject("b", "p"), 1.0) is None
    budget.read_again("b", 2.0)
    budget.forget("b")
    assert budget.take_due(3.0) == []


def test_a_reader_is_as_late_as_what_it_has_not_read() -> None:
    late = inventory_budget.Backlog()
    assert late.age_s(5.0) == 0.0
    late.note(0, 10.0)
    assert late.age_s(99.0) == 0.0
    late.note(3, 100.0)
    assert late.age_s(101.0) == 1.0
    # more arrive than are read: the 3 from 100 s are read at 106 s, and the rest still waits
    late.note(4, 102.0)
    late.note(5, 104.0)
    assert late.age_s(105.0) == 5.0
    late.note(6, 106.0)
    assert late.age_s(107.0) == 1.0
    # replaced messages are never read
    late.note(1, 108.0)
    assert late.age_s(109.0) == 3.0
    late.note(0, 110.0)
    assert late.age_s(111.0) == 0.0
