from collections.abc import Mapping
from typing import Any

import pytest

from muster_labeler import model
from muster_labeler.naming import accelerators, node_labels, sources
from muster_labeler.naming.accelerators import Fault, Name, Reason
from muster_labeler.naming.node_labels import LabelState
from muster_labeler.naming.sources import Claim, Evidence, Product, Source

GPU = {"nvidia.com/gpu": 8}
KEY = accelerators.SKYPILOT
GFD = accelerators.GFD_PRODUCT
TYPE = "node.kubernetes.io/instance-type"


def node(name: Any = "a", **more: Any) -> model.Node:
    fields: dict[str, Any] = {"capacity": GPU, "allocatable": GPU, **more}
    return model.Node(name=name, **fields)


def owned(value: str, *managers: str, **labels: str) -> dict[str, object]:
    return {
        "labels": {KEY: value, **labels},
        "owners": {KEY: managers or (model.FIELD_MANAGER,)},
    }


@pytest.mark.parametrize(
    ("labels", "name", "fault"),
    [
        ({KEY: "h100"}, Name("h100", Reason.EXACT), None),
        ({KEY: "H100"}, Name(None, Reason.NO_NAME), Fault.NOT_LOWER_CASE),
        ({KEY: ""}, Name(None, Reason.NO_NAME), Fault.EMPTY),
        ({"cloud.google.com/gke-accelerator": "nvidia-tesla-t4"}, Name("t4", Reason.EXACT), None),
        ({"cloud.google.com/gke-accelerator": "nvidia-l4"}, Name("l4", Reason.EXACT), None),
        (
            {"cloud.google.com/gke-accelerator": "nvidia-h100-80gb"},
            Name("h100", Reason.EXACT),
            None,
        ),
        (
            {"cloud.google.com/gke-accelerator": "nvidia-h200-141gb"},
            Name("h200", Reason.EXACT),
            None,
        ),
        (
            {"cloud.google.com/gke-accelerator": "nvidia-h100-mega-80gb"},
            Name("h100-mega", Reason.EXACT),
            None,
        ),
        (
            {"cloud.google.com/gke-accelerator": "nvidia-a100-80gb"},
            Name("a100-80gb", Reason.EXACT),
            None,
        ),
        ({"cloud.google.com/gke-accelerator": "tpu-v5"}, Name(None, Reason.NO_MODEL), None),
        ({"karpenter.k8s.aws/instance-gpu-name": "a10g"}, Name("a10g", Reason.EXACT), None),
        (
            {
                "karpenter.k8s.aws/instance-gpu-name": "a100",
                "karpenter.k8s.aws/instance-gpu-memory": "81920",
            },
            Name("a100-80gb", Reason.EXACT),
            None,
        ),
        (
            {"karpenter.k8s.aws/instance-gpu-name": "T4"},
            Name(None, Reason.NO_NAME),
            Fault.NOT_LOWER_CASE,
        ),
        (
            {GFD: "NVIDIA-A100-SXM4-80GB", "nvidia.com/gpu.memory": "81920"},
            Name("a100-80gb", Reason.EXACT),
            None,
        ),
        ({GFD: "NVIDIA-A100-SXM4-40GB-MIG-1g.5gb"}, Name(None, Reason.MIG), None),
        ({GFD: "Tesla-T4-SHARED"}, Name("t4", Reason.EXACT, is_shared=True), None),
        (
            {"gpu.nvidia.com/class": "A100_NVLINK_80GB"},
            Name("a100-80gb", Reason.EXACT),
            None,
        ),
        ({"gpu.nvidia.com/class": "H100_NVLINK_80GB"}, Name("h100", Reason.EXACT), None),
        (
            {"gpu.nvidia.com/class": "Quadro_RTX_5000"},
            Name("quadro-rtx5000", Reason.FALLBACK),
            None,
        ),
        ({"nebius.com/gpu-name": "H100"}, Name("h100", Reason.EXACT), None),
        ({"nebius.com/gpu-name": "RTX6000"}, Name("rtx6000", Reason.MEMORY_UNKNOWN), None),
        ({"nebius.com/gpu-name": "h100"}, Name(None, Reason.NO_NAME), Fault.NOT_UPPER_CASE),
        ({"eks.amazonaws.com/instance-gpu-name": "b200"}, Name("b200", Reason.EXACT), None),
        ({"k8s.amazonaws.com/accelerator": "nvidia-a10g"}, Name("a10g", Reason.EXACT), None),
        ({"karpenter.azure.com/sku-gpu-name": "T4"}, Name("t4", Reason.EXACT), None),
        (
            {"karpenter.azure.com/sku-gpu-name": "V100"},
            Name("v100", Reason.MEMORY_UNKNOWN),
            None,
        ),
        ({"doks.digitalocean.com/gpu-model": "mi300x"}, Name("mi300x", Reason.EXACT), None),
        (
            {"amd.com/gpu.product-name": "AMD_Instinct_MI300X_OAM"},
            Name("mi300x", Reason.EXACT),
            None,
        ),
        (
            {"beta.amd.com/gpu.product-name": "AMD_Instinct_MI210"},
            Name("mi210", Reason.EXACT),
            None,
        ),
        ({"gpu.intel.com/product": "Flex_170"}, Name("flex-170", Reason.FALLBACK), None),
        ({"muster.dev/accelerator": "l40s"}, Name("l40s", Reason.EXACT), None),
    ],
)
def test_each_scheme_is_read_back_into_the_same_names(
    labels: Mapping[str, str], name: Name, fault: Fault | None
) -> None:
    ((read_name, read_fault),) = [(r.name, r.fault) for r in accelerators.read_labels(labels)]
    assert (read_name, read_fault) == (name, fault)


