"""Each receiver against a server that keeps what it is sent, and answers as the service does."""

import asyncio
import contextlib
import datetime as dt
import email
import email.policy
import errno
import os
import pathlib
import resource
import ssl
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

import aiohttp
import aiosmtpd.smtp
import msgspec
import orjson
import pytest

from muster import codec, commands, vocabulary
from muster.local import kubernetes, nats
from muster.vocabulary import AlertState
from muster_notifier.config import files, receiver_settings, schema
from muster_notifier.receivers import email as mails
from muster_notifier.receivers import factory, kubernetes_api, message
from muster_notifier.receivers.results import Kind, Outcome, Result
from muster_notifier.routing import alert_index, notifications
from muster_notifier.routing.notifications import Notification

# Apprise 2.2 imports it, below Python 3.13
pytestmark = pytest.mark.filterwarnings("ignore:'imghdr' is deprecated:DeprecationWarning")

T0 = dt.datetime(2026, 1, 1, 12, 0, tzinfo=dt.UTC)
LOOPBACK = receiver_settings.Reach.LOOPBACK
QUICK = receiver_settings.Limits(rate_per_s=1000)
GROUP = '{}:{kind="stuck",node="node-a"}'


def alert(
    name: str = "a", state: AlertState = AlertState.FIRING, **more: Any
) -> vocabulary.AlertChanged:
    about: dict[str, Any] = {
        "node": "node-a",
        "at": T0,
        "plugin": "device-plugin",
        "kind": vocabulary.AlertKind.STUCK,
        "severity": vocabulary.Severity.CRITICAL,
        "state": state,
        "fingerprint": f"{name:0>16}",
        "summary": "device-plugin <is> stuck",
        "starts_at": T0,
        "ends_at": T0 + dt.timedelta(minutes=5) if state is AlertState.RESOLVED else None,
        "pods": ("ml/train-0",),
        "evidence": (vocabulary.Evidence(source="probe", observed="no answer"),),
        "runbook": "https://runbooks.example/stuck.md",
    }
    return vocabulary.AlertChanged(**(about | more))


def make_notification(
    firing: Sequence[vocabulary.AlertChanged] = (),
    resolved: Sequence[vocabulary.AlertChanged] = (),
    reason: vocabulary.NotificationReason = vocabulary.NotificationReason.FIRST,
) -> Notification:
    return notifications.create(
        after="",
        receiver="r",
        group=GROUP,
        labels={"kind": "stuck", "node": "node-a"},
        reason=reason,
        firing=firing,
        resolved=resolved,
        send_resolved=True,
        at=T0,
    )


FIRES = make_notification([alert()])
OVER = make_notification(
    resolved=[alert(state=AlertState.RESOLVED)], reason=vocabulary.NotificationReason.ALL_RESOLVED
)


@dataclass
class Fake:
    """An HTTP server that answers as it is set to, in order, the last for ever."""

    responses: list[tuple[int, dict[str, str], bytes]] = field(default_factory=list)
    got: list[tuple[str, dict[str, str], bytes]] = field(default_factory=list)
    url: str = ""

    def answer(self, status: int, body: Any = None, **headers: str) -> None:
        self.responses.append((status, headers, b"" if body is None else orjson.dumps(body)))

    def bodies(self) -> list[Any]:
        return [orjson.loads(body) for _, _, body in self.got]

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        first, *lines = head.strip().split("\r\n")
        headers = dict(line.lower().split(": ", 1) for line in lines)
        body = await reader.readexactly(int(headers["content-length"]))
        self.got.append((first.removesuffix(" HTTP/1.1"), headers, body))
        status, more, answer = (
            self.responses.pop(0) if len(self.responses) > 1 else self.responses[0]
        )
        shown = "".join(f"{name}: {value}\r\n" for name, value in more.items())
        writer.write(
            f"HTTP/1.1 {status} X\r\n{shown}Content-Length: {len(answer)}\r\n\r\n".encode()
        )
        writer.write(answer)
        await writer.drain()
        writer.close()


@contextlib.asynccontextmanager
async def fake() -> AsyncIterator[Fake]:
    made = Fake()
    async with await asyncio.start_server(made.serve, "127.0.0.1", 0) as server:
        made.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        yield made


def sender(settings: schema.Settings | None = None, **way: Any) -> factory.Sender:
    return factory.make(receiver_settings.Receiver(name="r", **way), settings or schema.Settings())


