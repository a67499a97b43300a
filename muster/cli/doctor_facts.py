"""Pure: the observations and findings of `muster doctor`."""

import dataclasses
import enum
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Final

from muster import vocabulary
from muster.fleet import health_state
from muster.kubernetes import installation
from muster.nats import streams

LOCKS: Final = {"health": streams.LEADER, "notifier": streams.TENURE}
"""The services whose leader holds a lock in NATS, each with the bucket of its lock."""
WELL: Final = frozenset({vocabulary.Verdict.HEALTHY, vocabulary.Verdict.MAINTENANCE})


class Level(enum.StrEnum):
    """The severity of a finding."""

    OK = "OK"
    WARN = "WARN"
    FAIL = "FAIL"
    NOT_CHECKED = "NOT CHECKED"


class Check(enum.StrEnum):
    """The checks, in the order of the output."""

    PODS = "pods"
    IMAGES = "images"
    BUS = "bus"
    STREAMS = "streams"
    CONSUMERS = "consumers"
    DEAD_LETTERS = "dead letters"
    LEADERS = "leaders"
    HEALTH = "health"
    PLUGINS = "plugins"
    VERSIONS = "versions"
    CERTIFICATES = "certificates"
    RECEIVERS = "receivers"
    CONFIGURATION = "configuration"


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of a check; `next_step` is a command, a runbook's URL, both, or empty."""

    check: Check
    level: Level
    text: str
    next_step: str = ""


@dataclass(frozen=True, slots=True)
class NotSeen:
    """Why an observation was not made; if `is_refused`, the exit code is 2 unless a check fails."""

    why: str
    is_refused: bool = True


@dataclass(frozen=True, slots=True)
class Broken:
    """Why a checked component does not answer."""

    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Bus:
    """A connection to NATS: its rights, its server, and the round-trip time."""

    rights: str
    server: str
    round_trip_s: float


@dataclass(frozen=True, slots=True)
class Leader:
    """The leading process, and when it became the leader, if known."""

    name: str
    since: datetime | None = None


@dataclass(frozen=True, slots=True)
class Receivers:
    """The notifier's receivers with their kinds, and the receivers that it skips.

    `dead` lists the receivers for which there are dead letters.
    """

    kinds: Mapping[str, str]
    left_out: Sequence[str] = ()
    dead: Sequence[str] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Observations:
    """All observations; `None` stands for an object that does not exist."""

    pods: Sequence[installation.Pod] | NotSeen
    bus: Bus | Broken | NotSeen
    stores: Mapping[str, streams.Usage | None] | NotSeen
    consumers: Sequence[streams.Durable] | NotSeen
    leaders: Mapping[str, Leader | None] | NotSeen
    health: health_state.State | Broken | NotSeen
    versions: Mapping[str, str] | NotSeen
    certificates: Mapping[str, datetime] | NotSeen
    receivers: Receivers | NotSeen | None
    refused: Mapping[str, str] | NotSeen

    def parts(self) -> Iterable[object]:
        """Return an iterator over all observations."""
        return (getattr(self, each.name) for each in dataclasses.fields(self))


@dataclass(frozen=True, slots=True, kw_only=True)
class Commands:
    """The prefixes of the commands that findings suggest."""

    muster: str = "muster"
    kubectl: str = ""
    """Empty if no cluster is named."""

    def in_cluster(self, words: str) -> str:
        """Return a kubectl command; empty if no cluster is named."""
        return f"{self.kubectl} {words}" if self.kubectl else ""