def test_what_a_scheme_makes_no_name_of_has_none() -> None:
    (read,) = accelerators.read_labels({"cloud.google.com/gke-accelerator": "nvidia-.x"})
    assert read.name == Name(None, Reason.NOT_A_NAME)


def test_empty_values_on_cpu_nodes_of_coreweave_say_nothing() -> None:
    assert (
        accelerators.read_labels(
            {"gpu.nvidia.com/class": "", "cloud.google.com/gke-accelerator": ""}
        )
        == []
    )


def test_sources_are_believed_in_their_order() -> None:
    views = Evidence(
        {"a": {Product("NVIDIA H100 80GB HBM3", 81559): 1}},
        {"a": {Product("NVIDIA H100 80GB HBM3"): 1}},
        {},
    )
    labels = {GFD: "NVIDIA-H100-80GB-HBM3", "nebius.com/gpu-name": "H100", TYPE: "p5.48xlarge"}
    full = sources.identify(node(labels=labels), views)
    assert [claim.source for claim in full.claims] == list(Source)
    assert full.best == Claim(
        Source.AGENT,
        "1 x NVIDIA H100 80GB HBM3 (81559 MiB)",
        Name("h100", Reason.EXACT),
        81559,
        "NVIDIA H100 80GB HBM3",
    )
    assert not full.is_conflict
    without = [
        sources.identify(node(labels=labels), Evidence({}, views.slices, {})),
        sources.identify(node(labels=labels)),
        sources.identify(node(labels={k: labels[k] for k in ("nebius.com/gpu-name", TYPE)})),
        sources.identify(node(labels={TYPE: "p5.48xlarge"})),
        sources.identify(node()),
    ]
    assert [identity.best.source if identity.best else None for identity in without] == [
        Source.DRA,
        Source.GFD,
        Source.CLOUD,
        Source.INSTANCE_TYPE,
        None,
    ]


@pytest.mark.parametrize(
    ("product", "memory_mib", "label", "is_conflict"),
    [
        ("NVIDIA A100-SXM4-80GB", 81920, "NVIDIA-L4", True),
        ("NVIDIA A100-SXM4-80GB", 81920, "NVIDIA-A100", False),
        ("NVIDIA H100 NVL", 95830, "NVIDIA-H100-80GB-HBM3", False),
        ("NVIDIA T400 4GB", 4096, "Tesla-T4", False),
        ("NVIDIA A100-SXM4-40GB", 40960, "NVIDIA-A100-SXM4-80GB", True),
    ],
)
def test_sources_that_cannot_both_be_right_are_in_conflict(
    product: str, memory_mib: int, label: str, *, is_conflict: bool
) -> None:
    views = Evidence({"a": {Product(product, memory_mib): 1}}, {}, {})
    assert sources.identify(node(labels={GFD: label}), views).is_conflict == is_conflict


