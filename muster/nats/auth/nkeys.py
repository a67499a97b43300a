"""Pure: implements NATS keys (nkeys), tokens (JWTs) and .creds files, which contain both.

Keys are ed25519 pairs whose text form shows their purpose (nats-io/nkeys); tokens are NATS' own
JSON Web Tokens (nats-io/jwt v2): one algorithm, one encoding, and a limited size. Randomness is an
argument. Error texts never contain any part of a key or file, which may be secret. `cryptography`
belongs to the extra `auth`; a process without credentials does not load it.
"""

import base64
import binascii
import enum
import hashlib
import json
import re
from collections.abc import Mapping
from typing import Final, NamedTuple, Self, TypeVar

import msgspec
from cryptography import exceptions
from cryptography.hazmat.primitives.asymmetric import ed25519

from muster import codec


class Parts(NamedTuple):
    """The parts of a token (RFC 7515, compact); `signature` signs the text `signed`."""

    header: bytes
    claims: bytes
    signed: bytes
    signature: bytes


def split_token(text: str) -> Parts:
    """Return the parts of a token without verifying them. Raises ValueError."""
    parts = text.split(".")
    if len(parts) != 3:  # noqa: PLR2004  # header, claims, signature
        raise ValueError("not three parts")
    header, claims, signature = (from_base64(part) for part in parts)
    return Parts(header, claims, text.rpartition(".")[0].encode(), signature)


def to_base64(raw: bytes) -> str:
    """Return bytes as base64url, without padding."""
    return base64.urlsafe_b64encode(raw).decode().rstrip("=")


def from_base64(text: str) -> bytes:
    """Decode base64url. Raises ValueError for text that `to_base64` would not produce."""
    try:
        raw = base64.b64decode(text.encode("ascii") + b"=" * (-len(text) % 4), b"-_", validate=True)
    except (binascii.Error, UnicodeEncodeError):
        raise ValueError("not base64url") from None
    if to_base64(raw) != text:
        raise ValueError("not base64url without padding")
    return raw


SECRET_BYTES: Final = 32
_SEED: Final = 18 << 3
_KEY_CHARS_MAX: Final = 64


class Kind(enum.IntEnum):
    """The kind of a key, shown by the first letter of its public key."""

    ACCOUNT = 0
    SERVER = 13 << 3
    OPERATOR = 14 << 3
    USER = 20 << 3


class BadKey(ValueError):
    """The text is not a key of the required kind; it is not shown, because it may be secret."""


class Key:
    """A key pair of one kind, derived from 32 secret bytes."""

    def __init__(self, kind: Kind, secret: bytes) -> None:
        self.kind = kind
        self._secret = secret
        self._private = ed25519.Ed25519PrivateKey.from_private_bytes(secret)
        self.public = _text(bytes([kind]) + self._private.public_key().public_bytes_raw())
        """The public key as a text: `A...`, `U...`."""

    @classmethod
    def from_seed(cls, seed: str, kind: Kind) -> Self:
        """Return the key pair of a seed (`SA...`, `SU...`). Raises BadKey."""
        raw = _bytes(seed.strip())
        if len(raw) != 2 + SECRET_BYTES or raw[:2] != _seed_prefix(kind):
            raise BadKey(f"not the seed of a key of kind {kind.name.lower()}")
        return cls(kind, raw[2:])

    @property
    def seed(self) -> str:
        """The secret key as a text."""
        return _text(_seed_prefix(self.kind) + self._secret)

    def sign(self, message: bytes) -> bytes:
        """Return the signature of a message: 64 bytes."""
        return self._private.sign(message)


def check(public: str, kind: Kind) -> str:
    """Return the public key if it is of this kind. Raises BadKey."""
    _public_bytes(public, kind)
    return public


def is_signed(public: str, kind: Kind, message: bytes, signature: bytes) -> bool:
    """Return whether the owner of a public key signed a message; False for an invalid key."""
    try:
        raw = _public_bytes(public, kind)
        ed25519.Ed25519PublicKey.from_public_bytes(raw).verify(signature, message)
    except (BadKey, ValueError, exceptions.InvalidSignature):
        return False
    return True


def _public_bytes(public: str, kind: Kind) -> bytes:
    raw = _bytes(public)
    if len(raw) != 1 + SECRET_BYTES or raw[0] != kind:
        raise BadKey(f"not a public key of kind {kind.name.lower()}")
    return raw[1:]


def _seed_prefix(kind: Kind) -> bytes:
    # the first five bits mark a seed, the next five its kind: two letters in base32
    return bytes([_SEED | kind >> 5, (kind & 31) << 3])


def _text(raw: bytes) -> str:
    whole = raw + _checksum(raw).to_bytes(2, "little")
    return base64.b32encode(whole).decode().rstrip("=")


