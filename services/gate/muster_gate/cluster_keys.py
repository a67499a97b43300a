"""Adapter: the cluster's public keys: the API server's, or a file's, and what was kept of them.

The API server shows them to every service account (the role system:service-account-issuer-
discovery), at /openid/v1/jwks; they are no secret.
"""

import asyncio
import contextlib
import os
import ssl
from http import HTTPStatus
from pathlib import Path
from typing import Final

import aiohttp
import msgspec

from muster import codec
from muster_gate import config, keyring

_OWN: Final = Path("/var/run/secrets/kubernetes.io/serviceaccount")
_BYTES_MAX: Final = 1024 * 1024
_TIMEOUT_S: Final = 2.0


class Away(Exception):
    """The keys could not be had; the text says what was tried."""


class _Kept(msgspec.Struct, frozen=True):
    issuer: str
    heard_at: float
    keys: msgspec.Raw


def find_api(given: str) -> str:
    """Return the address of the API server, or nothing where there is none."""
    host = os.environ.get("KUBERNETES_SERVICE_HOST", "")
    if given or not host:
        return given.rstrip("/")
    host = f"[{host}]" if ":" in host else host
    return f"https://{host}:{os.environ.get('KUBERNETES_SERVICE_PORT', '443')}"


async def fetch(rules: config.Keys, *, issuer: str, api: str, at: float) -> keyring.Keyring:
    """Return the keys as they are now, and keep them if a cache is set. Raises Away."""
    try:
        if rules.file is not None:
            document = _bounded(await asyncio.to_thread(Path(rules.file).read_bytes))
            return keyring.Keyring(issuer=issuer, keys=keyring.read(document), heard_at=at)
        issuer = issuer or keyring.issuer(await _get(f"{api}/.well-known/openid-configuration"))
        document = await _get(f"{api}/openid/v1/jwks")
        ring = keyring.Keyring(issuer=issuer, keys=keyring.read(document), heard_at=at)
    except keyring.BadKeys as error:
        raise Away(f"{rules.file or api}: {error}") from None
    except OSError as error:
        raise Away(f"{rules.file}: {error.strerror or error}") from None
    if rules.cache is not None:
        # one that cannot be written costs the next start, and no more
        with contextlib.suppress(OSError):
            _keep(Path(rules.cache), _Kept(issuer, at, msgspec.Raw(document)))
    return ring


def kept(rules: config.Keys, *, issuer: str) -> keyring.Keyring | None:
    """Return the keys that were kept, with the time at which they were heard."""
    if rules.cache is None:
        return None
    try:
        told = msgspec.json.decode(_bounded(Path(rules.cache).read_bytes()), type=_Kept)
        if issuer not in {"", told.issuer}:
            return None
        return keyring.Keyring(
            issuer=told.issuer, keys=keyring.read(bytes(told.keys)), heard_at=told.heard_at
        )
    except (OSError, *codec.UNREADABLE, keyring.BadKeys):
        return None


def _keep(file: Path, what: _Kept) -> None:
    beside = file.with_name(f".{file.name}.{os.getpid()}")
    beside.write_bytes(msgspec.json.encode(what))
    beside.replace(file)


def _bounded(document: bytes) -> bytes:
    if len(document) > _BYTES_MAX:
        raise keyring.BadKeys(f"more than {_BYTES_MAX} bytes")
    return document


async def _get(url: str) -> bytes:
    headers, context = {}, None
    if url.startswith("https:"):
        headers["Authorization"] = f"Bearer {_own('token')}"
        authority = _OWN / "ca.crt"
        context = ssl.create_default_context(cafile=authority if authority.exists() else None)
    # for all of it: a server that gives one byte a second is away as well
    limit = aiohttp.ClientTimeout(total=_TIMEOUT_S)
    try:
        async with (
            aiohttp.ClientSession(timeout=limit, headers=headers) as session,
            session.get(url, ssl=context or True, allow_redirects=False) as answer,
        ):
            if answer.status != HTTPStatus.OK:
                raise Away(f"{url}: HTTP {answer.status}")
            return _bounded(await _body(answer.content))
    except TimeoutError:
        raise Away(f"{url}: no whole answer within {_TIMEOUT_S:g} s") from None
    except (OSError, ValueError, aiohttp.ClientError) as error:
        raise Away(f"{url}: {getattr(error, 'strerror', None) or error}") from None


async def _body(content: aiohttp.StreamReader) -> bytes:
    """Return what was sent, or more than may be."""
    found = bytearray()
    while len(found) <= _BYTES_MAX and (some := await content.readany()):
        found += some
    return bytes(found)


def _own(name: str) -> str:
    try:
        return (_OWN / name).read_text("ascii").strip()
    except (OSError, UnicodeDecodeError):
        return ""
