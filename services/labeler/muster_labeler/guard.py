"""Pure. All GPU nodes or none: whether a label may be put where none was, kept up to date."""

import collections
from typing import NamedTuple

from muster_labeler import accelerators, schemes, states
from muster_labeler.states import Standing, State

_SHOWN_MAX = 5
_OTHERS = tuple(
    scheme for scheme in schemes.SCHEMES if scheme.is_skypilots and scheme.key != schemes.SKYPILOT
)
_CERTAIN = frozenset({accelerators.Reason.EXACT, accelerators.Reason.ALIAS})


class _Mark(NamedTuple):
    """What of a GPU node decides; `named_by` are the other schemes that name it."""

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
        self._nameless: set[str] = set()

    def update(self, name: str, one: Standing | None) -> None:
        """Take how a node stands now; None if it is gone."""
        old = self._marks.pop(name, None)
        if old is not None:
            self._counts[old] -= 1
        self._nameless.discard(name)
        if one is None or one.state is State.NOT_GPU:
            return
        new = self._shared.setdefault(mark := _mark(one), mark)
        self._marks[name] = new
        self._counts[new] += 1
        if not new.is_named:
            self._nameless.add(name)

    def objection(self) -> str | None:
        """Return why nothing may be labelled anew, or None."""
        if not self._nameless or any(mark.is_labelled for mark in +self._counts):
            return None
        shown = ", ".join(sorted(self._nameless)[:_SHOWN_MAX])
        more = len(self._nameless) - _SHOWN_MAX
        return f"held: no certain name for {shown}" + (f" and {more} more" if more > 0 else "")

    def covering(self) -> str | None:
        """Return the key of another scheme that names every GPU node, if there is one."""
        marks = +self._counts
        if not marks or any(mark.is_labelled for mark in marks):
            return None
        keys = (scheme.key for scheme in _OTHERS)
        return next((key for key in keys if all(key in mark.named_by for mark in marks)), None)


def _mark(one: Standing) -> _Mark:
    is_named = one.wanted is not None and one.known.name.reason in _CERTAIN
    named_by = tuple(scheme.key for scheme in _OTHERS if states.names(one, scheme))
    return _Mark(bool(one.current), is_named, named_by)
