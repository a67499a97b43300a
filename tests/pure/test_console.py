"""The console's pure parts: columns, subscribers, alerts, timeline, and their limits."""

import json
import tracemalloc
from datetime import UTC, date, datetime, timedelta
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from muster import codec, matching, vocabulary
from muster.fleet import health_state, model
from muster_console import (
    alert_groups,
    alert_history,
    event_log,
    fleet_json,
    fleet_page,
    plots,
    rendering,
    security,
    subscribers,
    timeline,
)
from tests.worlds.alert_events import event

AT = datetime(2026, 1, 2, 12, 0, 0, tzinfo=UTC)
GPU = "nvidia.com/gpu"
LEADS = health_state.Service(revision=3, advisories="received", cluster={})


def plugin(node: str, verdict: str = "HEALTHY", **more: object) -> health_state.Plugin:
    fields = {
        "node": node,
        "plugin": "device-plugin",
        "verdict": verdict,
        "devices": {GPU: 4},
        "allocatable": {GPU: 4},
        **more,
    }
    return msgspec.convert(fields, health_state.Plugin)


def alert(node: str, number: int = 0, severity: str = "critical") -> health_state.Alert:
    return health_state.Alert(
        fingerprint=f"{number:016x}",
        node=node,
        plugin="device-plugin",
        kind="stuck",
        severity=severity,
        summary=f"stuck on {node}",
        starts_at=AT - timedelta(minutes=5),
    )


def state(*plugins: health_state.Plugin, following: str = "") -> health_state.State:
    return health_state.State(
        plugins=plugins, fleet=health_state.Fleet(), service=LEADS, next=following
    )


def fleet_of(*plugins: health_state.Plugin) -> model.FleetModel:
    fleet = model.FleetModel()
    fleet.receive_page(state(*plugins), after="", now=0.0, at=AT)
    return fleet


def alert_changed(number: int, at: datetime, *, resolved: bool = False) -> vocabulary.AlertChanged:
    return vocabulary.AlertChanged(
        node="node-a",
        at=at,
        plugin="device-plugin",
        kind=vocabulary.AlertKind.STUCK,
        severity=vocabulary.Severity.CRITICAL,
        state=vocabulary.AlertState.RESOLVED if resolved else vocabulary.AlertState.FIRING,
        fingerprint=f"{number:016x}",
        summary="stuck",
        starts_at=AT - timedelta(minutes=5),
        ends_at=at if resolved else None,
    )


def delivered(number: int, *, at: datetime, group: str = "default:{}") -> codec.CloudEvent:
    return event(
        vocabulary.NotificationDelivered(
            node="_fleet",
            at=at,
            receiver="slack",
            group=group,
            reason=vocabulary.NotificationReason.FIRST,
            firing=(f"{number:016x}",),
            answer="HTTP 200",
        ),
        1_000 + number,
    )


# columns


def test_columns_hold_each_text_once() -> None:
    stuck = msgspec.structs.replace(alert("b"), pods=("ml/train\x1b",))
    fleet = fleet_of(plugin("a"), plugin("b", "STUCK", alerts=(stuck,)))
    columns = fleet_json.columns(
        sorted(fleet.nodes.values(), key=lambda node: node.name), revision=9, instance="me"
    )
    assert json.loads(fleet_json.encode(columns)) == {
        "names": ["a", "b"],
        "levels": "40",
        "texts": ["HEALTHY", "STUCK", "device-plugin", ""],
        "kinds": [[[GPU, 4, 4, True]], [[GPU, 4, 4, False]]],
        "verdict": [0, 1],
        "plugin": [2, 2],
        "pool": [3, 3],
        "zone": [3, 3],
        "kind": [0, 1],
        "since": [0, 0],
        "alerts": [0, 1],
        "silenced": [0, 0],
        "pods": {"1": ["ml/train\ufffd"]},
        "removed": [],
        "revision": 9,
        "instance": "me",
    }


