"""Adapter: files: tells nats-server by which key it knows the gate's answers.

python -m muster_gate.issuer PASSWORD FILE

PASSWORD is the file with the gate's password. FILE becomes nats-server's configuration: a variable,
and no secret.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

from muster_gate import callout

_ARGUMENTS = 3


def main(arguments: Sequence[str]) -> None:
    """Write the file. Raises SystemExit for a mistake."""
    if len(arguments) != _ARGUMENTS:
        raise SystemExit("usage: python -m muster_gate.issuer PASSWORD FILE")
    _, password, file = arguments
    try:
        key = callout.derive_signing(Path(password).read_bytes()).answer
        Path(file).write_text(f"NATS_GATE_ISSUER: {key.public}\n")
    except OSError as error:
        raise SystemExit(f"{error.filename}: {error.strerror}") from None
    except ValueError as error:
        raise SystemExit(f"{password}: {error}") from None


if __name__ == "__main__":
    main(sys.argv)
