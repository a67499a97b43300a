"""Pure: Whether the device plugins of a node are well, as a node condition for other tools."""

from collections.abc import Mapping
from datetime import datetime
from typing import Final

import msgspec

from muster.vocabulary import Verdict
from muster_labeler import facts

TYPE: Final = facts.CONDITION

_WELL: Final = (Verdict.HEALTHY, Verdict.MAINTENANCE, Verdict.DEGRADED)
_UNSEEN: Final = (Verdict.UNREACHABLE, Verdict.NODE_DOWN)
_MESSAGE_MAX: Final = 1024


class Condition(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """A node condition but for its times; the same while nothing changed."""

    type: str = TYPE
    status: str
    reason: str
    message: str


def of(verdicts: Mapping[str, Verdict]) -> Condition:
    """Return the condition of a node from what health last concluded about each plugin.

    The worst counts: one that is down before one that cannot be seen.
    """
    bad = {name: v for name, v in verdicts.items() if v not in _WELL and v not in _UNSEEN}
    unseen = {name: v for name, v in verdicts.items() if v in _UNSEEN}
    worst = bad or unseen
    status = "False" if bad else "Unknown" if unseen or not verdicts else "True"
    shown = worst or verdicts
    told = ", ".join(f"{name}: {shown[name]}" for name in sorted(shown))
    first = shown[min(shown)] if shown else Verdict.UNREACHABLE
    reason = "".join(word.capitalize() for word in first.split("_"))
    return Condition(status=status, reason=reason, message=told[:_MESSAGE_MAX])


def patch(node: str, uid: str, wanted: Condition, *, at: datetime) -> dict[str, object]:
    """Return the server-side apply of a condition; its times are those of this change."""
    time = at.strftime("%Y-%m-%dT%H:%M:%SZ")
    condition = {**msgspec.to_builtins(wanted), "lastTransitionTime": time}
    return {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {"name": node, "uid": uid},
        "status": {"conditions": [{**condition, "lastHeartbeatTime": time}]},
    }
