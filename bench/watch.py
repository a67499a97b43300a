"""Adapter: an agent that only watches: its cost, what plugins notice, and how fast it sees faults.

    python -m bench.watch [--quick] [--times 20] [--seconds 60] [--json FILE]

Six device plugins that are not muster's (`bench.foreign_plugin`) register with the stand-in for the
kubelet, or with a real one where MUSTER_KUBELET_DIR and KUBECONFIG name it
(docs/real-kubelet.md; its node keeps their resources, at 0). The agent, health and nats-server are
real; alerts follow verdicts at once, and flaps are not damped. Each fault has a plugin of its own
and is made `--times` times, at any moment between two probes, while the others go on; two plugins
are never harmed.

| fault           | what is done                              | what must follow              |
|-----------------|-------------------------------------------|-------------------------------|
| killed          | SIGKILL, and nobody starts it again       | `not_served`, PLUGIN_DOWN     |
| stopped         | SIGSTOP                                   | `no_answer`, STUCK            |
| socket removed  | its socket's file is removed              | `socket_removed`, DEREGISTERED|
| kubelet lists 0 | it ends its streams, its server goes on   | `not_registered`, DEREGISTERED|
"""

import argparse
import asyncio
import base64
import contextlib
import itertools
import json
import os
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import muster
import muster_health
import muster_plugin
from bench import foreign_plugin, programs, report
from muster import vocabulary
from muster.local import processes, stack
from muster.vocabulary import Verdict, WatchedFinding

_NODE: Final = "node-a"
_PLUGINS: Final = 6
_DEVICES: Final = 4
_PROBE_S: Final = 15.0
"""The pace of probes: a fault is made at any moment between two of them."""
_SETTLE_S: Final = 20.0
_NEVER_S: Final = 60.0
"""What did not come after this time counts as so long."""
_MEMORY_MIB: Final = 44
_CPU_PERCENT: Final = 0.15
_PER_MINUTE: Final = 4
_CALM: Final = {
    "patience_s": 0,
    "flap_falls": 1000,
    "hold_s": 0.1,
    "hold_max_s": 0.1,
    "recover_s": 1,
}


