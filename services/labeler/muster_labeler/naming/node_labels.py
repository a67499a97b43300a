"""Pure: How the label of one node stands: the states of the reference, in order of precedence."""

import enum
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from muster import vocabulary
from muster_labeler import model
from muster_labeler.naming import accelerators, feature_discovery, schemes, sources
from muster_labeler.naming.accelerators import Reason

MANAGER: Final = model.MANAGER


class State(enum.StrEnum):
    """How a node's accelerator label stands."""

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


_UNLABELLED: Final[Mapping[Reason, State]] = {
    Reason.EXACT: State.UNLABELLED,
    Reason.ALIAS: State.UNLABELLED,
    Reason.MEMORY_UNKNOWN: State.AMBIGUOUS,
    Reason.FALLBACK: State.UNKNOWN_MODEL,
    Reason.NO_MODEL: State.UNKNOWN_MODEL,
    Reason.NOT_A_NAME: State.UNKNOWN_MODEL,
    Reason.NO_NAME: State.UNREACHABLE,
    Reason.MIXED: State.MIXED,
    Reason.MIG: State.MIG,
    Reason.VGPU: State.VGPU,
}
"""How a node without a label stands, by how sure its name is."""
_NEVER: Final = frozenset({Reason.MIXED, Reason.MIG, Reason.VGPU})
"""What must have no label, whatever stands there."""


@dataclass(frozen=True, slots=True)
class Standing:
    """A node with its state, what is known of its GPUs, and what its label should be."""

    node: model.Node
    state: State
    known: sources.Known

    @property
    def current(self) -> str | None:
        """Return the label's value, or None without one."""
        return self.node.labels.get(schemes.SKYPILOT)

    @property
    def wanted(self) -> str | None:
        """Return the value that the label should have, certain or not, if there is one."""
        return None if self.known.is_conflict else self.known.name.value

    @property
    def others(self) -> tuple[str, ...]:
        """Return the other field managers that own the label."""
        return tuple(o for o in self.node.owners.get(schemes.SKYPILOT, ()) if o != MANAGER)

    @property
    def foreign(self) -> str:
        """Return in words whose label this is, empty if it is ours alone or there is none."""
        if self.current is None or (self.is_ours and not self.others):
            return ""
        return ", ".join(self.others) or "nobody that is known"

    @property
    def is_outdated(self) -> bool:
        """Tell whether the label is ours, and was written of other GPUs than are there now."""
        of, (source, product) = self.known.of, self.node.told_of
        if of is None or not self.node.is_ours_alone(schemes.SKYPILOT):
            return False
        if self.known.name.reason in {Reason.NO_NAME, Reason.NOT_A_NAME}:
            # trouble with a driver, not other GPUs
            return False
        if self.known.name.reason in _NEVER:
            return True
        is_other = source == of.source and sources.kinds_in(product) != sources.kinds_in(of.text)
        return is_other and self.current != self.wanted

    @property
    def is_ours(self) -> bool:
        """Tell whether we own the label."""
        return MANAGER in self.node.owners.get(schemes.SKYPILOT, ())


def standing(node: model.Node, views: sources.Views = sources.NOTHING_MORE) -> Standing:
    """Return how a node stands."""
    known = sources.known(node, views)
    return Standing(node, _state(node, known), known)


def fleet(
    nodes: Sequence[model.Node], views: sources.Views = sources.NOTHING_MORE
) -> list[Standing]:
    """Return how the nodes with accelerators stand, by name."""
    found = [standing(node, views) for node in sorted(nodes, key=lambda node: node.name)]
    return [one for one in found if one.state is not State.NOT_GPU]


def provenance(
    one: Standing, value: str | None, *, actor: str, version: str, at: str
) -> Mapping[str, object]:
    """Return what is written down of a label: who said so, from what, and what stood there."""
    of = one.known.of
    previous = {"previous": one.current} if one.current is not None else {}
    return {
        "key": schemes.SKYPILOT,
        "value": value,
        "source": of.source if of else "",
        "product": of.text if of else "",
        "memMiB": of.memory_mib if of else None,
        "agentVersion": version,
        "time": at,
        "actor": actor,
        **previous,
    }


def covering(standings: Sequence[Standing]) -> str | None:
    """Return the key of another scheme that names every GPU node with a known product, if any.

    SkyPilot then needs no label of ours, and one on some nodes would hide the others.
    """
    if not standings or any(one.current is not None for one in standings):
        return None
    for scheme in schemes.SCHEMES:
        if not scheme.is_skypilots or scheme.key == schemes.SKYPILOT:
            continue
        if all(names(one, scheme) for one in standings):
            return scheme.key
    return None


