"""Pure: What a reported fault means for a GPU: the verdict on an XID, and scripted faults."""

from collections.abc import Iterable
from datetime import datetime
from typing import Annotated, Final

import msgspec

from muster_plugin.gpu import xid_policy
from muster_plugin.model import gpu

LOST: Final = 79
"""After it NVML answers GPU_IS_LOST."""
RESET: Final = frozenset({46, 62, 64, 95, 110, 119, 120, 136, 140, 143, 155, 156, 158})
"""After these a simulated GPU asks for a reset: those that NVIDIA's catalogue answers with one, and
NVIDIA's plugin does not ignore."""


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """What an XID does to the GPU, why in words, and which rule of whose policy says so."""

    action: xid_policy.Action
    code: str
    reason: str
    policy: str

    @property
    def effect(self) -> gpu.Effect | None:
        """What holds against the GPU from now on, if anything."""
        if self.action is xid_policy.Action.IGNORE:
            return None
        return gpu.Effect.UNHEALTHY if self.action.is_unhealthy else gpu.Effect.DEGRADED


def xid_verdict(xid: int, policy: xid_policy.Policy) -> Verdict:
    """Say what an XID means."""
    rule = policy.rule(xid)
    reason = f"XID {xid}: {rule.title}"
    return Verdict(action=rule.action, code=f"xid-{xid}", reason=reason, policy=str(rule))


def poll(uuid: str, xids: Iterable[int], at: datetime) -> gpu.Poll:
    """Return what a simulated GPU answers while these XIDs hold."""
    active = frozenset(xids)
    if LOST in active:
        return gpu.Poll(gpu=uuid, at=at, error="GPU_IS_LOST")
    action = 1 if active & RESET else 0
    return gpu.Poll(gpu=uuid, at=at, recovery_action=action, ecc_uncorrected=0)


Index = Annotated[int, msgspec.Meta(ge=0, le=63)]


class ScriptLine(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One line of a fault script: an XID occurs on a GPU, or is cleared."""

    device: Index
    xid: xid_policy.Xid | None = None
    clear: xid_policy.Xid | None = None

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
    active: set[tuple[int, int]] = set()
    bad: list[str] = []
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip():
            continue
        try:
            entry = _LINE.decode(line)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            bad.append(f"line {number}: {error}")
            continue
        if entry.xid is not None:
            active.add((entry.device, entry.xid))
        elif entry.clear is not None:
            active.discard((entry.device, entry.clear))
    return Script(holding=frozenset(active), bad_lines=tuple(bad))
