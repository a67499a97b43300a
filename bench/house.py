"""Door to one plugin process: what it costs to have it, and how soon the kubelet hears of it.

A real nats-server and the kubelet stand-in run beside it; the plugin advertises one device node.
"""

import asyncio
import compileall
import contextlib
import os
import shutil
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Final

import grpc
import grpc.aio
import msgspec

import muster
import muster_plugin
from bench import report
from muster.local import kubelet, nats
from muster.nats import bus
from muster.pb import deviceplugin_pb2 as dp
from muster.pb import rpc

FUSE: Final = "smarter-devices/fuse"
_SETTLE_S: Final = 6.0


async def measure(options: report.Options) -> list[report.Row]:
    """Measure starts first, then memory and idle CPU of one process."""
    for package in (muster, muster_plugin):
        compileall.compile_dir(Path(package.__file__ or "").parent, quiet=2)
    root = Path(tempfile.mkdtemp(prefix="mu-"))
    times = 10 if options.quick else 40
    try:
        config = _config(root)
        starts = await _starts(config, root / "device-plugins", times=times)
        async with (
            nats.NatsServer(root / "nats") as server,
            bus.Bus(server.url, producer="bench/house", name="bench", owner=True) as owner,
            kubelet.Kubelet(directory=root, node="bench") as node,
        ):
            await owner.link.client()
            config = _config(root, url=server.url)
            listed = await _listed(config, node, times=times)
            idle = await _idle(config, node, seconds=10 if options.quick else 30)
    finally:
        shutil.rmtree(root)
    return [*starts, *listed, *idle]


class _Doorbell:
    """A kubelet.sock that only hears Register."""

    def __init__(self) -> None:
        self.rang_at: asyncio.Queue[float] = asyncio.Queue()

    async def register(
        self, request: dp.RegisterRequest, context: rpc.Context[dp.RegisterRequest, dp.Empty]
    ) -> dp.Empty:
        """Note the moment."""
        del request, context
        self.rang_at.put_nowait(time.perf_counter())
        return dp.Empty()


async def _starts(config: Path, sockets: Path, *, times: int) -> list[report.Row]:
    doorbell = _Doorbell()
    server = grpc.aio.server()
    server.add_generic_rpc_handlers((rpc.registration_handler(doorbell),))
    server.add_insecure_port(f"unix:{sockets / 'kubelet.sock'}")
    await server.start()
    taken, bare = [], []
    for _ in range(times):
        bare.append(await _bare_python())
        started = time.perf_counter()
        async with _plugin(config):
            taken.append(await doorbell.rang_at.get() - started)
    await server.stop(None)
    how = f"{times} starts; from fork to the kubelet's hearing Register"
    alone = f"{times} starts; the interpreter alone, to compare machines"
    return [
        _row("start to Register, p50", report.percentile(taken, 50) * 1000, "ms", 120, how),
        _row("start to Register, p99", report.percentile(taken, 99) * 1000, "ms", None, how),
        _row("import asyncio, p50", report.percentile(bare, 50) * 1000, "ms", None, alone),
    ]


async def _listed(config: Path, node: kubelet.Kubelet, *, times: int) -> list[report.Row]:
    taken = []
    for _ in range(times):
        started = time.perf_counter()
        async with _plugin(config):
            await node.until(lambda state: _is_listed(state.resources.get(FUSE)))
            taken.append(time.perf_counter() - started)
        await node.until(lambda state: not _is_listed(state.resources.get(FUSE)))
    how = f"{times} starts; from fork to the kubelet's having the device list"
    return [_row("start to listed, p50", report.percentile(taken, 50) * 1000, "ms", None, how)]


async def _idle(config: Path, node: kubelet.Kubelet, *, seconds: float) -> list[report.Row]:
    async with _plugin(config) as pid:
        await node.until(lambda state: _is_listed(state.resources.get(FUSE)))
        await asyncio.sleep(_SETTLE_S)
        before, started = _cpu_s(pid), time.perf_counter()
        await asyncio.sleep(seconds)
        share = (_cpu_s(pid) - before) / (time.perf_counter() - started)
        how = "one resource, one stream, bus connected, a beat every 5 s, a self-probe every 10 s"
        return [
            _row("resident memory", _resident_mib(pid), "MiB", 48, f"VmRSS; {how}"),
            _row("idle CPU", share * 100, "% of a core", 0.1, f"{seconds:g} s; {how}"),
        ]


def _row(name: str, value: float, unit: str, target: float | None, how: str) -> report.Row:
    return report.Row(name=name, value=round(value, 4), unit=unit, target=target, how=how)


def _config(root: Path, *, url: str = "nats://127.0.0.1:1") -> Path:
    file = root / "plugin.yaml"
    (root / "device-plugins").mkdir(exist_ok=True)
    told = {
        "node": "bench",
        "bus": {"url": url},
        "kubelet": {"directory": str(root)},
        "resources": [{"name": FUSE, "groups": [{"devices": [{"path": "/dev/null"}]}]}],
    }
    file.write_bytes(msgspec.yaml.encode(told))
    return file


@contextlib.asynccontextmanager
async def _plugin(config: Path) -> AsyncIterator[int]:
    environment = os.environ | {"PYTHONDONTWRITEBYTECODE": ""}
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "muster_plugin", "--config", str(config)),
        env=environment,
        stdout=asyncio.subprocess.DEVNULL,
    )
    try:
        yield process.pid
    finally:
        process.terminate()
        code = await process.wait()
    if code != 0:
        raise RuntimeError(f"the plugin ended with {code}")


async def _bare_python() -> float:
    started = time.perf_counter()
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", "import asyncio")
    await process.wait()
    return time.perf_counter() - started


def _is_listed(found: object) -> bool:
    return getattr(found, "allocatable", 0) == 1


def _resident_mib(pid: int) -> float:
    status = Path(f"/proc/{pid}/status").read_text()
    line = next(line for line in status.splitlines() if line.startswith("VmRSS"))
    return int(line.split()[1]) / 1024


def _cpu_s(pid: int) -> float:
    """CPU time of all threads, to the nanosecond: /proc/PID/stat counts in 10 ms."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / 1e9


if __name__ == "__main__":
    sys.exit(report.main("house", measure))
