"""The grouping machine on a virtual clock: scenarios, and properties of random scenarios."""

import datetime as dt
import itertools
from collections.abc import Iterable, Sequence

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from muster import codec, matching, vocabulary
from muster.vocabulary import AlertKind, AlertState
from muster.vocabulary import NotificationReason as Reason
from muster_notifier.routing import grouping, groups, muting, notifications, routes
from muster_notifier.routing.notifications import Notification

T0 = dt.datetime(2026, 1, 1, tzinfo=dt.UTC)
TIMING = routes.Timing(group_wait_s=30, group_interval_s=300, repeat_interval_s=1500)


class Health:
    """A stand-in for health: creates alerts as the bus delivers them, with their positions."""

    def __init__(self) -> None:
        self._sequence = itertools.count(1)
        self.now = 0.0

    def says(
        self,
        name: str,
        state: AlertState,
        *,
        node: str = "node-a",
        kind: AlertKind = AlertKind.STUCK,
        episode: int = 0,
    ) -> codec.CloudEvent:
        sequence = next(self._sequence)
        starts_at = T0 + dt.timedelta(hours=episode)
        at = T0 + dt.timedelta(seconds=self.now)
        alert = vocabulary.AlertChanged(
            node=node,
            at=at,
            plugin="device-plugin",
            kind=kind,
            severity=vocabulary.Severity.CRITICAL,
            state=state,
            fingerprint=f"{name:0>16}",
            summary=f"alert {name}",
            starts_at=starts_at,
            ends_at=starts_at if state is AlertState.RESOLVED else None,
        )
        return codec.CloudEvent(
            id=str(sequence),
            source="/nodes/node-a/services/health",
            type=alert.TYPE,
            time=at,
            instance="health-1",
            sequence=sequence,
            boot="",
            data=alert,
            position=sequence,
        )

    def fires(self, name: str, *, node: str = "node-a", episode: int = 0) -> codec.CloudEvent:
        return self.says(name, AlertState.FIRING, node=node, episode=episode)

    def resolves(self, name: str, *, node: str = "node-a", episode: int = 0) -> codec.CloudEvent:
        return self.says(name, AlertState.RESOLVED, node=node, episode=episode)


def machine(
    *,
    send_resolved: bool = True,
    timing: routes.Timing = TIMING,
    receivers: str = "r",
    group_by: tuple[str, ...] = ("node", "kind"),
    now: float = 0.0,
    muted_by: muting.Muting | None = None,
    children: tuple[routes.Route, ...] = (),
) -> grouping.Grouping:
    root = routes.Route(
        key="{}",
        receivers=tuple(receivers),
        group_by=group_by,
        timing=timing,
        children=children,
    )
    return grouping.Grouping(
        dict.fromkeys(receivers, send_resolved),
        root=root,
        muted_by=muted_by or muting.Muting([], {}),
        at=T0 + dt.timedelta(seconds=now),
        now=now,
    )


def names(alerts: Iterable[vocabulary.AlertChanged]) -> str:
    return "".join(sorted(alert.fingerprint.lstrip("0") for alert in alerts))


def summary(notifications: Sequence[Notification]) -> list[tuple[str, Reason, str, str]]:
    return [
        (n.receiver, n.reason, names(n.firing), names(n.notified_resolved)) for n in notifications
    ]


def delivered(
    driven: grouping.Grouping, notifications: Sequence[Notification], now: float
) -> list[Notification]:
    out: list[Notification] = []
    for notification in notifications:
        out += driven.receive(grouping.Delivered(notification), now)
    return out


def run(driven: grouping.Grouping, *, until: float) -> list[tuple[float, str, str, str]]:
    """Advance, with receivers that accept everything at once; return what was sent and when."""
    machine: list[tuple[float, str, str, str]] = []
    while (deadline := driven.next_deadline()) is not None and deadline <= until:
        sent = driven.tick(deadline)
        while sent:
            machine += [
                (deadline, reason, firing, over) for _, reason, firing, over in summary(sent)
            ]
            sent = delivered(driven, sent, deadline)
    return machine


