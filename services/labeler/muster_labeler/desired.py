"""Pure. What a node's labels should be, and what is to be done about the difference.

| mode | the node | answer |
|---|---|---|
| any | has no GPU, or the label is right | NOTHING |
| suggest | has a name | SUGGEST, also when its labels cannot be read |
| suggest | has none (mixed, partitioned, no name) | NOTHING |
| apply | has none | REFUSE |
| apply | simulated and not allowed, or the name is not certain | SUGGEST |
| apply | its labels cannot be read now | WAIT |
| apply | it cannot be written at all | REFUSE |
| apply | the name is certain | APPLY |
"""

import collections
import enum
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Final

from muster import vocabulary
from muster_labeler import accelerators, config

KEY: Final = "skypilot.co/accelerator"
SOURCE: Final = "agent inventory"

_PRODUCTS_SHOWN_MAX: Final = 5


class Action(enum.StrEnum):
    """What is done about a node."""

    NOTHING = "nothing"
    SUGGEST = "suggest"
    APPLY = "apply"
    REFUSE = "refuse"
    WAIT = "wait"


@dataclass(frozen=True, slots=True)
class Product:
    """One kind of GPU on a node."""

    name: str
    memory_mib: int | None
    is_mig: bool
    is_simulated: bool
    is_vgpu: bool = False


@dataclass(frozen=True, slots=True)
class Node:
    """A node as the Kubernetes API has it."""

    uid: str
    labels: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Unknown:
    """The API did not give or take what it was asked; `is_passing` if it may another time."""

    text: str
    is_passing: bool


@dataclass(frozen=True, slots=True)
class Decision:
    """What is done, with which labels, and why."""

    action: Action
    labels: Mapping[str, str]
    reason: str


def products_of(node: vocabulary.GpuNode | None) -> dict[Product, int]:
    """Return the kinds of GPU of a node and how many physical ones there are of each.

    A GPU in MIG mode is partitioned, whether or not it has MIG devices yet.
    """
    if node is None:
        return {}
    return dict(
        collections.Counter(
            Product(
                name=gpu.product,
                memory_mib=gpu.memory_mib,
                is_mig=bool(gpu.mig_enabled or gpu.mig),
                is_simulated=node.simulated,
                is_vgpu=gpu.vgpu is True,
            )
            for gpu in node.gpus
        )
    )


def decide(
    products: Mapping[Product, int],
    current: Node | Unknown,
    *,
    mode: config.Mode,
    aliases: Mapping[str, str],
    may_label_simulated: bool,
) -> Decision:
    """Return what to do about a node with these GPUs."""
    if not products or mode is config.Mode.OFF:
        return Decision(Action.NOTHING, {}, "no GPU" if not products else "off")
    name = accelerators.of_node(
        accelerators.name(
            product.name,
            product.memory_mib,
            is_mig=product.is_mig,
            is_vgpu=product.is_vgpu,
            aliases=aliases,
        )
        for product in products
    )
    reason = f"{name.reason}: {_shown(products)}"
    if name.value is None:
        action = Action.REFUSE if mode is config.Mode.APPLY else Action.NOTHING
        return Decision(action, {}, reason)
    labels = {KEY: name.value}
    if isinstance(current, Node) and labels.items() <= current.labels.items():
        return Decision(Action.NOTHING, labels, "labelled already")
    is_simulated = any(product.is_simulated for product in products)
    if is_simulated:
        reason = f"simulated, {reason}"
    is_certain = name.reason in {accelerators.Reason.EXACT, accelerators.Reason.ALIAS}
    if mode is config.Mode.SUGGEST or not is_certain or (is_simulated and not may_label_simulated):
        return Decision(Action.SUGGEST, labels, reason)
    if isinstance(current, Unknown):
        return after_failure(labels, current)
    return Decision(Action.APPLY, labels, reason)


def after_failure(labels: Mapping[str, str], why: Unknown) -> Decision:
    """Return what becomes of labels that should have been applied and were not."""
    return Decision(Action.WAIT if why.is_passing else Action.REFUSE, labels, why.text)


def event_of(decision: Decision, *, node: str, at: datetime) -> vocabulary.LabelEvent | None:
    """Return the fact that tells of a decision, once it is carried out; None if none does."""
    shapes: Mapping[Action, type[vocabulary.LabelEvent]] = {
        Action.SUGGEST: vocabulary.LabelsSuggested,
        Action.APPLY: vocabulary.LabelsApplied,
        Action.REFUSE: vocabulary.LabelsRefused,
    }
    shape = shapes.get(decision.action)
    if shape is None:
        return None
    return shape(
        node=node, at=at, labels=decision.labels, reason=decision.reason[:2048], source=SOURCE
    )


def _shown(products: Mapping[Product, int]) -> str:
    """Return the products as people write them; the same products, always the same words."""
    told = sorted(
        f"{count} x {product.name[:100].strip() or 'nameless'}"
        + (f" ({product.memory_mib} MiB)" if product.memory_mib is not None else "")
        + (" partitioned" if product.is_mig else "")
        + (" virtual" if product.is_vgpu else "")
        for product, count in products.items()
    )
    more = len(told) - _PRODUCTS_SHOWN_MAX
    return ", ".join(told[:_PRODUCTS_SHOWN_MAX]) + (f" and {more} more" if more > 0 else "")
