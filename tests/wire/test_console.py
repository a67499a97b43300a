"""The console's server over real sockets: its answers, its refusals, and its limits."""

import asyncio
import contextlib
import functools
import json
import re
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, ParamSpec

import aiohttp
import pytest
from aiohttp import web

from muster import vocabulary
from muster.local import nats
from muster.nats import bus
from muster_console import server
from tests.worlds import console_fleet, service_process

ATTACK = "<img src=x onerror=alert(1)>\x1b[31m\u202e"
ESCAPED = "&lt;img src=x onerror=alert(1)&gt;\ufffd[31m\ufffd"
NODES = ("gpu-a100-00001", "gpu-l4-00002")


Parameters = ParamSpec("Parameters")


def on_a_loop(test: Callable[Parameters, Coroutine[Any, Any, None]]) -> Callable[Parameters, None]:
    """Return a test that runs a coroutine function on a new event loop."""

    @functools.wraps(test)
    def run(*args: Parameters.args, **kwargs: Parameters.kwargs) -> None:
        asyncio.run(test(*args, **kwargs))

    return run


def fleet() -> console_fleet.Health:
    """Return a fleet of one stuck and one healthy node."""
    alerts = [console_fleet.alert(NODES[0], number=1)]
    return console_fleet.Health(
        [console_fleet.plugin(NODES[0], "STUCK", alerts=alerts), console_fleet.plugin(NODES[1])]
    )


@contextlib.asynccontextmanager
async def console(
    health: console_fleet.Health, *, nats_url: str = "nats://127.0.0.1:1", pages_max: int = 100
) -> AsyncIterator[aiohttp.ClientSession]:
    """Run a console; yield a client once it shows the nodes."""
    async with (
        asyncio.timeout(100),
        console_fleet.shown(health, nats_url=nats_url, pages_max=pages_max) as address,
        aiohttp.ClientSession(base_url=address) as client,
    ):
        while len((await columns(client))["names"]) < len({p["node"] for p in health.plugins}):
            await asyncio.sleep(0.05)
        yield client


@contextlib.asynccontextmanager
async def elsewhere(client: aiohttp.ClientSession) -> AsyncIterator[aiohttp.ClientSession]:
    """Yield a client that connects to the same console from another address."""
    connector = aiohttp.TCPConnector(local_addr=("127.0.0.2", 0))
    async with aiohttp.ClientSession(base_url=client._base_url, connector=connector) as other:
        yield other


async def columns(client: aiohttp.ClientSession) -> dict[str, Any]:
    async with client.get("/api/fleet") as answer:
        body: dict[str, Any] = await answer.json()
        return body


async def text(client: aiohttp.ClientSession, path: str) -> str:
    async with client.get(path) as answer:
        return await answer.text()


async def changes(
    client: aiohttp.ClientSession, query: str = ""
) -> AsyncGenerator[tuple[str, dict[str, Any]], None]:
    """Yield name and data of each message of a stream of changes."""
    async with client.get(f"/api/changes{query}") as answer:
        assert answer.status == 200
        while block := await answer.content.readuntil(b"\n\n"):
            name, _, data = block.decode().strip().split("\n")
            yield name.removeprefix("event: "), json.loads(data.removeprefix("data: "))


@on_a_loop
async def test_every_page_shows_the_fault_and_can_be_read_without_scripts() -> None:
    async with console(fleet()) as client:
        shown = {path: await text(client, path) for path in ("/", f"/node/{NODES[0]}", "/alerts")}
        assert "STUCK" in shown["/"]
        assert f'href="node/{NODES[0]}"' in shown["/"]
        for path in (f"/node/{NODES[0]}", "/alerts"):
            assert "none for 12.4 s, 12.4 intervals" in shown[path]
            assert "look at the plugin&#39;s process" in shown[path]
            assert 'href="https://muster.dev/runbooks/stuck.md"' in shown[path]
        assert "11/16 allocatable; 1 node short; 3 unconfirmed" in await text(client, "/plots")
        assert "no connection to NATS" in await text(client, "/events")
        data = await columns(client)
        assert (data["names"], data["levels"]) == (list(NODES), "04")
        for at in ("0", "999999999999999", "1' onload='", "-1"):
            path = f"/node/{NODES[0]}?range=7d&device=GPU-1&at={at}"
            assert 'id="scrub"' in await text(client, path)
        part = await text(client, f"/node/{NODES[0]}?at=1&part=moment")
        assert part.startswith('<div id="moment"')
        assert "no verdict known" in part


