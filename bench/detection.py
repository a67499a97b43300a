"""Adapter for processes: measures the time from each class of failure to its verdict.

The faults and their environment are those of `tests/worlds`: real plugins, a real health service
and a real nats-server; the kubelets and the Kubernetes API are stand-ins, and pods are simulated
(`tests/worlds/fleet.py`). Some periods are shorter than the defaults (in parentheses), so that the
same plugin can fail repeatedly: a health checker is old after 30 s (300 s), an expected plugin is
missing after 20 s (120 s), and alerts follow verdicts immediately (after 180 s if the plugin may
only pause). Flaps are not damped. Class l, where health itself fails, has a separate environment in
which the watchdog ticks every second (every 10 s).

All classes are injected concurrently, each on as many nodes as are needed to finish within
`--minutes`: with fewer minutes there are more concurrent plugins, which disturb each other. A fault
without a verdict counts with the full waiting time. `--quick` injects only classes a, e and f.

    python -m bench.detection [--quick] [--times 100] [--minutes 40] [--only a,b,l] [--json FILE]
"""

import argparse
import asyncio
import collections
import contextlib
import math
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any, Final

import aiohttp
import grpc.aio
import orjson

from bench import report
from muster.local import nats, processes, stack
from muster.nats import bus
from muster.pb import deviceplugin_pb2 as dp
from muster.pb import rpc
from tests.worlds import fault_classes, fleet, fleet_parts

_TARGETS_S: Final = {
    "a": 3,
    "b": 20,
    "c": 20,
    "d": 6,
    "e": 6,
    "f": 6,
    "g": 6,
    "g-node": 6,
    "j": 30,
}
_LETTERS: Final = "abcdefghijklmnop"
_SUSPICION_MS: Final = 100
_WRONG_MOST: Final = 1.0
_TIMEOUT_S: Final = 120.0
_QUIET_S: Final = 25.0
_MINUTES: Final = 40.0
_LATE: Final = 1.25
"""The factor on `--minutes` after which no further fault is injected."""
_SETTLED_S: Final = 30.0
"""The wait until kubelets have written earlier changes to their node status."""
_TOLD_S: Final = 60.0
_CYCLE_S: Final = {
    "a": 25,
    "b": 60,
    "c": 45,
    "g": 80,
    "h": 100,
    "i": 60,
    "j": 70,
    "m": 50,
    "n": 110,
    "o": 100,
    "p": 60,
}
"""The approximate seconds of an injection with its recovery, by class; 30 for other classes."""
_BEAT_S: Final = 5.0
_LOOK_S: Final = 0.02
_CALM: Final = {
    **fleet_parts.NO_MASS_FAILURE,
    "patience_s": 0,
    "checker_age_s": 30,
    "missing_s": 20,
    "flap_falls": 100,
    "hold_s": 0.1,
    "hold_max_s": 0.1,
}
PACE: Final = fleet_parts.Pace(
    beat_s=_BEAT_S,
    health={
        "detection": _CALM,
        "bounds": {"alerts_per_minute": 100_000, "alerts_per_node_minute": 10_000},
    },
)


class _Results:
    """The results of the injections so far, by the name of the fault."""

    def __init__(
        self, wanted: int, within_s: float, faults_: Sequence[fault_classes.Fault]
    ) -> None:
        self.played: dict[str, list[fault_classes.Outcome]] = {fault.name: [] for fault in faults_}
        self._wanted = wanted
        self._until = time.monotonic() + within_s
        self._left = dict.fromkeys(self.played, wanted)

    def take(self, name: str) -> bool:
        """Count an injection; return whether it is still wanted."""
        self._left[name] -= 1
        return self._left[name] >= 0 and time.monotonic() < self._until

    async def tell(self) -> None:
        """Print the progress periodically."""
        while True:
            await asyncio.sleep(_TOLD_S)
            done = sum(len(played) for played in self.played.values())
            print(f"{done} of {self._wanted * len(self.played)} injections", file=sys.stderr)


