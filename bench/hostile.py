"""Adapter for processes: measures how attacks by one hostile node affect the honest nodes.

`bench.production` is the environment: muster as in the production overlay. `bench.attacker` is the
hostile node, with its own token, at full speed; `bench.attacks` builds its messages. Before, during
and after each attack, an honest plugin is killed every few seconds, another node's inventory
changes, and the honest nodes publish events. The phase after the attack begins 30 s after its end.

Every attack has a fresh environment. The floor of a figure is the same figure before the attack. A
missing reaction counts with the full waiting time.

    python -m bench.hostile [--quick] [--nodes 1000] [--seconds 60] [--replicas 2]
                            [--only large,storm] [--json FILE]
"""

import argparse
import asyncio
import contextlib
import ssl
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any, Final

from bench import attacks, connections, hostile_rows, production, programs, report
from muster import codec, vocabulary
from muster.local import processes
from muster.nats import compat, streams
from muster.nats.auth import nkeys
from tests.worlds import bus_subjects

_SECONDS: Final = 60.0
_NODES: Final = 1_000
_REPLICAS: Final = 2
_EVENTS_S: Final = 20.0
_RECOVERY_S: Final = 30.0
_KILL_S: Final = 2.6
"""The interval between kills: more than four in ten seconds would be a mass failure."""
_REVIVE_S: Final = 1.0
_RENEW_S: Final = 8.0
_LATE_S: Final = 60.0
"""How long to wait for the samples of a phase after its end."""
_INVENTORY_S: Final = 2.0
_SAMPLE_S: Final = 0.5
_PROBE_S: Final = 1.0
_DISCONNECTED: Final = "muster_health_disconnected_seconds_total"


@dataclass(slots=True)
class _Heard:
    """The services' publications, as received by an administrator."""

    verdicts: asyncio.Condition = field(default_factory=asyncio.Condition)
    fell_at: dict[str, float] = field(default_factory=dict)
    labelled_at: dict[str, float] = field(default_factory=dict)
    alerts: Counter[str] = field(default_factory=Counter)
    about_hostile: Counter[str] = field(default_factory=Counter)
    storms: list[str] = field(default_factory=list)
    stage: str = "before"

    async def receive(self, message: Any) -> None:
        """Store the time of an event, or count it."""
        now = asyncio.get_running_loop().time()
        try:
            event = codec.decode(message.subject, message.data).data
        except codec.MalformedEvent:
            return
        match event:
            case vocabulary.VerdictChanged(verdict=vocabulary.Verdict.HEALTHY):
                pass
            case vocabulary.VerdictChanged():
                self.fell_at.setdefault(event.node, now)
            case vocabulary.LabelEvent():
                self.labelled_at[event.node] = now
            case vocabulary.AlertChanged(state=vocabulary.AlertState.FIRING, change=0):
                self._alert(event)
        async with self.verdicts:
            self.verdicts.notify_all()

    def _alert(self, event: vocabulary.AlertChanged) -> None:
        if event.node == production.HOSTILE:
            self.about_hostile[event.kind] += 1
        else:
            self.alerts[event.kind] += 1
        if event.kind is vocabulary.AlertKind.STORM:
            self.storms.append(f"{self.stage}: {event.summary}")

    async def until(
        self, times: dict[str, float], node: str, since: float, within_s: float
    ) -> float:
        """Wait for an event about a node; return its delay, or about `within_s` without one."""
        loop = asyncio.get_running_loop()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout_at(since + within_s), self.verdicts:
                await self.verdicts.wait_for(lambda: times.get(node, 0.0) >= since)
                return times[node] - since
        return loop.time() - since


