"""Pure. The notifier's settings: how alerts are grouped, when they are told, and to whom."""

import enum
from typing import Annotated, Final

import msgspec

from muster import sections

RECEIVERS_MAX: Final = 64

_DAY_S: Final = 86_400.0

Wait = Annotated[float, msgspec.Meta(ge=0, le=_DAY_S)]
Interval = Annotated[float, msgspec.Meta(ge=0.05, le=_DAY_S)]
RepeatInterval = Annotated[float, msgspec.Meta(ge=0.05, le=30 * _DAY_S)]


class GroupBy(enum.StrEnum):
    """What alerts can be grouped by: only what stays the same through an alert's whole life.

    Severity is none of these: an alert that changed its group would never be resolved in the old.
    """

    NODE = "node"
    PLUGIN = "plugin"
    KIND = "kind"
    RESOURCE = "resource"


class Webhook(msgspec.Struct, frozen=True, kw_only=True):
    """An HTTP receiver. An attempt may take `timeout_s`; temporary failures are retried."""

    url: Annotated[str, msgspec.Meta(pattern=r"^https?://[^\s/?#]+[^\s]*$", max_length=2048)]
    timeout_s: sections.Period = 5.0
    retry_for_s: sections.Period = 300.0
    """How long one notification is retried; then the next flush decides again, with what is true
    by then."""


class Console(msgspec.Struct, frozen=True, kw_only=True):
    """The notifier's own log."""


class Receiver(msgspec.Struct, frozen=True, kw_only=True):
    """One addressee: a name, and exactly one way to reach it."""

    name: Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9][-A-Za-z0-9_]{0,62}$")]
    webhook: Webhook | None = None
    console: Console | None = None
    send_resolved: bool = True

    def __post_init__(self) -> None:
        """Refuse a receiver that can be reached in no way, or in two."""
        if (self.webhook is None) == (self.console is None):
            raise ValueError(f"receiver {self.name}: give exactly one of: webhook, console: {{}}")


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """All of them.

    Grouped by node and kind: what is repaired by one hand in one way is one message (eight GPUs
    of a node), and another kind of trouble on that node is told after `group_wait_s`, not after
    `group_interval_s`. A fleet that prefers one message for a storm groups by kind alone.
    """

    bus: sections.Bus = sections.Bus()
    http: sections.Http = sections.Http()
    log: sections.Log = sections.Log()
    group_by: tuple[GroupBy, ...] = (GroupBy.NODE, GroupBy.KIND)
    group_wait_s: Wait = 30.0
    group_interval_s: Interval = 300.0
    repeat_interval_s: RepeatInterval = 14_400.0
    receivers: tuple[Receiver, ...] = (Receiver(name="console", console=Console()),)

    def __post_init__(self) -> None:
        """Refuse names given twice, and a notifier that would tell nobody."""
        if not 1 <= len(self.receivers) <= RECEIVERS_MAX:
            raise ValueError(
                f"receivers: {len(self.receivers)} are given, 1 to {RECEIVERS_MAX} are expected"
            )
        for what, given in (
            ("group_by", [str(label) for label in self.group_by]),
            ("receivers", [receiver.name for receiver in self.receivers]),
        ):
            twice = sorted({name for name in given if given.count(name) > 1})
            if twice:
                raise ValueError(f"{what}: given twice: {', '.join(twice)}")