class _Trips:
    """Measures empty round trips, to distinguish a busy machine from a slow detector."""

    def __init__(self) -> None:
        self.nats_ms: list[float] = []
        self.grpc_ms: list[float] = []
        self.load: list[float] = []

    async def watch(self, world: fleet.Fleet, node: fleet.Node) -> None:
        """Send empty requests to NATS and to a plugin once a second."""
        async with (
            bus.Bus(world.server.url, producer="bench/detection", name="trips") as ours,
            grpc.aio.insecure_channel(f"unix:{node.own_socket()}") as channel,
        ):
            client = rpc.DevicePluginClient(channel)
            await ours.link.client()
            while True:
                began = time.perf_counter()
                await ours.is_reachable(timeout_s=10)
                then = time.perf_counter()
                await client.get_device_plugin_options(dp.Empty())
                self.nats_ms.append((then - began) * 1000)
                self.grpc_ms.append((time.perf_counter() - then) * 1000)
                self.load.append(os.getloadavg()[0])
                await asyncio.sleep(1)


async def measure(
    options: report.Options, *, only: str = "", times: int = 100, minutes: float = _MINUTES
) -> report.Result:
    """Measure suspicions, then all classes concurrently, then class l."""
    wanted, spread_s = (3, 15.0) if options.quick else (times, minutes * 60)
    letters = set(only.split(",")) if only else set("aef" if options.quick else _LETTERS)
    if letters == {"l"}:
        return report.Result(rows=await _silences(wanted))
    chosen = [fault for fault in fault_classes.FAULTS if fault.letter in letters]
    rows = await _suspicions(wanted) if "a" in letters else []
    settle_s = 0.0 if options.quick else _SETTLED_S
    classes = await _classes(chosen, wanted, spread_s, settle_s=settle_s)
    rows += classes.rows
    rows += await _apart(wanted) if "l" in letters else []
    return report.Result(rows=rows, series=classes.series)


async def _apart(wanted: int) -> list[report.Row]:
    """Measure class l in a separate process.

    gRPC's threads do not survive a fork with a preexec function in this process.
    """
    with tempfile.NamedTemporaryFile() as file:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "bench.detection", "--only", "l", "--times", str(wanted)),
            *("--json", file.name),
            stdout=asyncio.subprocess.DEVNULL,
        )
        if await process.wait():
            return [report.row("l: failed", 1, "", target=0, how="the measurement itself")]
        rows = orjson.loads(file.read())["rows"]
    return [report.Row(**{key: row[key] for key in row if key != "ok"}) for row in rows]


async def _suspicions(wanted: int) -> list[report.Row]:
    """Kill plugins one after the other, and measure when health suspects each."""
    key = 'muster_health_suspicions_total{outcome="suspected"} '
    taken: list[float] = []
    async with fleet.fleet(PACE) as world, aiohttp.ClientSession() as asking:
        nodes = [world.node(f"node-{number}") for number in range(4)]
        await asyncio.gather(*(node.start() for node in nodes))
        await world.health.start()
        await world.until_healthy([node.name for node in nodes])

        async def suspected() -> float:
            async with asking.get(world.health.http + "/metrics") as answer:
                text = await answer.text()
            _, _, rest = text.partition(key)
            return float(rest.partition("\n")[0] or 0)

        for number in range(wanted):
            node = nodes[number % len(nodes)]
            before = await suspected()
            began = time.perf_counter()
            await node.plugin.end()
            while await suspected() == before:
                pass
            taken.append((time.perf_counter() - began) * 1000)
            await node.start_plugin()
            # wait for its connection and a heartbeat: otherwise its end is not noticed
            await asyncio.sleep(0.5)
    how = f"{len(taken)} x SIGKILL, until health's metrics count a suspicion (asked all the time)"
    return report.spread("a: crash to suspicion", taken, "ms", target=_SUSPICION_MS, how=how)


