"""Pure: plans what `muster label-gpus` writes to each node or refuses, and why."""

import enum
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Final

from muster import wording
from muster_labeler import model
from muster_labeler.naming import accelerators, node_labels
from muster_labeler.naming.accelerators import Reason
from muster_labeler.naming.node_labels import LabelState, LabelStatus

_HEAD: Final = ("NODE", "GPU", "SOURCE", "CURRENT", "NEW", "REASON")
_CELL_MAX: Final = 60
_REASON_MAX: Final = 200
_ROWS_MAX: Final = 200
_NAMES_MAX: Final = 5
_UNLABELLABLE = frozenset(
    {LabelState.MIG, LabelState.VGPU, LabelState.MIXED, LabelState.UNREACHABLE}
)


class Step(enum.StrEnum):
    """What the command does with a node."""

    KEEP = "keep"
    WRITE = "write"
    REMOVE = "remove"
    REFUSE = "refuse"


_STEP_WORDS: Final = {
    Step.KEEP: "unchanged",
    Step.WRITE: "to write",
    Step.REMOVE: "to remove",
    Step.REFUSE: "refused",
}
_ORDER: Final = (Step.REFUSE, Step.WRITE, Step.REMOVE, Step.KEEP)


@dataclass(frozen=True, slots=True, kw_only=True)
class Allowed:
    """The labels that are written on request and refused otherwise.

    Parameters
    ----------
    allow_unknown
        Also write names that are guessed from an unknown product.
    force_ambiguous
        Also write names that depend on an unknown memory size.
    from_instance_type
        Also write names that are inferred from the instance type.
    overwrite
        Also overwrite labels that another manager owns; the previous value is recorded.
    partial
        Also write labels if some GPU nodes remain without one.
    unheard
        Also write labels if the reports of agents or DRA could not be read.
    simulated
        Also label nodes whose GPUs are simulated.

    """

    allow_unknown: bool = False
    force_ambiguous: bool = False
    from_instance_type: bool = False
    overwrite: bool = False
    partial: bool = False
    unheard: bool = False
    simulated: bool = False


@dataclass(frozen=True, slots=True)
class Row:
    """One node with its current label, its new label, and the reason."""

    status: LabelStatus
    step: Step
    new: str | None
    reason: str

    @property
    def node(self) -> str:
        """Return the name of the node."""
        return self.status.node.name

    @property
    def gpu(self) -> str:
        """Return the best source's description of the node's GPUs; `?` without a source."""
        return self.status.identity.best.text if self.status.identity.best else "?"

    @property
    def source(self) -> str:
        """Return the best source of the GPUs' name; `-` without a source."""
        return self.status.identity.best.source if self.status.identity.best else "-"

    @property
    def current(self) -> str | None:
        """Return the node's current label; None without one."""
        return self.status.current

    @property
    def is_labelled_after(self) -> bool:
        """Return whether the node has a usable label after the planned change."""
        value = self.new if self.step in {Step.WRITE, Step.REMOVE} else self.current
        return bool(value) and accelerators.is_name(value or "")


def plan(
    statuses: Sequence[LabelStatus],
    allowed: Allowed,
    *,
    simulated: Collection[str] = (),
    only: Collection[str] = (),
) -> list[Row]:
    """Return a row for each GPU node; if `only` is not empty, only these nodes are written."""
    return [
        _row(status, allowed, is_simulated=status.node.name in simulated)
        if not only or status.node.name in only
        else Row(status, Step.KEEP, status.current, "not selected")
        for status in statuses
    ]


def removals(nodes: Sequence[model.Node], *, only: Collection[str] = ()) -> list[Row]:
    """Return a row for each node that has the accelerator label or anything written by muster."""
    planned = []
    for node in sorted(nodes, key=lambda node: node.name):
        status = node_labels.label_status(node)
        if status.current is None and not node.is_written:
            continue
        if only and node.name not in only:
            planned.append(Row(status, Step.KEEP, status.current, "not selected"))
        elif not node.is_written:
            planned.append(
                Row(status, Step.KEEP, status.current, f"owned by {status.foreign_owners}")
            )
        elif status.foreign_owners:
            owners = status.foreign_owners
            reason = f"muster's other labels; {accelerators.SKYPILOT} is owned by {owners}"
            planned.append(Row(status, Step.REMOVE, status.current, reason))
        else:
            planned.append(Row(status, Step.REMOVE, None, "written by muster"))
    return planned


