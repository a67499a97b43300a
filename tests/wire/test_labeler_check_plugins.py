"""`muster check plugins` against the API stand-in: what it reads, and what it prints."""

import pathlib
import shlex
from collections.abc import Iterator
from typing import Any

import pytest

from tests.worlds import labeler_cluster as clusters
from tests.worlds.labeler_cluster import Cluster, node

GPU = "nvidia.com/gpu"
OLD = "2026-01-01T00:00:00Z"
LOST = (
    f"offers no {GPU}: NVIDIA k8s-device-plugin runs and is Ready, but the kubelet has lost its "
    "connection to it, or it reports all devices Unhealthy"
)


@pytest.fixture
def here(tmp_path: pathlib.Path) -> Iterator[Cluster]:
    with clusters.cluster(tmp_path) as cluster:
        yield cluster


def put_plugin(here: Cluster, on: str = "a") -> None:
    container = {"name": "ctr", "image": "nvcr.io/nvidia/k8s-device-plugin:v0.17.1"}
    metadata = {"name": f"plugin-{on}", "namespace": "default"}
    spec = {"nodeName": on, "containers": [container]}
    here.put({"kind": "Pod", "metadata": metadata, "spec": spec})
    ready = {"type": "Ready", "status": "True", "lastTransitionTime": OLD}
    here.send(
        "PATCH",
        f"/api/v1/namespaces/default/pods/plugin-{on}/status",
        {"status": {"phase": "Running", "conditions": [ready]}},
        "application/merge-patch+json",
    )


def ids(report: dict[str, Any]) -> list[tuple[str, str, str]]:
    return [(each["id"], each["severity"], each["object"]) for each in report["findings"]]


def test_a_plugin_that_runs_while_its_node_offers_none_is_reported(here: Cluster) -> None:
    here.put(node("a", gpus=8, usable=0), node("b"))
    put_plugin(here, "a")
    put_plugin(here, "b")
    code, report = here.check("plugins")
    (finding,) = report["findings"]
    assert (code, finding["id"], finding["severity"], finding["scope"], finding["object"]) == (
        1,
        "PLUG001",
        "error",
        "node",
        "a",
    )
    assert finding["message"] == LOST
    assert finding["evidence"][0] == f"{GPU}: 0 of 8 allocatable"
    assert shlex.split(finding["fix"]["command"])[5:] == [
        *("-n", "default", "delete", "pod", "plugin-a"),
    ]
    assert report["checked"] == {"nodes": 2, "gpuNodes": 2, "plugins": 2}
    assert ids(here.check("all")[1]) == [
        ("PLUG001", "error", "a"),
        ("GPU010", "unknown", "a"),
        ("GPU010", "unknown", "b"),
    ]
    assert here.check("plugins", "--node", "b")[1]["findings"] == []


def test_text_has_a_line_for_it_and_how_many_plugins_were_seen(here: Cluster) -> None:
    here.put(node("a", gpus=8, usable=0))
    put_plugin(here)
    code, out, _ = here.run("check", "plugins")
    lines = out.splitlines()
    assert (code, lines[0]) == (1, f"ERROR    PLUG001  a: {LOST}")
    assert lines[-1] == (
        f"{here.api.url} (context muster): 1 error (1 node, 1 GPU node, 1 pod of a known plugin)"
    )


def test_drivers_are_judged_by_slices_claims_and_classes(here: Cluster) -> None:
    here.put(node("a"), node("b"))
    for on in ("a", "b"):
        pool = {"name": "gpus", "generation": 1, "resourceSliceCount": 2}
        spec = {"driver": "gpu.nvidia.com", "pool": pool, "devices": [{"name": "gpu-0"}]}
        here.put(
            {
                "kind": "ResourceSlice",
                "metadata": {"name": f"slice-{on}"},
                "spec": {**spec, "nodeName": on},
            }
        )
    put_plugin(here, "a")
    selector = {"cel": {"expression": "device.driver == 'gpu.nvidia.com'"}}
    spec = {"extendedResourceName": GPU, "selectors": [selector]}
    here.put({"kind": "DeviceClass", "metadata": {"name": "gpu"}, "spec": spec})
    code, report = here.check("plugins")
    assert (code, ids(report)) == (
        1,
        [
            ("DRA006", "error", "a"),
            ("DRA006", "error", "b"),
            ("DRA007", "error", "gpu.nvidia.com"),
        ],
    )


def test_what_may_not_be_read_is_named_and_the_rest_is_checked(here: Cluster) -> None:
    here.put(node("a", gpus=8, usable=0))
    put_plugin(here)
    limited = here.user(("list", "pods"), ("list", "resourceslices"), ("list", "daemonsets"))
    code, report = here.check("plugins", kubeconfig=limited)
    assert (code, ids(report)) == (
        4,
        [("PLUG001", "warn", "a"), ("ACCESS", "unknown", "pods")],
    )
    assert report["findings"][0]["message"] == (
        f"offers no {GPU}: pods cannot be read, so the state of its plugin is unknown"
    )
    hidden = sorted(note.partition(": ")[0] for note in report["notes"])
    assert hidden == [
        "get /apis/apps/v1/daemonsets",
        "get /apis/resource.k8s.io/v1/resourceslices",
    ]


def test_it_reads_only(here: Cluster) -> None:
    here.put(node("a", gpus=8, usable=0))
    put_plugin(here)
    before = here.writes("/")
    here.check("plugins")
    reviews = here.writes("/apis/authorization.k8s.io")
    assert len(here.writes("/")) - len(before) == len(reviews)
