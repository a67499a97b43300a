"""Adapter for files: draws messages in Slack, Teams and a mail program.

    python scripts/message_pictures.py    write the pictures

The pictures show the texts that the receivers send, in each service's layout; they are not
screenshots.
"""

import dataclasses
import email
import email.policy
import json
import textwrap
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Final

from muster.vocabulary import AlertKind, NotificationReason
from muster_notifier.receivers import chat, message
from muster_notifier.receivers import email as mails
from scripts import messages

FOLDER: Final = messages.ROOT / "docs/pictures"
_WIDTH: Final = 760
_LINE: Final = 18
_MARGIN: Final = 16
_INDENT: Final = 14
_COLUMNS: Final = 96
"""The number of monospace characters that fit into a line."""
_STYLE: Final = """
text { font: 13px system-ui, sans-serif; fill: #1f2328; white-space: pre; }
.fixed { font: 12px ui-monospace, monospace; } .bold { font-weight: 600; }
.dim { fill: #656d76; } .link { fill: #0969da; } .alarm { fill: #d1242f; font-weight: 600; }
.page { fill: #ffffff; stroke: #d0d7de; }
@media (prefers-color-scheme: dark) {
text { fill: #e6edf3; } .dim { fill: #8d96a0; } .link { fill: #4493f8; } .alarm { fill: #f85149; }
.page { fill: #0d1117; stroke: #30363d; }
}
"""


@dataclasses.dataclass(frozen=True)
class Line:
    """A line of a picture: its style, its indent, and the colour of a bar on the left."""

    text: str
    style: str = ""
    indent: int = 0
    bar: str = ""


def documents() -> dict[Path, str]:
    """Return every picture as SVG, by its path."""
    alert = messages.samples()[AlertKind.PLUGIN_DOWN]
    first = messages.notify(alert)
    over = messages.notify(alert, reason=NotificationReason.ALL_RESOLVED)
    words = messages.COMPOSER.compose(first)
    sent = chat.slack_content(first, words)
    reply = chat.change_line(over, messages.COMPOSER.compose(over))
    card = json.loads(
        chat.teams_card(message.inert(first), messages.COMPOSER.compose(message.inert(first)))
    )
    mail = mails.encode_mail(first, words, sender="muster@example.com", to=("ops@example.com",))
    drawn = {
        "slack": _slack(sent, reply),
        "teams": _teams(card["attachments"][0]["content"]),
        "email": _mail(mail),
    }
    return {FOLDER / f"message-{name}.svg": _svg(name, lines) for name, lines in drawn.items()}


def _slack(sent: dict[str, object], reply: str) -> list[Line]:
    (attachment,) = json.loads(json.dumps(sent["attachments"]))
    section, context = attachment["blocks"]
    color = attachment["color"]
    _, label = context["elements"][0]["text"].strip("<>").split("|")
    text = section["text"]["text"].strip("`")
    return [
        Line("muster", "bold"),
        Line(str(sent["text"])),
        *(Line(each, "fixed", 1, color) for each in _wrapped(text)),
        Line(label, "link", 1, color),
        Line("1 reply", "dim"),
        Line("muster", "bold", 2),
        Line(reply, "", 2),
    ]


def _teams(content: dict[str, list[dict[str, str]]]) -> list[Line]:
    title, *rows = (block["text"] for block in content["body"])
    lines = [line for row in rows for line in _wrapped(row)]
    return [
        Line("muster", "bold"),
        Line(title, "alarm", 1),
        *(Line(line, "fixed", 1) for line in lines),
        *(Line(f"[ {action['title']} ]", "link", 1) for action in content["actions"]),
    ]


def _mail(encoded: bytes) -> list[Line]:
    read = email.message_from_bytes(encoded, policy=email.policy.default)
    return [
        Line(read["Subject"], "bold"),
        *(Line(f"{name}: {read[name]}", "dim") for name in ("From", "To")),
        Line(""),
        *(Line(each, "fixed") for each in _wrapped(read.get_content())),
    ]


def _wrapped(text: str) -> list[str]:
    lines = text.replace("\r\n", "\n").rstrip().split("\n")
    return [part for line in lines for part in textwrap.wrap(line, _COLUMNS) or [""]]


def _svg(name: str, lines: Sequence[Line]) -> str:
    height = len(lines) * _LINE + 2 * _MARGIN
    drawn = []
    for number, line in enumerate(lines):
        x, y = _MARGIN + line.indent * _INDENT, _MARGIN + number * _LINE
        if line.bar:
            left = x - _INDENT
            drawn.append(f'<rect x="{left}" y="{y}" width="4" height="{_LINE}" fill="{line.bar}"/>')
        style = f' class="{line.style}"' if line.style else ""
        drawn.append(f'<text x="{x}" y="{y + 13}"{style}>{escape(line.text)}</text>')
    return "\n".join(
        (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" role="img">',
            f"<title>A message as {name} shows it</title>",
            f"<style>{_STYLE}</style>",
            f'<rect class="page" x="0.5" y="0.5" width="{_WIDTH - 1}" height="{height - 1}"/>',
            *drawn,
            "</svg>\n",
        )
    )


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for file, text in documents().items():
        file.write_text(text, encoding="utf-8")
        print(f"wrote {file.relative_to(messages.ROOT)}")