def _bytes(text: str) -> bytes:
    if len(text) > _KEY_CHARS_MAX:
        raise BadKey("not a key, because it is too long")
    try:
        raw = base64.b32decode(text + "=" * (-len(text) % 8))
    except (binascii.Error, ValueError):
        raise BadKey("not a key, because it is not base32") from None
    # otherwise spare bits and lower case would allow two texts for one key
    if len(raw) <= 2 or _text(raw[:-2]) != text:  # noqa: PLR2004  # the checksum
        raise BadKey("not a key, because its checksum is wrong")
    return raw[:-2]


def _checksum(raw: bytes) -> int:
    # CRC-16/XMODEM, as nkeys/crc16.go computes it
    return binascii.crc_hqx(raw, 0)


Claims = TypeVar("Claims", bound=msgspec.Struct)

_HEADER: Final = b'{"typ":"JWT","alg":"ed25519-nkey"}'
_JWT_CHARS_MAX: Final = 64 * 1024


class BadToken(ValueError):
    """The text is not a NATS token, or its issuer did not sign it."""


class _Header(msgspec.Struct, frozen=True):
    typ: str
    alg: str


class _Issued(msgspec.Struct, frozen=True):
    iss: str


def encode_jwt(claims: Mapping[str, object], key: Key, *, at: float) -> str:
    """Return claims as a token that `key` signs; `iss`, `iat` and `jti` are added."""
    whole = {**claims, "iss": key.public, "iat": int(at)}
    digest = hashlib.sha256(json.dumps(whole, sort_keys=True).encode()).digest()
    whole["jti"] = base64.b32encode(digest).decode().rstrip("=")
    body = json.dumps(whole, sort_keys=True, separators=(",", ":")).encode()
    signed = f"{to_base64(_HEADER)}.{to_base64(body)}"
    return f"{signed}.{to_base64(key.sign(signed.encode()))}"


def decode_jwt(text: str, shape: type[Claims], kind: Kind) -> Claims:
    """Return the claims of a token that a key of this kind has signed. Raises BadToken."""
    if len(text) > _JWT_CHARS_MAX:
        raise BadToken("the token is too long")
    try:
        parts = split_token(text)
        header = msgspec.json.decode(parts.header, type=_Header)
        issuer = msgspec.json.decode(parts.claims, type=_Issued).iss
        claims = msgspec.json.decode(parts.claims, type=shape)
    except (*codec.UNREADABLE, ValueError):
        raise BadToken("the token is unreadable") from None
    if header != _Header(typ="JWT", alg="ed25519-nkey"):
        raise BadToken("the token is not signed with NATS' algorithm")
    if not is_signed(issuer, kind, parts.signed, parts.signature):
        raise BadToken("the token is not signed by its issuer")
    return claims


_JWT_IN_FILE: Final = re.compile(
    r"-{3,}BEGIN NATS USER JWT-{3,}\s+(\S+)\s+-{3,}END NATS USER JWT-{3,}"
)
_SEED_IN_FILE: Final = re.compile(
    r"-{3,}BEGIN USER NKEY SEED-{3,}\s+(\S+)\s+-{3,}END USER NKEY SEED-{3,}"
)
_FILE: Final = """\
-----BEGIN NATS USER JWT-----
{jwt}
------END NATS USER JWT------

Keep this file secret: anyone who holds it can act as you.

-----BEGIN USER NKEY SEED-----
{seed}
------END USER NKEY SEED------
"""


class BadCredentials(ValueError):
    """The text is not a valid .creds file; the message says why."""


class _Membership(msgspec.Struct, frozen=True):
    issuer_account: str = ""


class _User(msgspec.Struct, frozen=True):
    sub: str
    name: str = ""
    nats: _Membership = _Membership()


class Credentials(msgspec.Struct, frozen=True):
    """A user's token, and the seed of the key that proves its ownership.

    `account` is the public key of the user's account; empty if the account itself signed the token.
    """

    jwt: str
    seed: str
    name: str
    account: str

    def sign(self, nonce: str) -> bytes:
        """Return the signature of a server's nonce, in base64url."""
        key = Key.from_seed(self.seed, Kind.USER)
        return to_base64(key.sign(nonce.encode())).encode()


def write_creds(jwt: str, key: Key) -> str:
    """Return the text of a .creds file."""
    return _FILE.format(jwt=jwt, seed=key.seed)


def read_creds(text: str) -> Credentials:
    """Return the credentials in the text of a .creds file. Raises BadCredentials."""
    jwt, seed = _JWT_IN_FILE.search(text), _SEED_IN_FILE.search(text)
    if jwt is None or seed is None:
        missing = "token" if jwt is None else "seed"
        raise BadCredentials(f"no valid credentials, because the {missing} is missing")
    try:
        user = decode_jwt(jwt[1], _User, Kind.ACCOUNT)
        key = Key.from_seed(seed[1], Kind.USER)
    except ValueError as error:
        raise BadCredentials(f"no valid credentials ({error})") from None
    if key.public != user.sub:
        raise BadCredentials("no valid credentials, because the seed does not belong to the token")
    account = user.nats.issuer_account
    return Credentials(jwt=jwt[1], seed=seed[1], name=user.name, account=account)