@pytest.mark.parametrize(("nodes", "pods_each"), [(1, 16), (1_000, 12), (3_000, 4), (10_000, 1)])
def test_however_many_nodes_have_alerts_the_names_of_pods_stay_bounded(
    nodes: int, pods_each: int
) -> None:
    pods = tuple(f"ml/{number}" for number in range(32))
    (summary,) = fleet_of(
        plugin("a", alerts=(msgspec.structs.replace(alert("a"), pods=pods),))
    ).nodes.values()
    columns = fleet_json.columns([summary] * nodes, revision=1)
    assert {len(names) for names in columns.pods.values()} == {pods_each}
    assert sum(map(len, columns.pods.values())) <= fleet_json.PODS_MAX


# subscribers


def rows(columns: dict[str, Any]) -> dict[str, tuple[str, str]]:
    texts = columns["texts"]
    verdicts = (texts[index] for index in columns["verdict"])
    return dict(zip(columns["names"], zip(columns["levels"], verdicts, strict=True), strict=True))


def everything(fleet: model.FleetModel) -> dict[str, Any]:
    columns = fleet_json.columns(fleet.nodes.values(), revision=fleet.revision)
    decoded: dict[str, Any] = json.loads(fleet_json.encode(columns))
    return decoded


class Page:
    """A stand-in for the page's script, which applies the messages that the page receives."""

    def __init__(self, feed: subscribers.Feed) -> None:
        self.feed = feed
        self.read_all()

    def read_all(self) -> None:
        self.shown = rows(everything(self.feed.fleet))
        revision = self.feed.fleet.revision
        self.subscriber = subscribers.Subscriber(self.feed, revision=revision, events=None)

    def take(self, now: float) -> None:
        self.feed.observe()
        for message in self.subscriber.take(now, AT):
            if message.name == "restart":
                self.read_all()
            elif message.name == "fleet":
                columns = json.loads(message.data)
                self.shown.update(rows(columns))
                for name in columns["removed"]:
                    self.shown.pop(name, None)


def feed_of(fleet: model.FleetModel, log: event_log.EventLog | None = None) -> subscribers.Feed:
    return subscribers.Feed(
        fleet,
        alert_history.AlertHistory(),
        log or event_log.EventLog(),
        instance="me",
        is_connected=lambda: True,
    )


STEPS = st.lists(
    st.one_of(
        st.tuples(
            st.just("change"), st.sampled_from("abcdef"), st.sampled_from(["HEALTHY", "STUCK", ""])
        ),
        st.tuples(st.just("remove"), st.sampled_from("abcdef"), st.just("")),
        st.tuples(st.just("take"), st.sampled_from("01"), st.just("")),
        st.tuples(st.just("forget"), st.just(""), st.just("")),
    ),
    max_size=40,
)


@given(STEPS)
def test_a_page_shows_the_same_however_its_reads_and_the_changes_interleave(
    steps: list[tuple[str, str, str]],
) -> None:
    fleet = fleet_of(plugin("a"), plugin("b"))
    feed = feed_of(fleet)
    pages = [Page(feed), Page(feed)]
    for step, what, verdict in steps:
        match step:
            case "change":
                fleet.receive_node(state(plugin(what, verdict)), what, now=1.0, at=AT)
            case "remove":
                fleet.receive_node(state(), what, now=1.0, at=AT)
            case "take":
                pages[int(what)].take(1.0)
            case _:
                # as if more nodes had been removed than are remembered
                fleet._removed.clear()
                fleet._forgotten = fleet.revision
    for page in pages:
        page.take(2.0)
        assert page.shown == rows(everything(fleet))


def test_what_a_slow_page_has_not_read_is_merged_into_one_message() -> None:
    fleet = fleet_of(plugin("a"))
    feed = feed_of(fleet)
    page = subscribers.Subscriber(feed, revision=fleet.revision, events=None)
    page.take(0.0, AT)
    for number in range(1_000):
        verdict = "STUCK" if number % 2 == 0 else "HEALTHY"
        fleet.receive_node(state(plugin("a", verdict)), "a", now=1.0, at=AT)
        feed.observe()
    fleet.receive_node(state(plugin("a", "STUCK")), "a", now=1.0, at=AT)
    messages = page.take(1.0, AT)
    assert [message.name for message in messages] == ["fleet"]
    assert rows(json.loads(messages[0].data)) == {"a": ("1", "STUCK")}


