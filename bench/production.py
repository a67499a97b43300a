"""Adapter for processes: runs muster as in k8s/overlays/production here, with many honest nodes.

Real: three nats-servers with TLS, one gate, and health, labeler and notifier with the shipped
settings. Simulated: the Kubernetes API and the plugins: one process opens a connection for each
node, with the node's token (`bench.connections`).
"""

import asyncio
import contextlib
import os
import re
import shutil
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from http import HTTPStatus
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

import aiohttp
import orjson
import yaml

from bench import connections
from muster.local import nats, processes, stack
from tests.worlds import manifests, production_nats, token_issuer

SERVICES: Final = ("health", "labeler", "notifier")
HOSTILE: Final = "hostile.bench.example"
_SETTINGS: Final = manifests.ROOT / "k8s/base/settings"
_NAMESPACE: Final = "muster"
_LABELS: Final = {
    "app": "muster-plugin",
    "controller-revision-hash": "r1",
    "pod-template-generation": "1",
}
_LEASES: Final = "/apis/coordination.k8s.io/v1/namespaces/kube-node-lease/leases"
_AT_ONCE: Final = 32
_MERGE: Final = {"Content-Type": "application/merge-patch+json"}
_HEALTHY_S: Final = 120.0
_GET_S: Final = 5.0


class Program:
    """A process that reads commands from stdin, and answers with JSON lines."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self._asking = asyncio.Lock()

    async def ask(self, words: str, event: str) -> dict[str, Any]:
        """Send a command, and return its answer."""
        async with self._asking:
            self.command(words)
            return await self.answer(event)

    def command(self, words: str) -> None:
        """Send a command."""
        assert self.process.stdin is not None
        self.process.stdin.write(f"{words}\n".encode())

    async def answer(self, event: str) -> dict[str, Any]:
        """Return the process's next message of this kind."""
        assert self.process.stdout is not None
        while line := await self.process.stdout.readline():
            message: dict[str, Any] = orjson.loads(line)
            if message["event"] == event:
                return message
        raise RuntimeError("a program of the bench ended")

    async def end(self) -> None:
        """End the process."""
        if self.process.returncode is None:
            self.process.kill()
            await self.process.wait()


class World:
    """The whole environment; an async context manager."""

    def __init__(self, *, nodes: int, replicas: int, events_s: float, names: Sequence[str]) -> None:
        self.directory = Path()
        self.servers: list[nats.NatsServer] = []
        self.services: dict[str, list[processes.Process]] = {}
        self.urls = ""
        self._nodes = nodes
        self._replicas = replicas
        self._events_s = events_s
        self._names = names
        self._open = contextlib.AsyncExitStack()

    async def __aenter__(self) -> Self:
        """Start all processes, and return when health reports every plugin healthy."""
        async with contextlib.AsyncExitStack() as exits:
            self.directory = Path(tempfile.mkdtemp(prefix="mu-"))
            exits.callback(shutil.rmtree, self.directory, ignore_errors=True)
            where = self.directory / "keys"
            where.mkdir(mode=0o700)
            self.servers = await exits.enter_async_context(production_nats.three(where))
            self.urls = ",".join(f"tls://127.0.0.1:{server.port}" for server in self.servers)
            self._environment = {"NATS_CA": str(where / "ca.crt"), "NATS_TOKEN_FILE": ""}
            exits.enter_context(_set(self._environment))
            self.keys = where
            names = [HOSTILE, *(connections.name_of(number) for number in range(self._nodes))]
            self.tokens = {name: _token(name) for name in names}
            (self.directory / "tokens.json").write_bytes(orjson.dumps(self.tokens))
            gate = await exits.enter_async_context(
                production_nats.gate(where, self.urls, plugins=self._names)
            )
            self.services = {"gate": [gate]}
            await self._kubernetes(exits)
            for name in SERVICES:
                self.services[name] = [
                    await self._service(exits, name, number) for number in range(self._replicas)
                ]
            await asyncio.gather(*(self.until_ready(name) for name in self.services))
            self.honest = await self.program(
                "bench.connections",
                *("--connections", str(self._nodes), "--nodes", str(self._nodes)),
                *("--events", str(self._events_s)),
            )
            exits.push_async_callback(self.honest.end)
            await self.honest.answer("listening")
            await self._until_healthy()
            self._open = exits.pop_all()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        """End all processes."""
        await self._open.__aexit__(kind, error, at)

    async def program(self, module: str, *words: str) -> Program:
        """Start a program of the benchmarks."""
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", module, "--url", self.urls),
            *("--tokens", str(self.directory / "tokens.json"), *words),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            limit=1 << 26,
            env=os.environ | self._environment,
            preexec_fn=processes.die_with_parent(),
        )
        return Program(process)

    def pids(self) -> dict[str, list[int]]:
        """Return the process ids of each service and of nats-server."""
        return {
            **{name: [p.pid for p in held if p.is_running] for name, held in self.services.items()},
            "nats-server": [server.pid for server in self.servers],
        }

    async def metrics(self, service: str) -> dict[str, float]:
        """Return the sums of the metrics of all replicas of a service that answer in time."""
        total: dict[str, float] = {}
        for process in self.services[service]:
            _, text = await get(process, "/metrics")
            for name, value in re.findall(r"^(muster_\S+) (\S+)$", text, re.MULTILINE):
                total[name] = total.get(name, 0.0) + float(value)
        return total

    async def until_ready(self, service: str) -> None:
        """Wait until all replicas of a service are ready."""
        for process in self.services[service]:
            while (await get(process, "/readyz"))[0] != HTTPStatus.OK:  # noqa: ASYNC110
                await asyncio.sleep(0.05)

    async def _until_healthy(self) -> None:
        well = 'muster_health_verdicts{verdict="HEALTHY"}'
        wanted = self._nodes * self._replicas
        async with asyncio.timeout(_HEALTHY_S):
            while (await self.metrics("health")).get(well, 0) < wanted:  # noqa: ASYNC110
                await asyncio.sleep(0.5)

    async def _service(
        self, exits: contextlib.AsyncExitStack, name: str, number: int
    ) -> processes.Process:
        """Start one replica with the shipped settings."""
        shipped: dict[str, Any] = yaml.safe_load((_SETTINGS / f"{name}.yaml").read_text())
        where = {"kubeconfig": str(self.directory / "kubeconfig")}
        shipped["bus"] = {"url": self.urls}
        match name:
            case "health":
                shipped["cluster"] |= where
                shipped["streams"] = {"replicas": len(self.servers)}
            case "labeler":
                shipped["kubernetes"] = {**shipped.get("kubernetes", {}), **where}
        file = self.directory / f"{name}-{number}.json"
        file.write_bytes(orjson.dumps(shipped))
        program = stack.service(name, str(file))
        rights = {"NATS_CREDS": str(self.keys / f"{name}.creds"), **self._environment}
        process = processes.Process(
            processes.Program(program.name, program.module, program.arguments, rights),
            self.directory / f"{name}-{number}.log",
        )
        exits.push_async_callback(process.end)
        await process.start()
        return process

    async def _kubernetes(self, exits: contextlib.AsyncExitStack) -> None:
        """Start the stand-in with all nodes, their leases, and a plugin's pod on each."""
        program = stack.kubernetes(str(self.directory / "kubeconfig"))
        api = processes.Process(program, self.directory / "kubernetes.log")
        exits.push_async_callback(api.end)
        await api.start()
        limit = aiohttp.TCPConnector(limit=_AT_ONCE)
        self._http = await exits.enter_async_context(
            aiohttp.ClientSession(api.addresses["http"], connector=limit, raise_for_status=True)
        )
        daemonsets = f"/apis/apps/v1/namespaces/{_NAMESPACE}/daemonsets"
        await _create(self._http, daemonsets, _daemonset())
        await asyncio.gather(*(_create_node(self._http, name) for name in self.tokens))

    async def renew(self, node: str) -> None:
        """Renew a node's lease, as its kubelet does."""
        body = orjson.dumps({"spec": {"renewTime": _now()}})
        async with self._http.patch(f"{_LEASES}/{node}", data=body, headers=_MERGE):
            pass


