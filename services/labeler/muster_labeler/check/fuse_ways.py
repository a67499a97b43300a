"""Pure: recommends the way in which pods in a cluster should get FUSE (FUSE010).

| way        | needed by pods                              | needed by nodes                   |
|------------|---------------------------------------------|-----------------------------------|
| volume     | nothing                                     | Linux 5.8, Kubernetes 1.25        |
| annotation | the right to mount                          | a runtime with NRI enabled        |
| resource   | the right to mount                          | Kubernetes 1.36, CDI; no Karpenter |
| plugin     | the right to mount, settings of autoscalers | nothing                           |

The first way without an obstacle is recommended. Whether NRI is enabled in a runtime is not
visible from outside its node, so the default of the runtime's version is assumed.
"""

import enum
import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Final, TypeAlias

from muster_labeler import model
from muster_labeler.check import findings, fuse_findings
from muster_labeler.check.findings import ClusterView, Finding, Id, Severity

_DOCS: Final = "docs/fuse.md"
_VERSION: Final = re.compile(r"v?(\d{1,6})\.(\d{1,6})(?!\d).*")
_LEVEL: Final = "pod-security.kubernetes.io/enforce"
_CLOSED: Final = ("fargate-", "gk3-")
"""Name prefixes of nodes where only the provider runs privileged pods: Fargate, GKE Autopilot."""
_NRI_UNSEEN: Final = (
    "whether NRI is enabled is not visible from here; containerd enables it by default since 2.0"
)
_NAMESPACES_UNREAD: Final = "namespaces could not be read"
_LIMITED: Final = "in these namespaces, pods can mount only with the volume"
_SHOWN_MAX: Final = 4

_Version: TypeAlias = tuple[int, int]


class Way(enum.StrEnum):
    """A way for pods to get FUSE, as named in the message."""

    VOLUME = "the volume of fuse.muster.dev"
    ANNOTATION = "the annotation fuse.muster.dev/device, through NRI"
    RESOURCE = "the resource muster.dev/fuse, through Dynamic Resource Allocation"
    PLUGIN = "the device plugin"


_REASONS: Final = {
    Way.VOLUME: "pods mount without a resource, a device or a capability",
    Way.ANNOTATION: "pods get the device without a resource; to mount, they need CAP_SYS_ADMIN",
    Way.RESOURCE: "autoscalers know the resource; to mount, pods need CAP_SYS_ADMIN. A claim of a "
    "ResourceClaimTemplate would stop a Cluster Autoscaler: request only the resource itself",
    Way.PLUGIN: "no other way works on every node; to mount, pods need CAP_SYS_ADMIN",
}


def evaluate(view: ClusterView) -> list[Finding]:
    """Return the recommendation; empty if none was requested, or if no node could be read."""
    if view.fuse is None or not view.nodes:
        return []
    nodes = [node for node in view.nodes if not node.name.startswith(_CLOSED)]
    if not nodes:
        text = "none of muster's ways works: the provider allows no privileged pods on these nodes"
        return [_recommended(f"{text}; use the provider's CSI drivers", _facts(view.nodes, view))]
    way, passed_over = recommend(nodes, view, view.fuse)
    evidence = (*_facts(nodes, view), *passed_over)
    installed = " (installed)" if _is_installed(way, view, view.fuse) else ""
    return [_recommended(f"use {way}{installed}: {_REASONS[way]}{_more(way, view)}", evidence)]


def recommend(
    nodes: Sequence[model.Node], view: ClusterView, support: findings.FuseSupport
) -> tuple[Way, tuple[str, ...]]:
    """Return the first way without an obstacle, and the reasons against the ways before it."""
    obstacles = {
        Way.VOLUME: _volume(nodes),
        Way.ANNOTATION: _annotation(nodes),
        Way.RESOURCE: _resource(nodes, view, support),
    }
    passed_over: list[str] = []
    for way, texts in obstacles.items():
        reasons = tuple(texts)
        if not reasons:
            return way, tuple(passed_over)
        passed_over.append(f"not {way}: {'; '.join(reasons)}")
    return Way.PLUGIN, tuple(passed_over)


def _volume(nodes: Sequence[model.Node]) -> Iterable[str]:
    yield from _older(nodes, lambda node: node.kernel, (5, 8), "Linux")
    yield from _older(nodes, lambda node: node.kubelet, (1, 25), "Kubernetes")