async def _classes(
    chosen: Sequence[fault_classes.Fault], wanted: int, spread_s: float, *, settle_s: float
) -> report.Result:
    trips = _Trips()
    async with fleet.fleet(PACE) as world:
        crews = {fault.name: _crew(fault, wanted, spread_s) for fault in chosen}
        nodes = {
            fault.name: [
                world.node(f"n-{fault.name}-{number}") for number in range(crews[fault.name])
            ]
            for fault in chosen
            if not fault.starts_without_plugin
        }
        quiet = world.node("quiet")
        cabled = {fault.name: fault.has_cable for fault in chosen}
        await quiet.start()
        for name, crew in nodes.items():
            await asyncio.gather(*(node.start(has_cable=cabled[name]) for node in crew))
        held = [node for fault in chosen if fault.has_holder for node in nodes[fault.name]]
        await asyncio.gather(*(node.make_holder() for node in held))
        await world.health.start()
        await world.until_healthy([node.name for crew in nodes.values() for node in crew])
        await asyncio.sleep(settle_s)
        results = _Results(wanted, spread_s * _LATE, chosen)
        watching = asyncio.gather(trips.watch(world, quiet), results.tell())
        stories = []
        for fault in chosen:
            stories += [_again(node, fault, results) for node in nodes.get(fault.name, ())]
            if fault.starts_without_plugin:
                stories += [_anew(world, fault, results, n) for n in range(crews[fault.name])]
        await asyncio.gather(*stories)
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)
        strange = [e for _, e in world.publications.verdicts("quiet")]
    rows = [row for fault in chosen for row in _rows(fault, results.played[fault.name])]
    rows.append(
        report.row(
            "quiet: verdicts but well", len(strange) - 1, "", target=0, how="a plugin nobody harmed"
        )
    )
    load = f"load {min(trips.load):.1f} to {max(trips.load):.1f} meanwhile"
    for name, taken in (("NATS", trips.nats_ms), ("gRPC", trips.grpc_ms)):
        rows += report.spread(f"empty {name} round trip", taken, "ms", how=load)
    delays = {fault.name: _delays_s(fault, results.played[fault.name]) for fault in chosen}
    return report.Result(rows=rows, series={f"delay {name}": delays[name] for name in delays})


def _crew(fault: fault_classes.Fault, wanted: int, spread_s: float) -> int:
    """Return the number of nodes for a fault, so that all faults finish at about the same time."""
    cycle_s = _CYCLE_S.get(fault.name, _CYCLE_S.get(fault.letter, 30))
    return max(1, math.ceil(wanted * cycle_s / spread_s))


async def _again(node: fleet.Node, fault: fault_classes.Fault, results: _Results) -> None:
    """Inject a fault on one node repeatedly."""
    while results.take(fault.name):
        # at any moment between two heartbeats
        await asyncio.sleep(random.uniform(0, _BEAT_S))  # noqa: S311  # no secret
        played = await fault_classes.play(node, fault, timeout_s=_TIMEOUT_S, quiet_s=_QUIET_S)
        results.played[fault.name].append(played)
        for problem in _wrong(played):
            print(f"{node.name}: {problem}", flush=True)
        if played.resolved_s is None:
            return


async def _anew(
    world: fleet.Fleet, fault: fault_classes.Fault, results: _Results, crew: int
) -> None:
    """Inject a fault repeatedly, each time on a new node."""
    number = 0
    while results.take(fault.name):
        number += 1
        node = world.node(f"n-{fault.name}-{crew}-{number}")
        played = await fault_classes.play(node, fault, timeout_s=_TIMEOUT_S, quiet_s=_QUIET_S)
        results.played[fault.name].append(played)
        for problem in _wrong(played):
            print(f"{node.name}: {problem}", flush=True)
        await world.api.do("DELETE", f"/api/v1/nodes/{node.name}")
        await node.close()


def _rows(fault: fault_classes.Fault, played: Sequence[fault_classes.Outcome]) -> list[report.Row]:
    problems = collections.Counter(word for injection in played for word in _wrong(injection))
    count = sum(bool(_wrong(injection)) for injection in played)
    most = "; ".join(f"{many} x {word}" for word, many in problems.most_common(3))
    expected = fault.verdict or (f"alert {fault.alert}" if fault.alert else "nothing is published")
    how = f"{len(played)} x {fault.title}: {expected}"
    share = 100 * count / max(1, len(played))
    wrong = report.row(
        f"{fault.name}: wrong", share, "%", target=_WRONG_MOST, how=f"{how}; {most}".strip("; ")
    )
    if not fault.verdict and not fault.alert:
        return [wrong]
    delays = report.spread(
        fault.name, _delays_s(fault, played), "s", target=_TARGETS_S.get(fault.name), how=how
    )
    return [*delays, wrong]


