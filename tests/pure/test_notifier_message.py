import datetime as dt
import json

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from muster import matching, vocabulary
from muster.vocabulary import AlertState
from muster_notifier.config import receiver_settings
from muster_notifier.receivers import headline, message, webhook
from muster_notifier.routing import notifications
from muster_notifier.routing.notifications import Notification

T0 = dt.datetime(2026, 1, 1, 12, 0, 0, tzinfo=dt.UTC)
MUTING = "device=GPU-1 kind=stuck node=node-a --duration 2h --comment WHY"


def alert(
    fingerprint: str = "00000000000000aa",
    *,
    state: AlertState = AlertState.FIRING,
    summary: str = "device-plugin is frozen",
    pods: tuple[str, ...] = (),
    pods_total: int = 0,
    observed: str = "silent for 2.6 s",
) -> vocabulary.AlertChanged:
    return vocabulary.AlertChanged(
        node="node-a",
        at=T0,
        plugin="device-plugin",
        kind=vocabulary.AlertKind.STUCK,
        severity=vocabulary.Severity.CRITICAL,
        state=state,
        fingerprint=fingerprint,
        summary=summary,
        starts_at=T0,
        ends_at=T0 + dt.timedelta(minutes=2) if state is AlertState.RESOLVED else None,
        resource="nvidia.com/gpu",
        devices=("GPU-1",),
        pods=pods,
        pods_total=pods_total,
        evidence=(vocabulary.Evidence(source="health", observed=observed),),
        runbook="https://runbooks.example/stuck",
    )


def notification(
    *,
    firing: tuple[vocabulary.AlertChanged, ...],
    resolved: tuple[vocabulary.AlertChanged, ...] = (),
) -> Notification:
    return notifications.create(
        after="",
        receiver="ops",
        group='{}:{kind="stuck",node="node-a"}',
        labels={"kind": "stuck", "node": "node-a"},
        reason=vocabulary.NotificationReason.FIRST,
        firing=firing,
        resolved=resolved,
        send_resolved=True,
        at=T0,
    )


def body(notification: Notification) -> bytes:
    return webhook.encode_body(
        notification,
        message.PLAIN.compose(notification),
        format_=receiver_settings.Format.CLOUDEVENTS,
    )


def test_pods_that_an_alert_counts_and_does_not_name_are_counted_in_the_message() -> None:
    sent = notification(firing=(alert(pods=("ml/a", "ml/b"), pods_total=40),))
    again = notifications.decode(notifications.encode(sent))
    for each in (sent, again):
        lines = message.PLAIN.compose(each).text.splitlines()
        assert "pods that use it: ml/a, ml/b and 38 more" in lines
        assert json.loads(body(each))["data"]["truncatedPods"] == 38


def test_a_message_says_what_where_since_when_why_who_is_hit_and_what_to_do() -> None:
    fires = alert(pods=("ml/train-0", "ml/train-1"))
    words = message.PLAIN.compose(notification(firing=(fires,)))
    assert words.title == "node-a: device-plugin is frozen; 2 pods hold devices, new pods fail"
    assert words.text.splitlines() == [
        "critical since 2026-01-01 12:00:00 UTC: node-a device-plugin nvidia.com/gpu GPU-1",
        "pods that use it: ml/train-0, ml/train-1",
        "health: silent for 2.6 s",
        "look closer: muster why node-a",
        f"silence: muster silence add {MUTING}",
        "runbook: https://runbooks.example/stuck",
    ]


def test_commands_of_a_message_from_a_cluster_name_a_cluster() -> None:
    log, named = "muster's log", "muster --context CONTEXT"
    advice = f"muster dlq list; once the receiver works: muster dlq replay all; see {log}"
    fires = msgspec.structs.replace(alert(), advice=advice)
    sent = notification(firing=(fires,))
    words = message.Composer(in_cluster=True).compose(sent)
    assert words.body.splitlines()[2:] == [
        f"what to do: {named} dlq list; once the receiver works: {named} dlq replay all; see {log}",
        f"look closer: {named} why node-a",
        f"silence: {named} silence add {MUTING}",
    ]


