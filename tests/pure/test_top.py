"""`muster top`: the content and order of each list, and the effects of keys and hostile texts."""

import datetime as dt
from typing import Final

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from muster import codec, matching, vocabulary
from muster.cli import events, top_page, top_rows
from muster.cli import top_lists as lists
from muster.fleet import health_state, model, usage

T0: Final = dt.datetime(2026, 1, 1, 12, tzinfo=dt.UTC)
HOSTILE: Final = (
    "[red]x[/red] \x1b[2J\x1b]0;t\x07 \r\n\u202e \u200b \ud800 <img src=x onerror=alert(1)>"
)
KEYS: Final = (
    *("up", "down", "pageup", "pagedown", "home", "end", "enter", "escape", "backspace", "w", "s"),
    *("/", "?", "1", "2", "3", "4", "5", "9", "j", "k", "g", "G", " ", "a", "-", "ctrl+u", "f5"),
)
"""All keys with a function, except those that close the page, and some without one."""


def alert(node: str, **more: object) -> health_state.Alert:
    fields = {
        "fingerprint": f"{abs(hash(node)):016x}"[:16],
        "node": node,
        "plugin": "device-plugin",
        "kind": "stuck",
        "severity": "critical",
        "summary": f"device-plugin on {node} is stuck",
        "starts_at": T0 - dt.timedelta(minutes=3),
        **more,
    }
    return msgspec.convert(fields, health_state.Alert)


def plugin(node: str, *alerts: health_state.Alert, usable: int = 8) -> health_state.Plugin:
    return health_state.Plugin(
        node=node,
        plugin="device-plugin",
        verdict="STUCK" if alerts else "HEALTHY",
        since=T0 - dt.timedelta(hours=2),
        devices={"nvidia.com/gpu": 8},
        allocatable={"nvidia.com/gpu": usable},
        alerts=alerts,
    )


def silence(matcher: str) -> matching.Silence:
    return matching.Silence(
        id="s1",
        matchers=(matcher,),
        starts_at=T0 - dt.timedelta(hours=1),
        ends_at=T0 + dt.timedelta(hours=1),
        author="ann",
        comment="replaced tomorrow",
    )


def fleet(*plugins: health_state.Plugin) -> model.FleetModel:
    state = health_state.State(
        plugins=plugins, fleet=health_state.Fleet(), service=health_state.Service(revision=1)
    )
    known = model.FleetModel()
    known.receive_page(state, after="", now=0.0, at=T0)
    return known


def page_of(known: model.FleetModel) -> top_page.Page:
    page = top_page.Page(known)
    page.receive_fleet(T0)
    return page


def event(data: vocabulary.Event, *, sequence: int = 1) -> codec.CloudEvent:
    return codec.CloudEvent(
        id=str(sequence),
        source="/nodes/a/plugins/p",
        type=data.TYPE,
        time=data.at,
        instance="i",
        sequence=sequence,
        boot="b",
        data=data,
    )


def stopping(seconds: float, node: str = "node-a") -> top_rows.Entry:
    at = T0 + dt.timedelta(seconds=seconds)
    reason = vocabulary.StopReason.SIGNAL
    return top_rows.entry(
        event(vocabulary.PluginStopping(node=node, at=at, plugin="p", reason=reason))
    )


def screen(
    page: top_page.Page, width: int = 80, height: int = 24, problem: str = "", bus: str = ""
) -> list[str]:
    frame = page.frame(width, height, now=T0, problem=problem, bus_problem=bus)
    return ["".join(part.text for part in line).rstrip() for line in frame]


def press(page: top_page.Page, *keys: str) -> None:
    for key in keys:
        assert page.press(key)