@on_a_loop
async def test_evidence_of_an_alert_whose_problem_is_gone_is_marked_as_past() -> None:
    health = fleet()
    now = datetime.now(UTC)
    times = {"since": now.isoformat(), "until": (now + timedelta(minutes=2)).isoformat()}
    (alert,) = health.plugins[0]["alerts"]
    health.plugins[0] |= {"verdict": "HEALTHY", "alerts": [alert | {"recovery": times}]}
    async with console(health) as client:
        for path in (f"/node/{NODES[0]}", "/alerts"):
            shown = await text(client, path)
            assert "<dt>past evidence</dt>" in shown
            assert "<dt>evidence</dt>" not in shown


@on_a_loop
async def test_a_healthy_plugin_with_a_faulty_device_begins_with_the_alert_about_it() -> None:
    health = fleet()
    health.plugins[0]["verdict"] = "HEALTHY"
    health.plugins[0]["evidence"] = [{"source": "heartbeat", "observed": "alive"}]
    async with console(health) as client:
        hurt, well = [await text(client, f"/node/{node}") for node in NODES]
        order = ("plugin HEALTHY", "answers nobody", "none for 12.4 s", "heartbeat</strong>: alive")
        places = [hurt.index(part) for part in order]
        assert places == sorted(places)
        assert '<span class="badge ok">HEALTHY</span>' in well


@on_a_loop
async def test_an_alert_names_two_of_its_pods_before_it_is_opened() -> None:
    def row(page: str) -> str:
        """Return the text of the first row that can be opened."""
        (inside,) = re.findall(r"<summary>(used by.*?)</summary>", page, re.DOTALL)
        return re.sub("<[^>]*>", "", inside)

    health = fleet()
    (alert,) = health.plugins[0]["alerts"]
    for pods, total, named in (
        (["ml/train"], 1, "used by ml/train; 1 device; silence it"),
        (["ml/a", "ml/b"], 2, "used by ml/a, ml/b; 1 device; silence it"),
        (["ml/a", "ml/b", "ml/c"], 40, "used by ml/a, ml/b and 38 more; 1 device; silence it"),
    ):
        more = {"pods": pods, "pods_total": total, "devices": ["GPU-1"]}
        health.plugins[0]["alerts"] = [alert | more]
        async with console(health) as client:
            for path in (f"/node/{NODES[0]}", "/alerts"):
                assert row(await text(client, path)) == named


@on_a_loop
async def test_texts_of_others_change_nothing_but_what_they_show() -> None:
    health = fleet()
    hostile = console_fleet.alert(
        NODES[0],
        number=2,
        severity=ATTACK,
        kind=ATTACK,
        summary=ATTACK,
        advice=ATTACK,
        runbook="javascript:alert(1)",
        evidence=[{"source": ATTACK, "observed": ATTACK}],
        pods=[ATTACK],
        resource=ATTACK,
    )
    health.plugins[0] |= {
        "verdict": ATTACK,
        "rule": ATTACK,
        "alerts": [hostile],
        "devices": {ATTACK: 1},
        "problems": [ATTACK],
    }
    health.service["notified"] = ATTACK
    async with console(health) as client:
        for path in ("/", f"/node/{NODES[0]}", "/alerts", f"/alerts?q={ATTACK}", f"/?q={ATTACK}"):
            page = await text(client, path)
            assert ESCAPED in page
            assert "<img" not in page
            assert "\x1b" not in page
            assert "\u202e" not in page
            assert 'href="javascript' not in page
        for path in (f"/node/{ATTACK}", f"/events?node={ATTACK}&type={ATTACK}"):
            assert "<img" not in await text(client, path)
        async with client.get("/api/fleet") as answer:
            assert answer.headers["content-type"] == "application/json"
            body = await answer.text()
            assert "\x1b" not in body
            assert "\u202e" not in body


