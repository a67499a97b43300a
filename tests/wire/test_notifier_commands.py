"""The notifier's commands, on a real NATS server and a real notifier."""

import asyncio
import contextlib
import io
import pathlib
import subprocess
import sys
from collections.abc import AsyncIterator, Sequence

import orjson
import pytest

from muster.cli.__main__ import app
from muster.local import nats, webhook
from muster.nats import bus, storage, streams
from tests.worlds import muster_command


async def muster(url: str, *arguments: str) -> tuple[int, str, str]:
    """Run the command in a thread of this process; return exit code, stdout and stderr."""
    out, errors = io.StringIO(), io.StringIO()

    def run() -> int:
        # `muster notify` reads the address of NATS from the settings of the notifier
        where = [] if arguments[0] == "notify" else ["--url", url]
        return int(app([*arguments, *where]) or 0)

    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(errors):
        code = await asyncio.to_thread(run)
    return code, out.getvalue(), errors.getvalue()


def test_without_a_command_its_help_is_printed() -> None:
    code, out, _ = muster_command.muster("notify")
    assert code == 0
    assert out.startswith("Usage: muster notify COMMAND")
    assert {"test", "explain", "import"} <= set(out.split())


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (("test",), "muster notify test: "),
        (("explain", "--config", "x"), "muster notify explain: "),
        (("test", "ops", "--config", "x", "--config-format", "none"), "muster notify test: "),
        (("import", "/none"), "muster notify: /none: No such file or directory"),
        (("test", "ops", "--config", "/none"), "muster notify: /none: "),
    ],
)
def test_wrong_usage_is_one_line_and_exit_code_2(arguments: Sequence[str], problem: str) -> None:
    code, out, errors = muster_command.muster("notify", *arguments)
    assert (code, out) == (2, "")
    (line,) = errors.splitlines()
    assert line.startswith(problem)


@contextlib.asynccontextmanager
async def server(directory: pathlib.Path) -> AsyncIterator[str]:
    async with (
        asyncio.timeout(100),
        nats.NatsServer(directory / "nats") as made,
        bus.Bus(made.url, producer="test", name="test", owner=True) as owner,
    ):
        await owner.link.client()
        yield made.url


def test_silences_are_added_listed_and_expired(tmp_path: pathlib.Path) -> None:
    async def story() -> None:
        async with server(tmp_path) as url:
            add = ("silence", "add", "node=node-a", 'kind=~"stuck|missing"')
            about = ("--duration", "2h", "--comment", "new disk", "--author", "ann")
            code, out, _ = await muster(url, *add, *about)
            assert code == 0
            name = out.strip()
            code, out, _ = await muster(url, "silence", "list", "--json")
            (silence,) = [orjson.loads(line) for line in out.splitlines()]
            assert (silence["id"], silence["author"], silence["comment"]) == (
                name,
                "ann",
                "new disk",
            )
            assert silence["matchers"] == ["node=node-a", 'kind=~"stuck|missing"']
            assert (await muster(url, "silence", "expire", name))[0] == 0
            assert (await muster(url, "silence", "list"))[1] == "no silences\n"
            assert name in (await muster(url, "silence", "list", "--all"))[1]
            code, _, errors = await muster(url, "silence", "expire", "none")
            assert (code, errors) == (2, "muster silence: there is no silence none\n")
            code, _, errors = await muster(url, "silence", "add", 'node=~".*"', "--comment", "x")
            assert code == 2
            assert "none requires a label to have a value" in errors
            for arguments_, problem in (
                (["nod=node-a"], 'nod="node-a": no alert has a label nod; did you mean node?'),
                (["kind=stukc"], 'kind="stukc": no kind is called stukc; did you mean stuck?'),
                ([], "name the alerts to silence, such as node=node-a"),
                (
                    ["node=a", "--duration", "0s"],
                    "--duration: '0s' is not between 1 s and 366 days",
                ),
                (
                    ["node=a", "--duration", "99999w"],
                    "--duration: '99999w' is not between 1 s and 366 days",
                ),
            ):
                code, _, errors = await muster(url, "silence", "add", *arguments_, "--comment", "x")
                assert code == 2
                assert errors.startswith(f"muster silence: {problem}")
            async with bus.Bus(url, producer="test", name="bad") as connected:
                await storage.put(connected.link, streams.SILENCES, "bad", b"{}")
            args = ("--duration", "1h30m", "--comment", "\x1b[31m" + "x" * 100)
            assert (await muster(url, "silence", "add", "node=a", *args))[0] == 0
            code, out, errors = await muster(url, "silence", "list")
            assert (code, "x" * 100 in out, "\x1b" in out) == (0, True, False)
            assert errors.startswith("muster silence: silence bad cannot be read: ")

    asyncio.run(story())