def test_the_first_screen_has_the_most_urgent_first_and_fits_into_80_columns() -> None:
    page = page_of(
        fleet(
            plugin("node-a"),
            plugin("node-b", alert("node-b"), usable=0),
            plugin("node-c", alert("node-c", severity="warning")),
        )
    )
    page.receive_events([stopping(0)])
    assert screen(page, height=14) == [
        " muster  3 nodes: 1 critical, 1 warning, 1 ok   2 alerts firing",
        "  1 fleet   2 alerts   3 events   4 resources                    1/3 by urgency",
        " NODE    STATE     VERDICT       SINCE    ALERTS  DEVICES",
        " node-b  CRITICAL  STUCK            2h         1  gpu 0/8",
        " node-c  WARNING   STUCK            2h         1  gpu 8/8 listed",
        " node-a  OK        HEALTHY          2h         -  gpu 8/8",
        " ─ alerts ─────────────────────────────────────────────────────────────────────",
        "    3m  critical  node-b  device-plugin on node-b is stuck",
        "    3m  warning   node-c  device-plugin on node-c is stuck",
        " ─ newest events ──────────────────────────────────────────────────────────────",
        f" {T0.astimezone():%H:%M:%S}  node-a  plugin.stopping p stops (signal), not expected back",
        "",
        "",
        " enter why   / filter   s sort   ? help   q quit",
    ]


def test_the_address_of_the_console_is_in_the_first_line_where_it_fits() -> None:
    about = ["console         http://127.0.0.1:8630/  pid 7", "NATS            nats://127.0.0.1:1"]
    page = top_page.Page(fleet(plugin("node-a")), quits="stop all", about=about)
    page.receive_fleet(T0)
    first = " muster  1 node: 1 ok   no alert is firing"
    assert screen(page, height=14)[0] == f"{first}   http://127.0.0.1:8630/"
    assert screen(page, width=60, height=14)[0] == (
        " muster  1 node: 1 ok   no alert   http://127.0.0.1:8630/"
    )
    assert screen(page, width=50, height=14)[0] == (
        " 1 node: 1 ok   no alert   http://127.0.0.1:8630/"
    )
    assert screen(page, width=45, height=14)[0] == " 1 node  no alert  http://127.0.0.1:8630/"
    assert screen(page, width=40, height=14)[0] == " muster  1 node: 1 ok   no alert"


def test_words_are_dropped_from_the_first_line_before_the_address_is() -> None:
    about = ["console         http://127.0.0.1:8630  pid 7"]
    known = fleet(
        plugin("node-a"),
        plugin("node-b", alert("node-b")),
        plugin("node-c", alert("node-c", kind="missing")),
    )
    known.receive_silence("s1", silence('node="node-b"'), at=T0)
    page = top_page.Page(known, about=about)
    page.receive_fleet(T0)
    assert screen(page, 120)[0] == (
        " muster  3 nodes: 1 critical, 1 notice, 1 ok   2 alerts firing (1 silenced)"
        "   http://127.0.0.1:8630"
    )
    assert screen(page)[0] == (
        " 3 nodes: 1 critical, 1 notice  2 firing (1 silenced)  http://127.0.0.1:8630"
    )


def test_with_a_filter_the_count_the_order_and_the_last_key_remain() -> None:
    page = top_page.Page(
        fleet(*(plugin(f"node-{letter}", alert(f"node-{letter}")) for letter in "abc")),
        quits="stop all",
        about=["console         http://127.0.0.1:8630  pid 7"],
    )
    page.receive_fleet(T0)
    page.receive_processes([])
    press(page, "/", *"node-b critical", "enter")
    shown = screen(page)
    tabs = "  1 fleet   2 alerts   3 events   4 resources   5 processes "
    assert shown[1] == f"{tabs}     1/1 by urgency"
    assert shown[-1] == " esc clear filter  enter why  / filter  s sort  ? help  q stop all"
    narrow = screen(page, 60)
    assert narrow[1].startswith("  1 fleet   2   3   4   5 ")
    assert narrow[1].endswith("1/1 by urgency")
    assert narrow[-1] == " esc clear filter enter why / filter ? help q stop all"
    assert screen(page, 40)[-1] == " esc clear filter enter why q stop all"
    for width in range(40, 120):
        assert screen(page, width)[-1].endswith("q stop all")


