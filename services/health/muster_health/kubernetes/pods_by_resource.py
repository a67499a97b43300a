"""Pure: Which pods of a node hold its devices: as Kubernetes lists them, and nothing else of it."""

from collections.abc import Collection
from typing import Final

import msgspec

_ENDED: Final = frozenset({"Succeeded", "Failed"})
_NONE: Final = frozenset({b'"0"', b"0"})


class _Resources(msgspec.Struct, frozen=True):
    requests: dict[str, msgspec.Raw] | None = None
    limits: dict[str, msgspec.Raw] | None = None


class _Container(msgspec.Struct, frozen=True):
    resources: _Resources = _Resources()


class _Metadata(msgspec.Struct, frozen=True):
    name: str = ""
    namespace: str = ""


class _Spec(msgspec.Struct, frozen=True, rename="camel"):
    containers: tuple[_Container, ...] | None = None
    init_containers: tuple[_Container, ...] | None = None


class _Status(msgspec.Struct, frozen=True):
    phase: str = ""


class _Pod(msgspec.Struct, frozen=True):
    metadata: _Metadata = _Metadata()
    spec: _Spec = _Spec()
    status: _Status = _Status()


class _List(msgspec.Struct, frozen=True):
    items: tuple[_Pod, ...] | None = None


def of(listed: bytes, resources: Collection[str]) -> tuple[str, ...]:
    """Return who has not ended, and requests one of these: `namespace/name`, sorted.

    Raises what msgspec raises on bytes that are no list of pods.
    """
    pods = msgspec.json.decode(listed, type=_List).items or ()
    held = (pod.metadata for pod in pods if _holds(pod, resources))
    return tuple(sorted(f"{one.namespace}/{one.name}" for one in held))


def _holds(pod: _Pod, resources: Collection[str]) -> bool:
    """Tell whether one of its containers requests one of these; a sidecar is an init container.

    The API server requests what is only limited (core/v1 defaults.go, SetDefaults_Pod, 1.36).
    """
    if pod.status.phase in _ENDED:
        return False
    return any(
        resource in resources and bytes(amount) not in _NONE
        for one in (*(pod.spec.init_containers or ()), *(pod.spec.containers or ()))
        for said in (one.resources.limits, one.resources.requests)
        for resource, amount in (said or {}).items()
    )