def send(receiver: factory.Sender, notification: Notification) -> Result:
    async def sent() -> Result:
        return await receiver.send(notification, {})

    return asyncio.run(sent())


def play(story: Callable[[Fake], Awaitable[None]]) -> None:
    async def played() -> None:
        async with asyncio.timeout(100), fake() as server:
            await story(server)

    asyncio.run(played())


def secret(directory: pathlib.Path, text: str) -> receiver_settings.Secret:
    file = directory / f"secret-{len(text)}"
    file.write_text(text + "\n")
    return receiver_settings.Secret(file=str(file))


NO_PREVIEWS = {"unfurl_links": False, "unfurl_media": False}
TITLE = "node-a: device-plugin <is> stuck; 1 pod holds devices, new pods fail"
CODE = (
    "critical since 2026-01-01 12:00:00 UTC: node-a device-plugin\n"
    "pods that use it: ml/train-0\n"
    "probe: no answer\n"
    "look closer: muster why node-a\n"
    "silence: muster silence add kind=stuck node=node-a --duration 2h --comment WHY"
)


def slack(server: Fake, directory: pathlib.Path) -> factory.Sender:
    return sender(
        slack=receiver_settings.Slack(
            token_from=secret(directory, "xoxb-1"),
            channel="#gpu",
            url=f"{server.url}/api",
            reach=LOOPBACK,
        ),
        limits=QUICK,
    )


def test_slack_gets_one_message_a_group_that_is_edited_and_a_thread(tmp_path: pathlib.Path) -> None:
    async def story(server: Fake) -> None:
        server.answer(200, {"ok": True, "ts": "17.1", "channel": "C1"})
        channel = slack(server, tmp_path)
        first = await channel.send(FIRES, {})
        assert first == Result(
            outcome=Outcome.ACCEPTED, detail="ok", data={"channel": "C1", "ts": "17.1"}
        )
        last = await channel.send(OVER, first.data)
        assert last == Result(
            outcome=Outcome.ACCEPTED, detail="ok", data={"channel": "C1", "ts": "17.1"}, requests=2
        )
        paths = [path for path, _, _ in server.got]
        assert paths == [
            "POST /api/chat.postMessage",
            "POST /api/chat.update",
            "POST /api/chat.postMessage",
        ]
        assert {h["authorization"] for _, h, _ in server.got} == {"bearer xoxb-1"}
        post, update, reply = server.bodies()
        shown = TITLE.replace("<", "&lt;").replace(">", "&gt;")
        link = "<https://runbooks.example/stuck.md|runbook of stuck>"
        assert post == {
            "channel": "#gpu",
            "text": shown,
            **NO_PREVIEWS,
            "attachments": [
                {
                    "color": "#d00000",
                    "blocks": [
                        {
                            "type": "section",
                            "text": {"type": "mrkdwn", "text": f"```{CODE}```"},
                        },
                        {"type": "context", "elements": [{"type": "mrkdwn", "text": link}]},
                    ],
                }
            ],
        }
        assert (update["channel"], update["ts"]) == ("C1", "17.1")
        assert update["attachments"][0]["color"] == "#2eb67d"
        assert reply == {
            "channel": "C1",
            "thread_ts": "17.1",
            "text": "Resolved after 5 min: node-a: device-plugin &lt;is&gt; stuck",
            **NO_PREVIEWS,
        }

    play(story)


@pytest.mark.parametrize(
    ("status", "body", "headers", "answer"),
    [
        (
            429,
            None,
            {"Retry-After": "30"},
            Result(outcome=Outcome.RATE_LIMITED, detail="HTTP 429", retry_after_s=30.0),
        ),
        (
            200,
            {"ok": False, "error": "invalid_auth"},
            {},
            Result(outcome=Outcome.UNAUTHORIZED, detail="Slack: invalid_auth"),
        ),
        (
            200,
            {"ok": False, "error": "internal_error"},
            {},
            Result(outcome=Outcome.SERVER_ERROR, detail="Slack: internal_error"),
        ),
        (
            200,
            "?",
            {},
            Result(outcome=Outcome.INVALID_RESPONSE, detail="Slack: not a response from its API"),
        ),
        (503, None, {}, Result(outcome=Outcome.SERVER_ERROR, detail="HTTP 503")),
    ],
)
def test_each_answer_of_slack_has_one_meaning(
    status: int, body: Any, headers: dict[str, str], answer: Result, tmp_path: pathlib.Path
) -> None:
    async def story(server: Fake) -> None:
        server.answer(status, body, **headers)
        assert await slack(server, tmp_path).send(FIRES, {}) == answer

    play(story)