def test_what_fires_within_group_wait_is_one_message() -> None:
    health, driven = Health(), machine()
    assert driven.receive(health.fires("a"), 0.0) == ()
    assert driven.receive(health.fires("b"), 20.0) == ()
    assert run(driven, until=30) == [(30.0, Reason.FIRST, "ab", "")]


def test_other_nodes_and_kinds_are_other_messages() -> None:
    health, driven = Health(), machine()
    driven.receive(health.fires("a", node="node-a"), 0.0)
    driven.receive(health.fires("b", node="node-b"), 0.0)
    driven.receive(health.says("c", AlertState.FIRING, kind=AlertKind.MISSING), 0.0)
    sent = driven.tick(30.0)
    assert [(n.group, n.node) for n in sent] == [
        ('{}:{kind="missing",node="node-a"}', "node-a"),
        ('{}:{kind="stuck",node="node-a"}', "node-a"),
        ('{}:{kind="stuck",node="node-b"}', "node-b"),
    ]


def test_changes_wait_for_the_interval_reminders_for_theirs_and_the_end_is_sent() -> None:
    health, driven = Health(), machine()
    driven.receive(health.fires("a"), 0.0)
    story = run(driven, until=100)
    driven.receive(health.fires("b"), 100.0)
    story += run(driven, until=400)
    driven.receive(health.resolves("a"), 400.0)
    story += run(driven, until=2200)
    driven.receive(health.resolves("b"), 2300.0)
    story += run(driven, until=10_000)
    assert story == [
        (30.0, Reason.FIRST, "a", ""),
        (330.0, Reason.NEW_ALERTS, "ab", ""),
        (630.0, Reason.NEW_RESOLVED, "b", "a"),
        (2130.0, Reason.REPEAT, "b", ""),
        (2430.0, Reason.ALL_RESOLVED, "", "b"),
    ]
    assert driven.view(10_000.0) == []
    assert driven.next_deadline() is None


def test_what_is_resolved_within_group_wait_is_never_sent() -> None:
    health, driven = Health(), machine()
    driven.receive(health.fires("a"), 0.0)
    driven.receive(health.resolves("a"), 10.0)
    assert run(driven, until=10_000) == []
    assert driven.view(0.0) == []


def test_an_alert_that_fires_again_later_is_first_again() -> None:
    health, driven = Health(), machine()
    driven.receive(health.fires("a"), 0.0)
    run(driven, until=30)
    driven.receive(health.resolves("a"), 40.0)
    run(driven, until=900)
    driven.receive(health.fires("a", episode=1), 1000.0)
    assert run(driven, until=1030) == [(1030.0, Reason.FIRST, "a", "")]


def test_a_receiver_that_wants_no_resolves_hears_none_and_is_told_of_the_next_trouble() -> None:
    health, driven = Health(), machine(send_resolved=False)
    driven.receive(health.fires("a"), 0.0)
    run(driven, until=30)
    driven.receive(health.resolves("a"), 40.0)
    (silent,) = driven.tick(330.0)
    assert (silent.is_ledger_only, silent.reason) == (True, Reason.ALL_RESOLVED)
    driven.receive(grouping.Delivered(silent), 330.0)
    driven.receive(health.fires("a", episode=1), 400.0)
    assert run(driven, until=430) == [(430.0, Reason.FIRST, "a", "")]


def test_a_resolve_never_overtakes_its_trigger() -> None:
    health, driven = Health(), machine()
    driven.receive(health.fires("a"), 0.0)
    first = driven.tick(30.0)
    driven.receive(health.resolves("a"), 40.0)
    assert driven.tick(330.0) == []
    assert driven.tick(630.0) == []
    after = driven.receive(grouping.Delivered(first[0]), 700.0)
    assert summary(after) == [("r", Reason.ALL_RESOLVED, "", "a")]


def test_what_failed_is_decided_again_at_the_next_flush_with_what_is_true_then() -> None:
    health, driven = Health(), machine()
    driven.receive(health.fires("a"), 0.0)
    (first,) = driven.tick(30.0)
    assert driven.receive(grouping.Failed(first), 31.0) == []
    driven.receive(health.fires("b"), 100.0)
    assert run(driven, until=330) == [(330.0, Reason.FIRST, "ab", "")]


