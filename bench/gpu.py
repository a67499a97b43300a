"""Adapter for the plugin with eight GPUs: measures its cost, and the time from fault to kubelet.

NVML is the fake of the tests (`tests/worlds/nvml`): its answers cost nothing, so the result is the
cost of the plugin and the binding. The fake is compiled with the system's `cc` the first time.
"""

import asyncio
import contextlib
import json
import sys
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Final

import muster
import muster_plugin
from bench import listening_kubelet, placement, programs, report
from tests.worlds.nvml import fake, scenes

GPU: Final = "nvidia.com/gpu"
_SETTLE_S: Final = 6.0
_WAIT_S: Final = 10.0
Settings = Mapping[str, object]


class Bench:
    """The measured plugin, in its own directory."""

    def __init__(self, root: Path, url: str, *, quick: bool) -> None:
        self._root = root
        self._url = url
        self._quick = quick
        (root / "device-plugins").mkdir(parents=True)
        self._gpus = fake.Fake(root / "nvml")
        self._gpus.write(scenes.h100x8())

    async def rows(self) -> list[report.Row]:
        """Measure starts, costs and faults."""
        return [*await self._starts(), *await self._costs(), *await self._faults()]

    @contextlib.asynccontextmanager
    async def _running_plugin(
        self, gpus: Settings | None = None, *, resources: Sequence[Settings] = ()
    ) -> AsyncIterator[asyncio.subprocess.Process]:
        file = self._root / "plugin.json"
        process = {"node": "bench", "bus": {"url": self._url}}
        kubelet = {"kubelet": {"directory": str(self._root)}}
        observed = {"gpus": {"library": str(fake.built()), **(gpus or {})}}
        of_nodes = {"resources": [*resources]}
        file.write_text(json.dumps(process | kubelet | (of_nodes if resources else observed)))
        command = [sys.executable, "-m", "muster_plugin", "--config", str(file)]
        async with programs.running(command, self._gpus.environment()) as running:
            yield running

    def _kubelet(self) -> listening_kubelet.ListeningKubelet:
        return listening_kubelet.ListeningKubelet(self._root / "device-plugins")

    async def _starts(self) -> list[report.Row]:
        times = 10 if self._quick else 40
        null = {"name": "muster.example/null", "groups": [{"devices": [{"path": "/dev/null"}]}]}
        taken, plain = [], []
        for _ in range(times):
            taken.append(await self._start(8))
            plain.append(await self._start(1, resources=[null]))
        how = f"{times} starts; from fork to Register at the kubelet"
        beside = f"{times} starts, alternating with the others; the part without GPUs"
        return [
            _row("start to Register, 8 GPUs, p50", _ms(taken, 50), "ms", most=150, how=how),
            _row("start to Register, /dev/null, p50", _ms(plain, 50), "ms", how=beside),
        ]

    async def _start(self, devices: int, *, resources: Sequence[Settings] = ()) -> float:
        async with self._kubelet() as kubelet:
            started = time.perf_counter()
            async with self._running_plugin(resources=resources):
                taken = (await kubelet.registered.get()).at - started
                await _list(kubelet, healthy=devices)
        return taken

    async def _costs(self) -> list[report.Row]:
        seconds = 10.0 if self._quick else 60.0
        async with self._kubelet() as kubelet, self._running_plugin() as process:
            await _list(kubelet, healthy=8)
            await asyncio.sleep(_SETTLE_S)
            calls, used = sum(self._gpus.counts().values()), programs.cpu_s(process.pid)
            started = time.perf_counter()
            await asyncio.sleep(seconds)
            took = time.perf_counter() - started
            share = (programs.cpu_s(process.pid) - used) / took * 100
            made = (sum(self._gpus.counts().values()) - calls) / took * 60
            memory = programs.resident_mib(process.pid)
        how = f"8 GPUs, one stream, the bus connected; {seconds:g} s"
        return [
            _row("memory with NVML", memory, "MiB", most=56, how=f"VmRSS; {how}"),
            _row("idle CPU", share, "% of a core", most=0.3, how=f"polls every 10 s; {how}"),
            _row("NVML calls", made, "a minute", how=f"all functions; {how}"),
        ]

    async def _faults(self) -> list[report.Row]:
        times = 100 if self._quick else 500
        # an XID causes a poll at once, so the GPU recovers before the next XID
        health = {"good": 1, "cooldown_s": 0}
        async with self._kubelet() as kubelet, self._running_plugin({"health": health}):
            await _list(kubelet, healthy=8)
            taken = [await self._fault(kubelet, turn, of=8, bad=1) for turn in range(times)]
        sharing = {"resources": [{"name": GPU, "replicas": 16}]}
        async with (
            self._kubelet() as kubelet,
            self._running_plugin({"health": health, "sharing": sharing}),
        ):
            await _list(kubelet, healthy=128)
            replicas = [await self._fault(kubelet, turn, of=128, bad=16) for turn in range(times)]
        how = f"{times} XIDs, each after recovery; from the driver's event to the list"
        shared = f"{how}; 8 GPUs, 16 replicas each"
        return [
            _row("XID to Unhealthy, p50", _ms(taken, 50), "ms", how=how),
            _row("XID to Unhealthy, p99", _ms(taken, 99), "ms", most=20, how=how),
            _row("XID to Unhealthy, shared, p99", _ms(replicas, 99), "ms", how=shared),
        ]

    async def _fault(
        self, kubelet: listening_kubelet.ListeningKubelet, turn: int, *, of: int, bad: int
    ) -> float:
        started = time.perf_counter()
        self._gpus.drop()
        self._gpus.xid(turn % 8, 94)
        lines = await _list(kubelet, healthy=of - bad)
        await _list(kubelet, healthy=of)
        return lines.at - started


async def measure(options: report.Options) -> list[report.Row]:
    """Measure the plugin, then preferred allocation."""
    async with programs.arena("bench/gpu", muster, muster_plugin) as (root, url):
        rows = await Bench(root / "n", url, quick=options.quick).rows()
    return [*rows, *placement.rows(quick=options.quick)]


async def _list(
    kubelet: listening_kubelet.ListeningKubelet, *, healthy: int
) -> listening_kubelet.Observed:
    """Wait for a list with this number of Healthy devices."""
    async with asyncio.timeout(_WAIT_S):
        while True:
            lines = await kubelet.lists.get()
            if lines.healthy == healthy:
                return lines


def _row(
    name: str, value: float, unit: str, *, most: float | None = None, how: str = ""
) -> report.Row:
    return report.Row(name=name, value=round(value, 4), unit=unit, target=most, how=how)


def _ms(values: list[float], share: int) -> float:
    return report.percentile(values, share) * 1000


if __name__ == "__main__":
    sys.exit(report.main("gpu", measure))