def test_pages_that_name_many_revisions_do_not_fill_the_memory() -> None:
    names = [f"node-{number:03d}" for number in range(300)]
    fleet = fleet_of(*map(plugin, names))
    for name in names:
        fleet.receive_node(state(plugin(name, "STUCK")), name, now=1.0, at=AT)
    feed = feed_of(fleet)
    largest = len(feed.changes_since(1) or b"")
    tracemalloc.start()
    try:
        for revision in range(fleet.revision):
            feed.changes_since(revision)
        stored, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert fleet.revision > 300
    assert stored < 20 * largest


def test_what_changed_between_the_rendering_of_a_page_and_its_connection_is_sent_at_once() -> None:
    fleet = fleet_of(plugin("a", "STUCK"))
    feed = feed_of(fleet)
    feed.observe()
    shown, alerts = fleet.revision, feed.alerts_revision
    silence = matching.Silence(
        id="s1",
        matchers=("node=a",),
        starts_at=AT,
        ends_at=AT + timedelta(hours=1),
        author="ann",
        comment="known",
    )
    fleet.receive_node(state(plugin("a")), "a", now=1.0, at=AT)
    fleet.receive_silence("s1", silence, at=AT)
    page = subscribers.Subscriber(feed, revision=shown, events=None, alerts=alerts)
    assert [message.name for message in page.take(1.0, AT)] == ["state", "fleet", "alerts"]


def test_state_is_repeated_only_when_it_changes_or_is_due() -> None:
    fleet = fleet_of(plugin("a"))
    page = subscribers.Subscriber(feed_of(fleet), revision=None, events=None)
    names = [[message.name for message in page.take(now, AT)] for now in (0.0, 1.0, 9.0, 10.0)]
    assert names == [["state"], [], [], ["state"]]
    fleet.receive_failure("refused", now=11.0)
    (message,) = page.take(11.0, AT)
    assert "refused" in json.loads(message.data)["problem"]


def test_a_tail_counts_the_events_that_it_could_not_read() -> None:
    log = event_log.EventLog()
    page = subscribers.Subscriber(
        feed_of(fleet_of(), log), revision=None, events=event_log.Filter(type="alert.*"), event=0
    )
    page.take(0.0, AT)
    for number in range(1, subscribers.EVENTS_MAX + 51):
        log.receive(event(alert_changed(number, AT), number))
    (message,) = page.take(1.0, AT)
    tail = json.loads(message.data)
    assert (len(tail["events"]), tail["skipped"]) == (subscribers.EVENTS_MAX, 50)
    assert tail["events"][-1]["id"] == f"e{subscribers.EVENTS_MAX + 50}"
    assert page.take(2.0, AT) == []


# events


def test_the_log_keeps_the_newest_events_once() -> None:
    log = event_log.EventLog()
    for number in range(event_log.EVENTS_MAX + 10):
        for _ in range(2):
            log.receive(event(alert_changed(number, AT + timedelta(seconds=number)), number))
    newest = log.newest(event_log.Filter(), most=event_log.EVENTS_MAX + 100)
    assert len(newest) == event_log.EVENTS_MAX
    assert newest[0].id == f"e{event_log.EVENTS_MAX + 9}"
    assert log.get("e0") is None


def test_large_events_do_not_fill_the_memory() -> None:
    log = event_log.EventLog()
    for number in range(200):
        data = msgspec.structs.replace(alert_changed(number, AT), pods=("p" * 100_000,))
        log.receive(event(data, number))
    kept = log.newest(event_log.Filter(), most=1_000)
    assert 0 < sum(len(entry.encoded) for entry in kept) <= 8 * 1024 * 1024


def test_a_long_event_is_cut_with_its_length() -> None:
    encoded = codec.dump(event(alert_changed(1, AT)))
    whole, no_length = event_log.pretty(encoded, characters_max=None)
    shown, length = event_log.pretty(encoded, characters_max=50)
    assert no_length == 0
    assert length == len(whole)
    assert shown == f"{whole[:50]}\n... (cut)"


# alerts