def test_with_a_filter_of_nodes_the_lower_panes_have_only_their_alerts_and_events() -> None:
    page = page_of(fleet(plugin("node-a", alert("node-a")), plugin("node-b", alert("node-b"))))
    page.receive_events([stopping(0), stopping(1, "node-b"), stopping(2)])
    press(page, "/", *"node-b", "enter")
    times = [f"{(T0 + dt.timedelta(seconds=1)).astimezone():%H:%M:%S}"]
    assert screen(page, height=12)[3:8] == [
        " node-b  CRITICAL  STUCK            2h         1  gpu 8/8 listed",
        " ─ alerts of these nodes ──────────────────────────────────────────────────────",
        "    3m  critical  node-b  device-plugin on node-b is stuck",
        " ─ newest events of these nodes ───────────────────────────────────────────────",
        f" {times[0]}  node-b  plugin.stopping p stops (signal), not expected back",
    ]


def test_a_long_kind_of_alert_is_a_whole_word() -> None:
    long = alert("node-a", kind="configuration_refused", severity="warning")
    healthy = msgspec.structs.replace(plugin("node-a", long), verdict="HEALTHY")
    page = page_of(fleet(healthy))
    assert "  WARNING   CONFIGURATION_REFUS…" in screen(page)[3]
    assert "  WARNING   CONFIGURATION_REFUSED " in screen(page, 100)[3]
    other = msgspec.structs.replace(long, kind="device_unhealthy")
    page = page_of(fleet(msgspec.structs.replace(healthy, alerts=(other,))))
    assert "  WARNING   DEVICE_UNHEALTHY " in screen(page)[3]


def test_only_shown_columns_are_offered_for_sorting() -> None:
    page = page_of(fleet(plugin("node-a", alert("node-a"))))

    def orders(width: int) -> list[str]:
        offered = []
        for _ in range(5):
            position = screen(page, width)[1].rpartition(" by ")[2]
            offered.append(position)
            press(page, "s")
        return offered

    assert orders(80) == ["urgency", "name", "newest", "alerts", "urgency"]
    press(page, "2")
    assert orders(80) == ["urgency", "newest", "node", "urgency", "newest"]
    press(page, "s", "s")
    assert orders(120) == ["newest", "node", "kind", "urgency", "newest"]


@pytest.mark.parametrize(("width", "height"), [(20, 5), (39, 24), (80, 5)])
def test_a_terminal_without_room_for_a_row_says_so(width: int, height: int) -> None:
    page = page_of(fleet(plugin("node-a"), plugin("node-b", alert("node-b"))))
    shown = " ".join(" ".join(screen(page, width, height)).split())
    assert shown.startswith(f"too small: {width}x{height}, needs 40x6 2 nodes: 1 critical, 1 ok")
    assert "node-b" in " ".join(screen(page, 40, 6))


def test_help_that_is_asked_for_twice_is_open_once_and_says_what_ends_the_page() -> None:
    page = top_page.Page(fleet(plugin("node-a")), quits="stop all", about=["console  x"])
    page.receive_fleet(T0)
    page.press("?")
    page.press("?")
    shown = screen(page, height=40)
    assert shown[1].startswith(" fleet > help ")
    assert " q, ctrl-c           stop all" in shown
    assert " console  x" in shown
    page.press("escape")
    assert screen(page, height=40)[1].startswith("  1 fleet ")


def test_a_wide_screen_also_has_the_problem_of_each_node() -> None:
    page = page_of(fleet(plugin("node-b", alert("node-b"))))
    assert "device-plugin on node-b is stuck" in screen(page, width=200)[3]


