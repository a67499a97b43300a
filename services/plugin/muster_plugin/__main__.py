"""Adapter: the process, from its settings to its end.

Sockets and registration come first, because they make devices usable. The bus and the HTTP probes
are imported and connected afterwards; the bus may stay unreachable for ever.
"""

from muster_plugin import lean  # isort: skip  # before everything else

import asyncio
import functools
import os
import resource
import socket
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final, TypeVar

import msgspec

from muster import machine, vocabulary
from muster.service import entry, logs, runtime
from muster_plugin import node as node_wiring
from muster_plugin import reload
from muster_plugin.config import settings as config_settings
from muster_plugin.gpu import evaluation, health_state
from muster_plugin.kubelet import socket_directory

lean.end_imports()

_RETRY_S: Final = 0.05
_FILES_OF_PROCESS: Final = 128
_FILES_PER_RESOURCE: Final = 8
"""Lock, socket and stream are 3; a probe and a registration need more for a moment."""

In = TypeVar("In")
Out = TypeVar("Out")


def main() -> int:
    """Run the plugin; return the exit code."""
    formats = {
        form.value: functools.partial(_foreign, form)
        for form in config_settings.Format
        if form is not config_settings.Format.MUSTER
    }
    return entry.run("plugin", config_settings.Settings, serve, formats=formats, resolve=_resolved)


async def serve(
    chosen: config_settings.Settings, source: entry.Source[config_settings.Settings]
) -> None:
    """Serve the node's devices until SIGTERM. Raises CannotStart."""
    node = _node(chosen)
    tasks = [*node.tasks(lambda: _acquire_resources(chosen, node)), _report(chosen, node)]
    if source.file:
        tasks.append(reload.Reloader(chosen, source.file, source.read, node).run())
    try:
        # SIGTERM may come while it waits for another plugin to end
        await runtime.run(*tasks, stop=node.stopping)
    finally:
        await node.close()


async def _report(chosen: config_settings.Settings, node: node_wiring.Node) -> None:
    """Report to the bus as soon as the resources are registered."""
    await node.resource_plugins.wait_for_first_answers()
    lean.import_bus()
    from muster_plugin import bus_reporter  # noqa: PLC0415  # see `lean`

    await bus_reporter.BusReporter(chosen, node).run()


def _resolved(chosen: config_settings.Settings) -> object:
    """Return the settings as they apply to this node. Raises CannotStart as `serve` does."""
    name, configuration = _for_this_node(chosen)
    if configuration.gpus is not None:
        evaluation.read_policy(configuration.gpus.health)
    of_node = {
        "node": name,
        "resources": configuration.resources,
        "gpus": configuration.gpus,
        "nodes": (),
    }
    return {**msgspec.to_builtins(chosen), **of_node}


def _for_this_node(
    chosen: config_settings.Settings,
) -> tuple[str, config_settings.NodeConfiguration]:
    """Return the node's name and configuration. Raises CannotStart if nothing can be served."""
    name = _node_name(chosen.node)
    _check(chosen)
    try:
        return name, chosen.at(name)
    except ValueError as error:
        raise entry.CannotStart(f"resources: {error}") from None


