"""Other receivers against servers that answer as the services do, and the owners of workloads."""

import asyncio
import errno
import os
import pathlib
import resource
from collections.abc import Mapping
from typing import NoReturn

import aiohttp
import msgspec
import orjson
import pytest

from muster import codec, vocabulary
from muster.local import kubernetes
from muster.vocabulary import AlertState
from muster_notifier.config import files, receiver_settings, schema
from muster_notifier.receivers import factory, kubernetes_api
from muster_notifier.receivers.results import Kind, Outcome, Result
from muster_notifier.routing import alert_index
from tests.worlds.receiver_server import (
    FIRES,
    GROUP,
    LOOPBACK,
    OVER,
    QUICK,
    T0,
    TITLE,
    Fake,
    alert,
    fake,
    make_notification,
    play,
    secret,
    send,
    sender,
)


def test_pagerduty_has_one_incident_a_group(tmp_path: pathlib.Path) -> None:
    async def story(server: Fake) -> None:
        server.answer(202, {"status": "success"})
        receiver = sender(
            pagerduty=receiver_settings.PagerDuty(
                routing_key_from=secret(tmp_path, "R0"), url=f"{server.url}/v2", reach=LOOPBACK
            )
        )
        acknowledged = make_notification(
            [alert()], reason=vocabulary.NotificationReason.ACKNOWLEDGED
        )
        for notification in (FIRES, acknowledged, OVER):
            answer = await receiver.send(notification, {})
            assert answer == Result(outcome=Outcome.ACCEPTED, detail="HTTP 202")
        trigger, acknowledge, resolve = server.bodies()
        details = trigger["payload"].pop("custom_details")
        assert trigger == {
            "routing_key": "R0",
            "event_action": "trigger",
            "dedup_key": GROUP,
            "payload": {
                "summary": TITLE,
                "source": "node-a",
                "severity": "critical",
                "timestamp": "2026-01-01T12:00:00+00:00",
                "component": "device-plugin",
                "class": "stuck",
            },
            "links": [{"href": "https://runbooks.example/stuck.md", "text": "runbook"}],
            "client": "muster",
        }
        assert details["truncated_alerts"] == 0
        assert details["alerts"][0]["annotations"]["pods"] == "ml/train-0"
        assert acknowledge == resolve | {"event_action": "acknowledge"}
        assert resolve == {"routing_key": "R0", "event_action": "resolve", "dedup_key": GROUP}

    play(story)


def test_what_pagerduty_says_about_a_bad_key_is_reported_without_the_key(
    tmp_path: pathlib.Path,
) -> None:
    async def story(server: Fake) -> None:
        server.answer(400, {"message": "Event object is invalid"})
        receiver = sender(
            pagerduty=receiver_settings.PagerDuty(
                routing_key_from=secret(tmp_path, "R0SECRET"), url=server.url, reach=LOOPBACK
            )
        )
        answer = await receiver.send(FIRES, {})
        assert answer.kind is Kind.REFUSED
        assert answer.detail == 'HTTP 400 {"message":"Event object is invalid"}'

    play(story)


def test_a_server_that_repeats_what_it_was_sent_gets_no_secret_into_our_result(
    tmp_path: pathlib.Path,
) -> None:
    async def story(server: Fake) -> None:
        server.answer(400, {"bad key": "R0SECRET", "path": "/v2/T0KEN?sig=a%20b"})
        service = receiver_settings.PagerDuty(
            routing_key_from=secret(tmp_path, "R0SECRET"), url=server.url, reach=LOOPBACK
        )
        url = secret(tmp_path, f"{server.url}/v2/T0KEN?sig=a%20b")
        workflow = receiver_settings.Teams(url_from=url, reach=LOOPBACK)
        details = [
            (await receiver.send(FIRES, {})).detail
            for receiver in (sender(pagerduty=service), sender(teams=workflow))
        ]
        assert details == [
            'HTTP 400 {"bad key":"(secret)","path":"/v2/T0KEN?sig=a%20b"}',
            'HTTP 400 {"bad key":"R0SECRET","path":"/(secret)"}',
        ]

    play(story)


