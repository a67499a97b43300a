"""Pure: the notifier's settings, and the route tree, inhibition rules and mute times they make."""

from collections import Counter
from collections.abc import Iterator
from typing import Annotated, Final

import msgspec

from muster import matchers as matching
from muster.service import sections
from muster_notifier.config import receiver_settings
from muster_notifier.routing import intervals, muting, routes

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
        routes.refuse_useless_matchers(self.matchers)
        routes.refuse_unknown_labels(self.group_by or ())


class InhibitRule(msgspec.Struct, frozen=True, kw_only=True):
    """While a source fires, targets with equal labels are quiet."""

    name: str = ""
    source_matchers: Annotated[tuple[str, ...], msgspec.Meta(min_length=1)]
    target_matchers: Annotated[tuple[str, ...], msgspec.Meta(min_length=1)]
    equal: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Refuse matchers and labels that are none: unknown ones would be equal everywhere."""
        routes.refuse_useless_matchers((*self.source_matchers, *self.target_matchers))
        routes.refuse_unknown_labels(self.equal, where="equal")


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
        routes.refuse_unknown_labels(self.group_by)


class Watchdog(msgspec.Struct, frozen=True, kw_only=True):
    """Who watches the watchers: health must tick, and we can ping somebody outside."""

    enabled: bool = True
    patience_s: sections.Period = 60.0
    """How long health may take to be there at first."""
    ping: receiver_settings.Address | None = None
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
    kubernetes: receiver_settings.Kubernetes = receiver_settings.Kubernetes()
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
    receivers: tuple[receiver_settings.Receiver, ...] = (
        receiver_settings.Receiver(name="console", console=receiver_settings.Console()),
    )
    owners: Owners = Owners()
    acting: Acting = Acting()
    watchdog: Watchdog = Watchdog()
    templates: receiver_settings.Templates = receiver_settings.Templates()
    runbook_url: Annotated[str, msgspec.Meta(min_length=1, max_length=512)] = "docs/runbooks/"
    """What stands before `<kind>.md` in the alerts that the notifier raises itself."""

    def __post_init__(self) -> None:
        """Refuse names given twice, names of nothing, and a notifier that would tell nobody."""
        if not 1 <= len(self.receivers) <= RECEIVERS_MAX:
            raise ValueError(
                f"receivers: {len(self.receivers)} are given, 1 to {RECEIVERS_MAX} are expected"
            )
        routes.refuse_unknown_labels(self.group_by)
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


_OWNER: Final = "owner"


def route_tree(settings: Settings) -> routes.Route:
    """Return the route tree; a route has everything it inherits."""
    for_owners = set(settings.owners.receivers)
    everybody = tuple(r.name for r in settings.receivers if r.name not in for_owners)
    top = routes.Route(
        key="{}",
        receivers=everybody if settings.default_receivers is None else settings.default_receivers,
        group_by=settings.group_by,
        timing=routes.Timing(
            group_wait_s=settings.group_wait_s,
            group_interval_s=settings.group_interval_s,
            repeat_interval_s=settings.repeat_interval_s,
            resolve_wait_s=settings.resolve_wait_s,
        ),
        mute_times=settings.mute_times,
        active_times=settings.active_times,
    )
    return _with_children(top, settings.routes)


def owners_route(settings: Settings) -> routes.Route | None:
    """Return the route to the owners of workloads, or None if nobody may be named."""
    if not settings.owners.receivers:
        return None
    return routes.Route(
        key=_OWNER,
        receivers=settings.owners.receivers,
        group_by=settings.owners.group_by,
        timing=route_tree(settings).timing,
        why=f"the annotation {settings.owners.annotation} of these pods, or of their namespace",
    )


def ungrouped_receivers(settings: Settings) -> frozenset[str]:
    """Return the receivers that take each alert by itself, and put together by themselves.

    An Alertmanager groups, and an Event is about one object: of a message about thousands they
    would only get the first.
    """
    return frozenset(
        one.name
        for one in settings.receivers
        if one.alertmanager is not None or one.kubernetes is not None
    )


def acknowledging_receivers(settings: Settings) -> frozenset[str]:
    """Return the receivers that can be told that somebody knows."""
    return frozenset(one.name for one in settings.receivers if one.pagerduty is not None)


def initial_muting(settings: Settings) -> muting.Muting:
    """Return what mutes, as it is before any silence."""
    rules = [
        muting.Rule(
            name=rule.name or f"inhibit_rules[{index}]",
            source=matching.parse_all(rule.source_matchers),
            target=matching.parse_all(rule.target_matchers),
            equal=rule.equal,
        )
        for index, rule in enumerate(settings.inhibit_rules)
    ]
    times = {
        named.name: [one.interval() for one in named.time_intervals]
        for named in settings.time_intervals
    }
    return muting.Muting(rules, times)


def _with_children(parent: routes.Route, given: tuple[Route, ...]) -> routes.Route:
    children = tuple(_child(parent, one) for one in given)
    return routes.Route(
        key=parent.key,
        receivers=parent.receivers,
        group_by=parent.group_by,
        timing=parent.timing,
        matchers=parent.matchers,
        goes_on=parent.goes_on,
        mute_times=parent.mute_times,
        active_times=parent.active_times,
        children=children,
    )


def _child(parent: routes.Route, given: Route) -> routes.Route:
    """Return a route; the times that mute are not inherited, as in Alertmanager."""
    matchers = matching.parse_all(given.matchers)
    above = parent.timing
    timing = routes.Timing(
        group_wait_s=_or(given.group_wait_s, above.group_wait_s),
        group_interval_s=_or(given.group_interval_s, above.group_interval_s),
        repeat_interval_s=_or(given.repeat_interval_s, above.repeat_interval_s),
        resolve_wait_s=(
            above.resolve_wait_s if given.resolve_wait_s is None else given.resolve_wait_s
        ),
    )
    own = routes.Route(
        key=routes.key_of(parent.key, matchers),
        receivers=parent.receivers if given.receivers is None else given.receivers,
        group_by=parent.group_by if given.group_by is None else given.group_by,
        timing=timing,
        matchers=matchers,
        goes_on=given.continue_,
        mute_times=given.mute_times or (),
        active_times=given.active_times or (),
    )
    return _with_children(own, given.routes)


def _or(given: float | None, inherited: float) -> float:
    return inherited if given is None else given
