"""Door to the plugin beside another: how soon, how much, and how fast it is back after each loss.

`--peer CMD` measures any other plugin in the same run, against the same kubelet: `{directory}` in
the command is where the kubelet keeps the plugins' sockets, `{kubelet}` the directory above it, and
`{device}` a device, which it has to advertise under one resource.
"""

import argparse
import asyncio
import contextlib
import json
import shlex
import sys
import time
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Final

import grpc.aio

import muster
import muster_plugin
from bench import listening_kubelet, programs, report
from muster.pb import deviceplugin_pb2 as dp
from muster.pb import rpc

_SETTLE_S: Final = 6.0
_NEVER_S: Final = 8.0
_NOISE_MIB: Final = 2.0
Command = Callable[[Path], list[str]]


class Bench:
    """One plugin under measurement: the command that starts it, for a kubelet's directory."""

    def __init__(self, name: str, command: Command, root: Path, *, quick: bool) -> None:
        self._name = name
        self._command = command
        self._root = root
        self._quick = quick
        self._rows: list[report.Row] = []
        (root / "device-plugins").mkdir(parents=True)
        (root / "null").symlink_to("/dev/null")

    async def common(self) -> list[report.Row]:
        """Measure what every plugin can be asked."""
        await self._starts()
        async with self._living() as (heard, process):
            first = await heard.lists.get()
            await self._costs(process)
            await self._allocations(heard, first.resource)
            await self._losses(heard, first.resource)
        await self._crash()
        return self._rows

    async def own(self) -> list[report.Row]:
        """Measure what only muster's plugin is asked here: hot-plug, faults, growth."""
        async with self._living() as (heard, process):
            await _quiet(heard)
            await self._hot_plug(heard)
            await self._faults(heard)
            await self._growth(heard, process)
        return self._rows

    def row(
        self, name: str, value: float, unit: str, *, most: float | None = None, how: str = ""
    ) -> None:
        """Add a figure; the targets are muster's."""
        target = most if self._name == "muster" else None
        self._rows.append(
            report.Row(
                name=f"{self._name}: {name}",
                value=round(value, 4),
                unit=unit,
                target=target,
                how=how,
            )
        )

    @contextlib.asynccontextmanager
    async def _living(
        self,
    ) -> AsyncIterator[tuple[listening_kubelet.ListeningKubelet, asyncio.subprocess.Process]]:
        async with (
            listening_kubelet.ListeningKubelet(self._root / "device-plugins") as heard,
            programs.running(self._command(self._root)) as process,
        ):
            yield heard, process

    async def _starts(self) -> None:
        times = 10 if self._quick else 40
        taken = []
        async with listening_kubelet.ListeningKubelet(self._root / "device-plugins") as heard:
            for _ in range(times):
                started = time.perf_counter()
                async with programs.running(self._command(self._root)):
                    seconds = await _until_registered(heard, started)
                    if seconds >= _NEVER_S:
                        sys.exit(f"{self._name}: not registered within {_NEVER_S:g} s")
                    taken.append(seconds)
                    await heard.lists.get()
                await _quiet(heard)
        how = f"{times} starts; from fork to the kubelet's hearing Register"
        self.row("start to Register, p50", _ms(taken, 50), "ms", most=100, how=how)

    async def _costs(self, process: asyncio.subprocess.Process) -> None:
        await asyncio.sleep(_SETTLE_S)
        seconds = 6.0 if self._quick else 30.0
        before, started = programs.cpu_s(process.pid), time.perf_counter()
        await asyncio.sleep(seconds)
        share = (programs.cpu_s(process.pid) - before) / (time.perf_counter() - started)
        memory = programs.resident_mib(process.pid)
        self.row("memory, one resource", memory, "MiB", most=48, how="VmRSS, one stream")
        self.row("idle CPU", share * 100, "% of a core", most=0.1, how=f"{seconds:g} s")

    async def _allocations(self, heard: listening_kubelet.ListeningKubelet, resource: str) -> None:
        calls = 500 if self._quick else 5000
        path, taken, empty = heard.endpoints[resource], [], []
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
        how = f"{calls} calls, one caller (Python)"
        floor = "the same, a call that does nothing; what gRPC costs on this machine"
        self.row("GetDevicePluginOptions, p50", _ms(empty, 50), "ms", how=floor)
        self.row("Allocate, p50", _ms(taken, 50), "ms", most=0.5, how=how)
        self.row("Allocate, p99", _ms(taken, 99), "ms", how=how)
        ours = _ms(taken, 50) - _ms(empty, 50)
        self.row(
            "Allocate beyond an empty call", ours, "ms", how="p50 less p50: what is the plugin's"
        )

    async def _losses(self, heard: listening_kubelet.ListeningKubelet, resource: str) -> None:
        times = 20 if self._quick else 40
        restarts = []
        for _ in range(times):
            await _quiet(heard)
            restarts.append(await _until_registered(heard, await heard.restart()))
        how = f"{times} restarts; from kubelet.sock to Register; {_NEVER_S:g} s is never"
        self.row("kubelet restart to Register, p95", _ms(restarts, 95), "ms", most=20, how=how)
        self.row("kubelet restart to Register, max", max(restarts) * 1000, "ms", most=300, how=how)
        dropped, removed, changed = [], [], []
        for _ in range(3):
            await _quiet(heard)
            started = time.perf_counter()
            await heard.drop(resource)
            dropped.append(await _until_registered(heard, started))
        for _ in range(5):
            await _quiet(heard)
            # a loss soon after a loss is repaired with a delay, on purpose
            await asyncio.sleep(2.2)
            started = time.perf_counter()
            heard.endpoints[resource].unlink(missing_ok=True)
            removed.append(await _until_registered(heard, started))
            if removed[-1] < _NEVER_S:
                old, new = await heard.ends.get(), await heard.lists.get()
                changed.append(new.at - old.at)
        never = f"{_NEVER_S:g} s is never"
        self.row("stream dropped to Register, max", max(dropped), "s", most=3, how=f"3; {never}")
        self.row("own socket gone to Register, max", max(removed), "s", most=0.2, how=f"5; {never}")
        if changed:
            how = f"{len(changed)}; from the end of a stream to the next one's list"
            self.row("change of generation, p50", _ms(changed, 50), "ms", most=10, how=how)

    async def _crash(self) -> None:
        sockets = self._root / "device-plugins"
        for _ in range(2):
            async with self._living() as (heard, process):
                await heard.lists.get()
                process.kill()
                await process.wait()
        async with self._living() as (heard, _process):
            await heard.lists.get()
            left = [p for p in sockets.iterdir() if p.is_socket() and p.name != "kubelet.sock"]
            how = "after two SIGKILLs and a start; its own is one"
            self.row("socket files", len(left), "files", most=1, how=how)

    async def _hot_plug(self, heard: listening_kubelet.ListeningKubelet) -> None:
        times = 100 if self._quick else 500
        device, came, went = self._root / "hot", [], []
        for _ in range(times):
            started = time.perf_counter()
            device.symlink_to("/dev/zero")
            came.append((await _list(heard, "muster.example/hot", healthy=1)).at - started)
            started = time.perf_counter()
            device.unlink()
            went.append((await _list(heard, "muster.example/hot", healthy=0)).at - started)
        how = f"{times} times, a link in a directory; to the list on the stream"
        self.row("device appears to list, p99", _ms(came, 99), "ms", most=20, how=how)
        self.row("device disappears to list, p99", _ms(went, 99), "ms", most=20, how=how)

    async def _faults(self, heard: listening_kubelet.ListeningKubelet) -> None:
        times = 100 if self._quick else 500
        script, taken = self._root / "faults", []
        for turn in range(times):
            started = time.perf_counter()
            script.write_text('{"device": 0, "xid": 79}\n' if turn % 2 == 0 else "")
            found = await _list(heard, "muster.example/gpu", healthy=turn % 2)
            taken.append(found.at - started)
        how = f"{times} faults and recoveries of a simulated GPU, from the write of its script"
        self.row("Unhealthy to list, p99", _ms(taken, 99), "ms", most=5, how=how)

    async def _growth(
        self, heard: listening_kubelet.ListeningKubelet, process: asyncio.subprocess.Process
    ) -> None:
        cycles, restarts = (500, 30) if self._quick else (10_000, 1_000)
        await self._cycles(heard, cycles // 5, restarts // 5)
        memory, files = programs.resident_mib(process.pid), programs.descriptors(process.pid)
        await self._cycles(heard, cycles, restarts)
        grown = programs.resident_mib(process.pid) - memory
        how = f"{cycles} hot-plug cycles and {restarts} kubelet restarts, after a fifth of them"
        self.row("memory grown", max(grown, 0.0), "MiB", most=_NOISE_MIB, how=how)
        self.row(
            "descriptors grown",
            max(programs.descriptors(process.pid) - files, 0),
            "files",
            most=0,
            how=how,
        )

    async def _cycles(
        self, heard: listening_kubelet.ListeningKubelet, cycles: int, restarts: int
    ) -> None:
        device = self._root / "hot"
        for _ in range(cycles):
            device.symlink_to("/dev/zero")
            await _list(heard, "muster.example/hot", healthy=1)
            device.unlink()
            await _list(heard, "muster.example/hot", healthy=0)
        for _ in range(restarts):
            await heard.restart()
            for _ in range(3):
                await heard.registered.get()
        await _quiet(heard)


async def measure(options: report.Options, peers: Sequence[str]) -> list[report.Row]:
    """Measure muster's plugin, then each peer."""
    async with programs.arena("bench/plugin", muster, muster_plugin) as (root, url):
        ours = Bench("muster", _muster(url, _one), root / "m", quick=options.quick)
        rows = await ours.common()
        rows += await _many(url, root / "n")
        wide = Bench("muster", _muster(url, _hot), root / "h", quick=options.quick)
        rows += await wide.own()
        for number, peer in enumerate(peers):
            place = root / f"p{number}"
            name = Path(shlex.split(peer)[0]).name
            rows += await Bench(name, _peer(peer), place, quick=options.quick).common()
    return rows


async def _many(url: str, root: Path) -> list[report.Row]:
    """Measure muster with 64 resources."""
    found = Bench("muster", _muster(url, _sixty_four), root, quick=True)
    async with listening_kubelet.ListeningKubelet(root / "device-plugins") as heard:
        started = time.perf_counter()
        async with programs.running(found._command(root)) as process:  # noqa: SLF001  # the same module
            for _ in range(64):
                last = await heard.registered.get()
            how = "from fork to the last of 64 Registers"
            found.row("64 resources registered", last.at - started, "s", most=1, how=how)
            await asyncio.sleep(_SETTLE_S)
            memory = programs.resident_mib(process.pid)
            found.row("memory, 64 resources", memory, "MiB", most=64, how="VmRSS, 64 streams")
    return found._rows  # noqa: SLF001  # the same module


def _resource(name: str, path: str, **more: object) -> dict[str, object]:
    return {"name": name, "groups": [{"devices": [{"path": path}]}], **more}


def _one(_root: Path) -> dict[str, object]:
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


def _peer(command: str) -> Command:
    def filled(root: Path) -> list[str]:
        places = {"directory": root / "device-plugins", "kubelet": root, "device": root / "null"}
        parts = shlex.split(command)
        for name, place in places.items():
            parts = [part.replace(f"{{{name}}}", str(place)) for part in parts]
        return parts

    return filled


async def _until_registered(heard: listening_kubelet.ListeningKubelet, started: float) -> float:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_NEVER_S):
            return max(0.0, (await heard.registered.get()).at - started)
    return _NEVER_S