class Plugin:
    """One plugin that is watched: a process of its own at a socket of the kubelet's directory."""

    def __init__(self, kubelet: Path, resource: str, notes: Path) -> None:
        self.resource = resource
        self.notes = notes
        self._kubelet = kubelet
        self._process: asyncio.subprocess.Process | None = None
        # as generic-device-plugin names its sockets
        encoded = base64.urlsafe_b64encode(resource.encode()).decode().rstrip("=")
        self.socket = kubelet / "device-plugins" / f"gdp-{encoded}-{time.time_ns() // 10**9}.sock"

    @property
    def pid(self) -> int:
        """The process id."""
        assert self._process is not None, "started"
        return self._process.pid

    async def start(self) -> None:
        """Start it; it registers by itself."""
        self._process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "bench.foreign_plugin", str(self._kubelet), self.resource),
            *(self.socket.name, str(_DEVICES), str(self.notes)),
            stdout=asyncio.subprocess.DEVNULL,
        )

    async def end(self, number: signal.Signals = signal.SIGKILL) -> None:
        """End it, and wait until it has ended."""
        if self._process is not None:
            processes.send(self._process, number)
            await self._process.wait()

    def signal(self, number: signal.Signals) -> None:
        """Send it a signal."""
        assert self._process is not None, "started"
        processes.send(self._process, number)

    def noted(self, what: str, began: float, ended: float) -> int:
        """Return how often it noted something between two monotonic times."""
        lines = (line.split() for line in self.notes.read_text().splitlines())
        return sum(each == what and began <= float(at) < ended for at, each in lines)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One fault: how it is made and mended, and what must follow within so many seconds."""

    make: Callable[[Plugin], Awaitable[None]]
    mend: Callable[[Plugin], Awaitable[None]]
    finding: WatchedFinding
    verdict: Verdict
    within_s: float


async def _stop(plugin: Plugin) -> None:
    plugin.signal(signal.SIGSTOP)


async def _resume(plugin: Plugin) -> None:
    plugin.signal(signal.SIGCONT)


async def _remove(plugin: Plugin) -> None:
    plugin.socket.unlink()


async def _restart(plugin: Plugin) -> None:
    await plugin.end()
    await plugin.start()


async def _end_streams(plugin: Plugin) -> None:
    plugin.signal(signal.SIGUSR1)


async def _register(plugin: Plugin) -> None:
    plugin.signal(signal.SIGUSR2)


# fmt: off
FAULTS: Final[Mapping[str, Fault]] = {
    "killed": Fault(
        make=Plugin.end, mend=Plugin.start, within_s=5.0,
        finding=WatchedFinding.NOT_SERVED, verdict=Verdict.PLUGIN_DOWN,
    ),
    "stopped": Fault(
        make=_stop, mend=_resume, within_s=20.0,
        finding=WatchedFinding.NO_ANSWER, verdict=Verdict.STUCK,
    ),
    "socket removed": Fault(
        make=_remove, mend=_restart, within_s=3.0,
        finding=WatchedFinding.SOCKET_REMOVED, verdict=Verdict.DEREGISTERED,
    ),
    "kubelet lists 0": Fault(
        make=_end_streams, mend=_register, within_s=12.0,
        finding=WatchedFinding.NOT_REGISTERED, verdict=Verdict.DEREGISTERED,
    ),
}
# fmt: on


class Observer:
    """What the agent and health publish of watched plugins: each change, and the state now."""

    def __init__(self, url: str) -> None:
        self.changes: list[tuple[float, str, WatchedFinding | Verdict]] = []
        """When, of which plugin (for a verdict by its name on the bus), and what."""
        self.listed: set[str] = set()
        self._url = url
        self._changed = asyncio.Condition()

    async def follow(self) -> None:
        """Collect what is published from now on."""
        async for event in muster.events("*", url=self._url):
            now = time.monotonic()
            match event.data:
                case vocabulary.PluginObserved(watched=watched):
                    self.changes.append((now, watched.name, watched.finding))
                case vocabulary.InventoryReported(watched=several):
                    self.listed |= {watched.name for watched in several}
                case vocabulary.VerdictChanged(plugin=plugin, verdict=verdict):
                    self.changes.append((now, plugin, verdict))
                case _:
                    continue
            async with self._changed:
                self._changed.notify_all()

    async def until(self, holds: Callable[[], bool], within_s: float) -> bool:
        """Wait until something holds; return whether it did in time."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(within_s), self._changed:
                await self._changed.wait_for(holds)
                return True
        return False

    async def delay_s(self, name: str, what: WatchedFinding | Verdict, began: float) -> float:
        """Return how long after `began` this was published; at most `_NEVER_S`."""

        def seen() -> float | None:
            return next(
                (at - began for at, *of in self.changes if at >= began and of == [name, what]), None
            )

        left_s = began + _NEVER_S - time.monotonic()
        await self.until(lambda: seen() is not None, max(0.0, left_s))
        delay = seen()
        return _NEVER_S if delay is None else min(delay, _NEVER_S)

    def others(self, name: str, expected: Sequence[WatchedFinding]) -> Counter[WatchedFinding]:
        """Count the findings about a plugin that nobody caused."""
        return Counter(
            what
            for _, of, what in self.changes
            if of == name and isinstance(what, WatchedFinding) and what not in expected
        )


@dataclass
class Samples:
    """Seconds from each fault to what followed."""

    finding: dict[str, list[float]] = field(default_factory=dict)
    verdict: dict[str, list[float]] = field(default_factory=dict)
    load: list[float] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """What runs: the plugins, the agent that watches them, and who listens."""

    plugins: Sequence[Plugin]
    agent: asyncio.subprocess.Process
    observer: Observer
    is_real: bool

    @property
    def kubelet(self) -> str:
        """Which kubelet it is."""
        return "a real kubelet" if self.is_real else "the stand-in for the kubelet"


