"""Pure: the notifier's settings, with the routes, inhibition rules and mute times in them."""

import dataclasses
import re
from collections import Counter
from collections.abc import Iterator
from typing import Annotated, Final, TypeVar

import msgspec

import muster
from muster import matching
from muster.service import sections
from muster_notifier.config import receiver_settings
from muster_notifier.routing import muting, routes

RECEIVERS_MAX: Final = 64

_DAY_S: Final = 86_400.0

Wait = Annotated[float, msgspec.Meta(ge=0, le=_DAY_S)]
Interval = Annotated[float, msgspec.Meta(ge=0.05, le=_DAY_S)]
RepeatInterval = Annotated[float, msgspec.Meta(ge=0.05, le=30 * _DAY_S)]
ReceiverName = Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9][-A-Za-z0-9_]{0,62}$")]
_OWNER: Final = "owner"
_PORT_MAX: Final = 65_535
_CONSOLE_URL: Final = re.compile(
    # scheme, name or address, port, path; nothing that would end a link in a text
    r"https?://(?:[A-Za-z0-9][-A-Za-z0-9.]*|\[[0-9A-Fa-f:.]+\])(?::([0-9]{1,5}))?"
    r"(?:/[-A-Za-z0-9._~%!$&()*+,;=:/]*)?"
)
Value = TypeVar("Value")


class Route(msgspec.Struct, frozen=True, kw_only=True):
    """One route below the root; it inherits receivers, grouping and timing that it does not set.

    `matchers` have Alertmanager's format: `severity="critical"`. With `continue`, the next siblings
    are tried as well.
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
        """Refuse invalid matchers and unknown labels."""
        routes.refuse_useless_matchers(self.matchers)
        routes.refuse_unknown_labels(self.group_by or ())


class InhibitRule(msgspec.Struct, frozen=True, kw_only=True):
    """While a source alert fires, target alerts with the same values of `equal` are muted."""

    name: str = ""
    source_matchers: Annotated[tuple[str, ...], msgspec.Meta(min_length=1)]
    target_matchers: Annotated[tuple[str, ...], msgspec.Meta(min_length=1)]
    equal: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Refuse invalid matchers, and labels that no alert has, which would count as equal."""
        routes.refuse_useless_matchers((*self.source_matchers, *self.target_matchers))
        routes.refuse_unknown_labels(self.equal, where="equal")


class TimeRange(msgspec.Struct, frozen=True, kw_only=True):
    """From one time of day to another, such as `09:00` to `17:00`.

    YAML 1.1 reads 18:00 without quotes as a number of minutes; that number is accepted as well.
    """

    start_time: str | int
    end_time: str | int


