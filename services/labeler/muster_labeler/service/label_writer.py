"""Adapter: the Kubernetes API: what is decided about a node's labels is done.

Whoever else changes the same label would be answered each time: after ten times within a minute we
wait, and say so.
"""

import asyncio
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Final

import msgspec

import muster
from muster.service import logs
from muster_labeler import model
from muster_labeler.kubernetes import cluster_api, pace
from muster_labeler.naming import node_labels
from muster_labeler.service import decisions, fleet

_WRITES_MAX: Final = 10
_WITHIN_S: Final = 60.0
_FOUGHT: Final = f"written {_WRITES_MAX} times within a minute: somebody else changes it, too"


class Hand:
    """Writes labels while it may; `door` is None where there is no cluster."""

    def __init__(
        self,
        known: fleet.Fleet,
        rules: decisions.Rules,
        door: cluster_api.Nodes | None,
        *,
        may_write: Callable[[], bool],
    ) -> None:
        self._fleet = known
        self._rules = rules
        self._door = door
        self._may_write = may_write
        self._restraint = pace.Restraint(_WRITES_MAX, _WITHIN_S)
        self._fought: set[str] = set()
        self._clock = asyncio.get_running_loop().time

    async def carry_out(self, name: str) -> tuple[decisions.Decision, bool]:
        """Return what became of a node, and whether a refusal may pass."""
        one = self._fleet.standing(name)
        if one is None:
            return decisions.Decision(decisions.Action.NOTHING, {}, "no such node"), False
        decision = decisions.decide(
            one,
            self._rules,
            report=self._fleet.report(name),
            covering=self._fleet.covering(),
            objection=None if self._rules.policy.partial else self._fleet.objection(),
        )
        if decision.action not in {decisions.Action.APPLY, decisions.Action.WITHDRAW}:
            return decision, False
        if self._fleet.is_blind or not self._may_write():
            return _waits(decision, "the Kubernetes API is away"), False
        if not self._restraint.may(name, self._clock()):
            if name not in self._fought:
                self._fought.add(name)
                logs.logger().warning("label_fought", node=name, writes=_WRITES_MAX)
            return _waits(decision, _FOUGHT), False
        self._fought.discard(name)
        self._restraint.wrote(name, self._clock())
        return await self._written(one, decision)

    def forget(self) -> None:
        """Forget what was written long ago."""
        self._restraint.forget(self._clock())

    def drop(self, name: str) -> None:
        """Forget a node that is gone."""
        self._fought.discard(name)

    async def _written(
        self, one: node_labels.Standing, decision: decisions.Decision
    ) -> tuple[decisions.Decision, bool]:
        """Write what was decided; return what became of it."""
        door = self._door
        assert door is not None, "only what could be read is written"
        if decision.action is decisions.Action.WITHDRAW:
            done = await door.unlabel(one.node)
        else:
            provenance = _provenance(one, decision)
            done = await door.label(
                one.node, decision.labels, provenance=provenance, drop=decision.drop
            )
        if isinstance(done, model.Node):
            self._fleet.written(one.node, done)
            return decision, False
        if done.is_gone:
            return decisions.Decision(decisions.Action.NOTHING, {}, "the node is gone"), False
        if done.is_passing:
            return _waits(decision, done.text), False
        refusal = decisions.Decision(
            decisions.Action.REFUSE, decision.labels, done.text, decision.source
        )
        return refusal, not done.is_conflict


def _waits(decision: decisions.Decision, why: str) -> decisions.Decision:
    return decisions.Decision(decisions.Action.WAIT, decision.labels, why, decision.source)


def _provenance(one: node_labels.Standing, decision: decisions.Decision) -> str:
    at = datetime.now(UTC).isoformat(timespec="seconds")
    value = decision.labels.get(decisions.KEY)
    written = node_labels.provenance(
        one, value, actor=model.MANAGER, version=muster.__version__, at=at
    )
    return msgspec.json.encode(written).decode()
