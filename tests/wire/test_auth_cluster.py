"""`muster auth cluster` creates the Secrets that an installation in a cluster lacks."""

import asyncio
import base64
import contextlib
import os
import re
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

import msgspec
import orjson
import pytest

from muster import vocabulary
from muster.cli import cluster_keys
from muster.kubernetes import api as kubernetes_api
from muster.local import kubernetes, nats
from muster.nats import bus
from muster.nats.auth import accounts, cluster_secrets, nkeys
from muster.nats.auth.cluster_secrets import Kind, Part
from tests.worlds import nats_with_gate

USER: Final = "keys"
# the services' image has no libraries of the command line
JOB: Final = """
import runpy, sys
sys.modules.update(cyclopts=None, rich=None)
runpy.run_module("muster.cli.cluster_keys", run_name="__main__")
"""
WANTED: Final = cluster_secrets.Wanted("muster")
KEYS: Final = WANTED.parts(production=True)
PATHS: Final = {Kind.SECRET: "secrets", Kind.CONFIG_MAP: "configmaps"}


@dataclass
class World:
    """A stand-in for the API, its administrator, and a kubeconfig with the rights of the Job."""

    stand_in: kubernetes.KubernetesApi
    api: kubernetes_api.Api
    kubeconfig: Path

    async def run(self, *, production: bool = True) -> list[str]:
        """Do the work of the command in this process; return the lines that it would print."""
        of = cluster_keys.Installation(name="muster", namespace="muster", production=production)
        async with await kubernetes_api.find(kubeconfig=str(self.kubeconfig), context=None) as api:
            return [line async for line in cluster_keys.complete(api, of)]

    async def command(self, *words: str) -> tuple[int, list[str], str]:
        """Run Python with these arguments; return exit code, lines of stdout, and stderr."""
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, *words),
            env={**os.environ, "KUBECONFIG": str(self.kubeconfig)},
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip
        out, errors = await process.communicate()
        assert process.returncode is not None
        return process.returncode, out.decode().splitlines(), errors.decode()

    async def made(self) -> dict[str, Any]:
        """Return all Secrets and ConfigMaps by kind and name."""
        objects = {}
        for kind, plural in PATHS.items():
            path = f"/api/v1/namespaces/muster/{plural}"
            answer = await self.api.request("GET", path, timeout_s=10)
            for item in orjson.loads(answer.body)["items"]:
                objects[f"{kind} {item['metadata']['name']}"] = item
        return objects

    async def remove(self, *parts: Part) -> None:
        for part in parts:
            answer = await self.api.request("DELETE", _path(part), timeout_s=10)
            assert answer.is_ok, answer.problem

    async def change(self, part: Part, body: object) -> None:
        answer = await self.api.request(
            "PATCH", _path(part), body=body, content=kubernetes_api.MERGE, timeout_s=10
        )
        assert answer.is_ok, answer.problem


def _path(part: Part) -> str:
    return f"/api/v1/namespaces/muster/{PATHS[part.kind]}/{part.name}"


@contextlib.asynccontextmanager
async def cluster(where: Path) -> AsyncIterator[World]:
    async with kubernetes.KubernetesApi(namespaces=("muster",)) as stand_in:
        stand_in.write_kubeconfig(where / "kubeconfig", token=USER)
        stand_in.write_kubeconfig(where / "admin")
        # the Job's Role does not have these rights
        for verb in ("list", "watch", "update", "delete"):
            for plural in PATHS.values():
                stand_in.users.deny(USER, verb, plural)
        admin = await kubernetes_api.find(kubeconfig=str(where / "admin"), context=None)
        async with admin as api:
            yield World(stand_in, api, where / "kubeconfig")


def play(where: Path, story: Callable[[World], Coroutine[Any, Any, None]]) -> None:
    async def limited() -> None:
        async with asyncio.timeout(100), cluster(where) as world:
            await story(world)

    asyncio.run(limited())


def contents(objects: dict[str, Any]) -> dict[str, Any]:
    return {name: item["data"] for name, item in objects.items()}


