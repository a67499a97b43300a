"""Adapter for the terminal: `muster top` shows a fleet, live, and responds to keys.

textual reads the keys and writes the lines that have changed; `top_page` decides what is shown.
Texts are written unchanged: markup in them has no effect.
"""

import asyncio
import contextlib
import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Final

import cyclopts
import rich.segment
import rich.style
import textual.app
import textual.binding
import textual.constants
import textual.events
import textual.geometry
import textual.strip
import textual.widget

from muster import client, codec, vocabulary
from muster.cli import events, output, top_page, why
from muster.cli import health as health_service
from muster.cli import top_lists as lists
from muster.cli import top_rows as rows
from muster.cli.top_lists import Tone
from muster.fleet import health_client, model, reader
from muster.nats import bus
from muster.service import runtime

if TYPE_CHECKING:
    from muster.fleet import health_state

app = cyclopts.App(name="top")

_ESCAPE_S: Final = 0.03
_TICK_S: Final = 0.25
_AGES_S: Final = 1.0
"""How often the ages on the page are updated."""
_WHY_S: Final = 2.0
"""How often the node that is shown in full is read again."""
_PAST_S: Final = 30.0
_PAST: Final = "1d"
_PAST_AGE: Final = timedelta(days=1)
_NODE_EVENTS_MAX: Final = 2_000
_END_S: Final = 5.0
_NO_TERMINAL: Final = frozenset({"", "dumb", "unknown"})
_SUSPENDED_STATES: Final = frozenset({"T", "t"})
_STYLES: Final = {
    Tone.PLAIN: rich.style.Style(),
    Tone.DIM: rich.style.Style(dim=True),
    Tone.STRONG: rich.style.Style(bold=True),
    Tone.GOOD: rich.style.Style(color="green"),
    Tone.WARNING: rich.style.Style(color="yellow", bold=True),
    Tone.BAD: rich.style.Style(color="red", bold=True),
    Tone.CHOSEN: rich.style.Style(reverse=True),
}


@dataclass(frozen=True, slots=True)
class Local:
    """What `muster up` adds to the page: its processes, and its new lines of output.

    `about` contains the addresses, which the help shows.
    """

    processes: Callable[[], Sequence[rows.Process]]
    lines: Callable[[], Sequence[str]]
    about: Sequence[str]


@app.default
def top(*, health: health_service.Health = None, url: events.Url = None) -> int:
    """Show the fleet, live: nodes by urgency, why each is in its state, alerts, events.

    `?` lists the keys. Without a terminal, `muster status` is printed once.
    """
    if not is_terminal():
        return health_service.show_status(health=health, url=url)
    try:
        urls, nats_url = health_service.addresses(health)
    except (ConnectionError, ValueError) as error:
        return output.fail("top", str(error), code=1 if isinstance(error, ConnectionError) else 2)
    with events.outages_hidden(everything=True) as reasons:
        shown = show(urls, url or nats_url or client.DEFAULT_URL, reasons=reasons)
        asyncio.run(runtime.run(shown))
    return 0


def is_terminal() -> bool:
    """Return whether a page can be drawn: keys come from stdin, and textual writes to stderr."""
    is_tty = all(map(os.isatty, (0, 1, 2)))
    return is_tty and os.environ.get("TERM", "") not in _NO_TERMINAL


async def show(
    urls: Sequence[str],
    nats_url: str,
    *,
    reasons: Sequence[str] = (),
    local: Local | None = None,
) -> None:
    """Show the page until the user closes it or this task is cancelled.

    `reasons` contains the reason for the last lost connection to NATS.
    """
    fleet = model.FleetModel()
    for name in ("COLUMNS", "LINES"):
        # textual would believe them, also after the terminal was resized
        os.environ.pop(name, None)
    about = ("", *local.about) if local else ()
    page = top_page.Page(fleet, quits="stop all" if local else "quit", about=about)
    async with bus.Bus(nats_url, producer="clients/top", name="top") as connected:
        source = Source(page, fleet, urls, connected, reasons)
        terminal = Terminal(page, source, local)
        if local is not None:
            await connected.heartbeats(source.receive_heartbeat)
        drawing = asyncio.create_task(_draw(terminal))
        reading = asyncio.create_task(source.run())
        try:
            await asyncio.wait([drawing, reading], return_when=asyncio.FIRST_COMPLETED)
        finally:
            terminal.exit()
            await asyncio.wait([drawing], timeout=_END_S)
            terminal.end_input()
            await runtime.end(reading)
    for task in (reading, drawing):
        failure = runtime.failure(task)
        if failure is not None and not isinstance(failure, asyncio.CancelledError):
            raise failure
    if terminal.return_code:
        raise RuntimeError("the page has failed for the reason above")