@pytest.mark.parametrize("over", [False, True], ids=["fires", "resolved"])
@pytest.mark.parametrize("by_helm", [False, True], ids=["notify test", "helm test"])
def test_a_test_message_names_no_impact_and_suggests_nothing(*, by_helm: bool, over: bool) -> None:
    state = AlertState.RESOLVED if over else AlertState.FIRING
    subject = alert(state=state, summary="this is a test message")
    if by_helm:
        subject = msgspec.structs.replace(subject, plugin=vocabulary.TEST_PLUGIN)
    sent = notification(firing=() if over else (subject,), resolved=(subject,) if over else ())
    words = message.PLAIN.compose(msgspec.structs.replace(sent, is_test=not by_helm))
    ended = "Resolved after 2 min: node-a: " if over else ""
    assert words.title == f"TEST, nothing is wrong: {ended}this is a test message"
    assert not any("muster " in line for line in words.text.splitlines())
    assert words.links == (() if over else ("https://runbooks.example/stuck",))


@pytest.mark.parametrize(
    ("devices", "matchers"),
    [
        ([("GPU-1",), ("GPU-1",)], "device=GPU-1 kind=stuck node=node-a"),
        ([("/dev/ttyUSB0",)], "device=/dev/ttyUSB0 kind=stuck node=node-a"),
        ([("GPU-1",), ("GPU-2",)], "kind=stuck node=node-a"),
        ([("GPU-1", "GPU-2")], "kind=stuck node=node-a"),
        ([()], "kind=stuck node=node-a"),
    ],
)
def test_a_silence_names_the_device_only_if_all_alerts_are_about_it(
    devices: list[tuple[str, ...]], matchers: str
) -> None:
    fires = tuple(
        msgspec.structs.replace(alert(f"{number:016x}"), devices=names)
        for number, names in enumerate(devices)
    )
    command = f"muster silence add {matchers} --duration 2h --comment WHY"
    assert message.silence(notification(firing=fires)) == command


def test_of_several_alerts_the_title_counts_and_the_text_names_each() -> None:
    sent = notification(
        firing=(alert(pods=("ml/train-0", "ml/train-1")), alert("00000000000000cc")),
        resolved=(alert("00000000000000bb", state=AlertState.RESOLVED, summary="fell silent"),),
    )
    words = message.PLAIN.compose(sent)
    assert words.title == (
        "stuck on node-a (2 alerts); 2 pods hold devices, new pods fail (1 resolved)"
    )
    where = "node-a device-plugin nvidia.com/gpu GPU-1"
    assert words.text.splitlines() == [
        "- node-a: device-plugin is frozen",
        f"  critical since 2026-01-01 12:00:00 UTC: {where}",
        "  pods that use it: ml/train-0, ml/train-1",
        "  health: silent for 2.6 s",
        "- node-a: device-plugin is frozen",
        f"  critical since 2026-01-01 12:00:00 UTC: {where}",
        "  health: silent for 2.6 s",
        "- resolved after 2 min: node-a: fell silent",
        f"  critical from 2026-01-01 12:00:00 UTC to 2026-01-01 12:02:00 UTC: {where}",
        "look closer: muster why node-a",
        f"silence: muster silence add {MUTING}",
        "runbook: https://runbooks.example/stuck",
    ]


def test_evidence_comes_by_its_weight_and_a_reason_is_said_once() -> None:
    observed = (
        ("health", "no answer from the Kubernetes API"),
        ("plugin", "register at kubelet.sock: UNAVAILABLE"),
        ("heartbeat", "none for 3 s"),
        ("kubernetes", "node Ready"),
    )
    about = msgspec.structs.replace(
        alert(summary="p on node-a is stuck: none for 3 s; it fails repeatedly"),
        evidence=tuple(vocabulary.Evidence(source=s, observed=o) for s, o in observed),
    )
    lines = message.alert_lines(notification(firing=(about,)), about)[1:]
    assert lines == [
        "reason: none for 3 s; it fails repeatedly",
        "kubernetes: node Ready",
        "heartbeat: none for 3 s",
        "plugin: register at kubelet.sock: UNAVAILABLE",
        "health: no answer from the Kubernetes API",
    ]
    again = msgspec.structs.replace(about, summary="p on node-a is stuck: none for 3 s")
    assert message.alert_lines(notification(firing=(again,)), again)[1:] == lines[1:]