class Times(msgspec.Struct, frozen=True, kw_only=True):
    """A time interval in Alertmanager's format; a moment must match every part that is set."""

    times: tuple[TimeRange, ...] = ()
    weekdays: tuple[str, ...] = ()
    days_of_month: tuple[str, ...] = ()
    months: tuple[str, ...] = ()
    years: tuple[str, ...] = ()
    location: str = "UTC"

    def __post_init__(self) -> None:
        """Refuse an invalid interval."""
        self.interval()

    def interval(self) -> muting.Interval:
        """Return the parsed interval. Raises ValueError."""
        return muting.interval(
            times=[(_clock(part.start_time), _clock(part.end_time)) for part in self.times],
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
    """Notifies owners of workloads about alerts that affect their pods.

    The annotation, on the pod or on its namespace, names one or more of `receivers`, separated by
    commas. People other than muster's operators can write annotations. So an annotation only
    selects a receiver, and cannot contain an address.
    """

    receivers: tuple[ReceiverName, ...] = ()
    annotation: str = "muster.dev/notify"
    group_by: tuple[str, ...] = ("node", "kind")

    def __post_init__(self) -> None:
        """Refuse unknown labels."""
        routes.refuse_unknown_labels(self.group_by)


class Watchdog(msgspec.Struct, frozen=True, kw_only=True):
    """Raises alerts when health's ticks stop or NATS fails; may also ping an external monitor."""

    enabled: bool = True
    patience_s: sections.Period = 60.0
    """An alert fires after this many seconds without a first tick of health, or without NATS."""
    ping: receiver_settings.Address | None = None
    ping_interval_s: sections.Period = 60.0


class Acting(msgspec.Struct, frozen=True, kw_only=True):
    """Leader election among notifiers: how soon another notifier replaces a lost leader."""

    ttl_s: Annotated[int, msgspec.Meta(ge=1, le=60)] = 10
    renew_s: sections.Period = 2.5

    def __post_init__(self) -> None:
        """Refuse a lock that would expire if one renewal failed."""
        if 2 * self.renew_s > self.ttl_s:
            raise ValueError("ttl_s: must be at least twice renew_s")


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """The settings of the notifier.

    The keys from `group_by` to `routes` form the root of the route tree.

    By default alerts are grouped by node and kind: one message for each problem that needs one
    repair (such as eight failed GPUs of a node), while another kind of alert on the same node is
    sent after `group_wait_s`, not after `group_interval_s`. To get one message about a problem on
    many nodes, group by kind alone.
    """

    bus: sections.Bus = sections.Bus()
    http: sections.Http = sections.Http()
    log: sections.Log = sections.Log()
    kubernetes: receiver_settings.Kubernetes = receiver_settings.Kubernetes()
    group_by: tuple[str, ...] = ("node", "kind")
    group_wait_s: Wait = 30.0
    group_interval_s: Interval = 300.0
    repeat_interval_s: RepeatInterval = 14_400.0
    resolve_wait_s: Wait | None = 10.0
    """How long to wait after all alerts of a group are resolved; null: until the next flush."""
    default_receivers: tuple[ReceiverName, ...] | None = None
    """Receivers for alerts that match no route; by default, all that are not in `owners`."""
    mute_times: tuple[str, ...] = ()
    active_times: tuple[str, ...] = ()
    routes: tuple[Route, ...] = ()
    inhibit_rules: tuple[InhibitRule, ...] = ()
    time_intervals: tuple[TimeInterval, ...] = ()
    receivers: tuple[receiver_settings.Receiver, ...] = (
        receiver_settings.Receiver(name="console", console=receiver_settings.Console()),
    )
    receivers_directory: Annotated[str, msgspec.Meta(min_length=1, max_length=4096)] | None = None
    """A directory with more receivers, each in a `NAME.yaml`; it is read again when it changes."""
    owners: Owners = Owners()
    acting: Acting = Acting()
    watchdog: Watchdog = Watchdog()
    templates: receiver_settings.Templates = receiver_settings.Templates()
    runbook_url: Annotated[str, msgspec.Meta(min_length=1, max_length=512)] = muster.RUNBOOKS_URL
    """The prefix of runbook links in the notifier's own alerts, before `<kind>.html`."""
    console_url: Annotated[str, msgspec.Meta(max_length=256)] = ""
    """The address at which people open muster's console; if set, notifications link to it."""

    def __post_init__(self) -> None:
        """Refuse duplicate or unknown names, a bad number of receivers, or a bad console URL."""
        _refuse_unusable_console(self.console_url)
        if not 1 <= len(self.receivers) <= RECEIVERS_MAX:
            count = len(self.receivers)
            raise ValueError(f"receivers: expected 1 to {RECEIVERS_MAX}, not {count}")
        routes.refuse_unknown_labels(self.group_by)
        names = [receiver.name for receiver in self.receivers]
        times = [interval.name for interval in self.time_intervals]
        _refuse_duplicates("group_by", self.group_by)
        _refuse_duplicates("receivers", names)
        _refuse_duplicates("time_intervals", times)
        receivers = (*(self.default_receivers or ()), *self.owners.receivers)
        _refuse_unknown("receiver", receivers, names)
        _refuse_unknown("time interval", (*self.mute_times, *self.active_times), times)
        for route in _walk(self.routes):
            _refuse_unknown("receiver", route.receivers or (), names)
            route_times = (*(route.mute_times or ()), *(route.active_times or ()))
            _refuse_unknown("time interval", route_times, times)


def _refuse_unusable_console(url: str) -> None:
    """Raise ValueError if a URL is not http(s), or has a user, query, fragment or bad port."""
    parts = _CONSOLE_URL.fullmatch(url)
    if url and (parts is None or not 1 <= int(parts[1] or 1) <= _PORT_MAX):
        raise ValueError(
            f"console_url: {url!r} is not an address such as https://muster.example.com/ "
            "(http or https, no user, no query, no fragment)"
        )


def _clock(value: str | int) -> str:
    return value if isinstance(value, str) else f"{value // 60:02}:{value % 60:02}"


def _walk(routes: tuple[Route, ...]) -> Iterator[Route]:
    for route in routes:
        yield route
        yield from _walk(route.routes)


def _refuse_duplicates(what: str, names: list[str] | tuple[str, ...]) -> None:
    twice = sorted(name for name, times in Counter(names).items() if times > 1)
    if twice:
        raise ValueError(f"{what}: used twice: {', '.join(twice)}")


def _refuse_unknown(what: str, used: tuple[str, ...], names: list[str]) -> None:
    unknown = sorted(set(used) - set(names))
    if unknown:
        raise ValueError(f"no {what} is called {', '.join(unknown)}")


def with_receivers(settings: Settings, more: tuple[receiver_settings.Receiver, ...]) -> Settings:
    """Return the settings with more receivers, which get the alerts that match no route."""
    default = settings.default_receivers
    if default is not None:
        default = (*default, *(receiver.name for receiver in more))
    return msgspec.structs.replace(
        settings, receivers=(*settings.receivers, *more), default_receivers=default
    )


def route_tree(settings: Settings) -> routes.Route:
    """Return the route tree, in which each route has its inherited settings."""
    for_owners = set(settings.owners.receivers)
    everybody = tuple(r.name for r in settings.receivers if r.name not in for_owners)
    top = routes.Route(
        key="{}",
        receivers=_or(settings.default_receivers, everybody),
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
    """Return the route to owners of workloads, or None if `owners.receivers` is empty."""
    if not settings.owners.receivers:
        return None
    return routes.Route(
        key=_OWNER,
        receivers=settings.owners.receivers,
        group_by=settings.owners.group_by,
        timing=route_tree(settings).timing,
        why=f"the annotation {settings.owners.annotation} on these pods, or on their namespace, "
        "names this receiver",
    )


def ungrouped_receivers(settings: Settings) -> frozenset[str]:
    """Return the names of the receivers that get every alert separately.

    An Alertmanager groups alerts itself, and an Event is about one object. These receivers would
    get only the first alerts of a group of thousands.
    """
    return frozenset(
        receiver.name
        for receiver in settings.receivers
        if receiver.alertmanager is not None or receiver.kubernetes is not None
    )


def acknowledging_receivers(settings: Settings) -> frozenset[str]:
    """Return the names of the receivers that are also notified when a whole group is silenced."""
    return frozenset(
        receiver.name for receiver in settings.receivers if receiver.pagerduty is not None
    )


def initial_muting(settings: Settings) -> muting.Muting:
    """Return the mutes that the settings define: inhibition rules and time intervals."""
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
        named.name: [part.interval() for part in named.time_intervals]
        for named in settings.time_intervals
    }
    return muting.Muting(rules, times)


def _with_children(parent: routes.Route, settings: tuple[Route, ...]) -> routes.Route:
    children = tuple(_child(parent, child) for child in settings)
    return dataclasses.replace(parent, children=children)


def _child(parent: routes.Route, settings: Route) -> routes.Route:
    """Return a child route; as in Alertmanager, mute and active times are not inherited."""
    matchers = matching.parse_all(settings.matchers)
    above = parent.timing
    timing = routes.Timing(
        group_wait_s=_or(settings.group_wait_s, above.group_wait_s),
        group_interval_s=_or(settings.group_interval_s, above.group_interval_s),
        repeat_interval_s=_or(settings.repeat_interval_s, above.repeat_interval_s),
        resolve_wait_s=_or(settings.resolve_wait_s, above.resolve_wait_s),
    )
    own = routes.Route(
        key=routes.key_of(parent.key, matchers),
        receivers=_or(settings.receivers, parent.receivers),
        group_by=_or(settings.group_by, parent.group_by),
        timing=timing,
        matchers=matchers,
        continues=settings.continue_,
        mute_times=settings.mute_times or (),
        active_times=settings.active_times or (),
    )
    return _with_children(own, settings.routes)


def _or(own: Value | None, inherited: Value) -> Value:
    return inherited if own is None else own
