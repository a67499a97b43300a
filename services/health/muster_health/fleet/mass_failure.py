"""Pure: detects mass failures (alert `storm`): many nodes' plugins fail alike at the same time.

A plugin is suspected when it is silent, or when a problem that it reports is about to lead to a
verdict. Failures are counted by node: the plugins of a single node are never a mass failure. (A
node that is not in the cluster is not tracked at all.) `suspension` suspends the members of a
mass failure: they are not probed, and get no verdict.

| a suspected plugin | event                                                     | becomes   |
|--------------------|-----------------------------------------------------------|-----------|
| new                | it fits a running mass failure (1)                        | suspended |
| new                | it fits no running mass failure                           | recent    |
| recent             | recent plugins on more than 5 nodes failed alike (2)      | suspended |
| recent             | 10 s later                                                | alone     |
| suspended          | immediately, if it was suspended too long recently (3)    | alone     |
| suspended          | it has been suspended for too long (3)                    | waiting   |
| suspended          | its pod or node is gone, on no more than 5 nodes (4)      | waiting   |
| suspended          | the mass failure is over (5)                              | waiting   |
| waiting            | its turn: 50 plugins a second, because each needs a probe | alone     |
| any                | no longer suspected, removed, or it fails differently     | new       |

A plugin that is recent or alone is probed and judged as if there were no mass failure. A plugin
that is waiting or alone is not suspended again for the same suspicion.

(1) It failed in the same manner, shares the cause, and failed before the mass failure was noticed
or at most 10 s later. A plugin that closed its own connection therefore does not fit a mass failure
of silent plugins.
(2) In the same manner, and with a common cause (a NATS server, a zone, a revision), or on more than
10 % of all nodes. Of several causes, the one with the greatest share of failed nodes counts. If
there is already a mass failure with that cause, it grows.
(3) See `suspension.Budget`.
(4) If the pods on more than 5 nodes of the mass failure are gone, they have that in common.
(5) Hardly any of its members are suspected any more; or they have had the time to recover, and no
plugins have joined for 10 s; or it has lasted for ten times the time to recover.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

from muster import wording
from muster_health.model import config, steps

FLEET: Final = ""
"""The cause of a mass failure whose members have no known cause in common."""

_REMAIN_SHARE: Final = 0.02
_LASTS_MAX: Final = 10
_SHOWN_MAX: Final = 4

Sizes = Callable[[], Mapping[str, int]]
"""Returns how many nodes of the fleet a cause can affect, by cause."""
Group = tuple[str, steps.Manner]


def lasts_s(settings: config.Detection) -> float:
    """Return how long a mass failure lasts if no plugins join later: the time needed to recover."""
    return settings.reconnect_s + settings.suspicion_beats * settings.interval_s


@dataclass(slots=True, kw_only=True)
class MassFailure:
    """One mass failure; by `until` its members have had enough time to recover.

    `members` are its plugins that are still suspected, with their nodes. Plugins that failed after
    `fits_until` do not belong to it.
    """

    cause: str
    manner: steps.Manner
    began_at: float
    until: float
    fits_until: float
    joined_at: float
    members: dict[str, str] = field(default_factory=dict)
    peak: int = 0
    joined: Counter[str] = field(default_factory=Counter)
    """How often plugins of each node joined."""
    gone: set[str] = field(default_factory=set)
    """The nodes that are gone, or on which a member's pod is gone."""

    def fits(self, failure: steps.Failure) -> bool:
        """Return whether a plugin failed early enough, in the same manner, and shares the cause."""
        is_alike = failure.manner is self.manner and failure.at <= self.fits_until
        return is_alike and (self.cause == FLEET or self.cause in failure.causes)

    def join(self, key: str, node: str, now: float) -> None:
        """Add a member."""
        self.members[key] = node
        self.peak = max(self.peak, len(self.members))
        self.joined[node] += 1
        self.joined_at = now


def suspicions_by_node(failures: Iterable[MassFailure]) -> str:
    """Return the nodes from which most suspicions come, each with its share."""
    joined = Counter[str]()
    for failure in failures:
        joined.update(failure.joined)
    total, top = joined.total(), joined.most_common(_SHOWN_MAX)
    shares = ", ".join(f"{node} {many} ({many / total:.0%})" for node, many in top)
    more = len(joined) - len(top)
    others = f" and {wording.counted(more, 'more node')}" if more else ""
    return f"{total} suspicions, by node: {shares}{others}"


@dataclass(frozen=True, slots=True)
class Ended:
    """The end of a mass failure; the plugins in `left` are still suspected."""

    failure: MassFailure
    left: tuple[str, ...]


