"""Adapter: runs the plugin's process, and reloads its settings when they change.

Sockets and registration come first, because they make devices usable. The bus and the HTTP probes
are imported and started afterwards. The plugin also works without the bus.
"""

from muster.service import lean  # isort: skip  # before everything else

import asyncio
import contextlib
import functools
import os
import resource
import signal
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeAlias, TypeVar

import msgspec

from muster import blocking, machine
from muster.service import entry, logs, runtime
from muster_plugin import node as node_wiring
from muster_plugin.config import settings
from muster_plugin.discovery import inotify
from muster_plugin.kubelet import handover, kubelet_socket, plugin_sockets

if TYPE_CHECKING:
    from muster_plugin.gpu import evaluation

lean.end_imports()

_RETRY_S: Final = 0.05
_PREDECESSOR_ENDS_S: Final = 2.0
_LISTED_TIMEOUT_S: Final = 10.0
"""How long a successor waits until all resources are listed; its predecessor waits longer."""
_FILES_OF_PROCESS: Final = 128
_FILES_PER_RESOURCE: Final = 8
"""The maximum number of open files per resource.

The files are those of a lock, a socket, a stream, a probe and a registration.
"""
_READ_TIMEOUT_S: Final = 5.0
_READ_PERIOD_S: Final = 60.0
_SETTLE_S: Final = 0.05
_Stamp: TypeAlias = tuple[int, ...]

In = TypeVar("In")
Out = TypeVar("Out")


def main() -> int:
    """Run the plugin; return the exit code."""
    formats = {
        form.value: functools.partial(_foreign, form)
        for form in settings.Format
        if form is not settings.Format.MUSTER
    }
    return entry.run("plugin", settings.Settings, serve, formats=formats, resolve=_resolved)


async def serve(chosen: settings.Settings, source: entry.Source[settings.Settings]) -> None:
    """Serve until SIGTERM or a replacement of the GPU driver. Raises CannotStart or BadSettings."""
    node = _node(chosen)
    handing = handover.Handover(_socket_directories(chosen)[0] / _handover_socket(chosen), node)
    acquired = asyncio.Event()

    async def acquire() -> None:
        await _acquire_resources(chosen, node, handing)
        acquired.set()

    tasks = [*node.tasks(acquire), _report(chosen, node), _hand_over(node, handing, acquired)]
    if source.file:
        tasks.append(Reloader(chosen, source.file, source.read, node).run())
    try:
        # SIGTERM may arrive while this process waits for another plugin to exit
        await runtime.run(*tasks, stop=node.stopping)
    finally:
        await node.close()
        handing.close()


async def _report(chosen: settings.Settings, node: node_wiring.Node) -> None:
    """Report to the bus after the kubelet has answered all registrations, or after a timeout."""
    await node.resource_plugins.wait_for_first_answers()
    lean.import_bus()
    from muster_plugin import bus_reporter  # noqa: PLC0415  # see `lean`

    await bus_reporter.BusReporter(chosen, node).run()


def _resolved(chosen: settings.Settings) -> object:
    """Return the settings that apply to this node. Raises CannotStart or BadSettings."""
    name, configuration = _for_this_node(chosen)
    if configuration.gpus is not None:
        from muster_plugin.gpu import evaluation  # noqa: PLC0415  # see `lean`

        evaluation.read_policy(configuration.gpus.health)
    of_node = {
        "node": name,
        "resources": configuration.resources,
        "gpus": configuration.gpus,
        "nodes": (),
    }
    return {**msgspec.to_builtins(chosen), **of_node}


def _for_this_node(
    chosen: settings.Settings,
) -> tuple[str, settings.NodeConfiguration]:
    """Return the node's name and configuration. Raises CannotStart if the settings are unusable."""
    name = entry.node_name(chosen.node)
    _check(chosen)
    try:
        return name, chosen.at(name)
    except ValueError as error:
        raise entry.CannotStart(f"resources: {error}") from None


def _node(chosen: settings.Settings) -> node_wiring.Node:
    """Remove stale sockets and locks; return the node. Raises CannotStart or BadSettings."""
    name, configuration = _for_this_node(chosen)
    logs.configure("plugin", level=chosen.log.level, node=name)
    if not chosen.labels and any(not isinstance(each.match, str) for each in chosen.nodes):
        logs.logger().warning(
            "node_labels_unknown", hint="set `labels`: overrides in `nodes` match by labels"
        )
    for stale in plugin_sockets.remove_stale(
        kubelet_socket.directories(Path(chosen.kubelet.directory))
    ):
        logs.logger().info("stale_socket_removed", socket=stale)
    node = node_wiring.Node(
        chosen,
        name,
        new_runner=_new_runner,
        gpus=_gpus(chosen, configuration, name),
        resources_max=_resources_max(),
    )
    node.resource_plugins.locks.remove_stale()
    return node