def test_a_receiver_is_tested_and_what_it_answered_is_printed(tmp_path: pathlib.Path) -> None:
    async def story() -> None:
        file = tmp_path / "notifier.json"
        async with webhook.WebhookReceiver() as hook:
            receiver = {"name": "ops", "webhook": {"url": hook.url, "reach": "loopback"}}
            file.write_bytes(orjson.dumps({"receivers": [receiver]}))
            test = ("notify", "test", "ops", "--config", str(file))
            code, out, _ = await muster("", *test)
            assert code == 0
            assert "TEST, nothing is wrong: this is a test message" in out
            host = hook.url.removeprefix("http://").rstrip("/")
            assert out.startswith(f"sent:\nPOST {host}\n{{")
            assert out.splitlines()[-1] == "answered: accepted: HTTP 200"
            (received,) = hook.received()
            assert orjson.loads(received.body)["data"]["test"] is True
            hook.behave(webhook.Behaviour(status=401))
            code, out, _ = await muster("", *test)
            assert (code, out.splitlines()[-1]) == (1, "answered: refused (unauthorized): HTTP 401")
            hook.behave(webhook.Behaviour(status=401))
            code, out, _ = await muster("", *test, "--json")
            (attempt,) = orjson.loads(out)
            assert (code, attempt["kind"], attempt["outcome"]) == (1, "refused", "unauthorized")
            receiver["webhook"] = {"url": hook.url}
            file.write_bytes(orjson.dumps({"receivers": [receiver]}))
            code, out, _ = await muster("", *test)
            first, *_, last = out.splitlines()
            assert (code, first) == (1, "not sent:")
            assert last.startswith("not sent: refused (forbidden_address): ")
            assert len(hook.received()) == 3
        code, _, errors = await muster("", "notify", "test", "x", "--config", str(file))
        assert (code, errors) == (
            2,
            "muster notify: no receiver is called x; the receivers are: ops\n",
        )

    asyncio.run(story())


def test_a_test_of_a_pager_leaves_nothing_open(tmp_path: pathlib.Path) -> None:
    async def story() -> None:
        (tmp_path / "key").write_text("R0")
        file = tmp_path / "notifier.json"
        async with webhook.WebhookReceiver() as hook:
            about = {"url": hook.url, "reach": "loopback"}
            way = {"routing_key_from": {"file": str(tmp_path / "key")}, **about}
            receivers = [{"name": "pager", "pagerduty": way}]
            receivers.append({"name": "am", "alertmanager": about})
            file.write_bytes(orjson.dumps({"receivers": receivers}))
            for name in ("pager", "am"):
                assert (await muster("", "notify", "test", name, "--config", str(file)))[0] == 0
            bodies = [orjson.loads(received.body) for received in hook.received()]
        assert [body["event_action"] for body in bodies[:2]] == ["trigger", "resolve"]
        fires, ended = bodies[2][0], bodies[3][0]
        assert fires["labels"] == ended["labels"]
        assert ended["endsAt"] < fires["endsAt"]

    asyncio.run(story())


