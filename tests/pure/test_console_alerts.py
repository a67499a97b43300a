"""The page of alerts: the filters in its address, silences, and undelivered notifications."""

import re
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta

import msgspec
import pytest

from muster import matching, vocabulary
from muster.fleet import dead_letters, health_state, model
from muster_console import alert_groups, alert_history
from tests.worlds import alert_events

AT = datetime(2026, 1, 2, 12, 0, 0, tzinfo=UTC)
GPU = "nvidia.com/gpu"


def alert(node: str, kind: str = "stuck", **more: object) -> health_state.Alert:
    fields = {"node": node, "kind": kind, "severity": "critical", "summary": f"{kind} on {node}"}
    return health_state.Alert(**{**fields, "fingerprint": f"{node}-{kind}", **more})  # type: ignore[arg-type]


def fleet_of(*alerts: health_state.Alert) -> model.FleetModel:
    fleet = model.FleetModel()
    plugins = [
        health_state.Plugin(node=node, plugin="device-plugin", verdict="STUCK", alerts=tuple(own))
        for node in sorted({each.node for each in alerts})
        if (own := [each for each in alerts if each.node == node])
    ]
    page = health_state.State(
        plugins=tuple(plugins), fleet=health_state.Fleet(), service=health_state.Service(revision=1)
    )
    fleet.receive_page(page, after="", now=0.0, at=AT)
    return fleet


FLEET = (
    alert("a"),
    alert("b", "degraded", resource=GPU, severity="warning", pods=("ml/train",)),
    alert("c", devices=("GPU-1",), flapping=True, watched="nvidia.com/gpu"),
)


@pytest.mark.parametrize(
    ("query", "nodes"),
    [
        ([], ["a", "b", "c"]),
        ([("kind", "stuck")], ["a", "c"]),
        ([("alertname", "stuck"), ("node", "c")], ["c"]),
        ([("resource", GPU)], ["b"]),
        ([("device", "GPU-1"), ("flapping", "true"), ("watched", GPU)], ["c"]),
        ([("severity", "warning"), ("q", "DEGRADED on")], ["b"]),
        ([("q", "ML/train")], ["b"]),
        ([("flapping", "")], ["a", "b"]),
        ([("node", "a"), ("node", "b")], []),
        ([("node", "gone")], []),
    ],
)
def test_the_labels_in_the_address_must_all_be_equal(
    query: list[tuple[str, str]], nodes: list[str]
) -> None:
    wanted = alert_groups.filter_of(query)
    view = alert_groups.page(fleet_of(*FLEET), alert_history.AlertHistory(), at=AT, wanted=wanted)
    assert sorted(each.alert.node for group in view.groups for each in group.alerts) == nodes
    assert wanted.problems == ()


@pytest.mark.parametrize(
    ("query", "problem"),
    [
        ([("nodes", "a")], "this page has no filter nodes; did you mean node?"),
        ([("utm_source", "x")], "this page has no filter utm_source; did you mean resource?"),
        ([("kind", "stukc")], "no kind is called stukc; did you mean stuck?"),
    ],
)
def test_what_an_address_cannot_mean_is_named(query: list[tuple[str, str]], problem: str) -> None:
    assert alert_groups.filter_of(query).problems == (problem,)


def test_resolved_alerts_are_filtered_by_the_same_labels() -> None:
    history = alert_history.AlertHistory()
    for number, node in enumerate("ab", 1):
        resolved = alert_events.changed(number, AT, node=node, resolved=True)
        history.receive(alert_events.event(resolved, number), at=AT)

    def shown(**labels: str) -> list[str]:
        wanted = alert_groups.filter_of(labels.items())
        view = alert_groups.page(fleet_of(), history, at=AT, wanted=wanted)
        return sorted(each.node for each in view.resolved)

    assert shown() == ["a", "b"]
    assert shown(node="b", plugin="device-plugin") == ["b"]
    assert shown(resource=GPU) == []


def test_each_notification_is_read_once_however_many_groups_there_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """200 groups and 2,000 notifications took 0.15 s when each group read them all; now 0.01 s."""
    groups, total = 20, 100
    firing = [alert(f"n{number}", fingerprint=f"{number:016x}") for number in range(groups)]
    history = alert_history.AlertHistory()
    for number in range(total):
        sent = vocabulary.NotificationDelivered(
            node="_fleet",
            at=AT - timedelta(seconds=total - number),
            receiver="slack",
            group=f'default:{{node="n{number % groups}"}}',
            reason=vocabulary.NotificationReason.FIRST,
            # every fifth also names alert 1, which later has a group of its own
            firing=(f"{number % groups:016x}", *([f"{1:016x}"] if number % 5 == 0 else ())),
        )
        if number >= total - groups:
            sent = msgspec.structs.replace(sent, firing=sent.firing[:1])
        history.receive(alert_events.event(sent, number), at=AT)
    read = list[str]()
    still_firing = alert_history.still_firing

    def counted(
        delivery: alert_history.Delivery, firing: Mapping[str, datetime | None]
    ) -> set[str]:
        read.append(delivery.id)
        return still_firing(delivery, firing)

    monkeypatch.setattr(alert_history, "still_firing", counted)
    shown = alert_groups.page(fleet_of(*firing), history, at=AT).groups
    assert len(shown) == groups
    assert {group.alerts[0].alert.node: group.deliveries_total for group in shown} == {
        f"n{number}": 21 if number == 1 else 5 for number in range(groups)
    }
    assert len(read) == total


