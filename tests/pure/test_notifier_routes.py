"""Routes, inhibition, silences and mute times: cases of Alertmanager, and scenarios."""

import datetime as dt
import re
from collections.abc import Sequence

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from muster import codec, matching, vocabulary
from muster.vocabulary import AlertKind, AlertState, Severity
from muster.vocabulary import NotificationReason as Reason
from muster_notifier.config import receiver_settings, schema
from muster_notifier.routing import alert_index, grouping, muting, notifications, routes
from muster_notifier.routing.notifications import Notification

T0 = dt.datetime(2026, 1, 1, 12, 0, tzinfo=dt.UTC)  # a Thursday


def route(*texts: str, to: str = "", goes_on: bool = False, **more: object) -> schema.Route:
    return schema.Route(
        matchers=texts,
        receivers=tuple(to.split()) or None,
        continue_=goes_on,
        **more,  # type: ignore[arg-type]
    )


def settings(*given_: schema.Route, **more: object) -> schema.Settings:
    names = "default ops pager team night"
    return schema.Settings(
        resolve_wait_s=None,  # the end waits for `group_interval_s`, as in Alertmanager
        receivers=tuple(
            receiver_settings.Receiver(name=name, console=receiver_settings.Console())
            for name in names.split()
        ),
        default_receivers=("default",),
        routes=given_,
        **more,  # type: ignore[arg-type]
    )


@pytest.mark.parametrize(
    ("text", "texts", "holds"),
    [
        ('a="1"', ['a="1"'], True),
        ("a=1", ['a="1"'], True),
        ("a != 1", ['a!="1"'], False),
        ('{a="1", b=~"x|y"}', ['a="1"', 'b=~"x|y"'], True),
        ('b=~"x"', ['b=~"x"'], False),
        ('b!~"x"', ['b!~"x"'], True),
        ('c=""', ['c=""'], True),
        ('c!=""', ['c!=""'], False),
        ('c=~".*"', ['c=~".*"'], True),
        (r'a="\"\\\n"', [r'a="\"\\\n"'], False),
        ("b=x y, a=1", ['b="x y"', 'a="1"'], False),
    ],
)
def test_matchers_are_alertmanagers(text: str, texts: list[str], *, holds: bool) -> None:
    parsed = matching.parse(text)
    assert [str(matcher_) for matcher_ in parsed] == texts
    assert matching.all_hold(parsed, {"a": "1", "b": "y"}) is holds


