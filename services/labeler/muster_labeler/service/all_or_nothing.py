"""Pure: all GPU nodes or none: whether a node without a label may be labelled.

SkyPilot reads one scheme for a whole cluster: a label on some GPU nodes would hide the others.
"""

import collections
import itertools
from typing import NamedTuple

from muster_labeler.naming import node_labels, schemes
from muster_labeler.naming.node_labels import LabelState, LabelStatus

_SHOWN_MAX = 5
_OTHER_SCHEMES = tuple(
    scheme for scheme in schemes.SCHEMES if scheme.is_skypilots and scheme.key != schemes.SKYPILOT
)


class _Mark(NamedTuple):
    """What matters about a GPU node here; `named_by` are the other schemes that name it."""

    is_labelled: bool
    is_named: bool
    named_by: tuple[str, ...]


class AllOrNothing:
    """What matters about all GPU nodes; an update takes the same time however many there are.

    Once any node has the label, every further label is an improvement.
    """

    def __init__(self) -> None:
        self._marks: dict[str, _Mark] = {}
        self._counts: collections.Counter[_Mark] = collections.Counter()
        self._shared: dict[_Mark, _Mark] = {}
        # in insertion order: sorting ten thousand each time would cost seconds
        self._unnamed: dict[str, None] = {}

    def update(self, name: str, status: LabelStatus | None, *, may_label: bool = False) -> None:
        """Store how a node is labelled now, and whether it may be labelled; None if it is gone."""
        old = self._marks.pop(name, None)
        if old is not None:
            self._counts[old] -= 1
        self._unnamed.pop(name, None)
        if status is None or status.state is LabelState.NOT_GPU:
            return
        # an empty label that somebody else owns stays as it is
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
        return f"held: all GPU nodes or none, and the policy cannot label {shown}{and_more}"

    def covering_scheme(self) -> str | None:
        """Return the key of another scheme that names every GPU node, if there is one."""
        marks = +self._counts
        if not marks or any(mark.is_labelled for mark in marks):
            return None
        keys = (scheme.key for scheme in _OTHER_SCHEMES)
        return next((key for key in keys if all(key in mark.named_by for mark in marks)), None)


def _mark(status: LabelStatus, *, is_named: bool) -> _Mark:
    named_by = tuple(
        scheme.key
        for scheme in _OTHER_SCHEMES
        if node_labels.is_named_by(status, scheme) and not status.node.is_ours_alone(scheme.key)
    )
    return _Mark(bool(status.current), is_named, named_by)
