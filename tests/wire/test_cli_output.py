"""What commands print if their output, their arguments or NATS are unusable."""

import importlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

import cyclopts
import pytest

from muster import client, commands
from muster.cli import __main__ as cli
from muster.cli import events, output, registry
from tests.worlds import muster_command

FULL = "muster: standard output: No space left on device\n"


def paths(app: cyclopts.App, *above: str) -> Iterator[tuple[str, ...]]:
    """Yield the words that call each command."""
    yield above
    for name in app:
        if not name.startswith("-"):
            yield from paths(app[name], *above, name)


def closed_pipe() -> TextIO:
    reading, writing = os.pipe()
    os.close(reading)
    return os.fdopen(writing, "w")


def full_disk() -> TextIO:
    return Path("/dev/full").open("w", encoding="utf-8")


def run(file: TextIO, arguments: tuple[str, ...], patch: pytest.MonkeyPatch) -> object:
    """Run the command with its output going to `file`; return its exit code."""
    patch.setattr(sys, "argv", ["muster", *arguments])
    patch.setattr(sys, "stdout", file)
    with file:
        try:
            return cli.main()
        except SystemExit as error:
            return error.code


PRINTING = [
    *((*words, "--help") for words in paths(cli.app)),
    ("--version",),
    ("config", "schema"),
    ("gpu-name", "NVIDIA H100 80GB HBM3"),
    ("gpu-name", "NVIDIA H100 80GB HBM3", "--json"),
]