@pytest.mark.parametrize(
    "text", ["", "{}", "a", "a=", '{a="1"', 'a="1" b="2"', 'a=~"("', "=x", 'a="1', 'a=="1"']
)
def test_what_is_no_matcher_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        matching.parse(text)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (r'a=~"(x)\\1"', "invalid escape sequence"),
        ('a=~"(?=x)"', "invalid perl operator"),
        ('a=~"((x{1,1000}){1,1000}){1,1000}"', "repetition"),
    ],
)
def test_what_could_take_for_ever_to_match_is_refused(text: str, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        matching.parse(text)


def test_no_expression_takes_long_to_match() -> None:
    parsed = matching.parse('node=~"([a-z0-9]+-?)*X"')
    assert not matching.all_hold(parsed, {"node": "gpu-node-" + "a" * 200})


@given(value=st.text(max_size=50))
def test_a_matcher_reads_what_it_writes(value: str) -> None:
    matcher_ = matching.matcher("a", matching.Operator.EQUAL, value)
    assert matching.parse(str(matcher_)) == (matcher_,)


@pytest.mark.parametrize(
    ("labels", "receivers"),
    [
        ({}, ["default"]),
        ({"severity": "critical"}, ["pager", "ops"]),
        ({"severity": "critical", "node": "gpu-1"}, ["team", "ops"]),
        ({"severity": "warning"}, ["ops"]),
        ({"severity": "info", "kind": "stuck"}, ["default"]),
        ({"kind": "flapping"}, ["night"]),
    ],
)
def test_an_alert_goes_to_the_deepest_routes_that_match(
    labels: dict[str, str], receivers: list[str]
) -> None:
    root = schema.route_tree(
        settings(
            route(
                'severity="critical"',
                to="pager",
                goes_on=True,
                routes=(route('node=~"gpu-.*"', to="team"),),
            ),
            route('severity=~"critical|warning"', to="ops"),
            route('kind="flapping"', to="night"),
            route('kind="flapping"', to="ops"),
        )
    )
    assert [name for route in root.find(labels) for name in route.receivers] == receivers


def test_a_route_inherits_all_but_mute_times() -> None:
    root = schema.route_tree(
        settings(
            route(
                'severity="critical"',
                to="pager",
                group_by=("kind",),
                group_wait_s=1.0,
                mute_times=("nights",),
                routes=(route('node="a"', repeat_interval_s=9.0),),
            ),
            time_intervals=(schema.TimeInterval(name="nights", time_intervals=(schema.Times(),)),),
        )
    )
    (child,) = root.children[0].children
    assert child == routes.Route(
        key='{}/{severity="critical"}/{node="a"}',
        receivers=("pager",),
        group_by=("kind",),
        timing=routes.Timing(group_wait_s=1.0, group_interval_s=300, repeat_interval_s=9.0),
        matchers=matching.parse('node="a"'),
    )


def rule(source: str, target: str, *equal: str) -> muting.Rule:
    return muting.Rule(
        name="r", source=matching.parse(source), target=matching.parse(target), equal=equal
    )


def test_a_source_that_fires_mutes_targets_with_equal_labels() -> None:
    inhibition = muting.Inhibition([rule('kind="node_down"', 'kind!="node_down"', "node")])
    inhibition.add_firing("f1", {"kind": "node_down", "node": "a"})
    assert inhibition.inhibited_by({"kind": "stuck", "node": "a"}) == muting.Inhibited("f1", "r")
    assert inhibition.inhibited_by({"kind": "stuck", "node": "b"}) is None
    assert inhibition.inhibited_by({"kind": "node_down", "node": "a"}) is None
    inhibition.remove("f1")
    assert inhibition.inhibited_by({"kind": "stuck", "node": "a"}) is None


def test_labels_that_neither_has_are_equal() -> None:
    inhibition = muting.Inhibition([rule('kind="a"', 'kind="b"', "rack")])
    inhibition.add_firing("f1", {"kind": "a"})
    assert inhibition.inhibited_by({"kind": "b"}) is not None
    assert inhibition.inhibited_by({"kind": "b", "rack": "1"}) is None


def test_an_alert_on_both_sides_is_inhibited_only_by_one_that_is_on_one_side() -> None:
    inhibition = muting.Inhibition([rule('severity=~"critical|warning"', 'severity="warning"')])
    inhibition.add_firing("f1", {"severity": "warning"})
    assert inhibition.inhibited_by({"severity": "warning"}) is None
    inhibition.add_firing("f2", {"severity": "critical"})
    assert inhibition.inhibited_by({"severity": "warning"}) == muting.Inhibited("f2", "r")


def test_a_source_that_changes_its_labels_is_a_source_no_more() -> None:
    inhibition = muting.Inhibition([rule('kind="node_down"', 'kind="stuck"')])
    inhibition.add_firing("f1", {"kind": "node_down"})
    inhibition.add_firing("f1", {"kind": "plugin_down"})
    assert inhibition.inhibited_by({"kind": "stuck"}) is None


@pytest.mark.parametrize(
    ("parts", "inside", "outside"),
    [
        ({"times": [("09:00", "17:00")]}, "2026-01-01T09:00", "2026-01-01T17:00"),
        ({"times": [("22:00", "24:00")]}, "2026-01-01T23:59", "2026-01-02T00:00"),
        ({"weekdays": ["monday:thursday"]}, "2026-01-01T00:00", "2026-01-02T00:00"),
        ({"weekdays": ["saturday", "sunday"]}, "2026-01-04T00:00", "2026-01-05T00:00"),
        ({"days_of_month": ["1:5"]}, "2026-01-05T00:00", "2026-01-06T00:00"),
        ({"days_of_month": ["-3:-1"]}, "2026-02-26T00:00", "2026-02-25T00:00"),
        ({"days_of_month": ["29:31"]}, "2026-01-30T00:00", "2026-02-28T00:00"),
        ({"months": ["january:march", "12"]}, "2026-12-01T00:00", "2026-04-01T00:00"),
        ({"years": ["2026:2027"]}, "2027-06-01T00:00", "2028-01-01T00:00"),
        (
            {"times": [("09:00", "10:00")], "location": "Europe/Berlin"},
            "2026-07-01T07:30",
            "2026-01-01T07:30",
        ),
        (
            {"weekdays": ["thursday"], "times": [("00:00", "12:00")]},
            "2026-01-01T11:59",
            "2026-01-01T12:00",
        ),
    ],
)
def test_time_intervals_are_alertmanagers(
    parts: dict[str, list[str]], inside: str, outside: str
) -> None:
    interval = muting.interval(**parts)  # type: ignore[arg-type]
    assert interval.contains(dt.datetime.fromisoformat(inside).replace(tzinfo=dt.UTC))
    assert not interval.contains(dt.datetime.fromisoformat(outside).replace(tzinfo=dt.UTC))


@pytest.mark.parametrize(
    ("parts", "problem"),
    [
        ({"times": [("9:00", "17:00")]}, "times: '9:00' is not a time of day such as 09:30"),
        (
            {"times": [("17:00", "09:00")]},
            "times: 17:00 is not before 09:00; use two ranges to cross midnight",
        ),
        ({"weekdays": ["funday"]}, "weekdays: 'funday' is neither a valid value nor a range"),
        ({"weekdays": ["friday:monday"]}, "weekdays: 'friday:monday' ends before it begins"),
        ({"days_of_month": ["0"]}, "days_of_month: 0 is not a day of a month"),
        (
            {"days_of_month": ["-1:5"]},
            "days_of_month: '-1:5': the end must be negative if the start is",
        ),
        ({"days_of_month": ["32"]}, "days_of_month: 32 is not a day of a month"),
        ({"months": ["13"]}, "months: '13' is neither a valid value nor a range"),
        ({"years": ["x"]}, "years: 'x' is neither a valid value nor a range"),
        ({"location": "Mars/Olympus"}, "location: unknown time zone 'Mars/Olympus'"),
    ],
)
def test_what_is_no_time_interval_is_refused(parts: dict[str, list[str]], problem: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(problem)}$"):
        muting.interval(**parts)  # type: ignore[arg-type]


class Story:
    """A grouping machine on a virtual clock, with receivers that accept everything at once."""

    def __init__(self, settings_: schema.Settings) -> None:
        self.muting = schema.initial_muting(settings_)
        self.machine = grouping.Grouping(
            {receiver.name: receiver.send_resolved for receiver in settings_.receivers},
            root=schema.route_tree(settings_),
            owners=schema.owners_route(settings_),
            ungrouped=schema.ungrouped_receivers(settings_),
            acknowledging=schema.acknowledging_receivers(settings_),
            muted_by=self.muting,
            at=T0,
            now=0.0,
        )
        self.sequence = 0
        self.summary: list[tuple[float, str, Reason, str]] = []
        self.sent: list[Notification] = []

    def says(self, now: float, name: str, state: str, **about: object) -> None:
        self.until(now)
        self.machine.receive(self.event(now, name, state, **about), now)

    def event(self, now: float, name: str, state: str, **about: object) -> codec.CloudEvent:
        self.sequence += 1
        at = T0 + dt.timedelta(seconds=now)
        alert = vocabulary.AlertChanged(
            node=str(about.get("node", "node-a")),
            at=at,
            plugin="plugin",
            kind=AlertKind(str(about.get("kind", "stuck"))),
            severity=Severity(str(about.get("severity", "critical"))),
            state=AlertState(state),
            fingerprint=f"{name:0>16}",
            summary=name,
            starts_at=T0,
            ends_at=at if state == "resolved" else None,
            pods=about.get("pods", ()),  # type: ignore[arg-type]  # those of a test
            pods_total=9 if "pods" in about else 0,
        )
        return codec.CloudEvent(
            id=str(self.sequence),
            source="/health",
            type=alert.TYPE,
            time=at,
            instance="1",
            sequence=self.sequence,
            boot="",
            data=alert,
            position=self.sequence,
        )

    def silence(self, now: float, *texts: str, hours: float = 1.0, id_: str = "s1") -> None:
        self.until(now)
        starts_at = T0 + dt.timedelta(seconds=now)
        silence = matching.Silence(
            id=id_,
            matchers=texts,
            starts_at=starts_at,
            ends_at=starts_at + dt.timedelta(hours=hours),
            author="ann",
            comment="known",
        )
        self.machine.receive(muting.SilenceChanged(id_, silence), now)

    def until(self, now: float) -> list[tuple[float, str, Reason, str]]:
        while (at := self.machine.next_deadline()) is not None and at <= now:
            sent: Sequence[Notification] = self.machine.tick(at)
            while sent:
                self.sent += sent
                self.summary += [(at, n.receiver, n.reason, names(n)) for n in sent]
                sent = [
                    more for n in sent for more in self.machine.receive(grouping.Delivered(n), at)
                ]
        return self.summary


def names(notification: Notification) -> str:
    alerts = (*notification.firing, *notification.notified_resolved)
    return "".join(sorted(alert.fingerprint.lstrip("0") for alert in alerts))


def simple(**more: object) -> schema.Settings:
    return settings(group_by=("node",), **more)


def test_what_is_inhibited_is_not_sent_until_its_source_ends() -> None:
    down = schema.InhibitRule(
        source_matchers=('kind="node_down"',),
        target_matchers=('kind!="node_down"',),
        equal=("node",),
    )
    story = Story(simple(inhibit_rules=(down,)))
    story.says(0, "a", "firing", kind="node_down")
    story.says(1, "b", "firing", kind="stuck")
    story.says(2, "c", "firing", kind="stuck", node="node-b")
    story.says(100, "a", "resolved", kind="node_down")
    assert story.until(1000) == [
        (30.0, "default", Reason.FIRST, "a"),
        (32.0, "default", Reason.FIRST, "c"),
        (330.0, "default", Reason.NEW_ALERTS, "ab"),
    ]


def test_what_is_silenced_is_not_sent_while_the_silence_lasts() -> None:
    story = Story(simple())
    story.silence(0, 'kind="stuck"', 'node=~"node-.*"', hours=0.5)
    story.says(1, "a", "firing")
    story.says(1, "b", "firing", kind="missing", node="node-b")
    assert story.until(1799) == [(31.0, "default", Reason.FIRST, "b")]
    view = [group.muted for group in story.machine.view(0.0) if group.muted]
    assert view == [{"0" * 15 + "a": "silenced: s1"}]
    assert story.until(2200)[1:] == [(1831.0, "default", Reason.FIRST, "a")]


def test_a_silence_that_is_expired_by_hand_is_over() -> None:
    story = Story(simple())
    story.silence(0, 'kind="stuck"')
    story.says(1, "a", "firing")
    story.until(100)
    story.machine.receive(muting.SilenceChanged("s1", None), 100.0)
    assert story.until(400) == [(331.0, "default", Reason.FIRST, "a")]


def test_the_end_of_what_was_sent_is_sent_through_a_silence() -> None:
    story = Story(simple())
    story.says(0, "a", "firing")
    story.silence(100, 'kind="stuck"')
    story.says(200, "a", "resolved")
    assert story.until(10_000) == [
        (30.0, "default", Reason.FIRST, "a"),
        (330.0, "default", Reason.ALL_RESOLVED, "a"),
    ]


def test_what_fires_and_ends_within_a_silence_is_never_sent() -> None:
    story = Story(simple())
    story.silence(0, 'kind="stuck"')
    story.says(0, "a", "firing")
    story.says(400, "a", "resolved")
    assert story.until(10_000) == []
    assert story.machine.view(10_000.0) == []


def paged() -> schema.Settings:
    key = receiver_settings.PagerDuty(routing_key_from=receiver_settings.Secret(env="KEY"))
    receivers = (
        receiver_settings.Receiver(name="default", console=receiver_settings.Console()),
        receiver_settings.Receiver(name="pager", pagerduty=key),
    )
    return schema.Settings(
        group_by=("node",), resolve_wait_s=None, repeat_interval_s=3600, receivers=receivers
    )


def test_a_pager_is_notified_once_that_somebody_has_silenced_all_of_it() -> None:
    story = Story(paged())
    story.says(0, "a", "firing")
    story.silence(100, 'kind="stuck"', hours=1)
    story.says(110, "b", "firing")
    story.until(3000)
    story.says(3700, "a", "resolved")
    assert [sent for sent in story.until(20_000) if sent[1] == "pager"] == [
        (30.0, "pager", Reason.FIRST, "a"),
        (330.0, "pager", Reason.ACKNOWLEDGED, "a"),
        (3930.0, "pager", Reason.NEW_ALERTS, "ab"),
        (7530.0, "pager", Reason.REPEAT, "b"),
        (11_130.0, "pager", Reason.REPEAT, "b"),
        (14_730.0, "pager", Reason.REPEAT, "b"),
        (18_330.0, "pager", Reason.REPEAT, "b"),
    ]
    assert Reason.ACKNOWLEDGED not in {sent[2] for sent in story.summary if sent[1] == "default"}


def test_a_pager_is_not_notified_that_half_of_it_is_silenced() -> None:
    story = Story(paged())
    story.says(0, "a", "firing")
    story.says(0, "b", "firing", kind="missing")
    story.silence(100, 'kind="stuck"', hours=1)
    assert [sent for sent in story.until(3600) if sent[1] == "pager"] == [
        (30.0, "pager", Reason.FIRST, "ab")
    ]


def test_what_was_acknowledged_is_not_acknowledged_again_after_a_restart() -> None:
    story = Story(paged())
    story.says(0, "a", "firing")
    story.silence(100, 'kind="stuck"', hours=1)
    story.until(100)
    entry = notifications.LedgerEntry(
        receiver="pager",
        group='{}:{node="node-a"}',
        reason=Reason.ACKNOWLEDGED,
        firing=("0" * 15 + "a",),
        resolved=(),
        at=T0 + dt.timedelta(seconds=330),
        id="x",
        attempts=1,
    )
    again = Story(paged())
    again.silence(0, 'kind="stuck"', hours=1)
    again.machine.restore([entry], [], [story.event(0, "a", "firing")], now=400.0)
    assert [sent for sent in again.until(3500) if sent[1] == "pager"] == []


def test_reminders_are_silenced_too() -> None:
    story = Story(simple(repeat_interval_s=600.0))
    story.says(0, "a", "firing")
    story.silence(100, 'kind="stuck"', hours=0.5)
    assert story.until(2000) == [
        (30.0, "default", Reason.FIRST, "a"),
    ]
    assert story.until(2200)[1:] == [(2130.0, "default", Reason.REPEAT, "a")]


def test_planned_work_on_a_plugin_silences_it_by_itself() -> None:
    story = Story(simple())

    def verdict(now: float, what: vocabulary.Verdict) -> None:
        story.until(now)
        at = T0 + dt.timedelta(seconds=now)
        data = vocabulary.VerdictChanged(
            node="node-a", at=at, plugin="plugin", verdict=what, rule="r"
        )
        event = story.event(now, "x", "firing")
        story.machine.receive(
            codec.CloudEvent(
                id="v",
                source=event.source,
                type=data.TYPE,
                time=at,
                instance="1",
                sequence=event.sequence,
                boot="",
                data=data,
            ),
            now,
        )

    verdict(0, vocabulary.Verdict.MAINTENANCE)
    story.says(1, "a", "firing")
    story.says(1, "b", "firing", node="node-b")
    story.says(400, "c", "firing", kind="maintenance_overdue")
    assert story.until(700) == [
        (31.0, "default", Reason.FIRST, "b"),
        (631.0, "default", Reason.FIRST, "c"),
    ]
    verdict(700, vocabulary.Verdict.HEALTHY)
    assert story.until(1000)[2:] == [(931.0, "default", Reason.NEW_ALERTS, "ac")]


NOON = schema.TimeInterval(
    name="noon",
    time_intervals=(schema.Times(times=(schema.TimeRange(start_time="12:00", end_time="12:20"),)),),
)


def test_a_muted_route_sends_afterwards_what_still_fires_and_what_has_ended() -> None:
    story = Story(simple(time_intervals=(NOON,), mute_times=("noon",)))
    story.says(0, "a", "firing")
    story.says(0, "b", "firing")
    story.says(600, "b", "resolved")
    assert story.until(1229) == []
    assert story.until(1400) == [(1230.0, "default", Reason.FIRST, "a")]


def test_an_active_time_is_the_only_time() -> None:
    story = Story(simple(time_intervals=(NOON,), active_times=("noon",)))
    story.says(1300, "a", "firing")
    assert story.until(20_000) == []


def test_an_alert_that_becomes_urgent_reaches_the_pager_and_leaves_where_it_was() -> None:
    story = Story(settings(route('severity="critical"', to="pager"), group_by=("node",)))
    story.says(0, "a", "firing", severity="warning")
    story.says(100, "a", "firing", severity="critical")
    story.says(1000, "a", "resolved", severity="critical")
    assert story.until(10_000) == [
        (30.0, "default", Reason.FIRST, "a"),
        (130.0, "pager", Reason.FIRST, "a"),
        (330.0, "default", Reason.ALL_RESOLVED, "a"),
        (1030.0, "pager", Reason.ALL_RESOLVED, "a"),
    ]


def test_the_owner_of_a_workload_is_notified_beside_others_also_of_the_end() -> None:
    story = Story(simple(owners=schema.Owners(receivers=("team",))))
    story.says(0, "a", "firing", pods=("ml/mine", "x/other"))
    event = story.event(0, "a", "firing", pods=("ml/mine", "x/other"))
    owned = alert_index.OwnedAlert(event, {"team": ("ml/mine",), "ops": ("x/other",)})
    story.machine.receive(owned, 0.0)
    story.says(100, "a", "resolved", pods=("ml/mine", "x/other"))
    assert story.until(1000) == [
        (30.0, "default", Reason.FIRST, "a"),
        (30.0, "team", Reason.FIRST, "a"),
        (330.0, "default", Reason.ALL_RESOLVED, "a"),
        (330.0, "team", Reason.ALL_RESOLVED, "a"),
    ]
    sent = {
        n.receiver: (n.why, n.pods_total, *(a.pods for a in (*n.firing, *n.resolved)))
        for n in story.sent
    }
    why = (
        "the annotation muster.dev/notify on these pods, or on their namespace, names this receiver"
    )
    # an owner sees neither the pods of others nor their number
    assert sent == {"default": ("", 9, ("ml/mine", "x/other")), "team": (why, 1, ("ml/mine",))}


def test_owners_that_are_not_looked_up_yet_change_nothing_for_notified_ones() -> None:
    story = Story(simple(owners=schema.Owners(receivers=("team",))))
    owned = alert_index.OwnedAlert(
        story.event(0, "a", "firing", pods=("ml/p",)), {"team": ("ml/p",)}
    )
    story.machine.receive(owned, 0.0)
    story.says(100, "a", "firing", pods=("ml/p", "ml/q"))
    assert [sent for sent in story.until(1000) if sent[1] == "team"] == [
        (30.0, "team", Reason.FIRST, "a")
    ]
    story.machine.receive(alert_index.OwnedAlert(story.event(1000, "a", "firing"), {}), 1000.0)
    assert [sent for sent in story.until(2000) if sent[1] == "team"][1:] == [
        (1230.0, "team", Reason.ALL_RESOLVED, "a")
    ]


def test_an_owner_notified_before_a_restart_is_notified_of_the_end_after_it() -> None:
    story = Story(simple(owners=schema.Owners(receivers=("team",))))
    entry = notifications.LedgerEntry(
        receiver="team",
        group='owner:{kind="stuck",node="node-a"}',
        reason=Reason.FIRST,
        firing=("0" * 15 + "a",),
        resolved=(),
        at=T0 - dt.timedelta(seconds=100),
        id="x",
        attempts=1,
    )
    story.machine.restore([entry], [], [story.event(0, "a", "firing")], now=0.0)
    assert [sent for sent in story.until(1000) if sent[1] == "team"] == []
    story.says(1000, "a", "resolved")
    assert [sent for sent in story.until(2000) if sent[1] == "team"] == [
        (1030.0, "team", Reason.ALL_RESOLVED, "a")
    ]


def test_every_label_can_make_a_group_of_its_own() -> None:
    story = Story(settings(group_by=("...",)))
    story.says(0, "a", "firing")
    story.says(0, "b", "firing", kind="missing")
    assert [what[3] for what in story.until(30)] == ["b", "a"]


def test_an_alertmanager_gets_each_alert_by_itself_and_the_end_of_what_has_changed() -> None:
    push = receiver_settings.Alertmanager(url="http://am:9093")
    receivers = (receiver_settings.Receiver(name="am", alertmanager=push),)
    story = Story(schema.Settings(receivers=receivers, group_by=("kind",), resolve_wait_s=None))
    for number in range(300):
        story.says(0, f"{number:x}", "firing", node=f"n{number}", severity="warning")
    story.until(30)
    assert {len(n.firing) for n in story.sent} == {1}
    assert len(story.sent) == 300
    story.says(100, "0", "firing", node="n0", severity="critical")
    assert [
        (at, reason, [str(a.severity) for a in (*n.firing, *n.resolved)])
        for (at, _, reason, _), n in zip(story.until(1000), story.sent, strict=True)
    ][300:] == [(130.0, Reason.FIRST, ["critical"]), (330.0, Reason.ALL_RESOLVED, ["warning"])]


@pytest.mark.parametrize(
    "change",
    [
        {"matchers": ("x",)},
        {"matchers": ('kind=~".*"',)},
        {"matchers": ()},
        {"ends_at": "2025-01-01T00:00:00Z"},
        {"starts_at": "2026-01-01T00:00:00"},
        {"author": ""},
        {"id": "a.b"},
    ],
)
def test_what_is_no_silence_is_refused(change: dict[str, object]) -> None:
    good: dict[str, object] = {
        "id": "s1",
        "matchers": ('kind="stuck"',),
        "starts_at": "2026-01-01T00:00:00Z",
        "ends_at": "2026-01-02T00:00:00Z",
        "author": "ann",
        "comment": "known",
    }
    silence = matching.decode_silence(msgspec.json.encode(good))
    assert matching.decode_silence(matching.encode_silence(silence)) == silence
    with pytest.raises(matching.MalformedSilence):
        matching.decode_silence(msgspec.json.encode(good | change))
