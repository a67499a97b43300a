"""Pure: compares a node's labels with its GPUs, and derives the labels that it should have."""

import enum
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from muster import vocabulary
from muster_labeler import model
from muster_labeler.naming import accelerators, feature_discovery, sources
from muster_labeler.naming.accelerators import Reason

_NEVER: Final = frozenset({Reason.MIXED, Reason.MIG, Reason.VGPU})
"""Reasons why a node must have no label."""


class LabelState(enum.StrEnum):
    """How a node's accelerator label compares with its GPUs."""

    NOT_GPU = "not-gpu"
    LABELLED_OK = "labelled-ok"
    UNLABELLED = "unlabelled"
    WRONG = "wrong"
    INVALID = "invalid"
    EMPTY = "empty"
    FOREIGN_OWNED = "foreign-owned"
    NO_GPU = "no-gpu"
    AMBIGUOUS = "ambiguous"
    UNKNOWN_MODEL = "unknown-model"
    MIXED = "mixed"
    MIG = "mig"
    VGPU = "vgpu"
    CONFLICT = "conflict"
    UNREACHABLE = "unreachable"


_UNLABELLED: Final[Mapping[Reason, LabelState]] = {
    Reason.EXACT: LabelState.UNLABELLED,
    Reason.ALIAS: LabelState.UNLABELLED,
    Reason.MEMORY_UNKNOWN: LabelState.AMBIGUOUS,
    Reason.FALLBACK: LabelState.UNKNOWN_MODEL,
    Reason.NO_MODEL: LabelState.UNKNOWN_MODEL,
    Reason.NOT_A_NAME: LabelState.UNKNOWN_MODEL,
    Reason.NO_NAME: LabelState.UNREACHABLE,
    Reason.MIXED: LabelState.MIXED,
    Reason.MIG: LabelState.MIG,
    Reason.VGPU: LabelState.VGPU,
}
"""The state of a node without a label, by how certain its name is."""


@dataclass(frozen=True, slots=True)
class LabelStatus:
    """A node with the state of its label, and the claims about its GPUs."""

    node: model.Node
    state: LabelState
    identity: sources.Identity

    @property
    def current(self) -> str | None:
        """Return the label's value, or None if the node does not have the label."""
        return self.node.labels.get(accelerators.SKYPILOT)

    @property
    def wanted(self) -> str | None:
        """Return the value that the label should have, certain or not; None if there is none."""
        return None if self.identity.is_conflict else self.identity.name.value

    @property
    def other_owners(self) -> tuple[str, ...]:
        """Return the other field managers that own the label."""
        return tuple(
            o for o in self.node.owners.get(accelerators.SKYPILOT, ()) if o != model.FIELD_MANAGER
        )

    @property
    def foreign_owners(self) -> str:
        """Return the label's other owners as text; empty without a label or another owner."""
        if self.current is None or (self.is_ours and not self.other_owners):
            return ""
        return ", ".join(self.other_owners) or "an unknown manager"

    @property
    def is_outdated(self) -> bool:
        """Return whether a label that only muster owns no longer matches the node's GPUs."""
        claim, (source, product) = self.identity.best, self.node.labelled_from
        if claim is None or not self.node.is_ours_alone(accelerators.SKYPILOT):
            return False
        if self.identity.name.reason in {Reason.NO_NAME, Reason.NOT_A_NAME}:
            # a problem with the driver, not a change of GPUs
            return False
        if self.identity.name.reason in _NEVER:
            return True
        is_other = source == claim.source and sources.without_counts(
            product
        ) != sources.without_counts(claim.text)
        return is_other and self.current != self.wanted

    @property
    def is_ours(self) -> bool:
        """Return whether muster owns the label."""
        return model.FIELD_MANAGER in self.node.owners.get(accelerators.SKYPILOT, ())


def label_status(node: model.Node, evidence: sources.Evidence = sources.NO_EVIDENCE) -> LabelStatus:
    """Return how a node is labelled."""
    identity = sources.identify(node, evidence)
    return LabelStatus(node, _state(node, identity), identity)


def label_statuses(
    nodes: Sequence[model.Node], evidence: sources.Evidence = sources.NO_EVIDENCE
) -> list[LabelStatus]:
    """Return how each node with accelerators is labelled, ordered by name."""
    statuses = [label_status(node, evidence) for node in sorted(nodes, key=lambda node: node.name)]
    return [status for status in statuses if status.state is not LabelState.NOT_GPU]


def provenance(
    status: LabelStatus, value: str | None, *, actor: str, version: str, at: str
) -> Mapping[str, object]:
    """Return the provenance of a label: its source, its previous value, and who wrote it when."""
    claim = status.identity.best
    previous = {"previous": status.current} if status.current is not None else {}
    return {
        "key": accelerators.SKYPILOT,
        "value": value,
        "source": claim.source if claim else "",
        "product": claim.text if claim else "",
        "memMiB": claim.memory_mib if claim else None,
        "agentVersion": version,
        "time": at,
        "actor": actor,
        **previous,
    }


def covering_scheme(statuses: Sequence[LabelStatus]) -> str | None:
    """Return the key of another scheme that makes SkyPilot's own label unnecessary, if any.

    That scheme names every GPU node with certainty. The result is None if any node has SkyPilot's
    own label, because SkyPilot then reads this label and does not see the nodes without it.
    """
    if not statuses or any(status.current is not None for status in statuses):
        return None
    for scheme in accelerators.SCHEMES:
        if not scheme.is_skypilots or scheme.key == accelerators.SKYPILOT:
            continue
        if all(is_named_by(status, scheme) for status in statuses):
            return scheme.key
    return None