@pytest.mark.parametrize("arguments", PRINTING, ids=" ".join)
def test_a_command_whose_reader_has_gone_ends_silently(
    arguments: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(closed_pipe(), arguments, monkeypatch) == 0
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("arguments", PRINTING, ids=" ".join)
def test_a_command_that_cannot_write_says_so_in_one_line(
    arguments: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(full_disk(), arguments, monkeypatch) == 1
    assert capsys.readouterr().err == FULL


def test_a_command_without_its_extra_says_so_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(commands, "missing", lambda extra: f"no {extra}")
    assert registry.call("check", "--node", "a") == 1
    assert capsys.readouterr().err == "muster check: no labeler\n"


@pytest.mark.parametrize("name", registry.COMMANDS)
def test_the_list_of_commands_says_what_each_command_says_itself(name: str) -> None:
    module, _, attribute = registry.targets()[name].partition(":")
    app = getattr(importlib.import_module(module), attribute)
    assert (app.name, app.help.partition("\n")[0]) == ((name,), registry.COMMANDS[name].summary)


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (("status", "--foo"), "muster status: Unknown option: --foo.\n"),
        (("config", "validate", "a", "b"), "muster config validate: unexpected arguments: b\n"),
        (("why",), 'muster why: Command "why" parameter NODE requires an argument.\n'),
        (
            ("silence", "expire"),
            (
                'muster silence expire: Command "silence expire" parameter SILENCE-ID requires an '
                "argument.\n"
            ),
        ),
        (
            ("dlq", "show"),
            'muster dlq show: Command "dlq show" parameter LETTER-ID requires an argument.\n',
        ),
    ],
)
def test_a_usage_error_is_one_line_and_exit_code_2(
    arguments: tuple[str, ...],
    problem: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run(full_disk(), arguments, monkeypatch) == 2
    assert capsys.readouterr().err == problem


@pytest.mark.parametrize(
    ("arguments", "times"),
    [(("config", "import"), 0), (("label-gpus",), 0), (("events",), 1)],
)
def test_the_help_lists_the_namespace_of_muster_only_where_the_command_uses_that(
    arguments: tuple[str, ...], times: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    printed = tmp_path / "help"
    assert run(printed.open("w", encoding="utf-8"), (*arguments, "--help"), monkeypatch) == 0
    assert printed.read_text("utf-8").count("--namespace") == times


def test_a_table_in_a_pipe_is_aligned_text(capsys: pytest.CaptureFixture[str]) -> None:
    output.table(("id", "what"), [("a\x1b[31m", "x"), ("bcd", "long one")], nothing="none")
    output.table(("id", "what"), [], nothing="none")
    assert capsys.readouterr().out == (
        "ID      WHAT\na\N{REPLACEMENT CHARACTER}[31m  x\nbcd     long one\nnone\n"
    )


@pytest.fixture(scope="module")
def kubeconfig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Run the stand-in for the Kubernetes API; yield the path of a kubeconfig."""
    file = tmp_path_factory.mktemp("cluster") / "kubeconfig"
    command = (sys.executable, "-m", "muster.local.kubernetes", "--kubeconfig", str(file))
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        yield str(file)
        process.terminate()
        process.communicate()


SERVICES = [
    ("check", "--kubeconfig", "KUBECONFIG"),
    ("check", "--kubeconfig", "KUBECONFIG", "--json"),
    ("label-gpus", "--kubeconfig", "KUBECONFIG"),
    ("unlabel-gpus", "--kubeconfig", "KUBECONFIG", "--dry-run"),
    ("config", "validate", "RULES"),
    ("config", "show", "RULES"),
    ("config", "import", "--from", "smarter", "SMARTER"),
    ("notify", "explain", "--labels", "kind=stuck", "--offline", "--config", "NOTIFIER"),
    ("notify", "test", "console", "--config", "NOTIFIER"),
]


@pytest.mark.parametrize("arguments", SERVICES, ids=" ".join)
def test_a_service_command_whose_output_cannot_be_written_ends_without_a_traceback(
    arguments: tuple[str, ...],
    kubeconfig: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    files = {
        "RULES": "apiVersion: muster.dev/v1\n"
        "resources: [{name: a.b/fuse, groups: [{devices: [{path: /dev/fuse}]}]}]\n",
        "SMARTER": "- {devicematch: ^fuse$, nummaxdevices: 20}\n",
        "NOTIFIER": "receivers: [{name: console, console: {}}]\n",
    }
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    places = {name: str(tmp_path / name) for name in files} | {"KUBECONFIG": kubeconfig}
    command = tuple(places.get(argument, argument) for argument in arguments)
    assert run(closed_pipe(), command, monkeypatch) == 0
    assert "Traceback" not in capsys.readouterr().err
    assert run(full_disk(), command, monkeypatch) == 1
    assert capsys.readouterr().err.endswith(FULL)


NOWHERE = "nats://127.0.0.1:1"


@pytest.mark.parametrize(
    "arguments",
    [("silence", "list"), ("dlq", "list"), ("events", "--no-follow")],
    ids=" ".join,
)
def test_without_nats_a_command_says_where_it_looked(
    arguments: tuple[str, ...],
) -> None:
    done = muster_command.muster(*arguments, "--url", NOWHERE)
    problem = (
        f"muster {arguments[0]}: NATS at {NOWHERE} has not answered for 3 s: Connection refused\n"
    )
    assert done == (1, "", problem)


def test_whoever_names_no_nats_and_has_none_here_learns_how_to_name_a_cluster() -> None:
    here = ConnectionError(f"NATS at {client.DEFAULT_URL} has not answered for 3 s")
    named = ConnectionError(f"NATS at {NOWHERE} has not answered for 3 s")
    longer = f"NATS at {client.DEFAULT_URL}7 has not answered for 3 s"
    assert events.unreached(here, ["Connection refused"]) == (
        "NATS at nats://127.0.0.1:4222 has not answered for 3 s: Connection refused; "
        "name a cluster with --context CONTEXT"
    )
    assert events.unreached(named, []) == "NATS at nats://127.0.0.1:1 has not answered for 3 s"
    assert events.unreached(ConnectionError(longer), []) == longer


def test_a_command_that_waits_for_nats_says_so() -> None:
    command = (sys.executable, "-m", "muster.cli", "events", "--url", NOWHERE)
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        line = process.stderr.readline()
        process.terminate()
        rest = process.stderr.read()
    waiting = (
        f"muster events: NATS at {NOWHERE} does not answer: Connection refused; waiting for it\n"
    )
    assert (line, rest) == (waiting, "")