def test_a_message_that_is_gone_from_slack_is_posted_anew(tmp_path: pathlib.Path) -> None:
    async def story(server: Fake) -> None:
        server.answer(200, {"ok": False, "error": "message_not_found"})
        server.answer(200, {"ok": True, "ts": "18.1", "channel": "C1"})
        answer = await slack(server, tmp_path).send(OVER, {"channel": "C1", "ts": "17.1"})
        assert answer.data == {"channel": "C1", "ts": "18.1"}

    play(story)


def test_without_a_bot_slack_gets_a_message_for_each_change(tmp_path: pathlib.Path) -> None:
    async def story(server: Fake) -> None:
        server.answer(200)
        hook = secret(tmp_path, f"{server.url}/services/T0/B0/x")
        receiver = sender(slack=receiver_settings.Slack(webhook_from=hook, reach=LOOPBACK))
        assert (await receiver.send(FIRES, {})).kind is Kind.ACCEPTED
        assert server.got[0][0] == "POST /services/T0/B0/x"
        assert sorted(server.bodies()[0]) == ["attachments", "text", *NO_PREVIEWS]

    play(story)


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


def test_teams_gets_a_card_that_is_small_enough() -> None:
    async def story(server: Fake) -> None:
        server.answer(202)
        receiver = sender(
            teams=receiver_settings.Teams(url=f"{server.url}/w?sig=1", reach=LOOPBACK)
        )
        assert (await receiver.send(FIRES, {})).kind is Kind.ACCEPTED
        many = make_notification([alert(f"{index:x}", summary="x" * 300) for index in range(300)])
        assert (await receiver.send(many, {})).kind is Kind.ACCEPTED
        assert server.got[0][0] == "POST /w?sig=1"
        (attachment,) = server.bodies()[0]["attachments"]
        assert attachment["contentType"] == "application/vnd.microsoft.card.adaptive"
        texts = [block["text"] for block in attachment["content"]["body"]]
        assert texts[0] == TITLE.replace("<", "< ")
        assert texts[-2] == "look closer: muster why node-a"
        assert len(server.got[1][2]) <= 28_000

    play(story)


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


@pytest.mark.parametrize(
    ("answer", "outcome"),
    [
        (b"ok", Outcome.ACCEPTED),
        (b"", Outcome.ACCEPTED),
        (b'{"success":true}', Outcome.ACCEPTED),
        (b"invalid_payload", Outcome.REJECTED),
        (b"no_service\n", Outcome.NOT_FOUND),
        (b'{"ok":false,"error":"invalid_auth"}', Outcome.UNAUTHORIZED),
        (b'{"error":{"message":"x"}}', Outcome.REJECTED),
        (b"<html>please sign in</html>", Outcome.INVALID_RESPONSE),
        (b"endpoint returned HTTP error 429 with ContextId x", Outcome.RATE_LIMITED),
    ],
)
def test_a_200_with_an_error_in_its_body_is_a_failure(
    answer: bytes, outcome: Outcome, tmp_path: pathlib.Path
) -> None:
    async def story(server: Fake) -> None:
        server.responses.append((200, {}, answer))
        where = secret(tmp_path, server.url)
        for way in (
            {"slack": receiver_settings.Slack(webhook_from=where, reach=LOOPBACK)},
            {"teams": receiver_settings.Teams(url_from=where, reach=LOOPBACK)},
        ):
            assert (await sender(**way).send(FIRES, {})).outcome is outcome

    play(story)


def test_a_slow_body_after_a_good_status_is_a_message_that_was_taken(
    tmp_path: pathlib.Path,
) -> None:
    async def story() -> None:
        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n")
            with contextlib.suppress(ConnectionError):
                await reader.read()
            writer.close()
            await asyncio.gather(writer.wait_closed(), return_exceptions=True)
            ended.release()

        ended = asyncio.Semaphore(0)
        async with (
            asyncio.timeout(100),
            await asyncio.start_server(serve, "127.0.0.1", 0) as server,
        ):
            url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
            hook = receiver_settings.Slack(
                webhook_from=secret(tmp_path, url), reach=LOOPBACK, timeout_s=0.5
            )
            bot = receiver_settings.Slack(
                token_from=secret(tmp_path, "xoxb"),
                channel="#a",
                url=url,
                reach=LOOPBACK,
                timeout_s=0.2,
            )
            taken = await sender(slack=hook).send(FIRES, {})
            assert taken == Result(outcome=Outcome.ACCEPTED, detail="HTTP 200")
            unknown = await sender(slack=bot).send(FIRES, {})
            assert (unknown.outcome, unknown.is_unknown) == (Outcome.TIMED_OUT, True)
            for _ in (taken, unknown):
                await ended.acquire()

    asyncio.run(story())


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


