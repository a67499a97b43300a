"""Pure: All GPU nodes or none: whether a label may be put where none was, kept up to date."""

import collections
import itertools
from typing import NamedTuple

from muster_labeler.naming import node_labels, schemes
from muster_labeler.naming.node_labels import Standing, State

_SHOWN_MAX = 5
_OTHERS = tuple(
    scheme for scheme in schemes.SCHEMES if scheme.is_skypilots and scheme.key != schemes.SKYPILOT
)


class _Mark(NamedTuple):
    """What of a GPU node decides; `named_by` are others' schemes that name it."""

    is_labelled: bool
    is_named: bool
    named_by: tuple[str, ...]


class Guard:
    """What of all GPU nodes decides; each update costs the same, however many there are.

    Once the label is on some node its scheme is the cluster's, and every further label mends.
    """

    def __init__(self) -> None:
        self._marks: dict[str, _Mark] = {}
        self._counts: collections.Counter[_Mark] = collections.Counter()
        self._shared: dict[_Mark, _Mark] = {}
        # in the order in which they were seen: to sort ten thousand each time would cost seconds
        self._nameless: dict[str, None] = {}

    def update(self, name: str, one: Standing | None, *, may_label: bool = False) -> None:
        """Take how a node stands now, and whether it may be labelled; None if it is gone."""
        old = self._marks.pop(name, None)
        if old is not None:
            self._counts[old] -= 1
        self._nameless.pop(name, None)
        if one is None or one.state is State.NOT_GPU:
            return
        # an empty label of somebody else's stays as it is
        mark = _mark(one, is_named=may_label and not (one.current == "" and one.foreign))
        new = self._shared.setdefault(mark, mark)
        self._marks[name] = new
        self._counts[new] += 1
        if not new.is_named:
            self._nameless[name] = None

    def objection(self) -> str | None:
        """Return why nothing may be labelled anew, or None."""
        if not self._nameless or any(mark.is_labelled for mark in +self._counts):
            return None
        shown = ", ".join(itertools.islice(self._nameless, _SHOWN_MAX))
        more = len(self._nameless) - _SHOWN_MAX
        and_more = f" and {more} more" if more > 0 else ""
        return f"held: all GPU nodes or none, and the policy cannot label {shown}{and_more}"

    def covering(self) -> str | None:
        """Return the key of another scheme that names every GPU node, if there is one."""
        marks = +self._counts
        if not marks or any(mark.is_labelled for mark in marks):
            return None
        keys = (scheme.key for scheme in _OTHERS)
        return next((key for key in keys if all(key in mark.named_by for mark in marks)), None)


def _mark(one: Standing, *, is_named: bool) -> _Mark:
    named_by = tuple(
        scheme.key
        for scheme in _OTHERS
        if node_labels.names(one, scheme) and not one.node.is_ours_alone(scheme.key)
    )
    return _Mark(bool(one.current), is_named, named_by)
