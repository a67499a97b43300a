"""Pure: What is wrong with the labels of GPU nodes: GPU001 to GPU010."""

import shlex
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from muster_labeler import model
from muster_labeler.check import label_plan
from muster_labeler.check.findings import Commands, Finding, Fix, Id, Scope, Severity
from muster_labeler.naming import node_labels, schemes, sources
from muster_labeler.naming.accelerators import Reason
from muster_labeler.naming.node_labels import LabelState, LabelStatus

ALIASES: Final = "muster-aliases.yaml"

_NEITHER: Final = frozenset({LabelState.NOT_GPU, LabelState.LABELLED_OK, LabelState.FOREIGN_OWNED})


@dataclass(frozen=True, slots=True)
class _LabelAll:
    """What labels the cluster, and whether a program may do it unasked."""

    fix: Fix
    is_safe: bool


def evaluate(
    nodes: Sequence[model.Node],
    views: sources.Evidence,
    where: Commands,
    *,
    simulated: Collection[str] = (),
    only: str | None = None,
) -> list[Finding]:
    """Return the findings about all nodes; of `only` one, if named, judged as part of the fleet."""
    fleet = node_labels.label_statuses(nodes, views)
    covering = node_labels.covering_scheme(fleet)
    remedy = _label_all(fleet, simulated, where)
    result: list[Finding] = []
    for status in fleet:
        if only in {None, status.node.name}:
            result.extend(_of_node(status, covering, where, remedy))
    for node in nodes:
        if only in {None, node.name}:
            result.extend(invalid_labels(node, where))
            result.extend(held_as_unready(node, where))
    return [*result, *_mixed_schemes(fleet, covering, where, remedy.fix)]


def _of_node(
    status: LabelStatus, covering: str | None, where: Commands, remedy: _LabelAll
) -> Iterable[Finding]:
    name = status.node.name
    if status.state in _NEITHER or (covering is not None and _is_covered(status)):
        return
    match status.state:
        case LabelState.UNLABELLED:
            yield _unlabelled(status, remedy)
        case LabelState.WRONG:
            yield _wrong(status, where)
        case LabelState.NO_GPU:
            yield Finding(
                id=Id.GPU005,
                severity=Severity.ERROR,
                scope=Scope.NODE,
                object=name,
                message=f"labelled {status.current}, but no accelerator can be had",
                evidence=resources(status.node),
                fix=Fix(command=_pods_of(name, where)),
            )
        case LabelState.AMBIGUOUS | LabelState.UNKNOWN_MODEL:
            yield _uncertain(status, where)
        case LabelState.MIXED:
            yield Finding(
                id=Id.GPU006,
                severity=Severity.WARN,
                scope=Scope.NODE,
                object=name,
                message="several models on one node: no one label is right",
                evidence=_claims_of(status),
                fix=Fix(command=_show(name, where)),
            )
        case LabelState.MIG | LabelState.VGPU:
            yield _partitioned(status, where)
        case LabelState.CONFLICT:
            yield Finding(
                id=Id.GPU008,
                severity=Severity.ERROR,
                scope=Scope.NODE,
                object=name,
                message="sources disagree about the model; nothing is labelled",
                evidence=_claims_of(status),
                fix=Fix(command=where.muster("label-gpus", "--dry-run", "--node", name)),
            )
        case LabelState.UNREACHABLE:
            yield Finding(
                id=Id.GPU010,
                severity=Severity.UNKNOWN,
                scope=Scope.NODE,
                object=name,
                message="nobody says which GPUs it has: no agent, no DRA, no label",
                evidence=resources(status.node),
                fix=Fix(command=_show(name, where)),
            )
        case _:
            pass  # empty and invalid labels are told by scheme


def _is_covered(status: LabelStatus) -> bool:
    """Return whether a node only lacks our label, which it needs not."""
    return status.state in {LabelState.UNLABELLED, LabelState.AMBIGUOUS, LabelState.UNREACHABLE}


