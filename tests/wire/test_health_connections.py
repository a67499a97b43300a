"""What a real nats-server tells of connections, and that its silence is noticed."""

import asyncio
import re
import signal
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Final

from muster.local import nats
from muster.nats import bus
from muster.nats.auth import accounts_conf
from muster_health.bus import nats_advisories, nats_connections
from muster_health.model import signals

DOCS: Final = Path(__file__).resolve().parents[2] / "docs" / "health.md"
CLIENT: Final = """
import asyncio, sys
import nats.aio.client
async def live():
    client = nats.aio.client.Client()
    await client.connect(sys.argv[1], name=sys.argv[2])
    print("there", flush=True)
    await asyncio.Event().wait()
asyncio.run(live())
"""
NO_ACCOUNTS: Final = "ping_interval: 20\n"


def play(
    tmp_path: Path,
    story: Callable[
        [nats.NatsServer, nats_connections.Connections, asyncio.Queue[nats_advisories.Told]],
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
            told: asyncio.Queue[nats_advisories.Told] = asyncio.Queue()
            link = nats_connections.Link(
                connected.listen, connected.link.probe_connect, connected.link.changes
            )
            found = nats_connections.Connections(link, told.put, name="health test")
            running = asyncio.create_task(found.run())
            try:
                while found.is_flowing is None:
                    await asyncio.sleep(0.01)
                await story(server, found, told)
            finally:
                running.cancel()
                await asyncio.gather(running, return_exceptions=True)

    asyncio.run(played())


async def client(url: str, name: str) -> asyncio.subprocess.Process:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", CLIENT, url, name, stdout=asyncio.subprocess.PIPE
    )
    assert process.stdout is not None
    assert await process.stdout.readline() == b"there\n"
    return process


def test_a_plugin_that_is_killed_is_told_of_within_a_second(tmp_path: Path) -> None:
    async def story(
        server: nats.NatsServer,
        found: nats_connections.Connections,
        told: asyncio.Queue[nats_advisories.Told],
    ) -> None:
        assert (found.is_flowing, found.problem) == (True, "")
        process = await client(server.url, "device-plugin node.a")
        came = await told.get()
        assert isinstance(came, signals.Connected)
        assert (came.node, came.plugin) == ("node.a", "device-plugin")
        process.kill()
        async with asyncio.timeout(30):
            assert await told.get() == signals.Disconnected(
                node="node.a",
                plugin="device-plugin",
                server=came.server,
                client=came.client,
                reason="Client Closed",
            )
        await process.wait()

    play(tmp_path, story)


def test_a_server_that_ends_says_so_under_the_name_its_disconnects_bear(tmp_path: Path) -> None:
    async def story(
        server: nats.NatsServer,
        found: nats_connections.Connections,
        told: asyncio.Queue[nats_advisories.Told],
    ) -> None:
        process = await client(server.url, "device-plugin a")
        came = await told.get()
        assert isinstance(came, signals.Connected)
        await server.stop()
        assert await told.get() == signals.ServerEvent(server=came.server, what="shutdown")
        while found.is_flowing is not None:
            await asyncio.sleep(0.01)
        await server.start()
        again = await told.get()
        assert isinstance(again, signals.Connected)
        assert again.server != came.server
        process.send_signal(signal.SIGKILL)
        await process.wait()

    play(tmp_path, story)


def test_a_server_that_tells_nothing_is_noticed_and_said(tmp_path: Path) -> None:
    async def story(
        _: nats.NatsServer,
        found: nats_connections.Connections,
        told: asyncio.Queue[nats_advisories.Told],
    ) -> None:
        assert found.is_flowing is False
        assert found.problem.startswith("nats-server tells nothing of connections")
        assert told.empty()

    play(tmp_path, story, config=NO_ACCOUNTS)


def test_the_documented_configuration_is_the_one_that_is_run() -> None:
    def words(text: str) -> str:
        return re.sub(r"\s+", " ", text)

    text = words(DOCS.read_text("utf-8"))
    assert words(accounts_conf.EXPORTS) in text
    assert words(accounts_conf.IMPORTS) in text
