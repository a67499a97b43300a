"""Pure: What `muster label-gpus` would do with each node and why, and whether it may at all."""

import enum
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Final

from muster_labeler import model
from muster_labeler.check import report
from muster_labeler.naming import accelerators, node_labels, schemes
from muster_labeler.naming.accelerators import Reason
from muster_labeler.naming.node_labels import Standing, State


class Step(enum.StrEnum):
    """What becomes of one node."""

    KEEP = "keep"
    WRITE = "write"
    REMOVE = "remove"
    REFUSE = "refuse"


_UNLABELLABLE = frozenset({State.MIG, State.VGPU, State.MIXED, State.UNREACHABLE})


@dataclass(frozen=True, slots=True, kw_only=True)
class Allowed:
    """How far one who asked lets us go."""

    unknown: bool = False
    ambiguous: bool = False
    instance_type: bool = False
    overwrite: bool = False
    partial: bool = False
    simulated: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One node: what it is labelled now, what it will be, and why."""

    node: str
    gpu: str
    source: str
    current: str | None
    new: str | None
    step: Step
    reason: str
    standing: Standing

    @property
    def is_labelled_after(self) -> bool:
        """Tell whether the node has a usable label when all is done."""
        value = self.new if self.step in {Step.WRITE, Step.REMOVE} else self.current
        return bool(value) and accelerators.is_name(value or "")


def rows(
    standings: Sequence[Standing],
    allowed: Allowed,
    *,
    simulated: Collection[str] = (),
    only: Collection[str] = (),
) -> list[Row]:
    """Return a row for each GPU node; of `only` these are any written, if some are named."""
    return [
        _row(one, allowed, is_simulated=one.node.name in simulated)
        if not only or one.node.name in only
        else _made(one, Step.KEEP, one.current, "not asked for")
        for one in standings
    ]


def removals(nodes: Sequence[model.Node], *, only: Collection[str] = ()) -> list[Row]:
    """Return a row for each node with labels of ours, or with the label: others' stay."""
    found = []
    for node in sorted(nodes, key=lambda node: node.name):
        one = node_labels.standing(node)
        if one.current is None and not node.ours:
            continue
        if only and node.name not in only:
            found.append(_made(one, Step.KEEP, one.current, "not asked for"))
        elif not node.ours:
            found.append(_made(one, Step.KEEP, one.current, f"owned by {one.foreign}"))
        elif one.foreign:
            reason = f"what is ours; {schemes.SKYPILOT} is owned by {one.foreign}"
            found.append(_made(one, Step.REMOVE, one.current, reason))
        else:
            found.append(_made(one, Step.REMOVE, None, "ours"))
    return found


def left_out(planned: Sequence[Row]) -> list[str]:
    """Return the GPU nodes that would have no usable label when all is done."""
    return [row.node for row in planned if not row.is_labelled_after]


def objection(planned: Sequence[Row], allowed: Allowed, *, covering: str | None) -> str | None:
    """Return why nothing may be written at all, or None.

    SkyPilot reads one scheme for a whole cluster: a label on some GPU nodes hides the others.
    """
    # a value that is corrected where one stood hides nobody who was seen before
    is_new = any(row.step is Step.WRITE and not row.current for row in planned)
    if not is_new or allowed.partial:
        return None
    left = left_out(planned)
    if covering is not None and left:
        return f"{covering} names every GPU node already; labels on some would hide {_named(left)}"
    if left:
        return (
            f"{len(left)} of {len(planned)} GPU nodes would stay without "
            f"{schemes.SKYPILOT} and be hidden: {_named(left)}"
        )
    return None


def _row(one: Standing, allowed: Allowed, *, is_simulated: bool) -> Row:
    reason = one.known.name.reason
    if one.state is State.CONFLICT:
        return _made(one, Step.REFUSE, None, f"sources disagree: {_claims(one)}")
    if one.state in _UNLABELLABLE or one.wanted is None:
        return _made(one, Step.REFUSE, None, f"{reason}")
    if one.current == one.wanted:
        return _made(one, Step.KEEP, one.current, "labelled already")
    refusal = _refusal(one, reason, allowed, is_simulated=is_simulated)
    if refusal is not None:
        return _made(one, Step.REFUSE, one.wanted, refusal)
    return _made(one, Step.WRITE, one.wanted, reason)


def _refusal(one: Standing, reason: Reason, allowed: Allowed, *, is_simulated: bool) -> str | None:
    """Return why a known name is not written, and which option lets it."""
    if is_simulated and not allowed.simulated:
        return "the GPUs are simulated; --simulated"
    if reason is Reason.MEMORY_UNKNOWN and not allowed.ambiguous:
        return "its memory is unknown, and decides; --force-ambiguous"
    if reason is Reason.FALLBACK and not allowed.unknown:
        by_type = one.known.of is not None and one.known.of.source == "instance type"
        option = "--from-instance-type" if by_type else "--allow-unknown, or an alias"
        return f"only a guess; {option}"
    if one.foreign and not allowed.overwrite:
        return f"owned by {one.foreign}; --overwrite"
    return None


def _made(one: Standing, step: Step, new: str | None, reason: str) -> Row:
    of = one.known.of
    return Row(
        node=one.node.name,
        gpu=of.text if of else "?",
        source=of.source if of else "-",
        current=one.current,
        new=new,
        step=step,
        reason=reason,
        standing=one,
    )


def _claims(one: Standing) -> str:
    return ", ".join(f"{c.source} says {c.name.value or c.name.reason}" for c in one.known.claims)


def _named(nodes: Sequence[str]) -> str:
    shown = ", ".join(nodes[:5])
    return shown + (f" and {len(nodes) - 5} more" if len(nodes) > 5 else "")  # noqa: PLR2004


_HEAD: Final = ("NODE", "GPU", "SOURCE", "CURRENT", "NEW", "REASON")
_CELL_MAX: Final = 60
_ROWS_MAX: Final = 200
_WORDS: Final = {
    Step.KEEP: "unchanged",
    Step.WRITE: "to write",
    Step.REMOVE: "to remove",
    Step.REFUSE: "refused",
}


def written(rows: Sequence[Row]) -> str:
    """Return the rows for people, and how many of each kind; what needs a person stands first."""
    if not rows:
        return "no GPU node\n"
    order = (Step.REFUSE, Step.WRITE, Step.REMOVE, Step.KEEP)
    sorted_ = sorted(rows, key=lambda row: (order.index(row.step), row.node))
    lines = [_HEAD, *(_cells(row) for row in sorted_[:_ROWS_MAX])]
    widths = [max(len(line[column]) for line in lines) for column in range(len(_HEAD) - 1)]
    text = [
        "  ".join([*(c.ljust(w) for c, w in zip(line, widths, strict=False)), line[-1]]).rstrip()
        for line in lines
    ]
    if len(rows) > _ROWS_MAX:
        text.append(f"and {len(rows) - _ROWS_MAX} more nodes")
    counts = {step: sum(row.step is step for row in rows) for step in order}
    text.append(", ".join(f"{count} {_WORDS[step]}" for step, count in counts.items() if count))
    return "\n".join(text) + "\n"


def _cells(row: Row) -> tuple[str, ...]:
    if row.step is Step.REMOVE:
        new = "(removed)"
    elif row.step is Step.REFUSE:
        new = f"({row.new})" if row.new else "-"
    else:
        new = row.new or "-"
    cells = (row.node, row.gpu, row.source, row.current or "-", new, row.reason)
    return tuple(
        report.plain(cell)[: 200 if i == len(cells) - 1 else _CELL_MAX]
        for i, cell in enumerate(cells)
    )