def test_what_is_silenced_is_marked_comes_last_and_is_not_counted() -> None:
    known = fleet(plugin("node-a", alert("node-a")), plugin("node-b", alert("node-b")))
    known.receive_silence("s1", silence('node="node-a"'), at=T0)
    page = page_of(known)
    top = screen(page)
    until = f"{(T0 + dt.timedelta(hours=1)).astimezone():%H:%M}"
    assert top[0].endswith("2 alerts firing (1 silenced)")
    assert [line.split()[0:2] for line in top[3:5]] == [
        ["node-b", "CRITICAL"],
        ["node-a", "NOTICE"],
    ]
    assert top[4].split()[4] == "silenced"
    assert top[7] == (
        f"    3m  critical  node-a  [silenced until {until}] device-plugin on node-a is"
    )
    press(page, "2", "down", "enter")
    assert "  to end     muster silence expire s1" in [line[1:] for line in screen(page)]


def test_a_silence_that_has_ended_silences_no_longer() -> None:
    known = fleet(plugin("node-a", alert("node-a")))
    known.receive_silence("s1", silence('node="node-a"'), at=T0)
    page = page_of(known)
    page.receive_fleet(T0 + dt.timedelta(hours=2))
    assert screen(page)[0].endswith("1 alert firing")


def test_old_data_is_marked_old_and_a_lost_bus_is_named() -> None:
    page = page_of(fleet(plugin("node-a")))
    problem = "health has not answered for 12 s: Connection refused"
    top = screen(page, problem=problem, bus="not connected")
    assert top[:3] == [
        " muster  1 node: 1 ok (old)   no alert is firing",
        f" OLD  {problem}",
        " NATS not connected",
    ]
    assert screen(page_of(fleet()), problem=problem)[1] == f" WAIT {problem}"


def test_a_long_reason_takes_two_lines_at_most() -> None:
    page = page_of(fleet(plugin("node-a")))
    top = screen(page, problem="http://" + "x" * 500, bus="away")
    assert top[2].endswith("…")
    assert top[3] == " NATS away"


def test_the_newest_event_is_on_the_last_line_however_many_there_are() -> None:
    page = page_of(fleet())
    press(page, "3")
    page.receive_events([stopping(number) for number in range(1_500)])
    page.receive_events([stopping(2_000, "the-newest")])
    assert screen(page)[-2].split()[1] == "the-newest"
    assert page.events.total == top_page.EVENTS_MAX


def test_events_of_the_past_are_ordered_by_time() -> None:
    page = page_of(fleet())
    page.receive_events([stopping(3, "c"), stopping(1, "a"), stopping(2, "b")])
    assert [entry.node for entry in page.events.rows(0, 9)] == ["a", "b", "c"]


def test_a_clock_that_is_ahead_does_not_hide_what_comes_later() -> None:
    page = page_of(fleet())
    page.receive_events([stopping(9_999, "ahead")])
    page.receive_events([stopping(1, "newest")])
    assert [entry.node for entry in page.events.rows(0, 9)] == ["ahead", "newest"]


def test_the_tail_stays_where_people_read_until_they_return_to_its_end() -> None:
    page = page_of(fleet())
    press(page, "3")
    page.receive_events([stopping(number, f"n{number}") for number in range(100)])
    press(page, "up")
    before = screen(page)[2:-1]
    page.receive_events([stopping(200, "new")])
    assert screen(page)[2:-1] == before
    assert screen(page)[1].endswith("99/101, end: follow")
    press(page, "end")
    assert screen(page)[-2].split()[1] == "new"


def test_ticks_and_periodic_reports_are_not_shown() -> None:
    tick = vocabulary.WatchdogTicked(node="_fleet", at=T0, leader=1, holder="h", interval_s=10)
    receivers = vocabulary.ReceiversConfigured(node="_fleet", at=T0, receivers={}, interval_s=60)
    inventory = vocabulary.InventoryReported(node="a", at=T0, plugin="p", devices=())
    assert not any(map(top_rows.is_shown, (tick, receivers, inventory)))
    stop = vocabulary.PluginStopping(
        node="a", at=T0, plugin="p", reason=vocabulary.StopReason.SIGNAL
    )
    assert top_rows.is_shown(stop)