class Mailbox:
    """What aiosmtpd gives its mails to."""

    def __init__(self) -> None:
        self.mails: list[tuple[str, list[str], bytes]] = []
        self.unknown: set[str] = set()
        self.grey: set[str] = set()
        self.refusal = ""

    async def handle_RCPT(  # noqa: N802  # aiosmtpd's name
        self, _server: Any, _session: Any, envelope: Any, address: str, _options: Any
    ) -> str:
        if address in self.grey:
            return "450 greylisted"
        if address in self.unknown:
            return "550 no such user"
        envelope.rcpt_tos.append(address)
        return "250 OK"

    async def handle_DATA(self, _server: Any, _session: Any, envelope: Any) -> str:  # noqa: N802
        if self.refusal:
            return self.refusal
        self.mails.append((envelope.mail_from, envelope.rcpt_tos, envelope.content))
        return "250 OK"


@contextlib.asynccontextmanager
async def relay(
    directory: pathlib.Path, *, implicit: bool = False, **more: Any
) -> AsyncIterator[tuple[Mailbox, int, str]]:
    """Run a real SMTP server with STARTTLS and a login; give mailbox, port and certificate."""
    key, certificate = directory / "key.pem", directory / "cert.pem"
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2"]
    command += ["-subj", "/CN=127.0.0.1", "-addext", "subjectAltName=IP:127.0.0.1"]
    command += ["-keyout", str(key), "-out", str(certificate)]
    made = await asyncio.create_subprocess_exec(
        *command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    assert await made.wait() == 0
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    mailbox = Mailbox()

    def login(_server: Any, _session: Any, _envelope: Any, _mechanism: str, login_data: Any) -> Any:
        is_right = (login_data.login, login_data.password) == (b"muster", b"pass word")
        return aiosmtpd.smtp.AuthResult(success=is_right, handled=is_right)

    def protocol() -> aiosmtpd.smtp.SMTP:
        settings: dict[str, Any] = {
            "tls_context": context,
            "require_starttls": True,
            "authenticator": login,
            "auth_required": True,
            "enable_SMTPUTF8": True,
        }
        if implicit:
            settings |= {"require_starttls": False, "auth_require_tls": False}
            settings["auth_required"] = False
        return aiosmtpd.smtp.SMTP(mailbox, **(settings | more))

    loop = asyncio.get_running_loop()
    server = await loop.create_server(protocol, "127.0.0.1", 0, ssl=context if implicit else None)
    try:
        yield mailbox, server.sockets[0].getsockname()[1], str(certificate)
    finally:
        server.close()
        await asyncio.sleep(0)


def by_mail(port: int, certificate: str | None, directory: pathlib.Path, **more: Any) -> Any:
    settings: dict[str, Any] = {
        "host": "127.0.0.1",
        "port": port,
        "sender": "muster <muster@example.com>",
        "to": ("ops@example.com", "ann@example.com"),
        "ca_file": certificate,
        "username": "muster",
        "password_from": secret(directory, "pass word"),
        "timeout_s": 5.0,
    }
    return sender(email=receiver_settings.Email(**(settings | more)))


def test_a_mail_goes_encrypted_to_everybody_and_its_thread_is_the_groups(
    tmp_path: pathlib.Path,
) -> None:
    async def story() -> Mailbox:
        async with asyncio.timeout(100), relay(tmp_path) as (mailbox, port, certificate):
            receiver = by_mail(port, certificate, tmp_path)
            dotted = make_notification([alert(summary="ünï\r\n.code\r\n.\r\nQUIT")])
            for notification in (dotted, OVER):
                answer = await receiver.send(notification, {})
                assert answer == Result(
                    outcome=Outcome.ACCEPTED, detail=f"accepted by 127.0.0.1:{port}"
                )
            return mailbox

    mailbox = asyncio.run(story())
    assert [(who, to) for who, to, _ in mailbox.mails] == [
        ("muster@example.com", ["ops@example.com", "ann@example.com"])
    ] * 2
    first, last = [
        email.message_from_bytes(text, policy=email.policy.default) for _, _, text in mailbox.mails
    ]
    assert first["Subject"] == "node-a: ünï .code . QUIT; 1 pod holds devices, new pods fail"
    assert last["Subject"] == "Resolved after 5 min: node-a: device-plugin <is> stuck"
    assert first["References"] == last["References"]
    assert (first["Message-ID"], last["Message-ID"]) == (
        f"<{make_notification([alert(summary='')]).id}@example.com>",
        f"<{OVER.id}@example.com>",
    )
    assert first["Auto-Submitted"] == "auto-generated"
    body = last.get_content().replace("\r\n", "\n")
    assert body == message.PLAIN.compose(OVER).text + "\n"


def test_a_mail_relay_that_is_not_trusted_or_refuses_gets_no_mail(tmp_path: pathlib.Path) -> None:
    async def story() -> None:
        async with asyncio.timeout(100), relay(tmp_path) as (mailbox, port, certificate):
            answer = await by_mail(port, None, tmp_path).send(FIRES, {})
            assert answer.kind is Kind.TEMPORARY
            assert "certificate is not trusted" in answer.detail
            wrong = secret(tmp_path, "wrong")
            answer = await by_mail(port, certificate, tmp_path, password_from=wrong).send(FIRES, {})
            assert answer.kind is Kind.REFUSED
            assert "535" in answer.detail
            assert "wrong" not in answer.detail
            receiver = by_mail(port, certificate, tmp_path)
            mailbox.unknown = {"ann@example.com"}
            answer = await receiver.send(FIRES, {})
            assert answer.kind is Kind.ACCEPTED
            assert answer.detail.endswith("; recipients refused: ann@example.com")
            mailbox.refusal = "452 mailbox full"
            assert (await receiver.send(FIRES, {})).kind is Kind.TEMPORARY
            mailbox.refusal = "554 spam"
            assert (await receiver.send(FIRES, {})).kind is Kind.REFUSED
            mailbox.unknown = {"ann@example.com", "ops@example.com"}
            assert (await receiver.send(FIRES, {})).kind is Kind.REFUSED
            assert len(mailbox.mails) == 1

    asyncio.run(story())


def test_a_recipient_that_the_relay_may_accept_later_is_tried_again_alone(
    tmp_path: pathlib.Path,
) -> None:
    async def story() -> Mailbox:
        async with asyncio.timeout(100), relay(tmp_path) as (mailbox, port, certificate):
            receiver = by_mail(port, certificate, tmp_path)
            mailbox.grey = {"ann@example.com"}
            answer = await receiver.send(FIRES, {})
            assert answer.outcome is Outcome.SERVER_ERROR
            assert answer.detail.endswith("ann@example.com: 450 greylisted")
            assert (await receiver.send(FIRES, {})).outcome is Outcome.SERVER_ERROR
            mailbox.grey = set()
            assert (await receiver.send(FIRES, {})).kind is Kind.ACCEPTED
            assert (await receiver.send(OVER, {})).kind is Kind.ACCEPTED
            return mailbox

    mailbox = asyncio.run(story())
    assert [to for _, to, _ in mailbox.mails] == [
        ["ops@example.com"],
        ["ann@example.com"],
        ["ops@example.com", "ann@example.com"],
    ]


def test_a_mail_relay_without_encryption_gets_no_mail(tmp_path: pathlib.Path) -> None:
    async def story() -> None:
        plain: dict[str, Any] = {
            "tls_context": None,
            "require_starttls": False,
            "auth_require_tls": False,
        }
        plain |= {"authenticator": None, "auth_required": False}
        async with asyncio.timeout(100), relay(tmp_path, **plain) as (mailbox, port, certificate):
            answer = await by_mail(port, certificate, tmp_path).send(FIRES, {})
            assert answer.kind is Kind.TEMPORARY
            assert "offers no STARTTLS" in answer.detail
            assert mailbox.mails == []

    asyncio.run(story())


def test_a_mail_goes_encrypted_from_the_start_where_that_is_set(tmp_path: pathlib.Path) -> None:
    async def story() -> None:
        async with asyncio.timeout(100), relay(tmp_path, implicit=True) as (mailbox, port, ca):
            tls = receiver_settings.Tls.IMPLICIT
            assert (
                await by_mail(port, ca, tmp_path, tls=tls).send(FIRES, {})
            ).kind is Kind.ACCEPTED
            answer = await by_mail(port, None, tmp_path, tls=tls).send(FIRES, {})
            assert answer.outcome is Outcome.NOT_TRUSTED
            assert "certificate is not trusted" in answer.detail
            assert len(mailbox.mails) == 1

    asyncio.run(story())


@contextlib.asynccontextmanager
async def listen(serve: Callable[..., Awaitable[None]]) -> AsyncIterator[int]:
    """Run a server for one connection; give its port, and wait until it is over."""
    over = asyncio.Event()

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            await serve(reader, writer)
        writer.transport.abort()
        over.set()

    async with asyncio.timeout(30), await asyncio.start_server(handle, "127.0.0.1", 0) as server:
        yield server.sockets[0].getsockname()[1]
        await over.wait()


def test_a_text_that_looks_encoded_adds_no_header_to_a_mail() -> None:
    fires = make_notification([alert(summary="=?utf-8?q?a=0D=0ABcc:_b@example.com=0A=0Ac?=")])
    text = message.PLAIN.compose(fires)
    mail = mails.encode_mail(fires, text, sender="m@example.com", to=("a@example.com",))
    head = mail.partition(b"\r\n\r\n")[0].replace(b"\r\n", b"")
    assert b"\n" not in head
    assert b"= ?utf-8?q?a=0D=0ABcc" in head


GREETING = b"220 relay\r\n"
READY = GREETING + b"250 relay\r\n" + b"250 ok\r\n" * 3


@pytest.mark.parametrize(
    ("lines", "outcome", "is_unknown"),
    [
        (b"", Outcome.CLOSED, False),
        (b"421 busy\r\n", Outcome.SERVER_ERROR, False),
        (b"554 no\r\n", Outcome.REJECTED, False),
        (b"HTTP/1.1 400 Bad Request\r\n", Outcome.INVALID_RESPONSE, False),
        (GREETING, Outcome.CLOSED, False),
        (GREETING + b"?" * 100_000, Outcome.INVALID_RESPONSE, False),
        (GREETING + b"250 relay\r\n552 too large\r\n", Outcome.TOO_LARGE, False),
        (READY + b"354 go on\r\n", Outcome.CLOSED, True),
        (READY + b"354 go on\r\n452 full\r\n", Outcome.SERVER_ERROR, False),
        (READY + b"354 go on\r\n250 ok\r\n", Outcome.ACCEPTED, False),
    ],
)
def test_each_way_in_which_a_relay_breaks_off_has_one_meaning(
    lines: bytes,
    outcome: Outcome,
    is_unknown: bool,  # noqa: FBT001  # a parameter of the test
    tmp_path: pathlib.Path,
) -> None:
    async def story() -> None:
        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            is_data = False
            for line in lines.splitlines(keepends=True):
                writer.write(line)
                await writer.drain()
                await reader.readuntil(b"\r\n.\r\n" if is_data else b"\r\n")
                is_data = line.startswith(b"354")
            writer.close()

        async with listen(serve) as port:
            no_tls: dict[str, Any] = {"tls": receiver_settings.Tls.NONE, "timeout_s": 5.0}
            no_tls |= {"username": "", "password_from": None}
            answer = await by_mail(port, None, tmp_path, **no_tls).send(FIRES, {})
            assert (answer.outcome, answer.is_unknown) == (outcome, is_unknown)
            assert answer.detail.replace(str(port), "PORT").startswith(
                "accepted by 127.0.0.1:PORT" if outcome is Outcome.ACCEPTED else "127.0.0.1:PORT: "
            )

    asyncio.run(story())


@pytest.mark.parametrize(
    ("lines", "outcome", "is_unknown"),
    [
        # nothing of the mail has been sent
        (READY, Outcome.TIMED_OUT, False),
        (GREETING + b"250 relay\r\n" + b"250 ok\r\n" * 2 + b"421 busy\r\n", Outcome.CLOSED, False),
        (READY + b"354 go on\r\n", Outcome.TIMED_OUT, True),
        # it has been accepted: sent again, people would get it twice
        (READY + b"354 go on\r\n250 ok\r\n", Outcome.ACCEPTED, False),
        (READY + b"354 go on\r\n251 ok\r\n", Outcome.ACCEPTED, False),
    ],
)
def test_a_mail_may_have_arrived_only_between_its_first_byte_and_the_answer(
    lines: bytes,
    outcome: Outcome,
    is_unknown: bool,  # noqa: FBT001  # a parameter of the test
    tmp_path: pathlib.Path,
) -> None:
    async def story() -> None:
        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            for line in lines.splitlines(keepends=True):
                writer.write(line)
                await writer.drain()
                await reader.readuntil(b"\r\n.\r\n" if line.startswith(b"354") else b"\r\n")
            await reader.read()

        async with listen(serve) as port:
            no_tls: dict[str, Any] = {"tls": receiver_settings.Tls.NONE, "timeout_s": 0.5}
            no_tls |= {"username": "", "password_from": None}
            answer = await by_mail(port, None, tmp_path, **no_tls).send(FIRES, {})
            assert (answer.outcome, answer.is_unknown) == (outcome, is_unknown)

    asyncio.run(story())


def test_a_relay_that_does_not_answer_is_waited_for_no_longer_than_set(
    tmp_path: pathlib.Path,
) -> None:
    async def story() -> None:
        async def serve(reader: asyncio.StreamReader, _: asyncio.StreamWriter) -> None:
            await reader.read()

        async with listen(serve) as port:
            answer = await by_mail(port, None, tmp_path, timeout_s=0.2).send(FIRES, {})
            assert (answer.outcome, answer.is_unknown) == (Outcome.TIMED_OUT, False)
            assert answer.detail == f"127.0.0.1:{port}: no answer within 0.2 s"

    asyncio.run(story())


def test_a_relay_nobody_can_reach_is_named(tmp_path: pathlib.Path) -> None:
    port = nats.free_port()
    answer = asyncio.run(by_mail(port, None, tmp_path).send(FIRES, {}))
    assert (answer.outcome, answer.is_unknown) == (Outcome.UNREACHABLE, False)
    answer = asyncio.run(by_mail(25, None, tmp_path, host="no.such.host.invalid").send(FIRES, {}))
    assert answer.outcome is Outcome.NO_SUCH_HOST


def test_apprise_reaches_everybody_else_and_a_failure_is_temporary_whatever_it_was(
    tmp_path: pathlib.Path,
) -> None:
    async def story(server: Fake) -> None:
        server.answer(200)
        server.answer(404)
        address = server.url.replace("http://", "json://") + "/hook/"
        receiver = sender(apprise=receiver_settings.Apprise(url_from=secret(tmp_path, address)))
        assert await receiver.send(FIRES, {}) == Result(
            outcome=Outcome.ACCEPTED, detail="apprise: sent"
        )
        assert await receiver.send(OVER, {}) == Result(
            outcome=Outcome.FAILED, detail="apprise: not sent", is_unknown=True
        )
        assert [path for path, _, _ in server.got] == ["POST /hook/", "POST /hook/"]
        first, last = server.bodies()
        assert (first["type"], last["type"]) == ("failure", "success")
        assert first["title"] == TITLE.replace("<", "< ")
        assert first["message"].rstrip("\n") == message.PLAIN.compose(message.inert(FIRES)).text

    play(story)


def test_apprise_sends_a_text_as_a_text_to_a_service_that_shows_html(
    tmp_path: pathlib.Path,
) -> None:
    async def story(server: Fake) -> None:
        server.answer(200)
        address = server.url.replace("http://", "json://") + "/hook/?format=html"
        receiver = sender(apprise=receiver_settings.Apprise(url_from=secret(tmp_path, address)))
        link = make_notification([alert(advice="a<a href='https://evil.example'>b</a>")])
        assert (await receiver.send(link, {})).kind is Kind.ACCEPTED
        (body,) = server.bodies()
        assert "&lt;&nbsp;a&nbsp;href=" in body["message"]
        assert "<a" not in body["message"] + body["title"]

    play(story)


def test_without_apprise_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "apprise", None)
    where = receiver_settings.Secret(file="/etc/hostname")
    with pytest.raises(factory.Unusable) as refused:
        sender(apprise=receiver_settings.Apprise(url_from=where))
    assert str(refused.value) == (
        f"receiver r: apprise is not installed: {commands.how_to_install('apprise')}"
    )


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
