"""Acts in the console with a real nats-server: silences, dead letters, and who may act."""

import asyncio
import contextlib
import re
import socket
import urllib.parse
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import prometheus_client
import pytest
import yarl
from structlog.testing import capture_logs

from muster import commands, vocabulary
from muster.fleet import writing
from muster.local import nats
from muster.nats import bus, consumers, storage, streams
from muster_console import config, oidc, sessions
from tests.worlds import console_fleet, oidc_issuer

NODE = "gpu-a100-00001"
LETTER = "muster.dlq.notification.ops.0badcafe.0123456789abcdef"
LOCAL = config.Writing(local=True)
AT = datetime(2026, 1, 2, tzinfo=UTC)
BEGAN = datetime.now(UTC) - timedelta(minutes=1)
FORM = {
    "id": "0123456789ab",
    "matchers": f"node={NODE}\nkind=stuck",
    "duration": "2h",
    "comment": "new <disk>",
    "confirmed": f"2h node={NODE} kind=stuck",
}
"""The form of a silence, confirmed in case the console does not know the alert yet."""


class World:
    """NATS, a console of a fleet with one alert, and a browser without scripts."""

    def __init__(
        self,
        browser: aiohttp.ClientSession,
        owner: bus.Bus,
        address: str,
        health: console_fleet.Health,
    ) -> None:
        self.browser = browser
        self.owner = owner
        self.address = address
        self.health = health

    async def page(self, path: str = "/alerts") -> str:
        """Return a page."""
        async with self.browser.get(path) as answer:
            return await answer.text()

    async def until_shown(self, text: str, *, is_gone: bool = False) -> str:
        """Return the page of alerts once it shows a text, or no longer does."""
        while (text in (page := await self.page())) is is_gone:
            await asyncio.sleep(0.1)
        return page

    async def send(
        self, path: str, fields: Mapping[str, str], **headers: str
    ) -> tuple[int, str, str]:
        """Send a form as a browser does; return status, location and text of the answer."""
        given = {"origin": self.address, **headers}
        async with self.browser.post(
            path, data=fields, headers=given, allow_redirects=False
        ) as answer:
            return answer.status, answer.headers.get("location", ""), await answer.text()

    async def send_after(
        self, path: str, fields: Mapping[str, str], meanwhile: Callable[[], Awaitable[object]]
    ) -> int:
        """Send a form, but do something while the console waits for it; return the status."""

        async def body() -> AsyncIterator[bytes]:
            await meanwhile()
            yield urllib.parse.urlencode(fields).encode()

        given = {"origin": self.address, "content-type": "application/x-www-form-urlencoded"}
        async with self.browser.post(
            path, data=body(), headers=given, allow_redirects=False, expect100=True
        ) as answer:
            return answer.status

    async def token(self) -> str:
        """Return the token of the forms on the page of a new silence."""
        named = re.search(r'name="token" value="(\w+)"', await self.page("/silence?m=node%3Da"))
        return named[1] if named else ""

    async def change_silences(self, **limits: int) -> None:
        """Change the limits of the bucket of silences."""
        jetstream = (await self.owner.link.client()).jetstream()
        config = (await jetstream.stream_info(f"KV_{streams.SILENCES.name}")).config
        await jetstream.update_stream(config.evolve(**limits))

    async def silences(self) -> list[tuple[str, str]]:
        """Return author and comment of each silence that notifier and commands read."""
        by_id, _ = await writing.read_silences(self.owner.link)
        return [(each.author, each.comment) for each in by_id.values()]

    async def acts(self, count: int) -> list[tuple[vocabulary.ActOutcome, str]]:
        """Return outcome and reason of the first audit events."""
        return [(each.outcome, each.reason) for each in await self.events(count)]

    async def events(self, count: int) -> list[vocabulary.OperatorActed]:
        """Return the first audit events."""
        events = consumers.follow(
            self.owner.link, streams.AUDIT, filters=streams.AUDIT.subjects, since=BEGAN
        )
        every: list[vocabulary.OperatorActed] = []
        while len(every) < count:
            acted = (await anext(events)).data
            assert isinstance(acted, vocabulary.OperatorActed)
            every.append(acted)
        return every

    async def acted(self) -> vocabulary.OperatorActed:
        """Return the next audit event since a minute ago."""
        since = datetime.now(UTC) - timedelta(minutes=1)
        async for event in consumers.follow(
            self.owner.link, streams.AUDIT, filters=streams.AUDIT.subjects, since=since
        ):
            assert isinstance(event.data, vocabulary.OperatorActed)
            return event.data
        raise AssertionError


