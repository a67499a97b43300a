"""A real nats-server with the configuration of compose.yaml, and its users."""

import asyncio
import contextlib
import re
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path

from muster.local import nats as local
from muster.nats import bus
from muster.nats.auth import permissions
from tests.worlds import bus_subjects

ROOT = Path(__file__).resolve().parents[2]


def configuration(where: Path) -> Path:
    """Write the configuration of compose.yaml with known passwords and without fixed ports."""
    text = (ROOT / "k8s/base/nats/nats.conf").read_text("utf-8")
    text = text.replace("http: 8222\n", "").replace("port: 4222\n", "")
    text = re.sub(r"(pid_file|  store_dir): .*\n", "", text)
    accounts = (ROOT / "compose/accounts.conf").read_text("utf-8")
    passwords = "".join(
        f"{name}: secret\n" for name in sorted(set(re.findall(r"\$(NATS_\w+)", accounts)))
    )
    where.mkdir(parents=True, exist_ok=True)
    file = where / "shipped.conf"
    file.write_text(passwords + text.replace("include accounts.conf", accounts))
    return file


@contextlib.asynccontextmanager
async def client(server: local.NatsServer, user: str) -> AsyncIterator[bus_subjects.Client]:
    prefix = permissions.inbox(user)
    async with bus_subjects.client(address(server, user), inbox_prefix=prefix) as connected:
        yield connected


def address(server: local.NatsServer, user: str) -> str:
    return server.url.replace("//", f"//{user}:secret@")


def run(where: Path, story: Callable[[local.NatsServer], Coroutine[object, object, None]]) -> None:
    async def whole() -> None:
        async with asyncio.timeout(100):
            async with local.NatsServer(where / "nats", config=configuration(where)) as server:
                async with bus.Bus(
                    address(server, "health"), producer="t", name="t", owner=True
                ) as owner:
                    await owner.link.client()
                await story(server)

    asyncio.run(whole())
