"""Adapter for processes: measures the labeler and its commands with ten thousand nodes.

python -m bench.labeler [--quick] [--json FILE]
"""

import asyncio
import contextlib
import os
import shutil
import sys
import tempfile
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

import aiohttp
import orjson

from bench import programs, report
from muster import vocabulary
from muster.local import nats, processes, stack
from muster.nats import bus

_KEY: Final = "skypilot.co/accelerator"
_NODES: Final = "/api/v1/nodes"
_STATUS: Final = {"Content-Type": "application/merge-patch+json"}
_PRODUCTS: Final = (("NVIDIA H100 80GB HBM3", 81_559, "h100"), ("NVIDIA L4", 23_034, "l4"))
_AT_ONCE: Final = 64
_STATUS_INTERVAL_S: Final = 300.0
"""How often a kubelet writes an unchanged status (nodeStatusReportFrequency)."""
_RATE: Final = 100
_AUDIT_LOG: Final = "audit.log"


async def measure(options: report.Options) -> list[report.Row]:
    """Measure commands and service on one cluster."""
    count = 1_000 if options.quick else 10_000
    directory = Path(tempfile.mkdtemp(prefix="mu-"))
    try:
        async with _cluster(directory) as cluster:
            await cluster.fill(count)
            rows = [*await cluster.checked(count), *await cluster.labelled(count)]
            rows += await cluster.steady(count, seconds=10 if options.quick else 30)
        return rows
    finally:
        shutil.rmtree(directory)


