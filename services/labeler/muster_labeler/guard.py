"""Pure. All GPU nodes or none: whether a label may be put where none was, kept up to date."""

from muster_labeler import accelerators, schemes, states
from muster_labeler.states import Standing, State

_SHOWN_MAX = 5
_OTHERS = tuple(
    scheme for scheme in schemes.SCHEMES if scheme.is_skypilots and scheme.key != schemes.SKYPILOT
)


class Guard:
    """What of all GPU nodes decides; each update costs the same, however many there are.

    Once the label is on some node its scheme is the cluster's, and every further label mends.
    """

    def __init__(self) -> None:
        self._nodes: set[str] = set()
        self._labelled: set[str] = set()
        self._nameless: set[str] = set()
        self._uncovered: dict[str, set[str]] = {scheme.key: set() for scheme in _OTHERS}

    def update(self, name: str, one: Standing | None) -> None:
        """Take how a node stands now; None if it is gone."""
        self._put(self._nodes, name, is_in=one is not None and one.state is not State.NOT_GPU)
        is_gpu = one is not None and name in self._nodes
        self._put(self._labelled, name, is_in=is_gpu and one is not None and bool(one.current))
        self._put(self._nameless, name, is_in=is_gpu and one is not None and not _is_named(one))
        for scheme in _OTHERS:
            is_in = is_gpu and one is not None and not states.names(one, scheme)
            self._put(self._uncovered[scheme.key], name, is_in=is_in)

    def objection(self) -> str | None:
        """Return why nothing may be labelled anew, or None."""
        if self._labelled or not self._nodes:
            return None
        if self._nameless:
            shown = ", ".join(sorted(self._nameless)[:_SHOWN_MAX])
            more = len(self._nameless) - _SHOWN_MAX
            return f"held: no certain name for {shown}" + (f" and {more} more" if more > 0 else "")
        return None

    def covering(self) -> str | None:
        """Return the key of another scheme that names every GPU node, if there is one."""
        if self._labelled or not self._nodes:
            return None
        return next((key for key, missing in self._uncovered.items() if not missing), None)

    @staticmethod
    def _put(into: set[str], name: str, *, is_in: bool) -> None:
        if is_in:
            into.add(name)
        else:
            into.discard(name)


def _is_named(one: Standing) -> bool:
    certain = {accelerators.Reason.EXACT, accelerators.Reason.ALIAS}
    return one.wanted is not None and one.known.name.reason in certain
