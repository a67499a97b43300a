"""No picture of a real run is outdated, and terminal output is drawn as it was printed."""

import json
import re
from typing import Final

import pytest

from scripts import pictures, terminal_drawing
from scripts.terminal_drawing import Frame, Run

PAGES: Final = [
    pictures.ROOT / "README.md",
    *(path for path in (pictures.ROOT / "docs").rglob("*.md")),
]
CAPTURED: Final = (
    "\x1b[1m\x1b[31mnode-b\x1b[0m  CRITICAL\x1b[7m chosen \x1b[27m\n"
    "\n"
    "\x1b]8;;https://example.com\x1b\\<link>\x1b]8;;\x1b\\ \x1b[32mok\n"
    "ok\x1b[39m &\x1b[38;5;12mblue\n"
)


@pytest.mark.parametrize("name", pictures.SOURCES)
def test_no_picture_is_older_than_what_it_shows(name: str) -> None:
    made = json.loads(pictures.MADE.read_text("utf-8"))
    assert made.get(name) == pictures.digest(name), "run: make pictures"


@pytest.mark.parametrize("name", pictures.SOURCES)
def test_what_a_picture_shows_is_there(name: str) -> None:
    assert [each for each in pictures.SOURCES[name] if not [*pictures.ROOT.glob(each)]] == []


def test_every_picture_is_shown_somewhere_and_is_small() -> None:
    shown = "".join(page.read_text("utf-8") for page in PAGES)
    files = [path for path in pictures.FOLDER.iterdir() if path != pictures.MADE]
    assert [path.name for path in files if f"pictures/{path.name}" not in shown] == []
    assert [path.name for path in files if path.stat().st_size > pictures.BYTES_MAX] == []
    assert {each for name in pictures.SOURCES for each in pictures.files(name)} <= {
        path.name for path in files
    }


def test_a_page_that_shows_a_picture_shows_it_light_and_dark_and_in_words() -> None:
    for page in PAGES:
        text = page.read_text("utf-8")
        for name in re.findall(r"pictures/([\w-]+)-(?:light|dark)\.png", text):
            assert re.search(
                r"<picture>\n"
                r'<source media="\(prefers-color-scheme: dark\)" '
                rf'srcset="[\w/]*pictures/{name}-dark\.png">\n'
                rf'<img alt="[^"]{{20,}}" src="[\w/]*pictures/{name}-light\.png">\n'
                r"</picture>",
                text,
            ), (page, name)


def test_the_colours_of_a_terminal_are_kept_over_lines_until_they_are_changed() -> None:
    drawn = terminal_drawing.rows(CAPTURED)
    assert drawn == (
        (Run(0, "node-b", "bold red"), Run(6, "  CRITICAL", ""), Run(16, " chosen ", "reverse")),
        (),
        (Run(0, "<link>", ""), Run(7, "ok", "green")),
        (Run(0, "ok", "green"), Run(2, " &blue", "")),
    )
    assert [terminal_drawing.plain(row) for row in drawn] == [
        "node-b  CRITICAL chosen ",
        "",
        "<link> ok",
        "ok &blue",
    ]


def test_a_screen_is_drawn_with_each_part_in_its_column() -> None:
    drawn = terminal_drawing.picture("a & b", terminal_drawing.rows(CAPTURED), 40)
    assert "<title>a &amp; b</title>" in drawn
    places = re.findall(r'<(rect|text|tspan).*? (?:x|y)="(\d+)"(?: textLength="(\d+)")?', drawn)
    assert places == [
        ("rect", "142", ""),
        ("text", "27", ""),
        ("tspan", "14", "48"),
        ("tspan", "78", "64"),
        ("tspan", "150", "48"),
        ("text", "63", ""),
        ("tspan", "14", "48"),
        ("tspan", "70", "16"),
        ("text", "81", ""),
        ("tspan", "14", "16"),
        ("tspan", "38", "40"),
    ]
    assert re.findall(r"(?: class=.([a-z ]+).)?>([^<\n]+)</tspan", drawn) == [
        ("bold red", "node-b"),
        ("", "CRITICAL"),
        ("reverse", "chosen"),
        ("", "&lt;link&gt;"),
        ("green", "ok"),
        ("green", "ok"),
        ("", "&amp;blue"),
    ]


def test_a_recording_shows_each_row_when_it_was_there_and_stands_still_where_wanted() -> None:
    always, first, then = (terminal_drawing.rows(text)[0] for text in ("always", "first", "then"))
    frames = [
        Frame(0, (always, first)),
        Frame(2, (always, then)),
        Frame(4, (always, first)),
        Frame(8, (always, first)),
    ]
    drawn = terminal_drawing.recording("demo", frames, 20, still_at=2.5)
    assert re.findall(r"@keyframes.*", drawn) == [
        "@keyframes k0{0%{visibility:visible}25%{visibility:hidden}50%{visibility:visible}}",
        "@keyframes k1{0%{visibility:hidden}25%{visibility:visible}50%{visibility:hidden}}",
    ]
    assert re.findall(r'<g class="(.*?)">.*>(\w+)</tspan>', drawn) == [
        ("k0", "first"),
        ("k1 still", "then"),
    ]
    assert "@media (prefers-reduced-motion: no-preference) {\ng{animation:8.0s step-end" in drawn
    assert ">always<" in re.sub(r"<g .*", "", drawn)