@pytest.mark.parametrize(
    ("time", "text"),
    [
        (dt.timedelta(seconds=-1), "0 s"),
        (dt.timedelta(seconds=59), "59 s"),
        (dt.timedelta(minutes=12, seconds=20), "12 min"),
        (dt.timedelta(hours=3), "3 h"),
        (dt.timedelta(hours=3, minutes=5), "3 h 5 min"),
        (dt.timedelta(days=2, hours=4, minutes=5), "2 d 4 h"),
    ],
)
def test_how_long_a_problem_lasted_is_said_in_two_units_at_most(
    time: dt.timedelta, text: str
) -> None:
    assert headline.span(time) == text


def test_an_alert_about_a_watched_plugin_names_its_resource_and_can_be_routed_by_it() -> None:
    watched = msgspec.structs.replace(
        alert(),
        plugin="watched-amd-com-gpu-5f0836213a6b",
        watched="amd.com/gpu",
        resource="",
        devices=(),
    )
    (where,) = (
        line
        for line in message.alert_lines(notification(firing=(watched,)), watched)
        if "since" in line
    )
    assert where == "critical since 2026-01-01 12:00:00 UTC: node-a amd.com/gpu (watched)"
    assert matching.labels_of(watched)["watched"] == "amd.com/gpu"
    assert "watched" not in matching.labels_of(alert())


def test_the_body_is_a_cloudevent_with_the_alerts_as_on_the_bus() -> None:
    fires, over = alert(), alert("00000000000000bb", state=AlertState.RESOLVED)
    sent = notification(firing=(fires,), resolved=(over,))
    assert msgspec.json.decode(body(sent)) == {
        "specversion": "1.0",
        "id": sent.id,
        "source": "/services/notifier",
        "type": "dev.muster.notification",
        "time": "2026-01-01T12:00:00Z",
        "datacontenttype": "application/json",
        "data": {
            "version": "1",
            "status": "firing",
            "reason": "first",
            "receiver": "ops",
            "groupKey": '{}:{kind="stuck",node="node-a"}',
            "groupLabels": {"kind": "stuck", "node": "node-a"},
            "title": "node-a: device-plugin is frozen; new pods fail (1 resolved)",
            "text": message.PLAIN.compose(sent).text,
            "alerts": msgspec.json.decode(msgspec.json.encode([fires, over])),
            "truncatedAlerts": 0,
            "truncatedPods": 0,
            "test": False,
        },
    }


def test_a_storm_fits_into_a_body_and_what_was_left_out_is_counted() -> None:
    pods = tuple(f"namespace/pod-{index}" for index in range(10_000))
    storm = tuple(alert(f"{index:016x}", pods=pods, observed="x" * 2048) for index in range(300))
    sent = notifications.decode(notifications.encode(notification(firing=storm)))
    data = msgspec.json.decode(body(sent))["data"]
    assert len(body(sent)) <= webhook.BODY_BYTES_MAX
    assert len(notifications.encode(notification(firing=storm))) <= notifications.ENCODED_BYTES_MAX
    assert data["truncatedAlerts"] == 300 - len(data["alerts"])
    assert data["truncatedPods"] == 3_000_000 - 50 * len(data["alerts"])
    assert "and 280 more alerts" in message.PLAIN.compose(sent).text.splitlines()


@given(summary=st.text(max_size=500), observed=st.text(max_size=500), pod=st.text(max_size=100))
def test_whatever_alerts_carry_a_line_stays_a_line(summary: str, observed: str, pod: str) -> None:
    sent = notification(firing=(alert(summary=summary, observed=observed, pods=(pod,)),))
    lines = message.PLAIN.compose(sent).text.split("\n")
    # the reason is left out if the evidence contains it
    assert len(lines) in {6, 7}
    assert all(line.isprintable() and len(line) <= 400 for line in lines)


@given(attempts=st.integers(0, 1000), data=st.dictionaries(st.text(), st.text()))
def test_a_ledger_entry_comes_back_as_it_was(attempts: int, data: dict[str, str]) -> None:
    entry = notifications.entry_of(notification(firing=(alert(),)), attempts=attempts, data=data)
    assert notifications.decode_entry(notifications.encode_entry(entry)) == entry