@contextlib.asynccontextmanager
async def world(
    directory: Path, settings: config.Writing | None = None, port: int = 0
) -> AsyncIterator[World]:
    health = console_fleet.Health(
        [console_fleet.plugin(NODE, "STUCK", alerts=[console_fleet.alert(NODE, number=1)])]
    )
    async with (
        asyncio.timeout(150),
        nats.NatsServer(directory / "nats") as server,
        bus.Bus(server.url, producer="test", name="test", owner=True) as owner,
    ):
        await owner.link.client()
        async with (
            console_fleet.shown(
                health, nats_url=server.url, writing=settings, port=port
            ) as address,
            aiohttp.ClientSession(
                base_url=address, cookie_jar=aiohttp.CookieJar(unsafe=True)
            ) as browser,
        ):
            yield World(browser, owner, address, health)


async def put_letter(owner: bus.Bus) -> None:
    headers = {
        "Muster-Receiver": "ops",
        "Muster-Group": 'default:{kind="stuck"}',
        "Muster-Error": "HTTP 500 <b>",
        "Muster-Attempts": "3",
        "Muster-Died-At": "2026-01-02T12:00:00+00:00",
    }
    await storage.enqueue(owner.link, LETTER, b"{}", key="letter", headers=headers)


def test_an_undelivered_notification_is_shown_with_its_reason(tmp_path: Path) -> None:
    async def story() -> None:
        async with world(tmp_path) as shown:
            await put_letter(shown.owner)
            page = await shown.until_shown("muster dlq replay 0123456789ab")
            assert "HTTP 500 &lt;b&gt;" in page
            assert "after 3 attempts" in page
            assert '<button class="button" id="send-again' not in page
            assert (await shown.send("/silence", FORM))[0] == 405

    asyncio.run(story())


def test_a_silence_of_the_page_is_one_for_all_and_is_expired_there(tmp_path: Path) -> None:
    async def story() -> None:
        async with world(tmp_path, LOCAL) as shown:
            me = commands.user_name()
            await shown.until_shown(NODE)
            token = await shown.token()
            status, place, _ = await shown.send("/silence", {**FORM, "token": token})
            assert status == 303
            silence_id = place.removeprefix("alerts?done=silenced&silence=")
            assert await shown.silences() == [(me, FORM["comment"])]
            page = await shown.until_shown(f"expire-{silence_id}")
            assert "new &lt;disk&gt;" in page
            acted = msgspec.structs.replace(await shown.acted(), at=AT, about="")
            assert acted == vocabulary.OperatorActed(
                node=vocabulary.FLEET,
                at=AT,
                actor=me,
                identity="local",
                act=vocabulary.Act.SILENCE,
                outcome=vocabulary.ActOutcome.DONE,
                target=silence_id,
                reason=FORM["comment"],
            )
            done = await shown.send("/expire", {"id": silence_id, "token": token})
            assert done[:2] == (303, f"alerts?done=expired&silence={silence_id}")
            await shown.until_shown(f"expire-{silence_id}", is_gone=True)
            status, _, text = await shown.send("/expire", {"id": silence_id, "token": token})
            assert (status, "this silence had already ended, at " in text) == (409, True)
            assert '<a href="alerts">Back to the alerts</a>' in text
            again = (await shown.events(3))[1:]
            assert [(each.outcome, each.about) for each in again] == [
                (outcome, f"node={NODE} kind=stuck (by {me}: {FORM['comment']})")
                for outcome in (vocabulary.ActOutcome.DONE, vocabulary.ActOutcome.REFUSED)
            ]
            status, _, text = await shown.send("/expire", {"id": "none", "token": token})
            assert (status, "there is no such silence" in text) == (409, True)

    asyncio.run(story())


