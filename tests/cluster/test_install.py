"""The minimal overlay on a real API server, which accepts the objects and enforces the rights."""

import json
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest

from scripts.cluster import layout
from tests.worlds import api_rights, manifests
from tests.worlds.real_cluster import Cluster, until

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]

OVERLAY: Final = manifests.ROOT / "k8s/overlays/minimal"
LABELER: Final = "system:serviceaccount:muster:muster-labeler"
NODE: Final = "muster-test-install"
KEY: Final = "skypilot.co/accelerator"
POLICY: Final = "ValidatingAdmissionPolicy 'muster-labeler'"
READS_STATUS: Final = "muster-test-reads-status"
MONITORING: Final = ("podmonitors", "prometheusrules")


@pytest.fixture(scope="module")
def installed(cluster: Cluster) -> Iterator[Cluster]:
    before = cluster.snapshot()
    cluster.good("apply", "-k", str(OVERLAY))
    # an object that is created without fields has no managedFields
    metadata = {"name": NODE, "labels": {"example.com/rack": "7"}}
    node = {"apiVersion": "v1", "kind": "Node", "metadata": metadata, "spec": {}}
    cluster.good("create", "-f", "-", given=node)
    # kubectl first reads the object; without this right the policy would never be evaluated
    rights = ("--verb=get", "--resource=nodes/status")
    cluster.good("create", "clusterrole", READS_STATUS, *rights)
    account = "--serviceaccount=muster:muster-labeler"
    role = f"--clusterrole={READS_STATUS}"
    cluster.good("create", "clusterrolebinding", READS_STATUS, role, account)
    try:
        yield cluster
    finally:
        cluster.good("delete", "node", NODE)
        cluster.good("delete", "clusterrole,clusterrolebinding", READS_STATUS)
        cluster.rest()
    assert cluster.snapshot() == before


def _patch(cluster: Cluster, patch: object, *more: str) -> tuple[int, str]:
    """Try to patch the node as the labeler; return exit code and output."""
    # a strategic merge adds to a list of conditions; a JSON merge would replace the kubelet's
    words = ("patch", "node", NODE, "--type=strategic", "--as", LABELER, "-p", json.dumps(patch))
    return cluster.ask(*words, "--field-manager=muster-labeler", *more)


def test_the_server_has_every_object_and_a_second_apply_changes_nothing(
    installed: Cluster,
) -> None:
    lines = installed.good("apply", "-k", str(OVERLAY)).splitlines()
    assert len(lines) == len(manifests.objects("minimal"))
    # kubectl sends a budget's selector again with every apply, although nothing changes
    changed = [line for line in lines if not line.endswith(" unchanged")]
    assert [line for line in changed if not line.startswith("poddisruptionbudget.policy/")] == []
    assert installed.ask("diff", "-k", str(OVERLAY)) == (0, "")


def test_every_account_may_do_its_work_and_nothing_else(installed: Cluster) -> None:
    asked = [*api_rights.MAY, *api_rights.MAY_NOT]
    reviews = {"apiVersion": "v1", "kind": "List", "items": [each.review() for each in asked]}
    allowed = 'jsonpath={.status.allowed}{"\\n"}'
    answers = installed.good("create", "-f", "-", "-o", allowed, given=reviews).split()
    wanted = ["true"] * len(api_rights.MAY) + ["false"] * len(api_rights.MAY_NOT)
    assert dict(zip(asked, answers, strict=True)) == dict(zip(asked, wanted, strict=True))


def test_the_labeler_writes_labels_of_accelerators_and_nothing_else(installed: Cluster) -> None:
    def policy_holds() -> bool:
        if _patch(installed, {"spec": {"unschedulable": True}})[0]:
            return True
        # a patch without a change is allowed, so this one is reverted before the next attempt
        installed.good("uncordon", NODE)
        return False

    until(policy_holds, "the admission policy holds")
    forbidden = [
        {"spec": {"taints": [{"key": "x", "effect": "NoSchedule"}]}},
        {"metadata": {"labels": {"team": "x"}}},
        {"metadata": {"labels": {"node-role.kubernetes.io/control-plane": ""}}},
        {"metadata": {"labels": {"nvidia.com/gpu.deploy.driver": "false"}}},
        {"metadata": {"labels": {"nvidia.com/mig.config": "all-disabled"}}},
        {"metadata": {"labels": {"nvidia.com/gpu.workload.config": "vm-passthrough"}}},
        {"metadata": {"labels": {"muster.dev/x": "y"}}},
        {"metadata": {"labels": {KEY: "H100"}}},
        {"metadata": {"annotations": {"team": "x"}}},
        {"metadata": {"finalizers": ["example.com/x"]}},
    ]
    for patch in forbidden:
        code, output = _patch(installed, patch)
        assert (code, POLICY in output) == (1, True), (patch, output)
    condition = {"type": "Ready", "status": "False", "reason": "x", "message": "x"}
    status = [{"conditions": [condition]}, {"capacity": {"nvidia.com/gpu": "8"}}]
    for patch in status:
        code, output = _patch(installed, {"status": patch}, "--subresource=status")
        assert (code, POLICY in output) == (1, True), (patch, output)
    assert installed.ask("delete", "node", NODE, "--as", LABELER)[0] == 1
    others = {"metadata": {"labels": {KEY: "h100"}}}
    code, output = _patch(installed, others, "--field-manager=other")
    assert (code, POLICY in output) == (1, True), output
    owners: dict[str, Any] = {"metadata": {"managedFields": [{}]}}
    code, output = _patch(installed, owners, "--type=merge")
    assert (code, POLICY in output) == (1, True), output
    code, output = _patch(installed, {"metadata": {"labels": {KEY: "h100"}}})
    assert code == 0, output
    ours = {**condition, "type": "DevicePluginHealthy"}
    for long in ({"message": "x" * 1025}, {"reason": "x" * 129}):
        changed = {"status": {"conditions": [{**ours, **long}]}}
        code, output = _patch(installed, changed, "--subresource=status")
        assert (code, POLICY in output) == (1, True), output
    code, output = _patch(installed, {"status": {"conditions": [ours]}}, "--subresource=status")
    assert code == 0, output
    node = json.loads(installed.good("get", "node", NODE, "-o", "json"))
    assert node["metadata"]["labels"][KEY] == "h100"


