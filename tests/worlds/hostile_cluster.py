"""A real cluster with muster's production overlay, a compromised plugin in it, and victims.

The compromised plugin is `tests/programs/hostile_plugin.py`: it runs in the pod of the node's real
plugin, with that pod's projected token. There is one real node, so the others are simulated. Each
has an object and a lease in the real Kubernetes API, a real pod of the plugin's DaemonSet that can
never start, and a connection of this process to the real NATS, with credentials of that node as
`muster auth node` writes them.
"""

import asyncio
import contextlib
import json
import ssl
import subprocess
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from muster import codec, vocabulary
from muster.nats import compat, streams
from muster.nats.auth import nkeys
from tests.worlds import bus_subjects, manifests, real_cluster

PLUGIN: Final = "device-plugin"
EVENTS: Final = 100
"""How many events of a victim are in the stream when an attack begins."""
_RESOURCE: Final = "smarter-devices/fuse"
_SERVICES: Final = ("nats", "gate", "health", "labeler", "notifier")
_PROGRAM: Final = manifests.ROOT / "tests/programs/hostile_plugin.py"
_BEAT_S: Final = 1.0
_RENEW_S: Final = 5.0


@dataclass
class Victim:
    """The plugin of a simulated node: healthy until `failing` is set."""

    node: str
    failing: asyncio.Event = field(default_factory=asyncio.Event)
    failed_at: float = 0.0


