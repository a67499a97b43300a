"""Pure. Whether a plugin's pod is restarted: off by default, within a budget, never in a storm.

Only a verdict that a new process may mend is acted on, once, after its alert has been told:
STUCK, DEREGISTERED and MISMATCH. Each node waits longer after each restart, and the fleet has so
many an hour. What a budget forbids is said, and not done later.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from muster.vocabulary import Verdict
from muster_health import config, facts

CURABLE: Final = frozenset({Verdict.STUCK, Verdict.DEREGISTERED, Verdict.MISMATCH})

_HOUR_S: Final = 3600.0
_DAY_S: Final = 86_400.0
_LEVEL_MAX: Final = 8


@dataclass(frozen=True, slots=True)
class Refused:
    """Why nothing is done."""

    reason: str


@dataclass(slots=True)
class _Node:
    """When a node's plugin was last restarted, and how often in a row."""

    at: float
    level: int


class Remedies:
    """The budget of the fleet and of each node."""

    def __init__(self, settings: config.Remediation) -> None:
        self._settings = settings
        self._acts: tuple[float, ...] = ()
        self._nodes: dict[str, _Node] = {}

    @property
    def mode(self) -> config.Remedies:
        """Return how far it may go."""
        return self._settings.mode

    def choose(
        self, node: str, pods: Sequence[facts.Pod], now: float, *, storm: bool
    ) -> facts.Pod | Refused:
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
        known = self._nodes.get(node)
        level = 1 if known is None else min(known.level + 1, _LEVEL_MAX)
        self._nodes[node] = _Node(now, level)
        self._acts = (*self._acts, now)
        return running[0]

    def _spent(self, node: str, now: float) -> str:
        if len(self._acts) >= self._settings.per_hour:
            return f"{len(self._acts)} restarts within an hour are as many as allowed"
        known = self._nodes.get(node)
        if known is None:
            return ""
        wait_s = self._settings.node_backoff_s * 2.0 ** (known.level - 1)
        if now - known.at >= wait_s:
            return ""
        return f"restarted {now - known.at:.0f} s ago; the next one may be {wait_s:.0f} s after it"

    def _forget(self, now: float) -> None:
        self._acts = tuple(at for at in self._acts if now - at < _HOUR_S)
        old = [name for name, known in self._nodes.items() if now - known.at > _DAY_S]
        for name in old:
            del self._nodes[name]
