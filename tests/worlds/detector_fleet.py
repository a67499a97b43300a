"""A simulated fleet, bus and cluster, with health services that lead, follow, pause and crash."""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from typing import Final

import msgspec

from muster import vocabulary
from muster.vocabulary import AlertKind, AlertState, Health, StopReason, Verdict
from muster_health.fleet import detector
from muster_health.model import config, signals, snapshot

ZERO = datetime(2026, 11, 21, tzinfo=UTC)
GPU = "nvidia.com/gpu"
SETTINGS = config.Detection(
    patience_s=30.0, hold_s=5.0, hold_max_s=40.0, flap_window_s=100.0, ready_s=15.0
)
Told = vocabulary.VerdictChanged | vocabulary.AlertChanged | vocabulary.RemediationDecided
MANY = 10**9


_PROBED_S: Final = 12.0
"""How long after its suspension the readiness probes of a process have failed."""


@dataclass
class Plugin:
    """The true state of one plugin that sends heartbeats, and of its node, which has a lease."""

    node: str
    alive: bool = True
    suspended: bool = False
    cut: bool = False
    node_up: bool = True
    stopped: bool = False
    apart: bool = False
    kubelet_dead: bool = False
    offered: int | None = None
    skew_s: float = 0.0
    interval_s: float = 1.0
    short: str = ""
    devices: int = 2
    healthy: int | None = None
    configuration: str = ""
    problems: tuple[str, ...] = ()
    holders: tuple[str, ...] | None = ("ml/train",)
    """The pods that request its devices; None if this cannot be read."""
    extended: bool = True
    """Whether its resource is an extended resource; the FUSE broker's is not."""
    mounts: dict[str, vocabulary.FuseMount] = field(default_factory=dict)
    watched: dict[str, vocabulary.Watched] = field(default_factory=dict)
    """What it observes of third-party plugins, by name."""
    others: tuple[signals.Pod, ...] | None = None
    """The pods of the watched plugins, as the Kubernetes API shows them."""
    planned: tuple[signals.Planned, ...] = ()
    offers: dict[str, int] = field(default_factory=dict)
    """How many devices of other resources the node offers."""
    twin_seq: int = 0
    broken: set[str] = field(default_factory=set)
    instance: int = 0
    seq: int = 0
    sequence: int = 0
    connection: int = 0
    lease_at: float = 0.0
    died_at: float = -1e9
    frozen_at: float = 0.0
    shows_after_s: float = 1.0

    @property
    def sends_heartbeats(self) -> bool:
        return self.alive and not self.suspended and not self.cut and self.node_up

    def beat(self, now: float) -> vocabulary.Heartbeat:
        self.seq += 1
        return vocabulary.Heartbeat(
            node=self.node,
            plugin="p",
            instance=f"{self.node}-{self.instance}",
            seq=self.seq,
            interval_s=self.interval_s,
            config_hash=self.configuration,
            problems=self.problems,
            wall=(ZERO + timedelta(seconds=now)).timestamp() - self.skew_s,
            resources=(
                vocabulary.ResourceBeat(
                    name=GPU,
                    streams=int(not (self.apart or self.kubelet_dead)),
                    kubelet_away=self.kubelet_dead,
                    probe_ok=True,
                    probe_age_s=0.0,
                    devices=self.devices,
                    healthy=self.devices if self.healthy is None else self.healthy,
                    short=self.short,
                    extended=self.extended,
                ),
            ),
        )

    def facts(self, now: float) -> signals.Facts:
        crashed = not self.alive and now - self.died_at > self.shows_after_s
        mute = self.suspended and now - self.frozen_at > _PROBED_S
        waiting = "CrashLoopBackOff" if crashed and not self.stopped else ""
        pod = signals.Pod(
            name="m/p",
            uid="1",
            phase="Running",
            ready=not (crashed or mute),
            waiting=waiting,
            deleting=self.stopped,
        )
        dead = 0 if crashed else 2
        count = dead if self.offered is None else self.offered
        return signals.Facts(
            exists=True,
            lease_age_s=now - self.lease_at,
            ready=self.node_up,
            planned=self.planned,
            pods=(pod,),
            offers=self._offers(count),
        )

    def _offers(self, count: int) -> dict[str, signals.Offer]:
        own = {GPU: signals.Offer(capacity=2, allocatable=count)} if self.extended else {}
        others = {
            name: signals.Offer(capacity=count, allocatable=count)
            for name, count in self.offers.items()
        }
        return own | others


