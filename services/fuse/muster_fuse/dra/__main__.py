"""Adapter for the process `muster-fuse-dra`: a DRA driver that gives /dev/fuse."""

import asyncio
import sys
from pathlib import Path
from typing import Annotated

import msgspec
import prometheus_client

from muster.service import entry, logs, probes, runtime, sections
from muster_fuse.dra import driver

Registry = Annotated[str, msgspec.Meta(min_length=1, max_length=74)]
"""A directory for sockets, with a short path: a socket's path may have at most 107 bytes."""
Folder = Annotated[str, msgspec.Meta(min_length=1, max_length=4000)]


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """All settings of the DRA driver."""

    registry: Registry = "/var/lib/kubelet/plugins_registry"
    """The kubelet's directory for plugin sockets."""
    cdi: Folder = "/var/run/cdi"
    """The directory from which the container runtime reads CDI files."""
    http: sections.Http = sections.Http()
    log: sections.Log = sections.Log()


async def serve(settings: Settings) -> None:
    """Serve until SIGTERM."""
    logs.configure("fuse-dra", level=settings.log.level)
    served = driver.Driver(registry=Path(settings.registry), cdi=Path(settings.cdi))
    offered = served.registration
    for name, text, value in (
        ("registered", "1 while the kubelet uses the driver.", lambda: not offered.problem),
        ("claims_prepared", "Claims prepared, including repeats.", lambda: served.prepared),
        ("claims_failed", "Claims that could not be prepared.", lambda: served.failed),
    ):
        prometheus_client.Gauge(f"muster_fuse_dra_{name}", text).set_function(value)
    async with probes.serve(
        settings.http.host, settings.http.port, ready=lambda: offered.problem or None
    ) as address:

        async def work() -> None:
            # from here on SIGTERM is handled
            logs.logger().info("listening", http=address)
            await asyncio.Event().wait()

        await runtime.run(work(), offered.run())


def main() -> int:
    """Run the driver; return the exit code."""
    return entry.main("fuse-dra", Settings, serve)


if __name__ == "__main__":
    sys.exit(main())
