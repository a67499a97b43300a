"""Adapter: the Kubernetes API: what health concluded about a node's plugins, as its condition."""

from typing import TYPE_CHECKING

from muster import vocabulary
from muster_labeler import condition, facts

if TYPE_CHECKING:
    # it loads the Kubernetes client, which not everybody has use for
    from muster_labeler import notes


class Judging:
    """The conditions of all nodes, as they should be and as we last wrote them."""

    def __init__(self, notes: "notes.Notes | None") -> None:
        self._notes = notes
        self._verdicts: dict[str, dict[str, tuple[int, vocabulary.Verdict]]] = {}
        self._written: dict[str, condition.Condition] = {}
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

    async def judge(self, node: facts.Node) -> None:
        """Write the condition of a node, if it is another than we last wrote."""
        verdicts = self._verdicts.get(node.name)
        if not verdicts or self._notes is None:
            return
        wanted = condition.of({plugin: verdict for plugin, (_, verdict) in verdicts.items()})
        if self._written.get(node.name) == wanted:
            return
        if await self._notes.judge(node, wanted):
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