def test_alerts_are_grouped_as_people_were_notified() -> None:
    fleet = fleet_of(
        plugin("a", "STUCK", alerts=(alert("a", 1),)),
        plugin("b", "STUCK", alerts=(alert("b", 2),)),
        plugin("c", "STUCK", alerts=(alert("c", 3),)),
    )
    history = alert_history.AlertHistory()
    history.receive(delivered(1, at=AT, group="old:{}"), at=AT)
    both = event(
        vocabulary.NotificationFailed(
            node="_fleet",
            at=AT + timedelta(seconds=5),
            receiver="mail",
            group='default:{kind="stuck"}',
            reason=vocabulary.NotificationReason.NEW_ALERTS,
            firing=(f"{1:016x}", f"{2:016x}"),
            error="HTTP 500",
            attempts=3,
        ),
        7,
    )
    for _ in range(2):
        history.receive(both, at=AT)
    view = alert_groups.page(fleet, history, at=AT + timedelta(seconds=10))
    shown = [(g.name, [a.alert.node for a in g.alerts], len(g.deliveries)) for g in view.groups]
    assert shown == [('default:{kind="stuck"}', ["a", "b"], 2), ("", ["c"], 0)]
    newest = view.groups[0].deliveries[0]
    assert (newest.is_failed, newest.outcome, newest.attempts) == (True, "HTTP 500", 3)


def test_an_alert_is_not_shown_as_notified_by_what_was_said_of_an_earlier_one() -> None:
    """Alerts about the verdicts on one plugin have the same fingerprint."""
    fingerprint = f"{1:016x}"

    def about(seconds: int, kind: str, *, is_over: bool = False) -> codec.CloudEvent:
        reasons = vocabulary.NotificationReason
        return event(
            vocabulary.NotificationDelivered(
                node="_fleet",
                at=AT + timedelta(seconds=seconds),
                receiver="slack",
                group=f'default:{{kind="{kind}"}}',
                reason=reasons.ALL_RESOLVED if is_over else reasons.FIRST,
                firing=() if is_over else (fingerprint,),
                resolved=(fingerprint,) if is_over else (),
            ),
            seconds,
        )

    stuck = msgspec.structs.replace(alert("a", 1), starts_at=AT + timedelta(seconds=120))
    fleet = fleet_of(plugin("a", "STUCK", alerts=(stuck,)))
    history = alert_history.AlertHistory()
    at = AT + timedelta(seconds=200)
    # the earlier alert may be reported as resolved after the later one has begun
    for earlier in (about(10, "deregistered"), about(150, "deregistered", is_over=True)):
        history.receive(earlier, at=at)
    shown = alert_groups.page(fleet, history, at=at).groups
    assert [(group.name, group.deliveries) for group in shown] == [("", ())]
    history.receive(about(121, "stuck"), at=at)
    (group,) = alert_groups.page(fleet, history, at=at).groups
    shown_deliveries = [(each.at, each.reason, each.times) for each in group.deliveries]
    assert (group.name, shown_deliveries) == (
        'default:{kind="stuck"}',
        [(AT + timedelta(seconds=121), "first", 1)],
    )


def test_of_a_receiver_that_keeps_failing_the_last_failure_is_shown_with_their_number() -> None:
    history = alert_history.AlertHistory()
    history.receive(delivered(1, at=AT), at=AT)
    for number in range(36):
        failed = vocabulary.NotificationFailed(
            node="_fleet",
            at=AT + timedelta(seconds=number),
            receiver="ops",
            group="default:{}",
            reason=vocabulary.NotificationReason.FIRST,
            firing=(f"{1:016x}",),
            error="HTTP 401",
        )
        history.receive(event(failed, number), at=AT)
    deliveries = history.deliveries(AT + timedelta(seconds=40))
    shown = [
        (each.receiver, each.is_failed, each.times)
        for each in alert_history.outcomes(deliveries, most=5)
    ]
    assert shown == [("ops", True, 36), ("slack", False, 1)]
    again = [msgspec.structs.replace(each, reason="repeat") for each in deliveries[:1]]
    kept = alert_history.outcomes([*again, *deliveries], most=2)
    assert [(each.receiver, each.reason) for each in kept] == [
        ("ops", "repeat"),
        ("slack", "first"),
    ]