class _Cluster:
    """The API stand-in in its own process, with many nodes."""

    def __init__(self, directory: Path, url: str) -> None:
        self._directory = directory
        self._kubeconfig = str(directory / "kubeconfig")
        self._audit_log = directory / _AUDIT_LOG
        self._open = aiohttp.ClientSession(
            url, connector=aiohttp.TCPConnector(limit=_AT_ONCE), raise_for_status=True
        )

    async def close(self) -> None:
        await self._open.close()

    async def fill(self, count: int) -> None:
        """Create nodes as large as real ones, and a pod for every tenth."""
        await _at_once([self._create(_NODES, node(number)) for number in range(count)])
        path = "/api/v1/namespaces/default/pods"
        await _at_once([self._create(path, pod(number)) for number in range(0, count, 10)])

    async def checked(self, count: int) -> list[report.Row]:
        """Measure `muster check` with all nodes and pods."""
        words = ("check", "all", "--output", "json")
        measured = await command(words, self._kubeconfig)
        how = f"muster check all, {count} nodes of {_size_kib():.1f} KiB, {count // 10} pods"
        return [
            report.Row(name="check", value=measured.wall_s, unit="s", target=20, how=how),
            report.Row(
                name="check, memory", value=measured.peak_mib, unit="MiB", target=150, how=how
            ),
        ]

    async def labelled(self, count: int) -> list[report.Row]:
        """Measure `muster label-gpus` with all nodes, and the rate of its writes."""
        self._audit_log.write_bytes(b"")
        words = ("label-gpus", "--apply", "--yes", "--rate", str(_RATE), "--timeout", "60s")
        measured = await command(words, self._kubeconfig)
        received = self._received()
        how = f"{count} nodes, {_RATE} writes a second allowed, exit code {measured.code}"
        return [
            report.Row(
                name="apply, longest",
                value=measured.wall_s,
                unit="s",
                target=count / _RATE * 1.1 + 10,
                how=f"{how}; each written and read back",
            ),
            report.Row(
                name="apply, in any second",
                value=_most_within(received, 1.0),
                unit="writes",
                target=_RATE,
                how=f"the most of {len(received)} within any second, as the API received them",
            ),
            report.Row(
                name="apply, memory", value=measured.peak_mib, unit="MiB", target=None, how=how
            ),
        ]

    async def steady(self, count: int, *, seconds: float) -> list[report.Row]:
        """Measure the service with all nodes, and while nodes are added."""
        async with contextlib.AsyncExitStack() as open_:
            server = await open_.enter_async_context(nats.NatsServer(self._directory / "nats"))
            connected = await open_.enter_async_context(
                bus.Bus(server.url, producer="plugins/device-plugin", name="bench", owner=True)
            )
            await _at_once([_report(connected, number) for number in range(count)])
            labeler = await self._start(server.url)
            open_.push_async_callback(labeler.end)
            await self._kept(labeler.addresses["http"], count)
            kubelets = asyncio.create_task(self._kubelets(count))
            # do not measure the start
            await asyncio.sleep(5)
            before_s = programs.cpu_s(labeler.pid)
            await asyncio.sleep(seconds)
            share = (programs.cpu_s(labeler.pid) - before_s) / seconds * 100
            mib = programs.resident_mib(labeler.pid)
            delays = [await self._added(connected, count + i) for i in range(20)]
            kubelets.cancel()
            await asyncio.gather(kubelets, return_exceptions=True)
        how = (
            f"{count} nodes reported and labelled, "
            f"{count / _STATUS_INTERVAL_S:.0f} statuses a second"
        )
        return [
            report.Row(name="steady, CPU", value=share, unit="% of a core", target=2, how=how),
            report.Row(name="steady, memory", value=mib, unit="MiB", target=120, how=how),
            report.Row(
                name="new node to label",
                value=report.percentile(delays, 99),
                unit="s",
                target=2,
                how="99th percentile of 20, from the report of its agent to the label on it",
            ),
        ]

    async def _start(self, url: str) -> processes.Process:
        file = self._directory / "labeler.json"
        cluster = {"kubeconfig": str(self._directory / "kubeconfig"), "namespace": "default"}
        settings = {
            "bus": {"url": url},
            "mode": "apply",
            "kubernetes": {**cluster, "timeout_s": 60},
            "policy": {"writes_per_s": _RATE},
        }
        file.write_bytes(orjson.dumps(settings))
        program = processes.Program("labeler", "muster_labeler", ("--config", str(file)))
        labeler = processes.Process(program, self._directory / "labeler.log")
        await labeler.start()
        return labeler

    async def _kept(self, http: str, count: int) -> None:
        """Wait until the service has evaluated every node."""
        async with aiohttp.ClientSession() as asking:
            while True:
                async with asking.get(f"{http}/state") as answer:
                    nodes = (await answer.json())["nodes"].values()
                if sum(node["action"] is not None for node in nodes) >= count:
                    return
                await asyncio.sleep(0.5)

    async def _kubelets(self, count: int) -> None:
        """Write the status of every node as often as kubelets do."""
        number = 0
        while True:
            await asyncio.sleep(_STATUS_INTERVAL_S / count)
            at = datetime.now(UTC).isoformat()
            ready = {"type": "Ready", "status": "True", "lastHeartbeatTime": at}
            body = orjson.dumps({"status": {"conditions": [ready]}})
            path = f"{_NODES}/{node_name(number % count)}/status"
            async with self._open.patch(path, data=body, headers=_STATUS):
                number += 1

    async def _added(self, connected: bus.Bus, number: int) -> float:
        clock = asyncio.get_running_loop().time
        await self._create(_NODES, node(number))
        began = clock()
        await _report(connected, number)
        while True:
            async with self._open.get(f"{_NODES}/{node_name(number)}") as answer:
                if _KEY in (await answer.json())["metadata"]["labels"]:
                    return clock() - began
            await asyncio.sleep(0.01)

    def _received(self) -> list[float]:
        """Return the times of the writes to nodes, in order, from the API's audit log."""
        lines = [orjson.loads(line) for line in self._audit_log.read_bytes().splitlines()]
        writes = [line for line in lines if line["requestURI"].startswith(_NODES)]
        times = [datetime.fromisoformat(line["requestReceivedTimestamp"]) for line in writes]
        return sorted(time.timestamp() for time in times)

    async def _create(self, path: str, body: bytes) -> None:
        async with self._open.post(path, data=body):
            pass


@dataclass(frozen=True, slots=True)
class Measured:
    """The cost of a command: time, peak memory, and its exit code."""

    wall_s: float
    peak_mib: float
    code: int


