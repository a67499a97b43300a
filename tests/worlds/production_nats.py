"""Three real nats-servers with production's configuration, and a gate for them."""

import asyncio
import contextlib
import json
import re
import time
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

from muster.cli import keyfiles
from muster.local import nats, processes
from tests.worlds import manifests, token_issuer

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
    """Return `count` different free ports; `nats.free_port` may return the same one again."""
    ports: set[int] = set()
    while len(ports) < count:
        ports.add(nats.free_port())
    return [*ports]


@contextlib.asynccontextmanager
async def three(where: Path) -> AsyncIterator[list[nats.NatsServer]]:
    # both ends of a route present this certificate
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
                before_exec=processes.die_with_parent(),
            )
            for number, port in enumerate(routes)
        ]
        # all at once, as the StatefulSet does: a single server never finds a majority
        await asyncio.gather(*(stack.enter_async_context(server) for server in servers))
        yield servers


@contextlib.asynccontextmanager
async def gate(where: Path, urls: str, **more: object) -> AsyncIterator[processes.Process]:
    """Run a gate that accepts tokens signed with one key; `more` are settings."""
    (where / "jwks.json").write_bytes(token_issuer.key_set(token_issuer.jwk("e1", "ES256")))
    settings = {
        "signing": f"{where}/gate.json",
        "bus": {"url": urls},
        "keys": {"file": f"{where}/jwks.json"},
        "tokens": {"issuer": token_issuer.ISSUER},
        **more,
    }
    (where / "gate.yaml").write_text(json.dumps(settings))
    credentials = {"NATS_CREDS": f"{where}/gate.creds"}
    program = processes.Program("g", "muster_gate", ("--config", f"{where}/gate.yaml"), credentials)
    process = processes.Process(program, where / "gate.log")
    await process.start()
    try:
        yield process
    finally:
        await process.end()
