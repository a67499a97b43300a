"""The webhook of the FUSE broker, called by a real API server."""

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest
import yaml

from tests.worlds import manifests, real_cluster
from tests.worlds.real_cluster import NAMESPACE, Cluster, until

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]

NAME: Final = "muster-fuse-webhook"
APPS: Final = "muster-test-fuse"
SMARTER: Final = "smarter-devices/fuse"
DEPLOYMENT: Final = f"deployment/{NAME}"
MOUNTED: Final = {"/run/muster-fuse", "/usr/bin/fusermount3", "/bin/fusermount", "/dev/fuse"}
RESTRICTED: Final = {
    "allowPrivilegeEscalation": False,
    "runAsNonRoot": True,
    "runAsUser": 1000,
    "seccompProfile": {"type": "RuntimeDefault"},
}
Tree = dict[str, Any]


@pytest.fixture(scope="module")
def webhook(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Yield a cluster with only the webhook, which needs no other part of muster."""
    folder = tmp_path_factory.mktemp("webhook")
    name, _, tag = real_cluster.MUSTER.partition(":")
    parts = {
        "components": ["webhook"],
        "images": [{"name": "muster", "newName": name, "newTag": tag}],
    }
    (folder / "webhook").symlink_to(manifests.ROOT / "k8s/components/fuse-webhook")
    (folder / "kustomization.yaml").write_text(json.dumps(parts))
    cluster.good("create", "namespace", NAMESPACE)
    cluster.good("apply", "-f", "-", given=manifests.render(folder))
    cluster.good("-n", NAMESPACE, "rollout", "status", DEPLOYMENT, "--timeout=90s")
    namespace = {
        "apiVersion": "v1",
        "kind": "Namespace",
        "metadata": {
            "name": APPS,
            "labels": {
                "fuse.muster.dev/allowed": "true",
                "pod-security.kubernetes.io/enforce": "restricted",
            },
            "annotations": {"fuse.muster.dev/replace": SMARTER},
        },
    }
    # left by an interrupted run
    gone = ("delete", "namespace", APPS, "--ignore-not-found", "--timeout=60s")
    cluster.good(*gone)
    cluster.good("create", "-f", "-", given=namespace)
    # the API server reads the CA with a delay
    until(lambda: volumes(tried(cluster, pod(asks=True))), "the API server asks the webhook")
    yield cluster
    # delete both namespaces at the same time
    cluster.good("delete", "namespace", APPS, "--wait=false")
    cluster.rest()
    cluster.good("wait", "namespace", APPS, "--for=delete", "--timeout=60s")


@pytest.fixture(autouse=True)
def empty(webhook: Cluster) -> Iterator[None]:
    yield
    webhook.good("-n", APPS, "delete", "deployment,job,pod,event", "--all", "--grace-period=0")


def pod(*, asks: bool = False, name: str = "a", **more: object) -> Tree:
    """Return a pod at the level `restricted`."""
    annotations = {"annotations": {"fuse.muster.dev/mount": "true"}} if asks else {}
    metadata = {"name": name, "namespace": APPS, **annotations}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": metadata,
        "spec": {"containers": [container("main")], **more},
    }


def container(name: str, **more: object) -> Tree:
    held = {**RESTRICTED, "capabilities": {"drop": ["ALL"]}}
    return {"name": name, "image": real_cluster.BUSYBOX, "securityContext": held, **more}


def skypilot(**more: object) -> Tree:
    """Return a container with SkyPilot's resource and capability."""
    return container(
        "ray-node",
        resources={"requests": {SMARTER: "1", "cpu": "10m"}, "limits": {SMARTER: "1"}},
        securityContext={**RESTRICTED, "capabilities": {"drop": ["ALL"], "add": ["SYS_ADMIN"]}},
        **more,
    )


def tried(cluster: Cluster, tree: Tree) -> Tree:
    """Return an object as the API server would create it."""
    answer: Tree = json.loads(
        cluster.good("create", "--dry-run=server", "-o", "json", "-f", "-", given=tree)
    )
    return answer


def volumes(tree: Tree) -> list[Tree]:
    return [volume["csi"] for volume in tree["spec"].get("volumes", ()) if "csi" in volume]


def paths(made: Tree) -> set[str]:
    """Return the paths of a container's mounts, except that of its service account."""
    mounts = {mount["mountPath"] for mount in made["volumeMounts"]}
    return mounts - {"/var/run/secrets/kubernetes.io/serviceaccount"}


def workload(kind: str, template: Tree) -> Tree:
    """Return a Deployment or a Job with this pod spec."""
    labels = {"app": "sky"}
    made: Tree = {"template": {"metadata": {"labels": labels}, "spec": template}}
    if kind == "Deployment":
        made["selector"] = {"matchLabels": labels}
    group = {"Deployment": "apps/v1", "Job": "batch/v1"}[kind]
    metadata = {"name": "sky", "namespace": APPS}
    return {"apiVersion": group, "kind": kind, "metadata": metadata, "spec": made}


def pods(cluster: Cluster) -> list[Tree]:
    return list(cluster.get("pods", "", "-n", APPS, "-l", "app=sky")["items"])


def test_an_annotated_pod_gets_volume_and_mounts_in_each_container(webhook: Cluster) -> None:
    sidecar = container("sidecar", restartPolicy="Always")
    webhook.good(
        "create",
        "-f",
        "-",
        given=pod(asks=True, initContainers=[sidecar, container("init")]),
    )
    made = webhook.get("pod", "a", "-n", APPS)
    assert volumes(made) == [{"driver": "fuse.muster.dev"}]
    each = made["spec"]["initContainers"] + made["spec"]["containers"]
    assert [(made["name"], paths(made)) for made in each] == [
        ("sidecar", MOUNTED),
        ("init", MOUNTED),
        ("main", MOUNTED),
    ]
    assert volumes(tried(webhook, pod(name="b"))) == []


def test_pods_of_a_template_lose_the_resource_and_what_restricted_forbids(
    webhook: Cluster,
) -> None:
    webhook.good("create", "-f", "-", given=workload("Deployment", {"containers": [skypilot()]}))
    (made,) = until(lambda: pods(webhook), "the Deployment has its pod")
    (only,) = made["spec"]["containers"]
    assert only["resources"] == {"requests": {"cpu": "10m"}}
    assert "add" not in only["securityContext"]["capabilities"]
    assert paths(only) == MOUNTED
    record = json.loads(made["metadata"]["annotations"]["fuse.muster.dev/replaced"])
    assert record == {
        "ray-node": {
            "requests": {SMARTER: "1"},
            "limits": {SMARTER: "1"},
            "capabilities": ["SYS_ADMIN"],
        }
    }
    # no node has the resource, so only a pod without it is scheduled
    until(lambda: pods(webhook)[0]["spec"].get("nodeName"), "the pod is scheduled")


def test_a_conflict_is_an_event_about_the_pods_maker_and_a_warning(
    webhook: Cluster, tmp_path: Path
) -> None:
    mine = {"name": "mine", "mountPath": "/dev/fuse"}
    template = {
        "restartPolicy": "Never",
        "containers": [container("main", volumeMounts=[mine], resources={"limits": {SMARTER: 1}})],
        "volumes": [{"name": "mine", "emptyDir": {}}],
    }
    webhook.good("create", "-f", "-", given=workload("Job", template))
    text = "container main: mounts /dev/fuse itself"
    until(lambda: pods(webhook), "the Job has its pod")
    until(lambda: text in webhook.good("-n", APPS, "describe", "job", "sky"), "the Event is there")
    assert volumes(pods(webhook)[0]) == []
    bare = {**pod(name="bare"), "spec": template}
    (tmp_path / "pod.yaml").write_text(yaml.safe_dump(bare))
    dry = webhook.shell("kubectl create --dry-run=server -f pod.yaml 2>&1", tmp_path)
    assert f"Warning: fuse.muster.dev: {text}" in dry
    assert f"Warning: fuse.muster.dev: {text}" in webhook.shell(
        "kubectl create -f pod.yaml 2>&1", tmp_path
    )
    shown = ("-n", APPS, "events", "--for", "pod/bare")
    until(lambda: text in webhook.good(*shown), "the Event is there")
    assert webhook.good(*shown).count("FuseNotMounted") == 1


def test_while_the_webhook_is_down_pods_are_admitted_unchanged(webhook: Cluster) -> None:
    webhook.good("label", "namespace", APPS, "pod-security.kubernetes.io/enforce-")
    webhook.good("-n", NAMESPACE, "scale", DEPLOYMENT, "--replicas=0")
    try:
        until(lambda: not webhook.pods(NAME), "the webhook is gone")
        shown = pod(asks=True, containers=[skypilot()])
        began = time.monotonic()
        until(lambda: not volumes(tried(webhook, shown)), "the last connection has ended")
        assert time.monotonic() - began < 20
        (only,) = tried(webhook, shown)["spec"]["containers"]
        assert only["resources"]["limits"] == {SMARTER: "1"}
        assert only["securityContext"]["capabilities"]["add"] == ["SYS_ADMIN"]
    finally:
        webhook.good("-n", NAMESPACE, "scale", DEPLOYMENT, "--replicas=2")
        webhook.good("-n", NAMESPACE, "rollout", "status", DEPLOYMENT, "--timeout=90s")
        webhook.good("label", "namespace", APPS, "pod-security.kubernetes.io/enforce=restricted")
    # the API server still trusts the webhook's certificate
    until(lambda: volumes(tried(webhook, pod(asks=True))), "the API server asks the webhook")


def test_without_its_replacement_the_same_pod_is_refused(webhook: Cluster) -> None:
    declines = pod(containers=[skypilot()])
    declines["metadata"]["annotations"] = {"fuse.muster.dev/mount": "false"}
    code, output = webhook.ask("create", "-f", "-", given=declines)
    assert code == 1
    assert 'violates PodSecurity "restricted' in output
    assert "SYS_ADMIN" in output


def test_the_webhook_may_do_its_work_and_nothing_else(webhook: Cluster) -> None:
    account = ("--as", f"system:serviceaccount:{NAMESPACE}:{NAME}")
    may = [
        ("get", f"secrets/{NAME}", "-n", NAMESPACE),
        ("patch", f"secrets/{NAME}", "-n", NAMESPACE),
        ("get", f"namespaces/{APPS}"),
        ("create", "events", "-n", APPS),
        ("patch", f"mutatingwebhookconfigurations/{NAME}"),
    ]
    may_not = [
        ("list", "secrets", "-n", NAMESPACE),
        ("get", "secrets/other", "-n", NAMESPACE),
        ("create", "secrets", "-n", NAMESPACE),
        ("list", "namespaces"),
        ("get", "pods", "-n", APPS),
        ("create", "pods", "-n", APPS),
        ("update", f"mutatingwebhookconfigurations/{NAME}"),
        ("patch", "mutatingwebhookconfigurations/other"),
    ]
    answers = {words: webhook.ask("auth", "can-i", *words, *account)[0] == 0 for words in may}
    assert answers == dict.fromkeys(may, True)
    answers = {words: webhook.ask("auth", "can-i", *words, *account)[0] == 0 for words in may_not}
    assert answers == dict.fromkeys(may_not, False)
