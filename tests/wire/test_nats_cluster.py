"""Three real nats-servers with production's configuration: they find one another, streams last."""

import asyncio
import contextlib
import json
import re
import socket
import ssl
import time
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from nats import errors

from muster import vocabulary
from muster.cli import keyfiles
from muster.local import nats, processes
from muster.nats import bus, consumers, streams
from tests.worlds import bus_subjects, manifests, token_issuer

ASSETS = [store.name for store in streams.STREAMS] + [
    f"KV_{store.name}" for store in streams.BUCKETS
]
CONFIGURATION = manifests.ROOT / "k8s/overlays/production/nats.conf"
BASE = manifests.ROOT / "k8s/base/nats"


def configured(where: Path, *, name: str, port: int, others: list[int]) -> Path:
    """Write production's configuration for one of three servers on this machine."""
    text = CONFIGURATION.read_text("utf-8")
    text = text.replace("/etc/nats-tls", str(where)).replace("port: 6222", f"port: {port}")
    routes = iter(others)
    text = re.sub(
        r"nats://muster-nats-\d\.muster-nats:6222",
        lambda _: f"nats://127.0.0.1:{next(routes)}",
        text,
    )
    base = (BASE / "nats.conf").read_text("utf-8")
    base = re.sub(r"(port|http|pid_file|  store_dir): .*\n", "", base)
    accounts = (where / "accounts.conf").read_text("utf-8")
    text = text.replace("include base.conf", base.replace("include accounts.conf", accounts))
    file = where / f"{name}.conf"
    file.write_text(f"POD_NAME: {name}\n{text}")
    return file


def free_ports(count: int) -> list[int]:
    """Return as many ports, all different: one asked for after another may be the same."""
    with contextlib.ExitStack() as stack:
        probes = [stack.enter_context(socket.socket()) for _ in range(count)]
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [probe.getsockname()[1] for probe in probes]


@contextlib.asynccontextmanager
async def three(where: Path) -> AsyncIterator[list[nats.NatsServer]]:
    # a route's two ends both show the certificate
    keyfiles.make_certificates(where, ["127.0.0.1"], at=datetime.now(UTC), lasts=timedelta(days=1))
    keyfiles.make(where, at=time.time())
    ports = free_ports(6)
    routes = ports[3:]
    async with contextlib.AsyncExitStack() as stack:
        servers = [
            nats.NatsServer(
                where / f"n{number}",
                port=ports[number],
                config=configured(where, name=f"n{number}", port=port, others=routes),
            )
            for number, port in enumerate(routes)
        ]
        # all at once, as the StatefulSet does: one alone never finds a majority
        await asyncio.gather(*(stack.enter_async_context(server) for server in servers))
        yield servers


async def replicas(ear: bus.Bus) -> list[int]:
    """Return how many keep each stream, once all that should do."""
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


@contextlib.asynccontextmanager
async def gate(where: Path, urls: str) -> AsyncIterator[None]:
    """Run a gate that believes the tokens of one key."""
    (where / "jwks.json").write_bytes(token_issuer.key_set(token_issuer.jwk("e1", "ES256")))
    settings = {
        "signing": f"{where}/gate.json",
        "bus": {"url": urls},
        "keys": {"file": f"{where}/jwks.json"},
        "tokens": {"issuer": token_issuer.ISSUER},
    }
    (where / "gate.yaml").write_text(json.dumps(settings))
    credentials = {"NATS_CREDS": f"{where}/gate.creds"}
    program = processes.Program("g", "muster_gate", ("--config", f"{where}/gate.yaml"), credentials)
    process = processes.Process(program, where / "gate.log")
    await process.start()
    try:
        yield
    finally:
        await process.end()


def test_streams_get_the_configured_replicas_keep_them_and_outlive_a_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("NATS_CA", str(tmp_path / "ca.crt"))
    monkeypatch.setenv("NATS_CREDS", str(tmp_path / "admin.creds"))

    async def story() -> None:
        async with asyncio.timeout(100), three(tmp_path) as servers:
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
            async with of(1) as untold, gate(tmp_path, urls):
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

    async def comes_in(address: str) -> None:
        """Connect with a token, wherever the gate is."""
        token = token_issuer.token(token_issuer.claims("node-a", at=time.time()), "e1", "ES256")
        trusted = ssl.create_default_context(cafile=tmp_path / "ca.crt")
        while True:
            with contextlib.suppress(OSError, TimeoutError, errors.Error):
                async with bus_subjects.client(address, token=token, tls=trusted) as plugin:
                    await plugin.raw.publish("muster.event.node-a.p.x", b"")
                    await plugin.raw.publish("muster.event.node-b.p.x", b"")
                    await plugin.flush()
                    await bus_subjects.until(lambda: len(plugin.refused) == 1)
                    return

    asyncio.run(story())
    # asyncio would log a line for each TLS connection that ends
    assert "eof_received" not in caplog.text