def test_enter_asks_why_and_escape_goes_back() -> None:
    page = page_of(fleet(plugin("node-a"), plugin("node-b", alert("node-b"))))
    press(page, "enter")
    assert page.why_node == "node-b"
    page.receive_why("node-b", ["node-b device-plugin is STUCK", "  evidence   heartbeat: none"])
    assert screen(page, height=6)[1:4] == [
        " fleet > why node-b                                              lines 1-2 of 2",
        " node-b device-plugin is STUCK",
        "   evidence   heartbeat: none",
    ]
    page.receive_why("node-a", ["too late"])
    assert "too late" not in " ".join(screen(page))
    press(page, "escape")
    assert page.why_node == ""


def test_an_alert_leads_to_its_node_with_one_key() -> None:
    page = page_of(fleet(plugin("node-b", alert("node-b"))))
    press(page, "2", "w")
    assert page.why_node == "node-b"
    press(page, "escape", "enter")
    assert page.why_node == ""
    assert any("critical stuck since" in line for line in screen(page))
    press(page, "w")
    assert page.why_node == "node-b"
    press(page, "escape", "escape", "escape")
    assert page.view is top_page.View.FLEET


def test_a_filter_needs_all_words_and_an_exclamation_mark_excludes() -> None:
    page = page_of(fleet(*(plugin(f"node-{letter}{n}") for letter in "ab" for n in range(3))))
    press(page, "/", *"node-a !a1")
    assert screen(page)[-1].startswith(" / node-a !a1_")
    press(page, "enter")
    assert [node.name for node in page.nodes.rows(0, 9)] == ["node-a0", "node-a2"]
    assert screen(page)[-1].startswith(" esc clear filter 'node-a !a1'")
    press(page, "escape")
    assert len(page.nodes) == 6
    press(page, "/", *"zzz", "enter")
    assert screen(page)[3] == " nothing passes the filter 'zzz'; esc clears it"


def test_a_resource_counts_its_devices_and_leads_to_its_nodes() -> None:
    page = page_of(fleet(plugin("node-a", usable=7), plugin("node-b")))
    press(page, "4")
    assert screen(page)[3].split() == ["nvidia.com/gpu", "15", "16", "2", "1"]
    press(page, "enter")
    assert (page.view, page.nodes.filter) == (top_page.View.FLEET, "nvidia.com/gpu")


def test_devices_of_a_plugin_that_does_not_work_are_listed_and_not_usable() -> None:
    stuck = plugin("node-b", alert("node-b"))
    page = page_of(fleet(plugin("node-a"), stuck))
    assert [line[-14:] for line in screen(page)[3:5]] == ["gpu 8/8 listed", "    -  gpu 8/8"]
    press(page, "4")
    assert screen(page, 120)[3].split() == ["nvidia.com/gpu", "8", "8", "16", "2", "1"]
    # as in `muster why` and `muster status`
    assert usage.of_plugin(stuck, "nvidia.com/gpu") == "8 listed, unconfirmed"
    assert usage.of_plugin(plugin("node-a", usable=7), "nvidia.com/gpu") == "7 of 8"
    recovery = health_state.Recovery(since=T0, until=T0 + dt.timedelta(minutes=2))
    recovering = msgspec.structs.replace(stuck, recovery=recovery)
    assert usage.of_plugin(recovering, "nvidia.com/gpu") == "8"


def test_a_broken_plugin_makes_only_its_own_resources_listed() -> None:
    well, stuck = plugin("node-a"), plugin("node-a", alert("node-a"))
    fuse = msgspec.structs.replace(stuck, plugin="fuse", devices={"x/fuse": 20}, allocatable={})
    page = page_of(fleet(well, fuse))
    assert " gpu 8/8, fuse 20/20 listed " in screen(page, 200)[3]
    press(page, "4")
    assert [line.split() for line in screen(page, 120)[3:5]] == [
        ["x/fuse", "0", "20", "20", "1", "1"],
        ["nvidia.com/gpu", "8", "-", "8", "1", "-"],
    ]


