"""Three real nats-servers with production's configuration: clustered, with durable streams."""

import asyncio
import contextlib
import ssl
import time
from datetime import UTC, datetime
from pathlib import Path

import pytest
from nats import errors

from muster import vocabulary
from muster.nats import bus, consumers, streams
from tests.worlds import bus_subjects, production_nats, token_issuer

ASSETS = [store.name for store in streams.STREAMS] + [
    f"KV_{store.name}" for store in streams.BUCKETS
]


async def replicas(ear: bus.Bus) -> list[int]:
    """Return the number of replicas of each stream, once all of them are current."""
    client = await ear.link.client()
    counts = []
    for name in ASSETS:
        while True:
            info = await client.jetstream().stream_info(name)
            peers = (info.cluster.replicas if info.cluster else None) or []
            count = info.config.num_replicas or 1
            if count == 1 + sum(peer.current or False for peer in peers):
                break
            await asyncio.sleep(0.1)
        counts.append(count)
    return counts


def test_streams_get_the_configured_replicas_keep_them_and_outlive_a_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("NATS_CA", str(tmp_path / "ca.crt"))
    monkeypatch.setenv("NATS_CREDS", str(tmp_path / "admin.creds"))

    async def story() -> None:
        async with asyncio.timeout(100), production_nats.three(tmp_path) as servers:
            addresses = [f"tls://127.0.0.1:{server.port}" for server in servers]
            urls = ",".join(addresses)

            def of(count: int) -> bus.Bus:
                return bus.Bus(
                    urls, producer="services/health", name="t", owner=True, replicas=count
                )

            async with of(1) as before:
                assert await replicas(before) == [1] * len(ASSETS)
            async with of(3) as owner:
                assert await replicas(owner) == [3] * len(ASSETS)
            async with of(1) as untold, production_nats.gate(tmp_path, urls):
                assert await replicas(untold) == [3] * len(ASSETS)
                await asyncio.gather(*(comes_in(address) for address in addresses))
                await servers[0].kill()
                event = vocabulary.WatchdogTicked(
                    node=vocabulary.FLEET, at=datetime.now(UTC), leader=1, holder="h", interval_s=10
                )
                assert await untold.publish(event)
                assert [
                    event_read.data
                    for event_read in await consumers.newest(
                        untold.link, streams.ALERTS, "muster.sys.>"
                    )
                ] == [event]
                await asyncio.gather(*(comes_in(address) for address in addresses[1:]))
                # the gate is connected to one of these servers, and reaches the other as well
                for number, address in enumerate(addresses[1:]):
                    async with plugin_at(address, f"node-{number}") as plugin:
                        with contextlib.suppress(errors.Error, OSError):
                            for _ in range(7_000):
                                await plugin.raw.publish(
                                    f"muster.heartbeat.node-{number}.device-plugin", b""
                                )
                        await bus_subjects.until(lambda: plugin.raw.is_closed)

    def plugin_at(
        address: str, node: str = "node-a"
    ) -> contextlib.AbstractAsyncContextManager[bus_subjects.Client]:
        token = token_issuer.token(token_issuer.claims(node, at=time.time()), "e1", "ES256")
        trusted = ssl.create_default_context(cafile=tmp_path / "ca.crt")
        return bus_subjects.client(address, token=token, tls=trusted)

    async def comes_in(address: str) -> None:
        """Connect with a token as soon as the gate admits it, whatever server the gate uses."""
        while True:
            with contextlib.suppress(OSError, TimeoutError, errors.Error):
                async with plugin_at(address) as plugin:
                    await plugin.raw.publish("muster.event.node-a.device-plugin.device.added", b"")
                    await plugin.raw.publish("muster.event.node-b.device-plugin.device.added", b"")
                    await plugin.flush()
                    await bus_subjects.until(lambda: len(plugin.refused) == 1)
                    return

    asyncio.run(story())
    # asyncio would log a line for each TLS connection that ends
    assert "eof_received" not in caplog.text
