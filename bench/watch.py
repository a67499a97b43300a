"""Adapter for processes: measures an agent that only watches: its cost, and its detection delays.

python -m bench.watch [--quick] [--times 20] [--seconds 60] [--processes] [--json FILE]

Six device plugins that are not muster's (`bench.foreign_plugin`) register with the stand-in for the
kubelet, or with a real one where MUSTER_KUBELET_DIR and KUBECONFIG name it (docs/real-kubelet.md;
its node keeps their resources, at 0). The agent, health and nats-server are real; alerts follow
verdicts immediately, and flaps are not damped. Each fault has its own plugin and is injected
`--times` times, at any moment between two probes, while the others continue; two plugins have no
faults. As root, the agent runs in its own PID namespace, like a pod, except with `--processes`.

| fault           | injection                                 | expected finding and verdict  |
|-----------------|-------------------------------------------|-------------------------------|
| killed          | SIGKILL, without a restart                | `not_served`, PLUGIN_DOWN     |
| stopped         | SIGSTOP                                   | `no_answer`, STUCK            |
| socket removed  | its socket's file is removed              | `socket_removed`, DEREGISTERED|
| kubelet lists 0 | the plugin ends its streams, but serves   | `not_registered`, DEREGISTERED|
"""

import argparse
import asyncio
import itertools
import os
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Final

from bench import foreign_plugin, programs, report, watched_node
from muster import vocabulary
from muster.vocabulary import Verdict, WatchedFinding

_PROBE_S: Final = 15.0
"""The interval of probes: a fault is injected at any moment between two probes."""
_SETTLE_S: Final = 20.0
_NEVER_S: Final = watched_node.NEVER_S
_MEMORY_MIB: Final = 44
_CPU_PERCENT: Final = 0.15
_PER_MINUTE: Final = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One fault: its injection, its repair, and the expected finding and verdict."""

    make: Callable[[watched_node.Plugin], Awaitable[None]]
    mend: Callable[[watched_node.Plugin], Awaitable[None]]
    finding: WatchedFinding
    verdict: Verdict
    within_s: float


async def _stop(plugin: watched_node.Plugin) -> None:
    plugin.signal(signal.SIGSTOP)


async def _resume(plugin: watched_node.Plugin) -> None:
    plugin.signal(signal.SIGCONT)


async def _remove(plugin: watched_node.Plugin) -> None:
    plugin.socket.unlink()


async def _restart(plugin: watched_node.Plugin) -> None:
    await plugin.end()
    await plugin.start()


async def _end_streams(plugin: watched_node.Plugin) -> None:
    plugin.signal(signal.SIGUSR1)


async def _register(plugin: watched_node.Plugin) -> None:
    plugin.signal(signal.SIGUSR2)


# fmt: off
FAULTS: Final[Mapping[str, Fault]] = {
    "killed": Fault(
        make=watched_node.Plugin.end, mend=watched_node.Plugin.start, within_s=5.0,
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


@dataclass
class Samples:
    """Seconds from each fault to its finding and its verdict."""

    finding: dict[str, list[float]] = field(default_factory=dict)
    verdict: dict[str, list[float]] = field(default_factory=dict)
    load: list[float] = field(default_factory=list)


async def _costs(world: watched_node.World, seconds: float) -> list[report.Row]:
    """Measure the costs of agent and plugins without faults."""
    pid = world.agent
    before = {plugin.pid: programs.descriptors(plugin.pid) for plugin in world.plugins}
    cpu_s, began = programs.cpu_s(pid), time.monotonic()
    await asyncio.sleep(seconds)
    ended = time.monotonic()
    percent = (programs.cpu_s(pid) - cpu_s) / (ended - began) * 100
    _, bare = await programs.bare_interpreter()
    connections = [p.noted(foreign_plugin.CONNECTED, began, ended) for p in world.plugins]
    calls = [p.noted(foreign_plugin.ASKED, began, ended) for p in world.plugins]
    grown = max(programs.descriptors(of) - count for of, count in before.items())
    how = f"{watched_node.PLUGINS} foreign resources, {world.kind}, {seconds:g} s"
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
        ("sockets that were not probed", sum(not count for count in calls), "", 0, None),
        ("descriptors gained by a plugin", grown, "", 0, None),
    )
    return [
        report.row(name, value, unit, target=target, how=how, floor=floor)
        for name, value, unit, target, floor in rows
    ]


def _starts(began: float, ended: float) -> list[float]:
    """Return the start of each 60 s window, one window a second; one if the time is shorter."""
    return [began + second for second in range(max(1, int(ended - began - 60) + 1))]


async def _again(
    world: watched_node.World, plugin: watched_node.Plugin, name: str, times: int, samples: Samples
) -> None:
    """Inject and repair a fault repeatedly."""
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


def _rows(world: watched_node.World, samples: Samples) -> list[report.Row]:
    load = f"load {min(samples.load):.1f} to {max(samples.load):.1f}"
    rows = []
    for name, fault in FAULTS.items():
        count = len(samples.finding[name])
        how = f"{report.times(count)}, {world.kind}; {load}"
        rows += report.spread(
            f"{name}: {fault.finding}",
            samples.finding[name],
            "s",
            target=fault.within_s,
            how=f"to plugin.observed; {how}",
            never=_NEVER_S,
        )
        rows += report.spread(
            f"{name}: {fault.verdict.value}",
            samples.verdict[name],
            "s",
            how=f"to the verdict; {how}",
            never=_NEVER_S,
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


async def measure(
    options: report.Options, *, times: int, seconds: float, sees_processes: bool
) -> list[report.Row]:
    """Measure the costs, then the delays."""
    samples = Samples()
    async with watched_node.world(sees_processes=sees_processes) as world:
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
    parser.add_argument("--times", type=int, default=20, help="injections of each fault")
    parser.add_argument("--seconds", type=float, default=60.0, help="how long costs are measured")
    parser.add_argument("--processes", action="store_true", help="let it see them, as with hostPID")
    chosen, _ = parser.parse_known_args()
    return report.main(
        "watch",
        lambda options: measure(
            options,
            times=chosen.times,
            seconds=chosen.seconds,
            sees_processes=chosen.processes,
        ),
        more=parser,
    )


if __name__ == "__main__":
    sys.exit(main())
