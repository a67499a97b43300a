"""Adapter for processes: runs NVIDIA's device plugin or ours on the same simulated machine.

Both read the same configuration file, and see only what `Machine` describes: in a mount namespace
of the plugin, its directories replace those of the kubelet, the driver and the kernel. NVML is the
fake.
"""

import asyncio
import contextlib
import os
import shutil
import stat
import sys
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Final

import grpc.aio
import msgspec

from muster.local import kubelet as stand_in
from muster.pb import deviceplugin_pb2 as dp
from muster.pb import rpc
from scripts.cluster import layout, tools
from tests.worlds.nvml import fake, scenes

NVIDIA: Final = "nvidia-device-plugin"
_START_S: Final = 20.0
_FILE: Final = "/var/lib/machine/config.yaml"
_MOUNTED: Final = """
set -e
root=$1 kubelet=$2 driver=$3
for folder in /var/lib /run; do mount -t tmpfs tmpfs $folder; done
mkdir -p /var/lib/kubelet /var/lib/machine /var/lib/dev /run/nvidia/driver/usr/lib64
ln -s /dev /run/nvidia/driver/dev
touch /run/nvidia/driver/usr/lib64/libcuda.so.$driver
mount --bind $kubelet /var/lib/kubelet
mount --bind $root /var/lib/machine
mount --bind $root/proc-driver /proc/driver
mount --bind $root/pci /sys/bus/pci/devices
mount --bind /dev /var/lib/dev
mount --bind $root/dev /dev
echo mounted
exec sleep 3600
"""
_USUAL_NODES: Final = ("null", "zero", "random", "urandom")


class Machine(msgspec.Struct, frozen=True, kw_only=True):
    """A simulated machine: its GPUs, files below /dev, and minor numbers of MIG's device files."""

    scene: scenes.Scene
    nodes: tuple[str, ...] = ()
    caps: dict[str, int] = {}


class Ended(Exception):
    """A plugin ended, or did not register; the message is the end of its log."""


class Plugin:
    """A registered plugin; `channels` are the connections to it, by resource."""

    def __init__(self, channels: dict[str, grpc.aio.Channel]) -> None:
        self._clients = {name: rpc.DevicePluginClient(on) for name, on in channels.items()}

    @property
    def resources(self) -> list[str]:
        return sorted(self._clients)

    async def options(self, resource: str) -> dp.DevicePluginOptions:
        return await self._clients[resource].get_device_plugin_options(dp.Empty())

    async def devices(self, resource: str) -> list[dp.Device]:
        """Return the first list of devices of a new stream, sorted by id."""
        call = self._clients[resource].list_and_watch(dp.Empty())
        first = await call.read()
        assert isinstance(first, dp.ListAndWatchResponse)
        call.cancel()
        return sorted(first.devices, key=lambda device: device.ID)

    async def allocate(
        self, resource: str, ids: Sequence[str]
    ) -> dp.ContainerAllocateResponse | str:
        """Return what a container gets with these devices, or why it is refused."""
        wanted = dp.ContainerAllocateRequest(devices_ids=ids)
        try:
            answer = await self._clients[resource].allocate(
                dp.AllocateRequest(container_requests=[wanted])
            )
        except grpc.aio.AioRpcError as error:
            return f"refused: {error.details()}"
        return answer.container_responses[0]

    async def prefer(
        self, resource: str, available: Sequence[str], must: Sequence[str], size: int
    ) -> list[str] | str:
        """Return the devices that the plugin prefers, or why it refuses to choose."""
        wanted = dp.ContainerPreferredAllocationRequest(
            available_deviceIDs=available, must_include_deviceIDs=must, allocation_size=size
        )
        try:
            answer = await self._clients[resource].get_preferred_allocation(
                dp.PreferredAllocationRequest(container_requests=[wanted])
            )
        except grpc.aio.AioRpcError as error:
            return f"refused: {error.details()}"
        return list(answer.container_responses[0].deviceIDs)


def nvidia() -> Path:
    """Return the path of NVIDIA's plugin, whether it was built or not."""
    return tools.kept(NVIDIA) / NVIDIA


def missing() -> str:
    """Return what is missing here to run both plugins; empty if nothing is."""
    if os.geteuid() != 0:
        return "only root can mount"
    if shutil.which("go") is None:
        return "Go is missing, whose version names what is in the cache"
    if not nvidia().exists():
        return f"{NVIDIA} is not in {layout.CACHE}: make cluster builds it"
    return ""


def nvidia_command() -> tuple[str, ...]:
    """Return the command of NVIDIA's plugin, with the file that `running` writes."""
    return str(nvidia()), "--config-file", _FILE


