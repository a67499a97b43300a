"""Which pods need more than the Pod Security level `restricted`; docs/ explains each need."""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

import pytest

from tests.worlds import manifests

SECTION: Final = (manifests.ROOT / "docs/install.md").read_text("utf-8")
VOLUMES: Final = {
    *("configMap", "csi", "downwardAPI", "emptyDir", "ephemeral"),
    *("persistentVolumeClaim", "projected", "secret"),
}
SELINUX: Final = {"", "container_t", "container_init_t", "container_kvm_t", "container_engine_t"}


def exceptions(overlay: str) -> set[str]:
    """Return what the level `restricted` refuses in each workload (Pod Security Standards)."""
    return _refused(manifests.pods(overlay))


def _refused(pods: Mapping[str, manifests.Object]) -> set[str]:
    return {
        f"{name}: {what}"
        for name, pod in pods.items()
        for what in [*_of_pod(pod), *_of_containers(pod)]
    }


def _of_pod(pod: manifests.Object) -> Iterator[str]:
    yield from (key for key in ("hostNetwork", "hostPID", "hostIPC") if pod.get(key))
    for volume in pod.get("volumes", []):
        (kind,) = volume.keys() - {"name"}
        if kind == "hostPath":
            yield f"hostPath {volume[kind]['path']}"
        elif kind not in VOLUMES:
            yield kind


def _of_containers(pod: manifests.Object) -> Iterator[str]:
    for container in [*pod.get("initContainers", []), *pod["containers"]]:
        held = {**pod.get("securityContext", {}), **container.get("securityContext", {})}
        if any("hostPort" in port for port in container.get("ports", [])):
            yield "hostPort"
        if held.get("privileged"):
            yield "privileged"
        if held.get("allowPrivilegeEscalation") is not False:
            yield "allowPrivilegeEscalation"
        capabilities = held.get("capabilities", {})
        if "ALL" not in capabilities.get("drop", []):
            yield "capabilities"
        yield from (f"capability {capability}" for capability in capabilities.get("add", []))
        if held.get("seccompProfile", {}).get("type") not in {"RuntimeDefault", "Localhost"}:
            yield "seccomp"
        if held.get("runAsNonRoot") is not True or held.get("runAsUser") == 0:
            yield "runAsUser 0"
        selinux = held.get("seLinuxOptions", {})
        if selinux.get("type", "") not in SELINUX or selinux.keys() & {"user", "role"}:
            yield f"seLinuxOptions {selinux['type']}"
        yield from ("procMount" for _ in [0] if held.get("procMount", "Default") != "Default")


def explained() -> dict[str, str]:
    """Return the exceptions of the page's table, with their reasons."""
    rows = re.findall(r"^\| `(muster-[a-z-]+: [^`]+)`[^|]*\| ([^|]+) \|$", SECTION, re.MULTILINE)
    return dict(rows)


def test_every_exception_is_explained_and_no_other_is_said(tmp_path: Path) -> None:
    needed = {exception for overlay in manifests.OVERLAYS for exception in exceptions(overlay)}
    parts = ("fuse-broker", "fuse-nri", "fuse-dra", "keys")
    with_fuse = manifests.with_component("minimal", *parts, where=tmp_path)
    seeing = manifests.with_component("watch", "watch-processes", "watch-drivers", where=tmp_path)
    shown = manifests.with_component("minimal", "console", where=tmp_path)
    for installed in (with_fuse, seeing, shown):
        needed |= _refused(
            {
                o["metadata"]["name"]: o["spec"]["template"]["spec"]
                for o in installed
                if "template" in o.get("spec", {})
            }
        )
    assert needed == explained().keys()
    assert all(len(reason) > len("because") for reason in explained().values())


@pytest.mark.parametrize("overlay", ["minimal", "fuse", "production", "watch"])
def test_only_the_plugin_is_an_exception_and_by_these_alone(overlay: str) -> None:
    assert exceptions(overlay) == {
        "muster-plugin: runAsUser 0",
        "muster-plugin: hostPath /dev",
        "muster-plugin: hostPath /var/lib/kubelet/device-plugins",
        "muster-plugin: hostPath /var/lib/kubelet/plugins_registry",
        "muster-plugin: hostPath /var/lib/kubelet/pod-resources",
    }


