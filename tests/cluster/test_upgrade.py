"""docs/upgrade.md followed word for word, from the previous version to this one and back.

Meanwhile one pod holds a device, and short-lived pods get one, one after the other.
"""

import base64
import contextlib
import itertools
import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

import pytest

from scripts.cluster import images, layout
from tests.worlds import cluster_faults, manifests, real_cluster
from tests.worlds.real_cluster import until

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]

FUSE: Final = "smarter-devices/fuse"
OFFERED: Final = 20
FEWER_MAX_S: Final = 30.0
"""The limit; usually it is 0 s, because the new pod takes over before the old one ends."""
OPENS_IT: Final = "while true <>/dev/fuse; do sleep 1; done"
CHECKPOINT: Final = layout.KUBELET / "device-plugins/kubelet_internal_checkpoint"


def _pod(name: str, script: str) -> dict[str, Any]:
    container = {
        "name": "main",
        "image": real_cluster.BUSYBOX,
        "command": ["sh", "-c", script],
        "resources": {"limits": {FUSE: "1"}},
    }
    spec = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": 1,
        "containers": [container],
    }
    metadata = {"name": name, "namespace": "default"}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}


@pytest.fixture(scope="module")
def folder(
    cluster: real_cluster.Cluster, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Path]:
    """Install the previous version, and a pod that holds a device; yield the user's folder."""
    if Path(cluster.kubeconfig) != layout.KUBECONFIG:
        pytest.skip("only the cluster of make cluster can be given a second image")
    folder = tmp_path_factory.mktemp("upgrade")
    (folder / "previous").mkdir()
    try:
        images.unpack(images.PREVIOUS_COMMIT, folder / "previous")
    except layout.Refused as refused:
        pytest.skip(f"the version before is not in this clone: {refused}")
    build = [sys.executable, "-m", "scripts.cluster", "previous"]
    subprocess.run(build, check=True, cwd=manifests.ROOT)
    cluster.prepare(folder)
    _choose(folder, folder / "previous", images.PREVIOUS)
    cluster.shell(real_cluster.passwords(), folder)
    cluster.shell(real_cluster.block("install.md", "kubectl apply -k my-muster"), folder)
    cluster.good("create", "-f", "-", given=_pod("holder", OPENS_IT))
    cluster.good("wait", "pod", "holder", "--for=condition=Ready", "--timeout=60s")
    yield folder
    cluster.good("delete", "pod", "--all", "-n", "default")


def _choose(folder: Path, tree: Path, image: str) -> None:
    """Make the user's folder refer to a version's manifests and image."""
    (folder / "muster").unlink()
    (folder / "muster").symlink_to(tree)
    file = folder / "my-muster/kustomization.yaml"
    name, _, tag = image.partition(":")
    lines = [line for line in file.read_text().splitlines() if not line.startswith("images:")]
    chosen = f"images: [{{name: muster, newName: {name}, newTag: {tag}}}]"
    file.write_text("\n".join([*lines, chosen, ""]))


@contextlib.contextmanager
def _traffic(cluster: real_cluster.Cluster) -> Iterator[list[str]]:
    """Run pods with a device, one after the other, until the block ends; yield how they ended."""
    ended: list[str] = []
    over = threading.Event()

    def run() -> None:
        for number in itertools.count():
            if over.is_set():
                return
            name = f"traffic-{number}"
            cluster.ask("create", "-f", "-", given=_pod(name, "true <>/dev/fuse"))
            phase = "--for=jsonpath={.status.phase}=Succeeded"
            cluster.ask("wait", "pod", name, phase, "--timeout=60s")
            status = cluster.get("pod", name)["status"]
            ended.append(f"{status['phase']} {status.get('reason', '')}".strip())
            cluster.ask("delete", "pod", name, "--wait=false")

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield ended
    finally:
        over.set()
        thread.join()


def _held(cluster: real_cluster.Cluster) -> dict[str, Any]:
    """Return the uid of the pod that holds a device, its devices, and its container's state."""
    pod = cluster.get("pod", "holder")
    entries = json.loads(CHECKPOINT.read_text())["Data"]["PodDeviceEntries"] or []
    uid = pod["metadata"]["uid"]
    given = [entry["DeviceIDs"] for entry in entries if entry["PodUID"] == uid]
    return {"uid": uid, "given": given, **pod["status"]["containerStatuses"][0]["state"]}


def _images(cluster: real_cluster.Cluster) -> set[str]:
    parts = ("gate", "health", "labeler", "notifier", "plugin")
    return {
        pod["spec"]["containers"][0]["image"]
        for part in parts
        for pod in cluster.pods(f"muster-{part}")
    }


def _alerts(cluster: real_cluster.Cluster, since: datetime) -> tuple[list[str], int]:
    """Return the types of the alert events since a time, and the number of all events."""
    # as administrator: readers of this version cannot read from the previous one
    secret = cluster.get("secret", "muster-nats-admin", "-n", "muster")
    password = base64.b64decode(secret["data"]["password"]).decode()
    (server,) = cluster.pods("muster-nats")
    url = f"nats://admin:{password}@{server['status']['podIP']}:4222"
    options = ("--since", since.isoformat(), "--no-follow", "--json", "--url", url)
    lines = [json.loads(line) for line in cluster.muster("events", *options).splitlines()]
    kinds = [str(line["type"]) for line in lines]
    return [kind for kind in kinds if "alert" in kind], len(kinds)


def _of_page(phrase: str) -> str:
    return real_cluster.block("upgrade.md", phrase).replace("-k DIR", "-k my-muster")


def _carry_out(cluster: real_cluster.Cluster, folder: Path, commands: str) -> str:
    """Run commands while pods use devices; return a summary of the effects."""
    began = time.monotonic()
    cluster_faults.Muster.of(cluster).until_healthy()
    since, held = datetime.now(UTC), _held(cluster)
    assert held["given"]
    with cluster.offered(FUSE) as offered, _traffic(cluster) as ended:
        cluster.shell(commands, folder)
        until(lambda: cluster.allocatable(FUSE) == str(OFFERED), "all devices are offered")
        cluster_faults.Muster.of(cluster).until_healthy()
        # wait for one more pod that starts and ends with the version that runs now
        pods = len(ended)
        until(lambda: len(ended) > pods + 1, "a pod has come and gone")
        fewer_s = offered.fewer_s(OFFERED)
    assert set(ended) == {"Succeeded"}
    assert _held(cluster) == held
    alerts, events = _alerts(cluster, since)
    assert (alerts, events > 0) == ([], True)
    assert fewer_s < FEWER_MAX_S
    took_s = time.monotonic() - began
    return f"{took_s:.0f} s, fewer devices for {fewer_s:.1f} s, {len(ended)} pods came and went"


def test_an_upgrade_and_a_rollback_lose_no_device_and_raise_no_alert(
    cluster: real_cluster.Cluster, folder: Path, say: Callable[[str], None]
) -> None:
    assert _images(cluster) == {images.PREVIOUS}
    _choose(folder, manifests.ROOT, images.MUSTER)
    upgrade = _carry_out(
        cluster, folder, _of_page("in (muster-notifier, muster-labeler, muster-console)")
    )
    assert _images(cluster) == {images.MUSTER}
    _choose(folder, folder / "previous", images.PREVIOUS)
    rollback = _carry_out(
        cluster, folder, _of_page("kubectl -n muster rollout status deployment\n")
    )
    assert _images(cluster) == {images.PREVIOUS}
    say(f"upgrade: {upgrade}; rollback: {rollback}")
