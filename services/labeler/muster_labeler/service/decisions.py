"""Pure: decides which labels of a node to write, remove or refuse, and why."""

import collections
import enum
import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Final, NamedTuple

from muster import vocabulary
from muster_labeler import config
from muster_labeler.naming import accelerators, node_labels, sources
from muster_labeler.naming.node_labels import LabelState, LabelStatus

KEY: Final = accelerators.SKYPILOT

_SHOWN_MAX: Final = 5
_OTHER_SCHEMES: Final = tuple(
    scheme
    for scheme in accelerators.SCHEMES
    if scheme.is_skypilots and scheme.key != accelerators.SKYPILOT
)


class Action(enum.StrEnum):
    """The labeler's action for a node."""

    NOTHING = "nothing"
    SUGGEST = "suggest"
    APPLY = "apply"
    WITHDRAW = "withdraw"
    REFUSE = "refuse"
    WAIT = "wait"
    HOLD = "hold"


@dataclass(frozen=True, slots=True)
class Decision:
    """The labeler's action for a node, with the labels and the reason.

    `source` is the source of the GPUs' name; labels with the keys in `drop` are removed.
    """

    action: Action
    labels: Mapping[str, str]
    reason: str
    source: str = ""
    drop: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """The plugins' reports about the GPUs of a node."""

    kinds: sources.Kinds
    is_simulated: bool = False
    gpus: vocabulary.GpuNode | None = None


NO_REPORT: Final = Report(kinds={})


def kinds_of(node: vocabulary.GpuNode | None) -> dict[sources.Product, int]:
    """Return the kinds of GPU of a node, with the number of physical GPUs of each kind.

    A GPU in MIG mode is partitioned, whether or not it has MIG devices yet.
    """
    if node is None:
        return {}
    return dict(
        collections.Counter(
            sources.Product(
                name=gpu.product,
                memory_mib=gpu.memory_mib,
                is_mig=bool(gpu.mig_enabled or gpu.mig),
                is_vgpu=gpu.vgpu is True,
            )
            for gpu in node.gpus
        )
    )


def decide(  # noqa: PLR0911  # one line for each rule, in order
    status: LabelStatus,
    settings: config.Settings,
    *,
    report: Report = NO_REPORT,
    covering: str | None = None,
    objection: str | None = None,
) -> Decision:
    """Return the decision about a node.

    `covering` is another scheme that names every GPU node; `objection` is why no node without a
    label may be labelled. Both concern SkyPilot's label only.
    """
    name, claim = status.identity.name, status.identity.best
    source = str(claim.source) if claim else ""
    if settings.mode is config.Mode.OFF:
        return Decision(Action.NOTHING, {}, "off")
    if claim is None or claim.text == sources.NO_GPU:
        return _without_gpu(status, settings, source)
    if status.state is LabelState.CONFLICT or name.value is None:
        return _unnamed(status, settings, source)
    sets = settings.policy.labels
    labels = node_labels.wanted_labels(sets, name.value, kinds=report.kinds, gpus=report.gpus)
    if covering is not None and not status.current:
        labels.pop(KEY, None)
        if not labels:
            text = f"{covering} names every GPU node: nothing to label"
            return Decision(Action.NOTHING, labels, text, source)
    drop = node_labels.stale_labels(status.node.our_labels, labels, sets, gpus=report.gpus)
    if labels.items() <= {**status.node.labels, **status.node.our_labels}.items() and not drop:
        return Decision(Action.NOTHING, labels, "labelled already", source)
    simulated = "simulated, " if report.is_simulated else ""
    reason = f"{simulated}{name.reason}: {claim.text}"
    if settings.mode is config.Mode.APPLY and may_label(status, settings, report):
        wanted = Decision(Action.APPLY, labels, reason, source, drop)
        return _apply(status, wanted, objection)
    if KEY in labels and _may_withdraw(status, settings):
        return Decision(Action.WITHDRAW, {}, f"withdrawn: {reason}", source)
    return Decision(Action.SUGGEST, labels, reason, source)


def may_label(status: LabelStatus, settings: config.Settings, report: Report) -> bool:
    """Return whether the policy allows labelling a node with the name of its GPUs."""
    name = status.identity.name
    return (
        name.value is not None
        and status.state is not LabelState.CONFLICT
        and name.reason in settings.policy.reasons
        and status.node.is_selected
        and (settings.simulated or not report.is_simulated)
    )


def to_event(decision: Decision, *, node: str, at: datetime) -> vocabulary.LabelEvent | None:
    """Return the event for a decision that was carried out; None if there is no event."""
    kinds: Mapping[Action, type[vocabulary.LabelEvent]] = {
        Action.SUGGEST: vocabulary.LabelsSuggested,
        Action.APPLY: vocabulary.LabelsApplied,
        Action.WITHDRAW: vocabulary.LabelsApplied,
        Action.REFUSE: vocabulary.LabelsRefused,
    }
    kind = kinds.get(decision.action)
    if kind is None:
        return None
    return kind(
        node=node,
        at=at,
        labels=decision.labels,
        reason=decision.reason[:2048],
        source=decision.source,
    )