def test_silenced_alerts_are_counted_beyond_those_that_are_listed() -> None:
    names = [f"node-{number:04}" for number in range(top_page.ALERTS_MAX + 3)]
    known = fleet(*(plugin(name, alert(name)) for name in names))
    # sorted after all that are listed
    known.receive_silence("s1", silence(f"node=~{'|'.join(names[-2:])}"), at=T0)
    assert " 2003 alerts firing (2 silenced)" in screen(page_of(known), 120)[0]


def test_an_event_has_the_same_words_in_every_command() -> None:
    change = event(
        vocabulary.VerdictChanged(
            node="node-a",
            at=T0,
            plugin="p",
            verdict=vocabulary.Verdict.STUCK,
            previous=vocabulary.Verdict.HEALTHY,
            rule="r",
        )
    )
    text = "verdict p: HEALTHY -> STUCK (r)"
    assert events.event_line(change) == f"{T0.astimezone():%H:%M:%S} node-a {text}"
    assert top_rows.entry(change).text == text


def test_sorting_goes_through_all_orders_and_starts_at_the_top() -> None:
    page = page_of(fleet(plugin("node-a"), plugin("node-b", alert("node-b"))))
    orders = []
    for _ in top_rows.NODES.sorts:
        orders.append((page.nodes.order, page.nodes.rows(0, 1)[0].name))
        press(page, "s")
    assert orders == [
        ("urgency", "node-b"),
        ("name", "node-a"),
        ("newest", "node-a"),
        ("alerts", "node-b"),
        ("pool", "node-b"),
    ]
    assert page.nodes.order == "urgency"


def test_processes_have_a_view_where_muster_up_has_them() -> None:
    page = page_of(fleet())
    press(page, "5")
    assert page.view is top_page.View.FLEET
    page.receive_processes(
        [
            top_rows.Process("health", 41, "http://127.0.0.1:1", 0),
            top_rows.Process("plugin-node-a", None, "http://127.0.0.1:2", 3),
        ]
    )
    press(page, "5")
    assert [line.split() for line in screen(page)[3:5]] == [
        ["health", "41", "-", "http://127.0.0.1:1"],
        ["plugin-node-a", "stopped", "3", "http://127.0.0.1:2"],
    ]


def test_an_event_of_512_kib_is_cut_and_says_so() -> None:
    evil = vocabulary.LabelsRefused(
        node="a", at=T0, labels={}, reason="x" * 1_000, source="y" * 500_000
    )
    page = page_of(fleet())
    page.receive_events([top_rows.entry(event(evil))])
    press(page, "3", "enter", "end")
    assert "`muster events --json` prints all of it" in " ".join(screen(page))
    assert sum(len(entry.json) for entry in page.events.items()) < 10_000


def test_hostile_texts_change_nothing_but_what_they_show() -> None:
    bad = alert("node-a", summary=HOSTILE.encode("utf-8", "replace").decode(), kind="k\x1b[31m")
    page = page_of(fleet(plugin("node-a", bad)))
    evil = vocabulary.LabelsRefused(node="a", at=T0, labels={}, reason="[red]\x1b[2J\u202e")
    page.receive_events([top_rows.entry(event(evil))])
    page.receive_processes([top_rows.Process(HOSTILE, 1, HOSTILE, 0)])
    for keys in ("1", "2", "3", "4", "5"), ("2", "enter"), ("3", "enter"), ("1", "enter"):
        press(page, "escape", *keys)
        page.receive_why("node-a", [HOSTILE])
        shown = screen(page, width=200)
        assert all(map(str.isprintable, shown))
    press(page, "escape", "2")
    assert "[red]x[/red] �[2J" in screen(page, width=200)[3]


