"""Third-party device plugins in the real cluster, from tests/cluster/peers, and their faults.

The plugins are the original programs. Their hardware is simulated: files that their pods mount, and
the fake NVML of tests/worlds/nvml.
"""

import contextlib
import os
import re
import shutil
import signal
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from scripts.cluster import layout
from tests.worlds import manifests, real_cluster
from tests.worlds.nvml import fake, scenes
from tests.worlds.real_cluster import until

PLUGINS: Final = layout.KUBELET / "device-plugins"
MANIFESTS: Final = manifests.ROOT / "tests/cluster/peers"
_NVML: Final = layout.STATE / "nvml"
_INTEL: Final = layout.STATE / "intel"
_SAMPLE: Final = layout.STATE / "sample"
_SERIAL: Final = ("/dev/ttyUSB0", "/dev/ttyUSB1")
_ERROR: Final = re.compile(r"^[EF]\d{4} |level=error|level=warn|^panic:", re.MULTILINE)
"""An error in a log of klog or go-kit, or a warning in one of go-kit."""
_KILL_PAUSE_S: Final = 0.02
_LOOKS_S: Final = 6.0
"""The sample plugin checks every 5 s whether it should register."""


@dataclass(frozen=True, kw_only=True)
class Peer:
    """A third-party device plugin: its DaemonSet in kube-system, its program and its socket.

    `call` matches its log lines about calls of the kubelet; it is empty if there are none.
    """

    name: str
    resource: str
    devices: int
    daemonset: str
    program: str
    socket: str
    call: str = ""


NVIDIA: Final = Peer(
    name="nvidia",
    resource="nvidia.com/gpu",
    devices=8,
    daemonset="nvidia-device-plugin-daemonset",
    program="nvidia-device-plugin",
    socket="nvidia-gpu.sock",
)
INTEL: Final = Peer(
    name="intel",
    resource="gpu.intel.com/i915",
    devices=2,
    daemonset="intel-gpu-plugin",
    program="gpu_plugin",
    socket="gpu.intel.com-i915.sock",
    call="Started ListAndWatch",
)
SAMPLE: Final = Peer(
    name="sample",
    resource="example.com/resource",
    devices=2,
    daemonset="sample-device-plugin",
    program="sample-device-plugin",
    socket="dp.*",
    call="ListAndWatch|Allocate|GetPreferredAllocation|PreStartContainer",
)
GENERIC: Final = Peer(
    name="generic",
    resource="squat.ai/serial",
    devices=2,
    daemonset="generic-device-plugin",
    program="generic-device-plugin",
    socket="gdp-*.sock",
    call="starting listwatch",
)


class Program:
    """A third-party program that a DaemonSet in kube-system runs on the node."""

    def __init__(self, cluster: real_cluster.Cluster, daemonset: str, program: str) -> None:
        self.cluster = cluster
        self._daemonset = daemonset
        self._program = program.encode()

    def pid(self) -> int:
        """Return its process id on this machine; 0 if it does not run."""
        for folder in Path("/proc").iterdir():
            with contextlib.suppress(OSError, ValueError):
                words = (folder / "cmdline").read_bytes().split(b"\0")[:2]
                is_its = self._program in {word.rpartition(b"/")[2] for word in words}
                if is_its and f"/{layout.CGROUP}/" in (folder / "cgroup").read_text():
                    return int(folder.name)
        return 0

    def descriptors(self) -> int:
        """Return how many files its process has open."""
        return len(list(Path(f"/proc/{self.pid()}/fd").iterdir()))

    def log(self) -> str:
        """Return the log of its container, or kubectl's error message if there is none."""
        where = f"daemonset/{self._daemonset}"
        return self.cluster.ask("-n", "kube-system", "logs", where, "--tail=-1")[1]

    def errors(self) -> list[str]:
        """Return the errors in its log."""
        return [line for line in self.log().splitlines() if _ERROR.search(line)]

    def restarts(self) -> int:
        """Return how often its container was started again."""
        return sum(
            int(status["restartCount"])
            for pod in self.pods()
            for status in pod["status"].get("containerStatuses", ())
        )

    def pods(self) -> list[dict[str, Any]]:
        """Return its pods that are not being deleted."""
        labels = self.cluster.get("daemonset", self._daemonset, "-n", "kube-system")["spec"]
        ((key, value),) = labels["selector"]["matchLabels"].items()
        pods = self.cluster.get("pods", "", "-n", "kube-system", "-l", f"{key}={value}")["items"]
        return [pod for pod in pods if "deletionTimestamp" not in pod["metadata"]]

    @contextlib.contextmanager
    def stopped(self) -> Iterator[None]:
        """Suspend its process until the block ends."""
        pid = until(self.pid, f"{self._daemonset} runs")
        os.kill(pid, signal.SIGSTOP)
        try:
            yield
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)

    @contextlib.contextmanager
    def crashing(self) -> Iterator[None]:
        """Kill its process, and each one that replaces it, until the block ends."""
        over = threading.Event()

        def kill() -> None:
            while not over.is_set():
                if pid := self.pid():
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
                over.wait(_KILL_PAUSE_S)

        until(self.pid, f"{self._daemonset} runs")
        thread = threading.Thread(target=kill)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()

    def restart(self) -> None:
        """Kill its process, and wait until its container has restarted."""
        before = self._restarts()
        os.kill(self.pid(), signal.SIGKILL)
        until(lambda: self._restarts() > before, f"{self._daemonset} has restarted")

    def _restarts(self) -> int:
        containers = [each for pod in self.pods() for each in pod["status"]["containerStatuses"]]
        return sum(each["restartCount"] for each in containers)

    def delete_pod(self) -> None:
        """Delete its pod, and wait until another one is ready."""
        gone = {pod["metadata"]["name"] for pod in self.pods()}
        self.cluster.good("-n", "kube-system", "delete", "pod", *gone, "--grace-period=1")
        where = f"daemonset/{self._daemonset}"
        self.cluster.good("-n", "kube-system", "rollout", "status", where, "--timeout=60s")