def refused(driven: grouping.Grouping, *, until: float) -> list[tuple[float, str]]:
    """Advance, with a receiver that refuses everything at once; return what was sent and when."""
    sent: list[tuple[float, str]] = []
    while (deadline := driven.next_deadline()) is not None and deadline <= until:
        for notification in driven.tick(deadline):
            sent.append((deadline, names(notification.firing)))
            assert driven.receive(grouping.Failed(notification), deadline) == []
    return sent


QUICK = routes.Timing(group_wait_s=0.5, group_interval_s=1, repeat_interval_s=14_400)


def test_a_receiver_that_refuses_everything_is_asked_less_and_less_often() -> None:
    health, driven = Health(), machine(timing=QUICK)
    driven.receive(health.fires("a"), 0.0)
    waits = [0.5, 1.5, 4.5, 19.5, 82.5, 337.5, 1237.5, 2137.5, 3037.5]
    assert refused(driven, until=3600) == [(at, "a") for at in waits]


def test_what_a_receiver_has_not_refused_yet_is_sent_with_the_next_flush() -> None:
    health, driven = Health(), machine(timing=QUICK)
    driven.receive(health.fires("a"), 0.0)
    refused(driven, until=300)
    driven.receive(health.fires("b"), 300.0)
    assert refused(driven, until=302) == [(300.5, "ab")]
    # both were refused before, so one of them alone is not new
    driven.receive(health.resolves("b"), 302.0)
    assert refused(driven, until=1250) == [(1200.5, "a")]


def test_a_new_episode_and_new_devices_of_a_refused_alert_are_sent_with_the_next_flush() -> None:
    health, driven = Health(), machine(timing=QUICK)
    driven.receive(health.fires("a"), 0.0)
    refused(driven, until=300)
    driven.receive(health.fires("a", episode=1), 300.0)
    assert refused(driven, until=302) == [(300.5, "a")]
    event = health.fires("a", episode=1)
    devices = msgspec.structs.replace(event.data, devices=("GPU-2",))
    driven.receive(msgspec.structs.replace(event, data=devices), 302.0)
    assert refused(driven, until=304) == [(302.5, "a")]


def test_a_replay_is_sent_at_once_however_often_its_group_was_refused() -> None:
    health, driven = Health(), machine(timing=QUICK)
    driven.receive(health.fires("a"), 0.0)
    (first,) = driven.tick(0.5)
    driven.receive(grouping.Failed(first), 0.5)
    refused(driven, until=400)
    again = driven.receive(grouping.Requested(first), 400.0)
    assert summary(again) == [("r", Reason.FIRST, "a", "")]
    # once the receiver accepts, it is tried as often as any other
    assert driven.receive(grouping.Delivered(again[0]), 400.0) == []
    driven.receive(health.fires("b"), 400.0)
    assert refused(driven, until=404) == [(400.5, "ab"), (401.5, "ab")]


def test_what_failed_and_is_over_by_then_is_never_told() -> None:
    health, driven = Health(), machine()
    driven.receive(health.fires("a"), 0.0)
    (first,) = driven.tick(30.0)
    driven.receive(health.resolves("a"), 100.0)
    driven.receive(grouping.Failed(first), 200.0)
    assert run(driven, until=10_000) == []


def test_a_dead_receiver_delays_no_other() -> None:
    health, driven = Health(), machine(receivers="rs")
    for index in range(1, 14):
        driven.receive(health.fires(f"{index:x}", node=f"node-{index}"), 0.0)
    sent = driven.tick(30.0)
    later = delivered(driven, [n for n in sent if n.receiver == "s"], 31.0)
    last = delivered(driven, later, 32.0)
    counts = [len([n for n in some if n.receiver == "r"]) for some in (sent, later, last)]
    assert counts == [groups.IN_FLIGHT_MAX, 0, 0]
    assert names(a for n in (*sent, *later, *last) if n.receiver == "s" for a in n.firing) == (
        "123456789abcd"
    )
    assert driven.oldest_waiting_s("r", 90.0) == 60.0


