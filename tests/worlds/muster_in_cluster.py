"""A simulated cluster with muster: an API stand-in that forwards ports to real servers."""

import asyncio
import base64
import contextlib
import io
import os
import tarfile
import time
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Final

import orjson
import prometheus_client
import pytest

from muster.cli import __main__ as commands
from muster.cli import keyfiles
from muster.kubernetes import api as kubernetes_api
from muster.local import httpd, kubernetes, nats
from muster.nats import bus
from muster.nats.auth import accounts
from muster.service import probes
from tests.worlds import manifests, muster_command, nats_with_passwords

NAMESPACE: Final = "muster"
USER: Final = "alice"
UNSET: Final = {"NATS_URL", "NATS_CREDS", "NATS_CA", "MUSTER_HEALTH_URL", "http_proxy"}
PODS: Final = f"/api/v1/namespaces/{NAMESPACE}/pods"
_LINE_MIN: Final = 16
"""Shorter lines, such as brackets, are not compared."""
_ANY: Final = "muster.example"
"""A name in the certificate that is no address of this machine."""


@dataclass
class World:
    """A running API stand-in, a client of it, and the kubeconfig of a user with all rights."""

    stand_in: kubernetes.KubernetesApi
    api: kubernetes_api.Api
    kubeconfig: Path
    environment: dict[str, str] = field(default_factory=dict)

    def deny(self, verb: str, resource: str) -> None:
        """Deny the user a verb on a resource."""
        self.stand_in.users.deny(USER, verb, resource)

    async def create(self, kind: str, tree: Mapping[str, Any]) -> None:
        """Create an object in muster's namespace."""
        path = f"/api/v1/namespaces/{NAMESPACE}/{kind}"
        answer = await self.api.request("POST", path, body=tree, timeout_s=10)
        assert answer.is_ok, answer.problem

    async def secret(self, name: str, key: str, value: str) -> None:
        """Create a Secret."""
        data = {key: base64.b64encode(value.encode()).decode()}
        await self.create(
            "secrets",
            {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": name}, "data": data},
        )

    async def pod(
        self, part: str, number: int, port: int, url: str, *, overlay: str = "minimal"
    ) -> None:
        """Create a ready pod of a part of muster, with its port forwarded to the server `url`."""
        name = f"{part}-{number}"
        spec = manifests.pods(overlay)[part]
        labels = {"app.kubernetes.io/name": part, "app.kubernetes.io/part-of": "muster"}
        pod = {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": name, "labels": labels},
            "spec": {**spec, "subdomain": _ANY},
        }
        await self.create("pods", pod)
        status = {"phase": "Running", "conditions": [{"type": "Ready", "status": "True"}]}
        await self.status(name, status)
        host, _, local = url.rpartition("//")[2].rpartition(":")
        self.stand_in.ports[name, port] = httpd.Address(host, int(local))

    async def status(self, pod: str, status: Mapping[str, Any]) -> None:
        """Change the status of a pod."""
        answer = await self.api.request(
            "PATCH", f"{PODS}/{pod}/status", body={"status": status},
            content=kubernetes_api.MERGE, timeout_s=10,
        )  # fmt: skip
        assert answer.is_ok, answer.problem


@contextlib.asynccontextmanager
async def empty(where: Path) -> AsyncIterator[World]:
    """Run a cluster without muster."""
    where.mkdir(exist_ok=True)
    config, admin = where / "kubeconfig", where / "admin"
    async with kubernetes.KubernetesApi(namespaces=(NAMESPACE,)) as stand_in:
        stand_in.write_kubeconfig(config, token=USER)
        stand_in.write_kubeconfig(admin)
        async with await kubernetes_api.find(kubeconfig=str(admin), context=None) as api:
            yield World(stand_in, api, config)


@contextlib.asynccontextmanager
async def health(
    world: World, number: int, *, leader: str = "", firing: Sequence[Mapping[str, object]] = ()
) -> AsyncIterator[None]:
    """Run a pod of health that serves a fixed state; it leads unless `leader` is another's name."""
    service = {"leads": None, "leader": leader} if leader else {"leads": 7}
    plugin = {"node": "node-a", "plugin": "device-plugin", "verdict": "HEALTHY", "alerts": firing}
    state = {"plugins": [plugin], "fleet": {}, "service": service}
    body = orjson.dumps(state)
    async with probes.serve(
        "127.0.0.1", 0,
        ready=probes.always,
        registry=prometheus_client.CollectorRegistry(),
        more={"/state": lambda: (200, "application/json", body)},
    ) as url:  # fmt: skip
        await world.pod("muster-health", number, 8080, url)
        yield


async def notifier_settings(world: World, text: str) -> str:
    """Create the ConfigMap with the notifier's settings; return its name."""
    volumes: list[dict[str, Any]] = manifests.pods("minimal")["muster-notifier"]["volumes"]
    (name,) = (str(v["configMap"]["name"]) for v in volumes if v["name"] == "configuration")
    tree = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": name}}
    await world.create("configmaps", {**tree, "data": {"notifier.yaml": text}})
    return name


@contextlib.asynccontextmanager
async def passwords(world: World, where: Path) -> AsyncIterator[str]:
    """Run NATS as in `minimal`, with Secrets for reader and admin; yield a URL for admin."""
    config = nats_with_passwords.configuration(where)
    async with nats.NatsServer(where / "server", config=config) as server:
        await world.pod("muster-nats", 0, 4222, server.url)
        for user in ("reader", "admin"):
            await world.secret(f"muster-nats-{user}", "password", nats_with_passwords.PASSWORD)
        yield server.url.replace("//", f"//admin:{nats_with_passwords.PASSWORD}@")


@contextlib.asynccontextmanager
async def credentials(world: World, where: Path) -> AsyncIterator[dict[str, str]]:
    """Run NATS as in `production`, with TLS; yield the credentials of reader and admin."""
    keyfiles.make(where, at=time.time())
    at, lasts = datetime.now(UTC), timedelta(days=1)
    keyfiles.make_certificates(where, [_ANY], at=at, lasts=lasts)
    text = (where / "accounts.conf").read_text("utf-8")
    tls = f'tls {{ cert_file: "{where}/tls.crt", key_file: "{where}/tls.key" }}\n'
    config = where / "nats.conf"
    config.write_text(tls + text)
    async with nats.NatsServer(where / "server", config=config) as server:
        await world.pod("muster-nats", 0, 4222, server.url, overlay="production")
        authority = {"ca.crt": (where / "ca.crt").read_text("utf-8")}
        tree = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "muster-nats-ca"}}
        await world.create("configmaps", {**tree, "data": authority})
        reader = keyfiles.user(where, accounts.Role.READER, name="reader_x", at=time.time())
        yield {"reader": reader, "admin": (where / "admin.creds").read_text("utf-8")}