@contextlib.asynccontextmanager
async def _world() -> AsyncIterator[World]:
    named = os.environ.get("MUSTER_KUBELET_DIR")
    async with (
        programs.arena("bench/watch", muster, muster_plugin, muster_health) as (root, url),
        contextlib.AsyncExitStack() as exits,
    ):
        node = os.environ.get("MUSTER_KUBELET_NODE", _NODE) if named else _NODE
        kubeconfig = os.environ["KUBECONFIG"] if named else f"{root}/kubeconfig"
        directory = Path(named) if named else _folder(root / "kubelet")
        if not named:
            await _stand_ins(root, directory, kubeconfig, exits)
        cluster = {"kubeconfig": kubeconfig, "plugins": []}
        health = {"bus": {"url": url}, "detection": _CALM, "cluster": cluster}
        await _run(exits, root, stack.service("health", _file(root / "health.json", health)))
        observer = Observer(url)
        following = asyncio.create_task(observer.follow())
        exits.callback(following.cancel)
        plugins = [
            Plugin(directory, f"bench.example/device-{n}", root / f"notes-{n}")
            for n in range(_PLUGINS)
        ]
        for plugin in plugins:
            exits.push_async_callback(_gone, plugin)
            await plugin.start()
        agent = {
            "node": node,
            "bus": {"url": url},
            "kubelet": {"directory": str(directory)},
            "watch": {"enabled": True},
        }
        command = (sys.executable, "-m", "muster_plugin", "--config")
        file = _file(root / "agent.json", agent)
        process = await exits.enter_async_context(programs.running([*command, file]))
        yield World(plugins=plugins, agent=process, observer=observer, is_real=named is not None)


async def _stand_ins(
    root: Path, directory: Path, kubeconfig: str, exits: contextlib.AsyncExitStack
) -> None:
    api = await _run(exits, root, stack.kubernetes(kubeconfig))
    options = ("--node", _NODE, "--dir", str(directory), "--api", api.addresses["http"])
    await _run(exits, root, processes.Program("kubelet", "muster.local.kubelet", options))


async def _run(
    exits: contextlib.AsyncExitStack, root: Path, program: processes.Program
) -> processes.Process:
    process = processes.Process(program, root / f"{program.name}.log")
    exits.push_async_callback(process.end)
    await process.start()
    return process


async def _gone(plugin: Plugin) -> None:
    await plugin.end()
    plugin.socket.unlink(missing_ok=True)


def _folder(path: Path) -> Path:
    path.mkdir()
    return path


def _file(path: Path, settings: object) -> str:
    path.write_text(json.dumps(settings))
    return str(path)


async def _costs(world: World, seconds: float) -> list[report.Row]:
    """Let the agent watch, and the plugins be watched, while nothing happens."""
    pid = world.agent.pid
    before = {plugin.pid: programs.descriptors(plugin.pid) for plugin in world.plugins}
    cpu_s, began = programs.cpu_s(pid), time.monotonic()
    await asyncio.sleep(seconds)
    ended = time.monotonic()
    percent = (programs.cpu_s(pid) - cpu_s) / (ended - began) * 100
    _, bare = await programs.bare_interpreter()
    connections = [p.noted(foreign_plugin.CONNECTED, began, ended) for p in world.plugins]
    calls = [p.noted(foreign_plugin.ASKED, began, ended) for p in world.plugins]
    grown = max(programs.descriptors(of) - count for of, count in before.items())
    how = f"{_PLUGINS} foreign resources, {world.kubelet}, {seconds:g} s"
    minutes = (ended - began) / 60
    per_minute = max(
        max(p.noted(foreign_plugin.CONNECTED, at, at + 60) for at in _starts(began, ended))
        for p in world.plugins
    )
    rows = (
        ("memory, RSS", programs.resident_mib(pid), "MiB", _MEMORY_MIB, bare),
        ("memory, PSS", programs.proportional_mib(pid), "MiB", _MEMORY_MIB, None),
        ("CPU", percent, "% of a core", _CPU_PERCENT, None),
        ("connections of a socket within 60 s, at most", per_minute, "", _PER_MINUTE, None),
        ("connections of a socket a minute", max(connections) / minutes, "", None, None),
        ("connections for a call", sum(connections) / max(1, sum(calls)), "", 1, None),
        ("sockets that were not asked", sum(not count for count in calls), "", 0, None),
        ("descriptors that a plugin has more", grown, "", 0, None),
    )
    return [
        report.row(name, value, unit, target=target, how=how, floor=floor)
        for name, value, unit, target, floor in rows
    ]