async def _hand_over(
    node: node_wiring.Node, handing: handover.Handover, acquired: asyncio.Event
) -> None:
    """Complete the takeover from a predecessor, if there is one; then hand over to successors.

    Raises CannotStart if the kubelet does not list the resources in time; the predecessor then
    keeps serving them.
    """
    await acquired.wait()
    if handing.sockets:
        until = time.monotonic() + _LISTED_TIMEOUT_S
        while not node.resource_plugins.all_listed:
            if time.monotonic() >= until:
                statuses = [beat for beat in node.statuses() if beat.problem]
                problems = [f"{beat.name}: {beat.problem}" for beat in statuses]
                raise entry.CannotStart(
                    "cannot take over from the older process of this plugin: the kubelet does not "
                    f"list every resource ({'; '.join(problems)})"
                )
            await asyncio.sleep(_RETRY_S)
        node.resource_plugins.expect_drops(time.monotonic() + _PREDECESSOR_ENDS_S)
        await handing.finish()
    await handing.listen()


async def _acquire_resources(
    chosen: settings.Settings, node: node_wiring.Node, handing: handover.Handover
) -> None:
    """Lock the node's resources as soon as no other plugin serves them.

    An older process of this plugin gets a handover request. Raises CannotStart if the resources are
    not free after `handover_s`.
    """
    gpus_here = chosen.at(node.name).gpus
    resources = sorted({*node.inventory.resources, *(gpus_here.names() if gpus_here else ())})
    folders, locks = (
        kubelet_socket.directories(Path(chosen.kubelet.directory)),
        node.resource_plugins.locks,
    )
    until = time.monotonic() + chosen.handover_s
    reason = ""
    while other := plugin_sockets.other_owner(resources, folders, locks, besides=handing.sockets):
        if time.monotonic() >= until:
            raise entry.CannotStart(
                f"another plugin on this node serves {other}; stop that plugin first, or "
                f"increase handover_s to wait longer for it (now {chosen.handover_s:g} s)"
            )
        if handing.can_ask:
            before, reason = reason, await handing.request()
            if not reason:
                continue
            if reason != before:
                logs.logger().info(
                    "waiting_for_other_plugin",
                    owner=other,
                    timeout_s=chosen.handover_s,
                    reason=reason,
                )
        await asyncio.sleep(_RETRY_S)


def _socket_directories(chosen: settings.Settings) -> list[Path]:
    root = Path(chosen.kubelet.directory)
    return [root / folder for folder in (settings.SOCKET_DIRECTORY, settings.REGISTRY_DIRECTORY)]


def _handover_socket(chosen: settings.Settings) -> str:
    """Return the handover socket's path, relative to the kubelet's socket directory."""
    return f"{plugin_sockets.LOCK_DIRECTORY}/{chosen.name}.sock"


def _new_runner() -> machine.MachineRunner[In, Out]:
    inbox: asyncio.Queue[runtime.Delivery[In]] = asyncio.Queue(runtime.INBOX_MAX)
    return machine.MachineRunner(
        send=lambda event: inbox.put_nowait(runtime.Delivery(event)),
        drive=lambda driven, act: runtime.drive(driven, inbox, act),
    )


def _gpus(
    chosen: settings.Settings, configuration: settings.NodeConfiguration, node: str
) -> "evaluation.GpuEvaluator | None":
    """Return what observes and evaluates the node's GPUs; None if no GPUs are configured.

    Raises BadSettings if the policy file cannot be used.
    """
    if configuration.gpus is None:
        return None
    from muster_plugin.gpu import evaluation, gpu_health  # noqa: PLC0415  # see `lean`

    health = configuration.gpus.health
    gpu_source: evaluation.Source
    if chosen.simulated_gpus:
        from muster_plugin.gpu import simulated  # noqa: PLC0415  # see `lean`

        gpu_source = simulated.SimulatedSource(chosen.simulated_gpus, node, poll_s=health.poll_s)
    else:
        from muster_plugin.gpu.nvml import observer  # noqa: PLC0415  # see `lean`

        gpu_source = observer.NvmlSource(configuration.gpus)
    return evaluation.GpuEvaluator(
        gpu_source, gpu_health.GpuHealth(evaluation.load_policy(health), health), _new_runner()
    )


def _foreign(peer: settings.Format, text: bytes, source: str) -> dict[str, object]:
    """Return the settings in another plugin's file as nested dictionaries. Raises BadSettings."""
    from muster_plugin.config import files  # noqa: PLC0415  # see `lean`

    imported = files.import_peer(text, source=source, peer=peer, environment=os.environ)
    files.log(imported, source)
    tree: dict[str, object] = msgspec.to_builtins(imported.rules)
    return tree