@given(value=st.binary(max_size=200))
def test_what_is_no_ledger_entry_is_refused(value: bytes) -> None:
    try:
        notifications.decode_entry(value)
    except notifications.Malformed:
        return
    raise AssertionError(f"{value!r} was read as an entry")


def test_an_encoded_notification_comes_back_as_it_was() -> None:
    sent = notification(firing=(alert(),), resolved=(alert("00000000000000bb"),))
    assert notifications.decode(notifications.encode(sent)) == sent


def test_a_notification_about_ten_thousand_alerts_names_them_all_and_shows_the_first() -> None:
    storm = tuple(alert(f"{index:016x}") for index in range(10_000))
    encoded = notifications.encode(notification(firing=storm))
    assert len(encoded) <= notifications.ENCODED_BYTES_MAX
    sent = notifications.decode(encoded)
    assert sent.firing_ids == tuple(one_alert.fingerprint for one_alert in storm)
    assert 0 < len(sent.firing) <= notifications.ALERTS_MAX


@given(value=st.binary(max_size=200))
def test_what_is_no_notification_is_refused(value: bytes) -> None:
    try:
        notifications.decode(value)
    except notifications.Malformed:
        return
    raise AssertionError(f"{value!r} was read as a notification")


def test_templates_replace_the_built_in_texts() -> None:
    words = receiver_settings.Templates(
        title="$state: $kind on $node ($firing)",
        text="$title\n$alerts\n$look_closer",
        alert="* $severity $summary since $since; $pods",
    )
    sent = notification(firing=(alert(pods=("ml/a",)),))
    composed = message.Composer(templates=words).compose(sent)
    assert composed.text.splitlines() == [
        "firing: stuck on node-a (1)",
        "* critical device-plugin is frozen since 2026-01-01 12:00:00 UTC; ml/a",
        "muster why node-a",
    ]


def test_a_template_can_begin_the_built_in_title_with_the_name_of_the_cluster() -> None:
    sent = notification(firing=(alert(),))
    words = receiver_settings.Templates(title="prod-eu: $title")
    composed = message.Composer(templates=words).compose(sent)
    assert composed.title == "prod-eu: node-a: device-plugin is frozen; new pods fail"


def test_a_template_that_cannot_be_used_is_ignored_and_the_message_says_so() -> None:
    sent = notification(firing=(alert(),))
    broken = receiver_settings.Templates(title="$nonsense", alert="100 $")
    composed = message.Composer(templates=broken).compose(sent)
    assert composed.title == headline.title(sent)
    problems = [
        "title: there is no $nonsense",
        "alert: Invalid placeholder in string: line 1, col 5",
    ]
    assert composed.body.splitlines()[-1] == (
        f"(a template could not be used: {'; '.join(problems)})"
    )
    assert message.problems_of(broken) == problems


def test_alertmanagers_body_is_its_version_4() -> None:
    sent = notification(
        firing=(alert(),), resolved=(alert("00000000000000bb", state=AlertState.RESOLVED),)
    )
    words = message.PLAIN.compose(sent)
    made = webhook.encode_body(
        sent, words, format_=receiver_settings.Format.ALERTMANAGER, alerts_max=1
    )
    labels = {
        "alertname": "stuck",
        "device": "GPU-1",
        "kind": "stuck",
        "node": "node-a",
        "plugin": "device-plugin",
        "resource": "nvidia.com/gpu",
        "severity": "critical",
    }
    annotations = {
        "summary": "device-plugin is frozen",
        "evidence": "health: silent for 2.6 s",
        "devices": "GPU-1",
        "runbook_url": "https://runbooks.example/stuck",
    }
    assert msgspec.json.decode(made) == {
        "version": "4",
        "groupKey": '{}:{kind="stuck",node="node-a"}',
        "truncatedAlerts": 1,
        "status": "firing",
        "receiver": "ops",
        "groupLabels": {"kind": "stuck", "node": "node-a"},
        "commonLabels": labels,
        "commonAnnotations": annotations,
        "externalURL": "",
        "alerts": [
            {
                "status": "firing",
                "labels": labels,
                "annotations": annotations,
                "startsAt": "2026-01-01T12:00:00Z",
                "endsAt": "0001-01-01T00:00:00Z",
                "generatorURL": "",
                "fingerprint": "00000000000000aa",
            }
        ],
    }
