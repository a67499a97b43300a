"""Faults on a real node: each has the right verdict, and the webhook is notified.

A rollout is no fault: the node offers its devices all the time, and no alert fires.
"""

import json
import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.worlds import cluster_faults, real_cluster
from tests.worlds.cluster_faults import Muster
from tests.worlds.real_cluster import until

FUSE = "smarter-devices/fuse"
PLUGINS = ("-n", "muster", "-l", "app.kubernetes.io/name=muster-plugin")

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def muster(
    cluster: real_cluster.Cluster, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Muster]:
    yield from cluster_faults.installed(cluster, tmp_path_factory.mktemp("faults"))


@pytest.fixture(autouse=True)
def _healthy_before(muster: Muster) -> None:
    muster.until_healthy()


def alerts(muster: Muster, since: float) -> list[dict[str, Any]]:
    """Return the alerts of which the webhook was notified since a monotonic time."""
    return [each.alert for each in muster.webhook.taken if each.at >= since]


def test_a_rollout_leaves_no_gap_and_raises_no_alert(muster: Muster) -> None:
    began = time.monotonic()
    (before,) = muster.cluster.get("pods", "", *PLUGINS)["items"]
    with muster.cluster.offered(FUSE) as offered:
        muster.cluster.good("-n", "muster", "rollout", "restart", "daemonset/muster-plugin")
        muster.cluster.good(
            "-n", "muster", "rollout", "status", "daemonset/muster-plugin", "--timeout=90s"
        )
        gone = before["metadata"]["name"]
        muster.cluster.good("-n", "muster", "wait", "--for=delete", f"pod/{gone}", "--timeout=60s")
        # statuses of the node that were written after the end of the old pod
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
    assert alerts(muster, began) == []


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


def test_a_dead_kubelet_is_named_and_not_its_plugin(muster: Muster) -> None:
    began = time.monotonic()
    with cluster_faults.without_kubelet():
        shown = muster.until_verdict("DEREGISTERED", within_s=60.0)
        alert = muster.until_notified("deregistered", "firing", since=began, within_s=10.0).alert
    assert shown["rule"] == "reports_kubelet_away_and_lease_stale"
    node = muster.cluster.node
    assert alert["summary"] == (
        f"the kubelet on {node} is not running; device-plugin cannot register: smarter-devices/fuse"
    )
    assert alert["advice"].startswith("start the kubelet on the node: systemctl status kubelet")
    assert alert["evidence"][0]["observed"].startswith("the kubelet renewed the node's lease ")
    assert "kubelet.sock" in alert["evidence"][-1]["observed"]
    muster.until_notified("deregistered", "resolved", since=began, within_s=60.0)


def delete_pod(muster: Muster) -> None:
    muster.cluster.good("delete", "pod", *PLUGINS)
    muster.cluster.good("-n", "muster", "rollout", "status", "daemonset/muster-plugin")


def restart_kubelet(muster: Muster) -> None:
    before = muster.cluster.posted()
    cluster_faults.kubelet("restart")
    until(lambda: muster.cluster.posted() > before, "the kubelet posts the node's status")


def remove_sockets(muster: Muster) -> None:
    removed = cluster_faults.remove_sockets()
    assert removed
    until(
        lambda: cluster_faults.sockets() - removed,
        f"{muster.cluster.node} has a new socket of the plugin",
    )


@pytest.mark.parametrize("fault", [delete_pod, restart_kubelet, remove_sockets])
def test_what_the_plugin_repairs_itself_alerts_nobody(
    muster: Muster, fault: Callable[[Muster], None]
) -> None:
    began = time.monotonic()
    fault(muster)
    until(lambda: muster.cluster.allocatable(FUSE) == "20", "the node offers the devices")
    muster.until_healthy()
    assert alerts(muster, began) == []


def test_the_loss_of_nats_is_notified_once_without_it_and_its_return_once(muster: Muster) -> None:
    began = time.monotonic()
    with cluster_faults.without_nats(muster.cluster):
        fired = muster.until_notified("health_silent", "firing", since=began, within_s=60.0)
    muster.until_notified("health_silent", "resolved", since=began, within_s=60.0)
    muster.until_healthy()
    assert fired.alert["summary"].startswith("NATS cannot be used")
    assert [(alert["kind"], alert["state"]) for alert in alerts(muster, began)] == [
        ("health_silent", "firing"),
        ("health_silent", "resolved"),
    ]


def test_after_an_outage_of_the_api_everything_is_read_again_within_ten_seconds(
    muster: Muster,
) -> None:
    with cluster_faults.without_api(muster.cluster):
        muster.until_unread({"nodes"}, within_s=10.0)
        # longer than the first delays between attempts, which double
        time.sleep(20.0)
    muster.until_unread((), within_s=10.0)


# near the end, because the controllers are slow for half a minute after it
def test_a_hung_api_is_noticed_within_thirty_seconds_and_its_return_within_ten(
    muster: Muster,
) -> None:
    unread = {"API", "nodes", "daemonset of device-plugin", "pods of device-plugin"}
    with cluster_faults.with_hung_api():
        muster.until_unread(unread, within_s=30.0)
    muster.until_unread((), within_s=10.0)


# at the end, because flap damping then delays the plugin's recovery by minutes
def test_a_plugin_that_fails_often_still_has_the_verdict_of_what_is_wrong_now(
    muster: Muster,
) -> None:
    for _ in range(3):
        began = time.monotonic()
        cluster_faults.crash_plugin(muster)
        muster.until_plugin(
            lambda shown: shown["state"] in {"recovering", "healthy"},
            "the plugin is back",
            within_s=90.0,
        )
    assert muster.plugin()["flapping"]
    notified = muster.until_notified("plugin_down", "firing", since=began - 120, within_s=10.0)
    assert notified.alert["severity"] == "critical"
    stopped = cluster_faults.kill_plugin(signal.SIGSTOP)
    try:
        shown = muster.until_verdict("STUCK", within_s=30.0)
    finally:
        os.kill(stopped, signal.SIGCONT)
    assert shown["flapping"]
    assert re.match("failed [0-9]+ times within 10 min", shown["evidence"][0]["observed"])