def muster_command() -> tuple[str, ...]:
    """Return the command of our plugin, with the same file in NVIDIA's format."""
    return sys.executable, "-m", "muster_plugin", "--config", _FILE, "--config-format", "nvidia"


@contextlib.asynccontextmanager
async def running(
    root: Path, machine: Machine, file: str, command: Sequence[str], resources: Sequence[str]
) -> AsyncIterator[Plugin]:
    """Run a plugin; yield it once it has registered these resources.

    `file` is the content of its configuration file. Raises Ended if it does not register in time.
    """
    gpus = prepared(root, machine, file)
    async with (
        contextlib.AsyncExitStack() as stack,
        stand_in.Kubelet(directory=root, node="node-a") as kubelet,
        mounted(root, root, machine.scene.driver) as inside,
        _process(root, gpus, (*inside, *command)) as process,
    ):
        ended = asyncio.ensure_future(process.wait())
        known = asyncio.ensure_future(
            kubelet.until(lambda state: {*resources} <= {*state.resources})
        )
        await asyncio.wait([ended, known], timeout=_START_S, return_when=asyncio.FIRST_COMPLETED)
        if not known.done():
            known.cancel()
            raise Ended((root / "log").read_text()[-2000:])
        yield Plugin(
            {
                name: await stack.enter_async_context(
                    grpc.aio.insecure_channel(
                        f"unix:{kubelet.plugins_directory / resource.endpoint}",
                        # Go's servers refuse the authority that gRPC makes of a socket's path
                        options=[("grpc.default_authority", "localhost")],
                    )
                )
                for name, resource in known.result().resources.items()
                if resource.endpoint
            }
        )


@contextlib.asynccontextmanager
async def _process(
    root: Path, gpus: fake.Fake, command: Sequence[str]
) -> AsyncIterator[asyncio.subprocess.Process]:
    with (root / "log").open("wb") as log:
        process = await asyncio.create_subprocess_exec(
            *command,
            env=os.environ | environment(gpus),
            stdout=log,
            stderr=log,
        )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.terminate()
        await process.wait()


@contextlib.asynccontextmanager
async def mounted(root: Path, kubelet: Path, driver: str) -> AsyncIterator[tuple[str, ...]]:
    """Mount the machine and a kubelet's directory; yield the prefix of commands that see them."""
    holder = await asyncio.create_subprocess_exec(
        *("unshare", "--mount", "--propagation", "private"),
        *("sh", "-c", _MOUNTED, "sh", str(root), str(kubelet), driver),
        stdout=asyncio.subprocess.PIPE,
    )
    try:
        assert holder.stdout is not None
        assert await holder.stdout.readline() == b"mounted\n"
        yield "nsenter", "--target", str(holder.pid), "--mount"
    finally:
        holder.terminate()
        await holder.wait()


def environment(gpus: fake.Fake, url: str = "nats://127.0.0.1:1") -> dict[str, str]:
    """Return the variables for what NVIDIA's file lacks: NVML, node, bus, kubelet's directory."""
    return gpus.environment(fake.built()) | {
        "MUSTER_PLUGIN__NODE": "node-a",
        "MUSTER_PLUGIN__BUS__URL": url,
        "MUSTER_PLUGIN__KUBELET__DIRECTORY": "/var/lib/kubelet",
    }


def prepared(root: Path, machine: Machine, file: str) -> fake.Fake:
    """Write the machine and the plugin's file into `root`; return the fake NVML."""
    for folder in ("proc-driver/nvidia-caps", "pci", "dev"):
        (root / folder).mkdir(parents=True)
    for name in _USUAL_NODES:
        (root / "dev" / name).symlink_to(f"/var/lib/dev/{name}")
    for name in machine.nodes:
        (root / "dev" / name).parent.mkdir(parents=True, exist_ok=True)
        os.mknod(root / "dev" / name, 0o666 | stat.S_IFCHR, os.makedev(1, 3))
    if machine.caps:
        lines = "".join(f"{name} {minor}\n" for name, minor in machine.caps.items())
        (root / "proc-driver/nvidia-caps/mig-minors").write_text(lines)
    for gpu in machine.scene.gpus:
        device = root / "pci" / str(gpu.values["bus"])[4:].lower()
        device.mkdir()
        (device / "numa_node").write_text(f"{gpu.values.get('numa', -1)}\n")
    (root / "config.yaml").write_text(file)
    gpus = fake.Fake(root / "nvml")
    gpus.write(machine.scene)
    return gpus
