"""Pure: finds problems with the labels of GPU nodes (GPU001 to GPU010)."""

import shlex
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from muster_labeler import model
from muster_labeler.check import findings, label_plan
from muster_labeler.check.findings import Commands, Finding, Id, Severity
from muster_labeler.naming import accelerators, node_labels, sources
from muster_labeler.naming.accelerators import Reason
from muster_labeler.naming.node_labels import LabelState, LabelStatus

_ALIASES: Final = "muster-aliases.yaml"

_NEITHER: Final = frozenset({LabelState.NOT_GPU, LabelState.LABELLED_OK, LabelState.FOREIGN_OWNED})
_AUTOSCALERS_GPUS: Final = frozenset(
    {
        "nvidia.com/gpu",
        "amd.com/gpu",
        "gpu.intel.com/xe",
        "habana.ai/gaudi",
        model.DIRECTX,
    }
)
"""Resources that the Cluster Autoscaler counts as GPUs (customresources/gpu_processor.go)."""
_PROVIDERS: Final = {
    "aws": frozenset({"k8s.amazonaws.com/accelerator"}),
    "azure": frozenset({"kubernetes.azure.com/accelerator", "accelerator"}),
    "external-cloudstack": frozenset({"accelerator"}),
    "digitalocean": frozenset({"cloud.digitalocean.com/gpu-node"}),
    "gce": frozenset({"cloud.google.com/gke-accelerator"}),
    "hcloud": frozenset({"hcloud/gpu-node"}),
}
"""The label keys that the Cluster Autoscaler reads, by the scheme of a node's providerID."""


@dataclass(frozen=True, slots=True)
class _Apply:
    """Builds commands for findings about a node; `options` allow labelling simulated GPUs."""

    commands: Commands
    options: Sequence[str]

    def label(self, *words: str) -> str:
        """Return the `label-gpus --apply` command with `words` and `options`."""
        return self.commands.muster("label-gpus", "--apply", *words, *self.options)


@dataclass(frozen=True, slots=True)
class _LabelAll:
    """A command about all GPU nodes, and whether a program may run it without confirmation."""

    command: str
    is_safe: bool


def evaluate(
    nodes: Sequence[model.Node],
    evidence: sources.Evidence,
    commands: Commands,
    *,
    simulated: Collection[str] = (),
    only: str | None = None,
) -> list[Finding]:
    """Return the findings; with `only`, those about one node and about the label schemes."""
    fleet = node_labels.label_statuses(nodes, evidence)
    covering = node_labels.covering_scheme(fleet)
    label_all = _label_all(fleet, simulated, commands)
    result: list[Finding] = []
    for status in fleet:
        if only in {None, status.node.name}:
            is_simulated = status.node.name in simulated
            apply = _Apply(commands, ["--simulated"] if is_simulated else [])
            result.extend(_of_node(status, covering, apply, label_all))
    for node in nodes:
        if only in {None, node.name}:
            result.extend(_invalid_labels(node, commands))
            result.extend(_held_as_unready(node, commands))
    return [*result, *_mixed_schemes(fleet, covering, commands, label_all.command)]


def _of_node(
    status: LabelStatus, covering: str | None, apply: _Apply, label_all: _LabelAll
) -> Iterable[Finding]:
    name, commands = status.node.name, apply.commands
    if status.state in _NEITHER or (covering is not None and _is_covered(status)):
        return
    match status.state:
        case LabelState.UNLABELLED:
            yield _unlabelled(status, label_all)
        case LabelState.WRONG:
            yield _wrong(status, apply)
        case LabelState.NO_GPU:
            yield findings.finding(
                Id.GPU005,
                Severity.ERROR,
                name,
                f"labelled {status.current}, but no accelerator is allocatable",
                evidence=_resources(status.node),
                command=commands.pods_of(name),
            )
        case LabelState.AMBIGUOUS | LabelState.UNKNOWN_MODEL:
            yield _uncertain(status, apply)
        case LabelState.MIXED:
            yield findings.finding(
                Id.GPU006,
                Severity.WARN,
                name,
                "several models on one node: no single label is right",
                evidence=_claims_of(status),
                command=_show(name, commands),
            )
        case LabelState.MIG | LabelState.VGPU:
            yield _partitioned(status, commands)
        case LabelState.CONFLICT:
            yield findings.finding(
                Id.GPU008,
                Severity.ERROR,
                name,
                "sources disagree about the model; the node is not labelled",
                evidence=_claims_of(status),
                command=commands.muster("label-gpus", "--dry-run", "--node", name),
            )
        case LabelState.UNREACHABLE:
            yield findings.finding(
                Id.GPU010,
                Severity.UNKNOWN,
                name,
                "no source reports which GPUs it has: no agent, no DRA, no label",
                evidence=_resources(status.node),
                command=_show(name, commands),
            )
        case _:
            pass  # empty and invalid labels are reported for each scheme


