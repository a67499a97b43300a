"""Adapter for the Kubernetes API: creates missing passwords or keys of an installation.

Several processes may do so at the same time: the first to create an object determines its content,
and existing passwords and keys are never replaced.

A Job runs this module as `python -m muster.cli.cluster_keys`, not as a command of `muster`, because
the services' image has no `cyclopts`.
"""

import argparse
import asyncio
import base64
import os
import secrets
import sys
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from http import HTTPStatus
from pathlib import Path
from typing import Final, assert_never

import msgspec

from muster.cli import keyfiles
from muster.kubernetes import api as kubernetes_api
from muster.kubernetes import objects
from muster.nats.auth import cluster_secrets
from muster.nats.auth.cluster_secrets import Kind, Origin, Part, Step, Stored
from muster.service import entry

_REQUEST_S: Final = 20.0
_CERTIFICATE_LASTS: Final = timedelta(days=3650)
_PASSWORD_BYTES: Final = 24
_LABELS: Final = {"app.kubernetes.io/name": "muster-keys", "app.kubernetes.io/part-of": "muster"}
_PATHS: Final = {Kind.SECRET: "secrets", Kind.CONFIG_MAP: "configmaps"}


class Failed(Exception):
    """A request to the API failed; the message names the request and the reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Installation:
    """The installation that the keys belong to."""

    name: str
    namespace: str
    production: bool


class _Held(objects.HasMetadata, frozen=True):
    """A Secret, whose values are still in base64, or a ConfigMap."""

    data: dict[str, str] | None = None


def main() -> int:
    """Parse the arguments and create the missing objects; return the exit code."""
    parser = argparse.ArgumentParser(description="Create the missing Secrets of an installation.")
    parser.add_argument("--namespace", required=True)
    parser.add_argument("--production", action="store_true")
    chosen = parser.parse_args()
    name = os.environ.get("MUSTER_AUTH_NAME", "muster")
    installation = Installation(name=name, namespace=chosen.namespace, production=chosen.production)
    return run("muster-keys", installation, context=None)


def run(program: str, installation: Installation, *, context: str | None) -> int:
    """Create the missing objects and print them; return the exit code, 2 if someone must decide."""
    try:
        return asyncio.run(_run(installation, context))
    except cluster_secrets.Refused as error:
        entry.complain(program, str(error))
        return 2
    except (Failed, kubernetes_api.NoCluster) as error:
        entry.complain(program, str(error))
        return 1


async def _run(installation: Installation, context: str | None) -> int:
    kubeconfig = os.environ.get("KUBECONFIG") or None
    if kubeconfig is None and (context or "KUBERNETES_SERVICE_HOST" not in os.environ):
        kubeconfig = str(Path.home() / ".kube/config")
    changed = 0
    async with await kubernetes_api.find(kubeconfig=kubeconfig, context=context) as api:
        async for line in complete(api, installation):
            entry.show(line)
            changed += 1
    if not changed:
        entry.show("nothing is missing")
    return 0


async def complete(api: kubernetes_api.Api, installation: Installation) -> AsyncIterator[str]:
    """Create the missing objects; yield a line for each object created or changed.

    Raises Failed, and cluster_secrets.Refused.
    """
    parts = cluster_secrets.Wanted(installation.name).parts(production=installation.production)
    for _ in range(cluster_secrets.ROUNDS_MAX):
        held = {
            part: each for part in parts if (each := await _read(api, installation.namespace, part))
        }
        stored = {part: _stored(part, each) for part, each in held.items()}
        steps = cluster_secrets.plan(installation.name, stored, production=installation.production)
        if not steps:
            return
        made = _made(installation, stored, steps)
        for step in steps:
            version = held[step.part].metadata.resource_version if step.part in held else ""
            if await _write(api, installation, step.part, made[step], version):
                yield f"{_done(step, is_new=not version)}: {step.part}"
    raise Failed("another process is changing the same objects: run this command again")


def _done(step: Step, *, is_new: bool) -> str:
    if is_new:
        return "created"
    return "keys of new roles added" if step.origin is Origin.SEEDS else "signed again"


def _made(
    installation: Installation, stored: Mapping[Part, Stored], steps: tuple[Step, ...]
) -> dict[Step, dict[str, str]]:
    """Return, for each step, the data of its object. Raises Refused."""
    wanted, at = cluster_secrets.Wanted(installation.name), datetime.now(UTC)
    derived: dict[str, str] = {}
    if any(step.origin is Origin.KEYS for step in steps):
        random, now_s = secrets.token_bytes, at.timestamp()
        derived = cluster_secrets.derive(stored[wanted.seeds], random=random, at=now_s)
    contents = {}
    for step in steps:
        match step.origin:
            case Origin.PASSWORD:
                # nats-server would read digits as a number
                files = {"password": f"p{secrets.token_hex(_PASSWORD_BYTES)}"}
            case Origin.SEEDS:
                held = stored.get(wanted.seeds)
                files = keyfiles.new_seeds() | (dict(held.data) if held else {})
            case Origin.AUTHORITY:
                files = keyfiles.new_authority(at=at)
            case Origin.KEYS:
                files = derived
            case Origin.CERTIFICATE:
                authority = stored[wanted.authority].data
                hosts = cluster_secrets.hosts(installation.name, installation.namespace)
                try:
                    made = keyfiles.certificate(authority, hosts, at=at, lasts=_CERTIFICATE_LASTS)
                except keyfiles.BadAuthority as error:
                    raise cluster_secrets.Refused(f"{wanted.authority}: {error}") from None
                files = {**made, "ca.crt": authority["ca.crt"]}
            case Origin.TRUST:
                files = dict(stored[wanted.certificate].data)
            case _ as unreachable:
                assert_never(unreachable)
        contents[step] = {key: files[file] for key, file in step.part.files}
    return contents


async def _read(api: kubernetes_api.Api, namespace: str, part: Part) -> _Held | None:
    path = f"{_path(namespace, part)}/{part.name}"
    answer = await api.request("GET", path, timeout_s=_REQUEST_S)
    if answer.status == HTTPStatus.NOT_FOUND:
        return None
    if not answer.is_ok:
        raise Failed(answer.problem)
    try:
        return msgspec.json.decode(answer.body, type=_Held)
    except kubernetes_api.UNREADABLE as error:
        raise Failed(f"the answer to {answer.what} is unreadable: {error}") from None


def _stored(part: Part, held: _Held) -> Stored:
    data = held.data or {}
    if part.kind is Kind.SECRET:
        data = {key: _decoded(value) for key, value in data.items()}
    return Stored(data, (held.metadata.annotations or {}).get(cluster_secrets.VERSION))


def _decoded(value: str) -> str:
    """Return a Secret's value as text, with U+FFFD in place of invalid base64 or UTF-8."""
    try:
        return base64.b64decode(value, validate=True).decode("utf-8", "replace")
    except ValueError:
        return "\ufffd"