def _check(chosen: settings.Settings) -> None:
    """Raise CannotStart if a directory or the HTTP address in the settings cannot be used."""
    problem = kubelet_socket.directory_problem(
        Path(chosen.kubelet.directory) / settings.SOCKET_DIRECTORY, serves=chosen.serves
    )
    if problem:
        raise entry.CannotStart(f"kubelet.directory: {problem}")
    script = chosen.simulated_gpus and chosen.simulated_gpus.faults
    if script and not Path(script).parent.is_dir():
        raise entry.CannotStart(f"simulated_gpus.faults: {Path(script).parent}: no such directory")
    http = chosen.http
    family = socket.AF_INET6 if ":" in http.host else socket.AF_INET
    try:
        socket.create_server((http.host, http.port), family=family).close()
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno and error.errno > 0 else error.strerror
        raise entry.CannotStart(f"http: {http.host}:{http.port}: {reason}") from None


def _resources_max() -> int:
    """Raise the open-file limit; return the maximum number of resources that are served."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    if most == resource.RLIM_INFINITY:
        return node_wiring.RESOURCES_MAX
    return max(1, min(node_wiring.RESOURCES_MAX, (most - _FILES_OF_PROCESS) // _FILES_PER_RESOURCE))


class Reloader:
    """Applies changed settings to the node. `read` reads `file` and may raise ValueError."""

    def __init__(
        self,
        chosen: settings.Settings,
        file: Path,
        read: Callable[[], settings.Settings],
        node: node_wiring.Node,
    ) -> None:
        self._chosen = chosen
        self._file = file
        self._read = read
        self._node = node
        self._active = chosen
        self._read_requested = asyncio.Event()
        self._files = blocking.Serial()
        self._policy: Path | None = None
        self._stamps: tuple[_Stamp | None, ...] = ()
        """The stamps of the files at the last check; an empty tuple forces a new read."""

    async def run(self) -> None:
        """Read the settings when their file changes or on SIGHUP; apply them if they are valid."""
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGHUP, self._on_sighup)
        try:
            # the first read here only repeats the read at startup
            await self._node.resource_plugins.wait_for_first_answers()
            change_times = inotify.scan_times(
                lambda: _watched_directories(self._file),
                period_s=_READ_PERIOD_S,
                mask=inotify.CONTENT_EVENTS,
                settle_s=_SETTLE_S,
                changed=self._read_requested,
            )
            async with contextlib.aclosing(change_times):
                async for _ in change_times:
                    if await self._may_have_changed():
                        await self._reread()
        finally:
            loop.remove_signal_handler(signal.SIGHUP)

    def _on_sighup(self) -> None:
        self._stamps = ()
        self._read_requested.set()

    async def _may_have_changed(self) -> bool:
        """Return whether the settings file or the policy file may have changed."""
        files = [self._file, *([self._policy] if self._policy else [])]
        before, self._stamps = self._stamps, ()
        with contextlib.suppress(TimeoutError):
            self._stamps = await self._files.run(
                lambda: tuple(map(_stamp, files)), timeout_s=_READ_TIMEOUT_S
            )
        return not before or before != self._stamps

    async def _reread(self) -> None:
        try:
            new = await self._files.run(self._read, timeout_s=_READ_TIMEOUT_S)
            configuration = new.at(self._node.name)
            await self._reload_gpu_policy(configuration)
        except (ValueError, TimeoutError) as error:
            problems = tuple(str(error).splitlines()) or (f"{self._file}: read timed out",)
            active_hash = self._active.hash_for(self._node.name)
            self._node.event_log.configuration_rejected(problems, active_hash=active_hash)
            self._node.heartbeat_due.set()
            # the cause may be in the policy file, which is not watched
            self._stamps = ()
            return
        policy = configuration.gpus.health.policy if configuration.gpus else ""
        self._policy = Path(policy) if policy else None
        config_hash = new.hash_for(self._node.name)
        if new == self._active:
            self._node.event_log.configuration_restored(config_hash)
            return
        restart = new.restart_needed_for(self._chosen, self._node.name)
        if configuration.gpus is not None and not self._node.watches_gpus:
            restart = (*restart, "gpus")
        self._active = new
        await self._node.configure(configuration, config_hash=config_hash, restart=restart)

    async def _reload_gpu_policy(self, configuration: settings.NodeConfiguration) -> None:
        """Load the GPU health policy and apply it, if GPUs are configured and watched.

        Raises ValueError or TimeoutError.
        """
        if configuration.gpus is not None and self._node.watches_gpus:
            from muster_plugin.gpu import evaluation  # noqa: PLC0415  # see `lean`

            health = configuration.gpus.health
            policy = await self._files.run(
                lambda: evaluation.load_policy(health), timeout_s=_READ_TIMEOUT_S
            )
            self._node.set_gpu_policy(policy, health)


def _stamp(file: Path) -> _Stamp | None:
    """Return a stamp that changes when the file is written or replaced; None if unreadable."""
    try:
        status = file.stat()
    except OSError:
        return None
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns


def _watched_directories(file: Path) -> set[Path]:
    """Return the directories of the file and its target: a ConfigMap update replaces the link."""
    return {file.parent, Path(os.path.realpath(file)).parent}


if __name__ == "__main__":
    sys.exit(main())
