"""Door to the process: the plugin from its settings to its goodbye.

What makes devices usable comes first: sockets, then Register. What makes them visible, the bus and
the probes, is imported and connected when that is done. The bus may stay away for ever.
"""

import asyncio
import contextlib
import functools
import os
import signal
import sys
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeVar

import msgspec

import muster
from muster import entry, lean, logs, runtime, settings, vocabulary
from muster_plugin import (
    aside,
    beats,
    config,
    directory,
    gpu_health,
    gpu_rules,
    gpus,
    inotify,
    kubelet,
    lines,
    nvml,
    policy,
    presets,
    rulebook,
    simulated,
    start,
)
from muster_plugin import node as node_door

if TYPE_CHECKING:
    from muster import bus

_GOODBYE_S: Final = 0.5
In = TypeVar("In")
Out = TypeVar("Out")

_READ_TIMEOUT_S: Final = 5.0
_READ_PERIOD_S: Final = 60.0
_WRITTEN_S: Final = 0.05
_PEERS: Final = ("smarter", "generic", "nvidia")
_MISSED_BEATS_MAX: Final = 3
_PROBLEMS_MAX: Final = 100
_HTTP: Final = ("http.server", "ssl", "urllib.request", "wsgiref", "wsgiref.simple_server")
"""What prometheus-client serves and pushes with; our probes do the serving."""


def main() -> int:
    """Run the plugin; return the exit code."""
    return entry.run("plugin", config.Settings, serve, formats=_formats(), resolve=_resolved)


async def serve(chosen: config.Settings, source: entry.Source[config.Settings]) -> None:
    """Serve the node's devices until SIGTERM. Raises CannotStart."""
    try:
        node = _node(chosen)
        reporter = Reporter(chosen, node)
        try:
            # in here already when it waits for another's end: SIGTERM may come meanwhile
            await runtime.run(
                *node.works(lambda: _be_alone(chosen, node)),
                reporter.report(),
                *([reporter.reload(source)] if source.file else []),
                told=node.over,
            )
        finally:
            await node.close()
    except start.CannotServe as error:
        raise entry.CannotStart(str(error)) from None


def _resolved(chosen: config.Settings) -> object:
    """Return the settings with what holds on this node. Raises CannotStart as `serve` does."""
    try:
        name = start.node_name(chosen.node)
        start.check(chosen)
        here = chosen.at(name)
        if here.gpus is not None:
            from muster_plugin import presets  # noqa: PLC0415  # GPUs only

            presets.read(here.gpus.health)
    except start.CannotServe as error:
        raise entry.CannotStart(str(error)) from None
    except settings.BadSettings:
        raise
    except ValueError as error:
        raise entry.CannotStart(f"resources: {error}") from None
    of_node = {"node": name, "resources": here.resources, "gpus": here.gpus, "nodes": ()}
    return {**msgspec.to_builtins(chosen), **of_node}


def _node(chosen: config.Settings) -> node_door.Node:
    """Return the node, of which nothing is known yet. Raises CannotServe."""
    name = start.node_name(chosen.node)
    start.check(chosen)
    try:
        here = chosen.at(name)
    except ValueError as error:
        raise start.CannotServe(f"resources: {error}") from None
    logs.configure("plugin", level=chosen.log.level, node=name)
    for stale in directory.remove_stale(_folders(chosen)):
        logs.logger().info("stale_socket_removed", socket=stale)
    node = node_door.Node(
        chosen,
        name,
        line=_line,
        seen=_gpus(chosen, here, name),
        resources_max=start.resources_max(),
    )
    node.lives.claims.remove_stale()
    return node


async def _be_alone(chosen: config.Settings, node: node_door.Node) -> None:
    gpus_here = chosen.at(node.name).gpus
    names = {*node.inventory.resources, *(gpus_here.names() if gpus_here else ())}
    await start.be_alone(names, _folders(chosen), node.lives.claims, handover_s=chosen.handover_s)


def _folders(chosen: config.Settings) -> list[Path]:
    root = Path(chosen.kubelet.directory)
    return [root / folder for folder in (config.SOCKET_DIRECTORY, config.REGISTRY_DIRECTORY)]


def _line() -> lines.Line[In, Out]:
    inbox: asyncio.Queue[runtime.Delivery[In]] = asyncio.Queue(runtime.INBOX_MAX)
    return lines.Line(
        tell=lambda event: inbox.put_nowait(runtime.Delivery(event)),
        drive=lambda driven, act: runtime.drive(driven, inbox, act),
    )


def _gpus(chosen: config.Settings, here: rulebook.Here, node: str) -> gpus.Gpus | None:
    """Return whoever sees the node's GPUs, and what judges them; None if there are to be none."""
    if here.gpus is None:
        return None
    health = here.gpus.health
    seen: gpus.Source
    if chosen.simulated_gpus:
        seen = simulated.Simulated(chosen.simulated_gpus, node, poll_s=health.poll_s)
    else:
        seen = nvml.Nvml(here.gpus)
    return gpus.Gpus(seen, gpu_health.GpuHealth(_judge(health), health), _line())


