"""Pure: Which nodes a DaemonSet wants a pod on, as its controller decides it.

Source: pkg/controller/daemon/daemon_controller.go, NodeShouldRunDaemonPod, and
component-helpers/scheduling/corev1 nodeaffinity and helpers (1.36).
"""

from collections.abc import Iterable, Mapping
from typing import Final

from muster_health.kubernetes import objects

_KEEPS_OFF: Final = frozenset({"NoSchedule", "NoExecute"})
_ALWAYS: Final = tuple(
    objects.Toleration(key=f"node.kubernetes.io/{key}", operator="Exists", effect=effect)
    for key, effect in (
        ("not-ready", "NoExecute"),
        ("unreachable", "NoExecute"),
        ("disk-pressure", "NoSchedule"),
        ("memory-pressure", "NoSchedule"),
        ("pid-pressure", "NoSchedule"),
        ("unschedulable", "NoSchedule"),
    )
)
_WITH_HOST_NETWORK: Final = objects.Toleration(
    key="node.kubernetes.io/network-unavailable", operator="Exists", effect="NoSchedule"
)


def wants(
    template: objects.TemplateSpec,
    name: str,
    labels: objects.Labels,
    taints: Iterable[objects.Taint],
) -> bool:
    """Tell whether a pod of this template belongs on a node."""
    tolerations = (*(template.tolerations or ()), *_ALWAYS)
    if template.host_network:
        tolerations += (_WITH_HOST_NETWORK,)
    return is_selected(template, name, labels) and not any(
        taint.effect in _KEEPS_OFF and not any(_tolerates(one, taint) for one in tolerations)
        for taint in taints
    )


def is_selected(template: objects.TemplateSpec, name: str, labels: objects.Labels) -> bool:
    """Tell whether a template's node selector and required affinity accept a node."""
    if not (template.node_selector or {}).items() <= labels.items():
        return False
    affinity = template.affinity and template.affinity.node_affinity
    if not affinity or affinity.required is None:
        return True
    fields = {"metadata.name": name}
    return any(
        (term.match_expressions or term.match_fields)
        and all(_holds(one, labels) for one in term.match_expressions or ())
        and all(_holds(one, fields) for one in term.match_fields or ())
        for term in affinity.required.node_selector_terms or ()
    )


def keys(template: objects.TemplateSpec) -> frozenset[str]:
    """Return the node labels that a template asks about."""
    found = set(template.node_selector or ())
    affinity = template.affinity and template.affinity.node_affinity
    if affinity and affinity.required:
        for term in affinity.required.node_selector_terms or ():
            found.update(one.key for one in term.match_expressions or ())
    return frozenset(found)


def _holds(one: objects.Requirement, labels: Mapping[str, str]) -> bool:
    value, values = labels.get(one.key), one.values or ()
    answers = {
        "In": value in values,
        "NotIn": value not in values,
        "Exists": value is not None,
        "DoesNotExist": value is None,
        "Gt": _difference(value, values) > 0,
        "Lt": _difference(value, values) < 0,
    }
    return answers.get(one.operator, False)


def _difference(value: str | None, values: tuple[str, ...]) -> int:
    """Compare two whole numbers; what is none is as if equal, so that nothing holds."""
    try:
        return int(value or "") - int(values[0])
    except (ValueError, IndexError):
        return 0


def _tolerates(one: objects.Toleration, taint: objects.Taint) -> bool:
    if one.effect and one.effect != taint.effect:
        return False
    if one.key and one.key != taint.key:
        return False
    if one.operator == "Exists":
        return True
    return bool(one.key) and one.operator in {"", "Equal"} and one.value == taint.value