@given(
    st.lists(st.sampled_from(KEYS), max_size=30),
    st.integers(1, 250),
    st.integers(1, 60),
    st.text(max_size=20),
)
@settings(max_examples=60)
def test_any_keys_at_any_size_give_a_screen_of_that_size(
    keys: list[str], width: int, height: int, name: str
) -> None:
    page = page_of(fleet(plugin("node-a"), plugin(f"b{name}", alert("node-b", summary=name * 9))))
    page.receive_events([stopping(number) for number in range(9)])
    for key in keys:
        assert page.press(key)
        frame = page.frame(width, height, now=T0, problem=name, bus_problem="")
        assert len(frame) == max(height, len(frame))
        for line in frame:
            text = "".join(part.text for part in line)
            assert lists.width_of(text) == max(width, 20)
            assert text.isprintable()


@given(st.text(max_size=60), st.integers(0, 40), st.booleans())
def test_a_text_is_fitted_to_the_width_of_its_cells(text: str, width: int, right: bool) -> None:  # noqa: FBT001
    fitted = lists.fit(text, width, is_right=right)
    assert lists.width_of(fitted) == width
    assert fitted.isprintable()


@given(st.text(max_size=200), st.integers(2, 60))
def test_wrapping_loses_nothing_but_spaces(text: str, width: int) -> None:
    wrapped = lists.wrapped(text, width)
    assert all(lists.width_of(line) <= width for line in wrapped)
    shown = "".join("".join(wrapped).split())
    assert shown == "".join(lists.wrapped(text, 10**9)[0].split())


ITEMS: Final = st.lists(
    st.tuples(st.sampled_from("abcdefgh"), st.integers(0, 3), st.booleans()), max_size=8
)
STEPS: Final = st.lists(
    st.tuples(st.sampled_from(("update", "remove", "replace", "filter", "sort", "move")), ITEMS),
    max_size=12,
)


@given(STEPS)
def test_a_list_that_changes_item_by_item_is_as_if_sorted_anew(
    steps: list[tuple[str, list[tuple[str, int, bool]]]],
) -> None:
    kind: lists.Kind[tuple[str, int, bool]] = lists.Kind(
        key=lambda item: item[0],
        node=lambda item: item[0],
        words=lambda item: "even" if item[2] else "odd",
        sorts=(("rank", lambda item: (item[1], item[0])), ("key", lambda item: (item[0],))),
        columns=lambda _: (),
        cells=lambda *_: (),
        empty="",
    )
    listing = lists.Listing(kind)
    expected: dict[str, tuple[str, int, bool]] = {}
    for step, items in steps:
        chosen, row = listing.chosen, listing.cursor
        by_key = {item[0]: item for item in items}
        match step:
            case "update":
                listing.update(list(by_key.values()))
                expected |= by_key
            case "remove":
                listing.update([], by_key)
                expected = {key: item for key, item in expected.items() if key not in by_key}
            case "replace":
                listing.replace(by_key.values())
                expected = by_key
            case "filter":
                listing.set_filter("even" if len(items) % 2 else "")
            case "sort":
                listing.next_order()
            case _:
                listing.move(len(items) - 3)
        passing = [item for item in expected.values() if item[2] or not listing.filter]
        ranked = listing.order == "rank"
        assert listing.rows(0, 99) == sorted(
            passing, key=lambda item: (item[1] if ranked else 0, item[0])
        )
        assert 0 <= listing.cursor <= max(0, len(listing) - 1)
        if step in {"update", "remove", "replace"} and row > 0 and chosen is not None:
            still = [item[0] for item in listing.rows(0, 99)]
            if chosen[0] in still:
                assert still[listing.cursor] == chosen[0]


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(-5, "0s"), (99, "99s"), (100, "1m"), (5_999, "99m"), (6_000, "1h"), (200_000, "2d")],
)
def test_an_age_takes_at_most_five_characters(seconds: int, text: str) -> None:
    assert top_rows.age(T0 - dt.timedelta(seconds=seconds), T0) == text