def _starts(began: float, ended: float) -> list[float]:
    """Return the beginnings of all windows of 60 s, a second apart; one if there is none whole."""
    return [began + second for second in range(max(1, int(ended - began - 60) + 1))]


async def _again(world: World, plugin: Plugin, name: str, times: int, samples: Samples) -> None:
    """Make a fault, and mend it, again and again."""
    fault, observer = FAULTS[name], world.observer
    verdicts_of = vocabulary.watched_plugin(plugin.resource)
    for number in range(times):
        await asyncio.sleep(random.uniform(0, _PROBE_S))  # noqa: S311  # no secret
        samples.load.append(os.getloadavg()[0])
        began = time.monotonic()
        await fault.make(plugin)
        finding_s = await observer.delay_s(plugin.resource, fault.finding, began)
        verdict_s = await observer.delay_s(verdicts_of, fault.verdict, began)
        samples.finding.setdefault(name, []).append(finding_s)
        samples.verdict.setdefault(name, []).append(verdict_s)
        print(f"{name} {number}: {finding_s:.2f} s, verdict {verdict_s:.2f} s", file=sys.stderr)
        began = time.monotonic()
        await fault.mend(plugin)
        if finding_s < _NEVER_S:
            await observer.delay_s(plugin.resource, WatchedFinding.NONE, began)
        if verdict_s < _NEVER_S:
            await observer.delay_s(verdicts_of, Verdict.HEALTHY, began)


def _rows(world: World, samples: Samples) -> list[report.Row]:
    load = f"load {min(samples.load):.1f} to {max(samples.load):.1f}"
    rows = []
    for name, fault in FAULTS.items():
        how = f"{len(samples.finding[name])} x, {world.kubelet}; {_NEVER_S:g} s: never; {load}"
        rows += report.spread(
            f"{name}: {fault.finding}",
            samples.finding[name],
            "s",
            target=fault.within_s,
            how=f"to plugin.observed; {how}",
        )
        rows += report.spread(
            f"{name}: {fault.verdict.value}",
            samples.verdict[name],
            "s",
            how=f"to the verdict; {how}",
        )
    expected = [fault.finding for fault in FAULTS.values()]
    strange: Counter[WatchedFinding] = Counter()
    for plugin, finding in itertools.zip_longest(world.plugins, expected):
        allowed = [WatchedFinding.NONE, *([finding] if finding else ())]
        strange += world.observer.others(plugin.resource, allowed)
    what = ", ".join(f"{count} x {finding}" for finding, count in strange.items())
    rows.append(
        report.row("other findings", strange.total(), "", target=0, how=what or "of all six")
    )
    return rows


async def measure(options: report.Options, *, times: int, seconds: float) -> list[report.Row]:
    """Measure the costs, then the delays."""
    samples = Samples()
    async with _world() as world:
        names = {plugin.resource for plugin in world.plugins}
        if not await world.observer.until(lambda: names <= world.observer.listed, _NEVER_S):
            missing = ", ".join(sorted(names - world.observer.listed))
            raise SystemExit(f"bench.watch: not watched after {_NEVER_S:g} s: {missing}")
        await asyncio.sleep(_PROBE_S if options.quick else _SETTLE_S)
        rows = await _costs(world, _PROBE_S if options.quick else seconds)
        await asyncio.gather(
            *(
                _again(world, plugin, name, 1 if options.quick else times, samples)
                for name, plugin in zip(FAULTS, world.plugins, strict=False)
            )
        )
        return [*rows, *_rows(world, samples)]


def main() -> int:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--times", type=int, default=20, help="how often each fault is made")
    parser.add_argument("--seconds", type=float, default=60.0, help="how long costs are measured")
    chosen, _ = parser.parse_known_args()
    return report.main(
        "watch",
        lambda options: measure(options, times=chosen.times, seconds=chosen.seconds),
        more=parser,
    )


if __name__ == "__main__":
    sys.exit(main())
