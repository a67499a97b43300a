"""Pure: the faults of `muster break`: the effect of each, its signs, and how to undo it.

A fault is a list of steps for the adapter, with a second list that undoes it.
"""

import enum
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from muster.service import validation

GPU: Final = "nvidia.com/gpu"


class Fault(enum.StrEnum):
    """The name of a fault."""

    FREEZE = "freeze"
    KILL = "kill"
    STREAM = "stream"
    SOCKET = "socket"
    KUBELET = "kubelet"
    XID = "xid"
    HEALTH = "health"
    NATS = "nats"

    @property
    def is_of_node(self) -> bool:
        """Whether the fault concerns one node."""
        return self not in {Fault.HEALTH, Fault.NATS}


class UnknownName(ValueError):
    """A fault or node does not exist, or the fault takes no node; the message gives a hint."""


@dataclass(frozen=True, slots=True)
class Freeze:
    """Suspend a program."""

    program: str


@dataclass(frozen=True, slots=True)
class Thaw:
    """Resume a program."""

    program: str


@dataclass(frozen=True, slots=True)
class End:
    """Kill a program, and prevent its restart."""

    program: str


@dataclass(frozen=True, slots=True)
class Start:
    """Allow a program to be started again."""

    program: str


@dataclass(frozen=True, slots=True)
class Ask:
    """Send a POST request to a stand-in."""

    program: str
    path: str


@dataclass(frozen=True, slots=True)
class RemoveSocket:
    """Remove the sockets of a node's plugin."""

    node: str


@dataclass(frozen=True, slots=True)
class BreakGpu:
    """Report an XID on a GPU of a node, preferably on one that a pod uses."""

    node: str
    xid: int


@dataclass(frozen=True, slots=True)
class RepairGpus:
    """End all faults of a node's GPUs."""

    node: str


Step = Freeze | Thaw | End | Start | Ask | RemoveSocket | BreakGpu | RepairGpus


@dataclass(frozen=True, slots=True)
class Target:
    """A fault and its node; `node` is empty if the fault concerns the whole fleet."""

    fault: Fault
    node: str = ""

    def __str__(self) -> str:
        """Return the words that follow `muster break`."""
        return f"{self.fault} {self.node}".rstrip()


@dataclass(frozen=True, slots=True)
class Plan:
    """A fault's effect, its signs, a command that shows it, and the steps to cause and undo it.

    A fault that ends by itself has nothing to undo.
    """

    breaks: str
    seen: str
    watch: str
    steps: tuple[Step, ...]
    undoing: tuple[Step, ...] = ()


def fault(name: str) -> Fault:
    """Return the fault of this name. Raises UnknownName."""
    try:
        return Fault(name.lower())
    except ValueError:
        near = validation.near(name.lower(), list(Fault))
        hint = near or f"the faults are {', '.join(Fault)}"
        raise UnknownName(f"no fault {name!r}; {hint}") from None


def target(wanted: Fault, node: str | None, nodes: Sequence[str]) -> Target:
    """Return the target of a fault; its node is by default the last. Raises UnknownName."""
    if not wanted.is_of_node:
        if node is not None:
            raise UnknownName(f"{wanted} concerns the whole fleet; leave out {node!r}")
        return Target(wanted)
    if node is None:
        return Target(wanted, nodes[-1])
    if node not in nodes:
        hint = validation.near(node, nodes) or f"the nodes are {', '.join(nodes)}"
        raise UnknownName(f"no node {node!r}; {hint}")
    return Target(wanted, node)


def targets(names: Iterable[str]) -> list[Target]:
    """Return the targets with these names (`str(target)`); skip unknown faults."""
    stored = []
    for name in sorted(names):
        of, _, node = name.partition(" ")
        if of in set(Fault):
            stored.append(Target(Fault(of), node))
    return stored


def plan(at: Target) -> Plan:
    """Return the plan of a fault."""
    return _plans(at.node or "NODE")[at.fault]


def reaching(command: str, *, health: str, nats_url: str) -> str:
    """Return a plan's command with options for the addresses of one stack."""
    options = {
        "why": f" --health {health}",
        "events": f" --url {nats_url}",
        "doctor": f" --health {health} --url {nats_url}",
    }
    return f"{command}{options[command.split()[1]]}"


def _plans(node: str) -> dict[Fault, Plan]:
    plugin, kubelet, why = f"plugin-{node}", f"kubelet-{node}", f"muster why {node}"
    drop = Ask(kubelet, f"/drop-stream?resource={GPU}")
    return {
        Fault.FREEZE: Plan(
            "the plugin is suspended: it exists, but does nothing",
            "STUCK after about 6 s, and an alert",
            why,
            (Freeze(plugin),),
            (Thaw(plugin),),
        ),
        Fault.KILL: Plan(
            "the plugin is killed, and not started again",
            "PLUGIN_DOWN after about 3 s, and an alert",
            why,
            (End(plugin),),
            (Start(plugin),),
        ),
        Fault.STREAM: Plan(
            "the kubelet closes the plugin's stream, and refuses its registration",
            "DEREGISTERED after about 3 s, and an alert",
            why,
            (Ask(kubelet, "/registration?accept=false"), drop),
            (Ask(kubelet, "/registration?accept=true"),),
        ),
        Fault.SOCKET: Plan(
            "the plugin's socket is removed",
            "the plugin registers again within a second; no alert",
            f"muster events --node {node} --since 1m",
            (RemoveSocket(node),),
        ),
        Fault.KUBELET: Plan(
            "the kubelet is killed, and not started again",
            "DEREGISTERED after about 30 s, and an alert (before that, it could be a restart)",
            why,
            (End(kubelet),),
            (Start(kubelet),),
        ),
        Fault.XID: Plan(
            "a GPU falls off the bus (XID 79)",
            "the GPU is Unhealthy within a second, and an alert names the pod that uses it, if any",
            why,
            (BreakGpu(node, 79),),
            (RepairGpus(node),),
        ),
        Fault.HEALTH: Plan(
            "the health service is suspended",
            "the notifier raises an alert after about 25 s, because nothing monitors the plugins",
            "muster doctor",
            (Freeze("health"),),
            (Thaw("health"),),
        ),
        Fault.NATS: Plan(
            "NATS is killed, and not started again",
            "no verdict, because an outage of the bus is not the plugins' fault",
            "muster doctor",
            (End("nats-server"),),
            (Start("nats-server"),),
        ),
    }
