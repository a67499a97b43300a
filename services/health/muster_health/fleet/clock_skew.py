"""Pure: clock skew of the fleet: if most nodes' clocks differ from ours, ours is wrong.

The clock of one node is observed in `plugin.liveness`; here it is decided whose fault it is.
"""

from collections.abc import Mapping

from muster_health.model import config
from muster_health.plugin import tracked_plugin


class FleetClocks:
    """Which of these plugins' clocks differ from ours."""

    def __init__(
        self, context: config.Context, plugins: Mapping[str, tracked_plugin.TrackedPlugin]
    ) -> None:
        self._context = context
        self._plugins = plugins
        self._skewed_keys: set[str] = set()

    def compare(
        self, changed: tracked_plugin.TrackedPlugin
    ) -> list[tracked_plugin.TrackedPlugin] | None:
        """Record that a clock is skewed, or no longer; return all skewed if the fault changes."""
        is_skewed = changed.clock.is_skewed
        (self._skewed_keys.add if is_skewed else self._skewed_keys.discard)(changed.key)
        most = max(self._context.settings.storm_min, len(self._plugins) / 2)
        is_ours = len(self._skewed_keys) > most
        if is_ours is self._context.is_our_clock_skewed:
            return None
        self._context.is_our_clock_skewed = is_ours
        return self._skewed

    def text(self) -> str:
        """Return how our clock is wrong; empty if it is not known to be."""
        if not self._context.is_our_clock_skewed:
            return ""
        clocks = sorted((plugin.clock for plugin in self._skewed), key=lambda c: c.seconds)
        middle = clocks[len(clocks) // 2].text()
        return f"{len(clocks)} of {len(self._plugins)} plugins; of the median plugin {middle}"

    def forget(self, key: str) -> None:
        """Forget a plugin that is removed."""
        self._skewed_keys.discard(key)

    @property
    def _skewed(self) -> list[tracked_plugin.TrackedPlugin]:
        return [self._plugins[key] for key in self._skewed_keys if key in self._plugins]
