"""Pure: Whether a plugin's pod is restarted: off by default, within a budget, never in a storm.

Only a verdict that a new process may mend is acted on, once, after its alert has been told: STUCK,
MISMATCH, and DEREGISTERED after a minute in which the plugin could not mend it. Each node waits
longer after each restart, and the fleet has so many an hour. What a budget forbids is said, and not
done later. What is done is remembered with the plugin before it is done: a restart of ours earns
nobody another one.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from muster_health.model import cluster_facts, config, snapshot

_HOUR_S: Final = 3600.0
_DAY_S: Final = 86_400.0


@dataclass(frozen=True, slots=True)
class Refused:
    """Why nothing is done."""

    reason: str


class Remedies:
    """The budget of the fleet and of each node."""

    def __init__(self, settings: config.Remediation) -> None:
        self._settings = settings
        self._times: dict[str, dict[str, tuple[float, ...]]] = {}
        """By node and plugin."""

    @property
    def mode(self) -> config.Remedies:
        """Return how far it may go."""
        return self._settings.mode

    def restore(self, node: str, plugin: str, times: tuple[float, ...]) -> None:
        """Take when a plugin was restarted, as far as another process, or we, remembered it."""
        if times:
            self._times.setdefault(node, {})[plugin] = times

    def choose(
        self, node: str, plugin: str, pods: Sequence[cluster_facts.Pod], now: float, *, storm: bool
    ) -> cluster_facts.Pod | Refused:
        """Return the pod to restart, and count it; or why none is."""
        running = [pod for pod in pods if not pod.deleting]
        if storm:
            return Refused("many plugins are silent at once; restarting them would hide why")
        if len(running) != 1:
            return Refused(f"{len(running)} pods of the plugin are known on the node, not one")
        self._forget(now)
        spent = self._spent(node, now)
        if spent:
            return Refused(spent)
        home = self._times.setdefault(node, {})
        home[plugin] = (*home.get(plugin, ()), now)[-snapshot.REMEDIES_MAX:]
        return running[0]

    def _spent(self, node: str, now: float) -> str:
        lately = sum(now - at < _HOUR_S for one in self._times for at in self._of(one))
        if lately >= self._settings.per_hour:
            return f"{lately} restarts within an hour are as many as allowed"
        times = self._of(node)
        if not times:
            return ""
        wait_s = self._settings.node_backoff_s * 2.0 ** (min(len(times), snapshot.REMEDIES_MAX) - 1)
        since_s = now - max(times)
        if since_s >= wait_s:
            return ""
        return f"restarted {since_s:.0f} s ago; the next one may be {wait_s:.0f} s after it"

    def _of(self, node: str) -> list[float]:
        return [at for times in self._times.get(node, {}).values() for at in times]

    def _forget(self, now: float) -> None:
        old = [node for node in self._times if now - max(self._of(node)) > _DAY_S]
        for node in old:
            del self._times[node]