def _is_covered(status: LabelStatus) -> bool:
    """Return whether a node lacks only muster's label, which another scheme makes unnecessary."""
    return status.state in {LabelState.UNLABELLED, LabelState.AMBIGUOUS, LabelState.UNREACHABLE}


def _label_all(
    fleet: Sequence[LabelStatus], simulated: Collection[str], commands: Commands
) -> _LabelAll:
    """Return the command that labels all GPU nodes, or shows why they cannot be labelled yet."""
    allowed = label_plan.Allowed(simulated=bool(simulated))
    left = label_plan.unlabelled_after(label_plan.plan(fleet, allowed, simulated=simulated))
    if left:
        return _LabelAll(commands.muster("check", "gpu", "--node", left[0]), is_safe=False)
    option = ["--simulated"] if simulated else []
    command = commands.muster("label-gpus", "--apply", "--yes", *option)
    return _LabelAll(command, is_safe=not simulated)


def _unlabelled(status: LabelStatus, label_all: _LabelAll) -> Finding:
    is_empty = not status.node.usable
    return findings.finding(
        Id.GPU001,
        Severity.SUGGEST,
        status.node.name,
        f"no label {accelerators.SKYPILOT}: expected {status.wanted}"
        + (", but no accelerator is allocatable" if is_empty else ""),
        evidence=_claims_of(status),
        command=label_all.command,
        is_safe=label_all.is_safe,
    )


def _wrong(status: LabelStatus, apply: _Apply) -> Finding:
    owners = ", ".join(status.other_owners)
    is_guess = status.identity.name.reason is Reason.MEMORY_UNKNOWN
    return findings.finding(
        Id.GPU002,
        Severity.ERROR,
        status.node.name,
        f"labelled {status.current}"
        + (f" by {owners}" if owners else "")
        + f", but the node has {status.wanted}",
        evidence=(f"{accelerators.SKYPILOT}={status.current}", *_claims_of(status)),
        command=apply.label(
            *("--overwrite", "--yes", "--node", status.node.name),
            *(["--force-ambiguous"] if is_guess else []),
        ),
    )


def _uncertain(status: LabelStatus, apply: _Apply) -> Finding:
    commands = apply.commands
    name = status.identity.name
    product = status.identity.best.text if status.identity.best else ""
    if name.value is None:
        message, command = f"no accelerator name ({name.reason})", _show(status.node.name, commands)
    elif name.reason is Reason.MEMORY_UNKNOWN:
        message = f"may be {name.value}; the name depends on the memory size, which is unknown"
        command = apply.label("--force-ambiguous", "--yes")
    elif (
        status.identity.best is not None
        and status.identity.best.source is sources.Source.INSTANCE_TYPE
    ):
        message = f"only its instance type indicates the model: maybe {name.value}"
        command = apply.label("--from-instance-type", "--yes")
    else:
        message = f"an unknown model, maybe {name.value}: review it, and add it to an alias file"
        command = _review(status, name.value, commands)
    return findings.finding(
        Id.GPU006,
        Severity.WARN,
        status.node.name,
        message,
        evidence=_claims_of(status) or (product,),
        command=command,
    )