def partial(standings: Sequence[Standing]) -> Mapping[str, int]:
    """Return how many GPU nodes each scheme of SkyPilot's names, where not all have the same.

    Empty when one scheme names them all, or none names any.
    """
    counts = {
        scheme.key: sum(_has(one, scheme) for one in standings)
        for scheme in schemes.SCHEMES
        if scheme.is_skypilots
    }
    used = {key: count for key, count in counts.items() if count}
    first = next(iter(used), None)
    if first is None or used[first] == len(standings):
        return {}
    return used


def _has(one: Standing, scheme: schemes.Scheme) -> bool:
    return any(reading.scheme is scheme and not reading.fault for reading in one.known.readings)


def names(one: Standing, scheme: schemes.Scheme) -> bool:
    """Tell whether a scheme names a node's model with certainty."""
    return any(
        reading.scheme is scheme
        and reading.fault is None
        and reading.name.reason in {Reason.EXACT, Reason.ALIAS}
        for reading in one.known.readings
    )


def _state(node: model.Node, known: sources.Known) -> State:
    label = node.labels.get(schemes.SKYPILOT)
    is_reported = any(
        claim.source in {sources.Source.AGENT, sources.Source.DRA} and claim.text != sources.NO_GPU
        for claim in known.claims
    )
    if not (node.has_accelerators or is_reported or label is not None):
        return State.NOT_GPU
    if label is not None:
        return _labelled(node, known, label)
    if known.is_conflict:
        return State.CONFLICT
    return _UNLABELLED[known.name.reason]


def _labelled(node: model.Node, known: sources.Known, label: str) -> State:
    if not accelerators.is_name(label):
        return State.INVALID if label else State.EMPTY
    if known.is_conflict:
        return State.CONFLICT
    if known.name.reason in _NEVER:
        return _UNLABELLED[known.name.reason]
    if _differs(label, known.name):
        return State.WRONG
    if not node.usable:
        return State.NO_GPU
    return State.UNREACHABLE if known.name.value is None else _owned(node)


def _owned(node: model.Node) -> State:
    owners = node.owners.get(schemes.SKYPILOT, ())
    return State.FOREIGN_OWNED if owners and MANAGER not in owners else State.LABELLED_OK


def _differs(label: str, wanted: accelerators.Name) -> bool:
    """Tell whether a label is known to be wrong: a guess or an unknown memory proves little."""
    if wanted.value is None or wanted.reason is Reason.FALLBACK:
        return False
    if wanted.reason is Reason.MEMORY_UNKNOWN:
        return not label.startswith(wanted.value)
    return label != wanted.value


COUNT_LABEL: Final = "muster.dev/accelerator-count"
MEMORY_LABEL: Final = "muster.dev/accelerator-memory-mib"


class LabelSet(enum.StrEnum):
    """Keys that belong together; the autoscalers' own are in none of them."""

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

    NVIDIA's can be told only where an agent reported `gpus`.
    """
    found: dict[str, str] = {}
    if LabelSet.SKYPILOT in sets:
        found[schemes.SKYPILOT] = name
    if LabelSet.MUSTER in sets:
        found[schemes.MUSTER] = name
        if kinds:
            found[COUNT_LABEL] = str(sum(kinds.values()))
        memory = {kind.memory_mib for kind in kinds}
        if len(memory) == 1 and None not in memory:
            found[MEMORY_LABEL] = str(memory.pop())
    if LabelSet.NVIDIA in sets and gpus is not None:
        found.update(feature_discovery.labels(gpus))
    return found


def stale_labels(
    ours: Iterable[str],
    wanted: Mapping[str, str],
    sets: Collection[LabelSet],
    *,
    gpus: vocabulary.GpuNode | None,
) -> frozenset[str]:
    """Return which labels of ours nothing speaks for any more.

    SkyPilot's stays where it is not for us to write: a person's command wrote it. So do NVIDIA's
    where they are, and nobody reported the GPUs.
    """
    unsaid = f"{feature_discovery.DOMAIN}/" if LabelSet.NVIDIA in sets and gpus is None else None
    return frozenset(
        key
        for key in ours
        if key not in wanted and key != schemes.SKYPILOT and not (unsaid and key.startswith(unsaid))
    )


def feature_file(wanted: Mapping[str, str]) -> str:
    """Return labels as node-feature-discovery reads them from features.d, a line each.

    A node's agent that has this file needs no right on nodes: NFD's master writes the labels.
    """
    return "".join(f"{key}={value}\n" for key, value in sorted(wanted.items()))
