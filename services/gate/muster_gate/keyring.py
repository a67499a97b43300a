"""Pure: the public keys that verify a cluster's tokens: a JSON Web Key Set (RFC 7517).

Kubernetes signs with RSA or with elliptic curves (pkg/serviceaccount/jwt.go, signerFromPrivateKey;
1.36). A key is for one algorithm only: what a token says about its own algorithm is
compared, never trusted.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

import msgspec
from cryptography import exceptions
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec, padding, rsa, utils

from muster import codec
from muster.nats.auth import jws

RSA_BITS_MIN: Final = 2048
_RSA_BITS_MAX: Final = 8192
_KEYS_MAX: Final = 64
_COORDINATE_BYTES: Final = 32

Check: TypeAlias = Callable[[bytes, bytes], None]
"""Raises InvalidSignature unless the second is a signature of the first."""


class BadKeys(ValueError):
    """This is no key set, or has no key that we can use."""


@dataclass(frozen=True, slots=True)
class PublicKey:
    """One key and the one algorithm that it is for."""

    algorithm: str
    check: Check

    def is_signed(self, signed: bytes, signature: bytes) -> bool:
        """Return whether the owner of this key made this signature."""
        try:
            self.check(signed, signature)
        except (exceptions.InvalidSignature, ValueError):
            return False
        return True


@dataclass(frozen=True, slots=True, kw_only=True)
class Keyring:
    """The keys by their ids, whose they are, and when they were fetched, in UTC."""

    issuer: str
    keys: Mapping[str, Sequence[PublicKey]]
    """If a cluster uses an id twice, either key may have signed."""
    fetched_at: float


class _Key(msgspec.Struct, frozen=True):
    kty: str
    kid: str = ""
    alg: str = ""
    use: str = "sig"
    crv: str = ""
    n: str = ""
    e: str = ""
    x: str = ""
    y: str = ""


class _Keys(msgspec.Struct, frozen=True):
    keys: list[msgspec.Raw]


class _Discovery(msgspec.Struct, frozen=True):
    issuer: str


def issuer(document: bytes) -> str:
    """Return the issuer in /.well-known/openid-configuration. Raises BadKeys."""
    try:
        name = msgspec.json.decode(document, type=_Discovery).issuer
    except codec.UNREADABLE as error:
        raise BadKeys(f"no OpenID configuration: {error}") from None
    if not name:
        raise BadKeys("the OpenID configuration names no issuer")
    return name


def public_keys(document: bytes) -> dict[str, list[PublicKey]]:
    """Return the keys of a set by id; keys that we cannot use are left out. Raises BadKeys."""
    try:
        entries = msgspec.json.decode(document, type=_Keys).keys
    except codec.UNREADABLE as error:
        raise BadKeys(f"no key set: {error}") from None
    keys: dict[str, list[PublicKey]] = {}
    for raw in entries[:_KEYS_MAX]:
        try:
            entry = msgspec.json.decode(raw, type=_Key)
            key = _key(entry)
        except (*codec.UNREADABLE, ValueError):
            continue
        if entry.kid and entry.use == "sig" and entry.alg in {"", key.algorithm}:
            keys.setdefault(entry.kid, []).append(key)
    if not keys:
        raise BadKeys(f"none of {len(entries)} keys is one for RS256 or ES256 with an id")
    return keys


def _key(entry: _Key) -> PublicKey:
    if entry.kty == "RSA":
        return _rsa(_integer(entry.n), _integer(entry.e))
    if (entry.kty, entry.crv) == ("EC", "P-256"):
        return _curve(_integer(entry.x), _integer(entry.y))
    raise ValueError("unsupported kind of key")


def _rsa(modulus: int, exponent: int) -> PublicKey:
    if not RSA_BITS_MIN <= modulus.bit_length() <= _RSA_BITS_MAX:
        raise ValueError("too short or too long")
    public = rsa.RSAPublicNumbers(exponent, modulus).public_key()
    return PublicKey(
        "RS256",
        lambda signed, mark: public.verify(mark, signed, padding.PKCS1v15(), hashes.SHA256()),
    )


def _curve(x: int, y: int) -> PublicKey:
    public = ec.EllipticCurvePublicNumbers(x, y, ec.SECP256R1()).public_key()

    def check(signed: bytes, mark: bytes) -> None:
        # RFC 7518, 3.4: the two numbers one after the other, not ASN.1
        if len(mark) != 2 * _COORDINATE_BYTES:
            raise exceptions.InvalidSignature
        halves = mark[:_COORDINATE_BYTES], mark[_COORDINATE_BYTES:]
        two = utils.encode_dss_signature(*(int.from_bytes(half) for half in halves))
        public.verify(two, signed, ec.ECDSA(hashes.SHA256()))

    return PublicKey("ES256", check)


def _integer(text: str) -> int:
    return int.from_bytes(jws.from_base64(text))