class _Trial:
    """One attack in a fresh environment."""

    def __init__(self, world: production.World, attack: attacks.Attack, *, seconds: float) -> None:
        self._world = world
        self._attack = attack
        self._seconds = seconds
        self._clock = asyncio.get_running_loop().time
        self._heard = _Heard()
        self._samples: list[asyncio.Task[None]] = []
        self._killed: set[str] = set()
        self._dead = {production.HOSTILE}

    async def run(self) -> list[report.Row]:
        """Measure before, during and after the attack; return the figures."""
        async with contextlib.AsyncExitStack() as exits:
            self._admin = await exits.enter_async_context(_admin(self._world))
            for subject in ("muster.verdict.>", "muster.alert.>", "muster.label.>"):
                await self._admin.raw.subscribe(subject, cb=self._heard.receive)
            hostile = await self._world.program(
                "bench.attacker", "--node", production.HOSTILE, "--attack", self._attack
            )
            exits.push_async_callback(hostile.end)
            await hostile.answer("listening")
            # wait until all are connected and have sent heartbeats
            await asyncio.sleep(10)
            phases = [await self._phase("before")]
            # the last kill before the attack must not be detected during it
            await asyncio.gather(*self._samples)
            hostile.command("go")
            phases.append(await self._phase("during"))
            hostile.command("stop")
            self._heard.stage = "stopped"
            stopped_at = self._clock()
            sent = await hostile.answer("stopped")
            await asyncio.sleep(max(0.0, stopped_at + _RECOVERY_S - self._clock()))
            phases.append(await self._phase("after"))
            await asyncio.gather(*self._samples)
            lost, published, slowest_s = await self._events()
            restarts_s = await self._restarts()
        wrong = set(self._heard.fell_at) - self._killed - {production.HOSTILE}
        return hostile_rows.rows(
            hostile_rows.Outcome(
                attack=self._attack,
                phases=phases,
                sent_mib_s=sent["sent"] / sent["seconds"] / 2**20,
                opened=sent["opened"],
                failed=sent["failed"],
                refused=sent["refused"],
                lost=lost,
                published=published,
                slowest_s=slowest_s,
                wrong=len(wrong),
                about_node=self._heard.about_hostile,
                about_others=self._heard.alerts,
                storms=self._heard.storms,
                restarts_s=restarts_s,
            )
        )

    async def _phase(self, name: str) -> hostile_rows.Phase:
        phase = hostile_rows.Phase(name)
        self._heard.stage = name
        began_at, cpu_s = self._clock(), _cpu_s(self._world)
        disconnected_s = await self._disconnected_s()
        watching = [
            asyncio.create_task(story)
            for story in (
                self._sample_memory(phase),
                self._renew(),
                *(self._probe(phase, service) for service in self._world.services),
            )
        ]
        ends_at = began_at + self._seconds
        await asyncio.gather(self._kill(phase, ends_at), self._change_inventories(phase, ends_at))
        await asyncio.sleep(max(0.0, ends_at - self._clock()))
        for task in watching:
            task.cancel()
        for end in await asyncio.gather(*watching, return_exceptions=True):
            if isinstance(end, Exception):
                raise end
        phase.seconds = self._clock() - began_at
        for service, used_s in _cpu_s(self._world).items():
            phase.cpu_percent[service] = (used_s - cpu_s[service]) / phase.seconds * 100
        phase.disconnected_s = await self._disconnected_s() - disconnected_s
        return phase

    async def _kill(self, phase: hostile_rows.Phase, ends_at: float) -> None:
        """Kill one honest plugin after the other."""
        while self._clock() < ends_at:
            killed = await self._world.honest.ask("kill 1", "killed")
            node, at = killed["nodes"][0], killed["at"]
            self._killed.add(node)
            self._dead.add(node)
            await self._world.renew(node)
            self._samples.append(asyncio.create_task(self._detected(phase, node, at)))
            await asyncio.sleep(_KILL_S)

    async def _renew(self) -> None:
        """Renew the leases of nodes that may be checked; other leases are never read."""
        while True:
            await asyncio.gather(*(self._world.renew(node) for node in self._dead))
            await asyncio.sleep(_RENEW_S)

    async def _detected(self, phase: hostile_rows.Phase, node: str, at: float) -> None:
        within_s = self._seconds + _LATE_S
        delay_s = await self._heard.until(self._heard.fell_at, node, at, within_s)
        phase.detections_s.append(delay_s)
        await asyncio.sleep(_REVIVE_S)
        self._dead.discard(node)
        self._world.honest.command(f"revive {node}")

    async def _change_inventories(self, phase: hostile_rows.Phase, ends_at: float) -> None:
        """Change the GPUs of one honest node after the other; measure the labeler's reaction."""
        while self._clock() < ends_at:
            changed = await self._world.honest.ask("change", "changed")
            story = self._labelled(phase, changed["node"], changed["at"])
            self._samples.append(asyncio.create_task(story))
            await asyncio.sleep(_INVENTORY_S)

    async def _labelled(self, phase: hostile_rows.Phase, node: str, at: float) -> None:
        within_s = self._seconds + _LATE_S
        taken_s = await self._heard.until(self._heard.labelled_at, node, at, within_s)
        phase.inventories_s.append(taken_s)

    async def _sample_memory(self, phase: hostile_rows.Phase) -> None:
        while True:
            for name, pids in self._world.pids().items():
                for pid in pids:
                    with contextlib.suppress(FileNotFoundError, StopIteration):
                        mib = programs.resident_mib(pid)
                        phase.memory_mib[name] = max(phase.memory_mib.get(name, 0.0), mib)
            await asyncio.sleep(_SAMPLE_S)

    async def _probe(self, phase: hostile_rows.Phase, service: str) -> None:
        """Probe liveness and readiness of all replicas like a kubelet, but more often."""
        stretch_s = phase.not_ready_s[service] = phase.not_live_s[service] = 0.0
        while True:
            began_at = self._clock()
            ready, live = True, True
            for process in self._world.services[service]:
                ready &= (await production.get(process, "/readyz"))[0] == HTTPStatus.OK
                live &= (await production.get(process, "/healthz"))[0] == HTTPStatus.OK
            await asyncio.sleep(_PROBE_S)
            took_s = self._clock() - began_at
            phase.not_ready_s[service] += 0.0 if ready else took_s
            stretch_s = 0.0 if live else stretch_s + took_s
            phase.not_live_s[service] = max(phase.not_live_s[service], stretch_s)

    async def _disconnected_s(self) -> float:
        return (await self._world.metrics("health")).get(_DISCONNECTED, 0.0)

    async def _events(self) -> tuple[int, int, float]:
        """Return how many events of honest nodes were lost and published, and the slowest delay."""
        counted = await self._world.honest.ask("events", "events")
        stored = await self._stored()
        published: dict[str, int] = counted["published"]
        kept = {key: 1 if ".inventory." in key else count for key, count in published.items()}
        lost = sum(max(0, count - stored.get(key, 0)) for key, count in kept.items())
        return lost, sum(published.values()), max(counted["stored_s"], default=0.0)

    async def _stored(self) -> dict[str, int]:
        """Return the number of stored events of honest nodes, by subject."""
        stored: dict[str, int] = {}
        for stream, subject in (
            (streams.EVENTS, f"muster.event.*.{connections.PLUGIN}.allocation.observed"),
            (streams.INVENTORY, f"muster.inventory.*.{connections.PLUGIN}.0"),
        ):
            info = await self._admin.raw.jetstream().stream_info(
                stream.name, subjects_filter=subject
            )
            stored |= info.state.subjects or {}
        return stored

    async def _restarts(self) -> dict[str, float]:
        """Return how long health and labeler need to become ready after a restart."""
        taken_s = {}
        self._heard.stage = "restarted"
        for name in ("health", "labeler"):
            for process in self._world.services[name]:
                await process.kill()
            began_at = self._clock()
            with contextlib.suppress(TimeoutError, processes.ProgramFailed):
                async with asyncio.timeout(_LATE_S):
                    for process in self._world.services[name]:
                        await process.start()
                    await self._world.until_ready(name)
            taken_s[name] = self._clock() - began_at
        return taken_s