@on_a_loop
async def test_every_answer_has_the_headers_and_loads_nothing_from_elsewhere() -> None:
    async with console(fleet()) as client:
        for path in ("/", "/nothing", "/static/fleet.js", "/api/fleet", "/healthz", "/metrics"):
            async with client.get(path) as answer:
                headers = answer.headers
            assert "script-src 'self';" in headers["content-security-policy"]
            assert "unsafe" not in headers["content-security-policy"]
            assert headers["x-content-type-options"] == "nosniff"
            assert headers["referrer-policy"] == "same-origin"
            wanted = "no-cache" if path.startswith("/static") else "no-store"
            assert headers["cache-control"] == wanted
            assert "server" not in headers


@pytest.mark.parametrize(
    ("method", "path", "host", "status"),
    [
        ("POST", "/", "localhost", 405),
        ("DELETE", "/api/fleet", "localhost", 405),
        ("GET", "/", "rebound.example.com", 421),
        ("GET", "/api/changes", "metadata.example.com", 421),
        ("GET", f"/?q={'a' * 3000}", "localhost", 414),
        ("GET", "/node/no_such_name", "localhost", 404),
        ("GET", "/static/..%2fconfig.py", "localhost", 404),
        ("GET", "/api/event?id=none", "localhost", 404),
        ("HEAD", "/", "localhost", 200),
        ("HEAD", "/api/changes", "localhost", 200),
    ],
)
@on_a_loop
async def test_what_no_browser_of_ours_would_ask_is_refused(
    method: str, path: str, host: str, status: int
) -> None:
    async with console(fleet()) as client:
        async with client.request(
            method, path, headers={"host": host}, allow_redirects=False
        ) as answer:
            assert answer.status == status
            body = await answer.read()
        assert body if method != "HEAD" else not body


@on_a_loop
async def test_a_change_reaches_every_open_page_and_a_page_that_never_reads_delays_none() -> None:
    health = fleet()
    async with console(health) as client:
        revision = (await columns(client))["revision"]
        silent = await client.get("/api/changes")
        open_pages = [changes(client, f"?after={revision}") for _ in range(3)]
        firsts = [await anext(page) for page in open_pages]
        assert [name for name, _ in firsts] == ["state"] * 3
        health.plugins[1]["verdict"] = "PLUGIN_DOWN"
        for page in open_pages:
            async for name, data in page:
                if name == "fleet":
                    assert data["names"] == [NODES[1]]
                    assert "PLUGIN_DOWN" in data["texts"]
                    break
            await page.aclose()
        silent.close()


@on_a_loop
async def test_revisions_of_another_process_are_not_understood_as_ours() -> None:
    async with console(fleet()) as client:
        page = changes(client, "?after=999999&instance=another")
        names = [(await anext(page))[0] for _ in range(2)]
        assert names == ["state", "restart"]
        await page.aclose()


@on_a_loop
async def test_a_page_that_lost_its_connection_goes_on_with_what_it_has_not_received() -> None:
    health = fleet()
    async with console(health) as client:
        async with client.get("/api/changes?after=0") as answer:
            blocks = [await answer.content.readuntil(b"\n\n") for _ in range(2)]
        assert [block.split(b"\n")[0] for block in blocks] == [b"event: state", b"event: fleet"]
        ids = [block.split(b"\n")[1].removeprefix(b"id: ").decode() for block in blocks]
        health.plugins[1]["verdict"] = "PLUGIN_DOWN"
        while "PLUGIN_DOWN" not in (await columns(client))["texts"]:
            await asyncio.sleep(0.05)
        received = []
        for place, wanted in zip(ids, ({*NODES}, {NODES[1]}), strict=True):
            # as the script names the position, and as a browser does
            for query, headers in ((f"&position={place}", {}), ("", {"last-event-id": place})):
                async with client.get(f"/api/changes?after=0{query}", headers=headers) as answer:
                    await answer.content.readuntil(b"\n\n")
                    block = await answer.content.readuntil(b"\n\n")
                data = json.loads(block.partition(b"data: ")[2])
                received.append(({*data["names"]}, wanted))
        assert [got for got, _ in received] == [wanted for _, wanted in received]


@on_a_loop
async def test_too_many_open_pages_are_refused_and_a_closed_one_makes_room() -> None:
    async with console(fleet(), pages_max=1) as client:
        page = changes(client)
        await anext(page)
        async with client.get("/api/changes") as answer:
            assert answer.status == 503
            assert "close one" in await answer.text()
        await page.aclose()
        while True:
            async with client.get("/api/changes") as answer:
                if answer.status == 200:
                    break


