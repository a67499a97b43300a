"""Pure: What the labels of a node should be, and what is to be done about it."""

import collections
import enum
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Final

from muster import vocabulary
from muster_labeler import config
from muster_labeler.naming import node_labels, schemes, sources
from muster_labeler.naming.node_labels import Standing, State

KEY: Final = schemes.SKYPILOT


class Action(enum.StrEnum):
    """What is done about a node."""

    NOTHING = "nothing"
    SUGGEST = "suggest"
    APPLY = "apply"
    WITHDRAW = "withdraw"
    REFUSE = "refuse"
    WAIT = "wait"
    HOLD = "hold"


@dataclass(frozen=True, slots=True)
class Decision:
    """What is done, with which labels, and why; `source` is who knew. `drop` are keys that go."""

    action: Action
    labels: Mapping[str, str]
    reason: str
    source: str = ""
    drop: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """How far the service may go."""

    mode: config.Mode
    policy: config.Policy
    may_label_simulated: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What agents report of a node."""

    kinds: sources.Kinds
    is_simulated: bool = False
    gpus: vocabulary.GpuNode | None = None


NO_REPORT: Final = Report(kinds={})


def kinds_of(node: vocabulary.GpuNode | None) -> dict[sources.Product, int]:
    """Return the kinds of GPU of a node and how many physical ones there are of each.

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


def decide(  # noqa: PLR0911  # a line for each rule, in order, is the point
    one: Standing,
    rules: Rules,
    *,
    report: Report = NO_REPORT,
    covering: str | None = None,
    objection: str | None = None,
) -> Decision:
    """Return what to do about a node.

    `covering` is another scheme that names every GPU node; `objection` is why no node may be
    labelled that has no label yet. Both are about SkyPilot's label alone.
    """
    name, of = one.known.name, one.known.of
    source = str(of.source) if of else ""
    if rules.mode is config.Mode.OFF:
        return Decision(Action.NOTHING, {}, "off")
    if of is None or of.text == sources.NO_GPU:
        return _without_gpu(one, rules, source)
    if one.state is State.CONFLICT or name.value is None:
        return _nameless(one, rules, source)
    sets = rules.policy.labels
    labels = node_labels.wanted_labels(sets, name.value, kinds=report.kinds, gpus=report.gpus)
    if covering is not None and not one.current:
        labels.pop(KEY, None)
        if not labels:
            text = f"{covering} names every GPU node: nothing to label"
            return Decision(Action.NOTHING, labels, text, source)
    drop = node_labels.stale_labels(one.node.ours, labels, sets, gpus=report.gpus)
    if labels.items() <= {**one.node.labels, **one.node.ours}.items() and not drop:
        return Decision(Action.NOTHING, labels, "labelled already", source)
    simulated = "simulated, " if report.is_simulated else ""
    reason = f"{simulated}{name.reason}: {of.text}"
    if rules.mode is config.Mode.APPLY and may_label(one, rules, report):
        wanted = Decision(Action.APPLY, labels, reason, source, drop)
        return _applied(one, wanted, objection)
    if KEY in labels and _may_withdraw(one, rules):
        return Decision(Action.WITHDRAW, {}, f"withdrawn: {reason}", source)
    return Decision(Action.SUGGEST, labels, reason, source)


def may_label(one: Standing, rules: Rules, report: Report) -> bool:
    """Tell whether the policy lets a node have the name that its GPUs are known by."""
    name = one.known.name
    return (
        name.value is not None
        and one.state is not State.CONFLICT
        and name.reason in rules.policy.reasons
        and one.node.is_selected
        and (rules.may_label_simulated or not report.is_simulated)
    )


def _nameless(one: Standing, rules: Rules, source: str) -> Decision:
    """Return what becomes of a node whose GPUs must not be named, or nobody can name."""
    assert one.known.of is not None, "somebody said something"
    if one.state is State.CONFLICT:
        said = "; ".join(f"{c.source}: {c.text}" for c in one.known.claims)
        return Decision(_refused(rules), {}, f"sources disagree: {said}", source)
    reason = f"{one.known.name.reason}: {one.known.of.text}"
    if _may_withdraw(one, rules):
        return Decision(Action.WITHDRAW, {}, f"withdrawn: {reason}", source)
    return Decision(_refused(rules), {}, reason, source)


def _applied(one: Standing, wanted: Decision, objection: str | None) -> Decision:
    """Return what becomes of labels that the policy allows."""
    if KEY not in wanted.labels:
        return wanted
    if one.current not in {None, wanted.labels[KEY]} and one.foreign:
        reason = f"{KEY}={one.current} is owned by {one.foreign}"
        return Decision(Action.REFUSE, wanted.labels, reason, wanted.source)
    if objection is not None and not one.current:
        return Decision(Action.HOLD, wanted.labels, objection, wanted.source)
    return wanted


def event_of(decision: Decision, *, node: str, at: datetime) -> vocabulary.LabelEvent | None:
    """Return the fact that tells of a decision, once it is carried out; None if none does."""
    shapes: Mapping[Action, type[vocabulary.LabelEvent]] = {
        Action.SUGGEST: vocabulary.LabelsSuggested,
        Action.APPLY: vocabulary.LabelsApplied,
        Action.WITHDRAW: vocabulary.LabelsApplied,
        Action.REFUSE: vocabulary.LabelsRefused,
    }
    shape = shapes.get(decision.action)
    if shape is None:
        return None
    return shape(
        node=node,
        at=at,
        labels=decision.labels,
        reason=decision.reason[:2048],
        source=decision.source,
    )


def _refused(rules: Rules) -> Action:
    return Action.REFUSE if rules.mode is config.Mode.APPLY else Action.NOTHING


def _may_withdraw(one: Standing, rules: Rules) -> bool:
    is_ours_to_do = rules.mode is config.Mode.APPLY and one.node.is_selected
    return is_ours_to_do and one.is_outdated


def _without_gpu(one: Standing, rules: Rules, source: str) -> Decision:
    """Take our labels back where an agent says that there is no GPU any more."""
    is_known = one.known.of is not None
    if is_known and one.node.ours and rules.mode is config.Mode.APPLY and one.node.is_selected:
        return Decision(Action.WITHDRAW, {}, "withdrawn: no GPU any more", source)
    return Decision(Action.NOTHING, {}, "no GPU" if is_known else "nobody knows its GPUs", source)
