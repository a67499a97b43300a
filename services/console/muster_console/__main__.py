"""Adapter for the process of the console: reads its settings and serves the pages until SIGTERM."""

from muster.service import start  # isort: skip  # before everything else

import asyncio
import sys

from muster.service import entry, logs, runtime
from muster_console import config, server

start.end_imports()


async def serve(settings: config.Settings) -> None:
    """Serve until SIGTERM."""
    logs.configure("console", level=settings.log.level)

    async def work() -> None:
        async with server.serving(settings) as address:
            # from here on SIGTERM is handled
            logs.logger().info("listening", http=address)
            await asyncio.Event().wait()

    await runtime.run(work())


def main() -> int:
    """Run the console; return the exit code."""
    return entry.main("console", config.Settings, serve)


if __name__ == "__main__":
    sys.exit(main())
