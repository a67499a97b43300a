"""Adapter for processes: measures one health service with many connections and nodes.

The plugins are `bench.connections`: real connections to a real nats-server, without plugin
processes. nats-server, health, notifier and labeler are real processes; the Kubernetes API is the
stand-in, and health does not use it. `idle`: one connection a node. `many`: a hundred nodes a
connection. `curve`: both, and 1,000 nodes. `storm`: nats-server is killed while all plugins
are connected, and 37 plugins are killed during the outage. `--quick`: 1,000 nodes, `idle` only.

    python -m bench.health [--quick] [--only idle,many,storm] [--seconds 60] [--json FILE]
"""

import argparse
import asyncio
import contextlib
import dataclasses
import re
import resource
import shutil
import sys
import tempfile
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any, Final

import aiohttp
import orjson

from bench import connections, programs, report
from muster import vocabulary
from muster.local import nats, processes, stack
from muster.nats import bus, consumers, streams
from tests.worlds import webhook_sink

_HEARTBEAT_S: Final = 5.0
_SETTLE_S: Final = 2 * _HEARTBEAT_S
_PUBLISHED_WITHIN_S: Final = 400.0
_FIRST_VERDICTS_PER_S: Final = 500
_NODES_MAX: Final = 100_000
"""The limit `bounds.nodes` of health for the largest fleet here; its default is lower."""
_ALL: Final = "idle,many,storm"
_SECONDS: Final = 60.0
_KILLED: Final = 37
_OUTAGE_S: Final = 15.0
_QUIET_WITHIN_S: Final = 60.0
_LATE_NEWS_S: Final = 30.0
_LABELLED: Final = 1_000
_WELL: Final = 'muster_health_verdicts{verdict="HEALTHY"}'
_HEARTBEATS: Final = 'muster_health_heartbeats_total{outcome="accepted"}'
_SUSPECTED: Final = 'muster_health_suspicions_total{outcome="suspected"}'
_NODES: Final = "/api/v1/nodes"


async def measure(
    options: report.Options, *, only: str = _ALL, seconds: float = _SECONDS
) -> report.Result:
    """Measure each scenario in its own environment."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    # nats-server and the process of the connections inherit the limit
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    rows: list[report.Row] = []
    points: list[_Load] = []
    chosen = {"quick"} if options.quick else set(only.split(","))
    try:
        if chosen & {"quick", "curve"}:
            points.append(await _load(1_000, 1_000, 5.0 if options.quick else seconds))
        if chosen & {"idle", "curve"}:
            points.append(await _load(10_000, 10_000, seconds, cpu=5, mib=64))
        if chosen & {"many", "curve"}:
            points.append(await _load(1_000, 100_000, seconds, cpu=40, mib=400))
        rows += [row for point in points for row in point.rows]
        if "storm" in chosen:
            rows += await _storm(10_000)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    curves = {
        "CPU, % of a core": [(point.nodes, point.cpu_percent) for point in points],
        "memory, MiB": [(point.nodes, point.memory_mib) for point in points],
    }
    return report.Result(rows=rows, series=curves)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Load:
    """The cost of health with a number of nodes."""

    nodes: int
    cpu_percent: float
    memory_mib: float
    rows: list[report.Row]


class _World:
    """A NATS server, a health service, and the process with the connections."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.server = nats.NatsServer(directory / "nats", before_exec=processes.die_with_parent())
        self.health: processes.Process | None = None
        self.fleet_process: asyncio.subprocess.Process | None = None

    async def start(self, links: int, nodes: int, *, blind_url: str = "") -> None:
        """Start all processes, and return when all plugins are connected."""
        await self.server.start()
        file = self.directory / "health.json"
        settings = {
            "bus": {"url": self.server.url},
            "blind": {"webhook_url": blind_url},
            "bounds": {"nodes": _NODES_MAX},
        }
        file.write_bytes(orjson.dumps(settings))
        program = processes.Program("health", "muster_health", ("--config", str(file)))
        self.health = processes.Process(program, self.directory / "health.log")
        await self.health.start()
        self.fleet_process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "bench.connections", "--url", self.server.url),
            *("--connections", str(links), "--nodes", str(nodes), "--interval", str(_HEARTBEAT_S)),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            limit=1 << 20,
            preexec_fn=processes.die_with_parent(),
        )
        await self.answer("listening")

    def command(self, words: str) -> None:
        """Send a command to the process with the connections."""
        assert self.fleet_process is not None
        assert self.fleet_process.stdin is not None
        self.fleet_process.stdin.write(f"{words}\n".encode())

    async def answer(self, event: str) -> dict[str, Any]:
        """Return the next message of this kind from the process with the connections."""
        assert self.fleet_process is not None
        assert self.fleet_process.stdout is not None
        while line := await self.fleet_process.stdout.readline():
            message: dict[str, Any] = orjson.loads(line)
            if message["event"] == event:
                return message
        raise RuntimeError("the connections' process ended")

    async def end(self) -> None:
        """End all processes."""
        if self.fleet_process is not None and self.fleet_process.returncode is None:
            self.fleet_process.kill()
            await self.fleet_process.wait()
        if self.health is not None:
            await self.health.end()
        await self.server.stop()

    async def metrics(self) -> dict[str, float]:
        """Return the values of health's metrics, by name with labels."""
        lines = re.findall(r"^(muster_\S+) (\S+)$", await self._get("/metrics"), re.MULTILINE)
        return {name: float(value) for name, value in lines}

    async def fleet(self) -> dict[str, Any]:
        """Return health's summary of the fleet."""
        fleet: dict[str, Any] = orjson.loads(await self._get("/state"))["fleet"]
        return fleet

    async def until_published(self, nodes: int) -> None:
        """Wait until health has published and stored a verdict on each of this many nodes."""
        async with asyncio.timeout(_PUBLISHED_WITHIN_S):
            while True:
                metrics = await self.metrics()
                stored = metrics.get('muster_bus_published_total{outcome="stored"}', 0)
                if metrics[_WELL] >= nodes and stored >= 2 * nodes:
                    return
                await asyncio.sleep(2)

    async def _get(self, path: str) -> str:
        assert self.health is not None
        timeout = aiohttp.ClientTimeout(total=60)
        async with (
            aiohttp.ClientSession(timeout=timeout) as asking,
            asking.get(self.health.addresses["http"] + path) as answer,
        ):
            return await answer.text()


