"""Pure: the rows of `muster top`: nodes, alerts, events, resources and processes."""

from datetime import datetime
from typing import Final, NamedTuple, assert_never

import msgspec

from muster import codec, matching, vocabulary
from muster.cli import event_texts
from muster.cli import top_lists as lists
from muster.cli.top_lists import Column, Part, Tone
from muster.fleet import health_state, model, usage

_NARROW: Final = 100
_WIDE: Final = 150
_JSON_BYTES_MAX: Final = 4 * 1024
_DAY_S: Final = 86_400
_UNITS: Final = ((100, 1, "s"), (100 * 60, 60, "m"), (2 * _DAY_S, 3600, "h"))
_LEVELS: Final = {level: rank for rank, level in enumerate(model.Level)}
_SEVERITIES: Final = {severity.value: rank for rank, severity in enumerate(vocabulary.Severity)}


class Alert(NamedTuple):
    """A firing alert, and the silence that suppresses its notifications, if any."""

    alert: health_state.Alert
    silence: matching.Silence | None


class Entry(msgspec.Struct, frozen=True, gc=False):
    """One event of the tail, reduced to text because an event can have 512 KiB.

    `number` is its place in the tail.
    """

    number: int
    time: datetime
    node: str
    text: str
    tone: Tone
    json: bytes
    is_cut: bool


class Process(NamedTuple):
    """A process of `muster up`."""

    name: str
    pid: int | None
    address: str
    restarts: int
    problem: str = ""
    log: str = ""