def _partitioned(status: LabelStatus, commands: Commands) -> Finding:
    what = "MIG partitions" if status.state is LabelState.MIG else "virtual GPUs"
    label = f"; its label is {status.current}" if status.current else ""
    return findings.finding(
        Id.GPU007,
        Severity.WARN if status.current else Severity.INFO,
        status.node.name,
        f"{what} are not whole GPUs, so muster does not label the node{label}",
        evidence=_claims_of(status),
        command=_show(status.node.name, commands),
        docs="docs/labeler.md",
    )


def _mixed_schemes(
    fleet: Sequence[LabelStatus], covering: str | None, commands: Commands, label_all: str
) -> Iterable[Finding]:
    partial = node_labels.partial_schemes(fleet)
    if covering is not None or not partial:
        return
    ours = sum(status.is_ours for status in fleet)
    hidden = len(fleet) - next(iter(partial.values()))
    command = label_all
    if ours and len(partial) > 1:
        command = commands.muster("unlabel-gpus", "--yes")
    yield findings.finding(
        Id.GPU004,
        Severity.ERROR,
        "nodes",
        f"{next(iter(partial))} is on some GPU nodes only: "
        f"SkyPilot reads one scheme and does not see the other {hidden}",
        evidence=tuple(f"{key}: {count} of {len(fleet)}" for key, count in partial.items()),
        command=command,
    )


def _claims_of(status: LabelStatus) -> tuple[str, ...]:
    return tuple(
        f"{claim.source}: {claim.text} -> {claim.name.value or 'no label'} ({claim.name.reason})"
        for claim in status.identity.claims
    )


def _review(status: LabelStatus, value: str, commands: Commands) -> str:
    """Return the command that adds a product to the file of reviewed names and shows its name."""
    product = status.identity.best.product if status.identity.best else ""
    if not (product and product.isprintable()):
        return _show(status.node.name, commands)
    file = commands.aliases or _ALIASES
    entry = shlex.join(["echo", f"{_quoted(product)}: {value}"])
    return f"{entry} >> {shlex.quote(file)} && " + shlex.join(
        ["muster", "gpu-name", "--aliases", file, "--", product]
    )


def _quoted(text: str) -> str:
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


def _show(node: str, commands: Commands) -> str:
    return commands.kubectl("get", "node", node, "--show-labels")


def _invalid_labels(node: model.Node, commands: Commands) -> Iterable[Finding]:
    """Report each invalid value: the first one disables its scheme for the whole cluster."""
    for reading in accelerators.read_labels(node.labels):
        if reading.fault is None or (reading.scheme.id == "muster" and not reading.value):
            continue
        yield findings.finding(
            Id.GPU003,
            Severity.ERROR,
            node.name,
            f"{reading.scheme.key}={reading.value!r} is {reading.fault}",
            evidence=(f"scheme {reading.scheme.id}",),
            command=commands.kubectl("label", "node", node.name, f"{reading.scheme.key}-"),
        )


def _held_as_unready(node: model.Node, commands: Commands) -> Iterable[Finding]:
    """Report each key that makes the Cluster Autoscaler wait for a nonexistent GPU."""
    if any(node.allocatable.get(name, 0) for name in _AUTOSCALERS_GPUS):
        return
    if node.ready_since is None:
        return
    provider = node.provider_id.partition("://")[0]
    if not provider:
        # autoscalers do not recognize this machine
        return
    # each key belongs to one provider; for an unknown provider any key may matter
    mine = _PROVIDERS.get(provider, accelerators.AUTOSCALER_KEYS - {"accelerator"})
    for key in sorted(mine & node.labels.keys()):
        yield findings.finding(
            Id.GPU009,
            Severity.ERROR if provider in _PROVIDERS else Severity.WARN,
            node.name,
            f"the Cluster Autoscaler treats the node as unready: it has {key}, but no GPU",
            evidence=(f"{key}={node.labels[key]}", *_resources(node)),
            command=commands.kubectl("label", "node", node.name, f"{key}-"),
        )


def _resources(node: model.Node) -> tuple[str, ...]:
    """Return the allocatable and total number of each accelerator resource of a node, as texts."""
    return tuple(
        f"{name}: {node.allocatable.get(name, 0)} of {node.capacity.get(name, 0)} allocatable"
        for name in sorted(node.accelerators)
    ) or ("no accelerator in its capacity",)