def partial_schemes(statuses: Sequence[LabelStatus]) -> Mapping[str, int]:
    """Return how many GPU nodes each of SkyPilot's schemes names, if SkyPilot misses some nodes.

    Empty if the first scheme in use names all GPU nodes, or if no scheme is in use.
    """
    counts = {
        scheme.key: sum(_has_valid_label(status, scheme) for status in statuses)
        for scheme in accelerators.SCHEMES
        if scheme.is_skypilots
    }
    used = {key: count for key, count in counts.items() if count}
    first = next(iter(used), None)
    if first is None or used[first] == len(statuses):
        return {}
    return used


def _has_valid_label(status: LabelStatus, scheme: accelerators.Scheme) -> bool:
    return any(
        reading.scheme is scheme and not reading.fault for reading in status.identity.readings
    )


def is_named_by(status: LabelStatus, scheme: accelerators.Scheme) -> bool:
    """Return whether a scheme names a node's model with certainty."""
    return any(
        reading.scheme is scheme
        and reading.fault is None
        and reading.name.reason in {Reason.EXACT, Reason.ALIAS}
        for reading in status.identity.readings
    )


def _state(node: model.Node, identity: sources.Identity) -> LabelState:
    label = node.labels.get(accelerators.SKYPILOT)
    is_reported = any(
        claim.source in {sources.Source.AGENT, sources.Source.DRA} and claim.text != sources.NO_GPU
        for claim in identity.claims
    )
    is_named = node.may_have_accelerators and identity.best is not None
    if not (node.has_accelerators or is_reported or is_named or label is not None):
        return LabelState.NOT_GPU
    if label is not None:
        return _labelled_state(node, identity, label)
    if identity.is_conflict:
        return LabelState.CONFLICT
    return _UNLABELLED[identity.name.reason]


def _labelled_state(node: model.Node, identity: sources.Identity, label: str) -> LabelState:
    if not accelerators.is_name(label):
        return LabelState.INVALID if label else LabelState.EMPTY
    if identity.is_conflict:
        return LabelState.CONFLICT
    if identity.name.reason in _NEVER:
        return _UNLABELLED[identity.name.reason]
    if _is_wrong(label, identity.name):
        return LabelState.WRONG
    if not node.usable:
        return LabelState.NO_GPU
    return LabelState.UNREACHABLE if identity.name.value is None else _owned_state(node)


def _owned_state(node: model.Node) -> LabelState:
    owners = node.owners.get(accelerators.SKYPILOT, ())
    return (
        LabelState.FOREIGN_OWNED
        if owners and model.FIELD_MANAGER not in owners
        else LabelState.LABELLED_OK
    )


def _is_wrong(label: str, wanted: accelerators.Name) -> bool:
    """Return whether a label is certainly wrong.

    A guessed name proves nothing; with unknown memory, the label need only begin with the name.
    """
    if wanted.value is None or wanted.reason is Reason.FALLBACK:
        return False
    if wanted.reason is Reason.MEMORY_UNKNOWN:
        return not label.startswith(wanted.value)
    return label != wanted.value


class LabelSet(enum.StrEnum):
    """Label keys that belong together; the autoscalers' keys do not belong to any set."""

    SKYPILOT = "skypilot"
    MUSTER = "muster"
    NVIDIA = "nvidia"


def wanted_labels(
    sets: Collection[LabelSet],
    name: str,
    *,
    kinds: sources.Kinds,
    gpus: vocabulary.GpuNode | None,
) -> dict[str, str]:
    """Return the labels of a node whose accelerators are called `name`.

    NVIDIA's labels need the `gpus` that an agent reported.
    """
    labels: dict[str, str] = {}
    if LabelSet.SKYPILOT in sets:
        labels[accelerators.SKYPILOT] = name
    if LabelSet.MUSTER in sets:
        labels[accelerators.MUSTER] = name
        if kinds:
            labels[accelerators.COUNT] = str(sum(kinds.values()))
        memory = {kind.memory_mib for kind in kinds}
        if len(memory) == 1 and None not in memory:
            labels[accelerators.MEMORY] = str(memory.pop())
    if LabelSet.NVIDIA in sets and gpus is not None:
        labels.update(feature_discovery.labels(gpus))
    return labels


def stale_labels(
    ours: Iterable[str],
    wanted: Mapping[str, str],
    sets: Collection[LabelSet],
    *,
    gpus: vocabulary.GpuNode | None,
) -> frozenset[str]:
    """Return which of muster's labels no longer apply.

    SkyPilot's label is never stale: if the policy does not write it, a person set it with a
    command. NVIDIA's labels stay while no agent reports the GPUs.
    """
    undecided = f"{feature_discovery.DOMAIN}/" if LabelSet.NVIDIA in sets and gpus is None else None
    return frozenset(
        key
        for key in ours
        if key not in wanted
        and key != accelerators.SKYPILOT
        and not (undecided and key.startswith(undecided))
    )


def feature_file(wanted: Mapping[str, str]) -> str:
    """Return labels in the format of node-feature-discovery's features.d, one per line.

    With this file a node's agent does not need permission to write nodes: NFD's master writes the
    labels.
    """
    return "".join(f"{key}={value}\n" for key, value in sorted(wanted.items()))
