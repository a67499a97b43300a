"""Pure: What devices are called: the same after every restart, at most 63 characters, unique."""

import hashlib
import re
from typing import Final

_ID_MAX: Final = 63
_PLAIN = re.compile(r"[A-Za-z0-9._-]+")
_UNIQUE: Final = 8


def device_id(key: str, number: int) -> str:
    """Return the id of one replica of what `key` names, such as the path of a device node."""
    short = key.removeprefix("/dev/")
    tail = f"-{number}"
    if _PLAIN.fullmatch(short) and len(short + tail) <= _ID_MAX:
        return short + tail
    unique = f".{hashlib.sha256(key.encode(errors='surrogateescape')).hexdigest()[:_UNIQUE]}{tail}"
    readable = re.sub(r"[^A-Za-z0-9._-]+", "-", short).strip("-")
    return readable[-(_ID_MAX - len(unique)) :] + unique


def gpu_uuid(node: str, index: int) -> str:
    """Return the uuid of a simulated GPU: unique in the cluster, the same after every restart."""
    told = hashlib.sha256(f"{node}/{index}".encode()).hexdigest()
    return f"GPU-{told[:8]}-{told[8:12]}-{told[12:16]}-{told[16:20]}-{told[20:32]}"
