"""Door to one health service under load: ten thousand connections, a hundred thousand nodes.

The plugins are `bench.connections`: real connections to a real nats-server, nothing behind them.
nats-server, health, notifier and labeler are real processes; the Kubernetes API is the stand-in,
and health is not told of it. `idle`: one connection a node. `many`: a hundred nodes a connection.
`storm`: nats-server is killed below all of them, and 37 plugins die during the outage.

    python -m bench.health [--quick] [--only idle,many,storm] [--json FILE]
"""

import argparse
import asyncio
import contextlib
import re
import resource
import shutil
import sys
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Final

import aiohttp
import orjson

from bench import connections, programs, report
from muster import vocabulary
from muster.local import layout, nats, processes
from muster.nats import bus, consumers, streams
from tests.worlds import webhook_sink

_BEAT_S: Final = 5.0
_SETTLE_S: Final = 2 * _BEAT_S
_KNOWN_WITHIN_S: Final = 400.0
_ALL: Final = "idle,many,storm"
_KILLED: Final = 37
_OUTAGE_S: Final = 15.0
_QUIET_WITHIN_S: Final = 60.0
_LATE_NEWS_S: Final = 30.0
_LABELLED: Final = 1_000
_WELL: Final = 'muster_health_verdicts{verdict="HEALTHY"}'
_BEATS: Final = 'muster_health_beats_total{outcome="taken"}'
_SUSPECTED: Final = 'muster_health_suspicions_total{outcome="suspected"}'
_NODES: Final = "/api/v1/nodes"


async def measure(options: report.Options, *, only: str = _ALL) -> list[report.Row]:
    """Measure each in a world of its own."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    # for nats-server and the swarm, which inherit it
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    rows: list[report.Row] = []
    chosen = only.split(",")
    seconds = 10.0 if options.quick else 60.0
    few, many = (1_000, 10_000) if options.quick else (10_000, 100_000)
    try:
        if "idle" in chosen:
            rows += await _load(few, few, seconds, cpu=5, mib=64)
        if "many" in chosen:
            rows += await _load(many // 100, many, seconds, cpu=40, mib=400)
        if "storm" in chosen:
            rows += await _storm(few, quick=options.quick)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return rows


class _World:
    """A NATS server, a health service, and a swarm."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.server = nats.NatsServer(directory / "nats", before_exec=processes.die_with_parent())
        self.health: processes.Process | None = None
        self.swarm: asyncio.subprocess.Process | None = None

    async def start(self, links: int, nodes: int, *, blind_url: str = "") -> None:
        """Start it all, and return when all are connected."""
        await self.server.start()
        file = self.directory / "health.json"
        told = {"bus": {"url": self.server.url}, "blind": {"webhook_url": blind_url}}
        file.write_bytes(orjson.dumps(told))
        program = layout.Program("health", "muster_health", ("--config", str(file)))
        self.health = processes.Process(program, self.directory / "health.log")
        await self.health.start()
        self.swarm = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "bench.connections", "--url", self.server.url),
            *("--connections", str(links), "--nodes", str(nodes), "--interval", str(_BEAT_S)),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            limit=1 << 20,
            preexec_fn=processes.die_with_parent(),
        )
        await self.said("listening")

    def tell(self, words: str) -> None:
        """Give the swarm a command."""
        assert self.swarm is not None
        assert self.swarm.stdin is not None
        self.swarm.stdin.write(f"{words}\n".encode())

    async def said(self, event: str) -> dict[str, Any]:
        """Return what the swarm says of this."""
        assert self.swarm is not None
        assert self.swarm.stdout is not None
        while line := await self.swarm.stdout.readline():
            told: dict[str, Any] = orjson.loads(line)
            if told["event"] == event:
                return told
        raise RuntimeError("the swarm ended")

    async def end(self) -> None:
        """End it all."""
        if self.swarm is not None and self.swarm.returncode is None:
            self.swarm.kill()
            await self.swarm.wait()
        if self.health is not None:
            await self.health.end()
        await self.server.stop()

    async def metrics(self) -> dict[str, float]:
        """Return health's metrics by their whole name."""
        found = re.findall(r"^(muster_\S+) (\S+)$", await self._get("/metrics"), re.MULTILINE)
        return {name: float(value) for name, value in found}

    async def fleet(self) -> dict[str, Any]:
        """Return what health says of all together."""
        found: dict[str, Any] = orjson.loads(await self._get("/state"))["fleet"]
        return found

    async def until_told(self, nodes: int) -> None:
        """Wait until health knows all, and has told and remembered so."""
        async with asyncio.timeout(_KNOWN_WITHIN_S):
            while True:
                found = await self.metrics()
                stored = found.get('muster_bus_published_total{outcome="stored"}', 0)
                if found[_WELL] >= nodes and stored >= 2 * nodes:
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
    links: int, nodes: int, seconds: float, *, cpu: float, mib: float
) -> list[report.Row]:
    clock = asyncio.get_running_loop().time
    async with _world() as world:
        await world.start(links, nodes)
        began = clock()
        await world.until_told(nodes)
        known_s = clock() - began
        await asyncio.sleep(_SETTLE_S)
        assert world.health is not None
        before, at, heard = programs.cpu_s(world.health.pid), clock(), await world.metrics()
        await asyncio.sleep(seconds)
        share = (programs.cpu_s(world.health.pid) - before) / (clock() - at) * 100
        memory = programs.resident_mib(world.health.pid)
        now = await world.metrics()
    beats = (now[_BEATS] - heard[_BEATS]) / seconds
    suspected = now.get(_SUSPECTED, 0) - heard.get(_SUSPECTED, 0)
    each = f"{nodes:,} nodes over {links:,} connections"
    how = f"{each}, {beats:.0f} beats a second heard for {seconds:g} s; no Kubernetes API"
    return [
        report.Row(name=f"{nodes}: CPU", value=share, unit="% of a core", target=cpu, how=how),
        report.Row(name=f"{nodes}: memory", value=memory, unit="MiB", target=mib, how="VmRSS"),
        report.Row(
            name=f"{nodes}: suspected",
            value=suspected,
            unit="plugins",
            target=0,
            how="meanwhile; all of them were well",
        ),
        report.Row(
            name=f"{nodes}: told of all",
            value=known_s,
            unit="s",
            target=None,
            how="since all were connected; a first verdict waits for its turn, 500 a second",
        ),
    ]


