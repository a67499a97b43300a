"""Adapter for processes: compares our plugin with other device plugins, with the same kubelet.

NVIDIA's plugin (`make cluster` builds it) and ours serve eight GPUs of the stand-in for NVML; a
generic-device-plugin in the PATH serves device nodes beside ours. The kubelet is a stand-in. If
MUSTER_KUBELET_DIR names a real kubelet (and MUSTER_KUBELET_RESTART restarts it), starts and
restarts are also measured with it; its node keeps the resources. Our NATS server is real. An empty
plugin shows the cost of Python and grpcio alone.
"""

import asyncio
import contextlib
import json
import os
import shlex
import shutil
import statistics
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import grpc.aio

import muster
import muster_plugin
from bench import listening_kubelet, programs, report
from muster.pb import deviceplugin_pb2 as dp
from muster.pb import rpc
from muster_plugin.kubelet import podresources
from tests.worlds import device_plugins
from tests.worlds.nvml import fake, scenes

EMPTY: Final = "empty.example/null"
GENERIC: Final = "generic-device-plugin"
GPU: Final = "nvidia.com/gpu"
_SETTLE_S: Final = 6.0
_REPAIR_S: Final = 2.2
"""The pause between losses: the plugin deliberately repairs a second loss later if it follows soon.
"""
_REAL_S: Final = 60.0
_POLL_S: Final = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class Contender:
    """A plugin that serves one resource with several devices to the kubelet in a directory.

    `change` changes the nth device and returns the resulting number of Healthy devices; None for
    the empty plugin, which detects no changes.
    """

    name: str
    resource: str
    devices: int
    kubelet: listening_kubelet.ListeningKubelet
    command: Sequence[str]
    environment: Mapping[str, str]
    change: Callable[[int], int] | None
    changed: str

    def living(self) -> contextlib.AbstractAsyncContextManager[asyncio.subprocess.Process]:
        """Run the plugin until the block ends."""
        return programs.running(self.command, self.environment, errors=asyncio.subprocess.DEVNULL)

    def rows(
        self,
        what: str,
        samples: Sequence[float],
        unit: str,
        how: str,
        *,
        floor: float | None = None,
        never: float | None = None,
    ) -> list[report.Row]:
        """Return median and maximum; the plugin's name follows the name of the figure."""
        return report.spread(
            f"{what}: {self.name}", samples, unit, how=how, floor=floor, never=never
        )


async def starts(contenders: Sequence[Contender], times: int) -> list[report.Row]:
    """Start the plugins in turn, `times` times; return how long each needs to register."""
    taken: dict[str, list[float]] = {contender.name: [] for contender in contenders}
    bare = []
    for _ in range(times):
        bare.append((await programs.bare_interpreter())[0] * 1000)
        for contender in contenders:
            started = time.perf_counter()
            async with contender.living():
                seconds = await contender.kubelet.until_registered(started)
                await contender.kubelet.until_listed(contender.resource, healthy=contender.devices)
            taken[contender.name].append(seconds * 1000)
            await contender.kubelet.quiet()
    how = f"{times} starts in turn, from fork to Register; floor: python -c 'import asyncio'"
    floor = statistics.median(bare)
    return [
        row
        for contender in contenders
        for row in contender.rows(
            "start to Register", taken[contender.name], "ms", how, floor=floor
        )
    ]


async def idle(
    contenders: Sequence[Contender], pids: Sequence[int], seconds: float
) -> list[report.Row]:
    """Measure all plugins idling at the same time."""
    await asyncio.sleep(_SETTLE_S)
    before, began = [programs.cpu_s(pid) for pid in pids], time.perf_counter()
    await asyncio.sleep(seconds)
    passed = time.perf_counter() - began
    shares = [programs.cpu_s(pid) - used for pid, used in zip(pids, before, strict=True)]
    how = f"all together, {seconds:g} s"
    rows = []
    for contender, pid, share in zip(contenders, pids, shares, strict=True):
        for what, value, unit in (
            ("memory, RSS", programs.resident_mib(pid), "MiB"),
            ("memory, PSS", programs.proportional_mib(pid), "MiB"),
            ("idle CPU", share / passed * 100, "% of a core"),
        ):
            rows.append(report.row(f"{what}: {contender.name}", value, unit, how=how))
    return rows


