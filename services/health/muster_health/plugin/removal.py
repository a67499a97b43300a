"""Pure: removal of one plugin: why nobody expects it any more, and when it is forgotten at last."""

from typing import Final

from muster_health.model.snapshot import State
from muster_health.model.steps import Rule

_DAY_S: Final = 86_400.0
_NOT_EXPECTED: Final = "it stopped, and is no longer expected on this node"
_FORGOTTEN: Final = {
    True: "it stopped as planned a day ago, and nothing says that it is expected",
    False: "no heartbeat for a week, and nothing says that it is expected",
}


class Removal:
    """Of a plugin that is expected it is never due; one that is alive is never removed.

    `was_dropped` means that it was expected here once; `has_no_pod`, that Kubernetes answered last
    that the node has no pod of it.
    """

    __slots__ = ("due", "has_no_pod", "was_dropped")

    def __init__(self) -> None:
        self.due: float | None = None
        self.was_dropped = False
        self.has_no_pod = False

    def restart(self, state: State, now: float, *, is_expected: bool) -> None:
        """Start the wait: another verdict was reached."""
        self.due = now + wait_s(state) if _may_go(state, is_expected=is_expected) else None

    def next_due(self, state: State, *, is_expected: bool) -> float | None:
        """Return when it is forgotten."""
        return self.due if _may_go(state, is_expected=is_expected) else None

    def reason(
        self, state: State, rule: Rule | None, now: float, *, is_expected: bool, is_placed: bool
    ) -> str:
        """Return why it is removed; empty if it is not.

        `is_placed` means that Kubernetes says where this plugin should be.
        """
        if not _may_go(state, is_expected=is_expected):
            return ""
        if rule is Rule.NODE_GONE:
            return "the node is no longer in the cluster"
        has_left = state is State.MAINTENANCE
        if is_placed and (has_left or self.was_dropped or self.has_no_pod):
            return _NOT_EXPECTED
        is_forgotten = self.due is not None and now >= self.due
        return _FORGOTTEN[has_left] if is_forgotten else ""


def wait_s(state: State) -> float:
    """Return how long a plugin that nobody expects is kept."""
    return _DAY_S if state is State.MAINTENANCE else 7 * _DAY_S


def _may_go(state: State, *, is_expected: bool) -> bool:
    return state in {State.MAINTENANCE, State.LOST} and not is_expected