@contextlib.asynccontextmanager
async def _world() -> AsyncIterator[_World]:
    directory = Path(tempfile.mkdtemp(prefix="mu-"))
    made = _World(directory)
    try:
        yield made
    finally:
        await made.end()
        shutil.rmtree(directory)


async def _load(
    links: int, nodes: int, seconds: float, *, cpu: float | None = None, mib: float | None = None
) -> _Load:
    clock = asyncio.get_running_loop().time
    async with _world() as world:
        await world.start(links, nodes)
        began = clock()
        with contextlib.suppress(TimeoutError):
            await world.until_published(nodes)
        published_s = clock() - began
        await asyncio.sleep(_SETTLE_S)
        assert world.health is not None
        scraped_at, before = clock(), await world.metrics()
        scrape_s = clock() - scraped_at
        cpu_s, at = programs.cpu_s(world.health.pid), clock()
        await asyncio.sleep(seconds)
        percent = (programs.cpu_s(world.health.pid) - cpu_s) / (clock() - at) * 100
        memory = programs.resident_mib(world.health.pid)
        after = await world.metrics()
    rate = (after[_HEARTBEATS] - before[_HEARTBEATS]) / seconds
    suspected = after.get(_SUSPECTED, 0) - before.get(_SUSPECTED, 0)
    _, bare = await programs.bare_interpreter()
    load = f"{nodes:,} nodes over {links:,} connections"
    how = f"{load}, {rate:.0f} heartbeats a second for {seconds:g} s; no Kubernetes API"
    of_memory = "VmRSS; floor: python -c 'import asyncio'"
    meanwhile = "meanwhile; all of them were well"
    published = f"until each verdict was published; {_FIRST_VERDICTS_PER_S} first verdicts a second"
    rows = [
        report.row(f"{nodes}: CPU", percent, "% of a core", target=cpu, how=how),
        report.row(f"{nodes}: one scrape", scrape_s, "s", how="of /metrics, by another process"),
        report.row(f"{nodes}: memory", memory, "MiB", target=mib, how=of_memory, floor=bare),
        report.row(f"{nodes}: suspected", suspected, "plugins", target=0, how=meanwhile),
        report.row(
            f"{nodes}: all published",
            published_s,
            "s",
            target=1.2 * nodes / _FIRST_VERDICTS_PER_S + _SETTLE_S,
            how=f"{published}; {_PUBLISHED_WITHIN_S:g} s: never",
        ),
    ]
    return _Load(nodes=nodes, cpu_percent=percent, memory_mib=memory, rows=rows)


