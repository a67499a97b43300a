"""`muster uninstall` against the API stand-in."""

import concurrent.futures
import pathlib
import sys
from collections.abc import Iterator
from typing import Any

import pytest

import muster
from muster_labeler import model
from tests.worlds import labeler_cluster as clusters
from tests.worlds.labeler_cluster import GFD, KEY, Cluster, node
from tests.worlds.real_cluster import until

PART = {"app.kubernetes.io/part-of": "muster"}
NODES = (
    "remains: nodes may still list muster's resources with 0 devices; see "
    f"https://muster.dev/v{muster.__version__}/docs/upgrade.html"
)


@pytest.fixture
def here(tmp_path: pathlib.Path) -> Iterator[Cluster]:
    with clusters.cluster(tmp_path) as cluster:
        yield cluster


def _name(here: Cluster) -> str:
    return f"{here.api.url} (context muster)"


def _namespace(**labels: str) -> dict[str, Any]:
    return {"kind": "Namespace", "metadata": {"name": "muster", "labels": labels}}


def test_without_muster_it_says_so(here: Cluster) -> None:
    here.put(node("a", labels={KEY: "mine"}))
    assert here.run("uninstall", "--yes") == (0, f"muster is not installed in {_name(here)}\n", "")


def test_it_removes_the_namespace_and_what_is_ours_on_nodes(here: Cluster) -> None:
    here.put(_namespace(**PART), node("a", labels={GFD: "Tesla-T4"}), node("b"))
    here.apply("a", {KEY: "t4"})
    shown = f"{_name(here)}:\nnamespace muster and all objects in it\n"
    shown += "the labels, annotations and conditions that muster wrote on 1 node\n"
    assert here.run("uninstall", "--dry-run") == (0, shown, "")
    assert here.labels("a") == {GFD: "Tesla-T4", KEY: "t4"}
    code, out, _ = here.run("uninstall", "--yes")
    assert (code, out.startswith(shown)) == (0, True)
    assert out.splitlines()[-3:] == [
        "labels changed on 1 of 1 node, and read back to verify",
        "0 objects outside the namespace removed",
        NODES,
    ]
    assert here.labels("a") == {GFD: "Tesla-T4"}
    assert "muster" not in [
        entry["metadata"]["name"] for entry in here.send("GET", "/api/v1/namespaces")["items"]
    ]
    assert here.run("uninstall", "--yes") == (0, f"muster is not installed in {_name(here)}\n", "")


def _workload(kind: str, name: str) -> dict[str, Any]:
    return {"kind": kind, "metadata": {"name": name, "namespace": "muster"}}


def _pod(name: str) -> dict[str, Any]:
    labels = {**PART, "app.kubernetes.io/name": name}
    metadata = {"name": name, "namespace": "muster", "labels": labels}
    spec = {"containers": [{"name": "main", "image": "muster"}]}
    return {"kind": "Pod", "metadata": metadata, "spec": spec}


def _names(here: Cluster, path: str) -> list[str]:
    return [entry["metadata"]["name"] for entry in here.send("GET", path)["items"]]


def test_nats_ends_after_the_pods_that_use_it_and_the_namespace_after_nats(here: Cluster) -> None:
    here.put(_namespace(**PART))
    here.put(
        _workload("DaemonSet", "muster-plugin"),
        _workload("Deployment", "muster-health"),
        _workload("StatefulSet", "muster-nats"),
        *(_pod(name) for name in ("muster-plugin", "muster-health", "muster-nats")),
    )
    apps, pods = "/apis/apps/v1/namespaces/muster", "/api/v1/namespaces/muster/pods"
    with concurrent.futures.ThreadPoolExecutor() as thread:
        code = thread.submit(here.run, "uninstall", "--yes")
        until(lambda: not _names(here, f"{apps}/deployments"), "the Deployment is deleted")
        here.send("DELETE", f"{pods}/muster-plugin")
        assert _names(here, f"{apps}/daemonsets") == []
        assert _names(here, f"{apps}/statefulsets") == ["muster-nats"]
        here.send("DELETE", f"{pods}/muster-health")
        until(lambda: not _names(here, f"{apps}/statefulsets"), "the StatefulSet is deleted")
        assert "muster" in _names(here, "/api/v1/namespaces")
        here.send("DELETE", f"{pods}/muster-nats")
        assert code.result()[0] == 0
    assert "muster" not in _names(here, "/api/v1/namespaces")


def test_after_an_interruption_it_goes_on_with_the_nodes(here: Cluster) -> None:
    here.put(node("a"))
    here.apply("a", {KEY: "t4"})
    assert here.run("uninstall", "--yes")[0] == 0
    assert here.labels("a") == {}


def test_a_namespace_that_may_have_more_in_it_is_refused(here: Cluster) -> None:
    here.put(_namespace(team="x"), node("a"))
    here.apply("a", {KEY: "t4"})
    code, out, errors = here.run("uninstall", "--yes")
    assert (code, out) == (1, "")
    assert errors == (
        "muster uninstall: namespace muster has no label app.kubernetes.io/part-of=muster, so it "
        "may contain more than muster; if it contains only muster, run: "
        "kubectl label namespace muster app.kubernetes.io/part-of=muster\n"
    )
    assert here.labels("a") == {KEY: "t4"}


def test_without_a_terminal_and_without_yes_nothing_is_removed(
    here: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    here.put(_namespace(**PART))
    with pathlib.Path("/dev/null").open() as nothing:
        monkeypatch.setattr(sys, "stdin", nothing)
        code, _, errors = here.run("uninstall")
    question = f"Remove muster from {here.api.url} (context muster)?"
    assert (code, errors) == (
        2,
        f"muster uninstall: {question} stdin is not a terminal; use --yes\n",
    )
    shown = f"{_name(here)}:\nnamespace muster and all objects in it\n"
    assert here.run("uninstall", "--dry-run")[1] == shown


def test_what_is_left_of_labels_that_were_withdrawn_is_removed(here: Cluster) -> None:
    here.put(node("a"))
    provenance = '{"source": "agent", "product": "NVIDIA L4"}'
    body = {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {"name": "a", "annotations": {model.PROVENANCE: provenance}},
    }
    path = f"/api/v1/nodes/a?fieldManager={model.FIELD_MANAGER}"
    here.send("PATCH", path, body, "application/apply-patch+yaml")
    assert here.run("uninstall", "--yes")[0] == 0
    assert here.node("a")["metadata"].get("annotations", {}) == {}
    assert here.run("uninstall", "--yes") == (0, f"muster is not installed in {_name(here)}\n", "")


@pytest.mark.parametrize(
    ("verb", "plural", "text"),
    [
        ("delete", "namespaces", "not allowed to delete namespaces"),
        ("patch", "nodes", "not allowed to patch nodes; not allowed to patch nodes/status"),
    ],
)
def test_missing_permissions_are_named_before_anything_is_removed(
    here: Cluster, verb: str, plural: str, text: str
) -> None:
    here.put(_namespace(**PART), node("a"))
    here.apply("a", {KEY: "t4"})
    code, out, errors = here.run("uninstall", "--yes", kubeconfig=here.user((verb, plural)))
    assert (code, out) == (4, "")
    assert text.partition(";")[0] in errors
    assert here.labels("a") == {KEY: "t4"}
