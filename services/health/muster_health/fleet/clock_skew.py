"""Pure: The clocks of all nodes: if most are apart from ours, it is ours that is wrong."""

from collections.abc import Mapping

from muster_health.model import config
from muster_health.plugin import tracked_plugin


class FleetClocks:
    """Which plugins' clocks are apart from ours, of all of these."""

    def __init__(
        self, around: config.Context, plugins: Mapping[str, tracked_plugin.TrackedPlugin]
    ) -> None:
        self._around = around
        self._plugins = plugins
        self._apart: set[str] = set()

    def compare(
        self, changed: tracked_plugin.TrackedPlugin
    ) -> list[tracked_plugin.TrackedPlugin] | None:
        """Take that a clock is apart, or no more; return who are, if whose fault it is changed."""
        (self._apart.add if changed.skew.is_skewed else self._apart.discard)(changed.key)
        most = max(self._around.settings.storm_min, len(self._plugins) / 2)
        is_ours = len(self._apart) > most
        if is_ours is self._around.is_apart:
            return None
        self._around.is_apart = is_ours
        return self._skewed

    def words(self) -> str:
        """Say how ours is wrong; empty if it is not known to be."""
        if not self._around.is_apart:
            return ""
        skewed = sorted(self._skewed, key=lambda found: found.skew.seconds)
        middle = skewed[len(skewed) // 2].skew.words()
        return f"{len(skewed)} of {len(self._plugins)}; of the middle one {middle}"

    def forget(self, key: str) -> None:
        """Take that a plugin is known no more."""
        self._apart.discard(key)

    @property
    def _skewed(self) -> list[tracked_plugin.TrackedPlugin]:
        return [self._plugins[key] for key in self._apart if key in self._plugins]
