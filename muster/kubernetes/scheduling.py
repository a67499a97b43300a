"""Pure: evaluates selectors, node affinity and quantities, as the Kubernetes scheduler does.

Source: apimachinery pkg/labels/selector.go and component-helpers/scheduling/corev1 nodeaffinity
(1.36); apimachinery pkg/api/resource, quantity.go and suffix.go: a quantity is written `8`, `500m`,
`16Gi` or `1e3`.
"""

import re
from collections.abc import Mapping
from fractions import Fraction
from typing import Final

from muster.kubernetes import objects

REMOVAL_TAINTS: Final = frozenset(
    {
        "ToBeDeletedByClusterAutoscaler",
        "karpenter.sh/disrupted",
        "karpenter.sh/disruption",
        "node.kubernetes.io/out-of-service",
    }
)
"""Taints of nodes that are about to be removed."""


def matches(selector: objects.LabelSelector, labels: Mapping[str, str]) -> bool:
    """Return whether labels match all requirements of a selector; an empty selector matches all."""
    return (selector.match_labels or {}).items() <= labels.items() and all(
        holds(requirement, labels) for requirement in selector.match_expressions or ()
    )


def selector_query(selector: objects.LabelSelector) -> str:
    """Return a selector in the form of the query parameter `labelSelector` of a list or watch."""
    parts = [f"{key}={value}" for key, value in sorted((selector.match_labels or {}).items())]
    for requirement in selector.match_expressions or ():
        values = ",".join(requirement.values or ())
        match requirement.operator:
            case "In" | "NotIn":
                parts.append(f"{requirement.key} {requirement.operator.lower()} ({values})")
            case "DoesNotExist":
                parts.append(f"!{requirement.key}")
            case _:
                parts.append(requirement.key)
    return ",".join(parts)


def selects_node(spec: objects.PodSpec, *, name: str, labels: Mapping[str, str]) -> bool:
    """Return whether a pod's node selector and required affinity accept a node.

    A term without requirements selects nothing.
    """
    if not (spec.node_selector or {}).items() <= labels.items():
        return False
    affinity = spec.affinity and spec.affinity.node_affinity
    if not affinity or affinity.required is None:
        return True
    fields = {"metadata.name": name}
    return any(
        (term.match_expressions or term.match_fields)
        and all(holds(requirement, labels) for requirement in term.match_expressions or ())
        and all(holds(requirement, fields) for requirement in term.match_fields or ())
        for term in affinity.required.node_selector_terms or ()
    )


def node_label_keys(spec: objects.PodSpec) -> frozenset[str]:
    """Return the keys of the node labels on which `selects_node` depends."""
    keys = set(spec.node_selector or ())
    affinity = spec.affinity and spec.affinity.node_affinity
    if affinity and affinity.required:
        for term in affinity.required.node_selector_terms or ():
            keys.update(requirement.key for requirement in term.match_expressions or ())
    return frozenset(keys)


def holds(requirement: objects.Requirement, labels: Mapping[str, str]) -> bool:
    """Return whether one requirement matches; a requirement with an unknown operator never does."""
    value, values = labels.get(requirement.key), requirement.values or ()
    results = {
        "In": value in values,
        "NotIn": value not in values,
        "Exists": value is not None,
        "DoesNotExist": value is None,
        "Gt": _difference(value, values) > 0,
        "Lt": _difference(value, values) < 0,
    }
    return results.get(requirement.operator, False)


def _difference(value: str | None, values: tuple[str, ...]) -> int:
    """Compare two whole numbers; other values count as equal, so that neither Gt nor Lt matches."""
    try:
        return int(value or "") - int(values[0])
    except (ValueError, IndexError):
        return 0


_SUFFIXES: Final[Mapping[str, Fraction]] = {
    "": Fraction(1),
    **{name: Fraction(1000) ** power for power, name in enumerate(("n", "u", "m"), -3)},
    **{name: Fraction(1000) ** power for power, name in enumerate("kMGTPE", 1)},
    **{f"{name}i": Fraction(1024) ** power for power, name in enumerate("KMGTPE", 1)},
}
_QUANTITY: Final = re.compile(
    r"([+-]?(?:[0-9]{1,24}(?:\.[0-9]{0,24})?|\.[0-9]{1,24}))(?:[eE]([+-]?[0-9]{1,2})|(\w{0,2}))"
)


class DeviceAttribute(objects.Object, frozen=True):
    """An attribute of a DRA device, if it is text."""

    string: str | None = None


class DeviceCapacity(objects.Object, frozen=True):
    """The capacity of a DRA device, a quantity."""

    value: str = ""


class SliceDevice(objects.Object, frozen=True):
    """A device of a ResourceSlice; v1beta1 keeps all its fields except the name in `basic`."""

    name: str = ""
    attributes: dict[str, DeviceAttribute] | None = None
    capacity: dict[str, DeviceCapacity] | None = None
    basic: "SliceDevice | None" = None


class ResourceSliceSpec(objects.Object, frozen=True):
    """The devices that a driver offers, on one node or on all nodes."""

    driver: str = ""
    node_name: str = ""
    all_nodes: bool = False
    devices: tuple[SliceDevice, ...] | None = None


class ResourceSlice(objects.HasMetadata, frozen=True):
    """A ResourceSlice of Dynamic Resource Allocation."""

    spec: ResourceSliceSpec | None = None


class VolumeClaimSpec(objects.Object, frozen=True):
    """The specification of a volume claim; without a class, only a default class can serve it."""

    storage_class_name: str = ""


class VolumeClaimStatus(objects.Object, frozen=True):
    """Whether a volume claim is bound to its volume."""

    phase: str = ""


class VolumeClaim(objects.HasMetadata, frozen=True):
    """A PersistentVolumeClaim."""

    spec: VolumeClaimSpec = VolumeClaimSpec()
    status: VolumeClaimStatus = VolumeClaimStatus()


def is_extended(resource: str) -> bool:
    """Return whether a name is that of an extended resource, as device plugins serve them."""
    domain, slash, _ = resource.partition("/")
    return bool(slash) and domain != "kubernetes.io" and not domain.endswith(".kubernetes.io")


def parse_quantity(text: str | int) -> Fraction | None:
    """Return the exact value of a quantity; None if the text is not a quantity.

    JSON may contain a number where the API writes a string.
    """
    if isinstance(text, int):
        return Fraction(text)
    match = _QUANTITY.fullmatch(text)
    if match is None or (match[3] or "") not in _SUFFIXES:
        return None
    scale = Fraction(10) ** int(match[2]) if match[2] else _SUFFIXES[match[3] or ""]
    return Fraction(match[1].rstrip(".")) * scale


def whole_quantity(text: str | int) -> int | None:
    """Return a quantity without its fraction (`2500m` is 2); None if the text is not a quantity."""
    value = parse_quantity(text)
    return None if value is None else int(value)


def quantity_count(text: str | int) -> int:
    """Return a quantity as a count, such as of devices; 0 if it is not a valid count."""
    return max(0, whole_quantity(text) or 0)