def test_passwords_are_made_once(tmp_path: Path) -> None:
    async def story(world: World) -> None:
        code, lines, errors = await world.command("-c", JOB, "--namespace", "muster")
        assert (code, errors) == (0, "")
        assert lines == [f"created: {part}" for part in WANTED.passwords]
        first = await world.made()
        passwords = {base64.b64decode(item["data"]["password"]) for item in first.values()}
        assert len(passwords) == len(WANTED.passwords)
        assert all(re.fullmatch(rb"p[0-9a-f]{48}", password) for password in passwords)
        labels = {"app.kubernetes.io/name": "muster-keys", "app.kubernetes.io/part-of": "muster"}
        assert all(item["metadata"]["labels"] == labels for item in first.values())
        assert await world.run(production=False) == []
        await world.remove(WANTED.passwords[2])
        assert await world.run(production=False) == [f"created: {WANTED.passwords[2]}"]
        again = contents(await world.made())
        changed = {name for name, data in contents(first).items() if again[name] != data}
        assert changed == {str(WANTED.passwords[2])}

    play(tmp_path, story)


def test_several_jobs_at_once_make_one_set_of_keys_that_nats_accepts(tmp_path: Path) -> None:
    async def story(world: World) -> None:
        runs = await asyncio.gather(*(world.run() for _ in range(3)))
        created = [line for lines in runs for line in lines]
        assert sorted(created) == sorted(f"created: {part}" for part in KEYS)
        first = await world.made()
        assert set(first) == {str(part) for part in KEYS}
        # some of the objects are lost
        lost = (WANTED.needed[3], WANTED.certificate, *WANTED.for_people)
        await world.remove(*lost)
        assert sorted(await world.run()) == sorted(f"created: {part}" for part in lost)
        made = await world.made()
        kept = {str(part) for part in KEYS if part not in lost}
        assert {name for name in kept if made[name] != first[name]} == set()
        await _services_connect(tmp_path, contents(made))

    play(tmp_path, story)


async def _services_connect(where: Path, data: dict[str, Any]) -> None:
    """Let each service and a reader connect with the credentials that were made for it."""

    def put(part: Part, key: str, file: str) -> Path:
        raw = data[str(part)][key]
        text = raw if part.kind is Kind.CONFIG_MAP else base64.b64decode(raw).decode()
        (where / file).write_text(text)
        return where / file

    put(WANTED.accounts_conf, "accounts.conf", "accounts.conf")
    put(WANTED.trust, "ca.crt", "ca.crt")
    certificate = put(WANTED.certificate, "tls.crt", "tls.crt")
    key = put(WANTED.certificate, "tls.key", "tls.key")
    config = nats_with_gate.configured(where, where)
    tls = f'tls {{ cert_file: "{certificate}", key_file: "{key}" }}\n'
    config.write_text(tls + config.read_text())
    parts = [*WANTED.needed[2:], *WANTED.for_people]
    port = nats.free_port()
    async with nats.NatsServer(where / "nats", port=port, config=config):
        for part in parts:
            creds = put(part, "nats.creds", f"{part.name}.creds")
            with pytest.MonkeyPatch.context() as patched:
                patched.setenv("NATS_CREDS", str(creds))
                patched.setenv("NATS_CA", str(where / "ca.crt"))
                url = f"tls://localhost:{port}"
                is_health = part == WANTED.needed[2]
                async with bus.Bus(url, producer="t", name="t", owner=is_health) as link:
                    await link.link.client()
                    if is_health:
                        await link.publish(
                            vocabulary.WatchdogTicked(
                                node=vocabulary.FLEET,
                                at=datetime.now(UTC),
                                holder="t",
                                leader=1,
                                interval_s=10.0,
                            )
                        )