def test_an_instance_type_gives_a_name_only_if_requested() -> None:
    hinted = node(labels={TYPE: "Standard_NC24ads_A100_v4"})
    unasked = sources.identify(hinted).name
    requested = sources.identify(hinted, Evidence({}, {}, {}, may_use_instance_type=True)).name
    assert unasked == Name("a100-80gb", Reason.FALLBACK)
    assert requested == Name("a100-80gb", Reason.EXACT)


@pytest.mark.parametrize(
    ("fields", "state"),
    [
        ({"capacity": {}, "allocatable": {}}, LabelState.NOT_GPU),
        ({"labels": {GFD: "Tesla-T4"}}, LabelState.UNLABELLED),
        (owned("t4", **{GFD: "Tesla-T4"}), LabelState.LABELLED_OK),
        (owned("t4", "kubectl-label", **{GFD: "Tesla-T4"}), LabelState.FOREIGN_OWNED),
        (owned("l4", **{GFD: "Tesla-T4"}), LabelState.WRONG),
        (owned("a100", **{GFD: "NVIDIA-A100-SXM4-80GB"}), LabelState.WRONG),
        (owned("T4", **{GFD: "Tesla-T4"}), LabelState.INVALID),
        (owned("", **{GFD: "Tesla-T4"}), LabelState.EMPTY),
        (
            {**owned("t4", **{GFD: "Tesla-T4"}), "allocatable": {"nvidia.com/gpu": 0}},
            LabelState.NO_GPU,
        ),
        ({**owned("t4"), "capacity": {}, "allocatable": {}}, LabelState.NO_GPU),
        ({"labels": {GFD: "NVIDIA-A100"}}, LabelState.AMBIGUOUS),
        ({"labels": {GFD: "NVIDIA-T400-4GB"}}, LabelState.UNKNOWN_MODEL),
        ({"labels": {GFD: "NVIDIA-A100-SXM4-40GB-MIG-1g.5gb"}}, LabelState.MIG),
        (owned("a100", **{GFD: "NVIDIA-A100-SXM4-40GB-MIG-1g.5gb"}), LabelState.MIG),
        ({"labels": {GFD: "NVIDIA-A40-48Q"}}, LabelState.VGPU),
        ({"labels": {GFD: "Tesla-T4", "nebius.com/gpu-name": "L4"}}, LabelState.CONFLICT),
        ({}, LabelState.UNREACHABLE),
        (owned("t4"), LabelState.UNREACHABLE),
        (
            {
                "capacity": {},
                "allocatable": {},
                "labels": {"feature.node.kubernetes.io/pci-0302_10de.present": "true"},
            },
            LabelState.UNREACHABLE,
        ),
    ],
)
def test_a_nodes_label_has_the_state_in_the_table(
    fields: dict[str, object], state: LabelState
) -> None:
    assert node_labels.label_status(node(**fields)).state is state


def test_several_models_on_a_node_are_mixed_and_stay_so() -> None:
    views = Evidence({"a": {Product("Tesla T4", 15360): 1, Product("NVIDIA L4", 23034): 1}}, {}, {})
    assert node_labels.label_status(node(), views).state is LabelState.MIXED
    assert node_labels.label_status(node(**owned("t4")), views).state is LabelState.MIXED


def test_a_scheme_covers_when_it_names_every_gpu_node_and_ours_names_none() -> None:
    t4, l4 = node("a", labels={GFD: "Tesla-T4"}), node("b", labels={GFD: "NVIDIA-L4"})
    odd, ours = node("c", labels={GFD: "NVIDIA-T400-4GB"}), node("d", **owned("t4"))
    assert node_labels.covering_scheme(node_labels.label_statuses([t4, l4])) == GFD
    assert node_labels.covering_scheme(node_labels.label_statuses([t4, l4, odd])) is None
    assert node_labels.covering_scheme(node_labels.label_statuses([t4, l4, ours])) is None
    assert node_labels.partial_schemes(node_labels.label_statuses([t4, l4])) == {}
    assert node_labels.partial_schemes(node_labels.label_statuses([t4, ours])) == {KEY: 1, GFD: 1}