def test_what_waits_for_a_busy_receiver_says_what_is_true_when_its_turn_comes() -> None:
    health, driven = Health(), machine()
    for index in range(9):
        driven.receive(health.fires(str(index), node=f"node-{index}"), 0.0)
    sent = driven.tick(30.0)
    driven.receive(health.fires("e", node="node-8"), 40.0)
    after = driven.receive(grouping.Delivered(sent[0]), 50.0)
    assert summary(after) == [("r", Reason.FIRST, "8e", "")]


def test_old_news_that_comes_again_is_no_news() -> None:
    health, driven = Health(), machine()
    fires = health.fires("a")
    driven.receive(fires, 0.0)
    run(driven, until=30)
    driven.receive(health.resolves("a"), 40.0)
    driven.receive(fires, 50.0)
    assert run(driven, until=10_000) == [(330.0, Reason.ALL_RESOLVED, "", "a")]


def test_the_end_of_what_nobody_heard_of_is_no_news() -> None:
    health, driven = Health(), machine()
    driven.receive(health.resolves("a"), 0.0)
    assert driven.next_deadline() is None


def entry(notification: Notification) -> notifications.LedgerEntry:
    return notifications.entry_of(notification, attempts=1)


def test_a_restart_repeats_nothing_and_resolves_what_was_told() -> None:
    health = Health()
    before = machine()
    before.receive(fires := health.fires("a"), 0.0)
    (first,) = before.tick(30.0)
    after = machine()
    after.restore([entry(first)], [], [fires], now=90.0)
    assert run(after, until=1500) == []
    assert run(after, until=1530) == [(1530.0, Reason.REPEAT, "a", "")]
    after.receive(health.resolves("a"), 1600.0)
    assert run(after, until=2000) == [(1830.0, Reason.ALL_RESOLVED, "", "a")]


def test_what_should_have_been_told_while_nobody_was_here_is_told_at_once() -> None:
    health = Health()
    before = machine()
    before.receive(health.fires("a"), 0.0)
    (first,) = before.tick(30.0)
    after = machine()
    health.now = 320.0
    alerts = [health.resolves("a"), health.resolves("x"), health.fires("b", node="node-b")]
    after.restore([entry(first)], [], alerts, now=400.0)
    assert run(after, until=400) == [
        (400.0, Reason.ALL_RESOLVED, "", "a"),
        (400.0, Reason.FIRST, "b", ""),
    ]


def test_a_clock_that_was_set_back_makes_no_group_wait() -> None:
    health, driven = Health(), machine()
    entry = notifications.LedgerEntry(
        receiver="r",
        group='{}:{kind="stuck",node="node-a"}',
        reason=Reason.FIRST,
        firing=("0" * 15 + "a",),
        resolved=(),
        at=T0 + dt.timedelta(hours=3),
        id="x",
        attempts=1,
    )
    driven.restore([entry], [], [health.fires("a")], now=0.0)
    driven.receive(health.fires("b"), 1.0)
    assert run(driven, until=400) == [(300.0, Reason.NEW_ALERTS, "ab", "")]


def test_a_restart_does_not_shorten_what_a_group_has_to_wait() -> None:
    health = Health()
    before = machine()
    before.receive(health.fires("a"), 0.0)
    (first,) = before.tick(30.0)
    after = machine()
    health.now = 335.0
    alerts = [health.resolves("a"), health.fires("b", node="node-b")]
    after.restore([entry(first)], [], alerts, now=340.0)
    assert run(after, until=1000) == [
        (365.0, Reason.FIRST, "b", ""),
        (630.0, Reason.ALL_RESOLVED, "", "a"),
    ]


def test_what_is_in_the_outbox_is_not_decided_again_and_its_end_is_told_after_it() -> None:
    health = Health()
    before = machine()
    fires = health.fires("a")
    before.receive(fires, 0.0)
    (first,) = before.tick(30.0)
    after = machine()
    after.restore([], [first], [fires], now=40.0)
    after.receive(health.resolves("a"), 50.0)
    assert run(after, until=2000) == []
    (end,) = after.receive(grouping.Delivered(first), 2000.0)
    assert summary([end]) == [("r", Reason.ALL_RESOLVED, "", "a")]


