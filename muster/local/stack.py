"""Adapter for processes: starts all of muster on this machine and removes it completely.

It runs NATS, a Kubernetes API, a webhook receiver, simulated nodes with a kubelet and a plugin
each, and the central services, all as real processes. One node offers this machine's own
`/dev/fuse` besides simulated GPUs; the others offer only GPUs. The sockets, settings and logs are
in one directory, together with a record of the processes (`running`).

Heartbeats are sent every second and `group_wait` is half a second, so that a fault is reported
within seconds; the defaults, for a cluster, are slower.
"""

import asyncio
import contextlib
import os
import shutil
import socket
import stat
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, Self

import yaml

from muster.local import central_settings, nats, processes, running, supervision

FUSE: Final = "smarter-devices/fuse"
GPU: Final = "nvidia.com/gpu"
PLUGIN: Final = "device-plugin"
HEARTBEAT_S: Final = 1.0
NODES_MAX: Final = 20
GPUS_MAX: Final = 16
PORTS: Final = (1024, 65_400)
"""The smallest and the largest port with which the ports of a stack can begin."""
_NATS: Final = "nats-server"
_FIXED: Final = ("console", _NATS, "kubernetes", "webhook", "health", "notifier", "labeler")
_NODE_PORTS_FROM: Final = 10

Settings = central_settings.Settings


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


def nodes(count: int = len(NODES), gpus: int | None = None) -> tuple[Node, ...]:
    """Return `count` nodes with `gpus` GPUs each (None: 8, 4 and 2 in turn)."""
    chosen = []
    for index in range(count):
        node = replace(NODES[index % len(NODES)], name=f"node-{chr(ord('a') + index)}")
        node = replace(node, fuse=node.fuse and index == 0)
        chosen.append(node if gpus is None else replace(node, gpus=gpus))
    return tuple(chosen)


def port_of(program: str, first: int, nodes: Sequence[Node]) -> int:
    """Return the port of a program of a stack whose lowest port is `first`."""
    if program in _FIXED:
        return first + _FIXED.index(program)
    kind, _, node = program.partition("-")
    index = [node.name for node in nodes].index(node)
    return first + _NODE_PORTS_FROM + 2 * index + ("kubelet", "plugin").index(kind)


def kubernetes(kubeconfig: str, *more: str) -> processes.Program:
    """Return the program of the Kubernetes API stand-in, with `more` options."""
    options = ("--kubeconfig", kubeconfig, "--namespace", "muster", "--schedule-pods", *more)
    return processes.Program("kubernetes", "muster.local.kubernetes", options)


def service(name: str, file: str) -> processes.Program:
    """Return the program of a service, with its settings file."""
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


