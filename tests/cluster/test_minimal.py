"""docs/install.md and docs/upgrade.md followed word for word, with the minimal overlay.

It works; an upgrade and a rollback raise no alert.
"""

import base64
import json
import subprocess
import sys
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

import pytest
import yaml

from scripts.cluster import layout
from tests.worlds import manifests, real_cluster
from tests.worlds.real_cluster import until

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]

FUSE: Final = "smarter-devices/fuse"
NEXT: Final = "localhost/muster:next"
AWAY_MAX_S: Final = 2.0
"""As a rule it is 0: the new pod takes over before the old one ends."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("minimal")


@pytest.fixture(scope="module")
def printed(cluster: real_cluster.Cluster, folder: Path) -> str:
    return cluster.install(folder)


@pytest.fixture
def _next_image(cluster: real_cluster.Cluster) -> Iterator[None]:
    if Path(cluster.kubeconfig) != layout.KUBECONFIG:
        pytest.skip("only the cluster of make cluster can be given a second image")
    images = [sys.executable, "-m", "scripts.cluster", "run", "--", "ctr"]
    images += ["--address", str(layout.CONTAINERD), "--namespace", "k8s.io", "images"]
    tag = [*images, "tag", "--force", real_cluster.MUSTER, NEXT]
    subprocess.run(tag, check=True, cwd=manifests.ROOT, capture_output=True)
    yield
    subprocess.run([*images, "rm", NEXT], check=True, cwd=manifests.ROOT, capture_output=True)


def test_the_last_command_shows_the_devices(cluster: real_cluster.Cluster, printed: str) -> None:
    assert printed.splitlines()[-1].split() == [cluster.node, "20"]


def test_a_pod_that_asks_for_the_device_has_it(cluster: real_cluster.Cluster, printed: str) -> None:
    assert printed
    assert cluster.run_pod({FUSE: "1"}, "ls /dev/fuse") == "/dev/fuse\n"


WRITES = """
import os
for folder in ("/dev", "/dev/shm", "/dev/mqueue", "/dev/hugepages", "/dev/pts"):
    try:
        with open(f"{folder}/muster-test", "w") as file:
            file.write("x")
    except FileNotFoundError:
        print(folder, "is not there")
    except OSError as error:
        print(folder, error.strerror)
    else:
        print(folder, "written")
        os.unlink(f"{folder}/muster-test")
print(os.listdir("/dev/shm"), os.listdir("/dev/pts"))
"""


def test_the_plugin_cannot_write_below_the_nodes_dev(
    cluster: real_cluster.Cluster, printed: str
) -> None:
    assert printed
    where = ("-n", "muster", "exec", "-i", "daemonset/muster-plugin", "--")
    output = cluster.good(*where, "/opt/venv/bin/python", "-", given=WRITES)
    *refused, seen = output.splitlines()
    assert refused == [
        "/dev Read-only file system",
        "/dev/shm Read-only file system",
        "/dev/mqueue Read-only file system",
        "/dev/hugepages is not there",
        "/dev/pts Read-only file system",
    ]
    assert seen == "[] []"
    (plugin,) = cluster.pods("muster-plugin")
    (status,) = plugin["status"]["containerStatuses"]
    modes = {mount["mountPath"]: mount.get("recursiveReadOnly") for mount in status["volumeMounts"]}
    assert modes["/dev"] == "Enabled"
    assert "RUN003" not in cluster.muster("check", "muster")


def _images(cluster: real_cluster.Cluster) -> set[str]:
    parts = ("health", "labeler", "notifier", "plugin")
    return {
        pod["spec"]["containers"][0]["image"]
        for part in parts
        for pod in cluster.pods(f"muster-{part}")
    }


def _alerts(cluster: real_cluster.Cluster, since: datetime) -> tuple[list[str], int]:
    """Return the alerts on the bus since then, and how many events there were."""
    secret = cluster.get("secret", "muster-nats-reader", "-n", "muster")
    password = base64.b64decode(secret["data"]["password"]).decode()
    (server,) = cluster.pods("muster-nats")
    url = f"nats://reader:{password}@{server['status']['podIP']}:4222"
    options = ("--since", since.isoformat(), "--no-follow", "--json", "--url", url)
    lines = [json.loads(line) for line in cluster.muster("events", *options).splitlines()]
    kinds = [str(line["type"]) for line in lines]
    return [kind for kind in kinds if "alert" in kind], len(kinds)


def _carry_out(cluster: real_cluster.Cluster, folder: Path, phrase: str) -> float:
    """Carry out the commands of the page; return for how long the node offered nothing."""
    began = datetime.now(UTC)
    with cluster.offered(FUSE) as offered:
        commands = real_cluster.block("upgrade.md", phrase).replace("-k DIR", "-k my-muster")
        cluster.shell(commands, folder)
        until(lambda: cluster.allocatable(FUSE) not in {"", "0"}, "the devices are back")
        away_s = offered.away_s()
    alerts, events = _alerts(cluster, began)
    assert (alerts, events > 0) == ([], True)
    return away_s


@pytest.mark.usefixtures("_next_image", "printed")
def test_an_upgrade_and_a_rollback_leave_no_gap_and_raise_no_alert(
    cluster: real_cluster.Cluster, folder: Path
) -> None:
    file = folder / "my-muster/kustomization.yaml"
    before = file.read_text()
    after = yaml.safe_load(before)
    after["images"][0]["newTag"] = "next"
    after["configMapGenerator"] = [
        {"name": "muster-labeler-settings", "namespace": "muster", "behavior": "merge",
         "literals": ['labeler.yaml=mode: "off"']}
    ]  # fmt: skip
    file.write_text(yaml.safe_dump(after))
    up_s = _carry_out(cluster, folder, "in (muster-notifier, muster-labeler)")
    assert _images(cluster) == {NEXT}
    file.write_text(before)
    down_s = _carry_out(cluster, folder, "kubectl -n muster rollout status deployment\n")
    assert _images(cluster) == {real_cluster.MUSTER}
    print(f"without the device: upgrade {up_s:.1f} s, rollback {down_s:.1f} s")  # noqa: T201
    assert max(up_s, down_s) < AWAY_MAX_S
