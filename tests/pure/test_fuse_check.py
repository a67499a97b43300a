"""Which way to FUSE `muster check fuse` recommends, and from which facts."""

import datetime as dt
from collections.abc import Mapping, Sequence
from typing import Any, Final

import pytest
from hypothesis import given
from hypothesis import strategies as st

from muster_labeler import model
from muster_labeler.check import findings, fuse_ways
from muster_labeler.check.fuse_ways import Way

NOW: Final = dt.datetime(2026, 11, 23, tzinfo=dt.UTC)
NEW: Final = {"kernel": "6.18.44-fc", "kubelet": "v1.37.2", "runtime": "containerd://2.4.2"}
OLD_KERNEL: Final = {**NEW, "kernel": "5.4.0-generic"}
ALL: Final = findings.FuseSupport(has_driver=False, has_class=False, has_dra=True)
NRI: Final = (
    "whether NRI is enabled is not visible from here; containerd enables it by default since 2.0"
)
FACTS: Final = (
    "Kubernetes v1.37.2",
    "Linux 6.18.44-fc",
    f"containerd://2.4.2; {NRI}",
    "autoscalers: none visible",
    "pods that request a fuse resource: 0",
    "namespaces could not be read",
)


def nodes(*shapes: Mapping[str, str]) -> list[model.Node]:
    return [named(f"node-{number}", shape) for number, shape in enumerate(shapes)]


def named(name: str, shape: Mapping[str, str]) -> model.Node:
    return model.Node(
        name=name,
        kernel=shape.get("kernel", ""),
        kubelet=shape.get("kubelet", ""),
        runtime=shape.get("runtime", ""),
    )


def view(members: Sequence[model.Node], **more: Any) -> findings.ClusterView:
    return findings.ClusterView(now=NOW, nodes=members, **{"fuse": ALL, **more})


def pod(**more: Any) -> model.Pod:
    empty: dict[str, Any] = {"annotations": {}, "requests": (), "messages": (), "started": None}
    flags = {"is_agent": False, "is_nri": False, "is_ready": True}
    named = {"namespace": "default", "name": "p", "node": "node-0", "phase": "Running"}
    return model.Pod(**{**named, **empty, **flags, **more})


def message(cluster: findings.ClusterView) -> str:
    (recommended,) = fuse_ways.evaluate(cluster)
    return recommended.message


def test_on_nodes_of_today_the_volume_is_recommended_with_all_facts() -> None:
    text = (
        "use the volume of fuse.muster.dev: pods mount without a resource, a device or a capability"
    )
    assert fuse_ways.evaluate(view(nodes(NEW, NEW))) == [
        findings.finding(
            findings.Id.FUSE010,
            findings.Severity.INFO,
            "cluster",
            text,
            evidence=FACTS,
            docs="docs/fuse.md",
        )
    ]


@pytest.mark.parametrize(
    ("shapes", "more", "way"),
    [
        ([NEW], {}, Way.VOLUME),
        ([{**NEW, "kernel": "5.8.0"}], {}, Way.VOLUME),
        ([{**NEW, "kernel": "5.10.0", "runtime": "docker://20.10"}], {}, Way.VOLUME),
        ([NEW, OLD_KERNEL], {}, Way.ANNOTATION),
        ([{**NEW, "kernel": ""}], {}, Way.ANNOTATION),
        ([{**OLD_KERNEL, "runtime": "cri-o://1.34.0"}], {}, Way.RESOURCE),
        (
            [{**OLD_KERNEL, "runtime": "cri-o://1.34.0"}],
            {"karpenter": findings.Karpenter()},
            Way.PLUGIN,
        ),
        (
            [{**OLD_KERNEL, "runtime": "cri-o://1.34.0"}],
            {"fuse": findings.FuseSupport(has_dra=False)},
            Way.PLUGIN,
        ),
        ([{**OLD_KERNEL, "runtime": "cri-o://1.34.0", "kubelet": "v1.35.9"}], {}, Way.PLUGIN),
        ([{**OLD_KERNEL, "runtime": "containerd://1.7.9"}], {}, Way.PLUGIN),
        ([{}], {}, Way.PLUGIN),
    ],
)
def test_the_first_way_that_all_nodes_can_go_is_recommended(
    shapes: list[dict[str, str]], more: dict[str, Any], way: Way
) -> None:
    assert message(view(nodes(*shapes), **more)).startswith(f"use {way}: ")