@pytest.mark.parametrize(
    ("url", "text", "shown"),
    [
        ("https://h.example/T/B/x1", "POST https://h.example/T/B/x1", "https://h.example/(secret)"),
        ("https://h.example/T/B/x1", "POST h.example/T/B/x1", "h.example/(secret)"),
        ("https://ann:pass1@h.example/t", "POST https://ann:pass1@h.example/t", None),
        ("https://ann:pass1@h.example/token", "to ann:pass1", "to (secret)"),
        ("tgram://123456:token/42", "at tgram://123456:token/42", "at (secret)"),
    ],
)
def test_of_a_secret_url_only_scheme_and_host_are_shown(
    tmp_path: pathlib.Path, url: str, text: str, shown: str | None
) -> None:
    reader = files.SecretReader()
    reader.read(secret(tmp_path, url))
    expected = shown or "https://h.example/(secret)"
    assert reader.mask(text).removeprefix("POST ") == expected


@pytest.mark.parametrize("way", ["slack", "teams"])
def test_a_secret_that_is_no_url_is_refused_with_its_file(tmp_path: pathlib.Path, way: str) -> None:
    where = secret(tmp_path, "xoxb-token")
    receiver = {
        "slack": receiver_settings.Receiver(
            name="ops", slack=receiver_settings.Slack(webhook_from=where)
        ),
        "teams": receiver_settings.Receiver(
            name="ops", teams=receiver_settings.Teams(url_from=where)
        ),
    }[way]
    expected = f"receiver ops: {where.file}: expected a URL such as https://host/path"
    with pytest.raises(factory.Unusable) as caught:
        factory.make(receiver, schema.Settings())
    assert str(caught.value) == expected


def test_an_alertmanager_gets_alerts_that_last_until_the_next_reminder() -> None:
    async def story(server: Fake) -> None:
        server.answer(200)
        receiver = sender(
            schema.Settings(repeat_interval_s=3600, console_url="https://console.example/m/"),
            alertmanager=receiver_settings.Alertmanager(url=f"{server.url}/am/", reach=LOOPBACK),
        )
        over = alert("b", AlertState.RESOLVED)
        assert (await receiver.send(make_notification([alert()], [over]), {})).kind is Kind.ACCEPTED
        assert server.got[0][0] == "POST /am/api/v2/alerts"
        fires, ended = server.bodies()[0]
        assert fires == {
            "labels": {
                "alertname": "stuck",
                "kind": "stuck",
                "node": "node-a",
                "plugin": "device-plugin",
                "severity": "critical",
            },
            "annotations": {
                "summary": "device-plugin <is> stuck",
                "evidence": "probe: no answer",
                "pods": "ml/train-0",
                "runbook_url": "https://runbooks.example/stuck.md",
            },
            "startsAt": "2026-01-01T12:00:00Z",
            "endsAt": "2026-01-01T14:00:00+00:00",
            "generatorURL": "https://console.example/m/node/node-a",
        }
        assert ended["endsAt"] == "2026-01-01T12:05:00+00:00"

    play(story)


def test_a_file_gets_one_line_for_each_notification(tmp_path: pathlib.Path) -> None:
    file = tmp_path / "notifications.jsonl"
    receiver = sender(file=receiver_settings.File(path=str(file)))
    for notification in (FIRES, OVER):
        assert send(receiver, notification).kind is Kind.ACCEPTED
    lines = [orjson.loads(line) for line in file.read_bytes().splitlines()]
    assert [line["id"] for line in lines] == [FIRES.id, OVER.id]
    away = sender(file=receiver_settings.File(path=str(tmp_path / "none" / "x")))
    assert send(away, FIRES) == Result(
        outcome=Outcome.WRITE_FAILED, detail=f"{tmp_path}/none/x: No such file or directory"
    )


def test_a_line_that_does_not_fit_into_a_file_leaves_no_half_of_it(
    tmp_path: pathlib.Path,
) -> None:
    file = tmp_path / "notifications.jsonl"
    receiver = sender(file=receiver_settings.File(path=str(file)))
    assert send(receiver, FIRES).kind is Kind.ACCEPTED
    size = file.stat().st_size
    was = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size + 100, was[1]))
    try:
        answer = send(receiver, OVER)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, was)
    assert answer.outcome is Outcome.WRITE_FAILED
    assert file.stat().st_size == size
    assert send(receiver, OVER).kind is Kind.ACCEPTED
    assert len([orjson.loads(line) for line in file.read_bytes().splitlines()]) == 2