class Service:
    """One health process: a detector, its clock, and the answers it waits for."""

    def __init__(self, world: "World", leader: int | None) -> None:
        self.world = world
        self.zero = -1000.0 * world.boots
        self.answers: list[tuple[float, signals.Input]] = []
        self.crash_after = MANY
        self.crashed = False
        self.drops = False
        self.detector = detector.Detector(
            SETTINGS,
            runbook_url="",
            at_zero=ZERO + timedelta(seconds=self.zero),
            has_cluster=world.has_cluster,
            restarts=world.remediation,
            bounds=world.bounds,
            leader=None,
        )
        for value in list(world.stored.values()):
            self.feed(signals.Restored(state=snapshot.decode(value)))
        if world.has_cluster:
            nodes = {node: signals.Expected(age_s=0.0) for node in world.plugins}
            self.feed(signals.ExpectedNodes(plugin="p", nodes=nodes))
        if leader is not None:
            self.feed(signals.Leadership(revision=leader))
        self.feed(signals.BusBack(at=ZERO + timedelta(seconds=world.now)))

    @property
    def clock(self) -> float:
        return self.world.now - self.zero

    def feed(self, event: signals.Input) -> None:
        if not self.crashed:
            self.do(self.detector.receive(event, self.clock))

    def tick(self) -> None:
        due = self.detector.next_deadline()
        if due is not None and due <= self.clock and not self.crashed:
            self.do(self.detector.tick(self.clock))
            later = self.detector.next_deadline()
            assert later is None or later > self.clock or self.crashed
        for at, answer in sorted(self.answers, key=lambda pair: pair[0]):
            if at <= self.world.now:
                self.answers.remove((at, answer))
                self.feed(answer)

    def do(self, outs: Iterable[signals.Output]) -> None:
        for out in outs:
            if self.crash_after == 0:
                self.crashed = True
                return
            self.crash_after -= 1
            match out:
                case signals.Probe():
                    self.answers.append(self.world.answer(out))
                case signals.AskCluster():
                    self.answers.append(self.world.learn(out))
                case signals.Store() | signals.Publish() if self.drops:
                    pass
                case signals.Store():
                    assert self.detector.leader is not None
                    self.world.remember(out)
                case signals.Publish():
                    assert self.detector.leader is not None
                    self.world.publish(out)
                case signals.Remediate():
                    done = signals.Remediated(node=out.node, plugin=out.plugin, pod=out.pod)
                    self.answers.append((self.world.now + 0.1, done))
                case signals.Alarm() | signals.Noted():
                    self.world.noted.append(out)


