"""Adapter: the Kubernetes API: which rights we have, asked before anything is done."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import msgspec

from muster.kubernetes import api as kubernetes_api
from muster.service import logs

_PATH: Final = "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews"


@dataclass(frozen=True, slots=True)
class Right:
    """A verb on a resource, or on the one of that name; without a namespace in all of them."""

    verb: str
    resource: str
    group: str = ""
    namespace: str = ""
    name: str = ""

    def __str__(self) -> str:
        group = f".{self.group}" if self.group else ""
        name = f"/{self.name}" if self.name else ""
        where = f" in namespace {self.namespace}" if self.namespace else ""
        return f"{self.verb} {self.resource}{group}{name}{where}"


class _Status(msgspec.Struct, frozen=True):
    allowed: bool = False
    reason: str = ""


class _Review(msgspec.Struct, frozen=True):
    status: _Status = _Status()


async def missing(
    api: kubernetes_api.Api, rights: Sequence[Right], *, timeout_s: float
) -> list[Right]:
    """Return the rights that the API says we have not.

    A right about which it says nothing counts as there: the request itself will tell.
    """
    allowed = await asyncio.gather(*(_allowed(api, right, timeout_s) for right in rights))
    return [right for right, is_allowed in zip(rights, allowed, strict=True) if not is_allowed]


async def name_missing(
    api: kubernetes_api.Api, rights: Sequence[Right], *, timeout_s: float
) -> None:
    """Say which rights are missing, all at once: each would come to light by itself, and late."""
    lacking = await missing(api, rights, timeout_s=timeout_s)
    if lacking:
        logs.logger().warning("rights_missing", rights=[str(right) for right in lacking])


async def _allowed(api: kubernetes_api.Api, right: Right, timeout_s: float) -> bool:
    resource, _, subresource = right.resource.partition("/")
    attributes = {"verb": right.verb, "resource": resource, "group": right.group}
    if right.name:
        attributes["name"] = right.name
    if subresource:
        attributes["subresource"] = subresource
    if right.namespace:
        attributes["namespace"] = right.namespace
    review = {
        "apiVersion": "authorization.k8s.io/v1",
        "kind": "SelfSubjectAccessReview",
        "spec": {"resourceAttributes": attributes},
    }
    answer = await api.ask("POST", _PATH, body=review, timeout_s=timeout_s)
    if not answer.is_ok:
        return True
    try:
        return msgspec.json.decode(answer.body, type=_Review).status.allowed
    except kubernetes_api.UNREADABLE:
        return True
