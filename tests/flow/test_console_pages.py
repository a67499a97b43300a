"""Every page of the console in a real Chromium: hostile texts, keyboard use, accessibility."""

import functools
import importlib.util
import json
import re
import tempfile
import time
import urllib.parse
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pytest

from tests.worlds import console_browser, console_fleet, worded_fleet
from tests.worlds.console_browser import Shown, ready

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

AXE: Final = importlib.util.find_spec("axe_playwright_python")
NODE: Final = worded_fleet.NODE
WORDS: Final = ("gpu-l4-002", "the driver said so")
NOW_MS: Final = int(time.time() * 1000)
VIEWS: Final = (
    "",
    f"node/{NODE}?device={WORDS[0]}&at={NOW_MS}",
    "silence?m=node%3Dnode-a",
    "events",
    "plots",
    "nothing",
    "alerts",
)
LEVELS: Final = ("STUCK", "DEGRADED", None, "MAINTENANCE", "HEALTHY")
MISLEADING: Final = re.compile("[\0-\x08\x0b-\x1f\x7f-\x9f\u200b-\u200f\u2028-\u202e\u2066-\u2069]")
SEEN: Final = """() => ({
  foreign: [...document.querySelectorAll('img, iframe, object, embed, base, audio, video, '
    + 'script:not([src]), [autofocus], [onerror], [onfocus]')].map((each) => each.outerHTML),
  links: [...document.querySelectorAll('[href], [src], [action], [formaction]')].map((each) =>
    each.href || each.src || each.action || each.formAction),
  texts: [...document.querySelectorAll('*')].flatMap((each) =>
    [...each.attributes].map((attribute) => attribute.value))
    .concat(document.documentElement.textContent),
})"""
CONTROLS: Final = """() => [...document.querySelectorAll(
  'a[href], button, input, textarea, select, summary, [tabindex]')].filter((each) =>
    each.tabIndex >= 0 && each.type !== 'hidden'
    && each.checkVisibility({ visibilityProperty: true }))"""
FOCUSED: Final = f"""() => {{
  const focused = document.activeElement;
  const box = focused.getBoundingClientRect(), style = getComputedStyle(focused);
  const at = [box.left + box.width / 2, box.top + Math.min(box.height / 2, 20)];
  const top = document.elementFromPoint(...at);
  const isSeen = top && (focused.contains(top) || top.contains(focused));
  const isMarked = style.outlineStyle !== 'none' && parseFloat(style.outlineWidth) >= 2;
  // a part of the page may have been renewed meanwhile
  const number = ({CONTROLS})().indexOf(focused);
  return [number, isSeen && isMarked ? '' : focused.outerHTML.slice(0, 200)];
}}"""

pytestmark = console_browser.NEEDED


@pytest.fixture(scope="module")
def shown() -> Iterator[Shown]:
    """Show a fleet with every level, event, silence and notification."""
    health = worded_fleet.health(WORDS)
    for number, verdict in enumerate(LEVELS):
        name, severity = f"gpu-h100-{number:03d}", ("critical", "warning", "info")[number % 3]
        alert = console_fleet.alert(name, number=100 + number, severity=severity)
        alerts = [alert] if verdict in {"STUCK", "DEGRADED"} else []
        health.plugins.append(console_fleet.plugin(name, verdict, alerts=alerts))
    with (
        tempfile.TemporaryDirectory(prefix="ch-") as directory,
        Shown(health, Path(directory)) as shown,
    ):
        shown.do(functools.partial(worded_fleet.publish, words=WORDS))
        yield shown


def opened(page: "Page", shown: Shown, path: str) -> None:
    """Open a page and the first two details on it; wait until nothing is being read."""
    page.goto(f"{shown.address}/{path}")
    if page.locator("#grid").count():
        ready(page)
    page.evaluate(
        "document.querySelectorAll('details').forEach((each, i) => { each.open = i < 2; })"
    )
    page.locator("text=reading...").first.wait_for(state="detached")


def hostile_paths() -> Iterator[str]:
    """Yield every page, with attacks in all parts of its address."""
    first, *others = (urllib.parse.quote(attack, safe="") for attack in worded_fleet.ATTACKS)
    names = ("level", "by", "part", "range", "device", "at")
    query = "&".join(f"{name}={other}" for name, other in zip(names, others, strict=False))
    # the searched text occurs everywhere
    yield from (f"{path}?q={first}&{query}" for path in ("", "alerts", "plots", f"node/{NODE}"))
    yield from (
        "events",
        f"silence?m={others[0]}",
        f"events?type={first}&node={others[1]}",
        f"node/{first}",
    )


