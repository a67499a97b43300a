"""Adapter: the Kubernetes API: what health concluded about a node's plugins, as its condition."""

from collections.abc import Awaitable, Callable, Mapping
from datetime import datetime
from typing import Final

import msgspec

from muster import vocabulary
from muster.vocabulary import Verdict
from muster_labeler import model

TYPE: Final = model.CONDITION

_WELL: Final = (Verdict.HEALTHY, Verdict.MAINTENANCE, Verdict.DEGRADED)
_UNSEEN: Final = (Verdict.UNREACHABLE, Verdict.NODE_DOWN)
_MESSAGE_MAX: Final = 1024


class Condition(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """A node condition but for its times; the same while nothing changed."""

    type: str = TYPE
    status: str
    reason: str
    message: str


Write = Callable[[model.Node, Condition], Awaitable[bool]]
"""Writes the condition of a node; returns whether it is there."""


class Judging:
    """The conditions of all nodes, as they should be and as we last wrote them."""

    def __init__(self, write: Write | None) -> None:
        self._write = write
        self._verdicts: dict[str, dict[str, tuple[int, vocabulary.Verdict]]] = {}
        self._written: dict[str, Condition] = {}
        self._unwritten: set[str] = set()

    def hear(self, verdict: vocabulary.VerdictChanged) -> bool:
        """Take a verdict; False if it is of a leader before the one who spoke last.

        Leaders' numbers grow even across a lost bucket, see muster.nats.admin.
        """
        known = self._verdicts.setdefault(verdict.node, {})
        newest = known.get(verdict.plugin)
        if newest is not None and newest[0] > verdict.leader:
            return False
        known[verdict.plugin] = verdict.leader, verdict.verdict
        return True

    async def judge(self, node: model.Node) -> None:
        """Write the condition of a node, if it is another than we last wrote."""
        verdicts = self._verdicts.get(node.name)
        if not verdicts or self._write is None:
            return
        wanted = condition_of({plugin: verdict for plugin, (_, verdict) in verdicts.items()})
        if self._written.get(node.name) == wanted:
            return
        if await self._write(node, wanted):
            self._written[node.name] = wanted
            self._unwritten.discard(node.name)
        else:
            self._unwritten.add(node.name)

    def unwritten(self) -> list[str]:
        """Return the nodes whose condition could not be written."""
        return sorted(self._unwritten)

    def drop(self, name: str) -> None:
        """Take that a node is gone."""
        for kept in (self._verdicts, self._written):
            kept.pop(name, None)
        self._unwritten.discard(name)

    def forget(self) -> None:
        """Take that somebody else writes from now on: what stands there we do not know."""
        self._written.clear()


def condition_of(verdicts: Mapping[str, Verdict]) -> Condition:
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


def condition_patch(node: str, uid: str, wanted: Condition, *, at: datetime) -> dict[str, object]:
    """Return the server-side apply of a condition; its times are those of this change."""
    time = at.strftime("%Y-%m-%dT%H:%M:%SZ")
    condition = {**msgspec.to_builtins(wanted), "lastTransitionTime": time}
    return {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {"name": node, "uid": uid},
        "status": {"conditions": [{**condition, "lastHeartbeatTime": time}]},
    }
