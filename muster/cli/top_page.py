"""Pure: the page of `muster top`: its views, what each key does, and the lines on the screen."""

import collections
import enum
import heapq
import itertools
from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime
from typing import Any, Final, TypeVar, assert_never

import msgspec

from muster import escaping
from muster.cli import top_bars as bars
from muster.cli import top_details as details
from muster.cli import top_lists as lists
from muster.cli import top_rows as rows
from muster.cli.top_lists import Line, Part, Tone
from muster.fleet import model, usage

T = TypeVar("T")

EVENTS_MAX: Final = 1_000
ALERTS_MAX: Final = 2_000
_DETAILS_MAX: Final = 8
_PANE_ALERTS: Final = 5
_PANE_LINES: Final = 7
_PANE_EVENTS: Final = 5
_PANE_MIN: Final = 2
_ALL: Final = 10**9
_WIDTH_MIN: Final = 20


class View(enum.StrEnum):
    """The lists, in the order of their keys."""

    FLEET = "fleet"
    ALERTS = "alerts"
    EVENTS = "events"
    RESOURCES = "resources"
    PROCESSES = "processes"


class Page:
    """What the terminal shows of a fleet; keys and new data change it."""

    def __init__(
        self, fleet: model.FleetModel, *, quits: str = "quit", about: Sequence[str] = ()
    ) -> None:
        self.view = View.FLEET
        self.has_processes = False
        self.is_typing = False
        """Whether keys are added to the filter."""
        self.nodes = lists.Listing(rows.NODES)
        self.alerts = lists.Listing(rows.ALERTS)
        self.events = lists.Listing(rows.EVENTS)
        self.resources = lists.Listing(rows.RESOURCES)
        self.processes = lists.Listing(rows.PROCESSES)
        self.in_use: dict[tuple[str, str], int] = {}
        """How many devices pods use, by node and resource; known only in `muster up`."""
        self._fleet = fleet
        self._quits = quits
        self._about = about
        self._details: list[details.Detail] = []
        self._revision = -1
        self._shown_alerts: object = None
        self._silenced = 0
        self._numbered = 0
        self._body_height = 1
        self._has_places = False
        self._label_width = 0
        self._levels: collections.Counter[model.Level] = collections.Counter()
        self._lists: dict[View, lists.Listing[Any]] = {
            View.FLEET: self.nodes,
            View.ALERTS: self.alerts,
            View.EVENTS: self.events,
            View.RESOURCES: self.resources,
            View.PROCESSES: self.processes,
        }

    # New data

    @property
    def why_node(self) -> str:
        """The node whose state is shown in full; empty if there is none."""
        detail = self._details[-1] if self._details else None
        return detail.node if detail is not None and detail.is_why else ""

    def receive_fleet(self, at: datetime) -> None:
        """Apply the changes of the model to the lists."""
        if self._revision != self._fleet.revision:
            changes = self._fleet.changed_since(self._revision)
            if changes.is_restart or self._revision < 0:
                self.nodes.replace(self._fleet.nodes.values())
            else:
                self.nodes.update(changes.nodes, changes.removed)
            self._revision = self._fleet.revision
            nodes = self._fleet.nodes.values()
            urgent = [node.level for node in nodes if node.level is not model.Level.OK]
            self._levels = collections.Counter(urgent)
            self._levels[model.Level.OK] = len(nodes) - len(urgent)
            self._label_width = max((lists.width_of(node.label) for node in nodes), default=0)
            self._has_places = any(node.pool or node.zone for node in nodes)
            if self.view is View.RESOURCES:
                self._receive_resources()
        alerts = self._fleet.alerts[:ALERTS_MAX]
        # silences begin and end by the minute
        state = alerts, dict(self._fleet.silences), at.replace(second=0, microsecond=0)
        if state != self._shown_alerts:
            self._shown_alerts = state
            self.alerts.replace(
                rows.Alert(alert, self._fleet.silence_of(alert, at)) for alert in alerts
            )
            is_cut = len(alerts) < len(self._fleet.alerts)
            listed = sum(item.silence is not None for item in self.alerts.items())
            self._silenced = self._fleet.silenced(at) if is_cut else listed

    def receive_events(self, entries: Iterable[rows.Entry]) -> None:
        """Sort new events by time, and add them to the tail."""
        newest = heapq.nlargest(EVENTS_MAX, entries, key=lambda entry: entry.time)
        numbered = [
            msgspec.structs.replace(entry, number=number)
            for number, entry in enumerate(reversed(newest), self._numbered)
        ]
        self._numbered += len(numbered)
        old = self.events.total + len(numbered) - EVENTS_MAX
        oldest = self._numbered - len(numbered) - self.events.total
        removed = [f"{number:09}" for number in range(oldest, oldest + max(0, old))]
        self.events.update(numbered, removed)

    def receive_why(self, node: str, text: Sequence[str]) -> None:
        """Show the state of a node in full, if the page still requests that node."""
        if node == self.why_node:
            self._details[-1].replace(text)

    def receive_processes(self, processes: Iterable[rows.Process]) -> None:
        """Show these processes, and offer their view."""
        self.has_processes = True
        self.processes.replace(processes)

    def _receive_resources(self) -> None:
        self.resources.replace(usage.of_fleet(self._fleet.nodes.values()))

    # Keys

    def press(self, key: str) -> bool:
        """Handle a key; return False if the page should be closed.

        A key is a printable character, or a name such as `enter` or `pagedown`.
        """
        if key == "ctrl+c":
            return False
        if self.is_typing:
            self._type(key)
        elif key == "q":
            return False
        elif key == "?":
            self._open(details.help_page(self._quits, self._about))
        elif self._details:
            self._press_in_detail(self._details[-1], key)
        else:
            self._press_in_list(self._lists[self.view], key)
        return True

    def _type(self, key: str) -> None:
        listing = self._lists[self.view]
        match key:
            case "enter" | "escape":
                self.is_typing = False
                if key == "escape":
                    listing.set_filter("")
            case "backspace":
                listing.set_filter(listing.filter[:-1])
            case "ctrl+u":
                listing.set_filter("")
            case "up" | "down" | "pageup" | "pagedown":
                listing.move(self._steps(key))
            case _ if len(key) == 1 and key.isprintable():
                listing.set_filter((listing.filter + key)[: lists.FILTER_MAX])

    def _press_in_list(self, listing: lists.Listing[Any], key: str) -> None:
        match key:
            case "/":
                self.is_typing = True
            case "s":
                listing.next_order()
            case "escape" if listing.filter:
                listing.set_filter("")
            case "escape":
                self.view = View.FLEET
            case "enter":
                self._enter()
            case "w" if listing.chosen is not None:
                self._open_why(listing.kind.node(listing.chosen))
            case _ if key.isdigit():
                self._show_view(int(key))
            case _:
                listing.move(self._steps(key))

    def _press_in_detail(self, detail: details.Detail, key: str) -> None:
        match key:
            case "escape":
                self._details.pop()
            case "w" if not detail.is_why:
                self._open_why(detail.node)
            case _ if key.isdigit():
                self._details.clear()
                self._show_view(int(key))
            case _:
                detail.first = max(0, detail.first + self._steps(key))

    def _steps(self, key: str) -> int:
        """Return how many rows a key moves the cursor or the text."""
        page = self._body_height
        steps = {"up": -1, "k": -1, "down": 1, "j": 1, "pageup": -page, "pagedown": page}
        steps |= {" ": page, "home": -_ALL, "g": -_ALL, "end": _ALL, "G": _ALL}
        return steps.get(key, 0)

    def _show_view(self, number: int) -> None:
        if 0 < number <= len(self._views()):
            self.view = self._views()[number - 1]
            if self.view is View.RESOURCES:
                self._receive_resources()

    def _enter(self) -> None:
        match self._lists[self.view].chosen:
            case model.NodeSummary(name=name):
                self._open_why(name)
            case rows.Alert() as item:
                title = f"alert {item.alert.kind}"
                self._open(details.Detail(title, item.alert.node, text=details.alert_lines(item)))
            case rows.Entry() as entry:
                self._open(details.Detail("event", entry.node, text=details.entry_lines(entry)))
            case rows.Process() as process:
                self._open(details.Detail(process.name, text=details.process_lines(process)))
            case usage.Usage(resource=name):
                self.view = View.FLEET
                self.nodes.set_filter(name)
            case _:
                pass

    def _open_why(self, node: str) -> None:
        if node:
            self._open(details.Detail(f"why {node}", node, is_why=True, text=["reading"]))

    def _open(self, detail: details.Detail) -> None:
        others = [each for each in self._details if each.title != detail.title]
        self._details = [*others[-_DETAILS_MAX:], detail]

    def _views(self) -> list[View]:
        return [view for view in View if view is not View.PROCESSES or self.has_processes]

    # The screen

    def frame(
        self, width: int, height: int, *, now: datetime, problem: str, bus_problem: str
    ) -> list[Line]:
        """Return `height` lines of `width` cells, but at least one line of 20 cells.

        `problem` is why the state is old or incomplete, `bus_problem` why changes arrive late.
        """
        counts = self._counts(is_old=bool(problem and self.nodes.total))
        if width < bars.WIDTH_MIN or height < bars.HEIGHT_MIN:
            return bars.too_small(counts, max(width, _WIDTH_MIN), height)
        top = [bars.header(counts, width)]
        top += self._notes(width, problem, bus_problem)
        context = lists.Context(
            now,
            width,
            label_width=self._label_width,
            has_places=self._has_places,
            in_use=self.in_use,
        )
        left = max(1, height - len(top) - 2)
        self._body_height = max(1, left - 1)
        body = self._body(context, left)
        lines = [*top, self._tabs(width), *body[:left]]  # the tabs show the position in the body
        blank = lists.fit_line([], width)
        lines += [blank] * (height - 1 - len(lines))
        return [*lines[: height - 1], self._keys(width)]

    def _counts(self, *, is_old: bool) -> bars.Counts:
        console = next((line for line in self._about if line.startswith("console ")), "")
        return bars.Counts(
            nodes=self.nodes.total,
            levels=self._levels,
            alerts=len(self._fleet.alerts),
            silenced=self._silenced,
            is_old=is_old,
            address="".join(console.split()[1:2]),
        )

    def _notes(self, width: int, problem: str, bus_problem: str) -> list[Line]:
        """Return why the shown state may be wrong, the most important reason first."""
        word = "OLD " if self.nodes.total else "WAIT"
        notes = [Part(f" {word} {problem}", Tone.BAD)] if problem else []
        notes += [Part(f" NATS {bus_problem}", Tone.BAD)] if bus_problem else []
        notes += [Part(f" NOTE {note}", Tone.WARNING) for note in self._fleet.caveats()]
        return bars.notes(notes, width)

    def _tabs(self, width: int) -> Line:
        """Return the line that names the views or the item shown in full, with the position."""
        if self._details:
            detail = self._details[-1]
            last = min(detail.first + self._body_height + 1, detail.total)
            position = f"lines {min(detail.first + 1, last)}-{last} of {detail.total}"
            return bars.trail([self.view, *(d.title for d in self._details)], position, width)
        return bars.tabs(self._views(), self.view, self._positions(), width)

    def _positions(self) -> list[str]:
        """Return texts about the cursor's position and the list's order, the longest text first."""
        listing = self._lists[self.view]
        count = f"{min(listing.cursor + 1, len(listing))}/{len(listing)}"
        if self.view is View.EVENTS and not listing.is_at_end:
            texts = [f"{count}, end: follow"]
        else:
            texts = [f"{count} by {listing.order}"]
        if listing.filter and not self.is_typing:
            filtered = f"{count} with {escaping.plain(listing.filter)!r}"
            texts.insert(0, texts[0].replace(count, filtered, 1))
        return [*texts, count]

    def _body(self, context: lists.Context, height: int) -> list[Line]:
        if self._details:
            detail = self._details[-1]
            texts = detail.lines(context.width - 2, height)
            return [
                lists.fit_line([Part(f" {text}", details.text_tone(text))], context.width)
                for text in texts
            ]
        if self.view is View.FLEET:
            return self._overview(context, height)
        return self._lists[self.view].lines(context, height)

    def _overview(self, context: lists.Context, height: int) -> list[Line]:
        """Return the nodes and, below them, the first rows of alerts and the last of events."""
        is_filtered = bool(self.nodes.filter)
        whose = " of these nodes" if is_filtered else ""
        listed = [*itertools.islice(self._of_shown_nodes(self.alerts), _PANE_ALERTS)]
        context = context._replace(widest=self.alerts.widest)
        alerts = [line for item in listed for line in rows.alert_block(item, context)]
        alerts = alerts[:_PANE_LINES]
        needed = max(len(self.nodes), 1) + 1
        room = height - _PANE_EVENTS - (len(alerts) + 1 if alerts else 0)
        nodes_height = min(needed, max(height // 2, room, min(_PANE_MIN, height)))
        lines = self.nodes.lines(context, nodes_height)[:nodes_height]
        left = height - nodes_height
        if alerts and left > _PANE_MIN:
            lines += [bars.title(f"alerts{whose}", context.width), *alerts[: left - 1]]
            left = height - len(lines)
        if left >= _PANE_MIN:
            lines.append(bars.title(f"newest events{whose}", context.width))
            newest = itertools.islice(self._of_shown_nodes(self.events, backwards=True), left - 1)
            lines += self.events.lines_of(context, [*newest][::-1])
        return lines

    def _of_shown_nodes(self, listing: lists.Listing[T], *, backwards: bool = False) -> Iterator[T]:
        """Yield the items of a list whose nodes pass the filter of the nodes."""
        every = listing.rows(0, len(listing))
        for item in reversed(every) if backwards else every:
            if not self.nodes.filter or self.nodes.shows(listing.kind.node(item)):
                yield item

    def _keys(self, width: int) -> Line:
        if self.is_typing:
            return bars.typing(self._lists[self.view].filter, width)
        return bars.keys(self._actions(), width)

    def _actions(self) -> list[bars.Action]:
        last = [bars.Action("?", "help", rank=2), bars.Action("q", self._quits)]
        if self._about:
            last[0] = bars.Action("?", "help, addresses", "help", rank=2)
        if self._details:
            detail = self._details[-1]
            why = [] if detail.is_why or not detail.node else [bars.Action("w", "why", rank=3)]
            return [
                bars.Action("esc", "back"),
                *why,
                bars.Action("space", "next page", rank=3),
                *last,
            ]
        match self.view:
            case View.FLEET:
                enter = [bars.Action("enter", "why", rank=1)]
            case View.ALERTS | View.EVENTS:
                enter = [bars.Action("enter", "open", rank=1), bars.Action("w", "why", rank=3)]
            case View.RESOURCES:
                enter = [bars.Action("enter", "its nodes", rank=1)]
            case View.PROCESSES:
                enter = [bars.Action("enter", "open", rank=1)]
            case _:
                assert_never(self.view)
        keys = [*enter, bars.Action("/", "filter", rank=3), bars.Action("s", "sort", rank=4)]
        kept = self._lists[self.view].filter
        if kept:
            whole = f"clear filter {escaping.plain(kept)!r}"
            return [bars.Action("esc", whole, "clear filter"), *keys, *last]
        back = [bars.Action("esc", "back", rank=2)] if self.view is not View.FLEET else []
        return [*keys, *back, *last]
