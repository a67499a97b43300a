"""Adapter: observes the node for the model of watched plugins, and performs the model's actions."""

import asyncio
import collections
import contextlib
import functools
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Final, assert_never

from muster import blocking, machine, vocabulary
from muster.service import logs
from muster_plugin.config import settings
from muster_plugin.discovery import inotify
from muster_plugin.kubelet import kubelet_socket, podresources
from muster_plugin.watch import (
    expectation,
    hardware,
    node_files,
    node_model,
    observation,
    prober,
    processes,
    socket_files,
)

_RESCAN_S: Final = 30.0
_SETTLE_S: Final = 0.05
_SHARE: Final = 0.01
"""The largest share of CPU time for scans, however many files change."""
_NODE_PERIOD_S: Final = 60.0
_FILES_TIMEOUT_S: Final = 5.0
_PROBES_MAX: Final = 64
_NOTED_MAX: Final = 100


class Watcher:
    """Watches the plugins of one node; `on_change` receives each change.

    `ours` returns the resources that this process serves, and `new_runner` creates the model's
    runner.
    """

    def __init__(
        self,
        chosen: settings.Settings,
        node: str,
        *,
        new_runner: machine.NewRunner,
        ours: Callable[[], tuple[str, ...]],
        on_change: Callable[[vocabulary.PluginObserved], None],
        timing: node_model.Timing | None = None,
    ) -> None:
        self._chosen = chosen
        self._node = node
        self._root = Path(chosen.kubelet.directory)
        self._ours = ours
        self._on_change = on_change
        self._timing = timing or node_model.Timing()
        self._model = self._new_model(expectation.Memory())
        runner: machine.MachineRunner[observation.Observation, observation.Action] = new_runner()
        self._runner = runner
        self._processes = processes.ProcessWatch(self._runner.send)
        self._prober = prober.Prober(
            self._root, self._processes, on_result=self._runner.send, on_problem=self._note
        )
        self._probes: set[asyncio.Task[None]] = set()
        self._files = blocking.Serial()
        self._node_files = blocking.Serial()
        self._cdi_devices: Mapping[str, frozenset[str]] = {}
        self._scanned: blocking.Latest[observation.Scanned | None] = blocking.Latest(None)
        self._noted: set[str] = set()
        self._has_learned = asyncio.Event()
        self._is_halted = False

    @property
    def watched(self) -> tuple[vocabulary.Watched, ...]:
        """All watched plugins, at most WATCHED_MAX: those with a finding first."""
        return self._model.watched

    @property
    def restarts(self) -> int:
        """How many times another process began to serve a watched socket."""
        return self._model.restarts

    @property
    def probes(self) -> dict[observation.Answer, int]:
        """How many times sockets were probed, by outcome."""
        return self._prober.counts

    async def run(self) -> None:
        """Watch until cancelled."""
        self._model = self._new_model(await self._read_memory())
        try:
            async with asyncio.TaskGroup() as tasks:
                for task in self._tasks():
                    tasks.create_task(task)
        finally:
            for probe in self._probes:
                probe.cancel()
            self._processes.close()

    def on_listing(self, listing: podresources.Listing | None) -> None:
        """Record the kubelet's device list; None if the kubelet does not answer."""
        self._model.ours = frozenset(self._ours())
        if listing is None:
            self._note("the kubelet's podresources socket does not answer")
            self._runner.send(observation.Listed(is_answering=False))
            return
        if listing.allocatable is None:
            self._note("the kubelet's podresources API does not list allocatable devices")
        self._cdi_devices = listing.cdi_devices
        allocated = collections.Counter(resource for resource, _ in listing.holders)
        pods: dict[str, set[str]] = {}
        for (resource, _), pod in listing.holders.items():
            pods.setdefault(resource, set()).add(pod)
        counts = listing.allocatable
        self._runner.send(
            observation.Listed(
                counts=None if counts is None else {name: len(ids) for name, ids in counts.items()},
                allocated=allocated,
                pods={name: tuple(sorted(names)) for name, names in pods.items()},
            )
        )
        self._observe_processes()

    def _new_model(self, memory: expectation.Memory) -> node_model.NodeModel:
        return node_model.NodeModel(
            self._chosen.watch, memory=memory, timing=self._timing, now=time.monotonic()
        )

    def _tasks(self) -> tuple[Coroutine[object, object, None], ...]:
        return (
            self._runner.drive(self._model, self._act),
            self._scan_sockets(),
            self._scan_node(),
            self._save_memory(),
        )

    async def _scan_sockets(self) -> None:
        """Scan the sockets periodically, and whenever the kubelet's directories change."""
        await self._read_checkpoint()
        folders = kubelet_socket.directories(self._root)
        scan_times = inotify.scan_times(
            lambda: [folder for folder in folders if folder.is_dir()],
            period_s=_RESCAN_S,
            settle_s=_SETTLE_S,
            share=_SHARE,
        )
        async with contextlib.aclosing(scan_times):
            async for _ in scan_times:
                try:
                    scanned = await self._scanned.refresh(
                        lambda: socket_files.scan(self._root), timeout_s=_FILES_TIMEOUT_S
                    )
                except OSError as error:
                    self._note(f"cannot read the kubelet's directory: {error}")
                    continue
                if scanned is not None and not self._scanned.is_hanging:
                    self._runner.send(scanned)
                    if self._model.left_out:
                        self._note("there are too many sockets to watch them all")

    async def _scan_node(self) -> None:
        """Look periodically for hardware, and for CDI devices in use that no spec describes."""
        folders = (Path(self._chosen.cdi.directory), node_files.STATIC_SPECS)
        while True:
            with self._noting("cannot read the node's files"):
                devices = await self._node_files.run(
                    node_files.pci_devices, timeout_s=_FILES_TIMEOUT_S
                )
                self._runner.send(observation.HardwareSeen(hardware.offered_as(devices)))
                missing = {
                    driver: await self._node_files.run(
                        functools.partial(node_files.undescribed, names, folders),
                        timeout_s=_FILES_TIMEOUT_S,
                    )
                    for driver, names in self._cdi_devices.items()
                }
                self._runner.send(observation.FilesMissing(missing))
            await asyncio.sleep(_NODE_PERIOD_S)

    async def _read_checkpoint(self) -> None:
        """Read the kubelet's checkpoint, which includes the devices of plugins that are down."""
        with self._noting("cannot read the kubelet's checkpoint"):
            read = await self._files.run(
                lambda: socket_files.read_checkpoint(self._root), timeout_s=_FILES_TIMEOUT_S
            )
            if read is not None:
                self._runner.send(observation.Registered(read.registered))

    def _observe_processes(self) -> None:
        halted = self._processes.halted()
        if halted or self._is_halted:
            self._runner.send(observation.ProcessesSeen(halted))
        self._is_halted = bool(halted)

    async def _act(self, action: observation.Action) -> None:
        match action:
            case observation.Probe(file=file):
                if len(self._probes) >= _PROBES_MAX:
                    # the model waits for a result
                    self._runner.send(observation.inconclusive(file))
                    return
                probe = asyncio.create_task(self._prober.probe(file))
                self._probes.add(probe)
                probe.add_done_callback(self._probes.discard)
            case observation.Change(watched=watched, gone=gone):
                self._on_change(
                    vocabulary.PluginObserved(
                        node=self._node,
                        plugin=self._chosen.name,
                        at=datetime.now(UTC),
                        watched=watched,
                        gone=gone,
                    )
                )
            case observation.Learned():
                self._has_learned.set()
            case _:
                assert_never(action)

    # Learned data

    async def _read_memory(self) -> expectation.Memory:
        with self._noting("cannot read the learned device counts and resource names"):
            return await self._files.run(
                lambda: socket_files.read_memory(self._root), timeout_s=_FILES_TIMEOUT_S
            )
        return expectation.Memory()

    async def _save_memory(self) -> None:
        while True:
            await self._has_learned.wait()
            self._has_learned.clear()
            text = expectation.encode(self._model.memory)
            with self._noting("cannot save the learned device counts and resource names"):
                await self._files.run(
                    functools.partial(socket_files.write_memory, self._root, text),
                    timeout_s=_FILES_TIMEOUT_S,
                )

    # Limits of observation

    @contextlib.contextmanager
    def _noting(self, text: str) -> Iterator[None]:
        try:
            yield
        except TimeoutError:
            self._note(f"{text}: the disk does not answer")
        except (OSError, ValueError) as error:
            self._note(f"{text}: {error}")

    def _note(self, problem: str) -> None:
        """Log a reason why the observation is incomplete, but only once."""
        if problem not in self._noted and len(self._noted) < _NOTED_MAX:
            self._noted.add(problem)
            logs.logger().warning("plugin_watch_incomplete", problem=problem)