async def command(words: Sequence[str], kubeconfig: str) -> Measured:
    """Run a command of muster on a cluster; return its cost."""
    clock = asyncio.get_running_loop().time
    began = clock()
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", _MEASURED, *words, "--kubeconfig", kubeconfig),
        env=os.environ | {"PYTHONDONTWRITEBYTECODE": ""},
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
    )
    _, errors = await process.communicate()
    wall_s = clock() - began
    peak_kib, code = errors.split()[-2:]
    return Measured(wall_s, int(peak_kib) / 1024, int(code))


_MEASURED: Final = """
import resource, subprocess, sys
code = subprocess.call([sys.executable, "-m", "muster.cli.__main__", *sys.argv[1:]])
peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
print(peak, code, file=sys.stderr)
"""


@contextlib.asynccontextmanager
async def _cluster(directory: Path) -> AsyncIterator[_Cluster]:
    log = str(directory / _AUDIT_LOG)
    program = stack.kubernetes(str(directory / "kubeconfig"), "--audit-log-path", log)
    api = processes.Process(program, directory / "kubernetes.log")
    await api.start()
    cluster = _Cluster(directory, api.addresses["http"])
    try:
        yield cluster
    finally:
        await cluster.close()
        await api.end()


async def _at_once(work: Sequence[Any]) -> None:
    gate = asyncio.Semaphore(_AT_ONCE)

    async def limited(story: Any) -> None:
        async with gate:
            await story

    await asyncio.gather(*(limited(story) for story in work))


async def _report(connected: bus.Bus, number: int) -> None:
    product, memory_mib, _ = _PRODUCTS[number % len(_PRODUCTS)]
    gpus = tuple(
        vocabulary.Gpu(uuid=f"GPU-{number}-{index}", product=product, memory_mib=memory_mib)
        for index in range(8)
    )
    await connected.publish(
        vocabulary.InventoryReported(
            node=node_name(number),
            plugin="device-plugin",
            at=datetime.now(UTC),
            devices=(),
            gpus=vocabulary.GpuNode(gpus=gpus),
        )
    )


def _most_within(times: Sequence[float], within_s: float) -> float:
    """Return the highest rate in any period of this length, per second."""
    most = first = 0
    for last, at in enumerate(times):
        while at - times[first] >= within_s:
            first += 1
        most = max(most, last - first + 1)
    return most / within_s


def node_name(number: int) -> str:
    """Return the name of a node."""
    return (
        f"ip-10-{number // 65536}-{number // 256 % 256}-{number % 256}.eu-west-1.compute.internal"
    )


def node(number: int) -> bytes:
    """Return a node as large as a real one, with its model in a cloud's label."""
    name = node_name(number)
    images = [
        {"names": [f"registry.example.com/team/image-{i}:v1"], "sizeBytes": 1} for i in range(40)
    ]
    labels = {f"example.com/label-{index}": "value" for index in range(30)}
    model = _PRODUCTS[number % len(_PRODUCTS)][2]
    resources = {"cpu": "192", "memory": "2Ti", "pods": "110", "nvidia.com/gpu": "8"}
    return orjson.dumps(
        {
            "metadata": {
                "name": name,
                "labels": {**labels, "doks.digitalocean.com/gpu-model": model},
            },
            "status": {
                "capacity": resources,
                "allocatable": resources,
                "conditions": [
                    {
                        "type": "Ready",
                        "status": "True",
                        "lastTransitionTime": "2026-01-01T00:00:00Z",
                    }
                ],
                "images": images,
                "nodeInfo": {"containerRuntimeVersion": "containerd://2.0.1"},
            },
        }
    )


def _size_kib() -> float:
    return len(node(0)) / 1024


def pod(number: int) -> bytes:
    """Return a pod on a node."""
    container = {"name": "c", "image": "i", "resources": {"limits": {"cpu": "1"}}}
    spec = {"nodeName": node_name(number), "containers": [container]}
    return orjson.dumps({"metadata": {"name": f"pod-{number}"}, "spec": spec})


if __name__ == "__main__":
    sys.exit(report.main("labeler", measure))