class _Ears:
    """All that is told: verdicts and labels on the bus, messages to people, blindness."""

    def __init__(self, url: str) -> None:
        self.bus = bus.Bus(url, producer="bench/health", name="bench", owner=True)
        self.verdicts: list[tuple[float, vocabulary.VerdictChanged]] = []
        self.alerts: list[vocabulary.AlertChanged] = []
        self.labels = 0
        self.blind = 0
        self.blind_url = ""

    async def follow(self) -> None:
        """Hear what is told from now on."""
        clock = asyncio.get_running_loop().time
        filters = ["muster.verdict.>", "muster.alert.>", "muster.label.>"]
        async for event in consumers.follow(self.bus.link, streams.ALERTS, filters=filters):
            match event.data:
                case vocabulary.VerdictChanged():
                    self.verdicts.append((clock(), event.data))
                case vocabulary.AlertChanged():
                    self.alerts.append(event.data)
                case _:
                    self.labels += 1

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Take that health is blind, or sees again."""
        await reader.readuntil(b"\r\n\r\n")
        self.blind += 1
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")
        await writer.drain()
        writer.close()


async def _storm(nodes: int, *, quick: bool) -> list[report.Row]:
    """Kill NATS below all of them, kill some of them meanwhile, and look who is found."""
    clock = asyncio.get_running_loop().time
    async with contextlib.AsyncExitStack() as stack:
        people = await stack.enter_async_context(webhook_sink.sink())
        world = await stack.enter_async_context(_world())
        ears = _Ears(world.server.url)
        blind = await asyncio.start_server(ears.answer, "127.0.0.1", 0)
        stack.callback(blind.close)
        port = blind.sockets[0].getsockname()[1]
        await world.start(nodes, nodes, blind_url=f"http://127.0.0.1:{port}/")
        await stack.enter_async_context(ears.bus)
        api = await _labelled(world, stack, nodes)
        await _notified(world, stack, people)
        await world.until_told(nodes)
        await asyncio.sleep(_SETTLE_S)
        before = await _labels(api)
        following = asyncio.create_task(ears.follow())
        stack.callback(following.cancel)
        await asyncio.sleep(1)
        await world.server.kill()
        await asyncio.sleep(_OUTAGE_S / 2)
        world.tell(f"kill {_KILLED}")
        killed = set((await world.said("killed"))["nodes"])
        await asyncio.sleep(_OUTAGE_S / 2)
        restarted = clock()
        await world.server.start()
        world.tell("back")
        await world.said("back")
        back_s = clock() - restarted
        quiet_s = await _until_quiet(world, restarted)
        await asyncio.sleep(5 if quick else _LATE_NEWS_S)
        after = await _labels(api)
        open_ = await world.fleet()
    down = [(at, e) for at, e in ears.verdicts if e.verdict is not vocabulary.Verdict.HEALTHY]
    found = {e.node: at - restarted for at, e in reversed(down) if e.node in killed}
    wrong = {e.node for _, e in down} - killed
    messages = len(people.taken) + ears.blind
    how = f"{nodes:,} connections, {_KILLED} of them killed in an outage of {_OUTAGE_S:g} s"
    told = ", ".join(f"{one.reason} {one.total}" for one in people.taken)
    verdicts = ", ".join(sorted({f"{e.verdict} ({e.rule})" for _, e in down}))
    labels = f"the labeler, mode apply, {len(before):,} of the nodes in the API stand-in"
    print(f"alerts: {[(a.kind.value, a.state.value, a.summary) for a in ears.alerts][:60]}")
    print(f"open at the end: {open_}")
    rows = (
        ("storm: messages", messages, "", 3, f"{ears.blind} blind; {told}; group_by [kind]"),
        ("storm: labels changed", _differ(before, after) + ears.labels, "", 0, labels),
        ("storm: missed", _KILLED - len(found), f"of {_KILLED}", 0, f"{how}; {verdicts}"),
        ("storm: falsely judged", len(wrong), f"of {nodes - _KILLED:,}", 0, "any verdict but well"),
        ("storm: last one found", max(found.values(), default=0), "s", 60, "from NATS' restart"),
        ("storm: all quiet", quiet_s, "s", 60, "nobody suspect, no storm, no alert waits"),
        ("storm: all connected", back_s, "s", None, "from NATS' restart, by the swarm"),
    )
    return [
        report.Row(name=name, value=value, unit=unit, target=most, how=how)
        for name, value, unit, most, how in rows
    ]


async def _until_quiet(world: _World, restarted: float) -> float:
    """Return how long after the restart nothing was in doubt any more."""
    clock = asyncio.get_running_loop().time
    # before that silence is not looked at
    await asyncio.sleep(max(0.0, restarted + 5 + 3 * _BEAT_S - clock()))
    while clock() - restarted < 2 * _QUIET_WITHIN_S:
        now = await world.fleet()
        if not (now["suspects"] or now["storms"] or now["held"]):
            return clock() - restarted
        await asyncio.sleep(1)
    return clock() - restarted


async def _notified(
    world: _World, stack: contextlib.AsyncExitStack, people: webhook_sink.Sink
) -> None:
    """Start a notifier that puts all alerts of a kind into one message."""
    settings = {
        "bus": {"url": world.server.url},
        "group_by": ["kind"],
        "receivers": [{"name": "people", "webhook": {"url": people.url, "reach": "loopback"}}],
        "watchdog": {"enabled": False},
    }
    await _service(world, stack, "notifier", settings)


async def _labelled(
    world: _World, stack: contextlib.AsyncExitStack, nodes: int
) -> aiohttp.ClientSession:
    """Start a labeler that may write, over an API with some of the nodes; return the API."""
    kubeconfig = world.directory / "kubeconfig"
    program = layout.kubernetes(str(kubeconfig))
    api = processes.Process(program, world.directory / "kubernetes.log")
    stack.push_async_callback(api.end)
    await api.start()
    http = await stack.enter_async_context(aiohttp.ClientSession(api.addresses["http"]))
    for number in range(min(nodes, _LABELLED)):
        body = orjson.dumps({"metadata": {"name": connections.name_of(number)}})
        async with http.post(_NODES, data=body) as answer:
            answer.raise_for_status()
    cluster = {"kubeconfig": str(kubeconfig), "namespace": "default"}
    settings = {"bus": {"url": world.server.url}, "mode": "apply", "kubernetes": cluster}
    await _service(world, stack, "labeler", settings)
    return http


async def _service(
    world: _World, stack: contextlib.AsyncExitStack, name: str, settings: dict[str, Any]
) -> None:
    file = world.directory / f"{name}.json"
    file.write_bytes(orjson.dumps(settings))
    process = processes.Process(layout.service(name, str(file)), world.directory / f"{name}.log")
    stack.push_async_callback(process.end)
    await process.start()


async def _labels(api: aiohttp.ClientSession) -> dict[str, Any]:
    async with api.get(_NODES) as answer:
        items = (await answer.json())["items"]
    return {one["metadata"]["name"]: one["metadata"].get("labels") for one in items}


def _differ(before: dict[str, Any], after: dict[str, Any]) -> int:
    return sum(before[name] != after.get(name) for name in before)


def main() -> int:
    """Run it from the command line."""
    more = argparse.ArgumentParser(add_help=False)
    more.add_argument("--only", default=_ALL, help=f"which of {_ALL}")
    only = more.parse_known_args()[0].only
    return report.main("health", lambda options: measure(options, only=only), more=more)


if __name__ == "__main__":
    sys.exit(main())
