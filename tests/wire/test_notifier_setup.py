"""`muster notify setup`: a receiver is added to the cluster's Secret if its test succeeds."""

import asyncio
import base64
import contextlib
import io
import os
import pty
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import Any, Final

import orjson
import pytest
import yaml

from muster.cli.__main__ import app
from muster.local import webhook
from muster_notifier.config import schema
from muster_notifier.receivers import directory
from tests.worlds import muster_in_cluster
from tests.worlds.muster_in_cluster import World, command, rights

RECEIVERS: Final = "muster-notifier-receivers"
CONTEXT: Final = ("--context", "muster")
SLACK: Final = ("notify", "setup", "slack", "--reach", "loopback")
TAKEN: Final = "muster notify: test message to {} answered: accepted: HTTP 200"
SETTINGS: Final = """
receivers: [{name: ops, webhook: {url: "https://hooks.example.com"}}]
"""
KEPT: Final = "muster notify: nothing was written; --no-test writes the receiver without a test"


def play(story: Callable[[], Coroutine[Any, Any, None]]) -> None:
    async def limited() -> None:
        async with asyncio.timeout(170):
            await story()

    asyncio.run(limited())


@contextlib.asynccontextmanager
async def notifier(where: Path) -> AsyncIterator[tuple[World, webhook.WebhookReceiver, Path]]:
    """Run a cluster with a notifier, and a stand-in for Slack; yield them and Slack's secret."""
    secret = where / "secret"
    async with (
        muster_in_cluster.empty(where / "cluster") as world,
        webhook.WebhookReceiver() as slack,
    ):
        await world.pod("muster-notifier", 0, 8080, slack.url)
        await muster_in_cluster.notifier_settings(world, SETTINGS)
        secret.write_text(f"{slack.url}/services/x\n")
        yield world, slack, secret


async def stored(world: World) -> dict[str, str]:
    path = f"/api/v1/namespaces/{muster_in_cluster.NAMESPACE}/secrets/{RECEIVERS}"
    answer = await world.api.request("GET", path, timeout_s=10)
    if answer.status == 404:
        return {}
    data = orjson.loads(answer.body)["data"]
    return {key: base64.b64decode(value).decode() for key, value in data.items()}


def test_a_tested_receiver_is_added_to_those_that_are_there(tmp_path: Path) -> None:
    async def story() -> None:
        async with notifier(tmp_path) as (world, slack, secret):
            about = ("--secret-file", str(secret))
            code, out, errors = await command(world, *SLACK, *about, *CONTEXT)
            assert (code, errors) == (0, [rights(world, "notify"), TAKEN.format("slack")])
            assert out == (
                f"slack: written to the Secret {RECEIVERS}; the notifier uses it within two "
                "minutes, without a restart; then: muster --context muster notify test slack\n"
            )
            assert "this is a test message" in slack.received()[0].body
            hook = ("notify", "setup", "webhook", "--name", "hook", "--url", slack.url)
            code, _, errors = await command(world, *CONTEXT, *hook, "--reach", "loopback")
            assert (code, errors[1]) == (0, TAKEN.format("hook"))
            texts = await stored(world)
            assert texts["slack.secret"] == f"{slack.url}/services/x"
            for file, text in texts.items():
                (tmp_path / file).write_text(text)
            content = directory.read(tmp_path, schema.Settings())
            assert [(each.name, each.way) for each in content.receivers] == [
                ("hook", "webhook"),
                ("slack", "slack"),
            ]
            secret.write_text(f"{slack.url}/services/y")
            code, _, errors = await command(world, *SLACK, *about, *CONTEXT)
            taken = "there is already a receiver slack: pass another --name, or --replace"
            assert (code, errors[-1]) == (2, f"muster notify: {taken}")
            code, _, errors = await command(world, *SLACK, *about, *CONTEXT, "--name", "ops")
            taken = "the notifier's settings already have a receiver ops: pass another --name"
            assert (code, errors[-1]) == (2, f"muster notify: {taken}")
            # a command that is refused sends no test message
            assert len(slack.received()) == 2
            code, _, _ = await command(world, *SLACK, *about, *CONTEXT, "--replace", "--no-test")
            assert code == 0
            changed = {"slack.secret": f"{slack.url}/services/y"}
            assert await stored(world) == texts | changed
            assert len(slack.received()) == 2

    play(story)


def test_nothing_is_written_if_the_receiver_refuses_the_test_message(tmp_path: Path) -> None:
    async def story() -> None:
        async with notifier(tmp_path) as (world, slack, secret):
            slack.behave(webhook.Behaviour(status=404))
            about = ("--secret-file", str(secret), *CONTEXT)
            code, out, errors = await command(world, *SLACK, *about)
            answer = "test message to slack answered: refused (not_found): HTTP 404"
            assert (code, out) == (1, "")
            assert errors == [rights(world, "notify"), f"muster notify: {answer}", KEPT]
            assert await stored(world) == {}

    play(story)


