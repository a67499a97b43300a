"""Pure: Signatures of webhooks by Standard Webhooks 1.0.0: HMAC-SHA256 over id, time and body.

Two secrets are active while one is replaced by the other: both signatures are sent, and the
receiver believes either.
"""

import base64
import binascii
import hashlib
import hmac
from collections.abc import Sequence
from typing import Final

_PREFIX: Final = "whsec_"
_KEY_BYTES: Final = (24, 64)


def key_of(secret: str) -> bytes:
    """Return the key in a secret such as `whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw`.

    Raises ValueError, which does not say what the secret is.
    """
    try:
        key = base64.b64decode(secret.strip().removeprefix(_PREFIX), validate=True)
    except binascii.Error:
        raise ValueError("a signing secret is base64, after the prefix whsec_") from None
    if not _KEY_BYTES[0] <= len(key) <= _KEY_BYTES[1]:
        raise ValueError(
            f"a signing secret has {_KEY_BYTES[0]} to {_KEY_BYTES[1]} bytes; this one {len(key)}"
        )
    return key


def headers(keys: Sequence[bytes], *, key: str, at_s: int, body: bytes) -> dict[str, str]:
    """Return the three headers; `at_s` are Unix seconds of this attempt, `key` of all attempts."""
    signed = f"{key}.{at_s}.".encode() + body
    signatures = [base64.b64encode(hmac.digest(one, signed, hashlib.sha256)) for one in keys]
    return {
        "webhook-id": key,
        "webhook-timestamp": str(at_s),
        "webhook-signature": " ".join(f"v1,{signature.decode()}" for signature in signatures),
    }