@dataclass
class World:
    """muster in a cluster; `folder` has its keys, `node` is the real node."""

    cluster: real_cluster.Cluster
    folder: Path
    node: str

    def services(self) -> dict[str, tuple[list[int], list[str]]]:
        """Return the restart counts and the Ready condition of each pod of muster's services.

        The probes are those of the real kubelet.
        """
        pods = [pod for part in _SERVICES for pod in self.cluster.pods(f"muster-{part}")]
        return {
            pod["metadata"]["name"]: (
                [each["restartCount"] for each in pod["status"]["containerStatuses"]],
                [
                    f"{each['status']} since {each['lastTransitionTime']}"
                    for each in pod["status"]["conditions"]
                    if each["type"] == "Ready"
                ],
            )
            for pod in pods
        }

    def plugins(self) -> dict[str, dict[str, Any]]:
        """Return what health's leader shows of each node's plugin."""
        for pod in self.cluster.pods("muster-health"):
            with contextlib.suppress(OSError):
                state = json.loads(self.cluster.fetch(pod, "/state"))
                if state["service"]["leads"] is not None:
                    return {plugin["node"]: plugin for plugin in state["plugins"]}
        return {}

    def until_healthy(self, node: str, *, within_s: float) -> None:
        """Wait until health shows a node's plugin as healthy."""
        real_cluster.until(
            lambda: self.plugins().get(node, {}).get("state") == "healthy",
            f"the plugin of {node} is healthy",
            within_s=within_s,
        )

    def until_back(self, node: str, *, within_s: float) -> None:
        """Wait until health shows a node's plugin as healthy or recovering.

        After repeated failures, flap damping rightly delays the verdict HEALTHY.
        """
        real_cluster.until(
            lambda: self.plugins().get(node, {}).get("state") in {"healthy", "recovering"},
            f"the plugin of {node} is back",
            within_s=within_s,
        )

    def attack(self, name: str, seconds: float) -> dict[str, int]:
        """Run an attack in the pod of the node's plugin; return the counts that it prints."""
        (pod,) = [
            each["metadata"]["name"]
            for each in self.cluster.pods("muster-plugin")
            if each["spec"].get("nodeName") == self.node
        ]
        where = ["-n", "muster", "exec", "-i", pod, "--"]
        done = subprocess.run(
            [*self.cluster.command, *where, "/opt/venv/bin/python", "-", name, str(seconds)],
            input=_PROGRAM.read_text(), capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        counts: dict[str, int] = json.loads(done.stdout)
        return counts

    @contextlib.asynccontextmanager
    async def user(self, creds: Path, **options: Any) -> AsyncIterator[bus_subjects.Client]:
        """Connect to NATS with credentials and, as the pods do, with TLS and the servers' name."""
        compat.ignore_tls_eof()
        credentials = nkeys.read_creds(creds.read_text())
        server = self.cluster.pods("muster-nats")[0]["status"]["podIP"]
        async with bus_subjects.client(
            f"tls://{server}:4222",
            user_jwt_cb=credentials.jwt.encode,
            signature_cb=credentials.sign,
            inbox_prefix=f"_INBOX.{credentials.name}",
            tls=ssl.create_default_context(cafile=self.folder / "muster-tls/ca.crt"),
            tls_hostname="muster-nats",
            **options,
        ) as client:
            yield client

    @contextlib.asynccontextmanager
    async def victim(self, name: str) -> AsyncIterator[Victim]:
        """Simulate a node whose healthy plugin has published events and its inventory."""
        made = Victim(f"muster-victim-{name}")
        creds = self.folder / f"{made.node}.creds"
        self.cluster.shell(f"muster auth node {made.node} --out {creds}", self.folder)
        self._create(made.node)
        being = [asyncio.create_task(self._renew(made)), asyncio.create_task(self._be(made, creds))]
        try:
            await asyncio.to_thread(self.until_healthy, made.node, within_s=60)
            yield made
        finally:
            for task in being:
                task.cancel()
            await asyncio.gather(*being, return_exceptions=True)
            self.cluster.good("delete", "node", made.node)
            # no kubelet ends the pod, and the garbage collector waits for most of a minute
            pod = ("pod", "--field-selector", f"spec.nodeName={made.node}")
            self.cluster.good("-n", "muster", "delete", *pod, "--force", "--grace-period=0")

    async def kept(self, victim: Victim) -> dict[str, int]:
        """Return how many messages of a victim are in the streams, by subject."""
        async with self.user(self.folder / "muster-keys/admin.creds") as admin:
            counts: dict[str, int] = {}
            for stream, kind in ((streams.EVENTS, "event"), (streams.INVENTORY, "inventory")):
                info = await admin.raw.jetstream().stream_info(
                    stream.name, subjects_filter=f"muster.{kind}.{victim.node}.>"
                )
                counts |= info.state.subjects or {}
            return counts

    async def until_fallen(self, victim: Victim, *, within_s: float) -> float:
        """Wait for the verdict PLUGIN_DOWN on a victim; return the seconds since its failure."""

        def is_fallen() -> bool:
            return self.plugins().get(victim.node, {}).get("verdict") == "PLUGIN_DOWN"

        await asyncio.to_thread(real_cluster.until, is_fallen, victim.node, within_s=within_s)
        return time.monotonic() - victim.failed_at

    def _create(self, node: str) -> None:
        offered = {"cpu": "1", "memory": "1Gi", "pods": "10", _RESOURCE: "20"}
        self.cluster.good(
            "create", "-f", "-", "--field-manager=kubelet",
            given={
                "apiVersion": "v1", "kind": "Node",
                "metadata": {"name": node, "labels": {"kubernetes.io/os": "linux"}},
                "spec": {"taints": [{"key": "muster-test", "effect": "NoSchedule"}]},
                "status": {
                    "capacity": offered, "allocatable": offered,
                    "conditions": [{"type": "Ready", "status": "True"}],
                },
            },
        )  # fmt: skip

    async def _renew(self, victim: Victim) -> None:
        """Renew the node's lease, as its kubelet would."""
        while True:
            lease = {
                "apiVersion": "coordination.k8s.io/v1", "kind": "Lease",
                "metadata": {"name": victim.node, "namespace": "kube-node-lease"},
                "spec": {
                    "holderIdentity": victim.node,
                    "renewTime": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ"),
                },
            }  # fmt: skip
            await asyncio.to_thread(self.cluster.good, "apply", "-f", "-", given=lease)
            await asyncio.sleep(_RENEW_S)

    async def _be(self, victim: Victim, creds: Path) -> None:
        """Act as the plugin of the node until it fails."""
        async with self.user(creds, name=f"{PLUGIN} {victim.node}") as plugin:
            store = plugin.raw.jetstream().publish
            for number, event in enumerate([*_allocations(victim.node), _inventory(victim.node)]):
                payload = codec.encode(
                    event, event_id=f"{victim.node}-{number}", producer=f"plugins/{PLUGIN}",
                    instance="1", sequence=number + 1, boot="",
                )  # fmt: skip
                await store(event.subject, payload)
            began, seq = time.monotonic(), 0
            while not victim.failing.is_set():
                seq += 1
                beat = _heartbeat(victim.node, seq, time.monotonic() - began)
                await plugin.raw.publish(beat.subject, codec.encode_heartbeat(beat))
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(_BEAT_S):
                        await victim.failing.wait()
            victim.failed_at = time.monotonic()


def _allocations(node: str) -> list[vocabulary.Event]:
    return [
        vocabulary.AllocationObserved(
            node=node, plugin=PLUGIN, at=datetime.now(UTC), resource=_RESOURCE, device_ids=(f"{n}",)
        )
        for n in range(EVENTS)
    ]


def _inventory(node: str) -> vocabulary.Event:
    device = vocabulary.Device(id="fuse-0", resource=_RESOURCE)
    return vocabulary.InventoryReported(
        node=node, plugin=PLUGIN, at=datetime.now(UTC), devices=(device,), resources=(_RESOURCE,)
    )


def _heartbeat(node: str, seq: int, uptime_s: float) -> vocabulary.Heartbeat:
    return vocabulary.Heartbeat(
        node=node,
        plugin=PLUGIN,
        instance="1",
        seq=seq,
        interval_s=_BEAT_S,
        uptime_s=uptime_s,
        wall=time.time(),
        kubelet_socket="1.1",
        resources=(
            vocabulary.ResourceBeat(
                name=_RESOURCE,
                registered_age_s=100.0,
                streams=1,
                last_send_age_s=1.0,
                registrations=1,
                probe_ok=True,
                probe_ms=1.0,
                probe_age_s=1.0,
                devices=20,
                healthy=20,
            ),
        ),
    )
