"""Adapter for the process `muster-fuse-nri`: adds /dev/fuse to containers whose pod requests it."""

import asyncio
import sys
from pathlib import Path
from typing import Annotated, Final

import msgspec
import prometheus_client

from muster.service import entry, logs, metrics, probes, runtime, sections
from muster_fuse.nri import connection, grants, session

GRANTED: Final = prometheus_client.Counter(
    "muster_fuse_nri_granted_total", "Containers that were given /dev/fuse."
)
DENIED: Final = metrics.counter(
    "muster_fuse_nri_denied_total",
    "Containers that were denied /dev/fuse, by reason.",
    "reason",
    grants.Reason,
)
WITHOUT_DEVICE: Final = prometheus_client.Counter(
    "muster_fuse_nri_without_device_total",
    "Containers that run without /dev/fuse although their pod requests it.",
)
CONNECTED: Final = prometheus_client.Gauge(
    "muster_fuse_nri_connected", "1 while the runtime calls the plugin for each new container."
)
SYNCHRONIZED: Final = prometheus_client.Counter(
    "muster_fuse_nri_synchronizations_total", "Registrations that the runtime completed."
)

File = Annotated[str, msgspec.Meta(min_length=1, max_length=4096)]
Pattern = Annotated[str, msgspec.Meta(min_length=1, max_length=253)]


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """All settings of the NRI plugin."""

    socket: File = "/var/run/nri/nri.sock"
    """The runtime's socket, which the runtime recreates whenever it starts."""
    namespaces: Annotated[tuple[Pattern, ...], msgspec.Meta(max_length=1000)] = ("*",)
    """Shell patterns for the namespaces whose pods may use the device."""
    http: sections.Http = sections.Http()
    log: sections.Log = sections.Log()


class Report:
    """Logs and counts the observations of sessions.

    A container without its device is reported only once, even after a reconnection.
    """

    def __init__(self) -> None:
        self._without_device: frozenset[str] = frozenset()

    def observe(self, observation: session.Observation) -> None:
        """Log and count an observation."""
        match observation:
            case session.Synchronized():
                self._synchronized(observation)
            case session.Granted(container=container):
                GRANTED.inc()
                logs.logger().info("device_granted", **_names(container))
            case session.Rejected(container=container, denied=denied):
                DENIED.labels(denied.reason.value).inc()
                logs.logger().warning(
                    "device_denied", reason=denied.reason, error=denied.text, **_names(container)
                )

    def _synchronized(self, observation: session.Synchronized) -> None:
        SYNCHRONIZED.inc()
        logs.logger().info("nri_connected", runtime=observation.runtime)
        for container in observation.without_device:
            if container.id not in self._without_device:
                WITHOUT_DEVICE.inc()
                logs.logger().warning("container_lacks_dev_fuse", **_names(container))
        self._without_device = frozenset(each.id for each in observation.without_device)


def _names(container: grants.Container) -> dict[str, str]:
    return {
        "namespace": container.namespace,
        "pod": container.pod,
        "container": container.name,
    }


async def serve(settings: Settings) -> None:
    """Serve until SIGTERM."""
    logs.configure("fuse-nri", level=settings.log.level)
    link = connection.Connection(
        Path(settings.socket), settings.namespaces, observe=Report().observe
    )
    CONNECTED.set_function(lambda: link.problem is None)
    async with probes.serve(
        settings.http.host, settings.http.port, ready=lambda: link.problem
    ) as address:

        async def work() -> None:
            # from here on SIGTERM is handled
            logs.logger().info("listening", http=address)
            await asyncio.Event().wait()

        await runtime.run(work(), link.keep())


def main() -> int:
    """Run the plugin; return the exit code."""
    return entry.main("fuse-nri", Settings, serve)


if __name__ == "__main__":
    sys.exit(main())