def test_what_waits_for_a_receiver_that_is_away_is_replaced_by_what_is_true() -> None:
    health, driven = Health(), machine()
    driven.receive(health.fires("a"), 0.0)
    (first,) = driven.tick(30.0)
    assert driven.receive(grouping.Postponed(first), 31.0) == []
    driven.receive(health.fires("b"), 40.0)
    (second,) = driven.tick(330.0)
    assert summary([second]) == [("r", Reason.FIRST, "ab", "")]
    # the first was delivered after all; the second is still correct
    assert driven.receive(grouping.Delivered(first), 331.0) == ()
    assert driven.tick(630.0) == []
    driven.receive(health.resolves("a"), 640.0)
    driven.receive(health.resolves("b"), 640.0)
    (end,) = driven.receive(grouping.Delivered(second), 650.0)
    assert summary([end]) == [("r", Reason.ALL_RESOLVED, "", "ab")]


def test_what_is_over_before_a_receiver_that_is_away_has_heard_of_it_is_told_all_the_same() -> None:
    health, driven = Health(), machine()
    driven.receive(health.fires("a"), 0.0)
    (first,) = driven.tick(30.0)
    driven.receive(grouping.Postponed(first), 31.0)
    driven.receive(health.resolves("a"), 40.0)
    assert run(driven, until=2000) == []
    (end,) = driven.receive(grouping.Delivered(first), 2000.0)
    assert summary([end]) == [("r", Reason.ALL_RESOLVED, "", "a")]


def test_receivers_that_are_away_do_not_keep_groups_from_the_outbox() -> None:
    health, driven = Health(), machine()
    for index in range(groups.OUTSTANDING_MAX + 1):
        driven.receive(health.fires(f"{index:x}", node=f"node-{index}"), 0.0)
    sent = driven.tick(30.0)
    count = 0
    while sent:
        count += len(sent)
        sent = [new for n in sent for new in driven.receive(grouping.Postponed(n), 31.0)]
    assert count == groups.OUTSTANDING_MAX


def test_an_alert_that_becomes_another_leaves_its_group_and_enters_the_new_one() -> None:
    health, driven = Health(), machine()
    driven.receive(health.fires("a"), 0.0)
    story = run(driven, until=30)
    driven.receive(health.says("a", AlertState.FIRING, kind=AlertKind.NODE_DOWN), 40.0)
    story += run(driven, until=400)
    driven.receive(health.says("a", AlertState.RESOLVED, kind=AlertKind.NODE_DOWN), 450.0)
    story += run(driven, until=10_000)
    assert story == [
        (30.0, Reason.FIRST, "a", ""),
        (70.0, Reason.FIRST, "a", ""),
        (330.0, Reason.ALL_RESOLVED, "", "a"),
        (670.0, Reason.ALL_RESOLVED, "", "a"),
    ]
    assert driven.view(10_000.0) == []


def test_the_end_of_everything_can_be_told_sooner_than_other_changes() -> None:
    timing = routes.Timing(
        group_wait_s=30, group_interval_s=300, repeat_interval_s=1500, resolve_wait_s=5
    )
    health, driven = Health(), machine(timing=timing)
    driven.receive(health.fires("a"), 0.0)
    driven.receive(health.fires("b"), 0.0)
    story = run(driven, until=30)
    driven.receive(health.resolves("a"), 40.0)
    story += run(driven, until=100)
    driven.receive(health.resolves("b"), 100.0)
    story += run(driven, until=1000)
    assert story == [(30.0, Reason.FIRST, "ab", ""), (105.0, Reason.ALL_RESOLVED, "", "ab")]