class _Mark(NamedTuple):
    """One GPU node; `named_by` lists the other schemes that name it."""

    is_labelled: bool
    is_named: bool
    named_by: tuple[str, ...]


class AllOrNothing:
    """Decides whether nodes without a label may be labelled: all GPU nodes, or none.

    SkyPilot reads one scheme for a whole cluster: a label on some GPU nodes would hide the others.
    If any node has the label already, every further label is an improvement. The time of an update
    does not depend on the number of nodes.
    """

    def __init__(self) -> None:
        self._marks: dict[str, _Mark] = {}
        self._counts: collections.Counter[_Mark] = collections.Counter()
        self._shared: dict[_Mark, _Mark] = {}
        # in insertion order: sorting ten thousand nodes each time would take seconds
        self._unnamed: dict[str, None] = {}

    def update(self, name: str, status: LabelStatus | None, *, may_label: bool = False) -> None:
        """Store a node's label state, and whether labelling is allowed; None removes the node."""
        old = self._marks.pop(name, None)
        if old is not None:
            self._counts[old] -= 1
        self._unnamed.pop(name, None)
        if status is None or status.state is LabelState.NOT_GPU:
            return
        # an empty label that another manager owns stays as it is
        mark = _mark(
            status, is_named=may_label and not (status.current == "" and status.foreign_owners)
        )
        new = self._shared.setdefault(mark, mark)
        self._marks[name] = new
        self._counts[new] += 1
        if not new.is_named:
            self._unnamed[name] = None

    def objection(self) -> str | None:
        """Return why no node without a label may be labelled, or None."""
        if not self._unnamed or any(mark.is_labelled for mark in +self._counts):
            return None
        shown = ", ".join(itertools.islice(self._unnamed, _SHOWN_MAX))
        more = len(self._unnamed) - _SHOWN_MAX
        and_more = f" and {more} more" if more > 0 else ""
        names = f"{shown}{and_more}"
        return f"on hold until all GPU nodes can be labelled; the policy does not label {names}"

    def covering_scheme(self) -> str | None:
        """Return the key of another scheme that names every GPU node; None if any is labelled."""
        marks = +self._counts
        if not marks or any(mark.is_labelled for mark in marks):
            return None
        keys = (scheme.key for scheme in _OTHER_SCHEMES)
        return next((key for key in keys if all(key in mark.named_by for mark in marks)), None)


def _unnamed(status: LabelStatus, settings: config.Settings, source: str) -> Decision:
    """Return the decision for a node whose GPUs have no name, or must not be named."""
    assert status.identity.best is not None, "without any claim there is nothing to refuse"
    if status.state is LabelState.CONFLICT:
        claims = "; ".join(f"{c.source}: {c.text}" for c in status.identity.claims)
        return Decision(_refusal(settings), {}, f"sources disagree: {claims}", source)
    reason = f"{status.identity.name.reason}: {status.identity.best.text}"
    if _may_withdraw(status, settings):
        return Decision(Action.WITHDRAW, {}, f"withdrawn: {reason}", source)
    return Decision(_refusal(settings), {}, reason, source)


def _apply(status: LabelStatus, wanted: Decision, objection: str | None) -> Decision:
    """Return the decision to write the labels, to refuse them, or to hold them back."""
    if KEY not in wanted.labels:
        return wanted
    if status.current not in {None, wanted.labels[KEY]} and status.foreign_owners:
        reason = f"{KEY}={status.current} is owned by {status.foreign_owners}"
        return Decision(Action.REFUSE, wanted.labels, reason, wanted.source)
    if objection is not None and not status.current:
        return Decision(Action.HOLD, wanted.labels, objection, wanted.source)
    return wanted


def _refusal(settings: config.Settings) -> Action:
    return Action.REFUSE if settings.mode is config.Mode.APPLY else Action.NOTHING


def _may_withdraw(status: LabelStatus, settings: config.Settings) -> bool:
    may_write = settings.mode is config.Mode.APPLY and status.node.is_selected
    return may_write and status.is_outdated


def _without_gpu(status: LabelStatus, settings: config.Settings, source: str) -> Decision:
    """Return the decision for a node without GPUs: remove muster's labels if that is certain."""
    is_certain = status.identity.best is not None
    if (
        is_certain
        and status.node.our_labels
        and settings.mode is config.Mode.APPLY
        and status.node.is_selected
    ):
        return Decision(Action.WITHDRAW, {}, "withdrawn: the node no longer has a GPU", source)
    return Decision(
        Action.NOTHING, {}, "no GPU" if is_certain else "no source names its GPUs", source
    )


def _mark(status: LabelStatus, *, is_named: bool) -> _Mark:
    named_by = tuple(
        scheme.key
        for scheme in _OTHER_SCHEMES
        if node_labels.is_named_by(status, scheme) and not status.node.is_ours_alone(scheme.key)
    )
    return _Mark(bool(status.current), is_named, named_by)