def test_a_silenced_alert_is_marked() -> None:
    fleet = fleet_of(plugin("a", "STUCK", alerts=(alert("a", 1),)))
    fleet.receive_silence(
        "s1",
        matching.Silence(
            id="s1",
            matchers=('node="a"',),
            starts_at=AT,
            ends_at=AT + timedelta(hours=1),
            author="ann",
            comment="driver update",
        ),
        at=AT,
    )
    view = alert_groups.page(fleet, alert_history.AlertHistory(), at=AT)
    (shown,) = view.groups[0].alerts
    assert shown.silence is not None
    assert (shown.silence.author, view.silenced) == ("ann", 1)


def test_ten_thousand_alerts_are_counted_and_the_most_urgent_shown() -> None:
    alerts = tuple(alert("a", n, "warning" if n else "critical") for n in range(10_000))
    fleet = fleet_of(plugin("a", "STUCK", alerts=alerts))
    view = alert_groups.page(fleet, alert_history.AlertHistory(), at=AT)
    assert (view.firing, view.matched) == (10_000, 10_000)
    assert sum(len(group.alerts) for group in view.groups) == alert_groups.ALERTS_MAX
    assert view.groups[0].alerts[0].alert.severity == "critical"


def test_the_command_to_silence_an_alert_is_quoted() -> None:
    hostile = health_state.Alert(kind="stuck", node='a"; rm -rf / #', resource=GPU)
    assert alert_groups.silence_command(hostile) == (
        'muster silence add \'kind="stuck"\' \'node="a\\"; rm -rf / #"\' '
        "'resource=\"nvidia.com/gpu\"' --duration 2h --comment WHY"
    )


def test_an_alert_about_one_device_is_silenced_for_that_device() -> None:
    lost = health_state.Alert(kind="device_unhealthy", node="a", resource=GPU, devices=("GPU-1",))
    assert alert_groups.matchers_of(lost) == (
        'kind="device_unhealthy"',
        'node="a"',
        'resource="nvidia.com/gpu"',
        'device="GPU-1"',
    )
    more = health_state.Alert(kind="device_unhealthy", node="a", devices=("GPU-1", "GPU-2"))
    assert alert_groups.matchers_of(more) == ('kind="device_unhealthy"', 'node="a"')


def test_resolved_alerts_are_kept_for_a_day_and_counted_once_per_day() -> None:
    history = alert_history.AlertHistory()
    for _ in range(2):
        history.receive(event(alert_changed(1, AT - timedelta(minutes=5))), at=AT)
        history.receive(event(alert_changed(1, AT, resolved=True), 2), at=AT)
    assert [each.ends_at for each in history.resolved(AT)] == [AT]
    assert history.resolved(AT + timedelta(days=1)) == []
    assert history.per_day(date(2026, 1, 2))[-1] == (date(2026, 1, 2), {"critical": 1})


# the page of the fleet


def test_the_worst_nodes_come_first_and_filters_apply() -> None:
    fleet = fleet_of(
        plugin("a"),
        plugin("b", "STUCK"),
        plugin("c", "STUCK", alerts=(msgspec.structs.replace(alert("c"), pods=("ml/train",)),)),
    )
    history, log = alert_history.AlertHistory(), event_log.EventLog()

    def listed(query: dict[str, str]) -> list[str]:
        wanted = fleet_page.filter_of(query)
        view = fleet_page.page(fleet, history, log, wanted=wanted, at=AT)
        return [each.node.name for each in view.problems]

    assert listed({}) == ["c", "b"]
    assert listed({"level": "critical,nonsense"}) == ["c"]
    assert listed({"level": "ok"}) == ["a"]
    assert listed({"q": "STUCK b"}) == ["b"]
    assert listed({"q": "Train"}) == ["c"]


# the timeline


def verdict(name: str, at: datetime, previous: str) -> codec.CloudEvent:
    data = vocabulary.VerdictChanged(
        node="node-a",
        at=at,
        plugin="device-plugin",
        verdict=vocabulary.Verdict(name),
        previous=vocabulary.Verdict(previous),
        rule="r",
    )
    return event(data)