def test_texts_of_others_change_nothing_but_what_they_show(browser: "Browser") -> None:
    problems: list[str] = []
    health = worded_fleet.health()
    with (
        tempfile.TemporaryDirectory(prefix="ch-") as directory,
        Shown(health, Path(directory)) as shown,
        console_browser.page(browser) as page,
    ):
        shown.do(worded_fleet.publish)

        def leaves(url: str) -> bool:
            return not url.startswith((f"{shown.address}/", "https://muster.dev/runbooks/"))

        page.on("request", lambda sent: problems.append(sent.url) if leaves(sent.url) else None)
        page.on("dialog", lambda dialog: problems.append(dialog.message))
        page.goto(f"{shown.address}/alerts")
        page.get_by_text("could not notify").first.wait_for()
        page.get_by_text("silenced by").first.wait_for()
        for path in hostile_paths():
            opened(page, shown, path)
            seen: dict[str, Any] = page.evaluate(SEEN)
            problems += seen["foreign"]
            problems += [link for link in seen["links"] if leaves(link)]
            problems += [text[:300] for text in seen["texts"] if MISLEADING.search(text)]
            problems += [path] if page.title() == "taken" else []
            # a template expression is shown literally
            assert any(worded_fleet.ATTACKS[6] in text for text in seen["texts"])
    assert problems == []


def unreachable(page: "Page", key: str) -> list[str]:
    """Press a key once for each control; return the problems of the focus: order, visibility."""
    count = page.evaluate(f"({CONTROLS})().length")
    order, problems = [], []
    for _ in range(count):
        page.keyboard.press(key)
        number, unseen = page.evaluate(FOCUSED)
        order.append(number)
        problems += [f"not seen to have the focus: {unseen}"] if unseen else []
    if sorted(order) != list(range(count)):
        problems.append(f"of {count} controls, {key} went to {order}")
    return problems


def barriers(page: "Page", *schemes: str) -> list[str]:
    """Return the serious and critical problems that axe finds in these colour schemes."""
    problems = []
    # evaluated like a debugger's code, to which the Content-Security-Policy does not apply
    page.evaluate(axe())
    for scheme in schemes:
        page.emulate_media(color_scheme="dark" if scheme == "dark" else "light")
        rules = {} if scheme == "light" else {"runOnly": ["color-contrast"]}
        options = json.dumps({"resultTypes": ["violations"], **rules})
        for violation in page.evaluate(f"axe.run({options})")["violations"]:
            if violation["impact"] in {"serious", "critical"}:
                places = [each["target"] for each in violation["nodes"]]
                problems.append(f"{scheme}: {violation['help']}: {places}")
    page.emulate_media(color_scheme="light")
    return problems


@functools.cache
def axe() -> str:
    """Return the script of axe-core."""
    assert AXE is not None
    assert AXE.origin is not None
    return Path(AXE.origin).with_name("axe.min.js").read_text()


def test_every_control_of_every_page_can_be_reached_with_keys_and_is_seen_to_be(
    shown: Shown, page: "Page"
) -> None:
    problems = {}
    for path in VIEWS:
        opened(page, shown, path)
        problems[path] = unreachable(page, "Tab")
    opened(page, shown, VIEWS[-1])
    problems["backwards"] = unreachable(page, "Shift+Tab")
    assert {path: each for path, each in problems.items() if each} == {}


def test_a_part_of_the_page_that_is_renewed_keeps_the_focus(shown: Shown, page: "Page") -> None:
    opened(page, shown, "")
    # nodes with problems have links in both lists
    node = page.evaluate("""() => {
      const hrefs = [...document.querySelectorAll('.problems a')].map((each) => each.href);
      return [...document.querySelectorAll('.changes a')].findIndex((each) =>
        hrefs.includes(each.href));
    }""")
    assert node >= 0
    link = page.locator(".changes a").nth(node)
    link.focus()
    page.evaluate("document.querySelector('#side').classList.add('stale')")
    page.evaluate("import('/static/live.js').then((live) => live.refresh('#side'))")
    page.locator("#side:not(.stale)").wait_for()
    focused = page.evaluate(
        "[...document.querySelectorAll('.changes a')].indexOf(document.activeElement)"
    )
    assert focused == node


@pytest.mark.skipif(AXE is None, reason="axe-playwright-python is not installed")
@pytest.mark.timeout(400)  # on a busy machine; 10 s on an idle one
def test_no_page_has_a_barrier_that_axe_calls_serious(shown: Shown, page: "Page") -> None:
    problems = {}
    well = console_fleet.Health([console_fleet.plugin(f"gpu-l4-{i:03d}") for i in range(70)])
    with Shown(well) as calm:
        for path in ("", "alerts"):
            opened(page, calm, path)
            problems[f"{path} of a fleet without alerts"] = barriers(page, "light")
    shown.health.is_away = True
    for path in ("", "alerts"):
        opened(page, shown, path)
        page.wait_for_selector("body.is-old")
        problems[f"{path} that is out of date"] = barriers(page, "light", "dark")
    shown.health.is_away = False
    for path in VIEWS:
        opened(page, shown, path)
        problems[path] = barriers(page, "light", "dark")
    assert {path: each for path, each in problems.items() if each} == {}