def test_what_an_alert_would_meet_is_explained(tmp_path: pathlib.Path) -> None:
    async def story() -> None:
        async with server(tmp_path) as url:
            file = tmp_path / "notifier.json"
            route = {"matchers": ['severity="critical"'], "receivers": ["pager"]}
            receivers: list[dict[str, object]] = [
                {"name": "ops", "console": {}},
                {"name": "pager", "file": {"path": "/tmp/notified"}},
            ]
            settings = {
                "bus": {"url": url},
                "receivers": receivers,
                "routes": [route],
                "default_receivers": ["ops"],
            }
            file.write_bytes(orjson.dumps(settings))
            await muster(url, "silence", "add", "node=node-a", "--comment", "x")
            labels = ("--labels", "kind=stuck,node=node-a,severity=critical")
            explain = ("notify", "explain", "--config", str(file), *labels)
            code, out, _ = await muster(url, *explain)
            *lines, muted, last = out.splitlines()
            assert code == 1
            assert lines == [
                'alert      {alertname="stuck",kind="stuck",node="node-a",severity="critical"}',
                'route      {}/{severity="critical"}',
                '  group    {kind="stuck",node="node-a"}',
                "  times    first after 30 s, changes every 300 s, reminders every 14400 s",
                "  notifies pager",
            ]
            assert muted.startswith("muted      silenced: ")
            assert last == "notified   nobody: it is muted now"
            code, out, _ = await muster(url, *explain, "--json")
            explanation = orjson.loads(out)
            assert (code, explanation["routes"][0]["receivers"]) == (1, ["pager"])
            assert explanation["muted"]["cause"] == "silenced"
            code, out, _ = await muster(url, *explain, "--offline")
            assert (code, out.splitlines()[-1]) == (0, "notified   pager")
            info = ("notify", "explain", "--config", str(file), "--labels", "severity=info")
            code, out, _ = await muster(url, *info, "--offline")
            log_alone = "notified   nobody: its only receiver is the notifier's log"
            assert (code, out.splitlines()[-1]) == (1, log_alone)
            everybody = settings | {"default_receivers": ["ops", "pager"]}
            file.write_bytes(orjson.dumps(everybody))
            code, out, _ = await muster(url, *info, "--offline")
            assert (code, out.splitlines()[-2:]) == (
                0,
                ["  notifies ops (log), pager", "notified   pager"],
            )
            stuk = ("notify", "explain", "--config", str(file), "--labels", "kind=stuk")
            code, out, _ = await muster(url, *stuk, "--offline")
            assert (code, out.splitlines()) == (
                1,
                [
                    'alert      {alertname="stuk",kind="stuk"}',
                    "note       no kind is called stuk; did you mean stuck?",
                    "notified   nobody: no alert has these labels",
                ],
            )
            file.write_bytes(orjson.dumps(settings | {"default_receivers": []}))
            code, out, _ = await muster(url, *info, "--offline")
            assert (code, out.splitlines()[-1]) == (1, "notified   nobody: no route has a receiver")

    asyncio.run(story())


HOSTILE = '{"a":"\x9b2J\u202e\x7f"}'.encode()


def test_dead_letters_are_listed_shown_and_replayed(tmp_path: pathlib.Path) -> None:
    show = ("dlq", "show", "4567")

    async def story() -> None:
        async with server(tmp_path) as url:
            assert (await muster(url, "dlq", "list"))[1] == "no dead letters\n"
            async with bus.Bus(url, producer="test", name="dead") as connected:
                client = await connected.link.client()
                await client.jetstream().publish(
                    "muster.dlq.notification.ops.0123.4567",
                    HOSTILE,
                    headers={"Muster-Receiver": "ops", "Muster-Error": "HTTP 400"},
                )
                code, out, _ = await muster(url, "dlq", "list", "--json")
                (letter,) = [orjson.loads(line) for line in out.splitlines()]
                assert (letter["id"], letter["Muster-Error"]) == ("4567", "HTTP 400")
                assert '{"a":"\\u009b2J\\u202e\\u007f"}\n' in (await muster(url, *show))[1]
                code, out, _ = await muster(url, *show, "--json")
                assert orjson.loads(out) == {**letter, "body": HOSTILE.decode()}
                assert all(line.isprintable() for line in out.splitlines())
                raw = (sys.executable, "-m", "muster.cli", *show, "--raw", "--url", url)
                done = await asyncio.to_thread(subprocess.run, raw, check=True, capture_output=True)
                assert done.stdout == HOSTILE
                code, out, _ = await muster(url, "dlq", "replay", "4567")
                assert (code, out) == (0, "4567: back in the outbox of ops\n")
                assert (await muster(url, "dlq", "list"))[1] == "no dead letters\n"
                info = await client.jetstream().stream_info(streams.OUTBOX.name)
                assert info.state.messages == 1
            code, _, errors = await muster(url, "dlq", "replay", "4567")
            assert (code, errors) == (2, "muster dlq: there is no undelivered notification 4567\n")
            code, _, errors = await muster(url, "dlq", "replay", "all")
            assert (code, errors) == (2, "muster dlq: there are no undelivered notifications\n")

    asyncio.run(story())