def test_the_labeler_creates_objects_of_its_own_names_and_no_others(installed: Cluster) -> None:
    def create(kind: str, name: str, namespace: str, **more: object) -> tuple[int, str]:
        group = "coordination.k8s.io/v1" if kind == "Lease" else "v1"
        metadata = {"name": name, "namespace": namespace}
        made = {"apiVersion": group, "kind": kind, "metadata": metadata, **more}
        # the API server evaluates the policy for a dry run, too
        words = ("create", "--dry-run=server", "-f", "-", "--as", LABELER)
        return installed.ask(*words, given=made)

    def policy_holds() -> bool:
        return create("ConfigMap", "muster-nats-ca", "muster")[0] == 1

    until(policy_holds, "the admission policy for objects holds")
    about = {"kind": "Node", "name": NODE}
    event = {"involvedObject": about, "reason": "x", "type": "Normal"}
    inventory = {"data": {"inventory.json": "{}"}}
    for code, output in (
        create("ConfigMap", "muster-accounts", "muster"),
        create("ConfigMap", "muster-inventory", "muster", data={"other": "x"}),
        create("Lease", "muster-health", "muster"),
        create("Lease", "muster-labeler", "muster", spec={"holderIdentity": "x" * 257}),
        create("Event", "x", "default", **event, message="x" * 1025),
    ):
        assert (code, f"{POLICY[:-1]}-objects'" in output) == (1, True), output
    for code, output in (
        create("ConfigMap", "muster-inventory", "muster", **inventory),
        create("Lease", "muster-labeler", "muster", spec={"holderIdentity": "x" * 256}),
        create("Event", "x", "default", **event, message="x" * 1024),
    ):
        assert code == 0, output


def _definitions() -> list[Path]:
    """Return the files with the CRDs of the Prometheus operator; skip the test without Go."""
    go = shutil.which("go")
    if go is None:
        pytest.skip("Go is missing, which gets the definitions of the Prometheus operator")
    module = layout.TOOLS / "monitoring"
    done = subprocess.run(
        [go, "mod", "download", "-json"], cwd=module, capture_output=True, text=True, check=True
    )
    folder = Path(json.loads(done.stdout)["Dir"]) / "example/prometheus-operator-crd"
    return [folder / f"monitoring.coreos.com_{kind}.yaml" for kind in MONITORING]


@pytest.fixture
def monitored(installed: Cluster) -> Iterator[Cluster]:
    names = [f"{kind}.monitoring.coreos.com" for kind in MONITORING]
    try:
        for file in _definitions():
            installed.good("create", "-f", str(file))
        installed.good("wait", "crd", *names, "--for=condition=Established")
        yield installed
    finally:
        installed.good("delete", "crd", *names, "--ignore-not-found")


def test_every_object_of_the_component_monitoring_is_taken(
    monitored: Cluster, tmp_path: Path
) -> None:
    monitored.prepare(tmp_path, more={"components": ["../muster/k8s/components/monitoring"]})
    lines = monitored.shell("kubectl apply -k my-muster", tmp_path).splitlines()
    assert {line for line in lines if line.endswith(" created")} == {
        "podmonitor.monitoring.coreos.com/muster created",
        "prometheusrule.monitoring.coreos.com/muster created",
        "configmap/muster-dashboard created",
    }
    assert monitored.shell("kubectl diff -k my-muster", tmp_path) == ""
    rules = monitored.get("prometheusrule", "muster", "-n", "muster")["spec"]["groups"]
    assert sum(len(group["rules"]) for group in rules) > 0