def test_what_was_passed_over_is_named_with_its_reason() -> None:
    members = nodes({**OLD_KERNEL, "runtime": "containerd://1.7.9", "kubelet": "v1.30.1"})
    scaler = findings.ClusterAutoscaler()
    (recommended,) = fuse_ways.evaluate(view(members, autoscaler=scaler))
    assert recommended.message == (
        "use the device plugin: no other way works on every node; to mount, pods need "
        "CAP_SYS_ADMIN, and autoscalers need a setting, which `muster check autoscaler` shows"
    )
    assert recommended.evidence[3] == "autoscalers: the Cluster Autoscaler"
    old, off, older = recommended.evidence[len(FACTS) :]
    assert old == f"not {Way.VOLUME}: Linux is older than 5.8, or unknown, on node-0"
    assert off == f"not {Way.ANNOTATION}: containerd://1.7.9 disables NRI by default"
    assert older == (
        f"not {Way.RESOURCE}: Kubernetes is older than 1.36, or unknown, on node-0; "
        "containerd://1.7.9 does not support CDI by default"
    )


@pytest.mark.parametrize(
    ("shape", "more", "way"),
    [
        (NEW, {"fuse": findings.FuseSupport(has_driver=True)}, Way.VOLUME),
        (OLD_KERNEL, {"pods": [pod(is_nri=True)]}, Way.ANNOTATION),
        (
            {**OLD_KERNEL, "runtime": "cri-o://1.34.0"},
            {"fuse": findings.FuseSupport(has_class=True, has_dra=True)},
            Way.RESOURCE,
        ),
    ],
)
def test_what_is_installed_is_named_so(
    shape: dict[str, str], more: dict[str, Any], way: Way
) -> None:
    assert message(view(nodes(shape), **more)).startswith(f"use {way} (installed): ")


def test_pods_that_request_a_resource_are_counted_and_lead_to_the_webhook() -> None:
    cluster = view(nodes(NEW), pods=[pod(requests=("smarter-devices/fuse",)), pod()])
    (recommended,) = fuse_ways.evaluate(cluster)
    assert recommended.message.endswith("its webhook removes the fuse resource from new pods")
    assert "pods that request a fuse resource: 1" in recommended.evidence


def test_namespaces_that_only_the_volume_can_serve_are_counted() -> None:
    enforce = "pod-security.kubernetes.io/enforce"
    namespaces = {"a": {enforce: "restricted"}, "b": {enforce: "baseline"}, "c": {}}
    (recommended,) = fuse_ways.evaluate(view(nodes(NEW), namespaces=namespaces))
    assert recommended.evidence[-1] == (
        "namespaces that enforce Pod Security baseline or restricted: 2; in these namespaces, "
        "pods can mount only with the volume"
    )


@pytest.mark.parametrize("name", ["fargate-ip-10-0-0-1.internal", "gk3-pool-1234"])
def test_where_the_provider_allows_no_privileged_pods_none_is_recommended(name: str) -> None:
    closed = named(name, NEW)
    assert message(view([closed])).startswith("none of muster's ways works: ")
    assert message(view([closed, *nodes(NEW)])).startswith(f"use {Way.VOLUME}: ")


def test_nothing_is_said_unasked_or_of_a_cluster_without_readable_nodes() -> None:
    for cluster in (view(nodes(NEW), fuse=None), view([]), findings.ClusterView(now=NOW, fuse=ALL)):
        assert fuse_ways.evaluate(cluster) == []


_TEXT: Final = st.one_of(
    st.text(max_size=20),
    st.from_regex(r"v?[0-9]{1,3}\.[0-9]{1,3}(\.[0-9]+)?", fullmatch=True),
    st.from_regex(r"(containerd|cri-o|docker)://[0-9]\.[0-9]{1,2}\.0", fullmatch=True),
)


@given(
    shapes=st.lists(
        st.fixed_dictionaries({"kernel": _TEXT, "kubelet": _TEXT, "runtime": _TEXT}),
        min_size=1,
        max_size=5,
    ),
    support=st.builds(
        findings.FuseSupport,
        has_driver=st.sampled_from([None, False, True]),
        has_class=st.sampled_from([None, False, True]),
        has_dra=st.sampled_from([None, False, True]),
    ),
    has_karpenter=st.booleans(),
)
def test_a_way_that_some_node_cannot_go_is_never_recommended_and_one_always_is(
    shapes: list[dict[str, str]], support: findings.FuseSupport, *, has_karpenter: bool
) -> None:
    cluster = view(nodes(*shapes), karpenter=findings.Karpenter() if has_karpenter else None)
    way, passed_over = fuse_ways.recommend(cluster.nodes or (), cluster, support)
    assert list(Way).index(way) == len(passed_over)
    for node in cluster.nodes or ():
        alone, reasons = fuse_ways.recommend([node], cluster, support)
        assert list(Way).index(alone) <= list(Way).index(way)
        assert len(reasons) <= len(passed_over)
