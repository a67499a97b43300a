"""Pure: NATS' own JSON Web Tokens (nats-io/jwt v2): claims, signed by a key of NATS.

Nothing else is read here: one algorithm, one encoding, and a bound on the size.
"""

import base64
import hashlib
import json
from collections.abc import Mapping
from typing import Final, TypeVar

import msgspec

from muster.nats.auth import jws, nkeys
from muster.service import reading

Claims = TypeVar("Claims", bound=msgspec.Struct)

_HEADER: Final = b'{"typ":"JWT","alg":"ed25519-nkey"}'
_TEXT_MAX: Final = 64 * 1024


class BadToken(ValueError):
    """What is no token of NATS', or not signed by whom it names."""


class _Header(msgspec.Struct, frozen=True):
    typ: str
    alg: str


class _Issued(msgspec.Struct, frozen=True):
    iss: str


def encode(claims: Mapping[str, object], key: nkeys.Key, *, at: float) -> str:
    """Return claims as a token: `iss`, `iat` and `jti` are added."""
    whole = {**claims, "iss": key.public, "iat": int(at)}
    digest = hashlib.sha256(json.dumps(whole, sort_keys=True).encode()).digest()
    whole["jti"] = base64.b32encode(digest).decode().rstrip("=")
    body = json.dumps(whole, sort_keys=True, separators=(",", ":")).encode()
    signed = f"{jws.to_base64(_HEADER)}.{jws.to_base64(body)}"
    return f"{signed}.{jws.to_base64(key.sign(signed.encode()))}"


def decode(text: str, shape: type[Claims], kind: nkeys.Kind) -> Claims:
    """Return the claims of a token that a key of this kind has signed. Raises BadToken."""
    if len(text) > _TEXT_MAX:
        raise BadToken("too long")
    try:
        parts = jws.split(text)
        header = msgspec.json.decode(parts.header, type=_Header)
        issuer = msgspec.json.decode(parts.claims, type=_Issued).iss
        claims = msgspec.json.decode(parts.claims, type=shape)
    except (*reading.UNREADABLE, ValueError):
        raise BadToken("unreadable") from None
    if header != _Header(typ="JWT", alg="ed25519-nkey"):
        raise BadToken("not of NATS' algorithm")
    if not nkeys.is_signed(issuer, kind, parts.signed, parts.signature):
        raise BadToken("not signed by its issuer")
    return claims
