"""Adapter for the Kubernetes API or a file: reads the cluster's public keys, and caches them.

The API server serves the keys to every service account (the role system:service-account-issuer-
discovery), at /openid/v1/jwks; they are not secret.
"""

import asyncio
import contextlib
import os
import ssl
from http import HTTPStatus
from pathlib import Path
from typing import Final

import msgspec

import muster
from muster import codec, http
from muster_gate import config, tokens

_SERVICE_ACCOUNT: Final = Path("/var/run/secrets/kubernetes.io/serviceaccount")
_BYTES_MAX: Final = 1024 * 1024
_TIMEOUT_S: Final = 2.0


class KeysUnavailable(Exception):
    """The keys could not be fetched; the message gives the source and the reason."""


class _Cached(msgspec.Struct, frozen=True):
    issuer: str
    keys: msgspec.Raw
    fetched_at: float = msgspec.field(name="heard_at")


def api_address(configured: str) -> str:
    """Return the URL of the API server: as configured, or else the cluster's; empty if unknown."""
    host = os.environ.get("KUBERNETES_SERVICE_HOST", "")
    if configured or not host:
        return configured.rstrip("/")
    host = f"[{host}]" if ":" in host else host
    return f"https://{host}:{os.environ.get('KUBERNETES_SERVICE_PORT', '443')}"


async def fetch(rules: config.Keys, *, issuer: str, api: str, at: float) -> tokens.Keyring:
    """Return the current keys; cache those from the API server. Raises KeysUnavailable."""
    try:
        if rules.file is not None:
            document = _bounded(await asyncio.to_thread(Path(rules.file).read_bytes))
            return tokens.Keyring(issuer=issuer, keys=tokens.public_keys(document), fetched_at=at)
        issuer = issuer or tokens.discovered_issuer(
            await _get(f"{api}/.well-known/openid-configuration")
        )
        document = await _get(f"{api}/openid/v1/jwks")
        ring = tokens.Keyring(issuer=issuer, keys=tokens.public_keys(document), fetched_at=at)
    except tokens.BadKeys as error:
        raise KeysUnavailable(f"{rules.file or api}: {error}") from None
    except OSError as error:
        raise KeysUnavailable(f"{rules.file}: {error.strerror or error}") from None
    if rules.cache is not None:
        # the cache is needed only to start while the API server is unavailable
        with contextlib.suppress(OSError):
            _cache(Path(rules.cache), _Cached(issuer, msgspec.Raw(document), at))
    return ring


def cached(rules: config.Keys, *, issuer: str) -> tokens.Keyring | None:
    """Return the cached keys; None if there is no usable cache for this issuer."""
    if rules.cache is None:
        return None
    try:
        cached_keys = msgspec.json.decode(_bounded(Path(rules.cache).read_bytes()), type=_Cached)
        if issuer not in {"", cached_keys.issuer}:
            return None
        return tokens.Keyring(
            issuer=cached_keys.issuer,
            keys=tokens.public_keys(bytes(cached_keys.keys)),
            fetched_at=cached_keys.fetched_at,
        )
    except (OSError, *codec.UNREADABLE, tokens.BadKeys):
        return None


def _cache(file: Path, keys: _Cached) -> None:
    temporary = file.with_name(f".{file.name}.{os.getpid()}")
    temporary.write_bytes(msgspec.json.encode(keys))
    temporary.replace(file)


def _bounded(document: bytes) -> bytes:
    if len(document) > _BYTES_MAX:
        raise tokens.BadKeys(f"the document has more than {_BYTES_MAX} bytes")
    return document


async def _get(url: str) -> bytes:
    headers, tls = {}, None
    if url.startswith("https:"):
        headers["Authorization"] = f"Bearer {_service_account('token')}"
        authority = _SERVICE_ACCOUNT / "ca.crt"
        tls = ssl.create_default_context(cafile=authority if authority.exists() else None)
    agent = f"muster-gate/{muster.__version__}"
    try:
        endpoint = http.Endpoint(url, timeout_s=_TIMEOUT_S, user_agent=agent, tls=tls)
        response = await endpoint.request("GET", headers=headers)
    except http.Unanswered as error:
        is_late = isinstance(error.reason, TimeoutError)
        reason = f"no complete answer within {_TIMEOUT_S:g} s" if is_late else error
        raise KeysUnavailable(f"{url}: {reason}") from None
    except ValueError as error:
        raise KeysUnavailable(f"{url}: {error}") from None
    if response.status != HTTPStatus.OK:
        raise KeysUnavailable(f"{url}: HTTP {response.status}")
    return response.body


def _service_account(name: str) -> str:
    try:
        return (_SERVICE_ACCOUNT / name).read_text("ascii").strip()
    except (OSError, UnicodeDecodeError):
        return ""