class World:
    """A virtual clock, a bus, a cluster, plugins, and health services, the first of which leads."""

    def __init__(
        self,
        *nodes: str,
        has_cluster: bool = True,
        services: int = 1,
        interval_s: float = 1.0,
        remediation: config.Remediation | None = None,
        bounds: config.Bounds | None = None,
    ) -> None:
        self.now = 0.0
        self.remediation = remediation
        self.bounds = bounds
        self.has_cluster = has_cluster
        self.asked: list[signals.AskCluster] = []
        self.mute = False
        """Whether the Kubernetes API fails to list pods."""
        self.list_s = 0.02
        """How long it takes to list the pods of a node; lists are made one after another."""
        self._listed_at = 0.0
        self.interval_s = interval_s
        self.plugins = {node: Plugin(node, interval_s=interval_s) for node in nodes}
        self.stored: dict[str, bytes] = {}
        self.published: dict[str, Told] = {}
        self.noted: list[signals.Output] = []
        self.boots = 0
        self._revision = 0
        self._events: list[signals.Input] = []
        self._unacked: list[signals.Input] = []
        self._beats_due = 0.3
        self.services: list[Service] = []
        for number in range(services):
            self.start(leads=number == 0)

    # health

    def start(self, *, leads: bool) -> None:
        self.boots += 1
        if leads:
            self._revision += 1
        self.services.append(Service(self, self._revision if leads else None))

    def crash(self, away_s: float = 0.0) -> None:
        """Let the leader crash; another service leads at once, or else a new one after `away_s`."""
        self.services.pop(0)
        self._replace(away_s)

    def _replace(self, away_s: float) -> None:
        self._events = self._unacked + self._events
        self._unacked = []
        if not self.services:
            self.now += away_s
            self.start(leads=True)
            return
        self._revision += 1
        heir = self.services[0]
        for value in list(self.stored.values()):
            heir.feed(signals.Restored(state=snapshot.decode(value)))
        heir.feed(signals.Leadership(revision=self._revision))
        self.start(leads=False)

    def crash_after(self, outs: int) -> None:
        self.services[0].crash_after = outs

    def lose_lead(self) -> None:
        """Let the leader lose its lead without noticing: what it stores or publishes is dropped."""
        self.services[0].drops = True

    def lead_again(self) -> None:
        self._revision += 1
        service = self.services[0]
        service.feed(signals.Leadership(revision=None))
        service.drops = False
        for value in list(self.stored.values()):
            service.feed(signals.Restored(state=snapshot.decode(value)))
        service.feed(signals.Leadership(revision=self._revision))

    # plugins and nodes

    def kill(self, node: str) -> None:
        plugin = self.plugins[node]
        if plugin.alive:
            plugin.alive, plugin.died_at = False, self.now
            if plugin.node_up and not plugin.cut:
                self._disconnect(plugin, "Client Closed")

    def freeze(self, node: str) -> None:
        plugin = self.plugins[node]
        if not plugin.suspended:
            plugin.suspended, plugin.frozen_at = True, self.now

    def cut(self, node: str) -> None:
        plugin = self.plugins[node]
        if not plugin.cut and plugin.node_up:
            plugin.cut = True
            self._disconnect(plugin, "Stale Connection")

    def down(self, node: str) -> None:
        self.plugins[node].node_up = False

    def stop(self, node: str) -> None:
        plugin = self.plugins[node]
        if plugin.sends_heartbeats:
            self._report(
                plugin,
                vocabulary.PluginStopping(node=node, at=ZERO, plugin="p", reason=StopReason.SIGNAL),
            )
            plugin.alive, plugin.stopped, plugin.died_at = False, True, self.now
            self._disconnect(plugin, "Client Closed")

    def part(self, node: str) -> None:
        self.plugins[node].apart = True

    def mend(self, node: str) -> None:
        plugin = self.plugins[node]
        if not plugin.alive:
            plugin.instance, plugin.seq, plugin.sequence = plugin.instance + 1, 0, 0
        if not plugin.sends_heartbeats:
            plugin.connection += 1
            self._feed_all(
                signals.Connected(node=node, plugin="p", server="nats-0", client=plugin.connection)
            )
        plugin.alive = plugin.node_up = True
        plugin.suspended = plugin.cut = plugin.stopped = plugin.apart = False
        plugin.kubelet_dead = False
        self._report(
            plugin,
            vocabulary.PluginStarted(
                node=node,
                at=ZERO,
                plugin="p",
                version="1",
                instance=f"{node}-{plugin.instance}",
            ),
        )
        self.report(node)

    def replace(self, node: str, devices: int, configuration: str | None = None) -> None:
        """Replace a plugin's process by another one, which finds `devices` devices."""
        plugin = self.plugins[node]
        plugin.instance, plugin.seq, plugin.sequence = plugin.instance + 1, 0, 0
        plugin.devices = devices
        plugin.configuration = configuration or plugin.configuration
        self.report(node)

    def lose(self, node: str) -> None:
        """Replace a plugin's process by another one, which finds one device less."""
        plugin = self.plugins[node]
        if plugin.sends_heartbeats:
            self.replace(node, max(0, plugin.devices - 1))

    def hold(self, node: str, pods: int) -> None:
        """Let `pods` pods request a node's devices."""
        self.plugins[node].holders = tuple(f"ml/{number:03}" for number in range(pods))

    def hush(self, mute: bool) -> None:  # noqa: FBT001  # a step of a property
        self.mute = mute

    def unplug(self, node: str, device: str) -> None:
        """Remove a device; its plugin reports that."""
        plugin = self.plugins[node]
        plugin.devices -= 1
        self._report(
            plugin,
            vocabulary.DeviceRemoved(
                node=node, at=ZERO, plugin="p", resource=GPU, device_id=device, reason="not there"
            ),
        )

    def turn(self, node: str, device: str) -> None:
        plugin = self.plugins[node]
        plugin.broken ^= {device}
        if plugin.sends_heartbeats:
            self._report(
                plugin,
                vocabulary.DeviceHealthChanged(
                    node=node,
                    at=ZERO,
                    plugin="p",
                    resource=GPU,
                    device_id=device,
                    health=Health.UNHEALTHY if device in plugin.broken else Health.HEALTHY,
                    reason="XID 79",
                ),
            )

    def report(self, node: str) -> None:
        plugin = self.plugins[node]
        devices = tuple(
            vocabulary.Device(
                id=device,
                resource=GPU,
                health=Health.UNHEALTHY if device in plugin.broken else Health.HEALTHY,
                reason="XID 79",
            )
            for device in map(str, range(plugin.devices))
        )
        self._report(
            plugin,
            vocabulary.InventoryReported(
                node=node,
                at=ZERO,
                plugin="p",
                devices=devices if plugin.extended else (),
                fuse_mounts=tuple(plugin.mounts.values()),
                watched=tuple(plugin.watched.values()),
            ),
        )

    def refuse(self, node: str, *problems: str) -> None:
        """Let a plugin refuse its changed configuration."""
        plugin = self.plugins[node]
        self._report(
            plugin,
            vocabulary.ConfigurationRefused(
                node=node,
                at=ZERO,
                plugin="p",
                config_hash=plugin.configuration,
                problems=problems,
            ),
        )

    def apply(self, node: str, configuration: str, *, is_heard: bool = True) -> None:
        """Let a plugin apply a configuration; if not `is_heard`, the event is lost."""
        plugin = self.plugins[node]
        plugin.configuration = configuration
        if is_heard:
            self._report(
                plugin,
                vocabulary.ConfigurationApplied(
                    node=node, at=ZERO, plugin="p", config_hash=configuration
                ),
            )

    def observe(self, node: str, watched: vocabulary.Watched) -> None:
        """Let the agent report a change of what it observes of a watched plugin."""
        plugin = self.plugins[node]
        plugin.watched[watched.name] = watched
        if plugin.sends_heartbeats:
            self._report(
                plugin,
                vocabulary.PluginObserved(node=node, at=ZERO, plugin="p", watched=watched),
            )

    def unwatch(self, node: str, name: str) -> None:
        """Let the agent report that a watched plugin was removed."""
        plugin = self.plugins[node]
        event = vocabulary.PluginObserved(
            node=node, at=ZERO, plugin="p", watched=plugin.watched.pop(name), gone=True
        )
        self._report(plugin, event)

    def offer_other(self, node: str, name: str, count: int) -> None:
        """Let a node offer `count` devices of a resource other than the agent's."""
        plugin = self.plugins[node]
        plugin.offers[name] = count
        self._feed_all(signals.NodeOffers(node=node, offers=plugin.facts(self.now).offers))

    def change_mount(
        self, node: str, mount: vocabulary.FuseMount, condition: vocabulary.FuseCondition
    ) -> None:
        """Let a condition of a mount begin, or end if it already holds."""
        plugin = self.plugins[node]
        before = plugin.mounts.get(mount.id, mount)
        holds = condition not in before.conditions
        conditions = (
            {*before.conditions, condition} if holds else {*before.conditions} - {condition}
        )
        plugin.mounts[mount.id] = msgspec.structs.replace(
            before, conditions=tuple(sorted(conditions))
        )
        self._report(
            plugin,
            vocabulary.FuseMountChanged(
                node=node,
                at=ZERO,
                plugin="p",
                mount=plugin.mounts[mount.id],
                condition=condition,
                holds=holds,
                text="observed",
            ),
        )

    def broker(self, *nodes: str) -> None:
        """Turn the plugins of these nodes into FUSE brokers, whose resource no node offers."""
        for node in nodes:
            self.plugins[node].extended = False
            self._feed_all(signals.NodeOffers(node=node, offers={}))

    def offer(self, node: str, count: int | None) -> None:
        plugin = self.plugins[node]
        plugin.offered = count
        offers = {GPU: signals.Offer(capacity=2, allocatable=2 if count is None else count)}
        self._feed_all(signals.NodeOffers(node=node, offers=offers))

    def outage(self, seconds: float) -> None:
        """Make the bus unavailable for a while."""
        for service in self.services:
            service.feed(signals.BusLost())
            service.answers.clear()
        self._beats_due = self.now + seconds
        self.run(seconds)
        for service in self.services:
            service.feed(signals.BusBack(at=ZERO + timedelta(seconds=self.now)))

    def run(self, seconds: float) -> None:
        end = self.now + seconds
        while True:
            moments = [self._beats_due]
            for service in self.services:
                due = service.detector.next_deadline()
                moments += [at for at, _ in service.answers]
                moments += [] if due is None else [due + service.zero]
            if min(moments) > end:
                break
            self.now = max(self.now, min(moments))
            self._turn()
        self.now = max(end, self.now)

    # what health stores, publishes and asks

    def alerts(self) -> list[tuple[str, AlertKind, str]]:
        """Return the alerts that fire at the end; check that the published events are in order."""
        firing: dict[str, vocabulary.AlertChanged] = {}
        for event in self.published.values():
            if not isinstance(event, vocabulary.AlertChanged):
                continue
            before = firing.pop(event.fingerprint, None)
            assert event.evidence, "an alert without evidence"
            if event.change == 0:
                assert before is None, "fired twice"
            else:
                assert before is not None, "changed what did not fire"
                assert (before.starts_at, before.change) == (event.starts_at, event.change - 1)
            if event.state is AlertState.FIRING:
                firing[event.fingerprint] = event
        return sorted((e.node, e.kind, "".join(e.devices)) for e in firing.values())

    def story(self, node: str) -> list[tuple[AlertKind, AlertState]]:
        return [
            (event.kind, event.state)
            for event in self.published.values()
            if isinstance(event, vocabulary.AlertChanged) and event.node == node
        ]

    def named(self, node: str) -> list[tuple[AlertKind, AlertState, tuple[str, ...]]]:
        """Return the alert events published about a node, with the pods that they name."""
        return [
            (event.kind, event.state, event.pods)
            for event in self.published.values()
            if isinstance(event, vocabulary.AlertChanged) and event.node == node
        ]

    def verdicts(self, node: str) -> list[Verdict]:
        return [
            event.verdict
            for event in self.published.values()
            if isinstance(event, vocabulary.VerdictChanged) and event.node == node
        ]

    def publish(self, out: signals.Publish) -> None:
        before = self.published.setdefault(out.event_id, out.event)
        assert _without_leader(before) == _without_leader(out.event), "one id, two facts"

    def remember(self, out: signals.Store) -> None:
        self.stored[out.key] = out.value
        if not out.value:
            del self.stored[out.key]

    def learn(self, question: signals.AskCluster) -> tuple[float, signals.Input]:
        """Return when the Kubernetes API answers, and what."""
        self.asked.append(question)
        plugin = self.plugins.get(question.node)
        before, at = None if plugin is None else plugin.facts(self.now), self.now + 0.02
        if plugin is not None and before is not None and question.watched:
            before = None if self.mute else replace(before, pods=plugin.others)
        if plugin is not None and question.resources:
            is_watched = question.plugin.startswith(vocabulary.WATCHED_PREFIX)
            assert is_watched or question.resources == (GPU,)
            before = None if self.mute else signals.Facts(holders=plugin.holders)
            at = self._listed_at = max(self._listed_at, self.now) + self.list_s
            at = self.now + question.timeout_s if self.mute else at
        answer = signals.ClusterAnswered(
            node=question.node,
            plugin=question.plugin,
            number=question.number,
            facts=before,
            resources=question.resources,
        )
        return at, answer

    def answer(self, probe: signals.Probe) -> tuple[float, signals.Input]:
        plugin = self.plugins[probe.node]
        if plugin.sends_heartbeats:
            beat = plugin.beat(self.now)
            return self.now + 0.01, signals.ProbeAnswered(heartbeat=beat, number=probe.number)
        connected = plugin.alive and not plugin.cut
        failed = signals.ProbeFailed(
            node=probe.node, plugin=probe.plugin, number=probe.number, subscribed=connected
        )
        return self.now + (probe.timeout_s if connected else 0.01), failed

    def _turn(self) -> None:
        for service in self.services:
            service.tick()
        if self._beats_due <= self.now:
            self._beats_due = self.now + self.interval_s
            self._listen()
        if self.services[0].crashed:
            self.crash()

    def _listen(self) -> None:
        for plugin in self.plugins.values():
            renews = plugin.node_up and not plugin.kubelet_dead
            if renews and self.now - plugin.lease_at >= 10.0:
                plugin.lease_at = self.now
            if plugin.sends_heartbeats:
                self._feed_all(signals.HeartbeatArrived(heartbeat=plugin.beat(self.now)))
        self.deliver()

    def deliver(self) -> None:
        """Deliver the events of plugins now, not with the next heartbeats."""
        self._unacked = []
        while self._events:
            event = self._events.pop(0)
            self._feed_all(event)
            # an event that was not acknowledged before a crash is delivered again
            if self.services[0].crashed:
                self._unacked.append(event)

    def _feed_all(self, event: signals.Input) -> None:
        for service in self.services:
            service.feed(event)

    def _disconnect(self, plugin: Plugin, reason: str) -> None:
        self._feed_all(
            signals.Disconnected(
                node=plugin.node,
                plugin="p",
                server="nats-0",
                client=plugin.connection,
                reason=reason,
            )
        )

    def _report(self, plugin: Plugin, event: vocabulary.PluginEvent) -> None:
        plugin.sequence += 1
        self._events.append(
            signals.FromPlugin(
                event=event,
                instance=f"{plugin.node}-{plugin.instance}",
                sequence=plugin.sequence,
                position=len(self.published) + 1,
            )
        )


def _without_leader(event: Told) -> bytes:
    return repr(event).replace(f"leader={event.leader}", "").encode()


def running(*nodes: str, **how: object) -> World:
    world = World(*nodes, **how)  # type: ignore[arg-type]  # by name
    world.run(10.0)
    for node in nodes:
        assert world.verdicts(node) == [Verdict.HEALTHY]
    return world