def test_a_missing_right_is_named_and_so_is_a_notifier_that_is_not_there(tmp_path: Path) -> None:
    async def story() -> None:
        async with notifier(tmp_path) as (world, _, secret):
            about = (*SLACK, "--secret-file", str(secret), "--no-test", *CONTEXT)
            code, _, errors = await command(world, *about, "--namespace", "tools")
            absent = "no pod of muster is in the namespace tools; name another with --namespace"
            assert (code, errors[-1]) == (1, f"muster notify: {absent}")
            for verb, what in (("patch", "create and patch"), ("get", "get")):
                world.deny(verb, "secrets")
                code, out, errors = await command(world, *about)
                assert (code, out) == (1, "")
                missing = (
                    f"missing permission: {what} the Secret {RECEIVERS} in the namespace muster ("
                )
                assert errors[-1].startswith(f"muster notify: {missing}")
            assert await stored(world) == {}

    play(story)


def test_without_a_context_the_manifest_is_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # so that no `muster up` of another test is found
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    async def story() -> None:
        async with notifier(tmp_path) as (world, slack, secret):
            about = (*SLACK, "--name", "ops", "--secret-file", str(secret), "--no-test")
            code, out, errors = await command(world, *about)
            assert await command(world, *about, *CONTEXT, "--print") == (code, out, errors)
            how = "kubectl apply --server-side --field-manager=muster-notify-ops -f -"
            hint = f"nothing was written: pipe this to `{how}`, or pass --context"
            assert (code, errors) == (0, [f"muster notify: {hint}"])
            manifest = yaml.safe_load(out)
            assert manifest["metadata"]["name"] == RECEIVERS
            value = base64.b64decode(manifest["data"]["ops.secret"]).decode()
            assert value == f"{slack.url}/services/x"
            assert await stored(world) == {}
            assert slack.received() == []

    play(story)


HOST: Final = ("--host", "smtp.example.com")


@pytest.mark.parametrize(
    ("arguments", "secret", "problem"),
    [
        (
            ("slack",),
            None,
            "pass --secret-file FILE with this content: Bot token (xoxb-...), or URL ",
        ),
        (("slack",), " \n", "the secret is empty"),
        (("slack",), "a\nb", "the secret must be one printable line of at most 16 KiB"),
        (("slack",), "xoxb-1", "--channel is required"),
        (("slack", "--channel", "#a"), "https://a", "--channel: an incoming webhook has a fixed "),
        (
            ("slack", "--name", "../x"),
            "https://a",
            "--name: '../x': expected at most 63 letters, digits, ",
        ),
        (
            ("slack", "--name", "console"),
            "https://a",
            "the settings already have a receiver of this name",
        ),
        (
            ("webhook", "--url", "https://a", "--directory", "."),
            None,
            "`muster up` already has a receiver webhook: choose another --name",
        ),
        (("teams",), "no url", "receiver teams: "),
        (("pagerduty", "--url", "x"), "R0", "pagerduty: pagerduty.url: "),
        (("email",), None, "--host is required"),
        (("email", *HOST, "--sender", "x"), None, "--to is required"),
        (
            ("email", *HOST, "--sender", "ann", "--to", "a@b"),
            None,
            "email: email.sender: 'ann' is ",
        ),
        (("email", *HOST, "--sender", "a@b", "--to", "c@d"), "p", "--secret-file: a password "),
    ],
    ids=str,
)
def test_wrong_input_is_one_line_and_exit_code_2(
    arguments: tuple[str, ...],
    secret: str | None,
    problem: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    if secret is not None:
        (tmp_path / "secret").write_text(secret)
        arguments += ("--secret-file", str(tmp_path / "secret"))
    monkeypatch.setattr(sys, "stdin", io.StringIO())
    assert app(["notify", "setup", *arguments]) == 2
    out, errors = capsys.readouterr()
    (line,) = errors.splitlines()
    assert (out, line.removeprefix("muster notify: ")[: len(problem)]) == ("", problem)


def test_on_a_terminal_it_asks_for_what_is_missing_and_shows_no_secret() -> None:
    command = [sys.executable, "-m", "muster.cli", "notify", "setup", "slack", "--no-test"]
    ours, theirs = pty.openpty()
    # without a controlling terminal, the prompt for the secret uses standard input
    process = subprocess.Popen(
        command, stdin=theirs, stdout=subprocess.PIPE, stderr=theirs, start_new_session=True
    )
    os.close(theirs)
    shown = b""
    for question, answer in ((b"incoming webhook: ", b"xoxb-7\n"), (b"#gpu-ops: ", b"#a\n")):
        while question not in shown:
            shown += os.read(ours, 1024)
        os.write(ours, answer)
    out, _ = process.communicate(timeout=60)
    os.close(ours)
    data = {k: base64.b64decode(v).decode() for k, v in yaml.safe_load(out)["data"].items()}
    assert process.returncode == 0
    assert data["slack.secret"] == "xoxb-7"
    assert yaml.safe_load(data["slack.yaml"]) == {
        "slack": {"token_from": {"file": "slack.secret"}, "channel": "#a"}
    }
    assert b"xoxb-7" not in shown
