"""Health's alerts about a mount that hangs, and about a FUSE daemon that dies, in a pod.

Health, the broker, NATS and the mounts are real. There is no Kubernetes: the test calls the
broker's CSI service like a kubelet.
"""

import asyncio
import contextlib
import json
import signal
from pathlib import Path

from muster.local import nats
from muster.vocabulary import AlertKind, AlertState, Verdict
from tests.worlds import (
    csi_kubelet,
    fleet_parts,
    fuse_broker,
    fuse_pods,
    fuse_process,
    mount_namespace,
    plugin_process,
)

pytestmark = fuse_pods.needs_pods()
NODE = "n1.example"
POD = "team/train-0"
FIRING, RESOLVED = AlertState.FIRING, AlertState.RESOLVED


def test_a_mount_that_hangs_and_a_daemon_that_dies_are_alerts_until_the_pod_ends(
    tmp_path: Path,
) -> None:
    async def story(node: fuse_process.Node) -> None:
        async with contextlib.AsyncExitStack() as stack:
            server = await stack.enter_async_context(nats.NatsServer(tmp_path / "nats"))
            published = await stack.enter_async_context(fleet_parts.following_by_node(server.url))
            config = tmp_path / "health.json"
            config.write_text(json.dumps({"bus": {"url": server.url}, "bounds": {"update_s": 0.1}}))
            health = fleet_parts.Service(
                "muster_health", ("--config", str(config)), tmp_path / "health.log"
            )
            stack.push_async_callback(health.end, signal.SIGKILL)
            await health.start()
            node.write(bus={"url": server.url}, limits={"watch_s": 0.2, "hung_s": 0.5})
            broker = await stack.enter_async_context(node.broker())
            await broker.said("listening")
            await node.kubelet.register()
            await published.until(lambda: published.verdict(NODE) is Verdict.HEALTHY)
            await node.kubelet.publish()

            def is_published(kind: AlertKind, state: AlertState) -> bool:
                alerts = [alert for _, alert in published.alerts(NODE) if alert.kind is kind]
                assert {alert.pods for alert in alerts} <= {(POD,)}
                return bool(alerts) and alerts[-1].state is state

            binds = {"/run/muster-fuse": node.kubelet.target()}
            with (
                fuse_pods.container(pod_uid=csi_kubelet.UID, binds=binds) as pod,
                fuse_broker.daemon(pod, "--stall", "LOOKUP") as daemon,
            ):
                await asyncio.to_thread(fuse_broker.mounted, daemon)
                with pod.start("/bin/cat", f"{fuse_broker.HOME}/hello"):
                    await published.until(lambda: is_published(AlertKind.FUSE_MOUNT_HUNG, FIRING))
                    daemon.kill()
                    await published.until(lambda: is_published(AlertKind.FUSE_DAEMON_DIED, FIRING))
                    await published.until(lambda: is_published(AlertKind.FUSE_MOUNT_HUNG, RESOLVED))
            await published.until(lambda: is_published(AlertKind.FUSE_DAEMON_DIED, RESOLVED))
            assert {event.kind for _, event in published.alerts(NODE)} == {
                AlertKind.FUSE_MOUNT_HUNG,
                AlertKind.FUSE_DAEMON_DIED,
            }
            assert [event.verdict for _, event in published.verdicts(NODE)] == [Verdict.HEALTHY]

    with fuse_process.root() as root:
        node = fuse_process.Node(root, bus_url="nats://127.0.0.1:1")
        mount_namespace.inside(lambda: plugin_process.run(lambda: story(node)))
