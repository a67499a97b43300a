"""The failure classes a to p: how each is injected, what health must report, how it is repaired.

A failure that a plugin can repair by itself within a moment is in both tables: in `SELF_HEALING` it
is repaired, and no alert may follow; in `FAULTS` it lasts. `play` injects one fault on one node of
a `fleet.Fleet` and returns the outcome. Class l is missing, because there health itself fails.
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

Action = Callable[[fleets.Node], Awaitable[None]]


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One way to fail; `name` begins with the letter of its class.

    `verdict` is None if no verdict may follow, `alert` is None if no alert may. Each pattern of
    `evidence` must match the published evidence. `transient_verdicts` may precede the right one,
    with their alerts, because the decisive evidence comes later. With `starts_without_plugin` the
    node has no plugin at first, with `has_cable` it is behind a cable that can be cut. With
    `has_holder` the alert must name the pod that holds a device.
    """

    name: str
    title: str
    inject: Action
    heal: Action
    verdict: Verdict | None
    alert: AlertKind | None
    evidence: tuple[str, ...] = ()
    transient_verdicts: frozenset[Verdict] = frozenset()
    unalerted_verdicts: frozenset[Verdict] = frozenset()
    """Verdicts that may be published for a moment, but without an alert."""
    starts_without_plugin: bool = False
    has_cable: bool = False
    has_holder: bool = False
    counts_when_made: bool = False
    """Whether times count from the end of the injection, because that takes a while."""

    @property
    def letter(self) -> str:
        return self.name[0]


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The outcome of one fault: seconds since its injection, `resolved_s` since its repair.

    `unexpected` is what was published and should not have been.
    """

    fault: Fault
    verdict_s: float | None
    alert_s: float | None
    resolved_s: float | None
    unexpected: tuple[str, ...]
    evidence: str

    @property
    def problems(self) -> list[str]:
        """What is wrong; empty if exactly what was expected was published."""
        fault, problems = self.fault, [f"unexpected {word}" for word in self.unexpected]
        if fault.verdict is not None and self.verdict_s is None:
            problems.append(f"no {fault.verdict}")
        if fault.alert is not None and self.alert_s is None:
            problems.append(f"no alert {fault.alert}")
        if self.resolved_s is None:
            problems.append("not resolved")
        problems += [f"no evidence {word}" for word in fault.evidence if not self.has(word)]
        return [f"{fault.name} {fault.title}: {problem}" for problem in problems]

    def has(self, pattern: str) -> bool:
        return re.search(pattern, self.evidence) is not None


async def start_nodes(fleet: fleets.Fleet, faults: Collection[Fault]) -> dict[str, fleets.Node]:
    """Start one node for each fault, then health; return when every plugin is HEALTHY."""
    nodes = {fault.name: fleet.node(f"node-{fault.name}") for fault in faults}
    running = [(nodes[fault.name], fault) for fault in faults if not fault.starts_without_plugin]
    await asyncio.gather(*(node.start(has_cable=fault.has_cable) for node, fault in running))
    await asyncio.gather(*(node.make_holder() for node, fault in running if fault.has_holder))
    await fleet.health.start()
    await fleet.until_healthy([node.name for node, _ in running])
    return nodes


async def play(node: fleets.Node, fault: Fault, *, timeout_s: float, quiet_s: float) -> Outcome:
    """Inject a fault, wait for verdict and alert, repair it, wait until everything is resolved.

    If nothing may be published, wait instead for the node's heartbeats of `quiet_s`: any verdict
    about the fault would be published before them.
    """
    if node.plugin.is_running:
        await node.until_ready()
    publications, began = node.fleet.publications, time.monotonic()
    await fault.inject(node)
    began = time.monotonic() if fault.counts_when_made else began
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(timeout_s):
            if fault.verdict is None and fault.alert is None:
                enough = publications.heartbeats[node.name] + quiet_s / node.fleet.pace.beat_s
                await publications.until(lambda: publications.heartbeats[node.name] >= enough)
            await publications.until(lambda: _is_published(node, fault, began))
    verdicts = publications.verdicts(node.name, since=began)
    alerts = publications.alerts(node.name, since=began)
    repaired = time.monotonic()
    await fault.heal(node)
    resolved_s: float | None = None
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(timeout_s):
            await publications.until(lambda: _is_well(node))
            resolved_s = time.monotonic() - repaired
    return Outcome(
        fault=fault,
        verdict_s=next((at - began for at, e in verdicts if e.verdict is fault.verdict), None),
        alert_s=next((at - began for at, e in alerts if e.kind is fault.alert), None),
        resolved_s=resolved_s,
        unexpected=_unexpected(node, fault, began),
        evidence="; ".join(
            item.observed
            for evidence in (*(e.evidence for _, e in verdicts), *(e.evidence for _, e in alerts))
            for item in evidence
        ),
    )


def _is_published(node: fleets.Node, fault: Fault, began: float) -> bool:
    publications = node.fleet.publications
    verdicts = publications.verdicts(node.name, since=began)
    stands = fault.verdict is None or (verdicts and verdicts[-1][1].verdict is fault.verdict)
    fires = fault.alert is None or fault.alert in {a.kind for a in publications.firing(node.name)}
    return bool(stands and fires)


def _is_well(node: fleets.Node) -> bool:
    publications = node.fleet.publications
    return publications.verdict(node.name) is Verdict.HEALTHY and not publications.firing(node.name)


def _unexpected(node: fleets.Node, fault: Fault, began: float) -> tuple[str, ...]:
    publications = node.fleet.publications
    fine = {Verdict.HEALTHY, fault.verdict, *fault.transient_verdicts, *fault.unalerted_verdicts}
    verdicts = [
        e for _, e in publications.verdicts(node.name, since=began) if e.verdict not in fine
    ]
    named = {
        e.pods for _, e in publications.alerts(node.name, since=began) if e.kind is fault.alert
    }
    pods = (node.holder,) if fault.has_holder else ()
    kinds = {fault.alert, *(AlertKind(verdict.lower()) for verdict in fault.transient_verdicts)}
    alerts = [e for _, e in publications.alerts(node.name, since=began) if e.kind not in kinds]
    return (
        *(f"{e.verdict} ({e.rule})" for e in verdicts),
        *(f"alert {e.kind} {e.state}" for e in alerts),
        *(f"pods {actual}, not {pods}" for actual in named - {pods}),
    )


async def kill(node: fleets.Node) -> None:
    node.is_crash_looping = True
    await node.plugin.end()


async def start(node: fleets.Node) -> None:
    await node.start_plugin()


async def restart(node: fleets.Node) -> None:
    await node.plugin.end()
    await node.start_plugin()


async def do_nothing(_: fleets.Node) -> None:
    """Do nothing: the plugin recovers by itself."""


def sabotage(command: str, value: float) -> Action:
    """Return an action that has the plugin sabotage itself."""

    async def action(node: fleets.Node) -> None:
        await node.plugin.sabotage(command, value)

    return action


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


async def accept_registrations(node: fleets.Node) -> None:
    node.kubelet.accept_registrations(accepts=True)


async def add_device_unreported(node: fleets.Node) -> None:
    await node.plugin.sabotage("mute", 1)
    node.add_device()


async def report_devices(node: fleets.Node) -> None:
    await node.plugin.sabotage("mute", 0)
    node.add_device()


async def miscount(node: fleets.Node) -> None:
    await node.miscount(-1)


async def count_correctly(node: fleets.Node) -> None:
    await node.miscount(0)


async def cut_cable(node: fleets.Node) -> None:
    node.cable.cut()


async def restore_cable(node: fleets.Node) -> None:
    node.cable.restore()


async def power_off(node: fleets.Node) -> None:
    """Simulate a power failure: no connection is closed, and no lease is renewed."""
    node.cable.cut()
    node.is_kubelet_alive = False
    node.plugin.send(signal.SIGSTOP)
    await node.machine.end()


async def boot(node: fleets.Node) -> None:
    await node.plugin.end()
    node.cable.restore()
    await node.machine.start()
    node.is_kubelet_alive = True
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


async def start_twice(node: fleets.Node) -> None:
    await node.start_other()


async def stop_other(node: fleets.Node) -> None:
    await node.end_others(signal.SIGTERM)


async def start_without_plugin(node: fleets.Node) -> None:
    await node.start(with_plugin=False)


SELF_HEALING: Final = (
    Fault(
        name="a-restarts",
        title="the process crashes and comes back at once",
        inject=restart,
        heal=do_nothing,
        verdict=None,
        alert=None,
        unalerted_verdicts=frozenset({Verdict.PLUGIN_DOWN}),
    ),
    Fault(
        name="e-recovers",
        title="its ListAndWatch breaks, and it registers again",
        inject=drop_stream,
        heal=do_nothing,
        verdict=None,
        alert=None,
    ),
    Fault(
        name="f-recovers",
        title="its socket is removed, and it creates another",
        inject=remove_socket,
        heal=do_nothing,
        verdict=None,
        alert=None,
    ),
)
"""Faults that a plugin repairs by itself: no alert may follow."""
FAULTS: Final = (
    Fault(
        name="a",
        title="the process crashes and does not come back",
        inject=kill,
        heal=start,
        verdict=Verdict.PLUGIN_DOWN,
        alert=AlertKind.PLUGIN_DOWN,
        evidence=("connection closed", "no process is subscribed", "CrashLoopBackOff"),
        has_holder=True,
    ),
    Fault(
        name="b",
        title="its gRPC server accepts calls and never answers",
        inject=sabotage("hang", 1),
        heal=sabotage("hang", 0),
        verdict=Verdict.STUCK,
        alert=AlertKind.STUCK,
        evidence=("its socket does not answer",),
        # when it answers again, it still has to register
        transient_verdicts=frozenset({Verdict.DEREGISTERED}),
    ),
    Fault(
        name="c",
        title="its event loop blocks",
        inject=sabotage("block", 1),
        heal=sabotage("block", 0),
        verdict=Verdict.STUCK,
        alert=AlertKind.STUCK,
        evidence=("none for", "lease renewed"),
        has_holder=True,
    ),
    Fault(
        name="d",
        title="the kubelet restarts and refuses its registration",
        inject=restart_kubelet_for_ever,
        heal=accept_registrations,
        verdict=Verdict.DEREGISTERED,
        alert=AlertKind.DEREGISTERED,
        evidence=(fleets.RESOURCE, "registration"),
    ),
    Fault(
        name="e",
        title="its ListAndWatch stream breaks for good",
        inject=drop_stream_for_ever,
        heal=accept_registrations,
        verdict=Verdict.DEREGISTERED,
        alert=AlertKind.DEREGISTERED,
        evidence=(fleets.RESOURCE, "registration"),
        has_holder=True,
    ),
    Fault(
        name="f",
        title="its socket is removed, and it cannot register another",
        inject=remove_socket_for_ever,
        heal=accept_registrations,
        verdict=Verdict.DEREGISTERED,
        alert=AlertKind.DEREGISTERED,
        evidence=(fleets.RESOURCE, "registration"),
    ),
    Fault(
        name="g",
        title="it has one more device than the kubelet knows of",
        inject=add_device_unreported,
        heal=report_devices,
        verdict=Verdict.MISMATCH,
        alert=AlertKind.MISMATCH,
        evidence=(r"the kubelet does not list \S+, for \d+ s",),
    ),
    Fault(
        name="g-node",
        title="the node's allocatable is one device too low",
        inject=miscount,
        heal=count_correctly,
        verdict=Verdict.MISMATCH,
        alert=AlertKind.MISMATCH,
        evidence=(r"the plugin reports \d+ Healthy, the node's allocatable is \d+ of \d+",),
    ),
    Fault(
        name="h",
        title="nothing checks its devices any more",
        inject=sabotage("blind", 1),
        heal=sabotage("blind", 0),
        verdict=Verdict.DEGRADED,
        alert=AlertKind.DEGRADED,
        evidence=(r"health checker \w+ last succeeded",),
    ),
    Fault(
        name="i",
        title="NATS cannot reach its node",
        inject=cut_cable,
        heal=restore_cable,
        verdict=Verdict.UNREACHABLE,
        alert=AlertKind.UNREACHABLE,
        evidence=("lease renewed", "Running, Ready", "allocatable"),
        has_cable=True,
    ),
    Fault(
        name="j",
        title="its node dies",
        inject=power_off,
        heal=boot,
        verdict=Verdict.NODE_DOWN,
        alert=AlertKind.NODE_DOWN,
        evidence=(r"lease renewed \d+ s ago",),
        # when it boots, its kubelet is up before its plugin
        transient_verdicts=frozenset({Verdict.PLUGIN_DOWN}),
        has_cable=True,
        has_holder=True,
    ),
    Fault(
        name="k",
        title="it is stopped, and announces that",
        inject=stop,
        heal=start,
        verdict=Verdict.MAINTENANCE,
        alert=None,
        evidence=("announced a stop",),
    ),
    Fault(
        name="k-drain",
        title="its node is drained, and it stops without announcing it",
        inject=drain,
        heal=undrain,
        verdict=Verdict.MAINTENANCE,
        alert=None,
        evidence=("node is unschedulable",),
    ),
    Fault(
        name="m",
        title="its node's clock is an hour ahead",
        inject=sabotage("clock", 3600),
        heal=sabotage("clock", 0),
        verdict=None,
        alert=AlertKind.CLOCK_SKEW,
        evidence=(r"its clock is 3[56]\d\d\.\d s ahead of health's",),
    ),
    Fault(
        name="n",
        title="it gets a sixth of the CPU time",
        inject=throttle,
        heal=unthrottle,
        verdict=Verdict.DEGRADED,
        alert=AlertKind.DEGRADED,
        evidence=("ms late|it sends a heartbeat every|health checker",),
    ),
    Fault(
        name="o",
        title="it runs twice",
        inject=start_twice,
        heal=stop_other,
        verdict=Verdict.SPLIT_BRAIN,
        alert=AlertKind.SPLIT_BRAIN,
        evidence=("two processes send heartbeats alternately",),
        counts_when_made=True,
    ),
    Fault(
        name="p",
        title="it never starts on a new node",
        inject=start_without_plugin,
        heal=start,
        verdict=Verdict.MISSING,
        alert=AlertKind.MISSING,
        evidence=("none yet", "the plugin has no pod"),
        starts_without_plugin=True,
    ),
)