class Plugin(Program):
    """A third-party device plugin that runs in the cluster."""

    def __init__(self, cluster: real_cluster.Cluster, peer: Peer) -> None:
        super().__init__(cluster, peer.daemonset, peer.program)
        self.peer = peer
        self._asked_at = -_LOOKS_S

    def calls(self) -> int:
        """Return how many calls of a kubelet it has logged."""
        return len(re.findall(self.peer.call, self.log())) if self.peer.call else 0

    def sockets(self) -> set[Path]:
        """Return its sockets."""
        return {file for file in PLUGINS.glob(self.peer.socket) if file.is_socket()}

    def remove_socket(self) -> None:
        """Remove its socket from the file system."""
        for file in self.sockets():
            file.unlink()

    def until_offered(self, devices: int | None = None) -> None:
        """Wait until this number of its devices is allocatable, by default all."""
        wanted = str(self.peer.devices if devices is None else devices)
        until(
            lambda: self._is_offered(wanted),
            f"the node offers {wanted} {self.peer.resource}",
            within_s=90.0,
        )

    def start_again(self) -> None:
        """Delete its pod, and wait until all devices are allocatable again."""
        self.delete_pod()
        self.until_offered()

    def _is_offered(self, devices: str) -> bool:
        """Return whether `devices` are allocatable; if not, make the sample plugin register."""
        is_so = self.cluster.allocatable(self.peer.resource) == devices
        # the node may still offer the devices of the previous process
        is_so = is_so and (self.peer is not SAMPLE or self.calls() > 0)
        if self.peer is SAMPLE and not is_so and time.monotonic() > self._asked_at + _LOOKS_S:
            self._asked_at = time.monotonic()
            (_SAMPLE / "register").touch()
            (_SAMPLE / "register").unlink()
        return is_so


class Hardware:
    """The simulated hardware of the device plugins, which their pods mount."""

    def __init__(self) -> None:
        self.gpus = fake.Fake(_NVML / "state")

    @contextlib.contextmanager
    def plugged_in(self) -> Iterator["Hardware"]:
        """Create the hardware, and remove it at the end. Raises NoCompiler."""
        try:
            library = fake.built(_NVML)
            shutil.copy(library, _NVML / fake.SONAME)
            self.gpus.write(scenes.h100x8())
            self.intel(2)
            _SAMPLE.mkdir(exist_ok=True)
            self.serial(plugged=True)
            yield self
        finally:
            self.serial(plugged=False)
            for folder in (_NVML, _INTEL, _SAMPLE):
                shutil.rmtree(folder, ignore_errors=True)

    def lose_gpus(self) -> None:
        """Report an XID of every NVIDIA GPU, after which the plugin lists them as Unhealthy."""
        for number in range(NVIDIA.devices):
            self.gpus.xid(number, 79)

    def intel(self, gpus: int) -> None:
        """Provide this number of Intel GPUs."""
        drm, nodes = _INTEL / "sys/class/drm", _INTEL / "dev/dri"
        for folder in (drm, nodes):
            folder.mkdir(parents=True, exist_ok=True)
        for number in range(INTEL.devices):
            card, name = drm / f"card{number}", f"card{number}"
            if number >= gpus:
                shutil.rmtree(card, ignore_errors=True)
                (nodes / name).unlink(missing_ok=True)
            elif not card.exists():
                (card / "device/drm" / name).mkdir(parents=True)
                (card / "device/drivers/i915").mkdir(parents=True)
                (card / "device/driver").symlink_to("drivers/i915")
                # /dev/null under another name
                os.mknod(nodes / name, 0o666 | stat.S_IFCHR, os.makedev(1, 3))
                (card / "device/vendor").write_text("0x8086\n")

    def serial(self, *, plugged: bool) -> None:
        """Plug the serial adapters into the node, or pull them out."""
        for path in _SERIAL:
            command = ["mknod", "-m", "666", path, "c", "1", "3"] if plugged else ["rm", "-f", path]
            _in_node(*command)


@contextlib.contextmanager
def running(cluster: real_cluster.Cluster, peer: Peer) -> Iterator[Plugin]:
    """Install a device plugin, yield it when its devices are allocatable, and remove it."""
    plugin = Plugin(cluster, peer)
    try:
        cluster.good("apply", "-f", str(MANIFESTS / f"{peer.name}.yaml"))
        plugin.until_offered()
        yield plugin
    finally:
        remove(cluster, peer.name)


def remove(cluster: real_cluster.Cluster, name: str) -> None:
    """Delete the objects of a manifest."""
    manifest = str(MANIFESTS / f"{name}.yaml")
    gone = ("--ignore-not-found", "--cascade=foreground", "--timeout=60s")
    cluster.good("delete", "-f", manifest, *gone)


def import_images() -> None:
    """Import the images of the device plugins into the cluster; build them the first time."""
    subprocess.run([sys.executable, "-m", "scripts.cluster", "peers"], check=True)


def _in_node(*command: str) -> None:
    inside = [sys.executable, "-m", "scripts.cluster", "run", "--", *command]
    subprocess.run(inside, check=True, cwd=manifests.ROOT)