def _label_all(
    fleet: Sequence[LabelStatus], simulated: Collection[str], where: Commands
) -> _LabelAll:
    """Return what labels all GPU nodes; of one that cannot be labelled yet, what shows why."""
    allowed = label_plan.Allowed(simulated=bool(simulated))
    left = label_plan.unlabelled_after(label_plan.plan(fleet, allowed, simulated=simulated))
    if left:
        return _LabelAll(
            Fix(command=where.muster("check", "gpu", "--node", left[0])), is_safe=False
        )
    option = ["--simulated"] if simulated else []
    command = where.muster("label-gpus", "--apply", "--yes", *option)
    return _LabelAll(Fix(command=command), is_safe=not simulated)


def _unlabelled(status: LabelStatus, remedy: _LabelAll) -> Finding:
    is_empty = not status.node.usable
    return Finding(
        id=Id.GPU001,
        severity=Severity.SUGGEST,
        scope=Scope.NODE,
        object=status.node.name,
        message=f"no label {schemes.SKYPILOT}: it would be {status.wanted}"
        + (", but no accelerator can be had" if is_empty else ""),
        evidence=_claims_of(status),
        fix=remedy.fix,
        safe_to_auto_apply=remedy.is_safe,
    )


def _wrong(status: LabelStatus, where: Commands) -> Finding:
    owners = ", ".join(status.other_owners)
    is_guess = status.identity.name.reason is Reason.MEMORY_UNKNOWN
    return Finding(
        id=Id.GPU002,
        severity=Severity.ERROR,
        scope=Scope.NODE,
        object=status.node.name,
        message=f"labelled {status.current}, and has {status.wanted}"
        + (f" (set by {owners})" if owners else ""),
        evidence=(f"{schemes.SKYPILOT}={status.current}", *_claims_of(status)),
        fix=Fix(
            command=where.muster(
                *("label-gpus", "--apply", "--overwrite", "--yes", "--node", status.node.name),
                *(["--force-ambiguous"] if is_guess else []),
            )
        ),
    )


def _uncertain(status: LabelStatus, where: Commands) -> Finding:
    name = status.identity.name
    product = status.identity.best.text if status.identity.best else ""
    if name.value is None:
        message, command = f"no name for it ({name.reason})", _show(status.node.name, where)
    elif name.reason is Reason.MEMORY_UNKNOWN:
        message = f"may be {name.value}; its memory is unknown, and decides"
        command = where.muster("label-gpus", "--apply", "--force-ambiguous", "--yes")
    elif (
        status.identity.best is not None
        and status.identity.best.source is sources.Source.INSTANCE_TYPE
    ):
        message = f"only its instance type says what it has, perhaps {name.value}"
        command = where.muster("label-gpus", "--apply", "--from-instance-type", "--yes")
    else:
        message = f"an unknown model, perhaps {name.value}: review it, and name it in an alias file"
        command = _review(status, name.value, where)
    return Finding(
        id=Id.GPU006,
        severity=Severity.WARN,
        scope=Scope.NODE,
        object=status.node.name,
        message=message,
        evidence=_claims_of(status) or (product,),
        fix=Fix(command=command),
    )


def _partitioned(status: LabelStatus, where: Commands) -> Finding:
    what = "MIG partitions" if status.state is LabelState.MIG else "virtual GPUs"
    label = f"; labelled {status.current} all the same" if status.current else ""
    return Finding(
        id=Id.GPU007,
        severity=Severity.WARN if status.current else Severity.INFO,
        scope=Scope.NODE,
        object=status.node.name,
        message=f"{what} are no whole card: not labelled{label}",
        evidence=_claims_of(status),
        fix=Fix(command=_show(status.node.name, where), docs="docs/labeler.md"),
    )


def _mixed_schemes(
    fleet: Sequence[LabelStatus], covering: str | None, where: Commands, label_all: Fix
) -> Iterable[Finding]:
    partial = node_labels.partial_schemes(fleet)
    if covering is not None or not partial:
        return
    ours = sum(status.is_ours for status in fleet)
    hidden = len(fleet) - next(iter(partial.values()))
    fix = label_all
    if ours and len(partial) > 1:
        fix = Fix(command=where.muster("unlabel-gpus", "--yes"))
    yield Finding(
        id=Id.GPU004,
        severity=Severity.ERROR,
        scope=Scope.CLUSTER,
        object="nodes",
        message=f"{next(iter(partial))} is on some GPU nodes only: "
        f"SkyPilot reads one scheme and does not see the other {hidden}",
        evidence=tuple(f"{key}: {count} of {len(fleet)}" for key, count in partial.items()),
        fix=fix,
    )