async def allocations(contender: Contender, calls: int) -> list[report.Row]:
    """Measure repeated allocations of one device."""
    taken, empty = [], []
    path = contender.kubelet.endpoints[contender.resource]
    options = [("grpc.default_authority", "localhost")]
    async with grpc.aio.insecure_channel(f"unix:{path}", options=options) as channel:
        client = rpc.DevicePluginClient(channel)
        listed = await client.list_and_watch(dp.Empty()).read()
        assert isinstance(listed, dp.ListAndWatchResponse), "the list comes first"
        healthy = [device.ID for device in listed.devices if device.health == "Healthy"]
        wanted = dp.ContainerAllocateRequest(devices_ids=healthy[:1])
        for _ in range(calls):
            started = time.perf_counter()
            await client.allocate(dp.AllocateRequest(container_requests=[wanted]))
            taken.append((time.perf_counter() - started) * 1000)
            started = time.perf_counter()
            await client.get_device_plugin_options(dp.Empty())
            empty.append((time.perf_counter() - started) * 1000)
    how = f"{calls} calls in a row from Python; muster stores an event of each; floor: empty call"
    return contender.rows("Allocate", taken, "ms", how, floor=statistics.median(empty))


async def changes(contender: Contender, times: int) -> list[report.Row]:
    """Measure the time from each change of a device until the kubelet's list shows it."""
    taken: list[float] = []
    if contender.change is None:
        return []
    for number in range(times):
        await contender.kubelet.quiet()
        started, healthy = time.perf_counter(), contender.change(number)
        try:
            listed = await contender.kubelet.until_listed(contender.resource, healthy=healthy)
            taken.append((listed.at - started) * 1000)
        except TimeoutError:
            taken.append(listening_kubelet.NEVER_S * 1000)
    never = listening_kubelet.NEVER_S * 1000
    return contender.rows(contender.changed, taken, "ms", report.times(times), never=never)


async def losses(contender: Contender, times: int) -> list[report.Row]:
    """Cause each kind of loss; measure the time until the plugin registers again."""
    kubelet = contender.kubelet
    rows: list[report.Row] = []

    async def restart() -> float:
        return await kubelet.restart()

    async def drop() -> float:
        started = time.perf_counter()
        await kubelet.drop(contender.resource)
        return started

    async def remove() -> float:
        started = time.perf_counter()
        kubelet.endpoints[contender.resource].unlink(missing_ok=True)
        return started

    taken: list[float] = []
    for what, lose in (
        ("kubelet restart to Register", restart),
        ("own socket removed to Register", remove),
        ("stream dropped to Register", drop),
    ):
        for _ in range(times):
            await kubelet.quiet()
            await asyncio.sleep(_REPAIR_S)
            if taken and taken[-1] >= listening_kubelet.NEVER_S:
                # a plugin that did not recover cannot lose anything more
                await kubelet.until_registered(await kubelet.restart())
            taken.append(await kubelet.until_registered(await lose()))
        how = f"{report.times(times)}, all plugins together"
        rows += contender.rows(what, taken[-times:], "s", how, never=listening_kubelet.NEVER_S)
    return rows


async def before_real(contender: Contender, root: Path, times: int) -> list[report.Row]:
    """Start a plugin with the real kubelet, then restart the kubelet; measure the waits."""
    restart = shlex.split(os.environ.get("MUSTER_KUBELET_RESTART", ""))
    began, again = [], []
    for _ in range(times):
        started = time.perf_counter()
        async with contender.living():
            began.append(await _allocatable(root, contender, started))
            if restart:
                await (await asyncio.create_subprocess_exec(*restart)).wait()
                started = time.perf_counter()
                again.append(await _allocatable(root, contender, started))
    how = f"{report.times(times)}, a real kubelet; polled every {_POLL_S * 1000:g} ms"
    rows = contender.rows("start to allocatable", began, "s", how, never=_REAL_S)
    if restart:
        rows += contender.rows("kubelet restart to allocatable", again, "s", how, never=_REAL_S)
    return rows


async def _allocatable(root: Path, contender: Contender, started: float) -> float:
    """Return the seconds until the kubelet reports the devices as allocatable."""
    while (seconds := time.perf_counter() - started) < _REAL_S:
        with contextlib.suppress(Exception):
            listing = await podresources.query(root / podresources.SOCKET)
            if len((listing.allocatable or {}).get(contender.resource, ())) == contender.devices:
                return time.perf_counter() - started
        await asyncio.sleep(_POLL_S)
    return seconds


def _new(
    name: str,
    resource: str,
    place: Path,
    command: Sequence[str],
    change: Callable[[int], int] | None,
    *,
    environment: Mapping[str, str] | None = None,
) -> Contender:
    has_gpus = resource == GPU
    return Contender(
        name=name,
        resource=resource,
        devices=8 if has_gpus else 1,
        kubelet=listening_kubelet.ListeningKubelet(place / "device-plugins"),
        command=command,
        environment=environment or {},
        change=change,
        changed="XID 79 to Unhealthy in the list" if has_gpus else "device comes or goes to list",
    )


