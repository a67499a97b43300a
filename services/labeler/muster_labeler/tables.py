"""Pure: The table that `muster label-gpus` shows before it does anything."""

from collections.abc import Sequence
from typing import Final

from muster_labeler import reports
from muster_labeler.plan import Row, Step

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
        reports.plain(cell)[: 200 if i == len(cells) - 1 else _CELL_MAX]
        for i, cell in enumerate(cells)
    )
