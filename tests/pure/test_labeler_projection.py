import datetime as dt
import heapq

import msgspec
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from muster.kubernetes import objects, scheduling
from muster_labeler import model
from muster_labeler.kubernetes import cluster_api as kubernetes_pace
from muster_labeler.kubernetes import projection
from muster_labeler.naming import accelerators, sources
from muster_labeler.naming.sources import Product

L4 = Product("NVIDIA L4", 23034)


def read(tree: object) -> model.Node:
    return projection.node(msgspec.json.decode(orjson.dumps(tree), type=objects.Node))


def test_a_node_without_status_labels_or_fields_is_a_node() -> None:
    assert read({"metadata": {"name": "a"}}) == model.Node(name="a")
    bare = {
        "metadata": {"name": "a", "labels": None, "annotations": None, "managedFields": None},
        "spec": None,
        "status": {"capacity": None, "conditions": None, "nodeInfo": None},
    }
    assert read(bare) == model.Node(name="a")


def test_of_a_node_only_what_concerns_accelerators_is_kept() -> None:
    fields: dict[str, object] = {"f:metadata": {"f:labels": {f"f:{accelerators.SKYPILOT}": {}}}}
    ready = {"type": "Ready", "status": "True", "lastTransitionTime": "2026-01-01T00:00:00Z"}
    kept = read(
        {
            "metadata": {
                "name": "a",
                "uid": "u",
                "resourceVersion": "7",
                "labels": {accelerators.SKYPILOT: "t4", "app": "x"},
                "annotations": {model.PROVENANCE: "{}", "other": "y"},
                "managedFields": [
                    {"manager": "muster-labeler", "fieldsV1": fields},
                    {"manager": "kubelet", "fieldsV1": {"f:status": {}}},
                    {"manager": "odd"},
                ],
            },
            "spec": {"providerID": "aws:///z/i-1"},
            "status": {
                "capacity": {"cpu": "8", "nvidia.com/gpu": "8", "muster.dev/fuse": "1k"},
                "allocatable": {"nvidia.com/gpu": 7, "muster.dev/fuse": "odd"},
                "conditions": [{"type": "DiskPressure", "status": "False"}, ready],
                "nodeInfo": {"containerRuntimeVersion": "containerd://2.0.1"},
            },
        }
    )
    assert kept == model.Node(
        name="a",
        uid="u",
        version="7",
        labels={accelerators.SKYPILOT: "t4"},
        owners={accelerators.SKYPILOT: ("muster-labeler",)},
        our_labels={accelerators.SKYPILOT: "t4"},
        capacity={"nvidia.com/gpu": 8, "muster.dev/fuse": 1000},
        allocatable={"nvidia.com/gpu": 7, "muster.dev/fuse": 0},
        ready_since=dt.datetime(2026, 1, 1, tzinfo=dt.UTC),
        runtime="containerd://2.0.1",
        provider_id="aws:///z/i-1",
    )
    assert (kept.usable, kept.fuse) == (7, {"muster.dev/fuse": 0})


@pytest.mark.parametrize(
    ("name", "is_one"),
    [
        ("nvidia.com/gpu", True),
        ("nvidia.com/mig-1g.5gb", True),
        ("amd.com/gpu", True),
        ("gpu.intel.com/i915", True),
        ("gpu.intel.com/i915_monitoring", False),
        ("habana.ai/gaudi", True),
        ("google.com/tpu", True),
        ("example.com/gpu", False),
    ],
)
def test_accelerators_are_the_resources_that_compute(name: str, *, is_one: bool) -> None:
    def kept(count: str) -> model.Node:
        return read({"metadata": {"name": "a"}, "status": {"capacity": {name: count}}})

    assert kept("1").has_accelerators == is_one
    # a capacity of 0, which a removed plugin leaves, is no GPU
    assert kept("0").has_accelerators is False
    assert kept("0").may_have_accelerators == is_one


KINDS = st.builds(
    Product, st.text(max_size=20), st.none() | st.integers(0, 2**40), st.booleans(), st.booleans()
)


@given(st.dictionaries(st.text(max_size=5), st.dictionaries(KINDS, st.integers(1, 16), max_size=3)))
def test_an_inventory_comes_back_as_it_was_written(nodes: dict[str, dict[Product, int]]) -> None:
    simulated = frozenset(list(nodes)[:1])
    decoded, decoded_simulated = projection.decode_inventory(
        projection.encode_inventory(nodes, simulated)
    )
    assert (decoded, decoded_simulated) == (nodes, simulated)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{}",
        "[]",
        '{"products":[],"nodes":{"a":[7]}}',
        "\0",
        '{"products":[["x"]],"nodes":{"a":{"-1":1}}}',
    ],
)
def test_what_is_no_inventory_is_refused(text: str) -> None:
    with pytest.raises(projection.UnreadableInventory):
        projection.decode_inventory(text)


def test_a_node_that_reports_too_much_keeps_no_other_from_being_written() -> None:
    odd = {Product(f"{index} " + "x" * 900): 1 for index in range(120)}
    loud = {f"loud-{index}": odd for index in range(10)}
    kinds, _ = projection.decode_inventory(projection.encode_inventory({**loud, "a": {L4: 1}}))
    assert kinds == {"a": {L4: 1}}
    wide = {f"{index:0250}": {Product(f"{index} " + "x" * 200): 1} for index in range(5000)}
    text = projection.encode_inventory(wide)
    assert len(text) < projection.INVENTORY_BYTES_MAX
    assert projection.decode_inventory(text)[0].items() <= wide.items()