def test_silences_are_listed_until_they_expire_those_that_begin_later_too() -> None:
    fleet = fleet_of(*FLEET)
    for number, starts in ((1, -2), (2, -1), (3, 1)):
        silence = matching.Silence(
            id=f"s{number}",
            matchers=("node=a",),
            starts_at=AT + timedelta(hours=starts),
            ends_at=AT + timedelta(hours=starts + 2),
            author="ann",
            comment="disk",
        )
        fleet.receive_silence(silence.id, silence, at=AT)
    view = alert_groups.page(fleet, alert_history.AlertHistory(), at=AT)
    assert [each.id for each in view.silences] == ["s2", "s3"]
    assert view.silences_total == 2


def test_a_dead_letter_names_its_receiver_its_reason_and_what_is_unknown() -> None:
    letter = dead_letters.DeadLetter(
        "muster.dlq.notification.ops.0badcafe.0123456789abcdef",
        b"",
        {
            "Muster-Receiver": "ops",
            "Muster-Group": 'default:{kind="stuck"}',
            "Muster-Error": "HTTP 500",
            "Muster-Attempts": "3",
            "Muster-Died-At": "2026-01-02T12:00:00+00:00",
        },
        7,
    )
    assert (letter.id, letter.receiver, letter.about, letter.error, letter.died_at) == (
        "0123456789ab",
        "ops",
        'default:{kind="stuck"}',
        "HTTP 500",
        AT,
    )
    odd = dead_letters.DeadLetter("muster.dlq.event.x", b"", {"Muster-Died-At": "yesterday"}, 1)
    assert (odd.is_notification, odd.died_at, odd.error) == (False, None, "")


def test_a_letter_that_is_sent_again_twice_is_one_message() -> None:
    letter = dead_letters.DeadLetter("muster.dlq.notification.ops.g.1", b"", {}, 7)
    same = dead_letters.DeadLetter("muster.dlq.notification.ops.g.1", b"more", {}, 7)
    other = dead_letters.DeadLetter("muster.dlq.notification.ops.g.1", b"", {}, 8)
    assert dead_letters.again(letter) == dead_letters.again(same) != dead_letters.again(other)


@pytest.mark.parametrize(
    ("matchers", "days", "about"),
    [
        (["kind=stuck"], 1, ""),
        (['severity=~".+"'], 1, "This silences all 3 alerts that fire now"),
        (["node=elsewhere"], 1, "None of the 3 firing alerts matches now"),
        (["kind=stuck"], 2, "of every node for longer"),
        (['node=~".+"', "kind=stuck"], 2, "of every node for longer"),
        (['node!=""', "node!=node-0"], 2, "of 3 of 4 nodes for longer"),
        (['node=~"node-[01]"'], 2, ""),
        (["node=node-0"], 365, ""),
        (["device=GPU-1", "kind=device_unhealthy"], 365, ""),
    ],
)
def test_a_silence_that_is_perhaps_not_meant_is_one_to_confirm(
    matchers: list[str], days: int, about: str
) -> None:
    silence = matching.new_silence(
        "s", matchers, starts_at=AT, lasts=timedelta(days=days), author="ann", comment="c"
    )
    alerts = [
        health_state.Alert(kind=kind, severity="critical", node=node, devices=("GPU-1",))
        for kind, node in (("stuck", "node-0"), ("device_unhealthy", "node-3"), ("stuck", "node-1"))
    ]
    why = alert_groups.why_confirm(silence, [f"node-{number}" for number in range(4)], alerts)
    assert (about in why) if about else why == ""


def test_after_a_silence_has_expired_the_page_names_those_that_still_hold() -> None:
    fleet = fleet_of(alert("a"), alert("b"))
    for number, node in enumerate(("a", "b", "a")):
        silence = matching.new_silence(
            f"s{number}",
            [f"node={node}"],
            starts_at=AT,
            lasts=timedelta(hours=number),
            author="ann",
            comment="c",
        )
        fleet.receive_silence(silence.id, silence, at=AT)
    gone = "The silence has expired."
    message = alert_groups.done({"done": "expired", "silence": "s0"}, fleet, AT)
    assert message.startswith(
        f"{gone} Others still silence 1 of its firing alerts: node=a (by ann until "
    )
    assert alert_groups.done({"done": "expired", "silence": "s9"}, fleet, AT) == gone
    assert alert_groups.done({}, fleet, AT) == ""


@pytest.mark.parametrize(
    ("matchers", "comment", "problem"),
    [
        (["node=a"], "", "comment: required; say why the alerts are silenced"),
        (["node=a"], "x" * 2_001, "comment: at most 2,000 characters; this one has 2,001"),
        (['node=~"("'], "c", "node=~'(': not a regular expression, near '(': missing )"),
    ],
)
def test_what_is_wrong_with_a_silence_is_said_in_words(
    matchers: list[str], comment: str, problem: str
) -> None:
    with pytest.raises(ValueError, match="^" + re.escape(problem) + "$"):
        matching.new_silence(
            "s", matchers, starts_at=AT, lasts=timedelta(1), author="ann", comment=comment
        )
