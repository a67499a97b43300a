"""Pure: The notifier's settings: how alerts are routed, grouped and muted, and who is told."""

from collections import Counter
from collections.abc import Iterator
from typing import Annotated, Final

import msgspec

from muster.service import sections
from muster_notifier import addresses, intervals, labels

RECEIVERS_MAX: Final = 64

_DAY_S: Final = 86_400.0

Wait = Annotated[float, msgspec.Meta(ge=0, le=_DAY_S)]
Interval = Annotated[float, msgspec.Meta(ge=0.05, le=_DAY_S)]
RepeatInterval = Annotated[float, msgspec.Meta(ge=0.05, le=30 * _DAY_S)]
ReceiverName = Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9][-A-Za-z0-9_]{0,62}$")]


class Route(msgspec.Struct, frozen=True, kw_only=True):
    """One route below the root; what it does not say, its parent says.

    `matchers` are Alertmanager's: `severity="critical"`. With `continue` the next siblings are
    asked as well.
    """

    matchers: tuple[str, ...] = ()
    receivers: tuple[ReceiverName, ...] | None = None
    continue_: bool = msgspec.field(name="continue", default=False)
    group_by: tuple[str, ...] | None = None
    group_wait_s: Wait | None = None
    group_interval_s: Interval | None = None
    repeat_interval_s: RepeatInterval | None = None
    resolve_wait_s: Wait | None = None
    mute_times: tuple[str, ...] | None = None
    active_times: tuple[str, ...] | None = None
    routes: tuple["Route", ...] = ()

    def __post_init__(self) -> None:
        """Refuse matchers and labels that are none."""
        labels.refuse_doubtful(self.matchers)
        labels.refuse_unknown(self.group_by or ())


class InhibitRule(msgspec.Struct, frozen=True, kw_only=True):
    """While a source fires, targets with equal labels are quiet."""

    name: str = ""
    source_matchers: Annotated[tuple[str, ...], msgspec.Meta(min_length=1)]
    target_matchers: Annotated[tuple[str, ...], msgspec.Meta(min_length=1)]
    equal: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Refuse matchers and labels that are none: unknown ones would be equal everywhere."""
        labels.refuse_doubtful((*self.source_matchers, *self.target_matchers))
        labels.refuse_unknown(self.equal, where="equal")


class TimeRange(msgspec.Struct, frozen=True, kw_only=True):
    """From a time of day until another, `09:00` to `17:00`.

    YAML takes 18:00 without quotes for a number, of minutes: the same is meant.
    """

    start_time: str | int
    end_time: str | int


class Times(msgspec.Struct, frozen=True, kw_only=True):
    """One time interval, in Alertmanager's words; each part that is given must hold."""

    times: tuple[TimeRange, ...] = ()
    weekdays: tuple[str, ...] = ()
    days_of_month: tuple[str, ...] = ()
    months: tuple[str, ...] = ()
    years: tuple[str, ...] = ()
    location: str = "UTC"

    def __post_init__(self) -> None:
        """Refuse what is no time."""
        self.interval()

    def interval(self) -> intervals.Interval:
        """Return what it means."""
        return intervals.interval(
            times=[(_clock(one.start_time), _clock(one.end_time)) for one in self.times],
            weekdays=self.weekdays,
            days_of_month=self.days_of_month,
            months=self.months,
            years=self.years,
            location=self.location,
        )


class TimeInterval(msgspec.Struct, frozen=True, kw_only=True):
    """Time intervals under one name, for `mute_times` and `active_times`."""

    name: Annotated[str, msgspec.Meta(min_length=1, max_length=200)]
    time_intervals: tuple[Times, ...]


class Owners(msgspec.Struct, frozen=True, kw_only=True):
    """Who owns a workload hears of the devices that its pods hold.

    The annotation, of the pod or of its namespace, names one of `receivers` (several with commas
    between): an annotation can be written by others than whoever runs muster, so it can choose an
    addressee and never give an address.
    """

    receivers: tuple[ReceiverName, ...] = ()
    annotation: str = "muster.dev/notify"
    group_by: tuple[str, ...] = ("node", "kind")

    def __post_init__(self) -> None:
        """Refuse labels that are none."""
        labels.refuse_unknown(self.group_by)


