"""Pure: texts that fill the page: why a node is in its state, an alert, an event, the help."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import msgspec

from muster import escaping
from muster.cli import top_lists as lists
from muster.cli import top_rows as rows
from muster.cli import why
from muster.cli.top_lists import Tone

_LINES_MAX: Final = 5_000
_LINE_MAX: Final = 2_000

_HELP: Final = """\
up, down, j, k      the next or previous row        page up, page down, space
home, g / end, G    the first or the last row
enter               a node: why it is in its state (as `muster why`)
                    an alert or an event: all of it; a resource: its nodes
w                   why the node of an alert or event is in its state
esc                 back; clears the filter
1 2 3 4 (5)         fleet, alerts, events, resources (processes of muster up)
/                   filter: rows with all words; !word: rows without it
s                   sort by the next column
?                   this help
q, ctrl-c           {quits}

Nodes are sorted by urgency: critical, warning, unknown, notice, ok. DEVICES
has, for each resource, how many devices pods may use, and how many there are.
A silenced alert is marked and comes last; a node counts its other alerts.
The list of events follows the newest while its last row is chosen.
Periodic events (inventories, the watchdog) are not shown.
"""


@dataclass(slots=True)
class Detail:
    """A text shown in place of the lists; if `is_why`, its node is read again periodically."""

    title: str
    node: str = ""
    is_why: bool = False
    text: Sequence[str] = ()
    first: int = 0
    _wrapped: tuple[int, list[str]] = field(default=(0, []))

    def lines(self, width: int, height: int) -> list[str]:
        """Return up to `height` wrapped lines, from `first` on."""
        if self._wrapped[0] != width:
            whole = [
                line
                for text in self.text[:_LINES_MAX]
                for line in lists.wrapped(_short(text), width)
            ]
            self._wrapped = width, whole
        self.first = max(0, min(self.first, len(self._wrapped[1]) - height))
        return self._wrapped[1][self.first : self.first + height]

    @property
    def total(self) -> int:
        """The number of wrapped lines."""
        return len(self._wrapped[1])

    def replace(self, text: Sequence[str]) -> None:
        """Replace the text; the scroll position is kept."""
        self.text, self._wrapped = text, (0, [])


def process_lines(process: rows.Process) -> list[str]:
    """Return all facts about a process as lines."""
    pid = "none: it does not run" if process.pid is None else str(process.pid)
    facts = ("pid", pid), ("address", process.address), ("log", process.log)
    lines = [f"  {name:<10} {value}" for name, value in facts]
    lines += [f"  restarts   {process.restarts}"]
    lines += [f"  problem    {process.problem}"] if process.problem else []
    return [process.name, *lines, "", "`muster break` lists the faults that you can cause"]


def entry_lines(shown: rows.Entry) -> list[str]:
    """Return an event as JSON, cut off if it is long; without JSON, return its text."""
    if not shown.json:
        return [shown.text]
    if shown.is_cut:
        text = escaping.json_text(shown.json)
        return [
            f"{text}…",
            "",
            "the rest is not kept here; `muster events --json` prints all of it",
        ]
    return escaping.json_text(msgspec.json.format(shown.json, indent=2)).split("\n")


def help_page(quits: str, about: Sequence[str]) -> Detail:
    """Return the help; `quits` describes the last key in the list, `about` contains addresses."""
    return Detail("help", text=[*_HELP.format(quits=quits).splitlines(), *about])


def alert_lines(item: rows.Alert) -> list[str]:
    """Return all facts about an alert as lines."""
    lines = list(why.alert_lines(item.alert))
    if item.alert.pods:
        lines += ["", "pods", *(f"  {pod}" for pod in item.alert.pods)]
    if item.silence is not None:
        silence = item.silence
        until = f"{silence.ends_at.astimezone():%Y-%m-%d %H:%M}"
        lines += [
            "",
            f"silenced until {until} by {silence.author}: {silence.comment}",
            f"  matchers   {' '.join(silence.matchers)}",
            f"  to end     muster silence expire {silence.id}",
        ]
    return lines


def text_tone(text: str) -> Tone:
    """Return the tone of a line of a detail, derived from its text."""
    words = text.split()
    if not words or text.startswith("      "):
        return Tone.PLAIN
    if words[0] == "alert":
        return rows.severity_tone(words[1] if len(words) > 1 else "")
    if words[0] in {"problem", "faulty", "suspended", "note"}:
        return Tone.WARNING
    return Tone.PLAIN if text.startswith(" ") else Tone.STRONG


def _short(text: str) -> str:
    if len(text) <= _LINE_MAX:
        return text
    return f"{text[:_LINE_MAX]}… ({len(text) - _LINE_MAX} more characters)"