@pytest.mark.parametrize("restarts", [False, True])
def test_an_alert_that_comes_and_goes_ends_at_most_once_in_a_group_interval(
    *, restarts: bool
) -> None:
    timing = routes.Timing(
        group_wait_s=30, group_interval_s=300, repeat_interval_s=1500, resolve_wait_s=10
    )
    health, driven = Health(), machine(timing=timing)
    story: list[tuple[float, str, str, str]] = []
    last: list[Notification] = []
    for episode in range(30):
        at = 60.0 * episode
        if restarts and last and not last[-1].firing_ids:
            driven = machine(timing=timing, now=at)
            driven.restore([entry(last[-1])], [], [], now=at)
        changes = (at, at + 39.0, AlertState.FIRING), (at + 40.0, at + 59.0, AlertState.RESOLVED)
        for moment, until, state in changes:
            health.now = moment
            driven.receive(health.says("a", state, episode=episode), moment)
            while (due := driven.next_deadline()) is not None and due <= until:
                sent = [*driven.tick(due)]
                last += sent
                story += [(due, reason, on, off) for _, reason, on, off in summary(sent)]
                delivered(driven, sent, due)
    ends = [at for at, reason, *_ in story if reason == Reason.ALL_RESOLVED]
    assert ends[0] == 50.0
    assert all(later - sooner >= 300.0 for sooner, later in itertools.pairwise(ends))
    assert 4 <= len(ends) <= 7
    assert len(story) - len(ends) <= len(ends) + 1


def test_a_crash_between_sending_and_remembering_repeats_under_the_same_id() -> None:
    health = Health()
    fires = health.fires("a")
    ids = set()
    for _ in range(2):
        driven = machine()
        driven.restore([], [], [fires], now=0.0)
        ids |= {notification.id for notification in driven.tick(30.0)}
    assert len(ids) == 1


def test_a_reminder_and_a_new_episode_have_ids_of_their_own() -> None:
    health, driven = Health(), machine()
    ids: list[str] = []
    driven.receive(health.fires("a"), 0.0)
    for until in (30.0, 1530.0, 3030.0):
        while (deadline := driven.next_deadline()) is not None and deadline <= until:
            sent = driven.tick(deadline)
            ids += [notification.id for notification in sent]
            delivered(driven, sent, deadline)
    assert len(ids) == len(set(ids)) == 3


def test_a_storm_of_ten_thousand_alerts_is_one_group_and_takes_no_time() -> None:
    health = Health()
    driven = machine(group_by=("kind",))
    for index in range(10_000):
        driven.receive(health.fires(f"{index:x}", node=f"node-{index}"), 0.0)
    (only,) = driven.tick(30.0)
    assert len(only.firing) == 10_000


Step = tuple[str, int, int]
STEPS = st.lists(
    st.tuples(
        st.sampled_from(
            [
                *("fires", "resolves", "becomes", "time", "delivered", "failed", "postponed"),
                *("again", "restart"),
            ]
        ),
        st.integers(0, 3),
        st.integers(1, 400),
    ),
    max_size=60,
)


