"""Pure: the inputs of the grouping machine."""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime

from muster import codec
from muster_notifier.routing import muting, notifications


@dataclass(frozen=True, slots=True)
class Owned:
    """An alert whose pods belong to somebody: receivers that owners named, and their pods."""

    event: codec.CloudEvent
    owners: Mapping[str, tuple[str, ...]]


@dataclass(frozen=True, slots=True)
class ClockRead:
    """What the wall clock says."""

    at: datetime


@dataclass(frozen=True, slots=True)
class Delivered:
    """The receiver took it, and the ledger says so."""

    notification: notifications.Notification


@dataclass(frozen=True, slots=True)
class Postponed:
    """The receiver is away or busy; it will be tried again."""

    notification: notifications.Notification


@dataclass(frozen=True, slots=True)
class Failed:
    """The receiver refused it, or was away for too long; it is among the dead letters."""

    notification: notifications.Notification


Outcome = Delivered | Postponed | Failed
Input = codec.CloudEvent | Owned | muting.SilenceChanged | ClockRead | Outcome
