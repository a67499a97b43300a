"""Adapter: processes: starts all of muster on this machine and removes it completely.

It runs NATS, a Kubernetes API, a webhook receiver, three simulated nodes with a kubelet and a
plugin each, and the three central services, all as real processes. One node offers this machine's
own `/dev/fuse` besides simulated GPUs; the others offer only GPUs. The sockets, settings and logs
are in one directory.

Heartbeats are sent every second and `group_wait` is half a second, so that a fault is reported
within seconds; the defaults, for a cluster, are slower.
"""

import asyncio
import contextlib
import os
import shutil
import stat
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Self

import yaml

from muster.local import nats, processes

FUSE: Final = "smarter-devices/fuse"
GPU: Final = "nvidia.com/gpu"
PLUGIN: Final = "device-plugin"
HEARTBEAT_S: Final = 1.0
_RESTART_S: Final = (1.0, 30.0)

Settings = Mapping[str, object]


@dataclass(frozen=True, slots=True)
class Node:
    """One simulated node and the devices that its plugin offers."""

    name: str
    gpus: int
    product: str
    memory_mib: int
    fuse: bool = False

    @property
    def capacity(self) -> dict[str, int]:
        """The node's devices by resource name once everything is registered."""
        return {GPU: self.gpus} | ({FUSE: 1} if self.fuse else {})


NODES: Final = (
    Node("node-a", 8, "NVIDIA H100 80GB HBM3", 81_559, fuse=True),
    Node("node-b", 4, "NVIDIA A100-SXM4-80GB", 81_920),
    Node("node-c", 2, "NVIDIA L4", 23_034),
)


def kubernetes(kubeconfig: str, *more: str) -> processes.Program:
    """Return the stand-in for the Kubernetes API, with `more` options."""
    options = ("--kubeconfig", kubeconfig, "--namespace", "muster", *more)
    return processes.Program("kubernetes", "muster.local.kubernetes", options)


def service(name: str, file: str) -> processes.Program:
    """Return one of the services, with its settings file."""
    package = f"muster_{name.partition('-')[0]}"
    return processes.Program(name, package, ("--config", file))


def plugin_settings(
    node: Node, *, nats: str, directory: str, fuse_path: str, faults: str
) -> Settings:
    """Return the settings of a node's plugin."""
    fuse = {"name": FUSE, "groups": [{"devices": [{"path": fuse_path}]}]}
    return {
        "node": node.name,
        "name": PLUGIN,
        "bus": {"url": nats},
        "kubelet": {"directory": directory},
        "heartbeat": {"interval_s": HEARTBEAT_S},
        "resources": [fuse] if node.fuse else [],
        "gpus": {"health": {"poll_s": 1.0}},
        "simulated_gpus": {
            "count": node.gpus,
            "product": node.product,
            "memory_mib": node.memory_mib,
            "faults": faults,
        },
    }


def health_settings(*, nats: str, kubeconfig: str) -> Settings:
    """Return the settings of health; `patience_s` is 0, because here silence is always a fault."""
    return {
        "bus": {"url": nats},
        "detection": {"patience_s": 0},
        "cluster": {
            "kubeconfig": kubeconfig,
            "plugins": [{"plugin": PLUGIN, "nodes": {"kubernetes.io/os": "linux"}}],
        },
    }


def labeler_settings(*, nats: str, kubeconfig: str) -> Settings:
    """Return the settings of the labeler, which only suggests labels."""
    return {"bus": {"url": nats}, "mode": "suggest", "kubernetes": {"kubeconfig": kubeconfig}}


def notifier_settings(*, nats: str, webhook_url: str, reach: str = "loopback") -> Settings:
    """Return the settings of the notifier, which notifies the console and the webhook stand-in."""
    return {
        "bus": {"url": nats},
        "group_wait_s": 0.5,
        "group_interval_s": 1.0,
        "receivers": [
            {"name": "console", "console": {}},
            {"name": "webhook", "webhook": {"url": webhook_url, "reach": reach}},
        ],
    }


