"""Pure: the environment of the templates: how levels, times and counts are shown.

Every text is escaped twice: characters that mislead readers are replaced, then those that have a
meaning in HTML are escaped.
"""

import math
import shlex
from datetime import UTC, datetime, timedelta
from typing import Final

import jinja2
import markupsafe

from muster import escaping
from muster.fleet import health_state, model
from muster_console import alert_history, device_names, plots

IDENTITY_KINDS: Final = {
    "local": "local user",
    "header": "named by the proxy",
    "oidc": "OpenID Connect",
}
"""The text for each `identities.Kind`: how a person was identified."""
GLYPHS: Final = {
    model.Level.CRITICAL: "C",
    model.Level.WARNING: "W",
    model.Level.UNKNOWN: "?",
    model.Level.NOTICE: "N",
    model.Level.OK: "·",
}
LEVEL_TEXTS: Final = {
    model.Level.CRITICAL: "a critical alert fires",
    model.Level.WARNING: "a warning fires, or a plugin is not healthy",
    model.Level.UNKNOWN: "health has no verdict yet",
    model.Level.NOTICE: "planned, silenced, or a small problem",
    model.Level.OK: "nothing to do",
}
_MARK_ROWS: Final = {"fault": 0, "restart": 0, "other": 0, "alert": 1, "delivery": 2}
"""The row of a timeline in which a kind of mark is drawn, so that marks do not hide each other."""
_MARK_NAMES: Final = {
    "fault": "fault",
    "restart": "start or stop",
    "other": "event",
    "alert": "alert",
    "delivery": "notification",
}


def environment(loader: jinja2.BaseLoader) -> jinja2.Environment:
    """Return the environment of the templates."""
    made = jinja2.Environment(
        loader=loader,
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        finalize=_plain,
        trim_blocks=True,
        lstrip_blocks=True,
        auto_reload=False,
    )
    made.filters |= {
        "ago": _ago,
        "axis": _axis,
        "clock": _clock,
        "count_of": _count_of,
        "group_title": alert_history.title,
        "is_web": lambda text: text.startswith(("https://", "http://")),
        "iso": lambda at: at.isoformat(timespec="milliseconds"),
        "lasted": lambda ends_at, starts_at: duration(ends_at - starts_at),
        "ms": lambda at: math.ceil(at.timestamp() * 1e3),
        "part_of": plots.bar_width,
        "pods_left": pods_left,
        "seconds": lambda seconds: duration(timedelta(seconds=seconds)),
        "shell": shlex.quote,
        "short": device_names.shortened,
    }
    made.globals |= {"glyphs": GLYPHS, "level_texts": LEVEL_TEXTS, "mark_rows": _MARK_ROWS}
    made.globals["mark_names"] = _MARK_NAMES
    made.globals["identity_kinds"] = IDENTITY_KINDS
    return made


def duration(length: timedelta) -> str:
    """Return a duration in one unit, rounded down; 0 if it is negative, because clocks differ."""
    seconds = max(0, int(length.total_seconds()))
    for unit, size in (("d", 86_400), ("h", 3_600), ("min", 60)):
        if seconds >= size * (2 if unit == "d" else 1):
            return f"{seconds // size} {unit}"
    return f"{seconds} s"


def _plain(value: object) -> object:
    if isinstance(value, str) and not isinstance(value, markupsafe.Markup):
        return escaping.plain(value, keep="\n")
    return value


def _ago(at: datetime | None) -> str:
    return duration(datetime.now(UTC) - at) if at else ""


def _clock(at: datetime) -> str:
    return f"{at.astimezone(UTC):%H:%M:%S} UTC"


def _axis(at: datetime, shown: str) -> str:
    """Return a time as a label of an axis; axes of a day or more show the date, too."""
    return f"{at.astimezone(UTC):%d %b %H:%M}" if shown in {"1d", "7d"} else f"{at:%H:%M} UTC"


def pods_left(about: health_state.Alert | model.NodeSummary, shown: int) -> str:
    """Return how many pods there are besides the first `shown`, as text; empty if none."""
    left = max(about.pods_total, len(about.pods)) - shown
    return f" and {left:,} more" if left > 0 else ""


def _count_of(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'' if count == 1 else 's'}"