def _delays_s(fault: fault_classes.Fault, played: Sequence[fault_classes.Outcome]) -> list[float]:
    """Return the delay of each injection; the full wait for those without a publication."""
    if not fault.verdict and not fault.alert:
        return []
    delays = [injection.verdict_s if fault.verdict else injection.alert_s for injection in played]
    return [_TIMEOUT_S if delay_s is None else delay_s for delay_s in delays]


def _wrong(injection: fault_classes.Outcome) -> list[str]:
    """Return the problems of an injection: unexpected or missing publications, wrong evidence."""
    before = f"{injection.fault.name} {injection.fault.title}: "
    return [problem.removeprefix(before) for problem in injection.problems]


async def _silences(wanted: int) -> list[report.Row]:
    """Measure class l: kill health, and wait until the notifier reports its silence."""
    taken: list[float] = []
    async with _watched() as (health, notifier), aiohttp.ClientSession() as asking:

        async def is_silent() -> bool:
            async with asking.get(notifier.addresses["http"] + "/state") as answer:
                state: dict[str, Any] = await answer.json()
            return bool(state["health_silent"])

        async def until(*, silent: bool) -> None:
            while await is_silent() is not silent:  # noqa: ASYNC110  # another process knows
                await asyncio.sleep(_LOOK_S)

        for _ in range(wanted):
            await until(silent=False)
            await asyncio.sleep(random.random())  # noqa: S311  # no secret
            began = time.perf_counter()
            health.signal(signal.SIGKILL)
            await health.wait()
            await until(silent=True)
            taken.append(time.perf_counter() - began)
            await health.start()
    how = f"{len(taken)} x SIGKILL of health, until the notifier takes it for silent; ticks of 1 s"
    return report.spread("l", taken, "s", how=how)


@contextlib.asynccontextmanager
async def _watched() -> AsyncIterator[tuple[processes.Process, processes.Process]]:
    """Run a health service, and a notifier that expects its watchdog ticks; yield both."""
    directory = Path(tempfile.mkdtemp(prefix="mu-"))
    die = processes.die_with_parent()
    made: list[processes.Process] = []
    try:
        async with nats.NatsServer(directory / "nats", before_exec=die) as server:
            at = {"bus": {"url": server.url}}
            leading = {"ttl_s": 2, "renew_s": 0.5, "margin_s": 0.5, "watchdog_s": 1}
            settings = {
                "health": {**at, "leading": leading},
                "notifier": {**at, "receivers": [{"name": "console", "console": {}}]},
            }
            for name, tree in settings.items():
                file = directory / f"{name}.json"
                file.write_bytes(orjson.dumps(tree))
                program = stack.service(name, str(file))
                made.append(processes.Process(program, directory / f"{name}.log"))
            for process in made:
                await process.start()
            yield made[0], made[1]
            for process in made:
                await process.end()
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def main() -> int:
    """Run the benchmark from the command line."""
    more = argparse.ArgumentParser(add_help=False)
    more.add_argument("--only", default="", metavar="LETTERS", help="these classes, such as a,b,l")
    more.add_argument(
        "--times", type=int, default=100, help="injections of each class, 100 by default"
    )
    of_minutes = f"minutes for all injections, {_MINUTES:g} by default"
    more.add_argument("--minutes", type=float, default=_MINUTES, help=of_minutes)
    chosen = more.parse_known_args()[0]
    return report.main(
        "detection",
        lambda options: measure(
            options, only=chosen.only, times=chosen.times, minutes=chosen.minutes
        ),
        more=more,
    )


if __name__ == "__main__":
    sys.exit(main())
