"""Pure: what `muster doctor` observes, and what it concludes from that."""

import dataclasses
import enum
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Final

from muster import vocabulary
from muster.cli import status
from muster.kubernetes import installation
from muster.nats import streams

LOCKS: Final = {"health": streams.LEADER, "notifier": streams.TENURE}
"""The services that have a leader, and the bucket of its lock."""
WELL: Final = frozenset({vocabulary.Verdict.HEALTHY, vocabulary.Verdict.MAINTENANCE})


class Level(enum.StrEnum):
    """What a finding means."""

    OK = "OK"
    WARN = "WARN"
    FAIL = "FAIL"
    NOT_LOOKED_AT = "NOT LOOKED AT"


class Check(enum.StrEnum):
    """What is checked, in the order in which it is shown."""

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
    """The result of a check; `next_step` is a command, a runbook, or both."""

    check: Check
    level: Level
    text: str
    next_step: str = ""


@dataclass(frozen=True, slots=True)
class NotSeen:
    """Why something was not observed; `is_refused` if it should have been."""

    why: str
    is_refused: bool = True


@dataclass(frozen=True, slots=True)
class Broken:
    """Why something that was looked at does not answer."""

    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Bus:
    """A connection to NATS: whose it is, its server, and how long a round trip takes."""

    rights: str
    server: str
    round_trip_s: float


@dataclass(frozen=True, slots=True)
class Leader:
    """The process that leads, and since when if it says so."""

    name: str
    since: datetime | None = None


@dataclass(frozen=True, slots=True)
class Receivers:
    """Whom the notifier notifies: the kind of each receiver, and whom it leaves out."""

    kinds: Mapping[str, str]
    left_out: Sequence[str] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Observations:
    """All that was observed; `None` for a stream or a leader that does not exist."""

    pods: Sequence[installation.Pod] | NotSeen
    bus: Bus | Broken | NotSeen
    stores: Mapping[str, streams.Usage | None] | NotSeen
    consumers: Sequence[streams.Durable] | NotSeen
    leaders: Mapping[str, Leader | None] | NotSeen
    health: status.State | Broken | NotSeen
    versions: Mapping[str, str] | NotSeen
    certificates: Mapping[str, datetime] | NotSeen
    receivers: Receivers | NotSeen | None
    refused: Mapping[str, str] | NotSeen

    def parts(self) -> Iterable[object]:
        """Return each of them."""
        return (getattr(self, each.name) for each in dataclasses.fields(self))


@dataclass(frozen=True, slots=True, kw_only=True)
class Commands:
    """How the reader's next commands begin."""

    muster: str = "muster"
    kubectl: str = ""
    """Empty without a cluster."""

    def in_cluster(self, words: str) -> str:
        """Return a command of kubectl; empty without a cluster."""
        return f"{self.kubectl} {words}" if self.kubectl else ""