@contextlib.asynccontextmanager
async def connected(url: str) -> AsyncIterator[bus.Bus]:
    """Connect, and create the streams as health does; yield the connection."""
    async with bus.Bus(url, producer="test", name="test", owner=True) as link:
        await link.link.client()
        yield link


def environment(world: World, **more: str) -> dict[str, str]:
    """Return the environment of a command that reaches this cluster."""
    inherited = {key: value for key, value in os.environ.items() if key not in UNSET}
    return {**inherited, "KUBECONFIG": str(world.kubeconfig), **more}


async def muster(world: World, *arguments: str, **more: str) -> tuple[int, str, list[str]]:
    """Run a command; return its exit code, standard output, and lines of standard error."""
    code, out, errors = await asyncio.to_thread(
        muster_command.muster, *arguments, environment=environment(world, **more)
    )
    return code, out, errors.splitlines()


def rights(world: World, command: str, nats: str = "") -> str:
    """Return the line in which a command reports whose rights it used."""
    where = f"context muster ({world.stand_in.url}), namespace muster; as alice"
    return f"muster {command}: {where}{'; NATS as ' if nats else ''}{nats}"


async def command(world: World, *arguments: str) -> tuple[int, str, list[str]]:
    """Run a command in a thread; return what `muster` returns."""
    out, errors = io.StringIO(), io.StringIO()
    with (
        pytest.MonkeyPatch.context() as patch,
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(errors),
    ):
        patch.setenv("KUBECONFIG", str(world.kubeconfig))
        code = await asyncio.to_thread(commands.call, arguments)
    return code, out.getvalue(), errors.getvalue().splitlines()


def unpacked(file: Path) -> dict[str, str]:
    """Return the files of an archive that `muster doctor --bundle` wrote."""
    with tarfile.open(file) as archive:
        return {
            entry.name: content.read().decode()
            for entry in archive
            if (content := archive.extractfile(entry)) is not None
        }


def leaked(content: Mapping[str, str], secrets: Iterable[Mapping[str, Any]]) -> list[str]:
    """Return which files contain values of Secrets, or long lines of them, and which values."""
    words: dict[str, str] = {}
    for secret in secrets:
        for key, encoded in secret.get("data", {}).items():
            value = base64.b64decode(encoded).decode("utf-8", "replace")
            # the first and last lines of keys and certificates are not secret
            lines = [
                line
                for line in value.splitlines()
                if len(line) >= _LINE_MIN and not line.startswith("---")
            ]
            name = f"{secret['metadata']['name']} {key}"
            words |= dict.fromkeys(filter(None, (encoded, value.strip(), *lines)), name)
    return sorted(
        {
            f"{file}: {name}"
            for file, text in content.items()
            for word, name in words.items()
            if word in file + text
        }
    )
