"""Three real nats-servers with production's configuration: they find one another, streams last."""

import asyncio
import contextlib
import re
import shutil
import subprocess
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from pathlib import Path

import pytest

from muster import bus, streams, vocabulary
from muster.local import nats
from tests import deployed

ASSETS = [one.name for one in streams.STREAMS] + [f"KV_{one.name}" for one in streams.BUCKETS]
CONFIGURATION = deployed.ROOT / "k8s/overlays/production/nats.conf"
BASE = deployed.ROOT / "k8s/base/nats"


def certify(where: Path) -> None:
    """Make what the Secret muster-nats-tls holds; a route's two ends both show it."""
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("no openssl to make a certificate with")
    command = "req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes"
    command += " -subj /CN=muster-nats -keyout tls.key -out tls.crt"
    named = "subjectAltName=IP:127.0.0.1,DNS:localhost"
    usage = "extendedKeyUsage=serverAuth,clientAuth"
    subprocess.run(
        [
            openssl,
            *command.split(),
            "-addext",
            named,
            "-addext",
            usage,
            "-keyout",
            "tls.key",
            "-out",
            "tls.crt",
        ],
        cwd=where,
        capture_output=True,
        check=True,
    )
    shutil.copy(where / "tls.crt", where / "ca.crt")


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
    accounts = (BASE / "accounts.conf").read_text("utf-8")
    passwords = {f"{word}: secret\n" for word in re.findall(r"\$(NATS_PASSWORD_\w+)", accounts)}
    text = text.replace("include base.conf", base.replace("include accounts.conf", accounts))
    file = where / f"{name}.conf"
    file.write_text("".join([f"POD_NAME: {name}\n", *sorted(passwords), text]))
    return file


@contextlib.asynccontextmanager
async def three(where: Path) -> AsyncIterator[list[nats.NatsServer]]:
    certify(where)
    routes = [nats.free_port() for _ in range(3)]
    async with contextlib.AsyncExitStack() as stack:
        servers = [
            nats.NatsServer(
                where / f"n{number}",
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


def test_streams_get_the_replicas_they_are_told_keep_them_and_outlive_a_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NATS_CA", str(tmp_path / "ca.crt"))

    async def story() -> None:
        async with asyncio.timeout(50), three(tmp_path) as servers:
            urls = ",".join(f"tls://admin:secret@127.0.0.1:{one.port}" for one in servers)

            def of(count: int) -> bus.Bus:
                return bus.Bus(
                    urls, producer="services/health", name="t", owner=True, replicas=count
                )

            async with of(1) as before:
                assert await replicas(before) == [1] * len(ASSETS)
            async with of(3) as told:
                assert await replicas(told) == [3] * len(ASSETS)
            async with of(1) as untold:
                assert await replicas(untold) == [3] * len(ASSETS)
                await servers[0].kill()
                event = vocabulary.WatchdogTicked(
                    node=vocabulary.FLEET, at=datetime.now(UTC), leader=1, holder="h", interval_s=10
                )
                assert await untold.publish(event)
                assert [
                    one.data for one in await untold.newest(streams.ALERTS, "muster.sys.>")
                ] == [event]

    asyncio.run(story())
