"""Every receiver gets a valid message, whatever the alerts contain."""

import datetime as dt
import email
import email.policy
import re

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from muster import vocabulary
from muster_notifier.config import receiver_settings
from muster_notifier.delivery import dead_letters
from muster_notifier.receivers import chat, kubernetes_api, message, pagerduty, results, webhook
from muster_notifier.receivers import email as receivers_email
from muster_notifier.routing import notifications

T0 = dt.datetime(2026, 1, 1, 12, 0, tzinfo=dt.UTC)
TEXT = st.one_of(
    st.text(max_size=300),
    st.sampled_from(["\n.\r\nQUIT\r\n", "<!channel> *x* `y` ```", "\0\x1b[31m", "ü" * 2000, "$x"]),
)
HOUR = dt.timedelta(hours=1)


@st.composite
def alerts(draw: st.DrawFn) -> vocabulary.AlertChanged:
    state = draw(st.sampled_from(vocabulary.AlertState))
    return vocabulary.AlertChanged(
        node=draw(st.sampled_from(["node-a", "a.b", vocabulary.FLEET])),
        at=T0,
        plugin="device-plugin",
        kind=draw(st.sampled_from(vocabulary.AlertKind)),
        severity=draw(st.sampled_from(vocabulary.Severity)),
        state=state,
        fingerprint=draw(st.from_regex(r"[0-9a-f]{16}", fullmatch=True)),
        summary=draw(TEXT),
        starts_at=T0,
        ends_at=T0 + HOUR if state is vocabulary.AlertState.RESOLVED else None,
        resource=draw(TEXT),
        devices=tuple(draw(st.lists(st.text(min_size=1, max_size=63), max_size=3))),
        pods=tuple(draw(st.lists(TEXT, max_size=3))),
        evidence=tuple(
            vocabulary.Evidence(source=draw(st.text(min_size=1, max_size=20)), observed=draw(TEXT))
            for _ in range(draw(st.integers(0, 3)))
        ),
        advice=draw(TEXT),
        runbook=draw(TEXT),
    )


@st.composite
def any_notification(draw: st.DrawFn) -> notifications.Notification:
    drawn = draw(st.lists(alerts(), min_size=1, max_size=5, unique_by=lambda a: a.fingerprint))
    return notifications.create(
        after="",
        receiver="ops",
        group=draw(TEXT),
        labels={"kind": draw(TEXT)},
        reason=draw(st.sampled_from(vocabulary.NotificationReason)),
        firing=[each for each in drawn if each.ends_at is None],
        resolved=[each for each in drawn if each.ends_at is not None],
        send_resolved=True,
        at=T0,
    )


@settings(max_examples=60, deadline=None)
@given(notification=any_notification())
def test_every_receiver_gets_a_body_that_it_accepts(
    notification: notifications.Notification,
) -> None:
    words = message.PLAIN.compose(notification)
    assert "a template could not be used" not in words.text
    assert all(line.isprintable() for line in words.text.split("\n"))
    encoded = notifications.encode(notification)
    assert notifications.decode(encoded) == notification
    assert len(encoded) <= notifications.ENCODED_BYTES_MAX
    for layout in receiver_settings.Format:
        body = webhook.encode_body(notification, words, format_=layout)
        assert len(body) <= webhook.BODY_BYTES_MAX
        msgspec.json.decode(body)
    slack = chat.slack_content(notification, words)
    assert len(msgspec.json.encode(slack)) < 40_000
    assert "<!" not in str(slack["text"])
    card = chat.teams_card(notification, words)
    assert len(card) <= chat.TEAMS_BYTES_MAX
    event = msgspec.json.decode(pagerduty.encode(notification, words, routing_key="k"))
    assert len(event["dedup_key"]) <= 255
    is_known = notification.reason is vocabulary.NotificationReason.ACKNOWLEDGED
    assert (event["event_action"] == "acknowledge") == is_known
    assert is_known or (event["event_action"] == "trigger") == bool(notification.firing_ids)
    msgspec.json.decode(webhook.encode_alerts(notification, lifetime=HOUR))
    for each in kubernetes_api.events(notification, receiver_settings.KubernetesEvents()):
        assert len(str(each.body["note"]).encode()) <= 1024
        assert re.fullmatch("[a-z0-9-]+", each.namespace)
    mail = receivers_email.encode_mail(
        notification, words, sender="m <m@example.com>", to=("a@example.com",)
    )
    read = email.message_from_bytes(mail, policy=email.policy.default)
    assert read.get_content().replace("\r\n", "\n") == words.text + "\n"
    assert [name for name in read if name.lower() == "subject"] == ["Subject"]
    _, _, _, headers = dead_letters.dead_letter(
        notification,
        results.Result(outcome=results.Outcome.REJECTED, detail=words.text),
        attempts=1,
        at=T0,
    )
    assert all(value.isascii() and value.isprintable() for value in headers.values())


