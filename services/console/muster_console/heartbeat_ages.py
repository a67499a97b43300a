"""Pure: how old the last heartbeat of each node was when health's state was last read."""

from collections.abc import Container
from typing import Final, NamedTuple

from muster.fleet import health_state

_NODES_MAX: Final = 100_000
_NEVER: Final = float("inf")


class Age(NamedTuple):
    """The age of the last heartbeat, in seconds and in intervals; infinite if none arrived."""

    seconds: float
    intervals: float


class HeartbeatAges:
    """For each node, the age of the last heartbeat of the plugin that is most overdue."""

    def __init__(self) -> None:
        self._oldest: dict[str, Age] = {}

    def receive(self, state: health_state.State) -> None:
        """Store the ages in health's state, or in one page of it."""
        ages: dict[str, Age] = {}
        for plugin in state.plugins:
            self._oldest.pop(plugin.node, None)
            if plugin.watched:
                continue  # observed by an agent, so it sends no heartbeats
            age = _age(plugin)
            ages[plugin.node] = max(
                age, ages.get(plugin.node, age), key=lambda each: each.intervals
            )
        self._oldest.update(ages)
        while len(self._oldest) > _NODES_MAX:
            del self._oldest[next(iter(self._oldest))]

    def of(self, nodes: Container[str]) -> dict[str, Age]:
        """Return the ages by node, and drop all nodes that are not in `nodes`."""
        for gone in [name for name in self._oldest if name not in nodes]:
            del self._oldest[gone]
        return dict(self._oldest)


def _age(plugin: health_state.Plugin) -> Age:
    if plugin.beat_age_s is None:
        return Age(_NEVER, _NEVER)
    seconds = max(0.0, plugin.beat_age_s)
    return Age(seconds, seconds / plugin.interval_s if plugin.interval_s > 0 else 0.0)
