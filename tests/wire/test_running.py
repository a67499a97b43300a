"""The records of `muster up`: the processes that it runs, and the directories that it removes."""

import contextlib
import os
import socket
import tempfile
from pathlib import Path

import msgspec
import pytest

from muster.cli import events, health
from muster.local import running, stack
from tests.worlds.muster_command import muster

NODE = running.Node(name="node-a", gpus=8, fuse=True)


@pytest.fixture(autouse=True)
def _own_temporary_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


def recorded(directory: Path) -> running.Running:
    """Write the record of a stack, and return it."""
    program = running.Program(name="plugin-node-a", pid=17, http="http://127.0.0.1:1", log="x.log")
    record = running.Running(
        directory=str(directory),
        owner=os.getpid(),
        nats_url="nats://127.0.0.1:4222",
        nodes=(NODE,),
        programs=(program,),
    )
    running.write(record)
    return record


def test_a_stack_is_listed_while_its_process_holds_the_lock_and_removed_afterwards() -> None:
    directory, lock = running.claim()
    record = recorded(directory)
    assert (running.here(), running.remove_left_over()) == ([record], [])
    os.close(lock)
    assert (running.here(), running.remove_left_over()) == ([], [directory])
    assert not directory.exists()


def test_the_services_of_a_killed_stack_are_not_taken_for_those_of_one_that_runs() -> None:
    locks = {}
    for number in (1, 2):
        directory, locks[number] = running.claim()
        os.utime(directory / "lock", (number, number))
        of_health = running.Program(name="health", pid=17, http=f"http://127.0.0.1:{number}")
        of_nats = running.Program(name="nats-server", pid=18)
        record = msgspec.structs.replace(
            recorded(directory),
            nats_url=f"nats://127.0.0.1:{number}",
            programs=(of_health, of_nats),
        )
        running.write(record)
    both = [(f"http://127.0.0.1:{n}", f"nats://127.0.0.1:{n}") for n in (2, 1)]
    assert health.running_here() == both
    assert health.running_here("nats-server") == health.running_here("labeler") == []
    os.close(locks[2])
    assert health.running_here() == both[1:]
    os.close(locks[1])
    assert health.running_here() == []


def test_only_directories_that_a_stack_has_locked_are_removed(tmp_path: Path) -> None:
    (tmp_path / "muster-notes").mkdir()
    (tmp_path / "muster-notes/keep").touch()
    (tmp_path / "muster-file").touch()
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "lock").touch()
    (tmp_path / "muster-link").symlink_to(elsewhere)
    before = set(tmp_path.rglob("*"))
    assert running.remove_left_over() == []
    assert set(tmp_path.rglob("*")) == before


@pytest.mark.skipif(os.getuid() != 0, reason="only root can create files of another user")
def test_a_directory_of_another_user_is_never_removed() -> None:
    directory, lock = running.claim()
    os.close(lock)
    os.chown(directory, 65_534, 65_534)
    assert running.remove_left_over() == []
    assert directory.exists()


def test_a_record_that_cannot_be_read_hides_no_other() -> None:
    directory, lock = running.claim()
    record = recorded(directory)
    damaged, other = running.claim()
    (damaged / running.RECORD).write_bytes(b"\xff{")
    assert running.here() == [record]
    os.close(lock)
    os.close(other)


def test_of_several_stacks_the_used_one_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    first, first_lock = running.claim()
    recorded(first)
    assert events.address("dlq", None) == "nats://127.0.0.1:4222"
    assert capsys.readouterr().err == ""
    second, second_lock = running.claim()
    running.write(
        msgspec.structs.replace(
            recorded(second), directory=str(second), nats_url="nats://127.0.0.1:4223"
        )
    )
    used = {"nats://127.0.0.1:4222": first, "nats://127.0.0.1:4223": second}
    chosen = used[events.address("dlq", None)]
    text = f"muster dlq: 2 instances of `muster up` are running; using {chosen}\n"
    assert capsys.readouterr().err == text
    assert events.address("dlq", "nats://ops:4222") == "nats://ops:4222"
    assert capsys.readouterr().err == ""
    os.close(first_lock)
    os.close(second_lock)


