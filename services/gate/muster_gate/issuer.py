"""Adapter for files: derives the gate's key from its password, and writes its public key for NATS.

python -m muster_gate.issuer PASSWORD FILE

PASSWORD is the file with the gate's password. FILE is included in nats-server's configuration: it
sets one variable and contains no secret. An installation with keys (`muster auth`) does not need
this program.
"""

import hashlib
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from muster.nats.auth import nkeys, permissions
from muster_gate import callout

_ARGUMENTS: Final = 3
_PASSWORD_MIN: Final = 32
_PURPOSE: Final = b"muster gate signs users\0"


def derive_signing(password: bytes) -> callout.Signing:
    """Return the signing key, derived from the password that the gate shares with NATS.

    Raises ValueError, whose message does not contain the password.
    """
    secret = password.strip()
    if len(secret) < _PASSWORD_MIN:
        raise ValueError(f"a password of fewer than {_PASSWORD_MIN} characters could be guessed")
    derived = hashlib.sha256(_PURPOSE + secret).digest()
    key = nkeys.Key(nkeys.Kind.ACCOUNT, derived)
    return callout.Signing(answer=key, node=key, auth="", plugins=permissions.PLUGINS)


def main(arguments: Sequence[str]) -> None:
    """Write the public key to the file. Raises SystemExit if an argument or a file is unusable."""
    if len(arguments) != _ARGUMENTS:
        raise SystemExit("usage: python -m muster_gate.issuer PASSWORD FILE")
    _, password, file = arguments
    try:
        key = derive_signing(Path(password).read_bytes()).answer
        Path(file).write_text(f"NATS_GATE_ISSUER: {key.public}\n")
    except OSError as error:
        raise SystemExit(f"{error.filename}: {error.strerror}") from None
    except ValueError as error:
        raise SystemExit(f"{password}: {error}") from None


if __name__ == "__main__":
    main(sys.argv)
