"""Adapter: the process, from its settings to its end.

Sockets and registration come first, because they make devices usable. The bus and the HTTP probes
are imported and connected afterwards; the bus may stay unreachable for ever.
"""

from muster_plugin import lean  # isort: skip  # before everything else

import asyncio
import functools
import sys
from pathlib import Path
from typing import TypeVar

import msgspec

from muster import machine
from muster.service import entry, logs, runtime, settings
from muster_plugin import node as node_door
from muster_plugin import preflight, reload
from muster_plugin.config import settings as config_settings
from muster_plugin.gpu import evaluation, health_state
from muster_plugin.kubelet import socket_directory

lean.end_imports()

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
    try:
        node = _node(chosen)
        try:
            # SIGTERM may come while it waits for another plugin to end
            await runtime.run(
                *node.tasks(lambda: _acquire_resources(chosen, node)),
                _report(chosen, node),
                *(
                    [reload.Reloader(chosen, source.file, source.read, node).run()]
                    if source.file
                    else []
                ),
                stop=node.stopping,
            )
        finally:
            await node.close()
    except preflight.CannotServe as error:
        raise entry.CannotStart(str(error)) from None


async def _report(chosen: config_settings.Settings, node: node_door.Node) -> None:
    """Report to the bus as soon as the resources are registered."""
    await node.resource_plugins.wait_for_first_answers()
    lean.import_bus()
    from muster_plugin import bus_reporter  # noqa: PLC0415  # see `lean`

    await bus_reporter.BusReporter(chosen, node).run()


def _resolved(chosen: config_settings.Settings) -> object:
    """Return the settings as they apply to this node. Raises CannotStart as `serve` does."""
    try:
        name = preflight.node_name(chosen.node)
        preflight.check(chosen)
        configuration = chosen.at(name)
        if configuration.gpus is not None:
            evaluation.read_policy(configuration.gpus.health)
    except preflight.CannotServe as error:
        raise entry.CannotStart(str(error)) from None
    except settings.BadSettings:
        raise
    except ValueError as error:
        raise entry.CannotStart(f"resources: {error}") from None
    of_node = {
        "node": name,
        "resources": configuration.resources,
        "gpus": configuration.gpus,
        "nodes": (),
    }
    return {**msgspec.to_builtins(chosen), **of_node}


def _node(chosen: config_settings.Settings) -> node_door.Node:
    """Create the node, whose devices are not scanned yet. Raises CannotServe."""
    name = preflight.node_name(chosen.node)
    preflight.check(chosen)
    try:
        configuration = chosen.at(name)
    except ValueError as error:
        raise preflight.CannotServe(f"resources: {error}") from None
    logs.configure("plugin", level=chosen.log.level, node=name)
    for stale in socket_directory.remove_stale(_socket_directories(chosen)):
        logs.logger().info("stale_socket_removed", socket=stale)
    node = node_door.Node(
        chosen,
        name,
        new_runner=_new_runner,
        gpus=_gpus(chosen, configuration, name),
        resources_max=preflight.resources_max(),
    )
    node.resource_plugins.locks.remove_stale()
    return node


async def _acquire_resources(chosen: config_settings.Settings, node: node_door.Node) -> None:
    gpus_here = chosen.at(node.name).gpus
    names = {*node.inventory.resources, *(gpus_here.names() if gpus_here else ())}
    await preflight.acquire_resources(
        names,
        _socket_directories(chosen),
        node.resource_plugins.locks,
        handover_s=chosen.handover_s,
    )


def _socket_directories(chosen: config_settings.Settings) -> list[Path]:
    root = Path(chosen.kubelet.directory)
    return [
        root / folder
        for folder in (config_settings.SOCKET_DIRECTORY, config_settings.REGISTRY_DIRECTORY)
    ]


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


if __name__ == "__main__":
    sys.exit(main())