def test_an_act_that_nats_refuses_is_refused_with_the_reason(tmp_path: Path) -> None:
    async def story() -> None:
        async with world(tmp_path, LOCAL) as shown:
            fields = {**FORM, "token": await shown.token()}
            await shown.change_silences(max_msg_size=50)
            status, _, text = await shown.send("/silence", fields)
            reason = "NATS refused the change: message size exceeds maximum allowed"
            assert (status, reason in text) == (409, True)
            assert await shown.acts(1) == [(vocabulary.ActOutcome.REFUSED, reason)]
            assert await shown.silences() == []

    asyncio.run(story())


def test_a_form_that_is_sent_twice_adds_one_silence(tmp_path: Path) -> None:
    async def story() -> None:
        async with world(tmp_path, LOCAL) as shown:
            page = await shown.page("/silence?m=node%3Da")
            ids = re.findall(r'name="id" value="([0-9a-f]{12})"', page)
            fields = {**FORM, "id": ids[0], "token": await shown.token()}
            for _ in range(2):
                status, place, _ = await shown.send("/silence", fields)
                assert (status, place) == (303, f"alerts?done=silenced&silence={ids[0]}")
            status, _, text = await shown.send("/silence", {**fields, "comment": "other"})
            assert (status, "already sent with other content" in text) == (409, True)
            assert f'name="id" value="{ids[0]}"' not in text
            assert await shown.acts(3) == [
                (vocabulary.ActOutcome.DONE, FORM["comment"]),
                (vocabulary.ActOutcome.DONE, "sent again: this silence was already stored"),
                (
                    vocabulary.ActOutcome.REFUSED,
                    "this form was already sent with other content; send it again",
                ),
            ]
            fields["id"] = "ffffffffffff"
            await asyncio.gather(*(shown.send("/silence", fields) for _ in range(2)))
            assert len(await shown.silences()) == 2
            assert (await shown.send("/silence", {**fields, "id": ""}))[0] == 400

    asyncio.run(story())


def test_a_long_silence_of_most_nodes_must_be_confirmed(tmp_path: Path) -> None:
    async def story() -> None:
        async with world(tmp_path, LOCAL) as shown:
            await shown.until_shown(NODE)
            storm = console_fleet.alert("_fleet", number=2, kind="mass_failure")
            shown.health.fleet_alerts.append(storm)
            await shown.until_shown("mass_failure")
            fields = {**FORM, "matchers": "kind=stuck", "duration": "30d"}
            fields["token"] = await shown.token()
            status, _, text = await shown.send("/silence", fields)
            assert (status, "alerts of every node for longer than a day" in text) == (400, True)
            assert 'name="confirmed" value="30d kind=stuck">' in text
            assert await shown.silences() == []
            fields["confirmed"] = "30d kind=stuck"
            wider = {**fields, "matchers": 'node=~".+"'}
            assert (await shown.send("/silence", wider))[0] == 400
            assert (await shown.send("/silence", fields))[0] == 303

    asyncio.run(story())


def test_what_a_new_silence_matches_is_shown_without_storing_it(tmp_path: Path) -> None:
    async def story() -> None:
        async with world(tmp_path, LOCAL) as shown:
            await shown.until_shown(NODE)
            fields = {**FORM, "token": await shown.token(), "show": "1", "comment": ""}
            for matchers, counted in (
                ("kind=stuck", "<code>kind=stuck</code> matches 1 firing alert."),
                ("node=b", "<code>node=b</code> matches 0 firing alerts."),
            ):
                status, _, text = await shown.send("/silence", {**fields, "matchers": matchers})
                assert (status, counted in text) == (200, True)
            for matchers, problem in (("nod=a", "no alert has a label nod"), ("a", "expected a")):
                status, _, text = await shown.send("/silence", {**fields, "matchers": matchers})
                assert (status, problem in text) == (400, True)
            assert await shown.silences() == []

    asyncio.run(story())