async def _list(
    heard: listening_kubelet.ListeningKubelet, resource: str, *, healthy: int
) -> listening_kubelet.Observed:
    """Wait for a list of this resource with so many Healthy devices."""
    async with asyncio.timeout(_NEVER_S):
        while True:
            found = await heard.lists.get()
            if (found.resource, found.healthy) == (resource, healthy):
                return found


async def _quiet(heard: listening_kubelet.ListeningKubelet) -> None:
    """Wait until nothing more comes, and forget what came."""
    while True:
        came = 0
        for queue in (heard.registered, heard.lists, heard.ends):
            while not queue.empty():
                queue.get_nowait()
                came += 1
        if not came:
            return
        await asyncio.sleep(0.1)


def _ms(values: Sequence[float], share: int) -> float:
    return report.percentile(values, share) * 1000


def main() -> int:
    """Run the benchmark from its command line."""
    own = argparse.ArgumentParser(add_help=False)
    own.add_argument(
        "--peer",
        action="append",
        default=[],
        metavar="CMD",
        help="another plugin's command line, with {directory} or {kubelet}, and {device}",
    )
    chosen, _ = own.parse_known_args()
    return report.main("plugin", lambda options: measure(options, chosen.peer), more=own)


if __name__ == "__main__":
    sys.exit(main())
