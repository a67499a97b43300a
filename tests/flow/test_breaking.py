"""`muster break` injects each fault into a running `muster up`, and `muster mend` repairs it."""

import json
import os
import tempfile
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from muster.cli import faults
from tests.worlds.broken_stack import NODES, Stack
from tests.worlds.muster_command import muster

LAST = NODES[-1]


@pytest.fixture(scope="module")
def stack() -> Iterator[Stack]:
    """Run `muster up`; its directory's path is short enough for sockets."""
    with tempfile.TemporaryDirectory(prefix="mb-") as temporary:
        made = Stack(Path(temporary))
        try:
            yield made
        finally:
            made.end()


@pytest.mark.parametrize(
    ("fault", "node", "verdict"),
    [
        # on different nodes, because a plugin that fails repeatedly recovers later
        ("freeze", "node-a", "STUCK"),
        ("kill", "node-b", "PLUGIN_DOWN"),
        ("stream", "node-c", "DEREGISTERED"),
    ],
)
def test_a_broken_plugin_gets_the_verdict_that_is_announced_and_recovers_when_mended(
    stack: Stack, fault: str, node: str, verdict: str
) -> None:
    printed = stack.do("break", fault, node)
    assert f"see     {verdict} after" in printed
    assert f"undo    muster mend {fault} {node}" in printed
    stack.until(lambda: stack.verdicts()[node] == verdict)
    assert stack.do("mend", fault) == f"mended  {fault} {node}\n"
    stack.until(lambda: stack.verdicts()[node] == "HEALTHY")


def test_a_gpu_that_a_pod_has_breaks_first_and_works_again_when_mended(stack: Stack) -> None:
    kubelet = stack.program("kubelet-node-a")["http"]
    pod = json.dumps({"name": "training", "resources": {faults.GPU: 1}}).encode()
    with urllib.request.urlopen(f"{kubelet}/pods", pod) as answer:  # noqa: S310  # ours
        (gpu,) = json.load(answer)["allocated"][0]["ids"]
    assert "undo    muster mend xid node-a" in stack.do("break", "xid")
    stack.until(lambda: stack.resource("node-a")["devices"][gpu] == "Unhealthy")
    assert stack.resource("node-a")["allocatable"] == 1
    stack.do("mend")
    stack.until(lambda: stack.resource("node-a")["allocatable"] == 2)


def test_a_removed_socket_needs_no_mending(stack: Stack) -> None:
    before = stack.resource(LAST)["registered"]
    assert "undo    not needed" in stack.do("break", "socket")
    stack.until(lambda: stack.resource(LAST).get("registered", 0) > before)
    assert stack.do("mend") == "nothing to mend\n"


@pytest.mark.parametrize(
    ("fault", "program"),
    [("kubelet", "kubelet-node-c"), ("nats", "nats-server")],
)
def test_a_killed_program_stays_ended_until_it_is_mended(
    stack: Stack, fault: str, program: str
) -> None:
    before = stack.program(program)
    stack.do("break", fault)
    stack.until(lambda: stack.program(program)["pid"] is None)
    ended = "ended with -9; kept from restarting"
    assert stack.program(program) == {**before, "pid": None, "problem": ended}
    code, _, error = muster("break", fault, environment=stack.environment)
    assert (code, error) == (1, f"muster break: {program} is not running: {ended}\n")
    assert f"{fault}" in stack.do("mend")
    stack.until(lambda: stack.program(program)["pid"] is not None)
    after = stack.program(program)
    assert after == {**before, "pid": after["pid"], "restarts": before["restarts"] + 1}


def test_a_frozen_health_service_answers_again_when_mended(stack: Stack) -> None:
    stack.do("break", "health")
    stat = Path(f"/proc/{stack.program('health')['pid']}/stat")
    assert stat.read_text().rpartition(")")[2].split()[0] == "T"
    stack.do("mend", "health")
    stack.until(stack.verdicts)


def test_the_list_marks_what_is_broken_now(stack: Stack) -> None:
    stack.do("break", "freeze")
    lines = stack.do("break").splitlines()
    assert [line.split()[0] for line in lines[1:]] == list(faults.Fault)
    assert [line.split()[0] for line in lines if line.endswith(" yes")] == ["freeze"]
    stack.do("mend")
    assert not [line for line in stack.do("break").splitlines() if line.endswith(" yes")]