def unlabelled_after(planned: Sequence[Row]) -> list[str]:
    """Return the GPU nodes that would have no usable label after all rows are written."""
    return [row.node for row in planned if not row.is_labelled_after]


def objection(planned: Sequence[Row], allowed: Allowed, *, covering: str | None) -> str | None:
    """Return why nothing may be written at all, or None.

    SkyPilot reads one scheme for a whole cluster: a label on some GPU nodes hides the others.
    """
    # correcting a value does not hide a node that was visible before
    is_new = any(row.step is Step.WRITE and not row.current for row in planned)
    if not is_new or allowed.partial:
        return None
    left = unlabelled_after(planned)
    if covering is not None and left:
        hidden = f"labels on only some nodes would hide {some(left)} from SkyPilot"
        return f"{covering} names every GPU node already; {hidden}"
    if left:
        return (
            f"{len(left)} of {len(planned)} GPU nodes would remain without "
            f"{accelerators.SKYPILOT}, so SkyPilot would not see them: {some(left)}"
        )
    return None


def table(rows: Sequence[Row]) -> list[tuple[str, ...]]:
    """Return the cells of a table with a heading and at most 200 rows, refused rows first."""
    ordered = sorted(rows, key=lambda row: (_ORDER.index(row.step), row.node))
    return [_HEAD, *(_cells(row) for row in ordered[:_ROWS_MAX])]


def summary(rows: Sequence[Row]) -> list[str]:
    """Return the lines below the table: rows left out, and the number of rows by step."""
    left = len(rows) - _ROWS_MAX
    more = [f"and {wording.counted(left, 'more node')}"] if left > 0 else []
    counts = {step: sum(row.step is step for row in rows) for step in _ORDER}
    parts = (f"{count} {_STEP_WORDS[step]}" for step, count in counts.items() if count)
    return [*more, ", ".join(parts)]


def some(nodes: Sequence[str]) -> str:
    """Return the first few names as text, and the number of the others."""
    more = len(nodes) - _NAMES_MAX
    return ", ".join(nodes[:_NAMES_MAX]) + (f" and {more} more" if more > 0 else "")


def _row(status: LabelStatus, allowed: Allowed, *, is_simulated: bool) -> Row:
    reason = status.identity.name.reason
    if status.state is LabelState.CONFLICT:
        return Row(status, Step.REFUSE, None, f"sources disagree: {_claims(status)}")
    if status.state in _UNLABELLABLE or status.wanted is None:
        return Row(status, Step.REFUSE, None, f"{reason}")
    if status.current == status.wanted:
        return Row(status, Step.KEEP, status.current, "labelled already")
    refusal = _refusal(status, reason, allowed, is_simulated=is_simulated)
    if refusal is not None:
        return Row(status, Step.REFUSE, status.wanted, refusal)
    return Row(status, Step.WRITE, status.wanted, reason)


def _refusal(
    status: LabelStatus, reason: Reason, allowed: Allowed, *, is_simulated: bool
) -> str | None:
    """Return why a name is not written, and the option that allows it; None if it is written."""
    if is_simulated and not allowed.simulated:
        return "the GPUs are simulated; pass --simulated to label them"
    if reason is Reason.MEMORY_UNKNOWN and not allowed.force_ambiguous:
        return "the name depends on the memory size, which is unknown; pass --force-ambiguous"
    if reason is Reason.FALLBACK and not allowed.allow_unknown:
        by_type = (
            status.identity.best is not None and status.identity.best.source == "instance type"
        )
        option = "--from-instance-type" if by_type else "--allow-unknown, or add an alias"
        return f"only a guess; pass {option}"
    if status.foreign_owners and not allowed.overwrite:
        return f"owned by {status.foreign_owners}; pass --overwrite"
    return None


def _claims(status: LabelStatus) -> str:
    return ", ".join(
        f"{c.source} reports {c.name.value or c.name.reason}" for c in status.identity.claims
    )


def _cells(row: Row) -> tuple[str, ...]:
    if row.step is Step.REMOVE:
        new = "(removed)"
    elif row.step is Step.REFUSE:
        new = f"({row.new})" if row.new else "-"
    else:
        new = row.new or "-"
    cells = (row.node, row.gpu, row.source, row.current or "-", new, row.reason)
    return (*(cell[:_CELL_MAX] for cell in cells[:-1]), cells[-1][:_REASON_MAX])
