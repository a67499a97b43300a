"""Pure: All that a check could read of a cluster; None is what it could not."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime

from muster_labeler import facts, sources


@dataclass(frozen=True, slots=True)
class Unread:
    """What could not be read, and why: for want of a right, or otherwise.

    `is_needed` without which nothing can be decided: sources are others' to switch on and to show.
    """

    what: str
    why: str
    is_forbidden: bool = False
    is_needed: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterAutoscaler:
    """The Cluster Autoscaler as its Deployment and its status tell of it."""

    image: str = ""
    arguments: tuple[str, ...] = ()
    groups: tuple[str, ...] = ()
    renewed: datetime | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Karpenter:
    """Karpenter: its gates, and the resources that NodeOverlays give."""

    namespace: str = ""
    name: str = ""
    gates: str = ""
    overlays: tuple[str, ...] = ()
    pools: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """A cluster. `now` is the API server's own clock, so that ours may be wrong."""

    now: datetime
    nodes: Sequence[facts.Node] | None = None
    views: sources.Views = sources.NOTHING_MORE
    simulated: frozenset[str] = frozenset()
    slices: Sequence[facts.Slice] = ()
    pods: Sequence[facts.Pod] | None = None
    events: Sequence[facts.Told] | None = None
    namespaces: Mapping[str, Mapping[str, str]] | None = None
    autoscaler: ClusterAutoscaler | None = None
    karpenter: Karpenter | None = None
    unread: Sequence[Unread] = field(default_factory=tuple)
