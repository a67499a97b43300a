"""docs/upgrade.md followed word for word: an upgrade and a rollback, without an alert."""

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
def installed(
    cluster: real_cluster.Cluster, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[real_cluster.Cluster, Path]]:
    if Path(cluster.kubeconfig) != layout.KUBECONFIG:
        pytest.skip("only the cluster of make cluster can be given a second image")
    folder = tmp_path_factory.mktemp("upgrade")
    images = [sys.executable, "-m", "scripts.cluster", "run", "--", "ctr"]
    images += ["--address", str(layout.CONTAINERD), "--namespace", "k8s.io", "images"]
    tag = [*images, "tag", "--force", real_cluster.MUSTER, NEXT]
    subprocess.run(tag, check=True, cwd=manifests.ROOT, capture_output=True)
    cluster.install(folder)
    yield cluster, folder
    cluster.rest()
    subprocess.run([*images, "rm", NEXT], check=True, cwd=manifests.ROOT, capture_output=True)


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


def test_upgrade_and_rollback(installed: tuple[real_cluster.Cluster, Path]) -> None:
    cluster, folder = installed
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
