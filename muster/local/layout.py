"""Pure: the layout of the laptop stack: three simulated nodes, and all programs' settings.

One node offers this machine's own `/dev/fuse` besides simulated GPUs; the others GPUs only.
Heartbeats come every second and `group_wait` is half a second, so that a fault is reported in
seconds; the defaults, for a cluster, are slower.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Final

FUSE: Final = "smarter-devices/fuse"
GPU: Final = "nvidia.com/gpu"
PLUGIN: Final = "device-plugin"
HEARTBEAT_S: Final = 1.0

Settings = Mapping[str, object]


@dataclass(frozen=True, slots=True)
class Node:
    """One simulated node and what its plugin offers."""

    name: str
    gpus: int
    product: str
    memory_mib: int
    fuse: bool = False

    @property
    def capacity(self) -> dict[str, int]:
        """The node's devices by resource name once everything is registered."""
        return {GPU: self.gpus} | ({FUSE: 1} if self.fuse else {})


NODES: Final = (
    Node("node-a", 8, "NVIDIA H100 80GB HBM3", 81_559, fuse=True),
    Node("node-b", 4, "NVIDIA A100-SXM4-80GB", 81_920),
    Node("node-c", 2, "NVIDIA L4", 23_034),
)


@dataclass(frozen=True, slots=True)
class Program:
    """A Python program to run: its name, module and arguments."""

    name: str
    module: str
    arguments: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)

    def at(self, http: str) -> "Program":
        """Return the program with its HTTP address set to `http://host:port`."""
        address = http.removeprefix("http://")
        if self.module.startswith("muster.local."):
            return replace(self, arguments=(*self.arguments, "--http", address))
        variable = f"{self.module.upper()}__HTTP__PORT"
        port = {variable: address.rpartition(":")[2]}
        return replace(self, environment={**self.environment, **port})


def kubernetes(kubeconfig: str, *more: str) -> Program:
    """Return the stand-in for the Kubernetes API, with `more` options."""
    options = ("--kubeconfig", kubeconfig, "--namespace", "muster", *more)
    return Program("kubernetes", "muster.local.kubernetes", options)


def webhook() -> Program:
    """Return the stand-in for a receiver of notifications."""
    return Program("webhook", "muster.local.webhook")


def kubelet(node: Node, *, directory: str, api: str) -> Program:
    """Return the stand-in for a node's kubelet; it writes the node status every half second."""
    return Program(
        f"kubelet-{node.name}",
        "muster.local.kubelet",
        (
            *("--node", node.name, "--dir", directory, "--api", api),
            *("--status-period", "0.5"),
        ),
    )


def service(name: str, file: str) -> Program:
    """Return one of the services, with its settings file."""
    package = f"muster_{name.partition('-')[0]}"
    return Program(name, package, ("--config", file))


def plugin_settings(
    node: Node, *, nats: str, directory: str, fuse_path: str, faults: str
) -> Settings:
    """Return the settings of a node's plugin."""
    fuse = {"name": FUSE, "groups": [{"devices": [{"path": fuse_path}]}]}
    return {
        "node": node.name,
        "name": PLUGIN,
        "bus": {"url": nats},
        "kubelet": {"directory": directory},
        "heartbeat": {"interval_s": HEARTBEAT_S},
        "resources": [fuse] if node.fuse else [],
        "gpus": {"health": {"poll_s": 1.0}},
        "simulated_gpus": {
            "count": node.gpus,
            "product": node.product,
            "memory_mib": node.memory_mib,
            "faults": faults,
        },
    }


def health_settings(*, nats: str, kubeconfig: str) -> Settings:
    """Return the settings of health; `patience_s` is 0, as silence is always a fault here."""
    return {
        "bus": {"url": nats},
        "detection": {"patience_s": 0},
        "cluster": {
            "kubeconfig": kubeconfig,
            "plugins": [{"plugin": PLUGIN, "nodes": {"kubernetes.io/os": "linux"}}],
        },
    }


def labeler_settings(*, nats: str, kubeconfig: str) -> Settings:
    """Return the settings of the labeler, which only suggests."""
    return {"bus": {"url": nats}, "mode": "suggest", "kubernetes": {"kubeconfig": kubeconfig}}


def notifier_settings(*, nats: str, webhook_url: str, reach: str = "loopback") -> Settings:
    """Return the settings of the notifier, which notifies the console and the webhook stand-in."""
    return {
        "bus": {"url": nats},
        "group_wait_s": 0.5,
        "group_interval_s": 1.0,
        "receivers": [
            {"name": "console", "console": {}},
            {"name": "webhook", "webhook": {"url": webhook_url, "reach": reach}},
        ],
    }
