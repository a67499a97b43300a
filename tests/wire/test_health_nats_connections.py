"""What a real nats-server reports about connections, and that missing reports are noticed."""

import asyncio
import re
import signal
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Final

from muster.local import nats
from muster.nats import bus
from muster.nats.auth import server_conf
from muster_health.bus import nats_connections
from muster_health.model import signals

DOCS: Final = Path(__file__).resolve().parents[2] / "docs" / "health.md"
CLIENT: Final = """
import asyncio, sys
import nats.aio.client
async def live():
    client = nats.aio.client.Client()
    await client.connect(sys.argv[1], name=sys.argv[2])
    print("connected", flush=True)
    await asyncio.Event().wait()
asyncio.run(live())
"""
NO_ACCOUNTS: Final = "ping_interval: 20\n"


def play(
    tmp_path: Path,
    story: Callable[
        [
            nats.NatsServer,
            nats_connections.ConnectionMonitor,
            asyncio.Queue[nats_connections.Advisory],
        ],
        Awaitable[None],
    ],
    *,
    config: str | None = None,
) -> None:
    async def played() -> None:
        file = None
        if config is not None:
            file = tmp_path / "nats.conf"
            file.write_text(config)
        async with (
            asyncio.timeout(100),
            nats.NatsServer(tmp_path / "nats", config=file) as server,
            bus.Bus(server.url, producer="tests", name="test") as connected,
        ):
            advisories: asyncio.Queue[nats_connections.Advisory] = asyncio.Queue()
            link = nats_connections.Link(
                connected.subscribe, connected.link.probe_connect, connected.link.changes
            )
            monitor = nats_connections.ConnectionMonitor(link, advisories.put, name="health test")
            running = asyncio.create_task(monitor.run())
            try:
                while monitor.is_flowing is None:
                    await asyncio.sleep(0.01)
                await story(server, monitor, advisories)
            finally:
                running.cancel()
                await asyncio.gather(running, return_exceptions=True)

    asyncio.run(played())


async def client(url: str, name: str) -> asyncio.subprocess.Process:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", CLIENT, url, name, stdout=asyncio.subprocess.PIPE
    )
    assert process.stdout is not None
    assert await process.stdout.readline() == b"connected\n"
    return process


def test_a_killed_plugin_is_reported_within_a_second(tmp_path: Path) -> None:
    async def story(
        server: nats.NatsServer,
        monitor: nats_connections.ConnectionMonitor,
        advisories: asyncio.Queue[nats_connections.Advisory],
    ) -> None:
        assert (monitor.is_flowing, monitor.problem) == (True, "")
        process = await client(server.url, "device-plugin node.a")
        connection = await advisories.get()
        assert isinstance(connection, signals.Connected)
        assert (connection.node, connection.plugin) == ("node.a", "device-plugin")
        process.kill()
        async with asyncio.timeout(30):
            assert await advisories.get() == signals.Disconnected(
                node="node.a",
                plugin="device-plugin",
                server=connection.server,
                client=connection.client,
                reason="Client Closed",
            )
        await process.wait()

    play(tmp_path, story)


def test_a_stopping_server_is_reported_under_the_id_of_its_disconnects(tmp_path: Path) -> None:
    async def story(
        server: nats.NatsServer,
        monitor: nats_connections.ConnectionMonitor,
        advisories: asyncio.Queue[nats_connections.Advisory],
    ) -> None:
        process = await client(server.url, "device-plugin a")
        connection = await advisories.get()
        assert isinstance(connection, signals.Connected)
        await server.stop()
        assert await advisories.get() == signals.ServerEvent(
            server=connection.server, what="shutdown"
        )
        while monitor.is_flowing is not None:
            await asyncio.sleep(0.01)
        await server.start()
        again = await advisories.get()
        assert isinstance(again, signals.Connected)
        assert again.server != connection.server
        process.send_signal(signal.SIGKILL)
        await process.wait()

    play(tmp_path, story)


def test_a_server_that_reports_nothing_is_noticed(tmp_path: Path) -> None:
    async def story(
        _: nats.NatsServer,
        monitor: nats_connections.ConnectionMonitor,
        advisories: asyncio.Queue[nats_connections.Advisory],
    ) -> None:
        assert monitor.is_flowing is False
        assert monitor.problem.startswith("nats-server does not report connections")
        assert advisories.empty()

    play(tmp_path, story, config=NO_ACCOUNTS)


def test_the_documented_configuration_is_the_one_that_is_run() -> None:
    def words(text: str) -> str:
        return re.sub(r"\s+", " ", text)

    text = words(DOCS.read_text("utf-8"))
    assert words(server_conf.EXPORTS) in text
    assert words(server_conf.IMPORTS) in text