def test_the_newest_stack_is_that_which_was_started_last() -> None:
    first, first_lock = running.claim()
    second, second_lock = running.claim()
    os.utime(first / "lock", (1, 1))
    recorded(second)
    # as after the end of a program of the older stack
    recorded(first)
    assert [stack.directory for stack in running.here()] == [str(second), str(first)]
    os.close(first_lock)
    os.close(second_lock)


def test_a_held_program_is_held_until_it_is_released() -> None:
    directory, lock = running.claim()
    record = recorded(directory)
    running.hold(record, "health")
    assert running.is_held(directory, "health")
    assert not running.is_held(directory, "notifier")
    running.release(record, "health")
    running.release(record, "health")
    assert not running.is_held(directory, "health")
    os.close(lock)


def test_more_nodes_repeat_the_first_three_and_only_the_first_offers_fuse() -> None:
    assert stack.nodes() == stack.NODES
    five = stack.nodes(5)
    assert [(node.name, node.gpus, node.fuse) for node in five] == [
        ("node-a", 8, True),
        ("node-b", 4, False),
        ("node-c", 2, False),
        ("node-d", 8, False),
        ("node-e", 4, False),
    ]
    assert [node.gpus for node in stack.nodes(2, gpus=1)] == [1, 1]


def test_every_program_has_a_port_of_its_own_and_more_nodes_change_none() -> None:
    most = stack.nodes(stack.NODES_MAX)
    names = ["console", "nats-server", "kubernetes", "webhook", "health", "notifier", "labeler"]
    names += [f"{kind}-{node.name}" for node in most for kind in ("kubelet", "plugin")]
    first = stack.PORTS[1]
    ports = [stack.port_of(name, first, most) for name in names]
    assert len(set(ports)) == len(names)
    assert (min(ports), max(ports) <= 65_535) == (first, True)
    assert stack.port_of("plugin-node-b", 9000, stack.NODES) == 9013
    assert stack.port_of("plugin-node-b", 9000, most) == 9013


@pytest.mark.parametrize(
    ("options", "error"),
    [
        (("--nodes", "0"), "--nodes 0: use a number from 1 to 20"),
        (("--nodes", "21"), "--nodes 21: use a number from 1 to 20"),
        (("--gpus", "17"), "--gpus 17: use a number from 1 to 16"),
        (("--port", "80"), "--port 80: use a number from 1024 to 65400"),
        (("--port", "x"), 'Invalid value for --port: unable to convert "x" into int.'),
    ],
)
def test_an_impossible_size_or_port_is_refused_before_anything_starts(
    options: tuple[str, str], error: str
) -> None:
    assert muster("up", *options) == (2, "", f"muster up: {error}\n")


def are_free(first: int, count: int) -> bool:
    with contextlib.ExitStack() as stack, contextlib.suppress(OSError):
        for port in range(first, first + count):
            stack.enter_context(socket.socket()).bind(("127.0.0.1", port))
        return True
    return False


def test_a_port_that_is_taken_is_named_before_anything_starts(tmp_path: Path) -> None:
    # below the range from which the kernel assigns ports
    first = 20_000 + os.getpid() % 1000 * 10
    with socket.socket() as taken:
        port = next(port for port in range(first, first + 10_000, 10) if are_free(port, 10))
        taken.bind(("127.0.0.1", port + 4))
        taken.listen()
        environment = {**os.environ, "TMPDIR": str(tmp_path), "NATS_URL": ""}
        code, _, error = muster("up", "--port", str(port), environment=environment)
    assert (code, list(tmp_path.iterdir())) == (1, [])
    expected = f"muster up: port {port + 4} of health: Address already in use; choose another"
    assert error == f"{expected} --port\n"