def test_verdicts_are_bars_that_fill_the_time() -> None:
    start = AT - timedelta(hours=1)
    drawn = timeline.timeline(
        [
            verdict("STUCK", AT - timedelta(hours=2), "HEALTHY"),
            verdict("HEALTHY", AT - timedelta(minutes=30), "STUCK"),
        ],
        [plugin("node-a")],
        [],
        start=start,
        end=AT,
    )
    (lane,) = drawn.lanes
    assert [(bar.label, bar.level, bar.x, bar.width) for bar in lane.bars] == [
        ("STUCK", "critical", 4.0, 496.0),
        ("HEALTHY", "ok", 500.0, 496.0),
    ]


def test_without_a_change_the_present_verdict_begins_when_health_says() -> None:
    stuck = plugin("node-a", "STUCK", since=AT - timedelta(minutes=15))
    drawn = timeline.timeline([], [stuck], [], start=AT - timedelta(hours=1), end=AT)
    assert [bar.level for bar in drawn.lanes[0].bars] == ["unknown", "critical"]


@given(
    st.lists(st.integers(-10_000, 10_000), max_size=30), st.sampled_from(sorted(timeline.RANGES))
)
def test_nothing_is_drawn_outside_whatever_the_clocks_say(offsets: list[int], shown: str) -> None:
    changes = [verdict("STUCK", AT + timedelta(seconds=each), "HEALTHY") for each in offsets]
    start = AT - timeline.RANGES[shown]
    drawn = timeline.timeline(changes, [plugin("node-a")], [], start=start, end=AT)
    for lane in drawn.lanes:
        for bar in lane.bars:
            assert bar.width > 0
            assert 0 <= bar.x <= bar.x + bar.width <= timeline.WIDTH


def test_a_restart_is_marked_once_and_not_a_new_connection() -> None:
    def started(instance: str, minutes: int) -> codec.CloudEvent:
        at = AT - timedelta(minutes=minutes)
        data = vocabulary.PluginStarted(
            node="node-a", at=at, plugin="device-plugin", version="1", instance=instance
        )
        return event(data, minutes)

    marks = timeline.timeline(
        [started("one", 50), started("one", 40), started("two", 30)],
        [],
        [],
        start=AT - timedelta(hours=1),
        end=AT,
    ).marks
    assert [(mark.kind, mark.at) for mark in marks] == [
        ("restart", AT - timedelta(minutes=50)),
        ("restart", AT - timedelta(minutes=30)),
    ]


# plots, durations, hosts


def test_a_part_never_looks_like_the_whole() -> None:
    assert [plots.bar_width(*each) for each in ((0, 0), (0, 8), (8, 8), (9_999, 10_000))] == [
        0.0,
        0.0,
        100.0,
        98.5,
    ]


def test_bars_per_day_end_on_the_axis() -> None:
    days = [(date(2026, 1, day), {"critical": day, "info": 1}) for day in range(1, 15)]
    plot = plots.alerts_per_day(days)
    assert plot.top == 20
    assert {round(r.y + r.height, 1) for r in plot.rects if r.level == "critical"} == {108.0}


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(-5, "0 s"), (59, "59 s"), (61, "1 min"), (3_600, "1 h"), (100_000, "27 h"), (172_800, "2 d")],
)
def test_durations_are_in_their_largest_unit(seconds: int, text: str) -> None:
    assert rendering.duration(timedelta(seconds=seconds)) == text


@pytest.mark.parametrize(
    ("header", "is_known"),
    [
        ("localhost", True),
        ("localhost:8630", True),
        ("127.0.0.1:8630", True),
        ("127.9.9.9", True),
        ("[::1]:8630", True),
        ("[::1]", True),
        ("CONSOLE.example.com:443", True),
        ("console.example.com.", True),
        ("", False),
        ("evil.example.com", False),
        ("localhost.evil.com", False),
        ("10.0.0.1:8630", True),
        ("127.0.0.1.evil.com", False),
        ("127.0.0.1@evil.com", False),
        ("[fd00::2]:8630", True),
        ("localhost:8630:1", False),
    ],
)
def test_only_names_of_this_console_are_answered(header: str, is_known: bool) -> None:  # noqa: FBT001
    assert security.is_known_host(header, {"console.example.com"}) is is_known
