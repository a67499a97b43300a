"""The failure classes a to p: how each is made, what must be said of it, how it is mended.

What a plugin mends by itself within a moment is made twice: as it comes (`MENDED`), when nobody is
to be told anything, and so that it lasts. `played` makes one on one node of a `fleet.Fleet` and
tells what came of it; l is not among them, because there it is health itself that fails.
"""

import asyncio
import contextlib
import re
import signal
import time
from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass
from typing import Final

from muster.vocabulary import AlertKind, Verdict
from tests.worlds import fleet as fleets

Act = Callable[[fleets.Node], Awaitable[None]]


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One way to fail; `name` begins with the letter of its class.

    `verdict` is None where none is to be told, and `alert` where nobody is to be told. Each
    pattern of `evidence` must be found in what is told. `passes` are verdicts that may stand for a
    moment on the way, because what tells the rest comes later. `absent` begins without a node,
    `cabled` behind a cable that can be cut. Where a device is `held`, the alert names the pod.
    """

    name: str
    title: str
    inject: Act
    heal: Act
    verdict: Verdict | None
    alert: AlertKind | None
    evidence: tuple[str, ...] = ()
    passes: frozenset[Verdict] = frozenset()
    falls: frozenset[Verdict] = frozenset()
    """Verdicts that may stand for a moment, of which nobody is to be told."""
    absent: bool = False
    cabled: bool = False
    held: bool = False
    slow: bool = False
    """It takes a while to make, and counts from when it is made."""

    @property
    def letter(self) -> str:
        return self.name[0]


@dataclass(frozen=True, kw_only=True)
class Played:
    """What came of one fault. Times are seconds from its injection, `resolved_s` from its mending.

    `strange` is what was told and should not have been.
    """

    fault: Fault
    verdict_s: float | None
    alert_s: float | None
    resolved_s: float | None
    strange: tuple[str, ...]
    evidence: str

    @property
    def problems(self) -> list[str]:
        """What is wrong with it; empty if what had to be told was told, and nothing else."""
        fault, found = self.fault, [f"told {word}" for word in self.strange]
        if fault.verdict is not None and self.verdict_s is None:
            found.append(f"no {fault.verdict}")
        if fault.alert is not None and self.alert_s is None:
            found.append(f"no alert {fault.alert}")
        if self.resolved_s is None:
            found.append("not resolved")
        found += [f"no evidence {word}" for word in fault.evidence if not self.has(word)]
        return [f"{fault.name} {fault.title}: {problem}" for problem in found]

    def has(self, pattern: str) -> bool:
        return re.search(pattern, self.evidence) is not None


async def started(fleet: fleets.Fleet, faults: Collection[Fault]) -> dict[str, fleets.Node]:
    """Start one node for each fault, then health; return when every plugin is known to be well."""
    nodes = {fault.name: fleet.node(f"node-{fault.name}") for fault in faults}
    here = [(nodes[fault.name], fault) for fault in faults if not fault.absent]
    await asyncio.gather(*(node.start(cabled=fault.cabled) for node, fault in here))
    await asyncio.gather(*(node.make_holder() for node, fault in here if fault.held))
    await fleet.health.start()
    await fleet.until_healthy([node.name for node, _ in here])
    return nodes


async def played(node: fleets.Node, fault: Fault, *, timeout_s: float, quiet_s: float) -> Played:
    """Make a fault, wait for its verdict and alert, mend it, wait until all is well and resolved.

    Where nothing is to be told, `quiet_s` is how long nothing must come.
    """
    if node.plugin.runs:
        await node.until_ready()
    told, began = node.fleet.told, time.monotonic()
    await fault.inject(node)
    began = time.monotonic() if fault.slow else began
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(timeout_s):
            if fault.verdict is None and fault.alert is None:
                await asyncio.sleep(quiet_s)
            await told.until(lambda: _is_told(node, fault, began))
    verdicts, alerts = told.verdicts(node.name, since=began), told.alerts(node.name, since=began)
    mended = time.monotonic()
    await fault.heal(node)
    resolved_s: float | None = None
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(timeout_s):
            await told.until(lambda: _is_well(node))
            resolved_s = time.monotonic() - mended
    return Played(
        fault=fault,
        verdict_s=next((at - began for at, e in verdicts if e.verdict is fault.verdict), None),
        alert_s=next((at - began for at, e in alerts if e.kind is fault.alert), None),
        resolved_s=resolved_s,
        strange=_strange(node, fault, began),
        evidence="; ".join(
            seen.observed
            for told_of in (*(e.evidence for _, e in verdicts), *(e.evidence for _, e in alerts))
            for seen in told_of
        ),
    )


def _is_told(node: fleets.Node, fault: Fault, began: float) -> bool:
    told = node.fleet.told
    verdicts = told.verdicts(node.name, since=began)
    stands = fault.verdict is None or (verdicts and verdicts[-1][1].verdict is fault.verdict)
    fires = fault.alert is None or fault.alert in {a.kind for a in told.firing(node.name)}
    return bool(stands and fires)


def _is_well(node: fleets.Node) -> bool:
    told = node.fleet.told
    return told.verdict(node.name) is Verdict.HEALTHY and not told.firing(node.name)


def _strange(node: fleets.Node, fault: Fault, began: float) -> tuple[str, ...]:
    told = node.fleet.told
    fine = {Verdict.HEALTHY, fault.verdict, *fault.passes, *fault.falls}
    verdicts = [e for _, e in told.verdicts(node.name, since=began) if e.verdict not in fine]
    named = {e.pods for _, e in told.alerts(node.name, since=began) if e.kind is fault.alert}
    pods = (node.holder,) if fault.held else ()
    kinds = {fault.alert, *(AlertKind(verdict.lower()) for verdict in fault.passes)}
    alerts = [e for _, e in told.alerts(node.name, since=began) if e.kind not in kinds]
    return (
        *(f"{e.verdict} ({e.rule})" for e in verdicts),
        *(f"alert {e.kind} {e.state}" for e in alerts),
        *(f"pods {found}, not {pods}" for found in named - {pods}),
    )


async def kill(node: fleets.Node) -> None:
    node.loops = True
    await node.plugin.end()


async def start(node: fleets.Node) -> None:
    await node.start_plugin()


async def restart(node: fleets.Node) -> None:
    await node.plugin.end()
    await node.start_plugin()


async def nothing(_: fleets.Node) -> None:
    """What mends itself."""


def tell(word: str, number: float) -> Act:
    """Have the plugin do something to itself."""

    async def act(node: fleets.Node) -> None:
        await node.plugin.told(word, number)

    return act


async def restart_kubelet_for_ever(node: fleets.Node) -> None:
    node.kubelet.accept_registrations(accepts=False)
    await node.kubelet.restart()


async def drop_stream_for_ever(node: fleets.Node) -> None:
    node.kubelet.accept_registrations(accepts=False)
    await drop_stream(node)


async def drop_stream(node: fleets.Node) -> None:
    assert await node.kubelet.drop_stream(fleets.RESOURCE)


async def remove_socket_for_ever(node: fleets.Node) -> None:
    node.kubelet.accept_registrations(accepts=False)
    await remove_socket(node)


async def remove_socket(node: fleets.Node) -> None:
    node.own_socket().unlink()


async def accept(node: fleets.Node) -> None:
    node.kubelet.accept_registrations(accepts=True)


async def add_device_unheard(node: fleets.Node) -> None:
    await node.plugin.told("mute", 1)
    node.add_device()


async def be_heard(node: fleets.Node) -> None:
    await node.plugin.told("mute", 0)
    node.add_device()


async def miscount(node: fleets.Node) -> None:
    await node.miscount(-1)


async def count(node: fleets.Node) -> None:
    await node.miscount(0)


async def cut(node: fleets.Node) -> None:
    node.cable.cut()


async def mend(node: fleets.Node) -> None:
    node.cable.mend()


async def die(node: fleets.Node) -> None:
    """Do what a machine without power does: nothing is said, and nobody renews its lease."""
    node.cable.cut()
    node.has_pod = False
    node.plugin.send(signal.SIGSTOP)
    await node.machine.end()


async def boot(node: fleets.Node) -> None:
    await node.plugin.end()
    node.cable.mend()
    await node.machine.start()
    node.has_pod = True
    await node.start_plugin()


async def stop(node: fleets.Node) -> None:
    await node.plugin.end(signal.SIGTERM)


async def drain(node: fleets.Node) -> None:
    await node.patch(unschedulable=True)
    await node.plugin.end()


async def undrain(node: fleets.Node) -> None:
    await node.patch(unschedulable=None)
    await node.start_plugin()


async def throttle(node: fleets.Node) -> None:
    node.throttle(share=0.15)


async def unthrottle(node: fleets.Node) -> None:
    await node.unthrottle()


async def double(node: fleets.Node) -> None:
    await node.start_other()


async def undouble(node: fleets.Node) -> None:
    await node.end_others(signal.SIGTERM)


async def come(node: fleets.Node) -> None:
    await node.start(with_plugin=False)


MENDED: Final = (
    Fault(
        name="a-restarts",
        title="the process crashes and comes back at once",
        inject=restart,
        heal=nothing,
        verdict=None,
        alert=None,
        falls=frozenset({Verdict.PLUGIN_DOWN}),
    ),
    Fault(
        name="e-mends",
        title="its ListAndWatch breaks, and it registers again",
        inject=drop_stream,
        heal=nothing,
        verdict=None,
        alert=None,
    ),
    Fault(
        name="f-mends",
        title="its socket is removed, and it makes another",
        inject=remove_socket,
        heal=nothing,
        verdict=None,
        alert=None,
    ),
)
"""What a plugin mends by itself: nobody is to be told anything."""
FAULTS: Final = (
    Fault(
        name="a",
        title="the process crashes and does not come back",
        inject=kill,
        heal=start,
        verdict=Verdict.PLUGIN_DOWN,
        alert=AlertKind.PLUGIN_DOWN,
        evidence=("connection closed", "nobody is subscribed", "CrashLoopBackOff"),
        held=True,
    ),
    Fault(
        name="b",
        title="its gRPC server takes calls and never answers",
        inject=tell("hang", 1),
        heal=tell("hang", 0),
        verdict=Verdict.STUCK,
        alert=AlertKind.STUCK,
        evidence=("its socket does not answer",),
        # when it answers again, it is yet to be registered again
        passes=frozenset({Verdict.DEREGISTERED}),
    ),
    Fault(
        name="c",
        title="its event loop stands still",
        inject=tell("block", 1),
        heal=tell("block", 0),
        verdict=Verdict.STUCK,
        alert=AlertKind.STUCK,
        evidence=("none for", "lease renewed"),
        held=True,
    ),
    Fault(
        name="d",
        title="the kubelet restarts and does not take it again",
        inject=restart_kubelet_for_ever,
        heal=accept,
        verdict=Verdict.DEREGISTERED,
        alert=AlertKind.DEREGISTERED,
        evidence=(fleets.RESOURCE, "registration"),
    ),
    Fault(
        name="e",
        title="its ListAndWatch breaks, and stays so",
        inject=drop_stream_for_ever,
        heal=accept,
        verdict=Verdict.DEREGISTERED,
        alert=AlertKind.DEREGISTERED,
        evidence=(fleets.RESOURCE, "registration"),
        held=True,
    ),
    Fault(
        name="f",
        title="its socket is removed, and it cannot register another",
        inject=remove_socket_for_ever,
        heal=accept,
        verdict=Verdict.DEREGISTERED,
        alert=AlertKind.DEREGISTERED,
        evidence=(fleets.RESOURCE, "registration"),
    ),
    Fault(
        name="g",
        title="it has one device more than the kubelet knows",
        inject=add_device_unheard,
        heal=be_heard,
        verdict=Verdict.MISMATCH,
        alert=AlertKind.MISMATCH,
        evidence=(r"the kubelet does not list \S+, for \d+ s",),
    ),
    Fault(
        name="g-node",
        title="the node offers one device less than there are",
        inject=miscount,
        heal=count,
        verdict=Verdict.MISMATCH,
        alert=AlertKind.MISMATCH,
        evidence=(r"the plugin reports \d+ Healthy, the node's allocatable is \d+ of \d+",),
    ),
    Fault(
        name="h",
        title="nobody checks its devices any more",
        inject=tell("blind", 1),
        heal=tell("blind", 0),
        verdict=Verdict.DEGRADED,
        alert=AlertKind.DEGRADED,
        evidence=(r"health checker \w+ last succeeded",),
    ),
    Fault(
        name="i",
        title="NATS cannot reach its node",
        inject=cut,
        heal=mend,
        verdict=Verdict.UNREACHABLE,
        alert=AlertKind.UNREACHABLE,
        evidence=("lease renewed", "Running, Ready", "allocatable"),
        cabled=True,
    ),
    Fault(
        name="j",
        title="its node dies",
        inject=die,
        heal=boot,
        verdict=Verdict.NODE_DOWN,
        alert=AlertKind.NODE_DOWN,
        evidence=(r"lease renewed \d+ s ago",),
        # when it boots, its kubelet is there before its plugin
        passes=frozenset({Verdict.PLUGIN_DOWN}),
        cabled=True,
        held=True,
    ),
    Fault(
        name="k",
        title="it is stopped, and says goodbye",
        inject=stop,
        heal=start,
        verdict=Verdict.MAINTENANCE,
        alert=None,
        evidence=("announced that it stops",),
    ),
    Fault(
        name="k-drain",
        title="its node is drained, and it goes without a goodbye",
        inject=drain,
        heal=undrain,
        verdict=Verdict.MAINTENANCE,
        alert=None,
        evidence=("node is unschedulable",),
    ),
    Fault(
        name="m",
        title="its node's clock is an hour ahead",
        inject=tell("clock", 3600),
        heal=tell("clock", 0),
        verdict=None,
        alert=AlertKind.CLOCK_SKEW,
        evidence=(r"its clock is 3[56]\d\d\.\d s ahead of health's",),
    ),
    Fault(
        name="n",
        title="it is slow: it runs for a sixth of the time",
        inject=throttle,
        heal=unthrottle,
        verdict=Verdict.DEGRADED,
        alert=AlertKind.DEGRADED,
        evidence=("ms late|it sends a heartbeat every",),
    ),
    Fault(
        name="o",
        title="it runs twice",
        inject=double,
        heal=undouble,
        verdict=Verdict.SPLIT_BRAIN,
        alert=AlertKind.SPLIT_BRAIN,
        evidence=("two processes send heartbeats alternately",),
        slow=True,
    ),
    Fault(
        name="p",
        title="it never came to a new node",
        inject=come,
        heal=start,
        verdict=Verdict.MISSING,
        alert=AlertKind.MISSING,
        evidence=("none yet", "the plugin has no pod"),
        absent=True,
    ),
)