def with_suspension(process: rows.Process) -> rows.Process:
    """Return the process; its problem is `suspended` if /proc shows that a signal suspended it."""
    if process.pid is None or process.problem:
        return process
    with contextlib.suppress(OSError, ValueError, IndexError):
        # proc(5): the state follows the name, which is in parentheses
        text = Path(f"/proc/{process.pid}/stat").read_text(errors="replace")
        if text.rpartition(")")[2].split()[0] in _SUSPENDED_STATES:
            return process._replace(problem="suspended")
    return process


async def _draw(terminal: "Terminal") -> None:
    await terminal.run_async(mouse=False)


class Source:
    """Reads what the page shows: the fleet, the tail of events, and one node in full."""

    def __init__(
        self,
        page: top_page.Page,
        fleet: model.FleetModel,
        urls: Sequence[str],
        connected: bus.Bus,
        reasons: Sequence[str],
    ) -> None:
        self.fleet = fleet
        self.wanted = asyncio.Event()
        """Set when the node that is shown in full may have to be read."""
        self._page = page
        self._urls = urls
        self._reasons = reasons
        self._fresh: list[rows.Entry] = []
        self._node = ""
        self._past: list[codec.CloudEvent] = []
        self._past_at = float("-inf")
        self._clock = asyncio.get_running_loop().time
        listeners = reader.Listeners(on_change=self._note_change, on_event=self._keep)
        self._reader = reader.FleetReader(
            fleet, health=urls, link=connected.link, listeners=listeners
        )

    async def run(self) -> None:
        """Read until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._reader.run())
            tasks.create_task(self._keep_node())

    async def receive_heartbeat(self, beat: vocabulary.Heartbeat) -> None:
        """Record how many devices of a node are in use, if health has reported the resource."""
        node = self.fleet.nodes.get(beat.node)
        for resource in beat.resources:
            if node is not None and resource.name in node.resources:
                self._page.in_use[beat.node, resource.name] = resource.allocated

    def fresh_events(self) -> list[rows.Entry]:
        """Return the events since the last call."""
        fresh, self._fresh = self._fresh, []
        return fresh

    @property
    def problem(self) -> str:
        """Why the shown state is outdated or incomplete; empty if it is complete and current."""
        return self.fleet.problem(self._clock())

    @property
    def bus_problem(self) -> str:
        """Why changes arrive late; empty while NATS is connected."""
        if self._reader.is_bus_connected:
            return ""
        reason = f": {self._reasons[0]}" if self._reasons else ""
        return f"not connected{reason}; no events, and changes appear later"

    def _note_change(self) -> None:
        """Do nothing: the page looks at the model several times a second."""

    def _keep(self, event: codec.CloudEvent) -> None:
        if event.node == self._node:
            self._past = [*self._past[-_NODE_EVENTS_MAX:], event]
            self.wanted.set()
        if rows.is_shown(event.data):
            self._fresh.append(rows.entry(event))
            if len(self._fresh) > 2 * top_page.EVENTS_MAX:
                self._fresh.sort(key=lambda entry: entry.time)
                del self._fresh[: top_page.EVENTS_MAX]

    async def _keep_node(self) -> None:
        """Read the node that the page shows in full, immediately and then periodically."""
        while True:
            self.wanted.clear()
            if node := self._page.why_node:
                text = await self._why(node)
                if text is not None:
                    self._page.receive_why(node, text)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_WHY_S if node else None):
                    await self.wanted.wait()

    async def _why(self, node: str) -> list[str] | None:
        """Return a node as text, or None to keep its last text because health does not answer."""
        notes: list[str] = []
        state: health_state.State | None = None
        try:
            state = await self._reader.node(node)
        except (ConnectionError, health_client.UnreadableState) as error:
            if node == self._node:
                return None
            notes.append(f"note: health does not answer: {error}")
        past = await self._past_events(node, notes)
        at = datetime.now(UTC)
        view = why.NodeView(
            node=node,
            source=", ".join(self._urls),
            state=state,
            events=past,
            since=_PAST,
            now=at,
            silences={
                alert.fingerprint: silence
                for alert in self.fleet.alerts
                if alert.node == node and (silence := self.fleet.silence_of(alert, at))
            },
        )
        unknown = why.unknown_name(view)
        lines = [unknown] if unknown else why.lines(view)
        # the page itself shows health's notes
        start = lines.index("") + 1 if state is not None and "" in lines else 0
        return [*notes, *lines[start:]]

    async def _past_events(self, node: str, notes: list[str]) -> list[codec.CloudEvent] | None:
        """Return a node's events, cached for a while; on failure, the cached ones or None."""
        now = self._clock()
        if node != self._node or now - self._past_at > _PAST_S:
            try:
                if not self._reader.is_bus_connected:
                    raise ConnectionError("not connected to NATS")  # noqa: TRY301  # reading would wait
                past = await self._reader.past_events(
                    node=node, age=_PAST_AGE, events_max=_NODE_EVENTS_MAX
                )
            except (ConnectionError, ValueError) as error:
                notes.append(f"note: no events: {error}")
                return self._past if node == self._node else None
            self._node, self._past, self._past_at = node, past, now
        return self._past