class SuspectCounts:
    """Counts the suspected plugins by how they failed, and finds mass failures among them."""

    def __init__(self, settings: config.Detection) -> None:
        self.active: dict[Group, MassFailure] = {}
        self.suspects: dict[str, steps.Failure] = {}
        self._settings = settings
        self._recent: dict[str, tuple[float, str]] = {}
        """Plugins that count towards a new mass failure: when each was suspected, and its node."""
        self._nodes: dict[Group, Counter[str]] = {}
        """The number of recent plugins of each node, by cause and manner."""
        self._member_of: dict[str, MassFailure] = {}

    def suspected(self, key: str, node: str, failure: steps.Failure, now: float) -> bool:
        """Record that a plugin is suspected; return whether it joined a running mass failure."""
        known = self.suspects.get(key)
        if known is not None and known.manner is failure.manner:
            return False
        self.cleared(key)
        self.suspects[key] = failure
        running = next((each for each in self.active.values() if each.fits(failure)), None)
        if running is not None:
            self._join(running, key, node, now)
            return True
        self._recent[key] = now, node
        for cause in (FLEET, *failure.causes):
            self._nodes.setdefault((cause, failure.manner), Counter())[node] += 1
        return False

    def grow(self, sizes: Sizes, now: float) -> list[str]:
        """Begin or extend mass failures; return the plugins that joined."""
        while self._recent:
            key, (at, _) = next(iter(self._recent.items()))
            if now - at <= self._settings.storm_window_s:
                break
            self._age(key)
        joined: list[str] = []
        while (group := self._over_limit(sizes)) is not None:
            joined += self._begin(group, now)
        return joined

    def cleared(self, key: str) -> None:
        """Record that a plugin is no longer suspected."""
        self._age(key)
        self.suspects.pop(key, None)
        failure = self._member_of.pop(key, None)
        if failure is not None:
            del failure.members[key]

    def has(self, key: str) -> bool:
        """Return whether a plugin is a member of a mass failure."""
        return key in self._member_of

    def gone(self, key: str) -> None:
        """Record that the pod of a member, or its node, is gone."""
        failure = self._member_of.get(key)
        if failure is not None:
            failure.gone.add(failure.members[key])

    def has_own_reason(self, key: str) -> bool:
        """Return whether a plugin is in a mass failure in which pods are gone on few nodes."""
        failure = self._member_of.get(key)
        return failure is not None and len(failure.gone) <= self._settings.storm_min

    def end(self, now: float) -> list[Ended]:
        """End the mass failures that are over, and return them."""
        over = [group for group, failure in self.active.items() if self._is_over(failure, now)]
        ended = []
        for group in over:
            failure = self.active.pop(group)
            ended.append(Ended(failure, tuple(sorted(failure.members))))
            for key in ended[-1].left:
                del self._member_of[key]
        return ended

    def shift(self, seconds: float) -> None:
        """Postpone the ends of mass failures by the time for which our process was suspended."""
        for failure in self.active.values():
            failure.until += seconds
            failure.fits_until += seconds
            failure.joined_at += seconds

    def clear(self) -> None:
        """Discard all suspicions and mass failures."""
        self.active.clear()
        self.suspects.clear()
        self._recent.clear()
        self._nodes.clear()
        self._member_of.clear()

    def _over_limit(self, sizes: Sizes) -> Group | None:
        minimum = self._settings.storm_min
        many = {group: len(nodes) for group, nodes in self._nodes.items() if len(nodes) > minimum}
        if not many:
            return None
        of = sizes()
        shares = {
            (cause, manner): count / max(count, of.get(cause, 0))
            for (cause, manner), count in many.items()
            if cause != FLEET or count > self._settings.storm_share * of.get(FLEET, 0)
        }
        return max(shares, key=lambda each: (each[0] != FLEET, shares[each], each), default=None)

    def _begin(self, group: Group, now: float) -> list[str]:
        """Add recent plugins to a new or growing mass failure."""
        cause, manner = group
        failure = self.active.get(group) or MassFailure(
            cause=cause,
            manner=manner,
            began_at=now,
            until=now + lasts_s(self._settings),
            fits_until=now,
            joined_at=now,
        )
        self.active[group] = failure
        failure.fits_until = now + self._settings.storm_window_s
        fitting = [
            (key, node)
            for key, (_, node) in self._recent.items()
            if failure.fits(self.suspects[key])
        ]
        for key, node in fitting:
            self._age(key)
            self._join(failure, key, node, now)
        return [key for key, _ in fitting]

    def _join(self, failure: MassFailure, key: str, node: str, now: float) -> None:
        failure.join(key, node, now)
        self._member_of[key] = failure

    def _is_over(self, failure: MassFailure, now: float) -> bool:
        few_left = len(failure.members) < _REMAIN_SHARE * failure.peak or not failure.members
        quiet = failure.joined_at + self._settings.storm_window_s
        longest = failure.began_at + _LASTS_MAX * lasts_s(self._settings)
        return few_left or now >= min(max(failure.until, quiet), longest)

    def _age(self, key: str) -> None:
        """Stop counting a plugin towards a new mass failure."""
        recent = self._recent.pop(key, None)
        if recent is None:
            return
        failure = self.suspects[key]
        for cause in (FLEET, *failure.causes):
            group = cause, failure.manner
            nodes = self._nodes[group]
            nodes[recent[1]] -= 1
            if not nodes[recent[1]]:
                del nodes[recent[1]]
            if not nodes:
                del self._nodes[group]