class _Subscriber:
    """Collects published verdicts, alerts and labels, and counts health's calls about outages."""

    def __init__(self, url: str) -> None:
        self.bus = bus.Bus(url, producer="bench/health", name="bench", owner=True)
        self.verdicts: list[tuple[float, vocabulary.VerdictChanged]] = []
        self.alerts: list[vocabulary.AlertChanged] = []
        self.labels = 0
        self.disconnected = 0

    async def follow(self) -> None:
        """Collect all publications from now on."""
        await asyncio.gather(
            self._follow(streams.ALERTS, ["muster.verdict.>", "muster.alert.>"]),
            self._follow(streams.LABELS, streams.LABELS.subjects),
        )

    async def _follow(self, stream: streams.Stream, filters: Sequence[str]) -> None:
        clock = asyncio.get_running_loop().time
        async for event in consumers.follow(self.bus.link, stream, filters=filters):
            match event.data:
                case vocabulary.VerdictChanged():
                    self.verdicts.append((clock(), event.data))
                case vocabulary.AlertChanged():
                    self.alerts.append(event.data)
                case _:
                    self.labels += 1

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Count a call in which health reports that it is disconnected, or connected again."""
        await reader.readuntil(b"\r\n\r\n")
        self.disconnected += 1
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")
        await writer.drain()
        writer.close()


async def _storm(nodes: int) -> list[report.Row]:
    """Kill NATS and, during the outage, some plugins; measure how these failures are detected."""
    clock = asyncio.get_running_loop().time
    async with contextlib.AsyncExitStack() as stack:
        people = await stack.enter_async_context(webhook_sink.sink())
        world = await stack.enter_async_context(_world())
        subscriber = _Subscriber(world.server.url)
        blind = await asyncio.start_server(subscriber.answer, "127.0.0.1", 0)
        stack.callback(blind.close)
        port = blind.sockets[0].getsockname()[1]
        await world.start(nodes, nodes, blind_url=f"http://127.0.0.1:{port}/")
        await stack.enter_async_context(subscriber.bus)
        api = await _labelled(world, stack, nodes)
        await _notified(world, stack, people)
        await world.until_published(nodes)
        await asyncio.sleep(_SETTLE_S)
        before = await _labels(api)
        following = asyncio.create_task(subscriber.follow())
        stack.callback(following.cancel)
        await asyncio.sleep(1)
        await world.server.kill()
        await asyncio.sleep(_OUTAGE_S / 2)
        world.command(f"kill {_KILLED}")
        killed = set((await world.answer("killed"))["nodes"])
        await asyncio.sleep(_OUTAGE_S / 2)
        restarted = clock()
        await world.server.start()
        world.command("back")
        await world.answer("back")
        back_s = clock() - restarted
        quiet_s = await _until_quiet(world, restarted)
        await asyncio.sleep(_LATE_NEWS_S)
        after = await _labels(api)
        open_ = await world.fleet()
    down = [(at, e) for at, e in subscriber.verdicts if e.verdict is not vocabulary.Verdict.HEALTHY]
    detected_s = {e.node: at - restarted for at, e in reversed(down) if e.node in killed}
    wrong = {e.node for _, e in down} - killed
    messages = len(people.taken) + subscriber.disconnected
    how = f"{nodes:,} connections, {_KILLED} of them killed in an outage of {_OUTAGE_S:g} s"
    sent = ", ".join(f"{taken.reason} {taken.total}" for taken in people.taken)
    verdicts = ", ".join(sorted({f"{e.verdict} ({e.rule})" for _, e in down}))
    labels = f"the labeler, mode apply, {len(before):,} of the nodes in the API stand-in"
    print(f"alerts: {[(a.kind.value, a.state.value, a.summary) for a in subscriber.alerts][:60]}")
    print(f"open at the end: {open_}")
    rows = (
        (
            "storm: messages",
            messages,
            "",
            3,
            f"{subscriber.disconnected} disconnected; {sent}; group_by [kind]",
        ),
        ("storm: labels changed", _differ(before, after) + subscriber.labels, "", 0, labels),
        ("storm: missed", _KILLED - len(detected_s), f"of {_KILLED}", 0, f"{how}; {verdicts}"),
        ("storm: wrong verdicts", len(wrong), f"of {nodes - _KILLED:,}", 0, "any verdict but well"),
        (
            "storm: last one detected",
            max(detected_s.values(), default=_QUIET_WITHIN_S),
            "s",
            60,
            "from NATS' restart",
        ),
        ("storm: all quiet", quiet_s, "s", 60, "no suspicion, no mass failure, no alert waits"),
        ("storm: all connected", back_s, "s", None, "from NATS' restart, by their process"),
    )
    return [
        report.Row(name=name, value=value, unit=unit, target=most, how=how)
        for name, value, unit, most, how in rows
    ]


async def _until_quiet(world: _World, restarted: float) -> float:
    """Return the seconds until health has no suspicion, mass failure or held alert left."""
    clock = asyncio.get_running_loop().time
    # before that, silence is not evaluated
    await asyncio.sleep(max(0.0, restarted + 5 + 3 * _HEARTBEAT_S - clock()))
    while clock() - restarted < 2 * _QUIET_WITHIN_S:
        now = await world.fleet()
        if not (now["suspects"] or now["storms"] or now["held"]):
            return clock() - restarted
        await asyncio.sleep(1)
    return clock() - restarted


async def _notified(
    world: _World, stack: contextlib.AsyncExitStack, people: webhook_sink.Sink
) -> None:
    """Start a notifier that groups all alerts of a kind into one message."""
    settings = {
        "bus": {"url": world.server.url},
        "group_by": ["kind"],
        "receivers": [{"name": "people", "webhook": {"url": people.url, "reach": "loopback"}}],
        "watchdog": {"enabled": False},
    }
    await _service(world, stack, "notifier", settings)


async def _labelled(
    world: _World, exits: contextlib.AsyncExitStack, nodes: int
) -> aiohttp.ClientSession:
    """Start a labeler that may write, with an API that has some of the nodes; return its client."""
    kubeconfig = world.directory / "kubeconfig"
    program = stack.kubernetes(str(kubeconfig))
    api = processes.Process(program, world.directory / "kubernetes.log")
    exits.push_async_callback(api.end)
    await api.start()
    http = await exits.enter_async_context(aiohttp.ClientSession(api.addresses["http"]))
    for number in range(min(nodes, _LABELLED)):
        body = orjson.dumps({"metadata": {"name": connections.name_of(number)}})
        async with http.post(_NODES, data=body) as answer:
            answer.raise_for_status()
    cluster = {"kubeconfig": str(kubeconfig), "namespace": "default"}
    settings = {"bus": {"url": world.server.url}, "mode": "apply", "kubernetes": cluster}
    await _service(world, exits, "labeler", settings)
    return http


async def _service(
    world: _World, exits: contextlib.AsyncExitStack, name: str, settings: dict[str, Any]
) -> None:
    file = world.directory / f"{name}.json"
    file.write_bytes(orjson.dumps(settings))
    process = processes.Process(stack.service(name, str(file)), world.directory / f"{name}.log")
    exits.push_async_callback(process.end)
    await process.start()


async def _labels(api: aiohttp.ClientSession) -> dict[str, Any]:
    async with api.get(_NODES) as answer:
        items = (await answer.json())["items"]
    return {item["metadata"]["name"]: item["metadata"].get("labels") for item in items}


def _differ(before: dict[str, Any], after: dict[str, Any]) -> int:
    return sum(before[name] != after.get(name) for name in before)


def main() -> int:
    """Run the benchmark from the command line."""
    more = argparse.ArgumentParser(add_help=False)
    more.add_argument("--only", default=_ALL, help=f"which of {_ALL}")
    more.add_argument("--seconds", type=float, default=_SECONDS, help="how long each is measured")
    chosen = more.parse_known_args()[0]
    return report.main(
        "health",
        lambda options: measure(options, only=chosen.only, seconds=chosen.seconds),
        more=more,
    )


if __name__ == "__main__":
    sys.exit(main())