def _annotation(nodes: Sequence[model.Node]) -> Iterable[str]:
    states = {node.runtime: fuse_findings.nri_of(node.runtime) for node in nodes}
    for runtime, nri in sorted(states.items()):
        match nri:
            case fuse_findings.Nri.OFF_BY_DEFAULT:
                yield f"{runtime} disables NRI by default"
            case fuse_findings.Nri.MISSING:
                yield f"{runtime or 'an unknown runtime'} does not support NRI"
            case fuse_findings.Nri.ON:
                pass


def _resource(
    nodes: Sequence[model.Node], view: ClusterView, support: findings.FuseSupport
) -> Iterable[str]:
    yield from _older(nodes, lambda node: node.kubelet, (1, 36), "Kubernetes")
    if not support.has_dra:
        yield "the API resource.k8s.io/v1 is not served, or cannot be read"
    if view.karpenter is not None:
        yield "Karpenter does not support resources of Dynamic Resource Allocation"
    for runtime in sorted({node.runtime for node in nodes}):
        match = fuse_findings.RUNTIME.fullmatch(runtime)
        if match is None or (match[1] == "containerd" and int(match[2]) < 2):  # noqa: PLR2004  # a version
            yield f"{runtime or 'an unknown runtime'} does not support CDI by default"


def _older(
    nodes: Sequence[model.Node],
    text_of: Callable[[model.Node], str],
    wanted: _Version,
    what: str,
) -> Iterable[str]:
    """Report nodes whose version is too old or unknown, with examples."""
    older = [node.name for node in nodes if (_version(text_of(node)) or (0, 0)) < wanted]
    if older:
        more = ", ..." if len(older) > _SHOWN_MAX else ""
        names = ", ".join(older[:_SHOWN_MAX])
        yield f"{what} is older than {wanted[0]}.{wanted[1]}, or unknown, on {names}{more}"


def _version(text: str) -> _Version | None:
    match = _VERSION.fullmatch(text)
    return (int(match[1]), int(match[2])) if match else None


def _facts(nodes: Sequence[model.Node], view: ClusterView) -> tuple[str, ...]:
    scalers = [
        *(["the Cluster Autoscaler"] if view.autoscaler is not None else []),
        *(["Karpenter"] if view.karpenter is not None else []),
    ]
    levels = Counter(labels.get(_LEVEL, "") for labels in (view.namespaces or {}).values())
    limited = levels["baseline"] + levels["restricted"]
    requesting = sum(bool(pod.requests) for pod in view.pods or ())
    return (
        f"Kubernetes {_listed(node.kubelet for node in nodes)}",
        f"Linux {_listed(node.kernel for node in nodes)}",
        f"{_listed(node.runtime for node in nodes)}; {_NRI_UNSEEN}",
        f"autoscalers: {' and '.join(scalers) or 'none visible'}",
        f"pods that request a fuse resource: {requesting}",
        _NAMESPACES_UNREAD
        if view.namespaces is None
        else f"namespaces that enforce Pod Security baseline or restricted: {limited}; {_LIMITED}",
    )


def _listed(texts: Iterable[str]) -> str:
    """Return the most frequent texts, each once, as one text."""
    counted = [text or "unknown" for text, _ in Counter(texts).most_common()]
    return ", ".join(counted[:_SHOWN_MAX]) + (", ..." if len(counted) > _SHOWN_MAX else "")


def _is_installed(way: Way, view: ClusterView, support: findings.FuseSupport) -> bool:
    match way:
        case Way.VOLUME:
            return bool(support.has_driver)
        case Way.ANNOTATION:
            return any(pod.is_nri for pod in view.pods or ())
        case Way.RESOURCE:
            return bool(support.has_class)
        case Way.PLUGIN:
            return any(node.fuse for node in view.nodes or ())


def _more(way: Way, view: ClusterView) -> str:
    has_scaler = view.autoscaler is not None or view.karpenter is not None
    if way is Way.VOLUME and any(pod.requests for pod in view.pods or ()):
        return "; its webhook removes the fuse resource from new pods"
    if way is Way.PLUGIN and has_scaler:
        return ", and autoscalers need a setting, which `muster check autoscaler` shows"
    return ""


def _recommended(message: str, evidence: tuple[str, ...]) -> Finding:
    return findings.finding(
        Id.FUSE010, Severity.INFO, "cluster", message, evidence=evidence, docs=_DOCS
    )