def test_a_form_that_has_expired_is_shown_again_with_what_was_typed(tmp_path: Path) -> None:
    async def story() -> None:
        async with world(tmp_path, LOCAL) as shown:
            status, _, text = await shown.send("/silence", {**FORM, "token": "0" * 64})
            assert (status, "the form had expired; check it and send it" in text) == (403, True)
            assert 'value="new &lt;disk&gt;"' in text
            assert await shown.silences() == []
            hidden = dict(re.findall(r'name="(token|id)" value="(\w+)"', text))
            assert (await shown.send("/silence", {**FORM, **hidden}))[0] == 303
            _, _, text = await shown.send("/silence", {**FORM, "comment": "x" * 20_000})
            assert '<a href="silence">Back to the form</a>' in text

    asyncio.run(story())


def retries() -> float | None:
    """Return how often this process has retried a publication."""
    outcome = {"outcome": "retried"}
    return prometheus_client.REGISTRY.get_sample_value("muster_bus_published_total", outcome)


def test_an_act_that_the_end_of_the_console_cuts_off_is_recorded(tmp_path: Path) -> None:
    async def story() -> None:
        async with (
            asyncio.timeout(100),
            nats.NatsServer(tmp_path) as server,
            bus.Bus(server.url, producer="test", name="test", owner=True) as owner,
        ):
            await owner.link.client()
            started: asyncio.Future[str] = asyncio.get_running_loop().create_future()

            health = console_fleet.Health([console_fleet.plugin(NODE)])

            async def run() -> None:
                async with console_fleet.shown(
                    health, nats_url=server.url, writing=LOCAL
                ) as address:
                    started.set_result(address)
                    await asyncio.Event().wait()

            console = asyncio.create_task(run())
            address = await started
            jar = aiohttp.CookieJar(unsafe=True)
            async with aiohttp.ClientSession(base_url=address, cookie_jar=jar) as browser:
                shown = World(browser, owner, address, health)
                fields = {**FORM, "token": await shown.token()}
                # a full bucket refuses values, but only temporarily
                await shown.change_silences(max_bytes=1)
                before = retries()
                sending = asyncio.create_task(shown.send("/silence", fields))
                while retries() == before:
                    await asyncio.sleep(0.01)
                # as SIGTERM does
                console.cancel()
                await asyncio.gather(console, sending, return_exceptions=True)
                reason = (
                    "the console ended before NATS confirmed this change; it may or may not have "
                    "taken effect"
                )
                assert await shown.acts(1) == [(vocabulary.ActOutcome.FAILED, reason)]

    asyncio.run(story())


def test_a_notification_is_sent_again_once(tmp_path: Path) -> None:
    async def story() -> None:
        async with world(tmp_path, LOCAL) as shown:
            await put_letter(shown.owner)
            await shown.until_shown("send-again-0123456789ab")
            fields = {"id": "0123456789ab", "token": await shown.token()}
            status, place, _ = await shown.send("/send-again", fields)
            assert (status, place) == (303, "alerts?done=sent")
            (sent,) = await shown.events(1)
            assert sent.about == 'ops default:{kind="stuck"}'
            (waiting,) = await storage.waiting_messages(
                shown.owner.link, streams.OUTBOX, "muster.outbox.>"
            )
            assert waiting[0].startswith("muster.outbox.ops.replay-")
            assert (await writing.read_dead_letters(shown.owner.link)) == ([], 0)
            status, _, text = await shown.send("/send-again", fields)
            assert (status, "no such undelivered notification" in text) == (409, True)

    asyncio.run(story())


def test_what_does_not_come_from_a_page_of_the_same_person_does_nothing(tmp_path: Path) -> None:
    async def story() -> None:
        async with world(tmp_path, LOCAL) as shown:
            good = {**FORM, "token": await shown.token()}
            refused: list[tuple[Mapping[str, str], dict[str, str], int]] = [
                (good, {"origin": "https://evil.example.com"}, 403),
                (good, {"origin": "null"}, 403),
                (good, {"origin": ""}, 403),
                (good, {"sec-fetch-site": "cross-site"}, 403),
                (good, {"host": "rebound.example.com"}, 421),
                ({**FORM, "token": "0" * 64}, {}, 403),
                (FORM, {}, 403),
                ({**good, "comment": "x" * 20_000}, {}, 413),
                ({**good, "comment": ""}, {}, 400),
                ({**good, "matchers": "nod=a"}, {}, 400),
                ({**good, "matchers": 'node=~".*"'}, {}, 400),
                ({**good, "matchers": 'node=~"("'}, {}, 400),
                ({**good, "duration": "forever"}, {}, 400),
            ]
            for fields, headers, status in refused:
                assert (await shown.send("/silence", fields, **headers))[0] == status
            async with shown.browser.post(
                "/silence", json=good, headers={"origin": shown.address}
            ) as answer:
                assert answer.status == 415
            too_long = {**good, "matchers": "node=~" + "\\" * 2_500, "comment": "\x01" * 1_900}
            status, _, text = await shown.send("/silence", too_long)
            assert (status, "too long" in text) == (400, True)
            shown.browser.cookie_jar.clear()
            assert (await shown.send("/silence", good))[0] == 403
            assert await shown.silences() == []

    asyncio.run(story())