@on_a_loop
async def test_pages_are_shared_by_all_who_open_some() -> None:
    async with console(fleet(), pages_max=2) as client, elsewhere(client) as other:
        first, second = changes(client), changes(client)
        for page in (first, second):
            await anext(page)
        async with other.get("/api/changes") as answer:
            assert answer.status == 200
            with pytest.raises(aiohttp.ClientPayloadError):
                await anext(each async for each in first if each[0] == "never")
            # each of the two addresses has one open page now
            for each in (client, other):
                async with each.get("/api/changes") as refused:
                    assert (refused.status, refused.headers["retry-after"]) == (503, "5")
        await second.aclose()


@on_a_loop
async def test_all_pages_may_be_opened_at_once_from_one_address() -> None:
    async with console(fleet(), pages_max=100) as client:
        statuses = set()
        for _ in range(800):
            async with client.get("/healthz") as answer:
                statuses.add(answer.status)
        assert statuses == {200}


@on_a_loop
async def test_connections_from_one_address_leave_some_to_others() -> None:
    async with console(fleet(), pages_max=1) as client, elsewhere(client) as other:
        url = client._base_url
        assert url is not None
        async with contextlib.AsyncExitStack() as opened:
            for _ in range(110):
                _, writer = await asyncio.open_connection(url.host, url.port)
                opened.callback(writer.close)
            async with other.get("/healthz") as answer:
                assert answer.status == 200