def test_several_hundred_broken_devices_are_a_few_lines_everywhere() -> None:
    devices = [
        vocabulary.AlertChanged(
            node="node-a",
            at=T0,
            plugin="device-plugin",
            kind=vocabulary.AlertKind.DEVICE_UNHEALTHY,
            severity=vocabulary.Severity.CRITICAL,
            state=vocabulary.AlertState.FIRING,
            fingerprint=f"{number:016x}",
            summary="x" * 2000,
            starts_at=T0,
            resource="example.com/serial",
            devices=(f"tty-{number}",),
            pods=tuple(f"ml/pod-{number}-{pod}" for pod in range(300)),
            evidence=(vocabulary.Evidence(source="plugin", observed="y" * 2000),) * 20,
            runbook=f"https://runbooks.example/{number}.md",
        )
        for number in range(500)
    ]
    whole = notifications.create(
        after="",
        receiver="ops",
        group="g",
        labels={},
        reason=vocabulary.NotificationReason.FIRST,
        firing=devices,
        resolved=[],
        send_resolved=True,
        at=T0,
    )
    encoded = notifications.encode(whole)
    kept = notifications.decode(encoded)
    words = message.PLAIN.compose(kept)
    assert len(encoded) <= notifications.ENCODED_BYTES_MAX
    assert len(kept.firing_ids) == 500
    assert len(words.text) <= message.TEXT_MAX
    assert "(500 alerts)" in words.title
    assert "and 290 more" in words.text
    for body in (
        webhook.encode_body(kept, words, format_=receiver_settings.Format.CLOUDEVENTS),
        webhook.encode_body(kept, words, format_=receiver_settings.Format.ALERTMANAGER),
        pagerduty.encode(kept, words, routing_key="k"),
        chat.teams_card(kept, words),
        msgspec.json.encode(chat.slack_content(kept, words)),
    ):
        assert len(body) <= 500_000
    assert (
        len(receivers_email.encode_mail(kept, words, sender="m@example.com", to=("a@example.com",)))
        < 40_000
    )


def test_an_incident_of_more_alerts_than_a_notification_holds_is_triggered() -> None:
    alert = vocabulary.AlertChanged(
        node="node-a",
        at=T0,
        plugin="device-plugin",
        kind=vocabulary.AlertKind.NODE_DOWN,
        severity=vocabulary.Severity.CRITICAL,
        state=vocabulary.AlertState.FIRING,
        fingerprint="0" * 16,
        summary="down",
        starts_at=T0,
        evidence=(vocabulary.Evidence(source="lease", observed="old"),),
    )
    whole = notifications.create(
        after="",
        receiver="ops",
        group="g",
        labels={"kind": "node_down"},
        reason=vocabulary.NotificationReason.FIRST,
        firing=[msgspec.structs.replace(alert, fingerprint=f"{n:016x}") for n in range(15_000)],
        resolved=[],
        send_resolved=True,
        at=T0,
    )
    read = notifications.decode(notifications.encode(whole))
    assert (read.firing, len(read.firing_ids)) == ((), 15_000)
    words = message.PLAIN.compose(read)
    event = msgspec.json.decode(pagerduty.encode(read, words, routing_key="k"))
    assert (event["event_action"], event["payload"]["severity"]) == ("trigger", "critical")
    assert event["payload"]["custom_details"]["truncated_alerts"] == 15_000