@pytest.mark.parametrize("meanwhile", [b'{"id":"other"}\n', None])
def test_a_failed_write_leaves_what_another_process_does_with_the_file(
    meanwhile: bytes | None, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "notifications.jsonl"
    receiver = sender(file=receiver_settings.File(path=str(file)))
    assert send(receiver, FIRES).kind is Kind.ACCEPTED
    line = file.read_bytes()

    def fails(_: int) -> NoReturn:
        if meanwhile is None:
            # as logrotate does with copytruncate
            os.truncate(file, 0)
        else:
            with file.open("ab") as opened:
                opened.write(meanwhile)
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "fsync", fails)
    assert send(receiver, OVER).outcome is Outcome.WRITE_FAILED
    if meanwhile is None:
        assert file.read_bytes() == b""
    else:
        assert file.read_bytes().startswith(line)
        assert file.read_bytes().endswith(meanwhile)


def test_what_is_no_file_is_not_written_and_waits_for_nobody(tmp_path: pathlib.Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    answer = send(sender(file=receiver_settings.File(path=str(tmp_path / "pipe"))), FIRES)
    assert answer.outcome is Outcome.WRITE_FAILED


def test_kubernetes_gets_events_on_node_and_pod_and_a_repeat_adds_none() -> None:
    async def story() -> None:
        async with asyncio.timeout(100), kubernetes.KubernetesApi() as api:
            receiver = sender(
                schema.Settings(
                    kubernetes=receiver_settings.Kubernetes(url=api.url),
                    console_url="https://console.example/",
                ),
                kubernetes=receiver_settings.KubernetesEvents(),
                limits=QUICK,
            )
            async with aiohttp.ClientSession(api.url) as http:
                await http.post("/api/v1/namespaces", json={"metadata": {"name": "ml"}})
                spec = {"containers": [{"name": "c", "image": "i"}]}
                pod = {"metadata": {"name": "train-0"}, "spec": spec}
                made = await http.post("/api/v1/namespaces/ml/pods", json=pod)
                uid = (await made.json())["metadata"]["uid"]
            for _ in range(2):
                answer = await receiver.send(FIRES, {})
                assert answer == Result(outcome=Outcome.ACCEPTED, detail="2 events", requests=2)
            assert (await receiver.send(OVER, {})).kind is Kind.ACCEPTED
            async with (
                aiohttp.ClientSession(api.url) as http,
                http.get("/apis/events.k8s.io/v1/events") as response,
            ):
                items = (await response.json())["items"]
        assert {item["regarding"]["uid"] for item in items} == {"node-a", uid}
        shown = sorted(
            (item["regarding"]["kind"], item["metadata"]["namespace"], item["reason"], item["type"])
            for item in items
        )
        assert shown == [
            ("Node", "default", "Stuck", "Warning"),
            ("Node", "default", "StuckResolved", "Normal"),
            ("Pod", "ml", "Stuck", "Warning"),
            ("Pod", "ml", "StuckResolved", "Normal"),
        ]
        assert {item["note"] for item in items} == {
            (
                "device-plugin <is> stuck; probe: no answer; https://runbooks.example/stuck.md; "
                "console: https://console.example/node/node-a"
            )
        }

    asyncio.run(story())


@pytest.mark.parametrize(
    ("way", "problem"),
    [
        (
            {"slack": {"token_from": {"file": "/none"}, "channel": "#a"}},
            "receiver r: /none: No such file or directory",
        ),
        (
            {"pagerduty": {"routing_key_from": {"env": "MUSTER_NO_SUCH_VARIABLE"}}},
            "receiver r: the variable MUSTER_NO_SUCH_VARIABLE is not set or is empty",
        ),
        (
            {"webhook": {"url_from": {"file": "/etc/hostname", "at": "a.0"}}},
            "receiver r: /etc/hostname: a.0: missing or empty",
        ),
        (
            {"apprise": {"url_from": {"file": "/etc/hostname"}}},
            "receiver r: apprise: this kind of URL is not supported",
        ),
        (
            {"kubernetes": {}},
            "receiver r: kubernetes: not in a pod, and kubernetes.url is not set",
        ),
    ],
)
def test_a_receiver_that_cannot_be_made_says_what_is_missing(
    way: Mapping[str, object], problem: str
) -> None:
    receiver = msgspec.convert({"name": "r", **way}, receiver_settings.Receiver)
    with pytest.raises(factory.Unusable) as refused:
        factory.make(receiver, schema.Settings())
    assert str(refused.value) == problem


def test_a_secret_may_stand_inside_a_yaml_file(tmp_path: pathlib.Path) -> None:
    file = tmp_path / "alertmanager.yml"
    file.write_text("receivers: [{slack_configs: [{api_url: 'http://h/x'}]}]")
    where = receiver_settings.Secret(file=str(file), at="receivers.0.slack_configs.0.api_url")
    assert files.secret(where) == "http://h/x"


def test_the_owner_of_a_pod_names_a_receiver_and_a_pod_goes_before_its_namespace() -> None:
    async def story() -> None:
        async with asyncio.timeout(100), kubernetes.KubernetesApi() as api:
            async with aiohttp.ClientSession(api.url) as http:
                about = {"annotations": {"muster.dev/notify": "team-ml, nobody"}}
                await http.post("/api/v1/namespaces", json={"metadata": {"name": "ml", **about}})
                spec = {"containers": [{"name": "c", "image": "i"}]}
                own = {"name": "own", "annotations": {"muster.dev/notify": "team-own"}}
                for metadata in (own, {"name": "plain"}):
                    pod = {"metadata": metadata, "spec": spec}
                    response = await http.post("/api/v1/namespaces/ml/pods", json=pod)
                    assert response.status == 201
            receiver = kubernetes_api.Owners(
                kubernetes_api.KubernetesApi(receiver_settings.Kubernetes(url=api.url)),
                annotation="muster.dev/notify",
                receivers=("team-ml", "team-own"),
                report=nobody,
            )
            assert await receiver.owners_of(["ml/own"]) == {"team-own": ("ml/own",)}
            assert await receiver.owners_of(["ml/plain", "ml/gone"]) == {
                "team-ml": ("ml/plain", "ml/gone")
            }
            assert await receiver.owners_of(["ml/own", "ml/plain"]) == {
                "team-ml": ("ml/plain",),
                "team-own": ("ml/own",),
            }
            assert (
                await receiver.owners_of(["ml/../../nodes", "x\r\nHost: y/z", "", "none/a"]) == {}
            )

    asyncio.run(story())


async def nobody(_: alert_index.OwnedAlert) -> None:
    """Hear nothing."""


def test_owners_that_cannot_be_asked_are_asked_again_and_the_newest_alert_counts() -> None:
    async def story() -> None:
        reported: asyncio.Queue[alert_index.OwnedAlert] = asyncio.Queue()
        answer = {"metadata": {"annotations": {"muster.dev/notify": "team-ml"}}}
        async with asyncio.timeout(100), fake() as server:
            server.answer(503)
            receiver = kubernetes_api.Owners(
                kubernetes_api.KubernetesApi(receiver_settings.Kubernetes(url=server.url)),
                annotation="muster.dev/notify",
                receivers=("team-ml",),
                report=reported.put,
                retry_s=0.01,
            )
            receiver.look_up(event(alert("a")))
            newest = event(alert("a", summary="again"))
            receiver.look_up(newest)
            receiver.look_up(event(alert("b", pods=())))
            receiver.look_up(event(alert("c")))
            receiver.look_up(event(alert("c", AlertState.RESOLVED)))
            async with asyncio.TaskGroup() as tasks:
                working = tasks.create_task(receiver.run())
                while len(server.got) < 3:
                    await asyncio.sleep(0.01)  # asks another task
                assert reported.empty()
                server.responses = [(200, {}, orjson.dumps(answer))]
                assert await reported.get() == alert_index.OwnedAlert(
                    newest, {"team-ml": ("ml/train-0",)}
                )
                assert reported.empty()
                working.cancel()

    asyncio.run(story())


def event(about: vocabulary.AlertChanged) -> codec.CloudEvent:
    return codec.CloudEvent(
        id="1",
        source="/health",
        type=about.TYPE,
        time=T0,
        instance="1",
        sequence=1,
        boot="",
        data=about,
    )
