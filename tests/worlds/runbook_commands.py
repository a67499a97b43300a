"""Pure: the commands of the runbooks, in code blocks and in sentences."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from tests.worlds import manifests

PAGES: Final = manifests.ROOT / "docs/runbooks"
_BLOCK: Final = re.compile(
    r"(?:^<!-- not run: (?P<why>[^\n>]+) -->\n)?^```sh\n(?P<text>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)
_INLINE: Final = re.compile(r"`((?:kubectl|muster|helm) [^`]+)`")
_ASSIGNMENT: Final = re.compile(r"([A-Z]+)=")
_CHANGE: Final = re.compile(r" (?:delete|(?:un)?cordon|drain|rollout (?:restart|undo)|replay) ")


@dataclass(frozen=True, slots=True)
class Line:
    """A line of a page, without its comment; `why` is the reason why tests do not run it."""

    page: str
    text: str
    why: str = ""

    @property
    def variable(self) -> str:
        """Return the variable that the line assigns; empty if it is a command."""
        match = _ASSIGNMENT.match(self.text)
        return match[1] if match else ""

    @property
    def is_change(self) -> bool:
        """Return whether the command changes the cluster."""
        return bool(_CHANGE.search(self.text))


def names() -> list[str]:
    """Return the names of all runbooks."""
    return sorted({path.stem for path in PAGES.glob("*.md")} - {"README"})


def text(page: str) -> str:
    """Return the text of a page."""
    return (PAGES / f"{page}.md").read_text("utf-8")


def lines() -> Iterator[Line]:
    """Yield the lines of all code blocks."""
    for page in names():
        for block in _BLOCK.finditer(text(page)):
            for line in block["text"].splitlines():
                yield Line(page, line.partition("  # ")[0].rstrip(), block["why"] or "")


def inline() -> Iterator[Line]:
    """Yield the commands in sentences, but not a mere name such as `muster why`."""
    for page in names():
        for command in _INLINE.findall(text(page)):
            if not re.fullmatch(r"muster [a-z-]+(?: [a-z]+)?", command):
                yield Line(page, command)