def test_wrong_names_are_answered_with_the_nearest_and_break_nothing(stack: Stack) -> None:
    for words, error in {
        ("break", "frezee"): "muster break: no fault 'frezee'; did you mean freeze?\n",
        ("break", "freeze", "nod-a"): "muster break: no node 'nod-a'; did you mean node-a?\n",
        ("mend", "nats", "x"): "muster mend: nats concerns the whole fleet; leave out 'x'\n",
    }.items():
        assert muster(*words, environment=stack.environment) == (2, "", error)
    assert stack.do("mend") == "nothing to mend\n"


def test_without_a_running_stack_faults_are_listed_but_not_made(tmp_path: Path) -> None:
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    code, printed, _ = muster("break", environment=environment)
    assert (code, printed.splitlines()[-1]) == (0, "no `muster up` of yours is running")
    for command in ("break freeze", "mend"):
        code, _, error = muster(*command.split(), environment=environment)
        name = command.split()[0]
        expected = f"muster {name}: no `muster up` of yours is running; start it first\n"
        assert (code, error) == (1, expected)


def test_two_faults_of_a_program_are_mended_together(stack: Stack) -> None:
    stack.do("break", "freeze", LAST)
    stack.do("break", "kill", LAST)
    program = f"plugin-{LAST}"
    stack.until(lambda: stack.program(program)["pid"] is None)
    mended = stack.do("mend").splitlines()
    assert sorted(mended) == [f"mended  freeze {LAST}", f"mended  kill {LAST}"]
    stack.until(lambda: stack.program(program)["pid"] is not None)


def test_a_silenced_alert_is_marked_and_its_routes_are_those_of_the_running_notifier(
    stack: Stack,
) -> None:
    labels = "kind=device_unhealthy,node=node-a"
    explained = stack.do("notify", "explain", "--labels", labels).splitlines()
    assert explained[-1] == "notified   webhook"
    stack.do("break", "xid", "node-a")
    silence = stack.do("silence", "add", *labels.split(","), "--author", "ann", "--comment", "new")
    stack.until(lambda: "[silenced by ann until " in stack.do("status"))
    assert "    silenced   by ann until " in stack.do("why", "node-a")
    stack.do("silence", "expire", silence.strip())
    assert "silenced" not in stack.do("status")
    stack.do("mend")


def test_a_receiver_that_setup_writes_is_used_without_a_restart(stack: Stack) -> None:
    receivers = stack.record()["receivers"]
    url = f"{stack.program('webhook')['http']}/mine"
    options = ("--name", "mine", "--url", url, "--reach", "loopback", "--no-test")
    written = stack.do("notify", "setup", "webhook", *options, "--directory", receivers)
    assert written == (
        f"mine: written to {receivers}; a `muster up` with this directory uses it within seconds; "
        "then: muster notify test mine\n"
    )
    log = Path(stack.program("notifier")["log"])
    stack.until(lambda: '"mine":"webhook"' in log.read_text())
    assert stack.do("notify", "test", "mine") == "answered: accepted: HTTP 200\n"
    explained = stack.do("notify", "explain", "--labels", "kind=stuck").splitlines()
    assert explained[-1] == "notified   webhook, mine"
    other = ("notify", "setup", "webhook", *options[:2], "--url", f"{url}2", *options[4:])
    code, _, error = muster(*other, "--directory", receivers, environment=stack.environment)
    taken = "there is already a receiver mine: pass another --name, or --replace"
    assert (code, error) == (2, f"muster notify: {taken}\n")
    _, _, error = muster(*other, environment=stack.environment)
    assert error.endswith(
        f"or pass --context; for `muster up` on this machine: --directory {receivers}\n"
    )


def test_without_a_running_stack_no_routes_are_explained(tmp_path: Path) -> None:
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    code, _, error = muster("notify", "explain", "--labels", "node=a", environment=environment)
    expected = "no `muster up` of yours is running; pass --context CONTEXT or --config FILE"
    assert (code, error) == (2, f"muster notify: {expected}\n")
