"""Adapter: the Kubernetes API: lists and removes what the labeler wrote besides labels."""

from collections.abc import Sequence
from http import HTTPStatus
from typing import Final

from muster.kubernetes import api
from muster_labeler import facts, inventory, pace
from muster_labeler import nodes as labelling

_LEASE: Final = "muster-labeler"


async def remove(
    api: api.Api, turns: pace.Pace, *, nodes: Sequence[str], namespace: str, timeout_s: float
) -> list[str]:
    """Remove our condition from nodes, the inventory and the Lease; return what was not."""
    left = []
    for name in nodes:
        # what an apply leaves out goes, if nobody else owns it
        answer = await labelling.write(
            api,
            turns,
            "PATCH",
            f"{labelling.PATH}/{name}/status",
            query={"fieldManager": facts.MANAGER, "force": "false"},
            body={"apiVersion": "v1", "kind": "Node", "metadata": {"name": name}},
            timeout_s=timeout_s,
        )
        left.append(answer)
    here = f"namespaces/{namespace}"
    for path in (
        f"/api/v1/{here}/configmaps/{inventory.CONFIG_MAP}",
        f"/apis/coordination.k8s.io/v1/{here}/leases/{_LEASE}",
    ):
        async with turns.turn():
            left.append(await api.ask("DELETE", path, timeout_s=timeout_s))
    return [one.problem for one in left if not one.is_ok and one.status != HTTPStatus.NOT_FOUND]