@pytest.mark.parametrize("overlay", manifests.OVERLAYS)
def test_the_plugin_writes_nowhere_in_dev_and_sees_no_terminal_or_shared_memory(
    overlay: str,
) -> None:
    pod = manifests.pods(overlay)["muster-plugin"]
    (container,) = pod["containers"]
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    mounts = {
        mount["mountPath"]: mount
        for mount in container["volumeMounts"]
        if mount["mountPath"].startswith("/dev")
    }
    assert mounts.keys() == {"/dev", "/dev/pts", "/dev/shm"}
    assert all(mount["readOnly"] for mount in mounts.values())
    assert mounts["/dev"]["recursiveReadOnly"] == "IfPossible"
    # also if the runtime cannot do that, the node's /dev/shm is not visible
    assert all("emptyDir" in volumes[mounts[f"/dev/{name}"]["name"]] for name in ("pts", "shm"))


@pytest.mark.parametrize("overlay", manifests.OVERLAYS)
def test_the_namespace_says_what_it_must_allow_and_warns_of_the_rest(overlay: str) -> None:
    labels = manifests.only(overlay, "Namespace", "muster")["metadata"]["labels"]
    level = "pod-security.kubernetes.io/"
    levels = {key.removeprefix(level): value for key, value in labels.items() if level in key}
    assert levels == {"enforce": "privileged", "audit": "restricted", "warn": "restricted"}


@pytest.mark.parametrize("overlay", manifests.OVERLAYS)
def test_nobody_is_reached_but_by_a_rule(overlay: str) -> None:
    closed = manifests.only(overlay, "NetworkPolicy", "muster-closed")["spec"]
    assert closed == {"podSelector": {}, "policyTypes": ["Ingress"]}
    plugin = manifests.only(overlay, "NetworkPolicy", "muster-plugin")["spec"]
    assert plugin["policyTypes"] == ["Egress"]
    ports = [port["port"] for rule in plugin["egress"] for port in rule["ports"]]
    assert ports == [4222, 53, 53]


@pytest.mark.parametrize("overlay", manifests.OVERLAYS)
def test_what_there_is_two_of_is_spread_and_never_evicted_at_once(overlay: str) -> None:
    for workload in manifests.objects(overlay):
        name = workload["metadata"]["name"]
        if (
            workload["kind"] not in {"Deployment", "StatefulSet"}
            or workload["spec"]["replicas"] == 1
        ):
            continue
        own = {"matchLabels": {"app.kubernetes.io/name": name}}
        pod = workload["spec"]["template"]["spec"]
        spread = [rule["labelSelector"] for rule in pod.get("topologySpreadConstraints", [])]
        apart = pod.get("affinity", {}).get("podAntiAffinity", {})
        wanted = apart.get("requiredDuringSchedulingIgnoredDuringExecution", [])
        assert own in [*spread, *(rule["labelSelector"] for rule in wanted)], name
        budget = manifests.only(overlay, "PodDisruptionBudget", name)["spec"]
        assert budget == {"maxUnavailable": 1, "selector": own}


@pytest.mark.parametrize("overlay", manifests.OVERLAYS)
def test_there_are_two_of_every_service_and_an_update_leaves_one(overlay: str) -> None:
    deployments = [
        manifest["spec"]
        for manifest in manifests.objects(overlay)
        if manifest["kind"] == "Deployment"
    ]
    assert len(deployments) == 4
    for spec in deployments:
        assert spec["replicas"] == 2
        assert spec["strategy"]["type"] == "RollingUpdate"
        assert spec["strategy"]["rollingUpdate"]["maxUnavailable"] < spec["replicas"]


@pytest.mark.parametrize("overlay", manifests.OVERLAYS)
def test_every_pod_is_critical_says_what_it_needs_and_has_room(overlay: str) -> None:
    for name, pod in manifests.pods(overlay).items():
        class_ = "system-node-critical" if name == "muster-plugin" else "system-cluster-critical"
        assert pod["priorityClassName"] == class_, name
        for container in pod["containers"]:
            needs = container["resources"]
            request, limit = (_mib(needs[kind]["memory"]) for kind in ("requests", "limits"))
            # no tight limit: killing a process for its memory removes devices or their monitoring
            assert limit >= 4 * request, name
            assert "cpu" not in needs["limits"], name
            assert container["livenessProbe"], name
            assert container["readinessProbe"], name


def _mib(quantity: str) -> int:
    number, unit = re.fullmatch(r"(\d+)(Mi|Gi)", quantity).groups()  # type: ignore[union-attr]
    return int(number) * {"Mi": 1, "Gi": 1024}[unit]
