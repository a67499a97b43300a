"""Adapter: the Kubernetes API: carries out what is decided about a node's labels.

If somebody else keeps changing the same label, we stop after ten writes within a minute, and log
that.
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
_PERIOD_S: Final = 60.0
_CONTESTED: Final = f"written {_WRITES_MAX} times within a minute: somebody else keeps changing it"


class LabelWriter:
    """Writes labels while `may_write`; `node_api` is None where there is no cluster."""

    def __init__(
        self,
        nodes: fleet.Fleet,
        rules: decisions.Rules,
        node_api: cluster_api.NodeApi | None,
        *,
        may_write: Callable[[], bool],
    ) -> None:
        self._fleet = nodes
        self._rules = rules
        self._nodes = node_api
        self._may_write = may_write
        self._write_limit = pace.WriteLimit(_WRITES_MAX, _PERIOD_S)
        self._contested: set[str] = set()
        self._clock = asyncio.get_running_loop().time

    async def reconcile(self, name: str) -> tuple[decisions.Decision, bool]:
        """Decide about a node and act; return the decision, and whether a refusal is retriable."""
        status = self._fleet.status(name)
        if status is None:
            return decisions.Decision(decisions.Action.NOTHING, {}, "no such node"), False
        decision = decisions.decide(
            status,
            self._rules,
            report=self._fleet.report(name),
            covering=self._fleet.covering_scheme(),
            objection=None if self._rules.policy.partial else self._fleet.objection(),
        )
        if decision.action not in {decisions.Action.APPLY, decisions.Action.WITHDRAW}:
            return decision, False
        if self._fleet.are_nodes_unknown or not self._may_write():
            return _wait(decision, "the Kubernetes API is unavailable"), False
        if not self._write_limit.may_write(name, self._clock()):
            if name not in self._contested:
                self._contested.add(name)
                logs.logger().warning("label_contested", node=name, writes=_WRITES_MAX)
            return _wait(decision, _CONTESTED), False
        self._contested.discard(name)
        self._write_limit.note_write(name, self._clock())
        return await self._write(status, decision)

    def forget(self) -> None:
        """Forget writes that no longer count."""
        self._write_limit.forget(self._clock())

    def drop(self, name: str) -> None:
        """Forget a node that is gone."""
        self._contested.discard(name)

    async def _write(
        self, status: node_labels.LabelStatus, decision: decisions.Decision
    ) -> tuple[decisions.Decision, bool]:
        """Carry out a decision to write; return what came of it."""
        node_api = self._nodes
        assert node_api is not None, "without a cluster nothing is written"
        if decision.action is decisions.Action.WITHDRAW:
            result = await node_api.unlabel(status.node)
        else:
            provenance = _provenance(status, decision)
            result = await node_api.label(
                status.node, decision.labels, provenance=provenance, drop=decision.drop
            )
        if isinstance(result, model.Node):
            self._fleet.put_written(status.node, result)
            return decision, False
        if result.is_gone:
            return decisions.Decision(decisions.Action.NOTHING, {}, "the node is gone"), False
        if result.is_passing:
            return _wait(decision, result.text), False
        refusal = decisions.Decision(
            decisions.Action.REFUSE, decision.labels, result.text, decision.source
        )
        return refusal, not result.is_conflict


def _wait(decision: decisions.Decision, why: str) -> decisions.Decision:
    return decisions.Decision(decisions.Action.WAIT, decision.labels, why, decision.source)


def _provenance(status: node_labels.LabelStatus, decision: decisions.Decision) -> str:
    at = datetime.now(UTC).isoformat(timespec="seconds")
    value = decision.labels.get(decisions.KEY)
    provenance = node_labels.provenance(
        status, value, actor=model.FIELD_MANAGER, version=muster.__version__, at=at
    )
    return msgspec.json.encode(provenance).decode()
