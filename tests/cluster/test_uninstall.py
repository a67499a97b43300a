"""The documented commands: installing without a default StorageClass, and uninstalling.

Without the class, the steps fail and report what is missing; with it, everything starts by itself.
After docs/upgrade.md, Uninstall, the cluster and its nodes are as they were before.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest

from muster_labeler import model
from muster_labeler.naming import accelerators
from tests.worlds import real_cluster
from tests.worlds.real_cluster import until

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]

SETTINGS: Final = {
    "plugin": {
        "resources": [
            {
                "name": "smarter-devices/fuse",
                "groups": [{"devices": [{"path": "/dev/fuse"}], "count": 20}],
            }
        ],
        "simulated_gpus": {"count": 2, "product": "NVIDIA L4", "memory_mib": 23_034},
    },
    "labeler": {"mode": "apply", "condition": True, "simulated": True},
}
"""Settings with which the labeler writes labels, annotation and condition on the node."""


@pytest.fixture(scope="module")
def before(cluster: real_cluster.Cluster) -> dict[str, Any]:
    return cluster.snapshot()


@pytest.fixture(scope="module")
def folder(
    cluster: real_cluster.Cluster, before: dict[str, Any], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Path]:
    """Yield a user's folder that is ready for the first `kubectl apply`."""
    assert before["objects"]
    made = tmp_path_factory.mktemp("uninstall")
    cluster.prepare(made, settings=SETTINGS)
    cluster.shell(real_cluster.passwords(), made)
    yield made
    cluster.rest()
    # a node that had GPUs, even simulated ones, would disturb other tests
    cluster.renew_node()


@pytest.fixture(scope="module")
def without_class(cluster: real_cluster.Cluster, folder: Path) -> tuple[str, str, str]:
    """Run the steps without a default class; return their output and that of both diagnoses."""
    steps = real_cluster.block("install.md", "kubectl apply -k my-muster")
    with cluster.no_default_storage():
        printed = cluster.shell(steps.replace("--timeout=180s", "--timeout=5s"), folder, expect=1)
        diagnose = real_cluster.block("install.md", "check muster")
        diagnosis = cluster.shell(diagnose, folder, expect=1)
        context = cluster.good("config", "current-context").strip()
        report = cluster.muster("doctor", "--json", "--context", context, expect=1)
    # with a default class again, everything starts by itself
    waits = [line for line in steps.splitlines() if "rollout status" in line]
    assert len(waits) == 3
    cluster.shell("\n".join(waits), folder)
    return printed, diagnosis, report


def test_without_a_default_storage_class_the_steps_fail_and_say_what_is_missing(
    cluster: real_cluster.Cluster, folder: Path, without_class: tuple[str, str, str]
) -> None:
    printed, diagnosis, _ = without_class
    assert printed.splitlines()[-2:] == [
        "Waiting for 1 pods to be ready...",
        "error: timed out waiting for the condition",
    ]
    assert (
        "ERROR    RUN002   muster/data-muster-nats-0: NATS has no volume: "
        "the claim names no StorageClass, and there is no default" in diagnosis.splitlines()
    )
    assert cluster.shell("muster check muster", folder).count("nothing found") == 1


def test_without_a_default_storage_class_the_doctor_names_nats_first(
    without_class: tuple[str, str, str],
) -> None:
    report = json.loads(without_class[2])
    findings = {each["check"]: (each["level"], each["text"]) for each in report["findings"]}
    level, text = findings.pop("pods")
    lacking = "0/1 nodes are available: pod has unbound immediate PersistentVolumeClaims"
    assert level == "FAIL"
    assert text.startswith(f"no ready pod: muster-nats (muster-nats-0 {lacking}")
    why = "no pod of muster-nats is ready in the namespace muster: muster-nats-0 (Pending)"
    assert findings["bus"] == ("NOT CHECKED", why)
    assert {level for level, _ in findings.values()} == {"OK", "NOT CHECKED"}


@pytest.fixture(scope="module")
def labelled(
    cluster: real_cluster.Cluster, without_class: tuple[str, str, str]
) -> real_cluster.Cluster:
    assert without_class

    def is_marked() -> bool:
        node = cluster.get("node", cluster.node)
        conditions = [condition["type"] for condition in node["status"]["conditions"]]
        return (
            node["metadata"]["labels"].get(accelerators.SKYPILOT) == "l4"
            and model.PROVENANCE in node["metadata"]["annotations"]
            and model.CONDITION in conditions
        )

    until(is_marked, "the labeler has written label, annotation and condition", within_s=90)
    return cluster


def test_the_documented_commands_leave_the_cluster_as_it_was(
    labelled: real_cluster.Cluster, before: dict[str, Any], tmp_path: Any
) -> None:
    show, remove = real_cluster.block("upgrade.md", "muster uninstall").splitlines()
    with_muster = labelled.snapshot()
    shown = labelled.shell(show, tmp_path)
    assert shown.splitlines()[1:3] == [
        "namespace muster and all objects in it",
        "the labels, annotations and conditions that muster wrote on 1 node",
    ]
    assert labelled.snapshot() == with_muster
    printed = labelled.shell(remove, tmp_path)
    assert labelled.snapshot() == before
    assert "remains: volume volume-" in printed
    assert labelled.shell(remove, tmp_path).startswith("muster is not installed in ")
