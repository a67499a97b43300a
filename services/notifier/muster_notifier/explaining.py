"""Pure: What an alert would meet, in words: routes, groups, and what keeps it quiet."""

from collections.abc import Mapping
from datetime import datetime

from muster import matchers, silences
from muster_notifier import config, labels, muting, tree


def explain(
    settings: config.Settings,
    given: Mapping[str, str],
    muted_by: muting.Muting,
    *,
    at: datetime,
) -> list[str]:
    """Return the lines."""
    lines = [f"alert      {labels.written(given)}"]
    for name in sorted(given):
        why = silences.doubt(matchers.Matcher(name, matchers.Operator.EQUAL, given[name]))
        lines += [f"note       {why}"] if why else []
    muted = muted_by.mutes(given, at)
    for route in tree.root(settings).find(given):
        lines.append(f"route      {route.key}")
        lines.append(f"  group    {labels.written(labels.chosen(given, route.group_by))}")
        timing = route.timing
        lines.append(
            f"  times    first after {timing.group_wait_s:g} s, changes every "
            f"{timing.group_interval_s:g} s, reminders every {timing.repeat_interval_s:g} s"
        )
        lines.append(f"  told     {', '.join(route.receivers) or 'nobody'}")
        by_time = muted_by.mutes_route(route, at)
        if by_time is not None:
            lines.append(f"  quiet    {by_time.cause}: {by_time.by}")
    if settings.owners.receivers:
        group = labels.written(labels.chosen(given, settings.owners.group_by))
        who = ", ".join(settings.owners.receivers)
        lines.append(f"owners     of its pods may name {who}; group {group}")
    lines.append(f"quiet      {muted.cause}: {muted.by}" if muted else "quiet      no: it is told")
    return lines