class Stack:
    """Everything that `muster up` runs; an async context manager.

    `show` is called with one line for each event. NATS listens on `nats_port` if that is free; a
    server at `nats_url` is used instead of a new server. With `restart`, a program that ends by
    itself is started again with a growing delay, as Kubernetes would.
    """

    def __init__(
        self,
        *,
        show: Callable[[str], None],
        restart: bool,
        nats_url: str | None = None,
        nats_port: int = nats.DEFAULT_PORT,
    ) -> None:
        self.processes: dict[str, processes.Process] = {}
        self.nats: nats.NatsServer | None = None
        self.nats_url = nats_url or ""
        self.directory = Path()
        self.fuse_simulated = False
        self._show = show
        self._restart = restart
        self._nats_port = nats_port
        self._restarters: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Self:
        """Start all programs. On ProgramFailed or NatsUnavailable, stop them all and reraise."""
        # the name is short, because a socket's path may have at most 107 bytes
        self.directory = Path(tempfile.mkdtemp(prefix="muster-"))
        try:
            await self._start()
        except BaseException:
            await self._end()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        """End all programs, and remove the directory."""
        await self._end()

    @property
    def kubeconfig(self) -> Path:
        """The kubeconfig of the Kubernetes API."""
        return self.directory / "kubeconfig"

    def http(self, name: str) -> str:
        """Return the HTTP address of a program."""
        return self.processes[name].addresses["http"]

    def pids(self) -> set[int]:
        """Return the process ids of all running programs."""
        pids = {process.pid for process in self.processes.values() if process.is_running}
        return pids | ({self.nats.pid} if self.nats else set())

    def faults(self, node: str) -> Path:
        """Return the fault script of a node's simulated GPUs."""
        return self.directory / f"faults-{node}.jsonl"

    async def _start(self) -> None:
        if not self.nats_url:
            self.nats = await self._start_nats()
            self.nats_url = self.nats.url
            self._restart_on_exit("nats-server", self.nats)
        self._show_address("NATS", self.nats_url)
        webhook = processes.Program("webhook", "muster.local.webhook")
        await self._run(kubernetes(str(self.kubeconfig)), webhook)
        self._show_address("Kubernetes API", f"{self.http('kubernetes')}  (stand-in)")
        self._show_address("", f"kubectl --kubeconfig {self.kubeconfig} get nodes")
        self._show_address("webhook", f"{self.http('webhook')}/received  (stand-in)")
        await self._run(*(self._kubelet(node) for node in NODES))
        for node in NODES:
            url = self.http(f"kubelet-{node.name}")
            self._show_address(f"kubelet {node.name}", f"{url}/state  (stand-in)")
        await self._run(*self._central(), *self._plugins())
        self._show_address("health", f"{self.http('health')}/state")
        self._show_address("notifier", f"{self.http('notifier')}/state")
        self._show_address("labeler", f"{self.http('labeler')}/state")
        for node in NODES:
            self._show_address(f"plugin {node.name}", f"{self.http(f'plugin-{node.name}')}/metrics")

    async def _start_nats(self) -> nats.NatsServer:
        """Start NATS on its usual port, or on a free one if that is taken."""
        directory, die = self.directory / "nats", processes.die_with_parent()
        server = nats.NatsServer(directory, port=self._nats_port, before_exec=die)
        try:
            await server.start()
        except nats.NatsUnavailable:
            server = nats.NatsServer(directory, before_exec=die)
            await server.start()
        return server

    def _show_address(self, what: str, where: str) -> None:
        self._show(f"{what:<15} {where}")

    def _kubelet(self, node: Node) -> processes.Program:
        directory = self.directory / node.name
        directory.mkdir()
        options = ("--node", node.name, "--dir", str(directory), "--api", self.http("kubernetes"))
        program = f"kubelet-{node.name}"
        return processes.Program(
            program, "muster.local.kubelet", (*options, "--status-period", "0.5")
        )

    def _central(self) -> list[processes.Program]:
        url = self.nats_url
        kubeconfig = str(self.kubeconfig)
        receiver = f"{self.http('webhook')}/notifications"
        return [
            self._service("health", health_settings(nats=url, kubeconfig=kubeconfig)),
            self._service("labeler", labeler_settings(nats=url, kubeconfig=kubeconfig)),
            self._service("notifier", notifier_settings(nats=url, webhook_url=receiver)),
        ]

    def _plugins(self) -> list[processes.Program]:
        fuse = self._fuse()
        programs = []
        for node in NODES:
            self.faults(node.name).touch()
            settings = plugin_settings(
                node,
                nats=self.nats_url,
                directory=str(self.directory / node.name),
                fuse_path=str(fuse),
                faults=str(self.faults(node.name)),
            )
            programs.append(self._service(f"plugin-{node.name}", settings))
        return programs

    def _fuse(self) -> Path:
        """Return this machine's /dev/fuse, or a link to /dev/null if it does not exist."""
        real = Path("/dev/fuse")
        with contextlib.suppress(OSError):
            if stat.S_ISCHR(real.stat().st_mode):
                return real
        self.fuse_simulated = True
        self._show("this machine has no /dev/fuse: a simulated one is advertised (it is /dev/null)")
        simulated = self.directory / "fuse"
        simulated.symlink_to(os.devnull)
        return simulated

    def _service(self, name: str, settings: Settings) -> processes.Program:
        file = self.directory / f"{name}.yaml"
        file.write_text(yaml.safe_dump(dict(settings)), "utf-8")
        return service(name, str(file))

    async def _run(self, *programs: processes.Program) -> None:
        """Start programs concurrently; raise an error only when each has started or failed."""
        starting = []
        for program in programs:
            process = processes.Process(program, self.directory / f"{program.name}.log")
            self.processes[program.name] = process
            starting.append(process.start())
        for end in await asyncio.gather(*starting, return_exceptions=True):
            if isinstance(end, BaseException):
                raise end
        for program in programs:
            self._restart_on_exit(program.name, self.processes[program.name])

    async def _keep_running(self, name: str, process: processes.Process | nats.NatsServer) -> None:
        delay_s, longest_s = _RESTART_S
        while True:
            code = await process.wait()
            self._show(f"{name} ended with {code}; restarting in {delay_s:g} s")
            await asyncio.sleep(delay_s)
            delay_s = min(longest_s, delay_s * 2)
            with contextlib.suppress(processes.ProgramFailed, nats.NatsUnavailable):
                await process.start()

    def _restart_on_exit(self, name: str, process: processes.Process | nats.NatsServer) -> None:
        if self._restart:
            self._restarters.append(asyncio.create_task(self._keep_running(name, process)))

    async def _end(self) -> None:
        """Stop the plugins first, so that they can announce their stop, and NATS last."""
        for task in self._restarters:
            task.cancel()
        await asyncio.gather(*self._restarters, return_exceptions=True)
        order = ("plugin-", "notifier", "health", "labeler", "kubelet-", "")
        left = dict(self.processes)
        for prefix in order:
            now = [left.pop(name) for name in list(left) if name.startswith(prefix)]
            await asyncio.gather(*(process.end() for process in now))
        if self.nats is not None:
            await self.nats.stop()
        shutil.rmtree(self.directory, ignore_errors=True)