def test_two_consoles_on_one_machine_do_not_invalidate_the_forms_of_each_other(
    tmp_path: Path,
) -> None:
    async def story() -> None:
        async with world(tmp_path, LOCAL) as shown:
            health = console_fleet.Health()
            async with console_fleet.shown(health, writing=LOCAL) as elsewhere:
                token = await shown.token()
                # a browser sends a cookie to all ports of a host
                async with shown.browser.get(f"{elsewhere}/alerts") as answer:
                    assert answer.status == 200
                status, place, _ = await shown.send("/silence", {**FORM, "token": token})
                assert (status, place) == (303, f"alerts?done=silenced&silence={FORM['id']}")

    asyncio.run(story())


def test_who_acts_without_end_is_refused_for_a_while(tmp_path: Path) -> None:
    async def story() -> None:
        async with world(tmp_path, LOCAL) as shown:
            fields = {"id": "none", "token": await shown.token()}
            sent = [shown.send("/expire", fields) for _ in range(40)]
            texts = {status: text for status, _, text in await asyncio.gather(*sent)}
            assert texts.keys() == {409, 429}
            assert "too many actions" in texts[429]

    asyncio.run(story())


def test_behind_a_trusted_proxy_each_person_has_a_rate_of_requests(tmp_path: Path) -> None:
    tree = {"url": "http://127.0.0.1:80/", "header": {"name": "X-User", "from": ["127.0.0.1"]}}

    async def story() -> None:
        async with world(tmp_path, msgspec.convert(tree, config.Writing)) as shown:

            async def status(person: str) -> int:
                async with shown.browser.get("/healthz", headers={"x-user": person}) as answer:
                    return answer.status

            async with asyncio.timeout(60):
                while await status("ann") != 429:
                    pass
            assert await status("bob") == 200

    asyncio.run(story())


def test_a_header_counts_from_the_proxy_only(tmp_path: Path) -> None:
    def settings(peer: str) -> config.Writing:
        tree = {"url": "http://127.0.0.1:80/", "header": {"name": "X-User", "from": [peer]}}
        return msgspec.convert(tree, config.Writing)

    async def story() -> None:
        async with world(tmp_path / "own", settings("127.0.0.1")) as shown:
            shown.browser.headers["x-user"] = "ann@example.com"
            token = await shown.token()
            origin = "http://127.0.0.1"
            fields = {**FORM, "token": token}
            assert (await shown.send("/silence", fields, origin=origin))[0] == 303
            assert await shown.silences() == [("ann@example.com", FORM["comment"])]
            other = await shown.send("/silence", fields, origin=origin, **{"x-user": "bob"})
            assert other[0] == 403
            for values in (["root, ann@example.com"], ["root", "ann@example.com"]):
                headers = [("origin", origin), *(("x-user", value) for value in values)]
                async with shown.browser.post("/silence", data=fields, headers=headers) as answer:
                    assert answer.status == 403
                    assert "X-User has several values: the proxy must" in await answer.text()
        async with world(tmp_path / "other", settings("192.0.2.1")) as shown:
            shown.browser.headers["x-user"] = "ann@example.com"
            assert "none of the proxies" in await shown.page()
            assert await shown.token() == ""
            assert (await shown.send("/silence", FORM, origin="http://127.0.0.1"))[0] == 403

    asyncio.run(story())