@on_a_loop
async def test_a_connection_that_asks_for_nothing_is_closed() -> None:
    limit_s = server._REQUEST_S
    server._REQUEST_S = 0.1  # type: ignore[misc]
    try:
        async with console(fleet()) as client:
            url = client._base_url
            assert url is not None
            for sent in (b"", b"GET / HTTP/1.1\r\n"):
                reader, writer = await asyncio.open_connection(url.host, url.port)
                writer.write(sent)
                assert await reader.read() == b""
                writer.close()
            reader, writer = await asyncio.open_connection(url.host, url.port)
            writer.write(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n")
            await reader.readuntil(b"\r\n\r\n")
            writer.write(b"GET / HTTP/1.1\r\n")
            await reader.read()
            writer.close()
    finally:
        server._REQUEST_S = limit_s  # type: ignore[misc]


class Endless(console_fleet.Health):
    """A stand-in for the health service whose pages never end."""

    async def state(self, request: web.Request) -> web.Response:
        page = json.loads((await super().state(request)).body)  # type: ignore[arg-type]
        return web.json_response({**page, "next": f"{NODES[0]} é\r\n"})


@on_a_loop
async def test_pages_of_health_that_never_end_are_named_as_the_problem() -> None:
    health = Endless(fleet().plugins)
    async with (
        asyncio.timeout(100),
        console_fleet.shown(health, nats_url="nats://127.0.0.1:1") as address,
        aiohttp.ClientSession(base_url=address) as client,
    ):
        async for _, data in changes(client):
            if "ends before that node" in data.get("problem", ""):
                break


@on_a_loop
async def test_old_data_is_marked_old_while_health_is_away() -> None:
    health = fleet()
    async with console(health) as client:
        page = changes(client)
        assert (await anext(page))[1]["problem"] == ""
        health.is_away = True
        async for name, data in page:
            if name == "state" and data["problem"]:
                assert "this is what it last reported" in data["problem"]
                break
        shown = await text(client, "/")
        assert 'class="is-old"' in shown
        assert "STUCK" in shown
        assert "verdicts are missing" in await text(client, f"/node/{NODES[0]}")
        health.is_away = False
        async for name, data in page:
            if name == "state" and not data["problem"]:
                break
        await page.aclose()


@on_a_loop
async def test_events_arrive_and_a_large_one_is_cut_with_a_way_to_all_of_it(
    tmp_path: Path,
) -> None:
    async with (
        nats.NatsServer(tmp_path) as server,
        bus.Bus(server.url, producer="health", name="test", owner=True) as link,
        console(fleet(), nats_url=server.url) as client,
    ):
        page = changes(client, "?events=1&type=alert.*")
        now = datetime.now(UTC)
        alert = vocabulary.AlertChanged(
            node=NODES[0],
            at=now,
            plugin="device-plugin",
            kind=vocabulary.AlertKind.STUCK,
            severity=vocabulary.Severity.CRITICAL,
            state=vocabulary.AlertState.FIRING,
            fingerprint="0" * 16,
            summary=ATTACK,
            starts_at=now,
            pods=tuple(f"namespace/{number:09d}-{'p' * 80}" for number in range(4_000)),
            pods_total=4_000,
        )
        await link.publish(alert)
        async for name, data in page:
            if name == "events":
                (line,) = data["events"]
                break
        assert line["type"] == "alert.changed"
        assert "\x1b" not in line["text"]
        async with client.get(f"/api/event?id={line['id']}") as answer:
            assert int(answer.headers["x-cut"]) > 400_000
            assert (await answer.text()).endswith("... (cut)")
            assert answer.headers["content-type"].startswith("text/plain")
        whole = json.loads(await text(client, f"/api/event?id={line['id']}&whole=1"))
        assert len(whole["data"]["pods"]) == 4_000
        assert ESCAPED in await text(client, "/events")
        assert "1 critical" in await text(client, "/plots")
        # a notification of an alert is shown as well
        delivered = vocabulary.NotificationDelivered(
            node="_fleet",
            at=datetime.now(UTC),
            receiver="slack",
            group="default:{}",
            reason=vocabulary.NotificationReason.FIRST,
            firing=(f"{1:016x}",),
            answer="HTTP 200",
        )
        await link.publish(delivered)
        async for name, _ in page:
            if name == "alerts" and "notified together" in await text(client, "/alerts"):
                break
        assert "slack" in await text(client, f"/node/{NODES[0]}")
        await page.aclose()


@on_a_loop
async def test_answers_are_compressed_only_for_those_who_ask() -> None:
    async with console(fleet()) as client:
        for path in ("/", "/api/fleet", "/static/console.css"):
            async with client.get(path, headers={"accept-encoding": "identity"}) as answer:
                assert "content-encoding" not in answer.headers
                plain = await answer.read()
            assert plain
        async with client.get("/static/fleet.js") as answer:
            tag = answer.headers["etag"]
        async with client.get("/static/fleet.js", headers={"if-none-match": tag}) as answer:
            assert answer.status == 304


def test_the_process_says_where_it_listens_and_ends_on_sigterm() -> None:
    environment = {"MUSTER_CONSOLE__BUS__URL": "nats://127.0.0.1:1"}
    with service_process.Service("muster_console", environment) as service:
        assert service.get("/healthz") == (200, "ok\n")
        status, page = service.get("/")
        assert status == 200
        assert "health has not" in page


@on_a_loop
async def test_pages_say_that_nats_is_away_and_go_on_when_it_is_back(tmp_path: Path) -> None:
    def alert(summary: str) -> vocabulary.AlertChanged:
        return vocabulary.AlertChanged(
            node=NODES[0],
            at=datetime.now(UTC),
            plugin="device-plugin",
            kind=vocabulary.AlertKind.STUCK,
            severity=vocabulary.Severity.CRITICAL,
            state=vocabulary.AlertState.FIRING,
            fingerprint="0" * 16,
            summary=summary,
            starts_at=datetime.now(UTC),
        )

    async def publish(url: str, data: vocabulary.Event) -> None:
        async with bus.Bus(url, producer="health", name="test", owner=True) as link:
            await link.publish(data)

    broker = nats.NatsServer(tmp_path)
    await broker.start()
    try:
        async with console(fleet(), nats_url=broker.url) as client:
            page = changes(client, "?events=1")
            await publish(broker.url, alert("before the outage"))
            async for name, _ in page:
                if name == "events":
                    break
            await broker.kill()
            async for name, data in page:
                if name == "state" and any("no connection to NATS" in c for c in data["caveats"]):
                    break
            assert "before the outage" in await text(client, "/events")
            assert "no connection to NATS" in await text(client, "/events")
            assert "STUCK" in await text(client, "/")
            broker = nats.NatsServer(tmp_path, port=broker.port)
            await broker.start()
            await publish(broker.url, alert("after the outage"))
            async for name, data in page:
                if name == "events" and "after the outage" in data["events"][-1]["text"]:
                    break
            assert "no connection to NATS" not in await text(client, "/events")
            await page.aclose()
    finally:
        await broker.stop()