class Stack:
    """Everything that `muster up` runs; an async context manager.

    `show` is called with each line of output. NATS listens on `nats_port` if that is free; a server
    at `nats_url` is used instead of a new server. All other programs listen on free ports. With
    `port`, each program including NATS listens on the port that `port_of` names. With `restart`, a
    program that ends by itself is started again. With `has_console`, the console runs, too; its
    address is shown first. `receivers` is a directory with further receivers of the notifier; it
    is not removed. The default is an empty directory below that of the stack.
    """

    def __init__(
        self,
        *,
        show: Callable[[str], None],
        restart: bool,
        has_console: bool = False,
        nodes: Sequence[Node] = NODES,
        port: int | None = None,
        nats_url: str | None = None,
        nats_port: int = nats.DEFAULT_PORT,
        receivers: Path | None = None,
    ) -> None:
        self.nodes = tuple(nodes)
        self.processes: dict[str, processes.Process] = {}
        self.nats: nats.NatsServer | None = None
        self.nats_url = nats_url or ""
        self.directory = Path()
        self.fuse_simulated = False
        self._show = show
        self._restart = restart
        self._has_console = has_console
        self._receivers = receivers
        self._addresses: list[str] = []
        """The lines that name addresses, shown when everything has started."""
        self._port = port
        self._nats_port = nats_port
        self._lock = contextlib.ExitStack()
        self._supervisor = supervision.Supervisor(
            show=show,
            changed=self._record,
            is_held=lambda name: running.is_held(self.directory, name),
        )

    async def __aenter__(self) -> Self:
        """Start all programs; if one fails, stop all. Raises ProgramFailed and NatsUnavailable."""
        self.directory, lock = running.claim()
        self._lock.callback(os.close, lock)
        self.receivers.mkdir(mode=0o700, parents=True, exist_ok=True)
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
        """The path of the kubeconfig for the Kubernetes API."""
        return self.directory / "kubeconfig"

    @property
    def receivers(self) -> Path:
        """The directory with further receivers of the notifier."""
        return self._receivers or self.directory / "receivers"

    def http(self, name: str) -> str:
        """Return the HTTP address of a program."""
        return self.processes[name].addresses["http"]

    def programs(self) -> tuple[running.Program, ...]:
        """Return all programs, with the process id of each."""
        return self._supervisor.programs()

    def pids(self) -> set[int]:
        """Return the process ids of all running programs."""
        pids = {process.pid for process in self.processes.values() if process.is_running}
        return pids | ({self.nats.pid} if self.nats and self.nats.is_running else set())

    def faults(self, node: str) -> Path:
        """Return the path of the fault script of a node's simulated GPUs."""
        return self.directory / f"faults-{node}.jsonl"

    async def _start(self) -> None:
        self._refuse_taken_ports()
        if not self.nats_url:
            self.nats = await self._start_nats()
            self.nats_url = self.nats.url
            self._supervisor.add(_NATS, self.nats, restart=self._restart)
        self._show_address("NATS", self.nats_url)
        webhook = processes.Program("webhook", "muster.local.webhook")
        await self._run(kubernetes(str(self.kubeconfig)), webhook)
        self._show_program("kubernetes", "Kubernetes API", "  (stand-in)")
        self._show_address("", f"kubectl --kubeconfig {self.kubeconfig} get nodes")
        self._show_program("webhook", "webhook", "/received  (stand-in)")
        await self._run(*(self._kubelet(node) for node in self.nodes))
        for node in self.nodes:
            kubelet = f"kubelet-{node.name}"
            self._show_program(kubelet, f"kubelet {node.name}", "/state  (stand-in)")
        await self._run(*self._central(), *self._plugins())
        if self._has_console:
            settings = central_settings.console(
                nats=self.nats_url, health=self.http("health"), is_local=True
            )
            await self._run(self._service("console", settings))
            # its settings name the console
            await self._run(self._notifier())
        for name in ("health", "notifier", "labeler"):
            self._show_program(name, name, "/state")
        for node in self.nodes:
            self._show_program(f"plugin-{node.name}", f"plugin {node.name}", "/metrics")
        if self._has_console:
            self._show_program("console", "console", "")
            self._addresses.insert(0, self._addresses.pop())
        for line in self._addresses:
            self._show(line)

    def _programs(self) -> list[str]:
        """Return the names of the programs that need a port."""
        of_nodes = [f"{kind}-{node.name}" for node in self.nodes for kind in ("kubelet", "plugin")]
        absent = {_NATS} if self.nats_url else set()
        absent |= set() if self._has_console else {"console"}
        return [name for name in _FIXED if name not in absent] + of_nodes

    def _refuse_taken_ports(self) -> None:
        """Raise ProgramFailed if a program cannot have its fixed port."""
        for name in self._programs() if self._port is not None else ():
            port = port_of(name, self._port or 0, self.nodes)
            with socket.socket() as probe:
                # as servers do, so that a connection that has just ended is no obstacle
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                try:
                    probe.bind(("127.0.0.1", port))
                except OSError as error:
                    problem = f"port {port} of {name}: {error.strerror}"
                    raise processes.ProgramFailed(f"{problem}; choose another --port") from None

    async def _start_nats(self) -> nats.NatsServer:
        """Start NATS: on its fixed port, or else on `nats_port`, or else on a free port."""
        directory, die = self.directory / "nats", processes.die_with_parent()
        if self._port is not None:
            port = port_of(_NATS, self._port, self.nodes)
            server = nats.NatsServer(directory, port=port, before_exec=die)
            await server.start()
            return server
        server = nats.NatsServer(directory, port=self._nats_port, before_exec=die)
        try:
            await server.start()
        except nats.NatsUnavailable:
            server = nats.NatsServer(directory, before_exec=die)
            await server.start()
        return server

    def _show_address(self, what: str, where: str) -> None:
        self._addresses.append(f"{what:<15} {where}")

    def _show_program(self, name: str, what: str, path: str) -> None:
        pid = self.processes[name].pid
        self._show_address(what, f"{self.http(name)}{path}  pid {pid}")

    def _record(self) -> None:
        running.write(
            running.Running(
                directory=str(self.directory),
                owner=os.getpid(),
                nats_url=self.nats_url or (self.nats.url if self.nats else ""),
                nodes=tuple(
                    running.Node(name=n.name, gpus=n.gpus, fuse=n.fuse) for n in self.nodes
                ),
                programs=self._supervisor.programs(),
                receivers=str(self.receivers),
            )
        )

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
        return [
            self._service(
                "health", central_settings.health(nats=url, kubeconfig=kubeconfig, plugin=PLUGIN)
            ),
            self._service("labeler", central_settings.labeler(nats=url, kubeconfig=kubeconfig)),
            *([] if self._has_console else [self._notifier()]),
        ]

    def _notifier(self) -> processes.Program:
        settings = central_settings.notifier(
            nats=self.nats_url,
            webhook_url=f"{self.http('webhook')}/notifications",
            console_url=self.http("console") if self._has_console else "",
            receivers_directory=str(self.receivers),
        )
        return self._service("notifier", settings)

    def _plugins(self) -> list[processes.Program]:
        fuse = self._fuse()
        programs = []
        for node in self.nodes:
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
            placed = program
            if self._port is not None:
                port = port_of(program.name, self._port, self.nodes)
                placed = program.at(f"http://127.0.0.1:{port}")
            process = processes.Process(placed, self.directory / f"{program.name}.log")
            self.processes[program.name] = process
            starting.append(process.start())
        for end in await asyncio.gather(*starting, return_exceptions=True):
            if isinstance(end, BaseException):
                raise end
        for program in programs:
            process = self.processes[program.name]
            self._supervisor.add(program.name, process, restart=self._restart)

    async def _end(self) -> None:
        """End all programs and remove the directory.

        Plugins end first, so that they can announce their stop, and NATS last.
        """
        await self._supervisor.end()
        order = ("plugin-", "notifier", "health", "labeler", "kubelet-", "")
        left = dict(self.processes)
        for prefix in order:
            now = [left.pop(name) for name in list(left) if name.startswith(prefix)]
            await asyncio.gather(*(process.end() for process in now))
        if self.nats is not None:
            await self.nats.stop()
        shutil.rmtree(self.directory, ignore_errors=True)
        self._lock.close()
