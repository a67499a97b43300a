"""Pure. What a reported fault means for a GPU: the verdict on an XID, and scripted faults.

The policy is that of NVIDIA's device plugin (k8s-device-plugin internal/rm/health.go): a few XIDs
are the fault of an application and say nothing about the GPU, every other one takes it out of use.
Titles are those of NVIDIA's XID catalogue, state of 2025-10-29.
"""

from collections.abc import Mapping
from typing import Annotated, Final

import msgspec

CATALOGUE: Final = "NVIDIA XID catalogue 2025-10-29"
POLICY: Final = "k8s-device-plugin internal/rm/health.go"

_APPLICATION: Final[Mapping[int, str]] = {
    13: "Graphics Engine Exception",
    31: "GPU memory page fault",
    43: "GPU stopped processing",
    45: "Preemptive cleanup after an earlier error",
    68: "NVDEC0 Exception",
    109: "Context Switch Timeout Error",
}
_DEVICE: Final[Mapping[int, str]] = {
    46: "GPU stopped processing",
    48: "Double Bit ECC Error",
    62: "Internal micro-controller halt",
    63: "GPU memory remapping event",
    64: "GPU memory remapping failure",
    74: "NVLink Error",
    79: "GPU has fallen off the bus",
    92: "High single-bit ECC error rate",
    94: "Contained memory error",
    95: "Uncontained memory error",
    110: "Security Fault Error",
    119: "GSP RPC Timeout",
    120: "GSP Error",
    121: "C2C Error",
    136: "Link Training Failed",
    140: "ECC Unrecovered Error",
    143: "GPU Initialization Error",
    154: "GPU Recovery Action Changed",
    155: "NVLINK: SW Defined Error",
    156: "Resource Retirement Event",
}


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """Whether the GPU stays in use, and in words why."""

    unhealthy: bool
    code: str
    reason: str


def verdict(xid: int) -> Verdict:
    """Say what an XID means; an unknown one is taken seriously."""
    if xid in _APPLICATION:
        reason = f"XID {xid}: {_APPLICATION[xid]}; an application's fault ({POLICY})"
        return Verdict(unhealthy=False, code=f"xid-{xid}", reason=reason)
    title = _DEVICE.get(xid)
    told = f"{title} ({CATALOGUE})" if title else f"not one of an application's ({POLICY})"
    return Verdict(unhealthy=True, code=f"xid-{xid}", reason=f"XID {xid}: {told}")


Xid = Annotated[int, msgspec.Meta(ge=1, le=999)]
Index = Annotated[int, msgspec.Meta(ge=0, le=63)]


class ScriptLine(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One line of a fault script: an XID occurs on a GPU, or is cleared."""

    device: Index
    xid: Xid | None = None
    clear: Xid | None = None

    def __post_init__(self) -> None:
        """Refuse a line that says both or nothing."""
        if (self.xid is None) == (self.clear is None):
            raise ValueError("give either xid or clear")


class Script(msgspec.Struct, frozen=True, kw_only=True):
    """What a fault script comes to: the XIDs that hold, as (GPU index, XID), and bad lines."""

    holding: frozenset[tuple[int, int]] = frozenset()
    bad_lines: tuple[str, ...] = ()


_LINE = msgspec.json.Decoder(ScriptLine)


def script(text: bytes) -> Script:
    """Read a whole fault script; a line that cannot be read is named and skipped."""
    holding: set[tuple[int, int]] = set()
    bad: list[str] = []
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip():
            continue
        try:
            said = _LINE.decode(line)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            bad.append(f"line {number}: {error}")
            continue
        if said.xid is not None:
            holding.add((said.device, said.xid))
        elif said.clear is not None:
            holding.discard((said.device, said.clear))
    return Script(holding=frozenset(holding), bad_lines=tuple(bad))