def _node(chosen: config_settings.Settings) -> node_wiring.Node:
    """Create the node, whose devices are not scanned yet. Raises CannotStart."""
    name, configuration = _for_this_node(chosen)
    logs.configure("plugin", level=chosen.log.level, node=name)
    for stale in socket_directory.remove_stale(
        socket_directory.both(Path(chosen.kubelet.directory))
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


async def _acquire_resources(chosen: config_settings.Settings, node: node_wiring.Node) -> None:
    """Lock the node's resources as soon as no other plugin serves them.

    Raises CannotStart if that takes longer than `handover_s`. The kubelet would keep the newer
    registration, and drop it when the older one ends (k/k#121994); so there must be no overlap, not
    even in a rolling update.
    """
    gpus_here = chosen.at(node.name).gpus
    resources = sorted({*node.inventory.resources, *(gpus_here.names() if gpus_here else ())})
    folders, locks = (
        socket_directory.both(Path(chosen.kubelet.directory)),
        node.resource_plugins.locks,
    )
    until = time.monotonic() + chosen.handover_s
    has_waited = False
    while other := _other_owner(resources, folders, locks):
        if time.monotonic() >= until:
            raise entry.CannotStart(
                f"another plugin on this node serves {other}; end it first, or let this one "
                f"wait for its end with handover_s (now {chosen.handover_s:g})"
            )
        if not has_waited:
            has_waited, longest = True, chosen.handover_s
            logs.logger().info("waiting_for_other_plugin", serves=other, at_most_s=longest)
        await asyncio.sleep(_RETRY_S)


def _new_runner() -> machine.MachineRunner[In, Out]:
    inbox: asyncio.Queue[runtime.Delivery[In]] = asyncio.Queue(runtime.INBOX_MAX)
    return machine.MachineRunner(
        send=lambda event: inbox.put_nowait(runtime.Delivery(event)),
        drive=lambda driven, act: runtime.drive(driven, inbox, act),
    )


def _gpus(
    chosen: config_settings.Settings, configuration: config_settings.NodeConfiguration, node: str
) -> evaluation.GpuEvaluator | None:
    """Return the source of the node's GPUs with their health rules; None without GPUs."""
    if configuration.gpus is None:
        return None
    health = configuration.gpus.health
    gpu_source: evaluation.Source
    if chosen.simulated_gpus:
        from muster_plugin.gpu import simulated  # noqa: PLC0415  # see `lean`

        gpu_source = simulated.SimulatedSource(chosen.simulated_gpus, node, poll_s=health.poll_s)
    else:
        from muster_plugin.gpu.nvml import observer  # noqa: PLC0415  # see `lean`

        gpu_source = observer.NvmlSource(configuration.gpus)
    return evaluation.GpuEvaluator(
        gpu_source, health_state.GpuHealth(evaluation.load_policy(health), health), _new_runner()
    )


def _foreign(peer: config_settings.Format, text: bytes, source: str) -> dict[str, object]:
    """Return the settings tree of another plugin's file. Raises BadSettings."""
    from muster_plugin.config import files  # noqa: PLC0415  # see `lean`

    imported = files.import_peer(text, source=source, peer=peer)
    tree: dict[str, object] = msgspec.to_builtins(imported.rules)
    return tree


def _node_name(configured: str) -> str:
    """Return the node's name: configured, from NODE_NAME, or the host's. Raises CannotStart."""
    source = "settings" if configured else "NODE_NAME"
    name = configured or os.environ.get("NODE_NAME", "")
    if not name:
        source, name = "the host's name", socket.gethostname().lower()
    try:
        return msgspec.convert(name, vocabulary.NodeName)
    except msgspec.ValidationError:
        raise entry.CannotStart(
            f"node: {name!r} (from {source}) is not a Kubernetes node name; "
            "give `node` in the settings or NODE_NAME in the environment"
        ) from None


def _check(chosen: config_settings.Settings) -> None:
    """Check early what would otherwise end the process after registration. Raises CannotStart."""
    problem = socket_directory.problem(
        Path(chosen.kubelet.directory) / config_settings.SOCKET_DIRECTORY
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
    """Raise the open-file limit; return how many resources it is enough for."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    if most == resource.RLIM_INFINITY:
        return node_wiring.RESOURCES_MAX
    return max(1, min(node_wiring.RESOURCES_MAX, (most - _FILES_OF_PROCESS) // _FILES_PER_RESOURCE))


def _other_owner(
    resources: Iterable[str], folders: Sequence[Path], locks: socket_directory.ResourceLocks
) -> str:
    """Return a resource that another plugin serves, and that plugin; empty without one.

    Two plugins that start together lock in the same order, so one of them gets everything.
    """
    for name in resources:
        owner = locks.acquire(name)
        if owner:
            return f"{name} ({owner})"
    # an older plugin may use no locks
    return next(
        iter(socket_directory.served_sockets(folders, {*map(config_settings.slug, resources)})), ""
    )


if __name__ == "__main__":
    sys.exit(main())
