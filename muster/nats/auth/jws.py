"""Pure: splits signed tokens in compact form (RFC 7515): three base64 parts separated by dots.

Nothing is verified here: `signature` has to be checked against `signed`. Apart from `nkeys`, since
a process that only sends a token must not load `cryptography`.
"""

import base64
import binascii
from typing import NamedTuple


class Parts(NamedTuple):
    """The parts of a token; `signed` is the text that `signature` is for."""

    header: bytes
    claims: bytes
    signed: bytes
    signature: bytes


def split(text: str) -> Parts:
    """Return the parts of a token. Raises ValueError."""
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
