"""Adapter for processes: measures the plugin's start, cost and recovery after losses.

`bench.peers` compares some of these figures with other plugins.
"""

import asyncio
import contextlib
import json
import statistics
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterable
from pathlib import Path
from typing import Final

import grpc.aio

import muster
import muster_plugin
from bench import listening_kubelet, programs, report
from muster.pb import deviceplugin_pb2 as dp
from muster.pb import rpc

_SETTLE_S: Final = 6.0
_NOISE_MIB: Final = 2.0
Command = Callable[[Path], list[str]]


class Bench:
    """Measures one plugin; `command` returns its command line for a kubelet's directory."""

    def __init__(self, command: Command, root: Path, *, quick: bool) -> None:
        self._command = command
        self._root = root
        self._quick = quick
        self.rows: list[report.Row] = []
        (root / "device-plugins").mkdir(parents=True)
        (root / "null").symlink_to("/dev/null")

    async def common(self) -> list[report.Row]:
        """Measure starts, costs and losses."""
        await self._starts()
        async with self._living() as (kubelet, process):
            first = await kubelet.lists.get()
            await self._costs(process)
            await self._allocations(kubelet, first.resource)
            await self._losses(kubelet, first.resource)
        await self._crash()
        return self.rows

    async def own(self) -> list[report.Row]:
        """Measure hot-plug, faults and memory growth."""
        async with self._living() as (kubelet, process):
            await kubelet.quiet()
            await self._hot_plug(kubelet)
            await self._faults(kubelet)
            await self._growth(kubelet, process)
        return self.rows

    def add(self, rows: Iterable[report.Row]) -> None:
        """Append rows of figures."""
        self.rows.extend(rows)

    @contextlib.asynccontextmanager
    async def _living(
        self,
    ) -> AsyncIterator[tuple[listening_kubelet.ListeningKubelet, asyncio.subprocess.Process]]:
        async with (
            listening_kubelet.ListeningKubelet(self._root / "device-plugins") as kubelet,
            programs.running(self._command(self._root)) as process,
        ):
            yield kubelet, process

    async def _starts(self) -> None:
        times = 10 if self._quick else 100
        registered, listed, bare = [], [], []
        async with listening_kubelet.ListeningKubelet(self._root / "device-plugins") as kubelet:
            for _ in range(times):
                bare.append((await programs.bare_interpreter())[0] * 1000)
                started = time.perf_counter()
                async with programs.running(self._command(self._root)):
                    seconds = await kubelet.until_registered(started)
                    if seconds >= listening_kubelet.NEVER_S:
                        sys.exit(f"not registered within {listening_kubelet.NEVER_S:g} s")
                    registered.append(seconds * 1000)
                    listed.append(((await kubelet.lists.get()).at - started) * 1000)
                await kubelet.quiet()
        how = f"{times} starts, from fork to Register; floor: python -c 'import asyncio'"
        floor = statistics.median(bare)
        self.add(
            report.spread(
                "start to Register", registered, "ms", median_target=100, how=how, floor=floor
            )
        )
        how = f"{times} starts, from fork to the device list at the kubelet"
        self.add(report.spread("start to listed", listed, "ms", how=how, floor=floor))

    async def _costs(self, process: asyncio.subprocess.Process) -> None:
        await asyncio.sleep(_SETTLE_S)
        seconds = 6.0 if self._quick else 30.0
        before, started = programs.cpu_s(process.pid), time.perf_counter()
        await asyncio.sleep(seconds)
        share = (programs.cpu_s(process.pid) - before) / (time.perf_counter() - started)
        memory = programs.resident_mib(process.pid)
        _, bare = await programs.bare_interpreter()
        how = "VmRSS; one resource, one stream, bus connected; floor: python -c 'import asyncio'"
        self.add([report.row("memory", memory, "MiB", target=48, how=how, floor=bare)])
        how = f"{seconds:g} s; a heartbeat every 5 s, a self-probe every 10 s"
        self.add([report.row("idle CPU", share * 100, "% of a core", target=0.1, how=how)])

    async def _allocations(
        self, kubelet: listening_kubelet.ListeningKubelet, resource: str
    ) -> None:
        calls = 500 if self._quick else 5000
        path, taken, empty = kubelet.endpoints[resource], [], []
        async with grpc.aio.insecure_channel(f"unix:{path}") as channel:
            client = rpc.DevicePluginClient(channel)
            listed = await client.list_and_watch(dp.Empty()).read()
            assert isinstance(listed, dp.ListAndWatchResponse), "the list comes first"
            wanted = dp.ContainerAllocateRequest(devices_ids=[listed.devices[0].ID])
            for _ in range(calls):
                started = time.perf_counter()
                await client.allocate(dp.AllocateRequest(container_requests=[wanted]))
                taken.append(time.perf_counter() - started)
                started = time.perf_counter()
                await client.get_device_plugin_options(dp.Empty())
                empty.append(time.perf_counter() - started)
        how = f"{calls} calls, one caller (Python); floor: an empty call"
        floor = statistics.median(empty) * 1000
        self.add(
            report.spread("Allocate", _ms(taken), "ms", median_target=0.5, how=how, floor=floor)
        )

    async def _losses(self, kubelet: listening_kubelet.ListeningKubelet, resource: str) -> None:
        times = 20 if self._quick else 40
        restarts = []
        for _ in range(times):
            await kubelet.quiet()
            restarts.append(await kubelet.until_registered(await kubelet.restart()))
        how = f"{times} restarts; from before kubelet.sock is there"
        never_s = listening_kubelet.NEVER_S
        self.add(
            report.spread(
                "kubelet restart to Register",
                _ms(restarts),
                "ms",
                target=300,
                how=how,
                never=never_s * 1000,
            )
        )
        dropped, removed, changed = [], [], []
        for _ in range(3):
            await kubelet.quiet()
            started = time.perf_counter()
            await kubelet.drop(resource)
            dropped.append(await kubelet.until_registered(started))
        for _ in range(5):
            await kubelet.quiet()
            # a second loss soon after the first is repaired later, on purpose
            await asyncio.sleep(2.2)
            started = time.perf_counter()
            kubelet.endpoints[resource].unlink(missing_ok=True)
            removed.append(await kubelet.until_registered(started))
            if removed[-1] < listening_kubelet.NEVER_S:
                old, new = await kubelet.ends.get(), await kubelet.lists.get()
                changed.append(new.at - old.at)
        for what, samples, target in (
            ("stream dropped to Register", dropped, 0.5),
            ("own socket gone to Register", removed, 0.2),
        ):
            how = report.times(len(samples))
            self.add(report.spread(what, samples, "s", target=target, how=how, never=never_s))
        if changed:
            how = f"{len(changed)} times, from the end of a stream to the next one's list"
            self.add(report.spread("change of generation", _ms(changed), "ms", target=50, how=how))

    async def _crash(self) -> None:
        sockets = self._root / "device-plugins"
        for _ in range(2):
            async with self._living() as (kubelet, process):
                await kubelet.lists.get()
                process.kill()
                await process.wait()
        async with self._living() as (kubelet, _process):
            await kubelet.lists.get()
            left = [p for p in sockets.iterdir() if p.is_socket() and p.name != "kubelet.sock"]
            how = "after two SIGKILLs and a start; its own is one"
            self.add([report.row("socket files", len(left), "files", target=1, how=how)])

    async def _hot_plug(self, kubelet: listening_kubelet.ListeningKubelet) -> None:
        times = 100 if self._quick else 500
        device, came, went = self._root / "hot", [], []
        for _ in range(times):
            started = time.perf_counter()
            device.symlink_to("/dev/zero")
            came.append((await kubelet.until_listed("muster.example/hot", healthy=1)).at - started)
            started = time.perf_counter()
            device.unlink()
            went.append((await kubelet.until_listed("muster.example/hot", healthy=0)).at - started)
        how = f"{times} times, a link in a directory; to the list on the stream"
        self.add(report.spread("device appears to list", _ms(came), "ms", target=20, how=how))
        self.add(report.spread("device disappears to list", _ms(went), "ms", target=20, how=how))

    async def _faults(self, kubelet: listening_kubelet.ListeningKubelet) -> None:
        times = 100 if self._quick else 500
        script, taken = self._root / "faults", []
        for turn in range(times):
            started = time.perf_counter()
            script.write_text('{"device": 0, "xid": 79}\n' if turn % 2 == 0 else "")
            listed = await kubelet.until_listed("muster.example/gpu", healthy=turn % 2)
            taken.append(listed.at - started)
        how = f"{times} faults and recoveries of a simulated GPU, from the write of its script"
        self.add(report.spread("Unhealthy to list", _ms(taken), "ms", target=5, how=how))

    async def _growth(
        self, kubelet: listening_kubelet.ListeningKubelet, process: asyncio.subprocess.Process
    ) -> None:
        cycles, restarts = (500, 30) if self._quick else (10_000, 1_000)
        await self._cycles(kubelet, cycles // 5, restarts // 5)
        memory, files = programs.resident_mib(process.pid), programs.descriptors(process.pid)
        await self._cycles(kubelet, cycles, restarts)
        grown = programs.resident_mib(process.pid) - memory
        how = f"{cycles} hot-plug cycles and {restarts} kubelet restarts, after a fifth of them"
        files_grown = programs.descriptors(process.pid) - files
        self.add(
            [
                report.row("memory grown", grown, "MiB", target=_NOISE_MIB, how=how),
                report.row("descriptors grown", files_grown, "files", target=0, how=how),
            ]
        )

    async def _cycles(
        self, kubelet: listening_kubelet.ListeningKubelet, cycles: int, restarts: int
    ) -> None:
        device = self._root / "hot"
        for _ in range(cycles):
            device.symlink_to("/dev/zero")
            await kubelet.until_listed("muster.example/hot", healthy=1)
            device.unlink()
            await kubelet.until_listed("muster.example/hot", healthy=0)
        for _ in range(restarts):
            await kubelet.restart()
            for _ in range(3):
                await kubelet.registered.get()
        await kubelet.quiet()


async def measure(options: report.Options) -> list[report.Row]:
    """Measure muster's plugin."""
    async with programs.arena("bench/plugin", muster, muster_plugin) as (root, url):
        ours = Bench(_muster(url, _single), root / "m", quick=options.quick)
        rows = await ours.common()
        rows += await _many(url, root / "n")
        wide = Bench(_muster(url, _hot), root / "h", quick=options.quick)
        rows += await wide.own()
    return rows


async def _many(url: str, root: Path) -> list[report.Row]:
    """Measure muster with 64 resources."""
    command = _muster(url, _sixty_four)
    bench = Bench(command, root, quick=True)
    async with listening_kubelet.ListeningKubelet(root / "device-plugins") as kubelet:
        started = time.perf_counter()
        async with programs.running(command(root)) as process:
            for _ in range(64):
                last = await kubelet.registered.get()
            how = "from fork to the last of 64 Registers"
            bench.add(
                [report.row("64 resources registered", last.at - started, "s", target=1, how=how)]
            )
            await asyncio.sleep(_SETTLE_S)
            memory = programs.resident_mib(process.pid)
            how = "VmRSS, 64 streams"
            bench.add([report.row("memory, 64 resources", memory, "MiB", target=64, how=how)])
    return bench.rows


def _resource(name: str, path: str, **more: object) -> dict[str, object]:
    return {"name": name, "groups": [{"devices": [{"path": path}]}], **more}


def _single(_root: Path) -> dict[str, object]:
    return {"resources": [_resource("muster.example/null", "/dev/null")]}


def _sixty_four(root: Path) -> dict[str, object]:
    for number in range(64):
        (root / f"d{number}").symlink_to("/dev/null")
    return {
        "resources": [_resource(f"muster.example/d{n}", str(root / f"d{n}")) for n in range(64)]
    }


def _hot(root: Path) -> dict[str, object]:
    return {
        "resources": [
            _resource("muster.example/null", "/dev/null"),
            _resource("muster.example/hot", str(root / "ho?"), grace_s=3600),
        ],
        "gpus": {"resources": [{"name": "muster.example/gpu", "product": "*"}]},
        "simulated_gpus": {
            "count": 1,
            "faults": str(root / "faults"),
        },
    }


def _muster(url: str, devices: Callable[[Path], dict[str, object]]) -> Command:
    def command(root: Path) -> list[str]:
        file = root / "plugin.json"
        if not file.exists():
            process = {"node": "bench", "bus": {"url": url}, "kubelet": {"directory": str(root)}}
            file.write_text(json.dumps(process | devices(root)))
        return [sys.executable, "-m", "muster_plugin", "--config", str(file)]

    return command


def _ms(seconds: Iterable[float]) -> list[float]:
    return [value * 1000 for value in seconds]


if __name__ == "__main__":
    sys.exit(report.main("plugin", measure))
