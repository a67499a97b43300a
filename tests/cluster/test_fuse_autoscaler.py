"""An autoscaler adds nodes for SkyPilot's pods only if the webhook replaces their resource.

Karpenter, the scheduler and the webhook are real; the added nodes are simulated
(tests/worlds/karpenter). test_fuse tests that such pods mount.
"""

import json
import time
from collections.abc import Callable, Iterator
from typing import Any, Final

import pytest

from tests.worlds import karpenter, manifests, real_cluster
from tests.worlds.real_cluster import NAMESPACE, Cluster, until

# the first run builds Karpenter and kwok
pytestmark = [pytest.mark.cluster, pytest.mark.timeout(1200)]

SKY: Final = "muster-test-sky"
SMARTER: Final = "smarter-devices/fuse"
WEBHOOK: Final = "deployment/muster-fuse-webhook"
ASKS: Final = {"cpu": "1500m", "memory": "1Gi"}
"""A pod's requests: a node with two processors has room for one pod."""
Tree = dict[str, Any]


@pytest.fixture(scope="module")
def group(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Yield a cluster with the webhook, and with Karpenter, whose node group is empty."""
    folder = tmp_path_factory.mktemp("webhook")
    name, _, tag = real_cluster.MUSTER.partition(":")
    parts = {
        "components": ["webhook"],
        "resources": ["driver.yaml"],
        "images": [{"name": "muster", "newName": name, "newTag": tag}],
    }
    (folder / "webhook").symlink_to(manifests.ROOT / "k8s/components/fuse-webhook")
    driver = manifests.ROOT / "k8s/components/fuse-broker/driver.yaml"
    (folder / "driver.yaml").write_text(driver.read_text())
    (folder / "kustomization.yaml").write_text(json.dumps(parts))
    cluster.good("create", "namespace", NAMESPACE)
    cluster.good("apply", "-f", "-", given=manifests.render(folder))
    cluster.good("-n", NAMESPACE, "rollout", "status", WEBHOOK, "--timeout=90s")
    with karpenter.node_group(cluster, folder):
        yield cluster


@pytest.fixture
def sky(group: Cluster) -> Iterator[Cluster]:
    """Yield the cluster with a namespace for SkyPilot's pods, in which the broker is allowed."""
    gone = ("delete", "namespace", SKY, "--ignore-not-found", "--timeout=60s")
    group.good(*gone)
    metadata = {"name": SKY, "labels": {"fuse.muster.dev/allowed": "true"}}
    namespace = {"apiVersion": "v1", "kind": "Namespace", "metadata": metadata}
    group.good("create", "-f", "-", given=namespace)
    yield group
    group.good(*gone)


def pod(name: str) -> Tree:
    """Return a pod as SkyPilot makes it, for nodes of the group."""
    container = {
        "name": "ray-node",
        "image": real_cluster.BUSYBOX,
        "resources": {"requests": {**ASKS, SMARTER: "1"}, "limits": {SMARTER: "1"}},
        "securityContext": {"capabilities": {"add": ["SYS_ADMIN"]}},
    }
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "namespace": SKY, "labels": {"parent": "skypilot"}},
        "spec": {
            "restartPolicy": "Never",
            "nodeSelector": dict(karpenter.SELECTOR),
            "containers": [container],
        },
    }


def created(cluster: Cluster, name: str) -> Tree:
    """Create a pod; return it as it was admitted."""
    made: Tree = json.loads(cluster.good("create", "-o", "json", "-f", "-", given=pod(name)))
    return made


def requests(made: Tree) -> list[Tree]:
    """Return the requests and limits of each container."""
    return [each["resources"] for each in made["spec"]["containers"]]


def events(cluster: Cluster, name: str, component: str) -> list[str]:
    """Return reason and message of a component's events about a pod."""
    selector = f"involvedObject.name={name}"
    listed = cluster.get("events", "", "-n", SKY, "--field-selector", selector)["items"]
    return [
        f"{event['reason']}: {event['message']}"
        for event in listed
        if component in {event["source"].get("component"), event.get("reportingComponent")}
    ]


def running_on(cluster: Cluster, name: str) -> str:
    """Return the node on which a pod runs; empty if it does not run."""
    shown = cluster.get("pod", name, "-n", SKY)
    return str(shown["spec"]["nodeName"]) if shown["status"]["phase"] == "Running" else ""


def test_without_the_webhooks_replacement_no_node_is_added(
    sky: Cluster, say: Callable[[str], None]
) -> None:
    both = {"requests": {**ASKS, SMARTER: "1"}, "limits": {SMARTER: "1"}}
    assert requests(created(sky, "head")) == [both]
    (refusal,) = until(lambda: events(sky, "head", "karpenter"), "Karpenter says why it adds none")
    say(f"  Karpenter: {refusal}")
    assert refusal.startswith("FailedScheduling: Failed to schedule pod, ")
    assert "no instance type has enough resources" in refusal
    assert f'"{SMARTER}":"1"' in refusal
    checked = sky.muster("check", "autoscaler", expect=1)
    assert f"{SKY}/head: the autoscaler adds no node for the pod: no instance type has " in checked
    assert sky.get("pod", "head", "-n", SKY)["status"]["phase"] == "Pending"
    assert (karpenter.claims(sky), karpenter.nodes(sky)) == ([], [])


def test_with_it_the_unchanged_pods_add_one_node_after_the_other(
    sky: Cluster, say: Callable[[str], None]
) -> None:
    sky.good("annotate", "namespace", SKY, f"fuse.muster.dev/replace={SMARTER}")
    # the API server reads the CA with a delay, and so does the webhook read the annotation
    tried = ("create", "--dry-run=server", "-o", "json", "-f", "-")
    until(
        lambda: SMARTER not in json.dumps(requests(json.loads(sky.good(*tried, given=pod("a"))))),
        "the webhook replaces the resource",
    )
    assert names(karpenter.nodes(sky)) == []
    first = runs(sky, "head", say)
    assert names(karpenter.nodes(sky)) == [first]
    second = runs(sky, "worker", say)
    assert names(karpenter.nodes(sky)) == [first, second]
    assert len(karpenter.claims(sky)) == 2
    offered = {name for node in karpenter.nodes(sky) for name in node["status"]["allocatable"]}
    assert SMARTER not in offered


def runs(cluster: Cluster, name: str, say: Callable[[str], None]) -> str:
    """Create a pod, from which the webhook removes the resource; return the node it runs on."""
    began = time.monotonic()
    assert requests(created(cluster, name)) == [{"requests": ASKS}]
    node = until(lambda: running_on(cluster, name), f"{name} runs", within_s=90)
    say(f"  {name} runs on a node of the group after {time.monotonic() - began:.1f} s")
    return node


def names(nodes: list[Tree]) -> list[str]:
    return [node["metadata"]["name"] for node in nodes]