def test_an_upgrade_signs_other_rights_with_the_same_keys(tmp_path: Path) -> None:
    async def story(world: World) -> None:
        await world.run()
        before = await world.made()
        note = {"metadata": {"annotations": {cluster_secrets.VERSION: "before"}}}
        await world.change(WANTED.accounts_conf, {**note, "data": {"accounts.conf": "old"}})
        assert await world.run() == [f"signed again: {WANTED.accounts_conf}"]
        after = await world.made()
        accounts_conf = str(WANTED.accounts_conf)
        assert {name for name, item in before.items() if after[name] != item} == {accounts_conf}
        old, new = (tree[accounts_conf]["data"]["accounts.conf"] for tree in (before, after))
        (account,) = re.findall(r"(?m)^system_account: .*$", old)
        assert account in new
        # without the seeds nothing is signed again, even if the rights are of another version
        await world.remove(WANTED.seeds)
        await world.change(WANTED.gate, note)
        assert await world.run() == []

    play(tmp_path, story)


class Issued(msgspec.Struct):
    """The claim of a token that names its issuer."""

    iss: str


def test_an_upgrade_adds_the_key_of_a_new_role_and_keeps_the_others(tmp_path: Path) -> None:
    async def story(world: World) -> None:
        await world.run()
        console = WANTED.credentials(accounts.Role.CONSOLE)
        await world.remove(console)
        await world.change(WANTED.seeds, {"data": {"console.seed": None}})
        for part in WANTED.signed:
            note = {"metadata": {"annotations": {cluster_secrets.VERSION: "before"}}}
            await world.change(part, note)
        before = contents(await world.made())
        assert await world.run() == [
            f"keys of new roles added: {WANTED.seeds}",
            f"signed again: {WANTED.accounts_conf}",
            f"signed again: {WANTED.gate}",
            f"created: {console}",
        ]
        after = contents(await world.made())
        new = after[str(WANTED.seeds)].pop("console.seed")
        assert after[str(WANTED.seeds)] == before[str(WANTED.seeds)]
        (key,) = accounts.read_seeds("console", base64.b64decode(new).decode())
        creds = nkeys.read_creds(base64.b64decode(after[str(console)]["nats.creds"]).decode())
        assert nkeys.decode_jwt(creds.jwt, Issued, nkeys.Kind.ACCOUNT) == Issued(key.public)
        assert await world.run() == []

    play(tmp_path, story)


def test_what_cannot_be_used_is_named_and_stays(tmp_path: Path) -> None:
    async def story(world: World) -> None:
        await world.run(production=False)
        line_feed = base64.b64encode(b"secret\n").decode()
        await world.change(WANTED.passwords[0], {"data": {"password": line_feed}})
        before = await world.made()
        assert await world.command("-m", "muster.cli", "auth", "cluster") == (
            2,
            [],
            (
                "muster auth cluster: Secret muster-nats-health: password is damaged: it is a "
                "number, or has a character that cannot be part of an address, such as a line "
                "feed; correct the value, or delete the object so that it is created again\n"
            ),
        )
        assert await world.made() == before
        world.stand_in.users.deny(USER, "get", "secrets")
        with pytest.raises(cluster_keys.Failed, match="secrets/muster-nats-health: HTTP 403"):
            await world.run(production=False)

    play(tmp_path, story)


def test_an_authority_that_cannot_sign_is_named_and_stays(tmp_path: Path) -> None:
    async def story(world: World) -> None:
        await world.run()
        await world.remove(WANTED.certificate, WANTED.trust)
        block = b"-----BEGIN PRIVATE KEY-----\nAAAA\n-----END PRIVATE KEY-----\n"
        garbage = base64.b64encode(block).decode()
        await world.change(WANTED.authority, {"data": {"ca.key": garbage}})
        before = await world.made()
        code, lines, errors = await world.command(
            "-c", JOB, "--namespace", "muster", "--production"
        )
        assert (code, lines) == (2, [])
        start = "muster-keys: Secret muster-nats-authority: not an authority that muster created: "
        assert errors.startswith(start)
        assert len(errors.splitlines()) == 1
        assert await world.made() == before

    play(tmp_path, story)
