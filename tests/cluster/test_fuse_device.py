"""/dev/fuse by annotation (NRI) and by resource (DRA), on a real kubelet and container runtime."""

import json
from collections.abc import Iterator, Mapping
from typing import Any, Final

import pytest

from tests.worlds import manifests
from tests.worlds.real_cluster import BUSYBOX, MUSTER, NAMESPACE, Cluster, until

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]

APPS: Final = "muster-test-fuse-device"
ALLOWED: Final = "fuse.muster.dev/device-allowed=true"
ANNOTATED: Final = {"fuse.muster.dev/device": "true"}
RESOURCE: Final = {"muster.dev/fuse": "1"}
ABSENT: Final = "dd: can't open '/dev/fuse': No such file or directory"
SINCE: Final = 36
WAYS: Final = ("fuse-nri", "fuse-dra")


@pytest.fixture(scope="module")
def apps(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Yield a cluster with only the two components, and a namespace that may use the device."""
    version = json.loads(cluster.good("get", "--raw", "/version"))
    if int(version["minor"]) < SINCE:
        pytest.skip(f"Kubernetes 1.{version['minor']} has no resources of DRA; 1.{SINCE} has")
    folder = tmp_path_factory.mktemp("device")
    name, _, tag = MUSTER.partition(":")
    images = [{"name": "muster", "newName": name, "newTag": tag}]
    for way in WAYS:
        (folder / way).symlink_to(manifests.ROOT / "k8s/components" / way)
    parts = {"components": list(WAYS), "images": images}
    (folder / "kustomization.yaml").write_text(json.dumps(parts))
    rendered = manifests.render(folder)
    cluster.good("create", "namespace", NAMESPACE)
    cluster.good("apply", "-f", "-", given=rendered)
    for way in WAYS:
        ready(cluster, way)
    cluster.good("create", "namespace", APPS)
    cluster.good("label", "namespace", APPS, ALLOWED)
    yield cluster
    cluster.good("delete", "namespace", APPS, "--timeout=120s")
    cluster.good("delete", "-f", "-", "--ignore-not-found", given=rendered)


def ready(cluster: Cluster, way: str) -> None:
    status = ("rollout", "status", f"daemonset/muster-{way}", "--timeout=90s")
    cluster.good("-n", NAMESPACE, *status)


def pod(
    name: str,
    *,
    annotations: Mapping[str, str] | None = None,
    limits: Mapping[str, str] | None = None,
    is_checked: bool = False,
    namespace: str = APPS,
) -> dict[str, Any]:
    sleeping = {"image": BUSYBOX, "command": ["sleep", "100000"]}
    check = {"name": "fuse", "image": MUSTER, "args": ["muster_fuse.nri.device_check"]}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "namespace": namespace, "annotations": dict(annotations or {})},
        "spec": {
            "terminationGracePeriodSeconds": 0,
            "initContainers": [check] if is_checked else [],
            "containers": [
                {**sleeping, "name": "main", "resources": {"limits": dict(limits or {})}},
                {**sleeping, "name": "other"},
            ],
        },
    }


def started(cluster: Cluster, made: dict[str, Any]) -> None:
    cluster.good("create", "-f", "-", given=made)
    runs(cluster, made["metadata"]["name"])


def runs(cluster: Cluster, name: str) -> None:
    ready_ = ("--for=condition=Ready", "--timeout=120s")
    cluster.good("-n", APPS, "wait", f"pod/{name}", *ready_)


def opened(cluster: Cluster, name: str, container: str = "main") -> str:
    """Return why a container cannot open the device; empty if it can."""
    command = ("exec", name, "-c", container, "--", "dd", "if=/dev/fuse", "count=0")
    code, output = cluster.ask("-n", APPS, *command)
    return "" if code == 0 else output.splitlines()[0]


def moved(cluster: Cluster, way: str, *, here: bool) -> None:
    """Remove a component's pods from the nodes, or start them again."""
    selector = {"muster.dev/nowhere": None if here else "true"}
    patch = {"spec": {"template": {"spec": {"nodeSelector": selector}}}}
    cluster.good("-n", NAMESPACE, "patch", "daemonset", f"muster-{way}", "-p", json.dumps(patch))
    if here:
        ready(cluster, way)
    else:
        until(lambda: not cluster.pods(f"muster-{way}"), "its pods end")


@pytest.mark.parametrize(
    "made",
    [
        pod("refused", namespace="default", annotations=ANNOTATED),
        pod("refused", namespace="default", limits=RESOURCE),
    ],
)
def test_a_namespace_without_the_label_is_refused(apps: Cluster, made: dict[str, Any]) -> None:
    code, output = apps.ask("create", "-f", "-", given=made)
    assert (code, "the namespace has no label fuse.muster.dev/device-allowed=true" in output) == (
        1,
        True,
    )


def test_an_annotated_pod_has_the_device_and_another_has_not(apps: Cluster) -> None:
    started(apps, pod("annotated", annotations=ANNOTATED, is_checked=True))
    started(apps, pod("plain"))
    assert (opened(apps, "annotated"), opened(apps, "plain")) == ("", ABSENT)


def test_the_check_holds_a_pod_back_until_the_plugin_is_there(apps: Cluster) -> None:
    moved(apps, "fuse-nri", here=False)
    apps.good("create", "-f", "-", given=pod("early", annotations=ANNOTATED, is_checked=True))
    logs = ("-n", APPS, "logs", "early", "-c", "fuse")
    until(lambda: "the runtime gave this container no device" in apps.ask(*logs)[1], "it fails")
    moved(apps, "fuse-nri", here=True)
    runs(apps, "early")
    assert opened(apps, "early") == ""


def test_pods_share_the_device_of_the_resource_and_only_who_requests_it_has_it(
    apps: Cluster,
) -> None:
    for name in ("first", "second"):
        started(apps, pod(name, limits=RESOURCE))
    assert [opened(apps, "first"), opened(apps, "second")] == ["", ""]
    assert opened(apps, "first", "other") == ABSENT


def test_a_pod_waits_for_the_driver_with_an_event_and_starts_when_it_is_back(
    apps: Cluster,
) -> None:
    moved(apps, "fuse-dra", here=False)
    apps.good("create", "-f", "-", given=pod("waiting", limits=RESOURCE))
    events = ("-n", APPS, "get", "events", "--field-selector=involvedObject.name=waiting")
    missing = "DRA driver device.fuse.muster.dev is not registered"
    until(lambda: missing in apps.good(*events), "the kubelet says so")
    moved(apps, "fuse-dra", here=True)
    runs(apps, "waiting")
    assert opened(apps, "waiting") == ""


def test_a_template_that_would_stop_the_autoscaler_is_refused(apps: Cluster) -> None:
    request = {"name": "fuse", "exactly": {"deviceClassName": "fuse.muster.dev"}}
    template = {
        "apiVersion": "resource.k8s.io/v1",
        "kind": "ResourceClaimTemplate",
        "metadata": {"name": "fuse", "namespace": APPS},
        "spec": {"spec": {"devices": {"requests": [request]}}},
    }
    code, output = apps.ask("create", "-f", "-", given=template)
    assert (code, "a template must not claim fuse.muster.dev" in output) == (1, True)