class Watchdog(msgspec.Struct, frozen=True, kw_only=True):
    """Who watches the watchers: health must tick, and we can ping somebody outside."""

    enabled: bool = True
    patience_s: sections.Period = 60.0
    """How long health may take to be there at first."""
    ping: addresses.Address | None = None
    ping_interval_s: sections.Period = 60.0


class Acting(msgspec.Struct, frozen=True, kw_only=True):
    """Of several notifiers one acts; how soon the next takes over when it is gone."""

    ttl_s: Annotated[int, msgspec.Meta(ge=1, le=60)] = 10
    renew_s: sections.Period = 2.5

    def __post_init__(self) -> None:
        """Refuse what would be lost between two renewals."""
        if 2 * self.renew_s > self.ttl_s:
            raise ValueError("ttl_s: must be at least twice renew_s")


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """All of them. The keys from `group_by` to `routes` are the root of the route tree.

    Grouped by node and kind: what is repaired by one hand in one way is one message (eight GPUs
    of a node), and another kind of trouble on that node is told after `group_wait_s`, not after
    `group_interval_s`. A fleet that prefers one message for a storm groups by kind alone.
    """

    bus: sections.Bus = sections.Bus()
    http: sections.Http = sections.Http()
    log: sections.Log = sections.Log()
    kubernetes: addresses.Kubernetes = addresses.Kubernetes()
    group_by: tuple[str, ...] = ("node", "kind")
    group_wait_s: Wait = 30.0
    group_interval_s: Interval = 300.0
    repeat_interval_s: RepeatInterval = 14_400.0
    resolve_wait_s: Wait | None = None
    default_receivers: tuple[ReceiverName, ...] | None = None
    """Who hears what no route takes; without it everybody in `receivers`, the owners' left out."""
    mute_times: tuple[str, ...] = ()
    active_times: tuple[str, ...] = ()
    routes: tuple[Route, ...] = ()
    inhibit_rules: tuple[InhibitRule, ...] = ()
    time_intervals: tuple[TimeInterval, ...] = ()
    receivers: tuple[addresses.Receiver, ...] = (
        addresses.Receiver(name="console", console=addresses.Console()),
    )
    owners: Owners = Owners()
    acting: Acting = Acting()
    watchdog: Watchdog = Watchdog()
    templates: addresses.Templates = addresses.Templates()
    runbook_url: Annotated[str, msgspec.Meta(min_length=1, max_length=512)] = "docs/runbooks/"
    """What stands before `<kind>.md` in the alerts that the notifier raises itself."""

    def __post_init__(self) -> None:
        """Refuse names given twice, names of nothing, and a notifier that would tell nobody."""
        if not 1 <= len(self.receivers) <= RECEIVERS_MAX:
            raise ValueError(
                f"receivers: {len(self.receivers)} are given, 1 to {RECEIVERS_MAX} are expected"
            )
        labels.refuse_unknown(self.group_by)
        names = [receiver.name for receiver in self.receivers]
        times = [one.name for one in self.time_intervals]
        _refuse_twice("group_by", self.group_by)
        _refuse_twice("receivers", names)
        _refuse_twice("time_intervals", times)
        asked = (*(self.default_receivers or ()), *self.owners.receivers)
        _refuse_unknown("receiver", asked, names)
        _refuse_unknown("time interval", (*self.mute_times, *self.active_times), times)
        for route in _walk(self.routes):
            _refuse_unknown("receiver", route.receivers or (), names)
            given = (*(route.mute_times or ()), *(route.active_times or ()))
            _refuse_unknown("time interval", given, times)


def _clock(given: str | int) -> str:
    return given if isinstance(given, str) else f"{given // 60:02}:{given % 60:02}"


def _walk(given: tuple[Route, ...]) -> Iterator[Route]:
    for route in given:
        yield route
        yield from _walk(route.routes)


def _refuse_twice(what: str, names: list[str] | tuple[str, ...]) -> None:
    twice = sorted(name for name, times in Counter(names).items() if times > 1)
    if twice:
        raise ValueError(f"{what}: given twice: {', '.join(twice)}")


def _refuse_unknown(what: str, asked: tuple[str, ...], names: list[str]) -> None:
    unknown = sorted(set(asked) - set(names))
    if unknown:
        raise ValueError(f"no {what} is called {', '.join(unknown)}")
