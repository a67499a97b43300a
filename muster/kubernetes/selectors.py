"""Pure: label selectors, and which nodes a pod may run on by its node selector and affinity.

Source: apimachinery pkg/labels/selector.go and component-helpers/scheduling/corev1 nodeaffinity
(1.36).
"""

from collections.abc import Mapping

from muster.kubernetes import objects


def matches(selector: objects.LabelSelector, labels: Mapping[str, str]) -> bool:
    """Return whether everything that a selector requires holds; an empty one selects everything."""
    return (selector.match_labels or {}).items() <= labels.items() and all(
        holds(requirement, labels) for requirement in selector.match_expressions or ()
    )


def query(selector: objects.LabelSelector) -> str:
    """Return a selector as the query parameter `labelSelector` of a list or watch has it."""
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

    A term without any requirement selects nothing.
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
    """Return the node labels on which `selects_node` depends."""
    keys = set(spec.node_selector or ())
    affinity = spec.affinity and spec.affinity.node_affinity
    if affinity and affinity.required:
        for term in affinity.required.node_selector_terms or ():
            keys.update(requirement.key for requirement in term.match_expressions or ())
    return frozenset(keys)


def holds(requirement: objects.Requirement, labels: Mapping[str, str]) -> bool:
    """Return whether one requirement holds; one with an unknown operator never does."""
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
    """Compare two whole numbers; what is no number counts as equal, so that nothing holds."""
    try:
        return int(value or "") - int(values[0])
    except (ValueError, IndexError):
        return 0
