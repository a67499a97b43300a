"""A rollout of the plugin: the node offers its devices all the time, and nobody is alarmed."""

import json
from collections.abc import Iterator

import pytest

from tests.worlds import cluster_faults
from tests.worlds.cluster_faults import Muster
from tests.worlds.real_cluster import Cluster, until

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]

FUSE = "smarter-devices/fuse"
PLUGINS = ("-n", "muster", "-l", "app.kubernetes.io/name=muster-plugin")


@pytest.fixture(scope="module")
def muster(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Muster]:
    for installed in cluster_faults.installed(cluster, tmp_path_factory.mktemp("rollout")):
        installed.until_healthy()
        yield installed


def test_a_rollout_leaves_no_gap_and_raises_no_alert(muster: Muster) -> None:
    (before,) = muster.cluster.get("pods", "", *PLUGINS)["items"]
    with muster.cluster.offered(FUSE) as offered:
        muster.cluster.good("-n", "muster", "rollout", "restart", "daemonset/muster-plugin")
        muster.cluster.good(
            "-n", "muster", "rollout", "status", "daemonset/muster-plugin", "--timeout=90s"
        )
        gone = before["metadata"]["name"]
        muster.cluster.good("-n", "muster", "wait", "--for=delete", f"pod/{gone}", "--timeout=60s")
        # the node's status of the time after it
        written = len(offered.seen)
        until(lambda: len(offered.seen) > written + 2, "the kubelet has written the node's status")
    assert offered.amounts == {"20"}
    (after,) = muster.cluster.get("pods", "", *PLUGINS)["items"]
    assert after["metadata"]["name"] != gone
    log = muster.cluster.good("-n", "muster", "logs", after["metadata"]["name"])
    events = [json.loads(line)["event"] for line in log.splitlines()]
    assert [event for event in events if event.startswith("handover")] == [
        "handover_started",
        "handover_finished",
    ]
    muster.until_healthy()
    assert muster.webhook.taken == []


def test_a_pod_that_cannot_start_leaves_the_old_one_in_place(muster: Muster) -> None:
    (before,) = muster.cluster.get("pods", "", *PLUGINS)["items"]
    broken = [
        {"op": "add", "path": "/spec/template/spec/containers/0/args/-", "value": "--nonsense"}
    ]
    with muster.cluster.offered(FUSE) as offered:
        muster.cluster.good(
            "-n",
            "muster",
            "patch",
            "daemonset/muster-plugin",
            "--type=json",
            "-p",
            json.dumps(broken),
        )
        until(
            lambda: any(
                status["restartCount"] >= 2
                for pod in muster.cluster.get("pods", "", *PLUGINS)["items"]
                for status in pod["status"].get("containerStatuses", [])
            ),
            "the new pod has failed twice",
        )
        muster.cluster.good("-n", "muster", "rollout", "undo", "daemonset/muster-plugin")
        muster.cluster.good(
            "-n", "muster", "rollout", "status", "daemonset/muster-plugin", "--timeout=90s"
        )
    assert offered.amounts == {"20"}
    until(
        lambda: len(muster.cluster.get("pods", "", *PLUGINS)["items"]) == 1,
        "the broken pod is gone",
    )
    (after,) = muster.cluster.get("pods", "", *PLUGINS)["items"]
    assert after["metadata"]["uid"] == before["metadata"]["uid"]
