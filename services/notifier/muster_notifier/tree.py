"""Pure: Settings become the route tree, the rules of inhibition and the times that mute."""

from typing import Final

from muster import matchers as matching
from muster_notifier import config, inhibition, muting, routes

_OWNER: Final = "owner"


def root(settings: config.Settings) -> routes.Route:
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


def owners(settings: config.Settings) -> routes.Route | None:
    """Return the route to the owners of workloads, or None if nobody may be named."""
    if not settings.owners.receivers:
        return None
    return routes.Route(
        key=_OWNER,
        receivers=settings.owners.receivers,
        group_by=settings.owners.group_by,
        timing=root(settings).timing,
        why=f"the annotation {settings.owners.annotation} of these pods, or of their namespace",
    )


def apart(settings: config.Settings) -> frozenset[str]:
    """Return the receivers that take each alert by itself, and put together by themselves.

    An Alertmanager groups, and an Event is about one object: of a message about thousands they
    would only get the first.
    """
    return frozenset(
        one.name
        for one in settings.receivers
        if one.alertmanager is not None or one.kubernetes is not None
    )


def acknowledging(settings: config.Settings) -> frozenset[str]:
    """Return the receivers that can be told that somebody knows."""
    return frozenset(one.name for one in settings.receivers if one.pagerduty is not None)


def muted_by(settings: config.Settings) -> muting.Muting:
    """Return what mutes, as it is before any silence."""
    rules = [
        inhibition.Rule(
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


def _with_children(parent: routes.Route, given: tuple[config.Route, ...]) -> routes.Route:
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


def _child(parent: routes.Route, given: config.Route) -> routes.Route:
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