def _claims_of(status: LabelStatus) -> tuple[str, ...]:
    return tuple(
        f"{claim.source}: {claim.text} -> {claim.name.value or 'no label'} ({claim.name.reason})"
        for claim in status.identity.claims
    )


def _review(status: LabelStatus, value: str, where: Commands) -> str:
    """Return what adds a product to the file of reviewed names, and shows that it is read."""
    product = status.identity.best.product if status.identity.best else ""
    if not (product and product.isprintable()):
        return _show(status.node.name, where)
    file = where.aliases or ALIASES
    entry = shlex.join(["echo", f"{_quoted(product)}: {value}"])
    return f"{entry} >> {shlex.quote(file)} && " + shlex.join(
        ["muster", "gpu-name", "--aliases", file, "--", product]
    )


def _quoted(text: str) -> str:
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


def _pods_of(node: str, where: Commands) -> str:
    return where.kubectl(
        "get", "pods", "-A", "-o", "wide", f"--field-selector=spec.nodeName={node}"
    )


def _show(node: str, where: Commands) -> str:
    return where.kubectl("get", "node", node, "--show-labels")


_AUTOSCALERS_GPUS: Final = frozenset(
    {
        "nvidia.com/gpu",
        "amd.com/gpu",
        "gpu.intel.com/xe",
        "habana.ai/gaudi",
        model.DIRECTX,
    }
)
"""What the Cluster Autoscaler takes for a GPU (processors/customresources/gpu_processor.go)."""
_PROVIDERS: Final = {
    "aws": frozenset({"k8s.amazonaws.com/accelerator"}),
    "azure": frozenset({"kubernetes.azure.com/accelerator", "accelerator"}),
    "external-cloudstack": frozenset({"accelerator"}),
    "digitalocean": frozenset({"cloud.digitalocean.com/gpu-node"}),
    "gce": frozenset({"cloud.google.com/gke-accelerator"}),
    "hcloud": frozenset({"hcloud/gpu-node"}),
}
"""Which key the Cluster Autoscaler looks at, by the scheme of a node's providerID."""


def invalid_labels(node: model.Node, where: Commands) -> Iterable[Finding]:
    """Tell each value that its scheme refuses: the first one hides the scheme for the cluster."""
    for reading in schemes.read(node.labels):
        if reading.fault is None or (reading.scheme.id == "muster" and not reading.value):
            continue
        yield Finding(
            id=Id.GPU003,
            severity=Severity.ERROR,
            scope=Scope.NODE,
            object=node.name,
            message=f"{reading.scheme.key}={reading.value!r} is {reading.fault}",
            evidence=(f"scheme {reading.scheme.id}",),
            fix=Fix(command=where.kubectl("label", "node", node.name, f"{reading.scheme.key}-")),
        )


def held_as_unready(node: model.Node, where: Commands) -> Iterable[Finding]:
    """Tell each key by which the Cluster Autoscaler waits for a GPU that is not there."""
    if any(node.allocatable.get(name, 0) for name in _AUTOSCALERS_GPUS):
        return
    if node.ready_since is None:
        return
    provider = node.provider_id.partition("://")[0]
    if not provider:
        # no autoscaler can know whose machine this is
        return
    # a key is one provider's; where we do not know whose cloud this is, it may matter
    mine = _PROVIDERS.get(provider, schemes.AUTOSCALER_KEYS - {"accelerator"})
    for key in sorted(mine & node.labels.keys()):
        yield Finding(
            id=Id.GPU009,
            severity=Severity.ERROR if provider in _PROVIDERS else Severity.WARN,
            scope=Scope.NODE,
            object=node.name,
            message=f"the Cluster Autoscaler holds it for unready: {key} without a GPU",
            evidence=(f"{key}={node.labels[key]}", *resources(node)),
            fix=Fix(command=where.kubectl("label", "node", node.name, f"{key}-")),
        )


def resources(node: model.Node) -> tuple[str, ...]:
    """Return in words how many accelerators a node has."""
    return tuple(
        f"{name}: {node.allocatable.get(name, 0)} of {node.capacity.get(name, 0)} allocatable"
        for name in sorted(node.accelerators)
    ) or ("no accelerator in its capacity",)