async def _write(
    api: kubernetes_api.Api,
    installation: Installation,
    part: Part,
    content: Mapping[str, str],
    version: str,
) -> bool:
    """Create an object, or update the version that was read; return False on a conflict."""
    data = dict(content)
    if part.kind is Kind.SECRET:
        data = {key: base64.b64encode(value.encode()).decode() for key, value in data.items()}
    metadata: dict[str, object] = {}
    if part in cluster_secrets.Wanted(installation.name).signed:
        metadata["annotations"] = {cluster_secrets.VERSION: cluster_secrets.rights()}
    path = _path(installation.namespace, part)
    if version:
        body = {"metadata": {**metadata, "resourceVersion": version}, "data": data}
        answer = await api.request(
            "PATCH", f"{path}/{part.name}", body=body,
            content=kubernetes_api.MERGE, timeout_s=_REQUEST_S,
        )  # fmt: skip
    else:
        tree = {
            "apiVersion": "v1",
            "kind": part.kind,
            "metadata": {**metadata, "name": part.name, "labels": _LABELS},
            "data": data,
        }
        answer = await api.request("POST", path, body=tree, timeout_s=_REQUEST_S)
    if not answer.is_ok and answer.status != HTTPStatus.CONFLICT:
        raise Failed(answer.problem)
    return answer.is_ok


def _path(namespace: str, part: Part) -> str:
    return f"/api/v1/namespaces/{namespace}/{_PATHS[part.kind]}"


if __name__ == "__main__":
    sys.exit(main())