class World:
    """Runs the machine through random steps, and records what a receiver knows."""

    def __init__(self, *, send_resolved: bool) -> None:
        self.send_resolved = send_resolved
        self.health = Health()
        self.now = 0.0
        self.driven = machine(send_resolved=send_resolved)
        self.on_their_way: dict[str, Notification] = {}
        self.ledger: dict[str, notifications.LedgerEntry] = {}
        self.newest: dict[str, codec.CloudEvent] = {}
        self.stream: dict[tuple[str, str], codec.CloudEvent] = {}
        self.history: list[codec.CloudEvent] = []
        self.notified: dict[str, str] = {}
        self.ids: list[str] = []

    def step(self, step: Step) -> None:
        verb, which, seconds = step
        name, node = "abcd"[which], f"node-{which % 2}"
        notified = self.newest.get(name)
        last = notified.data if notified is not None else None
        assert last is None or isinstance(last, vocabulary.AlertChanged)
        fires = last is not None and last.state is AlertState.FIRING
        match verb:
            case "fires" if not fires:
                self._hear(name, self.health.fires(name, node=node, episode=len(self.history)))
            case "resolves" if fires and last is not None:
                resolved = AlertState.RESOLVED
                self._hear(name, self.health.says(name, resolved, node=node, kind=last.kind))
            case "becomes" if fires and last is not None:
                kind = AlertKind.MISSING if last.kind is AlertKind.STUCK else AlertKind.STUCK
                self._hear(name, self.health.says(name, last.state, node=node, kind=kind))
            case "again" if self.history:
                self._sent(self.driven.receive(self.history[which % len(self.history)], self.now))
            case "time":
                self.advance(seconds)
            case "delivered" | "failed" | "postponed":
                self.settle(which, verb)
            case "restart":
                self._restart(is_kept=seconds % 2 == 0)

    def advance(self, seconds: float) -> None:
        until = self.now + seconds
        while (deadline := self.driven.next_deadline()) is not None and deadline <= until:
            self._sent(self.driven.tick(max(deadline, self.now)))
            after = self.driven.next_deadline()
            assert after is None or after > deadline
        self.now = self.health.now = until

    def settle(self, which: int, verb: str = "delivered") -> None:
        if not self.on_their_way:
            return
        group = sorted(self.on_their_way)[which % len(self.on_their_way)]
        notification = self.on_their_way[group]
        if verb == "postponed":
            self._sent(self.driven.receive(grouping.Postponed(notification), self.now))
            return
        del self.on_their_way[group]
        if verb == "failed":
            self._sent(self.driven.receive(grouping.Failed(notification), self.now))
            return
        if not notification.is_ledger_only:
            assert notification.id not in self.ids, "the same notification was delivered twice"
            self.ids.append(notification.id)
        self.notified[notification.group] = names(notification.firing)
        self.ledger[notification.group] = entry(notification)
        self._sent(self.driven.receive(grouping.Delivered(notification), self.now))

    def firing(self) -> dict[str, str]:
        machine: dict[str, str] = {}
        for event in self.newest.values():
            alert = event.data
            assert isinstance(alert, vocabulary.AlertChanged)
            group = f'{{}}:{{kind="{alert.kind}",node="{alert.node}"}}'
            if alert.state is AlertState.FIRING:
                machine[group] = "".join(sorted(machine.get(group, "") + names([alert])))
        return machine

    def _hear(self, name: str, event: codec.CloudEvent) -> None:
        assert isinstance(event.data, vocabulary.AlertChanged)
        self.newest[name] = event
        self.stream[name, event.data.kind] = event
        self.history.append(event)
        self._sent(self.driven.receive(event, self.now))

    def _sent(self, notifications: Sequence[Notification]) -> None:
        """Put notifications into the outbox, where a newer one of a group replaces an older one."""
        for notification in notifications:
            self.on_their_way[notification.group] = notification

    def _restart(self, *, is_kept: bool) -> None:
        """Lose everything in memory and, unless `is_kept`, the notifications to be delivered."""
        if not is_kept:
            self.on_their_way = {}
        self.driven = machine(send_resolved=self.send_resolved, now=self.now)
        alerts = sorted(self.stream.values(), key=lambda event: event.position)
        pending = list(self.on_their_way.values())
        self.driven.restore(self.ledger.values(), pending, alerts, now=self.now)


def settled(world: World) -> None:
    """Deliver everything that is still to be sent."""
    for _ in range(5):
        while world.on_their_way:
            world.settle(0)
        # a receiver that has refused a notification is not tried again earlier
        world.advance(TIMING.group_interval_s + groups.HELD_MAX_S)
    while world.on_their_way:
        world.settle(0)


def test_what_replaces_what_may_have_been_delivered_has_an_id_of_its_own() -> None:
    health = Health()
    driven = machine(group_by=())
    driven.receive(health.fires("a"), 0.0)
    (first,) = driven.tick(30.0)
    driven.receive(grouping.Postponed(first), 31.0)
    driven.receive(health.fires("b", node="node-b"), 40.0)
    (second,) = driven.tick(330.0)
    driven.receive(grouping.Postponed(second), 331.0)
    silence = matching.Silence(
        id="s1",
        matchers=('node="node-b"',),
        starts_at=T0,
        ends_at=T0 + dt.timedelta(hours=9),
        author="x",
        comment="y",
    )
    driven.receive(muting.SilenceChanged("s1", silence), 340.0)
    (third,) = driven.tick(630.0)
    assert [names(notification.firing) for notification in (first, second, third)] == [
        "a",
        "ab",
        "a",
    ]
    assert len({first.id, second.id, third.id}) == 3