class Terminal(textual.app.App[None]):
    """The program on the terminal: a single widget that fills it."""

    ENABLE_COMMAND_PALETTE = False
    CSS = "Screen { background: ansi_default; } _Lines { width: 100%; height: 100%; }"
    BINDINGS: ClassVar[list[textual.binding.BindingType]] = [
        textual.binding.Binding("ctrl+c", "press('ctrl+c')", show=False, priority=True)
    ]

    def __init__(
        self,
        page: top_page.Page,
        source: Source,
        local: Local | None = None,
    ) -> None:
        super().__init__(ansi_color=True)
        if "ESCDELAY" not in os.environ:
            # textual looks only every 100 ms whether a sequence that begins so has ended; with its
            # own limit, which is 100 ms as well, it would often look twice
            textual.constants.ESCAPE_DELAY = _ESCAPE_S  # type: ignore[misc]
        self.page = page
        self._source = source
        self._local = local
        self._lines = _Lines()
        self._seen = -1
        self._drawn_at = float("-inf")

    def end_input(self) -> None:
        """End the thread that reads keys, even if textual could not close the page."""
        getattr(self._driver, "exit_event", threading.Event()).set()

    def compose(self) -> textual.app.ComposeResult:
        """Return the only widget."""
        yield self._lines

    def on_mount(self) -> None:
        """Start to check for changes periodically."""
        self.set_interval(_TICK_S, self._tick)

    def on_resize(self) -> None:
        """Draw for the new size."""
        self.call_after_refresh(self.draw)

    def on_key(self, event: textual.events.Key) -> None:
        """Pass a key to the page."""
        event.stop()
        character = event.character if event.is_printable else None
        self.action_press(character or event.key)

    def on_paste(self, event: textual.events.Paste) -> None:
        """Add pasted text to the filter, or ignore it if no filter is being edited."""
        if self.page.is_typing:
            for character in filter(str.isprintable, event.text[: lists.FILTER_MAX]):
                self.page.press(character)
            self.draw()

    def action_press(self, key: str) -> None:
        """Handle a key."""
        if not self.page.press(key):
            self.exit()
            return
        self._source.wanted.set()
        self.draw()

    def _tick(self) -> None:
        """Pass new data to the page; draw it if anything changed or the ages must be updated."""
        fresh = self._source.fresh_events()
        if fresh:
            self.page.receive_events(fresh)
        if self._local is not None:
            self.page.receive_processes(map(with_suspension, self._local.processes()))
            at = datetime.now(UTC)
            self.page.receive_events(rows.note(line, at) for line in self._local.lines())
        now = asyncio.get_running_loop().time()
        if fresh or self._seen != self._source.fleet.revision or now - self._drawn_at >= _AGES_S:
            self._seen = self._source.fleet.revision
            self.page.receive_fleet(datetime.now(UTC))
            self.draw()

    def draw(self) -> None:
        """Draw the page; only lines that have changed are written."""
        self._drawn_at = asyncio.get_running_loop().time()
        width, height = self._lines.size
        frame = self.page.frame(
            width,
            height,
            now=datetime.now(UTC),
            problem=self._source.problem,
            bus_problem=self._source.bus_problem,
        )
        self._lines.show(frame[:height])


class _Lines(textual.widget.Widget, can_focus=True):
    """Lines of text, each as wide as the terminal."""

    def __init__(self) -> None:
        super().__init__()
        self._frame: list[lists.Line] = []

    def show(self, frame: list[lists.Line]) -> None:
        """Show these lines; write those that differ."""
        before, self._frame = self._frame, frame
        for y, line in enumerate(frame):
            if y >= len(before) or before[y] != line:
                self.refresh(textual.geometry.Region(0, y, self.size.width, 1))

    def render_line(self, y: int) -> textual.strip.Strip:
        """Return one line."""
        line = self._frame[y] if y < len(self._frame) else ()
        segments = [rich.segment.Segment(text, _STYLES[tone]) for text, tone in line if text]
        return textual.strip.Strip(segments).adjust_cell_length(self.size.width)