async def get(process: processes.Process, path: str) -> tuple[int, str]:
    """Return status and body of a service's answer; status 0 means no answer in time."""

    def ask() -> tuple[int, str]:
        try:
            url = process.addresses["http"] + path
            with urllib.request.urlopen(url, timeout=_GET_S) as answer:  # noqa: S310  # ours
                return int(answer.status), answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()
        except OSError as error:
            return 0, str(error)

    return await asyncio.to_thread(ask)


@contextlib.contextmanager
def _set(variables: dict[str, str]) -> Iterator[None]:
    """Set environment variables until the block ends."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


async def _create(http: aiohttp.ClientSession, path: str, body: dict[str, Any]) -> None:
    async with http.post(path, data=orjson.dumps(body)):
        pass


async def _create_node(http: aiohttp.ClientSession, name: str) -> None:
    offered = {"cpu": "8", connections.GPU: "8"}
    ready = {"type": "Ready", "status": "True"}
    status = {"capacity": offered, "allocatable": offered, "conditions": [ready]}
    await _create(http, "/api/v1/nodes", {"metadata": {"name": name}, "status": status})
    spec = {"holderIdentity": name, "renewTime": _now()}
    await _create(http, _LEASES, {"metadata": {"name": name}, "spec": spec})
    pods = f"/api/v1/namespaces/{_NAMESPACE}/pods"
    pod = {
        "metadata": {"name": f"muster-plugin-{name}", "labels": _LABELS},
        "spec": {"nodeName": name, "containers": [{"name": "plugin", "image": "muster"}]},
    }
    await _create(http, pods, pod)
    running = {
        "phase": "Running",
        "conditions": [{"type": "Ready", "status": "True"}],
        "containerStatuses": [
            {"name": "plugin", "restartCount": 0, "ready": True, "state": {"running": {}}}
        ],
    }
    path = f"{pods}/muster-plugin-{name}/status"
    async with http.patch(path, data=orjson.dumps({"status": running}), headers=_MERGE):
        pass


def _now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def _token(node: str) -> str:
    """Return a token like the one that the cluster issues to a node's plugin."""
    return token_issuer.token(token_issuer.claims(node, at=time.time()), "e1", "ES256")


def _daemonset() -> dict[str, Any]:
    chosen = {"app": _LABELS["app"]}
    return {
        "metadata": {
            "name": "muster-plugin",
            "annotations": {"deprecated.daemonset.template.generation": "1"},
        },
        "spec": {
            "selector": {"matchLabels": chosen},
            "template": {"metadata": {"labels": chosen}, "spec": {}},
        },
    }
