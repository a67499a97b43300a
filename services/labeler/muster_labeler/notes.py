"""Adapter: the Kubernetes API: Events about nodes, their conditions, and the inventory for people.

None of it decides anything: what cannot be written is counted, said once, and let go.
"""

import zlib
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Final

import prometheus_client

from muster.kubernetes import api
from muster.service import logs
from muster_labeler import condition, desired, facts, inventory, nodes, sources
from muster_labeler import pace as pacing

_COMPONENT: Final = "muster-labeler"
_MESSAGE_MAX: Final = 1024
_REASONS: Final = {
    desired.Action.SUGGEST: ("Normal", "LabelsSuggested"),
    desired.Action.APPLY: ("Normal", "LabelsApplied"),
    desired.Action.WITHDRAW: ("Normal", "LabelsWithdrawn"),
    desired.Action.REFUSE: ("Warning", "LabelsRefused"),
}

_FAILED: Final = prometheus_client.Counter(
    "muster_labeler_notes_failed_total", "What was to be noted in Kubernetes and was not.", ["what"]
)


class Notes:
    """What a replica that leads writes down in the cluster besides labels."""

    def __init__(
        self, api: api.Api, pace: pacing.Pace, *, namespace: str, timeout_s: float
    ) -> None:
        self._api = api
        self._pace = pace
        self._namespace = namespace
        self._timeout_s = timeout_s
        self._written = -1
        self._left_out = False
        self._ails: set[str] = set()

    async def tell(self, node: facts.Node, decision: desired.Decision) -> None:
        """Write a Kubernetes Event about a decision, if it is one to tell."""
        if decision.action not in _REASONS:
            return
        kind, reason = _REASONS[decision.action]
        labels = ", ".join(f"{key}={value}" for key, value in sorted(decision.labels.items()))
        at = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        event = {
            "apiVersion": "v1",
            "kind": "Event",
            "metadata": {"generateName": "muster-labeler.", "namespace": "default"},
            "involvedObject": {
                "apiVersion": "v1",
                "kind": "Node",
                "name": node.name,
                "uid": node.uid,
            },
            "type": kind,
            "reason": reason,
            "message": f"{labels or 'no label'}: {decision.reason}"[:_MESSAGE_MAX],
            "source": {"component": _COMPONENT},
            "reportingComponent": _COMPONENT,
            "firstTimestamp": at,
            "lastTimestamp": at,
            "count": 1,
        }
        path = "/api/v1/namespaces/default/events"
        answer = await self._write("POST", path, event, content=api.JSON)
        self._note("event", answer)

    async def judge(self, node: facts.Node, wanted: condition.Condition) -> bool:
        """Write a node's condition; return whether it is there."""
        body = condition.patch(node.name, node.uid, wanted, at=datetime.now(UTC))
        query = {"fieldManager": facts.MANAGER, "force": "false"}
        answer = await self._write("PATCH", f"{nodes.PATH}/{node.name}/status", body, query=query)
        self._note("condition", answer)
        return answer.is_ok

    async def list_gpus(self, kinds: dict[str, sources.Kinds], simulated: frozenset[str]) -> bool:
        """Write down what agents reported, if it is not there yet; return whether it is."""
        text = inventory.encoded(kinds, simulated)
        mark = zlib.crc32(text.encode())
        left_out = kinds.keys() - inventory.decoded(text)[0].keys()
        if left_out and not self._left_out:
            logs.logger().warning("inventory_cut", nodes=len(left_out), such_as=min(left_out))
        self._left_out = bool(left_out)
        if mark == self._written:
            return True
        path = f"/api/v1/namespaces/{self._namespace}/configmaps/{inventory.CONFIG_MAP}"
        body = {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": {"name": inventory.CONFIG_MAP, "namespace": self._namespace},
            "data": {inventory.KEY: text},
        }
        query = {"fieldManager": facts.MANAGER, "force": "true"}
        answer = await self._write("PATCH", path, body, query=query)
        self._note("inventory", answer)
        if answer.is_ok:
            self._written = mark
        return answer.is_ok

    async def _write(
        self,
        verb: str,
        path: str,
        body: object,
        *,
        query: Mapping[str, str] | None = None,
        content: str = api.APPLY,
    ) -> api.Answer:
        return await nodes.write(
            self._api,
            self._pace,
            verb,
            path,
            query=query,
            body=body,
            content=content,
            timeout_s=self._timeout_s,
        )

    def _note(self, what: str, answer: api.Answer) -> None:
        if answer.is_ok:
            self._ails.discard(what)
            return
        _FAILED.labels(what).inc()
        if what not in self._ails:
            self._ails.add(what)
            logs.logger().warning("note_failed", what=what, error=answer.problem)