def test_ten_thousand_nodes_fit_into_a_config_map() -> None:
    kinds = [sources.Product(f"NVIDIA H100 80GB HBM3 {index}", 81559) for index in range(8)]
    nodes = {
        f"ip-10-0-{i % 256}-{i // 256}.eu-west-1.compute": {kinds[i % 8]: 8} for i in range(10_000)
    }
    assert len(projection.encode_inventory(nodes)) < projection.INVENTORY_BYTES_MAX


@pytest.mark.parametrize(
    "more",
    ['"status":{"capacity":7}', '"status":{"conditions":{}}', '"spec":{"providerID":7}'],
)
def test_a_node_that_cannot_be_read_is_not_forgotten(more: str) -> None:
    raw = msgspec.Raw(f'{{"metadata":{{"name":"a","uid":"u"}},{more}}}'.encode())
    kept = projection.read_node(raw)
    assert (kept.name, kept.uid, kept.has_accelerators, kept.is_selected) == (
        "a",
        "u",
        True,
        False,
    )
    with pytest.raises(msgspec.MsgspecError):
        projection.read_node(msgspec.Raw(b'{"metadata":{}}'))


@pytest.mark.parametrize("time", ["yesterday", "", "9999-99-99T99:99:99Z", "2026-01-01T00:00:00"])
def test_an_odd_time_is_no_time_and_leaves_no_node_out(time: str) -> None:
    ready = {"type": "Ready", "status": "True", "lastTransitionTime": time}
    metadata = {"name": "a", "creationTimestamp": time}
    kept = read({"metadata": metadata, "status": {"conditions": [ready]}})
    assert (kept.created, kept.ready_since is not None) == (None, True)


@given(
    rate=st.floats(0.5, 1000),
    writes=st.lists(st.tuples(st.floats(0, 0.5), st.floats(0, 3), st.floats(0, 1)), max_size=60),
)
def test_in_no_second_more_arrives_than_the_budget_however_long_each_write_is_on_its_way(
    rate: float, writes: list[tuple[float, float, float]]
) -> None:
    pace = kubernetes_pace.WriteRate(rate)
    now, arrivals, answers = 0.0, [], list[float]()
    for late, lasts, share in writes:
        while (wait := pace.wait_s(now)) != 0 or (answers and answers[0] <= now):
            if answers and (wait is None or answers[0] <= now + wait):
                now = max(now, heapq.heappop(answers))
                pace.finish(now)
            else:
                assert wait is not None, "nothing is under way, and yet it waits"
                # at least a difference that floats can represent
                now += max(wait, 1e-9)
        pace.start(now)
        arrivals.append(now + share * lasts)
        heapq.heappush(answers, now + lasts)
        now += late
    for first in arrivals:
        assert sum(first <= other < first + 1 - 1e-6 for other in arrivals) <= max(1, rate)


def test_of_a_pod_its_requests_and_its_containers_messages_are_kept() -> None:
    raw = {
        "metadata": {
            "name": "p",
            "namespace": "n",
            "annotations": {"fuse.muster.dev/device": "true"},
        },
        "spec": {
            "nodeName": "a",
            "containers": [{"resources": {"limits": {"smarter-devices/fuse": "1", "cpu": "1"}}}],
            "initContainers": [{"resources": None}],
        },
        "status": {
            "phase": "Running",
            "containerStatuses": [
                {
                    "ready": False,
                    "state": {"waiting": {"reason": "CrashLoopBackOff", "message": "back-off"}},
                    "lastState": {"terminated": {"message": "fuse: device not found"}},
                }
            ],
        },
    }
    kept = projection.pod(msgspec.json.decode(orjson.dumps(raw), type=objects.Pod))
    assert kept == model.Pod(
        namespace="n",
        name="p",
        node="a",
        phase="Running",
        annotations={"fuse.muster.dev/device": "true"},
        requests=("smarter-devices/fuse",),
        is_agent=False,
        is_nri=False,
        is_ready=False,
        started=None,
        messages=("fuse: device not found",),
    )


def test_a_pod_without_fuse_is_not_kept() -> None:
    raw = msgspec.json.decode(b'{"metadata": {"name": "p"}, "spec": null}', type=objects.Pod)
    assert projection.pod(raw) is None


def test_a_slice_has_products_and_memory_in_both_versions() -> None:
    attributes = {"gpu.nvidia.com/productName": {"string": "NVIDIA L4"}}
    inside = {"attributes": attributes, "capacity": {"memory": {"value": "24Gi"}}}
    for device in ({"name": "gpu-0", **inside}, {"name": "gpu-0", "basic": inside}):
        raw = {"spec": {"driver": "gpu.nvidia.com", "nodeName": "a", "devices": [device]}}
        kept = projection.slice_of(
            msgspec.json.decode(orjson.dumps(raw), type=scheduling.ResourceSlice)
        )
        assert kept == model.ResourceSlice(
            node="a",
            driver="gpu.nvidia.com",
            products=(("NVIDIA L4", 24576, False),),
            devices=("gpu-0",),
        )


def test_a_product_cannot_control_the_terminal_of_who_reads_the_inventory() -> None:
    kinds = {"node-a": {sources.Product("H100\x9b2J\u202e\x7f"): 1}}
    text = projection.encode_inventory(kinds)
    assert text.isprintable()
    assert projection.decode_inventory(text) == (kinds, frozenset())