def test_a_form_that_breaks_off_is_refused_and_no_fault_of_the_console(tmp_path: Path) -> None:
    async def story() -> None:
        async with world(tmp_path, LOCAL) as shown:
            host, _, port = shown.address.removeprefix("http://").partition(":")
            head = {
                "Host": f"{host}:{port}",
                "Origin": shown.address,
                "Content-Type": "application/x-www-form-urlencoded",
                "Content-Length": "500",
            }
            _, writer = await asyncio.open_connection(host, int(port))
            lines = ["POST /silence HTTP/1.1", *(f"{k}: {v}" for k, v in head.items()), "", "a="]
            with capture_logs() as logged:
                writer.write("\r\n".join(lines).encode())
                writer.close()
                while not logged:
                    await asyncio.sleep(0.01)
            (line,) = logged
            assert (line["event"], line["reason"]) == (
                "operator_action_refused",
                "the form did not arrive",
            )

    asyncio.run(story())


def test_people_do_not_queue_up_while_the_issuer_is_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    async def story() -> None:
        monkeypatch.setattr(oidc, "_WAIT_S", 0.3)
        with socket.socket() as silent:
            silent.bind(("127.0.0.1", 0))
            silent.listen(200)
            issuer = f"http://127.0.0.1:{silent.getsockname()[1]}"
            rule = config.Oidc(issuer=issuer, client_id="muster", groups=("sre",))
            provider = oidc.Provider(rule, "https://muster.example.com")
            attempt = sessions.SignIn(state="s", nonce="n", verifier="v", ends_at=0.0)
            async with asyncio.timeout(30):
                answers = await asyncio.gather(
                    *(provider.address(attempt) for _ in range(150)), return_exceptions=True
                )
            assert {type(each) for each in answers} == {oidc.Unanswered}

    asyncio.run(story())


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def test_who_signs_in_acts_under_that_name_and_nobody_else_does(tmp_path: Path) -> None:
    async def story() -> None:
        port = free_port()
        async with oidc_issuer.answering() as issuer:
            rule = config.Oidc(
                issuer=issuer.url, client_id=oidc_issuer.CLIENT, emails=("*@example.com",)
            )
            settings = config.Writing(url=f"http://127.0.0.1:{port}", oidc=rule)
            async with world(tmp_path, settings, port) as shown:
                assert 'id="sign-in"' in await shown.page()
                assert 'href="../sign-in">Sign in</a>' in await shown.page(f"/node/{NODE}")
                page = await shown.page("/silence?m=node%3Da")
                assert 'You have not signed in. <a href="sign-in">Sign in</a>' in page
                status, _, text = await shown.send("/silence", FORM)
                assert (status, 'value="new &lt;disk&gt;"' in text) == (403, True)
                wrong: list[dict[str, Any]] = [
                    {"nonce": "x"},
                    {"aud": "other"},
                    {"iss": "https://other"},
                    {"exp": 1},
                    {"email": "eve@example.org"},
                ]
                for issuer.claims in wrong:
                    async with shown.browser.get("/sign-in") as answer:
                        assert answer.status == 403
                    assert await shown.token() == ""
                async with shown.browser.get("/signed-in?code=c&state=s") as answer:
                    assert answer.status == 403
                issuer.claims, issuer.key = {}, "k2"
                assert "You are not signed in" in await shown.page("/sign-in")
                issuer.key = "k1"
                assert "Signed in as ann@example.com (OpenID Connect)." in await shown.page(
                    "/sign-in"
                )
                fields = {**FORM, "token": await shown.token()}
                assert (await shown.send("/silence", fields))[0] == 303
                assert await shown.silences() == [("ann@example.com", FORM["comment"])]
                assert (await shown.acted()).identity == "oidc"
                kept = {each.key: each.value for each in shown.browser.cookie_jar}

                async def sign_out() -> None:
                    assert (await shown.send("/sign-out", {"token": fields["token"]}))[0] == 303

                assert await shown.send_after("/silence", fields, sign_out) == 403
                assert (await shown.send("/silence", fields))[0] == 403
                # a copy of the cookie is not valid either
                shown.browser.cookie_jar.clear()
                shown.browser.cookie_jar.update_cookies(kept, yarl.URL(shown.address))
                assert (await shown.send("/silence", fields))[0] == 403
                assert "You have not signed in." in await shown.page("/silence?m=node%3Da")

    asyncio.run(story())