def _cpu_s(world: production.World) -> dict[str, float]:
    total = dict.fromkeys(world.pids(), 0.0)
    for name, pids in world.pids().items():
        for pid in pids:
            with contextlib.suppress(FileNotFoundError):
                total[name] += programs.cpu_s(pid)
    return total


@contextlib.asynccontextmanager
async def _admin(world: production.World) -> AsyncIterator[bus_subjects.Client]:
    """Connect as an administrator until the block ends."""
    compat.ignore_tls_eof()
    credentials = nkeys.read_creds((world.keys / "admin.creds").read_text())
    async with bus_subjects.client(
        world.urls.split(",")[0],
        user_jwt_cb=credentials.jwt.encode,
        signature_cb=credentials.sign,
        inbox_prefix=f"_INBOX.{credentials.name}",
        tls=ssl.create_default_context(cafile=world.keys / "ca.crt"),
        allow_reconnect=True,
        max_reconnect_attempts=-1,
    ) as client:
        yield client


async def measure(
    options: report.Options, *, only: str, seconds: float, nodes: int, replicas: int
) -> list[report.Row]:
    """Measure each attack in its own environment."""
    chosen = [attacks.Attack(name) for name in only.split(",")] if only else [*attacks.Attack]
    if options.quick:
        chosen, seconds, nodes, replicas = [attacks.Attack.STORM], 12.0, 100, 1
    rows: list[report.Row] = []
    for attack in chosen:
        began_at = time.monotonic()
        async with production.World(
            nodes=nodes, replicas=replicas, events_s=_EVENTS_S, names=attacks.listed(attack)
        ) as world:
            mine = await _Trial(world, attack, seconds=seconds).run()
        rows += mine
        print(report.text("hostile", mine), f"\n{time.monotonic() - began_at:.0f} s\n", flush=True)
    return rows


def main() -> int:
    """Run the benchmark from the command line."""
    more = argparse.ArgumentParser(add_help=False)
    more.add_argument("--only", default="", metavar="ATTACKS", help=", ".join(attacks.Attack))
    more.add_argument("--seconds", type=float, default=_SECONDS, help="how long each phase lasts")
    more.add_argument("--nodes", type=int, default=_NODES, help="honest nodes")
    more.add_argument("--replicas", type=int, default=_REPLICAS, help="of each central service")
    chosen = more.parse_known_args()[0]
    return report.main(
        "hostile",
        lambda options: measure(
            options,
            only=chosen.only,
            seconds=chosen.seconds,
            nodes=chosen.nodes,
            replicas=chosen.replicas,
        ),
        more=more,
    )


if __name__ == "__main__":
    sys.exit(main())