@pytest.mark.parametrize("restarts", [False, True])
def test_an_alert_that_fires_again_after_another_is_sent_again(*, restarts: bool) -> None:
    world = World(send_resolved=True)
    world.step(("fires", 0, 0))
    settled(world)
    for _ in range(4):
        world.step(("becomes", 0, 0))
        settled(world)
        if restarts:
            world.step(("restart", 0, 0))
    # one for the first kind, and four times the end of one kind and the start of the other
    assert len(set(world.ids)) == len(world.ids) >= 9
    assert {group: sent for group, sent in world.notified.items() if sent} == world.firing()


@settings(max_examples=400, deadline=None)
@given(steps=STEPS)
def test_in_the_end_a_receiver_knows_what_fires_and_was_notified_of_nothing_twice(
    steps: list[Step],
) -> None:
    world = World(send_resolved=True)
    for step in steps:
        world.step(step)
    settled(world)
    assert {group: sent for group, sent in world.notified.items() if sent} == world.firing()


@settings(max_examples=200, deadline=None)
@given(steps=STEPS)
def test_a_receiver_without_resolves_is_notified_of_everything_that_fires(
    steps: list[Step],
) -> None:
    world = World(send_resolved=False)
    for step in steps:
        world.step(step)
    settled(world)
    assert all(
        set(firing) <= set(world.notified.get(group, ""))
        for group, firing in world.firing().items()
    )


def test_a_change_of_cause_devices_or_impact_is_sent_once_with_the_next_flush() -> None:
    health, driven = Health(), machine()
    fires = health.fires("a")
    assert isinstance(fires.data, vocabulary.AlertChanged)

    def says(**more: object) -> codec.CloudEvent:
        again = health.fires("a")
        return msgspec.structs.replace(again, data=msgspec.structs.replace(again.data, **more))

    driven.receive(fires, 0.0)
    story = run(driven, until=30)
    story += run(driven, until=100)
    changes: list[dict[str, object]] = [
        {"advice": "start the kubelet"},
        {"devices": ("0",)},
        {"devices": ("0",), "pods": ("ml/a",), "pods_total": 1},
        # nothing is new: the first cause again, another pod, one device less
        {"pods": ("ml/b",), "pods_total": 1, "summary": "in other words"},
    ]
    for number, change in enumerate(changes):
        driven.receive(says(**change), 100.0 + 300 * number)
        story += run(driven, until=399.0 + 300 * number)
    assert story == [
        (30.0, Reason.FIRST, "a", ""),
        *((at, Reason.CHANGED, "a", "") for at in (330.0, 630.0, 930.0)),
    ]


def test_a_restart_neither_repeats_nor_forgets_what_has_changed() -> None:
    health = Health()
    fires = health.fires("a")
    (first,) = _sent(fires)
    changed = msgspec.structs.replace(
        health.fires("a"), data=msgspec.structs.replace(fires.data, advice="start the kubelet")
    )
    assert _sent(fires, entry(first)) == []
    (second,) = _sent(changed, entry(first))
    assert second.reason is Reason.CHANGED
    stored = notifications.decode_entry(notifications.encode_entry(entry(second)))
    assert _sent(changed, stored) == []
    # written by an earlier version
    assert _sent(changed, msgspec.structs.replace(entry(first), aspects={})) == []


def _sent(fires: codec.CloudEvent, *entries: notifications.LedgerEntry) -> list[Notification]:
    driven = machine()
    driven.restore(entries, [], [fires], now=0.0)
    return [*driven.tick(300.0)]


def test_a_group_of_many_alerts_or_an_alert_of_ever_new_devices_is_not_sent_again() -> None:
    fires = Health().fires("a").data
    assert isinstance(fires, vocabulary.AlertChanged)
    known = {fires.fingerprint: notifications.aspects_of(fires)}
    changed = msgspec.structs.replace(fires, devices=("0",))
    assert notifications.has_new_aspect([changed], known)
    assert not notifications.has_new_aspect([changed] * 101, known)
    many = {fires.fingerprint: frozenset(map(str, range(64)))}
    assert not notifications.has_new_aspect([changed], many)
