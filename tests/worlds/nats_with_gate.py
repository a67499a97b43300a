"""A nats-server, gates that authenticate its clients, and a stand-in for the API server."""

import asyncio
import contextlib
import json
import os
import re
import signal
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import orjson

from muster.cli import keyfiles
from muster.local import nats as local
from muster.local import processes
from muster.nats.auth import nkeys
from muster.service import probes
from tests.worlds import bus_subjects, token_issuer

ROOT = Path(__file__).resolve().parents[2]
_KEYS_AGE_S = 3600
"""The age of the keys: in practice, keys are rotated long after their creation."""


class Cluster:
    """A stand-in for an API server that publishes its keys; it can be stopped and restarted."""

    def __init__(self) -> None:
        self.url = ""
        self.keys = [token_issuer.jwk("k1", "RS256")]
        self.asked = 0
        self._port = 0
        self._stack = contextlib.AsyncExitStack()

    async def come(self) -> None:
        """Start; after a stop, at the same address as before."""
        routes = {
            "/openid/v1/jwks": self._show,
            "/.well-known/openid-configuration": lambda: (
                200,
                "application/json",
                json.dumps({"issuer": token_issuer.ISSUER}).encode(),
            ),
        }
        self.url = await self._stack.enter_async_context(
            probes.serve("127.0.0.1", self._port, ready=probes.always, more=routes)
        )
        self._port = int(self.url.rpartition(":")[2])

    async def go(self) -> None:
        """Stop."""
        await self._stack.aclose()

    def _show(self) -> probes.Answer:
        self.asked += 1
        return 200, "application/json", token_issuer.key_set(*self.keys)


class World:
    """A server and some gates, as an async context manager."""

    def __init__(self, where: Path, *, gates: int = 1, **settings: Any) -> None:
        self.where = where
        self.keys = where / "keys"
        self.cluster = Cluster()
        keyfiles.make(self.keys, at=time.time() - _KEYS_AGE_S)
        self.server = local.NatsServer(where / "nats", config=configured(self.keys, where))
        self.gates: list[processes.Process] = []
        self._count = gates
        self._settings = settings

    async def __aenter__(self) -> Self:
        """Start everything; if a part fails to start, end those that have started."""
        try:
            await self.cluster.come()
            await self.server.start()
            self.gates = [self._gate(number) for number in range(self._count)]
            await asyncio.gather(*(gate.start() for gate in self.gates))
            await self.open()
        except BaseException:
            await self.__aexit__(None, None, None)
            raise
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        """End everything."""
        await asyncio.gather(*(gate.end() for gate in self.gates))
        await self.server.stop()
        await self.cluster.go()

    async def open(self, *gates: processes.Process) -> None:
        """Wait until gates are ready."""
        async with asyncio.timeout(30):
            for gate in gates or self.gates:
                while await asyncio.to_thread(_status, f"{gate.addresses['http']}/readyz") != 200:
                    await asyncio.sleep(0.02)

    def reload(self) -> None:
        """Write the configuration again from the keys, and make the server reload it."""
        configured(self.keys, self.where)
        os.kill(self.server.pid, signal.SIGHUP)

    def plugin(
        self, token: str, **options: Any
    ) -> contextlib.AbstractAsyncContextManager[bus_subjects.Client]:
        """Connect with a token, as a plugin does."""
        prefix = {"inbox_prefix": "_INBOX.plugin_node-a"}
        return bus_subjects.client(self.server.url, token=token, **prefix | options)

    def holder(
        self, text: str, **options: Any
    ) -> contextlib.AbstractAsyncContextManager[bus_subjects.Client]:
        """Connect with credentials."""
        return holder(self.server, text, **options)

    def admin(self) -> contextlib.AbstractAsyncContextManager[bus_subjects.Client]:
        """Connect as a user with all rights."""
        return self.holder((self.keys / "admin.creds").read_text())

    async def counted(self) -> dict[str, int]:
        """Return how often the running gates gave each answer, without zeros."""
        total: dict[str, int] = {}
        for gate in self.gates:
            if gate.is_running:
                text = await asyncio.to_thread(_read, f"{gate.addresses['http']}/metrics")
                for outcome, count in re.findall(r'answers_total\{outcome="(\w+)"\} (\d+)', text):
                    total[outcome] = total.get(outcome, 0) + int(count)
        return {outcome: count for outcome, count in total.items() if count}

    def logged(self, event: str) -> Sequence[dict[str, Any]]:
        """Return the lines of this event in the gates' logs."""
        lines = [line for gate in self.gates for line in gate.log.read_bytes().splitlines()]
        return [entry for entry in map(orjson.loads, lines) if entry["event"] == event]

    def _gate(self, number: int) -> processes.Process:
        settings = {
            "signing": str(self.keys / "gate.json"),
            "bus": {"url": self.server.url},
            "keys": {
                "api": self.cluster.url,
                "refresh_s": 0.3,
                "cache": str(self.where / f"cache-{number}.json"),
            },
            **self._settings,
        }
        file = self.where / f"gate-{number}.yaml"
        file.write_text(json.dumps(settings))
        program = processes.Program(
            f"gate-{number}",
            "muster_gate",
            ("--config", str(file)),
            {"NATS_CREDS": str(self.keys / "gate.creds"), "NATS_TOKEN_FILE": ""},
        )
        return processes.Process(program, self.where / f"gate-{number}.log")


def holder(
    server: local.NatsServer, text: str, **options: Any
) -> contextlib.AbstractAsyncContextManager[bus_subjects.Client]:
    """Connect with credentials."""
    credentials = nkeys.read_creds(text)
    return bus_subjects.client(
        server.url,
        user_jwt_cb=credentials.jwt.encode,
        signature_cb=credentials.sign,
        inbox_prefix=f"_INBOX.{credentials.name}",
        **options,
    )


def configured(keys: Path, where: Path) -> Path:
    """Write the shipped configuration with these keys and without fixed ports."""
    text = (ROOT / "k8s/base/nats/nats.conf").read_text("utf-8")
    text = text.replace("http: 8222\n", "").replace("port: 4222\n", "")
    text = re.sub(r"(pid_file|  store_dir): .*\n", "", text)
    file = where / "shipped.conf"
    file.write_text(text.replace("include accounts.conf", (keys / "accounts.conf").read_text()))
    return file


def token(node: str = "node-a", key: str = "k1", **changed: Any) -> str:
    """Return a token that is valid now, except for `changed` claims."""
    return token_issuer.token(token_issuer.claims(node, at=time.time(), **changed), key)


def _status(url: str) -> int:
    try:
        with urllib.request.urlopen(url, timeout=30) as answer:  # noqa: S310  # ours
            return int(answer.status)
    except urllib.error.HTTPError as error:
        error.close()
        return error.code
    except OSError:
        return 0


def _read(url: str) -> str:
    with urllib.request.urlopen(url, timeout=30) as answer:  # noqa: S310  # ours
        text: str = answer.read().decode()
        return text
