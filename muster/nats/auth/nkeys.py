"""Pure: The keys of NATS: ed25519 pairs, and texts that tell what each is for (nats-io/nkeys).

Randomness comes from outside. `cryptography` is in the extra `auth`; who has no use for keys does
not load it.
"""

import base64
import binascii
import enum
from typing import Final, Self

from cryptography import exceptions
from cryptography.hazmat.primitives.asymmetric import ed25519

SECRET_BYTES: Final = 32
_SEED: Final = 18 << 3
_TEXT_MAX: Final = 64


class Kind(enum.IntEnum):
    """What a key is for; the text of a public key begins with the letter."""

    ACCOUNT = 0
    SERVER = 13 << 3
    OPERATOR = 14 << 3
    USER = 20 << 3


class BadKey(ValueError):
    """A text that is no key of the kind that is needed; it is not repeated, it may be a secret."""


class Key:
    """A pair of keys of one kind, from its 32 secret bytes."""

    def __init__(self, kind: Kind, secret: bytes) -> None:
        self.kind = kind
        self._secret = secret
        self._private = ed25519.Ed25519PrivateKey.from_private_bytes(secret)
        self.public = _text(bytes([kind]) + self._private.public_key().public_bytes_raw())
        """Its public half as a text: `A...`, `U...`."""

    @classmethod
    def from_seed(cls, seed: str, kind: Kind) -> Self:
        """Return the pair that a seed (`SA...`, `SU...`) stands for. Raises BadKey."""
        raw = _bytes(seed.strip())
        if len(raw) != 2 + SECRET_BYTES or raw[:2] != _seed_prefix(kind):
            raise BadKey(f"not the seed of a key of kind {kind.name.lower()}")
        return cls(kind, raw[2:])

    @property
    def seed(self) -> str:
        """Its secret as a text."""
        return _text(_seed_prefix(self.kind) + self._secret)

    def sign(self, message: bytes) -> bytes:
        """Return the 64 bytes of a signature."""
        return self._private.sign(message)


def check(public: str, kind: Kind) -> str:
    """Return a public key of this kind. Raises BadKey."""
    _public_bytes(public, kind)
    return public


def is_signed(public: str, kind: Kind, message: bytes, signature: bytes) -> bool:
    """Tell whether the owner of a public key signed this; no key signs nothing."""
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
    # five bits say that it is a seed, the next five which; base32 shows them as two letters
    return bytes([_SEED | kind >> 5, (kind & 31) << 3])


def _text(raw: bytes) -> str:
    whole = raw + _checksum(raw).to_bytes(2, "little")
    return base64.b32encode(whole).decode().rstrip("=")


def _bytes(text: str) -> bytes:
    if len(text) > _TEXT_MAX:
        raise BadKey("not a key: too long")
    try:
        raw = base64.b32decode(text + "=" * (-len(text) % 8))
    except (binascii.Error, ValueError):
        raise BadKey("not a key: not base32") from None
    # spare bits and lower case would let two texts stand for one key
    if len(raw) <= 2 or _text(raw[:-2]) != text:  # noqa: PLR2004  # the checksum
        raise BadKey("not a key: its checksum is wrong")
    return raw[:-2]


def _checksum(raw: bytes) -> int:
    # CRC-16/XMODEM, as nkeys/crc16.go computes it
    return binascii.crc_hqx(raw, 0)
