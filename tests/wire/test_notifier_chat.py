"""Slack, Teams and Apprise receivers against servers that answer as the services do."""

import asyncio
import contextlib
import pathlib
import sys
from typing import Any

import pytest

from muster import commands
from muster_notifier.config import receiver_settings
from muster_notifier.receivers import factory, message
from muster_notifier.receivers.results import Kind, Outcome, Result
from tests.worlds.receiver_server import (
    FIRES,
    LOOPBACK,
    OVER,
    QUICK,
    TITLE,
    Fake,
    alert,
    make_notification,
    play,
    secret,
    sender,
)

# Apprise 2.2 imports it, below Python 3.13
pytestmark = pytest.mark.filterwarnings("ignore:'imghdr' is deprecated:DeprecationWarning")

NO_PREVIEWS = {"unfurl_links": False, "unfurl_media": False}


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