def node_columns(context: lists.Context) -> tuple[Column, ...]:
    """Return the columns of the list of nodes."""
    name = max(4, min(context.widest, context.width // 4))
    places = _WIDE if context.has_places else context.width + 1
    return (
        Column("NODE", name),
        Column("STATE", 8),
        Column("VERDICT", max(12, min(context.label_width, context.width // 4))),
        Column("SINCE", 5, is_right=True),
        Column("ALERTS", 8, is_right=True),
        Column("DEVICES", 18, weight=1),
        Column("POOL", 12, shown_from=places),
        Column("ZONE", 12, shown_from=places),
        Column("PROBLEM", 12, weight=8, shown_from=_NARROW),
    )


def node_cells(node: model.NodeSummary, context: lists.Context) -> tuple[Part, ...]:
    """Return a node as a row."""
    tone = _tone(node.level)
    loud = node.alerts - node.silenced
    alerts = str(loud) if loud else "silenced" if node.silenced else "-"
    return (
        Part(node.name, Tone.STRONG if tone is Tone.BAD else Tone.PLAIN),
        Part(node.level.upper(), tone),
        Part(node.label or "-", tone),
        Part(age(node.since, context.now)),
        Part(alerts, Tone.DIM if not loud else tone),
        _devices(node, context),
        Part(node.pool or "-"),
        Part(node.zone or "-"),
        Part(node.reason, Tone.DIM if node.level is model.Level.OK else Tone.PLAIN),
    )


def alert_columns(context: lists.Context) -> tuple[Column, ...]:
    """Return the columns of the list of alerts."""
    return (
        Column("FOR", 5, is_right=True),
        Column("SEVERITY", 8),
        Column("NODE", max(4, min(context.widest, context.width // 5))),
        Column("KIND", 20, shown_from=_NARROW),
        Column("SUMMARY", 12, weight=1),
    )


def alert_cells(item: Alert, context: lists.Context) -> tuple[Part, ...]:
    """Return an alert as a row; the summary of a silenced alert names the end of the silence."""
    alert, silence = item
    tone = severity_tone(alert.severity)
    summary = alert.summary
    if silence is not None:
        tone = Tone.DIM
        until = f"{silence.ends_at.astimezone():%H:%M}"
        by = f" by {silence.author}" if context.width >= _NARROW else ""
        summary = f"[silenced until {until}{by}] {summary}"
    flapping = "[flapping] " if alert.flapping else ""
    recovering = f"[{alert.recovery.text(context.now)}] " if alert.recovery else ""
    return (
        Part(age(alert.starts_at, context.now), tone),
        Part(alert.severity, tone),
        Part(alert.node or "-", tone),
        Part(alert.kind, tone),
        Part(f"{flapping}{recovering}{summary}", Tone.PLAIN if silence is None else tone),
    )


def alert_block(item: Alert, context: lists.Context) -> list[lists.Line]:
    """Return an alert as one line, or two if its summary is long."""
    columns, cells = alert_columns(context), alert_cells(item, context)
    text, tone = cells[-1]
    width = lists.laid_out(columns, context.width)[-1]
    first, *more = lists.wrapped(text, max(width, 2), most=2)
    texts = [(*cells[:-1], Part(first, tone))]
    texts += [(*[Part("")] * (len(cells) - 1), Part(rest.strip(), tone)) for rest in more]
    return [lists.row_line(columns, each, context.width) for each in texts]


def event_columns(context: lists.Context) -> tuple[Column, ...]:
    """Return the columns of the tail of events."""
    return (
        Column("TIME", 8),
        Column("NODE", max(4, min(context.widest, context.width // 5))),
        Column("EVENT", 12, weight=1),
    )


def event_cells(entry: Entry, _: lists.Context) -> tuple[Part, ...]:
    """Return an event as a row."""
    return (
        Part(f"{entry.time.astimezone():%H:%M:%S}", Tone.DIM),
        Part(entry.node),
        Part(entry.text, entry.tone),
    )


def resource_columns(context: lists.Context) -> tuple[Column, ...]:
    """Return the columns of the list of resources."""
    return (
        Column("RESOURCE", max(20, context.width // 3)),
        Column("USABLE", 8, is_right=True),
        Column("UNCONFIRMED", 11, is_right=True, shown_from=_NARROW),
        Column("TOTAL", 8, is_right=True),
        Column("NODES", 8, is_right=True),
        Column("NODES WITH FEWER", 16, is_right=True),
    )


def resource_cells(resource: usage.Usage, _: lists.Context) -> tuple[Part, ...]:
    """Return a resource as a row."""
    fewer = resource.nodes_with_fewer
    tone = Tone.WARNING if fewer else Tone.GOOD
    return (
        Part(resource.resource),
        Part(str(resource.usable - resource.unconfirmed), tone),
        Part(str(resource.unconfirmed or "-"), tone if resource.unconfirmed else Tone.DIM),
        Part(str(resource.total)),
        Part(str(resource.nodes)),
        Part(str(fewer or "-"), tone if fewer else Tone.DIM),
    )


def process_columns(_: lists.Context) -> tuple[Column, ...]:
    """Return the columns of the list of processes."""
    return (
        Column("PROCESS", 18),
        Column("PID", 8, is_right=True),
        Column("RESTARTS", 8, is_right=True),
        Column("ADDRESS", 22),
        Column("PROBLEM", 12, weight=1),
    )


def process_cells(process: Process, _: lists.Context) -> tuple[Part, ...]:
    """Return a process as a row."""
    pid = Part("stopped", Tone.BAD) if process.pid is None else Part(str(process.pid))
    restarts = Part(str(process.restarts or "-"), Tone.WARNING if process.restarts else Tone.DIM)
    problem = Part(process.problem, Tone.WARNING)
    return (Part(process.name), pid, restarts, Part(process.address), problem)


def entry(event: codec.CloudEvent) -> Entry:
    """Return an event for the tail."""
    encoded = codec.dump(event)
    return Entry(
        number=0,
        time=event.time,
        node=event.node,
        text=event_texts.change_text(event),
        tone=_event_tone(event.data),
        json=encoded[:_JSON_BYTES_MAX],
        is_cut=len(encoded) > _JSON_BYTES_MAX,
    )


def note(text: str, at: datetime) -> Entry:
    """Return an entry for the tail with a line of output of `muster up`."""
    return Entry(number=0, time=at, node="", text=text, tone=Tone.WARNING, json=b"", is_cut=False)


def is_shown(event: vocabulary.Event) -> bool:
    """Return whether the tail shows an event; types that repeat without a change are hidden."""
    return not isinstance(event, (*event_texts.PERIODIC, vocabulary.ReceiversConfigured))


def age(time: datetime | None, now: datetime) -> str:
    """Return the age of a time in at most 5 characters: `0s` for a future time, `-` for None."""
    if time is None:
        return "-"
    seconds = max(0, int((now - time).total_seconds()))
    for below_s, size_s, unit in _UNITS:
        if seconds < below_s:
            return f"{seconds // size_s}{unit}"
    return f"{min(seconds // _DAY_S, 9999)}d"


def _devices(node: model.NodeSummary, context: lists.Context) -> Part:
    """Return a node's device counts by resource; names lose their domain if they remain unique.

    Counts are marked `listed` while a plugin that serves the resource does not work.
    """
    tone = Tone.PLAIN
    short = {name: name.rpartition("/")[2] for name in node.resources}
    is_clear = len(set(short.values())) == len(short)
    texts = []
    for name, (usable, total, is_confirmed) in sorted(node.resources.items()):
        in_use = context.in_use.get((node.name, name), 0)
        used = f" ({in_use} used)" if in_use else ""
        shown = short[name] if is_clear else name
        listed = " listed" if usable and not is_confirmed else ""
        texts.append(f"{shown} {usable}/{total}{listed}{used}")
        tone = tone if is_confirmed and usable == total else Tone.WARNING
    return Part(", ".join(texts) or "-", tone)


def _rank(level: model.Level) -> int:
    """Return the position of a level, the most urgent first."""
    # most nodes are well, and hashing an Enum takes longer than all the rest of a sort's key
    return len(_LEVELS) if level is model.Level.OK else _LEVELS[level]


def _tone(level: model.Level) -> Tone:
    match level:
        case model.Level.CRITICAL:
            return Tone.BAD
        case model.Level.WARNING:
            return Tone.WARNING
        case model.Level.UNKNOWN | model.Level.NOTICE:
            return Tone.STRONG
        case model.Level.OK:
            return Tone.GOOD
        case _:
            assert_never(level)


def severity_tone(severity: str) -> Tone:
    """Return the tone of an alert of this severity."""
    if severity == vocabulary.Severity.CRITICAL:
        return Tone.BAD
    return Tone.WARNING if severity == vocabulary.Severity.WARNING else Tone.PLAIN


def _event_tone(event: vocabulary.Event) -> Tone:
    match event:
        case vocabulary.AlertChanged(state=vocabulary.AlertState.RESOLVED):
            return Tone.GOOD
        case vocabulary.AlertChanged(severity=severity):
            return severity_tone(severity)
        case vocabulary.VerdictChanged(verdict=vocabulary.Verdict.HEALTHY):
            return Tone.GOOD
        case vocabulary.VerdictChanged(verdict=vocabulary.Verdict.MAINTENANCE):
            return Tone.PLAIN
        case vocabulary.VerdictChanged() | vocabulary.NotificationFailed():
            return Tone.BAD
        case _:
            return Tone.PLAIN


def _seconds(time: datetime | None) -> float:
    return time.timestamp() if time else 0.0


NODES: Final[lists.Kind[model.NodeSummary]] = lists.Kind(
    key=lambda node: node.name,
    node=lambda node: node.name,
    words=lambda node: (
        f"{node.name} {node.level} {node.label} {node.plugin} {node.pool} {node.zone} "
        f"{' '.join(node.resources)}"
    ),
    sorts=(
        ("urgency", lambda node: (_rank(node.level), node.alerts == node.silenced, node.name)),
        ("name", lambda node: (node.name,)),
        ("newest", lambda node: (-_seconds(node.since), node.name)),
        ("alerts", lambda node: (node.silenced - node.alerts, -node.alerts, node.name)),
        ("pool", lambda node: (node.pool, node.zone, _rank(node.level), node.name)),
    ),
    columns=node_columns,
    cells=node_cells,
    empty="no node is known yet",
)
ALERTS: Final[lists.Kind[Alert]] = lists.Kind(
    key=lambda item: f"{item.alert.fingerprint} {item.alert.node} {item.alert.kind}",
    node=lambda item: item.alert.node,
    words=lambda item: " ".join(
        (
            *(item.alert.node, item.alert.severity, item.alert.kind, item.alert.summary),
            *(item.alert.resource, item.alert.plugin, "silenced" if item.silence else ""),
        )
    ),
    sorts=(
        ("urgency", lambda item: (item.silence is not None, *item.alert.urgency)),
        ("newest", lambda item: (-_seconds(item.alert.starts_at), *item.alert.urgency)),
        ("node", lambda item: (item.alert.node, *item.alert.urgency)),
        ("kind", lambda item: (item.alert.kind, *item.alert.urgency)),
    ),
    columns=alert_columns,
    cells=alert_cells,
    empty="no alert is firing",
)
EVENTS: Final[lists.Kind[Entry]] = lists.Kind(
    key=lambda entry: f"{entry.number:09}",
    node=lambda entry: entry.node,
    words=lambda entry: f"{entry.node} {entry.text}",
    sorts=(
        ("time", lambda entry: (entry.number,)),
        ("node", lambda entry: (entry.node, entry.number)),
    ),
    follows=True,
    columns=event_columns,
    cells=event_cells,
    empty="no event in an hour",
)
RESOURCES: Final[lists.Kind[usage.Usage]] = lists.Kind(
    key=lambda resource: resource.resource,
    node=lambda _: "",
    words=lambda resource: resource.resource,
    sorts=(
        (
            "missing",
            lambda resource: (
                resource.usable - resource.unconfirmed - resource.total,
                resource.resource,
            ),
        ),
        ("name", lambda resource: (resource.resource,)),
    ),
    columns=resource_columns,
    cells=resource_cells,
    empty="no resource is known yet",
)
PROCESSES: Final[lists.Kind[Process]] = lists.Kind(
    key=lambda process: process.name,
    node=lambda _: "",
    words=lambda process: f"{process.name} {process.address}",
    sorts=(
        ("name", lambda process: (process.name,)),
        ("restarts", lambda process: (-process.restarts, process.name)),
    ),
    columns=process_columns,
    cells=process_cells,
    empty="no process",
)