def _judge(health: gpu_rules.Health) -> policy.Policy:
    """Return what the files say of XIDs. Raises settings.BadSettings."""
    judge = presets.read(health)
    for problem in judge.problems:
        _log_once(problem)
    return judge


@functools.lru_cache(_PROBLEMS_MAX)
def _log_once(problem: str) -> None:
    logs.logger().warning("policy_problem", problem=problem)


class Reporter:
    """Tells the bus, Kubernetes' probes and Prometheus what the node does."""

    def __init__(self, chosen: config.Settings, node: node_door.Node) -> None:
        self._settings = chosen
        self._node = node
        self._who = beats.Identity(
            node=node.name,
            plugin=node.plugin,
            instance="unconnected",
            boot=start.boot(),
            version=muster.__version__,
            config_hash=chosen.hash,
            interval_s=chosen.heartbeat.interval_s,
            started_at=time.monotonic(),
        )
        self._beat_at = self._who.started_at
        self._lag_s = 0.0
        self._sequence = 0
        self._is_draining = False
        self._reading = asyncio.Event()
        self._files = aside.Lane()

    async def report(self) -> None:
        """Connect to everything slow, and speak until cancelled.

        A goodbye is said only if it is over on purpose: a crash must look like one.
        """
        await self._node.lives.settle()
        lean.load("nats.aio.client", without=["_hashlib", "aiohttp", "importlib.metadata"])
        lean.load("prometheus_client", hollow=_HTTP)
        from muster import bus, codec, probes  # noqa: PLC0415  # 60 ms, after the registration
        from muster_plugin import metrics  # noqa: PLC0415  # the same

        metrics.register(self._node, self._beat_age_s)
        http, who = self._settings.http, self._who
        async with (
            bus.Bus(
                self._settings.bus.url,
                producer=f"plugins/{who.plugin}",
                name=f"{who.plugin} {who.node}",
                boot=who.boot,
            ) as connected,
            probes.serve(
                http.host, http.port, ready=self._not_ready, healthy=self._stuck
            ) as address,
        ):
            self._who = msgspec.structs.replace(who, instance=connected.instance)
            logs.logger().info("listening", http=address)
            await connected.answer(
                vocabulary.rpc_subject(who.node, who.plugin, "probe"),
                lambda: codec.encode_heartbeat(self._heartbeat(connected)),
            )
            try:
                async with asyncio.TaskGroup() as tasks:
                    tasks.create_task(self._beat(connected))
                    tasks.create_task(self._resync(connected))
                    tasks.create_task(self._snapshots(connected))
            finally:
                if self._node.over.is_set():
                    await self._goodbye(connected)

    async def _beat(self, connected: "bus.Bus") -> None:
        """Beat on the interval, and at once when a problem appears or goes."""
        clock = asyncio.get_running_loop().time
        interval_s = self._settings.heartbeat.interval_s
        due = clock() + beats.first_beat_s(self._node.name, interval_s)
        while True:
            try:
                async with asyncio.timeout_at(due):
                    await self._node.problem_turned.wait()
                self._node.problem_turned.clear()
            except TimeoutError:
                # after a late beat the next is due at once, and punctual: that is no recovery
                self._lag_s = max(clock() - due, min(self._lag_s, interval_s) / 2)
                due = max(due + interval_s, clock())
            self._beat_at = clock()
            self._sequence += 1
            await connected.beat(self._heartbeat(connected))

    async def _resync(self, connected: "bus.Bus") -> None:
        """After every (re)connect, tell the whole story again; changes alone would drift."""
        async for is_connected in connected.link.changes():
            if not is_connected:
                continue
            connected.enqueue(
                vocabulary.PluginStarted(
                    node=self._node.name,
                    plugin=self._node.plugin,
                    at=datetime.now(UTC),
                    version=muster.__version__,
                    instance=connected.instance,
                    config_hash=self._who.config_hash,
                    resources=self._node.inventory.resources,
                )
            )
            self._node.teller.publish_to(connected.enqueue)
            self._tell_all(connected)

    async def _snapshots(self, connected: "bus.Bus") -> None:
        while True:
            await asyncio.sleep(self._settings.snapshot_period_s)
            if connected.link.is_connected:
                self._tell_all(connected)

    def _tell_all(self, connected: "bus.Bus") -> None:
        from muster import codec  # noqa: PLC0415  # loaded with the bus

        at = datetime.now(UTC)
        connected.enqueue(self._node.snapshot(at, bytes_max=codec.EVENT_BYTES_MAX))

    async def _goodbye(self, connected: "bus.Bus") -> None:
        self._is_draining = True
        connected.enqueue(
            vocabulary.PluginStopping(
                node=self._node.name,
                plugin=self._node.plugin,
                at=datetime.now(UTC),
                reason=self._node.stop_reason,
            )
        )
        if connected.link.is_connected and not await connected.flush(_GOODBYE_S):
            logs.logger().warning("goodbye_unheard")

    async def reload(self, source: entry.Source[config.Settings]) -> None:
        """Read the settings again when their file changes, or at SIGHUP; take what can be used."""
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGHUP, self._reading.set)
        try:
            # the first look reads what was read a moment ago
            await self._node.lives.settle()
            looks = inotify.looks(
                lambda: _around(source.file),
                period_s=_READ_PERIOD_S,
                mask=inotify.CONTENTS,
                settle_s=_WRITTEN_S,
                changed=self._reading,
            )
            async with contextlib.aclosing(looks):
                async for _ in looks:
                    await self._reread(source)
        finally:
            loop.remove_signal_handler(signal.SIGHUP)

    async def _reread(self, source: entry.Source[config.Settings]) -> None:
        try:
            found = await self._files.run(source.read, timeout_s=_READ_TIMEOUT_S)
            here = found.at(self._node.name)
            await self._judge_anew(here)
        except (ValueError, TimeoutError) as error:
            problems = tuple(str(error).splitlines()) or (f"{source.file}: does not answer",)
            self._node.teller.refused(problems, in_force=self._who.config_hash)
            self._node.problem_turned.set()
            return
        if found.hash == self._who.config_hash:
            self._node.teller.mended(found.hash)
            return
        restart = found.changed_for_the_process(self._settings)
        if here.gpus is not None and not self._node.sees_gpus:
            restart = (*restart, "gpus")
        self._who = msgspec.structs.replace(self._who, config_hash=found.hash)
        await self._node.configure(here, config_hash=found.hash, restart=restart)

    async def _judge_anew(self, here: rulebook.Here) -> None:
        """Judge GPUs by what the files say now. Raises ValueError or TimeoutError."""
        if here.gpus is not None and self._node.sees_gpus:
            health = here.gpus.health
            judge = await self._files.run(lambda: _judge(health), timeout_s=_READ_TIMEOUT_S)
            self._node.judge_by(judge, health)

    def _heartbeat(self, connected: "bus.Bus") -> vocabulary.Heartbeat:
        from muster import codec  # noqa: PLC0415  # loaded with the bus

        vitals = beats.Vitals(
            seq=self._sequence,
            phase=self._phase,
            kubelet=self._node.lives.kubelet_socket,
            checked_at=self._node.checked_at,
            lag_s=self._lag_s,
            reconnects=max(0, connected.link.epoch - 1),
            problems=self._node.teller.standing,
        )
        now = time.monotonic()
        return beats.heartbeat(
            self._who,
            vitals,
            self._node.states(),
            now=now,
            wall=time.time(),
            bytes_max=codec.HEARTBEAT_BYTES_MAX,
        )

    @property
    def _phase(self) -> vocabulary.Phase:
        if self._is_draining:
            return vocabulary.Phase.DRAINING
        has_served = self._node.lives.have_served
        return vocabulary.Phase.SERVING if has_served else vocabulary.Phase.STARTING

    def _not_ready(self) -> str | None:
        return beats.readiness(
            self._node.states(), now=time.monotonic(), probe_s=kubelet.PROBE_PERIOD_S
        )

    def _stuck(self) -> str | None:
        age_s = self._beat_age_s()
        if age_s > _MISSED_BEATS_MAX * self._settings.heartbeat.interval_s:
            return f"the event loop is stuck: the last beat was {age_s:.1f} s ago"
        return self._node.stuck(time.monotonic())

    def _beat_age_s(self) -> float:
        return time.monotonic() - self._beat_at


def _around(file: Path | None) -> set[Path]:
    """Return where a change of a file shows: a mounted ConfigMap changes by a link beside it."""
    return {file.parent, Path(os.path.realpath(file)).parent} if file else set()


def _formats() -> Mapping[str, settings.Foreign]:
    """Give what reads each peer's configuration; it is loaded only when it is wanted."""

    def reads(peer: str) -> settings.Foreign:
        return lambda text, source: _foreign(text, source, peer)

    return {peer: reads(peer) for peer in _PEERS}


def _foreign(text: bytes, source: str, peer: str) -> dict[str, object]:
    """Return the tree that another plugin's file stands for. Raises BadSettings."""
    from muster_plugin import configuration  # noqa: PLC0415  # most never need it

    found = configuration.imported(text, source=source, peer=configuration.Format(peer))
    tree: dict[str, object] = msgspec.to_builtins(found.rules)
    return tree


if __name__ == "__main__":
    sys.exit(main())
