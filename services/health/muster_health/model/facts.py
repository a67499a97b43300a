"""Pure: what the Kubernetes API answers about a node and a plugin; None always means unknown.

Ages are seconds at the moment of the answer, measured by an adapter that must not trust the node's
clock: against the API server's `Date`, or since the adapter itself saw a value change.
"""

import enum
from collections.abc import Mapping
from dataclasses import dataclass


class Planned(enum.StrEnum):
    """Signs that a node is about to lose its plugins as planned, for a while or for good."""

    UNSCHEDULABLE = "unschedulable"
    TO_BE_DELETED = "to_be_deleted"
    """A taint such as ToBeDeletedByClusterAutoscaler or karpenter.sh/disrupted is set."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pod:
    """A pod of the plugin: `name` is `namespace/name`, `waiting` why a container is not running.

    `revision` is its `controller-revision-hash`; `current` is its DaemonSet's newest one.
    """

    name: str
    uid: str
    phase: str
    ready: bool
    restarts: int = 0
    deleting: bool = False
    waiting: str = ""
    revision: str = ""
    current: str = ""

    @property
    def runs(self) -> bool:
        """Return whether the containers run: in a crash loop the phase stays Running."""
        return self.phase == "Running" and not self.waiting

    @property
    def is_outdated(self) -> bool:
        """Return whether a rollout will replace the pod."""
        return bool(self.revision and self.current) and self.revision != self.current


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """How many of a resource a node has, and how many of these pods may use."""

    capacity: int
    allocatable: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """The answers to a few GETs about one node and the plugin's pods on it.

    `exists` is False if the API server answered that the node does not exist. `pods` is () if it
    answered that there are none. `holders` are the pods on the node (`namespace/name`, sorted) that
    request the resources in the query; None also if we lack the permission. `problem` describes
    what could not be read, and why.
    """

    exists: bool | None = None
    lease_age_s: float | None = None
    ready: bool | None = None
    planned: tuple[Planned, ...] = ()
    pods: tuple[Pod, ...] | None = None
    offers: Mapping[str, Offer] | None = None
    holders: tuple[str, ...] | None = None
    problem: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """A node that should run the plugin, and has been expected to for `age_s`.

    `causes` are possible common causes of failures, such as `zone=eu-1a` or `rack=7`; the
    DaemonSet's `revision` on the node is one of these.
    """

    age_s: float
    causes: tuple[str, ...] = ()
    revision: str = ""