def _with_nodes(root: Path, url: str, real: Path | None) -> Iterator[Contender]:
    """Yield the plugins that serve one device node, and a second one while it exists."""
    devices = root / "devices"
    devices.mkdir(parents=True)
    paths = [{"path": "/dev/null"}, {"path": str(devices / "ho?")}]

    def change(number: int) -> int:
        if number % 2:
            (devices / "hot").unlink()
        else:
            (devices / "hot").symlink_to("/dev/zero")
        return 2 - number % 2

    place = _folder(root / "muster")
    resource = {"groups": [{"devices": [path]} for path in paths], "grace_s": 3600}
    (place / "plugin.json").write_text(
        json.dumps(
            {
                "node": "bench",
                "bus": {"url": url},
                "kubelet": {"directory": str(real or place)},
                "resources": [resource | {"name": "muster.example/null"}],
            }
        )
    )
    command = [sys.executable, "-m", "muster_plugin", "--config", str(place / "plugin.json")]
    yield _new("muster", "muster.example/null", place, command, change)
    place = _folder(root / "empty")
    command = [sys.executable, "-m", "bench.empty_plugin", str(real or place), EMPTY, "/dev/null"]
    yield _new("empty plugin (Python, grpcio)", EMPTY, place, command, None)
    generic = shutil.which(GENERIC)
    if generic is None:
        print(f"without {GENERIC}: it is not in the PATH", file=sys.stderr)
    else:
        place = _folder(root / "generic")
        given = json.dumps({"name": "null", "groups": [{"paths": [path]} for path in paths]})
        command = [
            *(generic, "--domain", "generic.example", "--device", given),
            *("--plugin-directory", str((real or place) / "device-plugins")),
            *("--listen", "127.0.0.1:0", "--log-level", "none"),
        ]
        yield _new(GENERIC, "generic.example/null", place, command, change)


@contextlib.asynccontextmanager
async def _with_gpus(root: Path, url: str, real: Path | None) -> AsyncIterator[list[Contender]]:
    """Yield the plugins that serve eight GPUs, each with its own NVML."""
    machine = device_plugins.Machine(scene=scenes.h100x8())
    commands = {
        "muster, GPUs": device_plugins.muster_command(),
        "NVIDIA's plugin": device_plugins.nvidia_command(),
    }
    contenders = []
    async with contextlib.AsyncExitStack() as stack:
        for number, (name, command) in enumerate(commands.items()):
            place = _folder(root / f"gpus{number}")
            gpus = device_plugins.prepared(place, machine, "version: v1\n")
            inside = await stack.enter_async_context(
                device_plugins.mounted(place, real or place, machine.scene.driver)
            )

            def change(number: int, gpus: fake.Fake = gpus) -> int:
                gpus.xid(number, 79)
                return 7 - number

            environment = device_plugins.environment(gpus, url)
            whole = [*inside, *command]
            contenders.append(_new(name, GPU, place, whole, change, environment=environment))
        yield contenders


def _folder(place: Path) -> Path:
    (place / "device-plugins").mkdir(parents=True)
    return place


@contextlib.asynccontextmanager
async def _contenders(
    root: Path, url: str, real: Path | None = None
) -> AsyncIterator[list[Contender]]:
    missing = device_plugins.missing()
    if missing:
        print(f"without NVIDIA's plugin: {missing}", file=sys.stderr)
    async with contextlib.AsyncExitStack() as stack:
        gpus = [] if missing else await stack.enter_async_context(_with_gpus(root, url, real))
        yield [*_with_nodes(root, url, real), *gpus]


async def measure(options: report.Options) -> list[report.Row]:
    """Measure every plugin with the listening kubelet, then with the real one."""
    rows: list[report.Row] = []
    async with programs.arena("bench/peers", muster, muster_plugin) as (root, url):
        async with contextlib.AsyncExitStack() as stack:
            contenders = await stack.enter_async_context(_contenders(root / "p", url))
            for contender in contenders:
                await stack.enter_async_context(contender.kubelet)
            rows += await starts(contenders, 5 if options.quick else 40)
            processes = [await stack.enter_async_context(c.living()) for c in contenders]
            rows += await idle(contenders, [p.pid for p in processes], 6 if options.quick else 60)
            for contender in contenders:
                # before a second stream: NVIDIA's plugin sends a change to one stream only
                rows += await changes(contender, 2 if options.quick else 8)
                rows += await allocations(contender, 300 if options.quick else 5000)
            times = 1 if options.quick else 5
            repairing = [c for c in contenders if c.change]
            for lost in await asyncio.gather(*(losses(c, times) for c in repairing)):
                rows += lost
        named = os.environ.get("MUSTER_KUBELET_DIR")
        if named:
            async with _contenders(root / "r", url, Path(named)) as contenders:
                for contender in contenders:
                    rows += await before_real(contender, Path(named), 1 if options.quick else 10)
    figures = [row.name.partition(":")[0] for row in rows]
    return sorted(rows, key=lambda row: figures.index(row.name.partition(":")[0]))


if __name__ == "__main__":
    sys.exit(report.main("peers", measure))
