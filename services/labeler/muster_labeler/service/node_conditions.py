"""Adapter: the Kubernetes API: health's verdicts on a node's plugins, as a node condition."""

from collections.abc import Awaitable, Callable, Mapping
from datetime import datetime
from typing import Final

import msgspec

from muster import vocabulary
from muster.vocabulary import Verdict
from muster_labeler import model

TYPE: Final = model.CONDITION

_GOOD: Final = (Verdict.HEALTHY, Verdict.MAINTENANCE, Verdict.DEGRADED)
_UNREACHABLE: Final = (Verdict.UNREACHABLE, Verdict.NODE_DOWN)
_MESSAGE_MAX: Final = 1024


class Condition(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """A node condition without its times: equal as long as nothing changed."""

    type: str = TYPE
    status: str
    reason: str
    message: str


Write = Callable[[model.Node, Condition], Awaitable[bool]]
"""Writes the condition of a node; returns whether that succeeded."""


class NodeConditionWriter:
    """The conditions of all nodes, as they should be and as they were last written."""

    def __init__(self, write: Write | None) -> None:
        self._write = write
        self._verdicts: dict[str, dict[str, tuple[int, vocabulary.Verdict]]] = {}
        self._written: dict[str, Condition] = {}
        self._unwritten: set[str] = set()

    def observe_verdict(self, verdict: vocabulary.VerdictChanged) -> bool:
        """Store a verdict; return False if it is of an earlier leader than the last one.

        Leaders' terms grow even if their bucket is lost, see muster.nats.jetstream.
        """
        verdicts = self._verdicts.setdefault(verdict.node, {})
        newest = verdicts.get(verdict.plugin)
        if newest is not None and newest[0] > verdict.leader:
            return False
        verdicts[verdict.plugin] = verdict.leader, verdict.verdict
        return True

    async def write(self, node: model.Node) -> None:
        """Write the condition of a node, if it differs from the one last written."""
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
        """Forget a node that is gone."""
        for kept in (self._verdicts, self._written):
            kept.pop(name, None)
        self._unwritten.discard(name)

    def forget_written(self) -> None:
        """Forget what was written: another replica writes from now on."""
        self._written.clear()


def condition_of(verdicts: Mapping[str, Verdict]) -> Condition:
    """Return the condition of a node from the last verdict on each of its plugins.

    The worst counts: a plugin that is down comes before one that cannot be reached.
    """
    down = {name: v for name, v in verdicts.items() if v not in _GOOD and v not in _UNREACHABLE}
    unreachable = {name: v for name, v in verdicts.items() if v in _UNREACHABLE}
    worst = down or unreachable
    status = "False" if down else "Unknown" if unreachable or not verdicts else "True"
    shown = worst or verdicts
    message = ", ".join(f"{name}: {shown[name]}" for name in sorted(shown))
    first = shown[min(shown)] if shown else Verdict.UNREACHABLE
    reason = "".join(word.capitalize() for word in first.split("_"))
    return Condition(status=status, reason=reason, message=message[:_MESSAGE_MAX])


def condition_patch(node: str, uid: str, wanted: Condition, *, at: datetime) -> dict[str, object]:
    """Return the server-side apply of a condition that has changed at this time."""
    time = at.strftime("%Y-%m-%dT%H:%M:%SZ")
    condition = {**msgspec.to_builtins(wanted), "lastTransitionTime": time}
    return {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {"name": node, "uid": uid},
        "status": {"conditions": [{**condition, "lastHeartbeatTime": time}]},
    }
