"""The helper of pods: every call that FUSE libraries make, replies of a stub broker, and waits."""

import contextlib
import os
import re
import socket
import struct
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

import pytest

from muster_fuse import protocol
from muster_fuse.protocol import Flag, Operation, Request
from tests.worlds import fuse_helper
from tests.worlds.fuse_helper import Asked

BUILDS: Final[Mapping[str, tuple[str, Sequence[str]]]] = {
    "plain": ("gcc", ()),
    "sanitized": ("gcc", fuse_helper.SANITIZED),
    "static": ("musl-gcc", ("-static", "-Os")),
}
OPTIONS: Final = b"ro,fsname=host:/a,subtype=sshfs"
REFUSED: Final = protocol.reply(Operation.MOUNT, errno=1, text="blkdev is not allowed")


@pytest.fixture(scope="module", params=BUILDS)
def helper(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    compiler, flags = BUILDS[request.param]
    return fuse_helper.build(tmp_path_factory.mktemp("helper"), *flags, compiler=compiler)


@pytest.fixture
def place(tmp_path: Path) -> Path:
    (tmp_path / "mnt").mkdir()
    return tmp_path / "mnt"


@pytest.fixture
def device() -> Iterator[int]:
    """Yield a descriptor that stands in for /dev/fuse."""
    fd = os.memfd_create("device")
    yield fd
    os.close(fd)


class Program:
    """A stand-in for a FUSE program: it calls the helper as libraries do, with a socket pair."""

    def __init__(self, helper: Path, broker: Path, *, kind: int = socket.SOCK_STREAM) -> None:
        self.helper, self.broker = helper, broker
        self.own, self.its = socket.socketpair(socket.AF_UNIX, kind)
        self.own.settimeout(30)

    def environment(self) -> dict[str, str]:
        return {"MUSTER_FUSE_SOCKET": str(self.broker), "_FUSE_COMMFD": str(self.its.fileno())}

    def start(
        self,
        *arguments: str | Path,
        environment: Mapping[str, str] | None = None,
        pass_fds: Sequence[int] = (),
    ) -> "subprocess.Popen[str]":
        process = subprocess.Popen(
            [self.helper, *arguments],
            env=self.environment() if environment is None else environment,
            pass_fds=(self.its.fileno(), *pass_fds),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.its.close()
        return process

    def call(
        self, *arguments: str | Path, environment: Mapping[str, str] | None = None
    ) -> tuple[int, str]:
        """Run the helper; return its exit status and its output."""
        with self.start(*arguments, environment=environment) as process:
            written = "".join(process.communicate(timeout=60))
        return process.returncode, written

    def received(self) -> tuple[bytes, list[str]]:
        """Return the next message of the helper, and the names of its descriptors."""
        data, fds, _, _ = socket.recv_fds(self.own, 16, 4)
        names = [str(Path(f"/proc/self/fd/{fd}").readlink()) for fd in fds]
        for fd in fds:
            os.close(fd)
        return data, names


@contextlib.contextmanager
def program(helper: Path, broker: Path, *, kind: int = socket.SOCK_STREAM) -> Iterator[Program]:
    made = Program(helper, broker, kind=kind)
    yield made
    made.own.close()
    made.its.close()


def held(pid: int) -> set[str]:
    """Return the names of the descriptors that a process has open."""
    names = set()
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            names.add(str(descriptor.readlink()))
    return names


CALLS: Final[Mapping[str, Sequence[str]]] = {
    "libfuse": ("-o", "OPTIONS", "--", "DIR"),
    "go-fuse": ("DIR", "-o", "OPTIONS"),
    "attached": ("-oOPTIONS", "DIR"),
    "long": ("--options=OPTIONS", "DIR"),
    "twice": ("-o", "ro", "DIR", "-o", "fsname=host:/a,subtype=sshfs"),
    "with a slash": ("-o", "OPTIONS", "DIR/"),
    "as long as can be": ("-o", "x" * 4_080, "DIR"),
}


@pytest.mark.parametrize("kind", [socket.SOCK_STREAM, socket.SOCK_SEQPACKET])
@pytest.mark.parametrize("call", CALLS)
def test_every_library_gets_its_descriptor_with_one_byte_however_it_calls(
    helper: Path, place: Path, device: int, call: str, kind: int
) -> None:
    arguments = [
        a.replace("OPTIONS", OPTIONS.decode()).replace("DIR", str(place)) for a in CALLS[call]
    ]
    path = place.parent / "broker.sock"
    with (
        fuse_helper.broker(path, fuse_helper.gives(device)) as asked,
        program(helper, path, kind=kind) as caller,
    ):
        assert caller.call(*arguments) == (0, "")
        assert caller.received() == (b"\0", ["/memfd:device (deleted)"])
        assert caller.own.recv(1) == b""
    options = OPTIONS if "x" * 4_080 not in arguments else b"x" * 4_080
    assert asked == [Asked(Request(Operation.MOUNT, Flag(0), options), (str(place),))]


def test_the_socket_may_be_named_by_an_option(helper: Path, place: Path, device: int) -> None:
    path = place.parent / "broker.sock"
    with (
        fuse_helper.broker(path, fuse_helper.gives(device)) as asked,
        program(helper, path) as caller,
    ):
        number = str(caller.its.fileno())
        environment = {"MUSTER_FUSE_SOCKET": str(path)}
        assert caller.call("--comm-fd", number, place, environment=environment) == (0, "")
        assert caller.received() == (b"\0", ["/memfd:device (deleted)"])
    assert asked == [Asked(Request(Operation.MOUNT, Flag(0), b""), (str(place),))]


def test_no_environment_is_needed_to_find_the_broker(
    tmp_path: Path, place: Path, device: int
) -> None:
    path = tmp_path / "broker.sock"
    helper = fuse_helper.build(tmp_path, f'-DSOCKET="{path}"')
    with (
        fuse_helper.broker(path, fuse_helper.gives(device)) as asked,
        program(helper, path) as caller,
    ):
        environment = {"_FUSE_COMMFD": str(caller.its.fileno())}
        assert caller.call(place, environment=environment) == (0, "")
    assert len(asked) == 1


@pytest.mark.parametrize(
    ("arguments", "flags"),
    [
        (["-u"], 0),
        (["-u", "-q", "-z", "--"], Flag.LAZY),
        (["--unmount", "--quiet", "--lazy", "--"], Flag.LAZY),
        (["-uz"], Flag.LAZY),
        (["-q", "-u"], 0),
    ],
)
def test_an_unmount_names_the_root_of_the_mount(
    helper: Path, place: Path, device: int, arguments: list[str], flags: int
) -> None:
    path = place.parent / "broker.sock"
    with (
        fuse_helper.broker(path, fuse_helper.gives(device)) as asked,
        program(helper, path) as caller,
    ):
        assert caller.call(*arguments, place) == (0, "")
    assert asked == [Asked(Request(Operation.UNMOUNT, Flag(flags), b""), (str(place),))]


def test_a_mount_is_not_in_use_by_the_helper_that_has_it_unmounted(
    helper: Path, place: Path
) -> None:
    path = place.parent / "broker.sock"

    def answer(link: socket.socket, __: Asked, ___: Sequence[int]) -> None:
        pid, _, _ = struct.unpack("3i", link.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        # wait until the helper has closed the mount point, which it is about to do
        while str(place) in held(pid):
            os.sched_yield()
        link.send(protocol.reply(Operation.UNMOUNT))

    with fuse_helper.broker(path, answer) as asked, program(helper, path) as caller:
        assert caller.call("-u", place) == (0, "")
    assert len(asked) == 1


def test_a_path_is_resolved_but_for_the_last_link_of_an_unmount(
    helper: Path, place: Path, device: int
) -> None:
    path = place.parent / "broker.sock"
    (place / "data").mkdir()
    (place / "last").symlink_to("data")
    (place.parent / "link").symlink_to(place)
    named = place.parent / "link/last"
    with fuse_helper.broker(path, fuse_helper.gives(device)) as asked:
        for arguments in (["-o", "ro"], ["-u"]):
            with program(helper, path) as caller:
                assert caller.call(*arguments, named) == (0, "")
    assert [each.paths for each in asked] == [(str(place / "data"),), (str(place / "last"),)]


@pytest.mark.parametrize("option", ["-V", "--version"])
def test_it_says_its_version_as_fusermount3_does(helper: Path, place: Path, option: str) -> None:
    with program(helper, place) as caller:
        status, written = caller.call(option)
    assert status == 0
    assert re.fullmatch(r"fusermount3 version: \d+\.\d+\.\d+ \(muster\)\n", written)


def test_it_explains_itself_under_the_name_it_was_called_by(helper: Path, place: Path) -> None:
    other = place / "fusermount"
    other.symlink_to(helper)
    with program(other, place) as caller:
        status, written = caller.call("-h")
    assert (status, written.partition("\n")[0]) == (0, "fusermount: [options] mountpoint")


UNKNOWN: Final = "an unknown option, or one without its value; see -h"
WRONG: Final[Mapping[str, Sequence[str]]] = {
    "a mount point is missing": ("-o", "ro"),
    "more than one mount point": ("a", "b"),
    "-z can only be used with -u": ("-z", "a"),
    "the options are longer than 4080 bytes": ("-o", "x" * 5_000, "a"),
    "_FUSE_COMMFD is not a descriptor: 3x": ("--comm-fd=3x", "a"),
    "_FUSE_COMMFD is not a socket: 0": ("--comm-fd", "0", "a"),
    "bad mount point /nowhere/a: No such file or directory": ("/nowhere/a",),
    "cannot mount on /nowhere: No such file or directory": ("/nowhere",),
    "cannot unmount /nowhere: No such file or directory": ("-u", "/nowhere"),
    UNKNOWN: ("--forget", "a"),
}


@pytest.mark.parametrize("text", WRONG)
def test_a_wrong_call_is_refused_in_one_line(helper: Path, place: Path, text: str) -> None:
    with program(helper, place.parent / "broker.sock") as caller:
        status, written = caller.call(*WRONG[text])
        assert (status, written) == (1, f"fusermount3: {text}\n")
        assert caller.own.recv(1) == b""


def test_an_option_without_its_value_is_refused(helper: Path, place: Path) -> None:
    with program(helper, place) as caller:
        assert caller.call(place, "-o") == (1, f"fusermount3: {UNKNOWN}\n")


def test_it_refuses_to_mount_for_nobody(helper: Path, place: Path) -> None:
    with program(helper, place) as caller:
        status, written = caller.call(place, environment={})
    text = "a FUSE program has to call this, with _FUSE_COMMFD in its environment"
    assert (status, written) == (1, f"fusermount3: {text}\n")


@pytest.mark.parametrize(
    ("packet", "text"),
    [
        (REFUSED, "blkdev is not allowed"),
        (protocol.reply(Operation.MOUNT, errno=1), "Operation not permitted"),
        (protocol.reply(Operation.MOUNT, errno=1, text="\x1b[31mred"), "?[31mred"),
    ],
)
def test_a_refusal_is_said_in_one_line_and_gives_no_descriptor(
    helper: Path, place: Path, packet: bytes, text: str
) -> None:
    path = place.parent / "broker.sock"
    with (
        fuse_helper.broker(path, fuse_helper.sends(packet)),
        program(helper, path) as caller,
    ):
        said = f"fusermount3: cannot mount on {place}: {text}\n"
        assert caller.call(place) == (1, said)
        assert caller.received() == (b"", [])


def test_a_quiet_unmount_says_nothing_and_fails_all_the_same(helper: Path, place: Path) -> None:
    path = place.parent / "broker.sock"
    refused = protocol.reply(Operation.UNMOUNT, errno=22, text="not a mount of this pod")
    with fuse_helper.broker(path, fuse_helper.sends(refused)):
        for arguments, said in (
            (["-u", "-q"], ""),
            (["-u"], f"fusermount3: cannot unmount {place}: not a mount of this pod\n"),
        ):
            with program(helper, path) as caller:
                assert caller.call(*arguments, place) == (1, said)


MOUNTED: Final = protocol.reply(Operation.MOUNT)
MALFORMED: Final[Mapping[str, tuple[bytes, int]]] = {
    "no descriptor": (MOUNTED, 0),
    "two descriptors": (MOUNTED, 2),
    "a descriptor with a refusal": (REFUSED, 1),
    "cut": (MOUNTED[:15], 1),
    "longer than it says": (MOUNTED + b"x", 1),
    "shorter than it says": (REFUSED[:-1], 0),
    "another protocol": (b"XFUS" + MOUNTED[4:], 1),
    "another version": (MOUNTED[:4] + b"\2" + MOUNTED[5:], 1),
    "another operation": (protocol.reply(Operation.UNMOUNT), 1),
    "too long": (MOUNTED[:12] + struct.pack("<I", 5_000) + b"x" * 5_000, 1),
}


@pytest.mark.parametrize("name", MALFORMED)
def test_an_answer_that_is_none_gives_no_descriptor(
    helper: Path, place: Path, device: int, name: str
) -> None:
    packet, count = MALFORMED[name]
    path = place.parent / "broker.sock"
    with (
        fuse_helper.broker(path, fuse_helper.sends(packet, [device] * count)),
        program(helper, path) as caller,
    ):
        said = "fusermount3: the broker's answer cannot be understood\n"
        assert caller.call(place) == (1, said)
        assert caller.received() == (b"", [])


# a broker that is unavailable


def test_a_broker_that_ends_before_its_answer_is_reported_at_once(
    helper: Path, place: Path
) -> None:
    path = place.parent / "broker.sock"
    with (
        fuse_helper.broker(path, fuse_helper.nothing) as asked,
        program(helper, path) as caller,
    ):
        said = "fusermount3: the broker ended before it answered\n"
        assert caller.call(place) == (1, said)
    assert len(asked) == 1


def test_a_broker_that_hangs_is_not_waited_for_for_ever(helper: Path, place: Path) -> None:
    path = place.parent / "broker.sock"
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as server:
        server.bind(str(path))
        server.listen()
        with program(helper, path) as caller:
            said = "fusermount3: the broker did not answer in time\n"
            assert caller.call(place) == (1, said)


def test_a_broker_that_stays_away_is_reported_after_the_wait(helper: Path, place: Path) -> None:
    path = place.parent / "broker.sock"
    with program(helper, path) as caller:
        said = f"the broker has been away for 2 s: {path}: No such file or directory"
        assert caller.call(place) == (1, f"fusermount3: {said}\n")


def test_a_container_without_the_volume_is_told_at_once(helper: Path, place: Path) -> None:
    path = place / "gone/broker.sock"
    with program(helper, path) as caller:
        needs = "the container needs the volume of fuse.muster.dev"
        said = f"fusermount3: {path}: no such directory; {needs}\n"
        assert caller.call(place) == (1, said)


@pytest.mark.parametrize("is_stale", [False, True], ids=["no socket", "a socket of a dead broker"])
def test_a_broker_that_restarts_is_waited_for(
    helper: Path, place: Path, device: int, *, is_stale: bool
) -> None:
    path = place.parent / "broker.sock"
    if is_stale:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as dead:
            dead.bind(str(path))
    with program(helper, path) as caller, caller.start(place) as process:
        # the helper waits until there is a broker
        assert process.poll() is None
        with fuse_helper.broker(path, fuse_helper.gives(device)) as asked:
            assert process.wait(30) == 0
        assert caller.received() == (b"\0", ["/memfd:device (deleted)"])
    assert len(asked) == 1


def test_a_request_that_a_dying_broker_never_read_is_made_again(
    helper: Path, place: Path, device: int
) -> None:
    path = place.parent / "broker.sock"
    with program(helper, path) as caller:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as dying:
            dying.bind(str(path))
            dying.listen()
            process = caller.start(place)
            link, _ = dying.accept()
            # wait until the request has arrived, and close the connection without reading it
            link.recv(1, socket.MSG_PEEK)
            link.close()
        with process, fuse_helper.broker(path, fuse_helper.gives(device)) as asked:
            assert process.wait(30) == 0
        assert caller.received() == (b"\0", ["/memfd:device (deleted)"])
    assert len(asked) == 1


# the program ends, or waits


def test_a_mount_whose_program_has_ended_is_removed(helper: Path, place: Path, device: int) -> None:
    path = place.parent / "broker.sock"
    with (
        fuse_helper.broker(path, fuse_helper.gives(device)) as asked,
        program(helper, path) as caller,
    ):
        caller.own.close()
        said = "fusermount3: cannot give the descriptor to the program: Broken pipe\n"
        assert caller.call(place) == (1, said)
    assert [each.request for each in asked] == [
        Request(Operation.MOUNT, Flag(0), b""),
        Request(Operation.UNMOUNT, Flag.LAZY, b""),
    ]


@pytest.mark.parametrize("arguments", [["-o", "ro,auto_unmount"], ["--auto-unmount"]])
def test_with_auto_unmount_it_stays_until_the_program_ends_and_holds_nothing_open(
    helper: Path, place: Path, device: int, arguments: list[str]
) -> None:
    path = place.parent / "broker.sock"
    reading, writing = os.pipe()
    with (
        fuse_helper.broker(path, fuse_helper.gives(device)) as asked,
        program(helper, path) as caller,
        caller.start(*arguments, "--", place, pass_fds=[writing]) as process,
    ):
        os.close(writing)
        if "--auto-unmount" not in arguments:
            assert caller.received() == (b"\0", ["/memfd:device (deleted)"])
        # it has closed its output and all inherited descriptors, and still runs
        assert os.read(reading, 1) == b""
        assert [pipe.read() for pipe in (process.stdout, process.stderr) if pipe] == ["", ""]
        assert process.poll() is None
        names = {name.partition(":")[0] for name in held(process.pid)}
        assert names == {"/dev/null", "socket"}
        caller.own.close()
        assert process.wait(30) == 0
    os.close(reading)
    # the directory is accessible, so nothing is unmounted
    mounts = [] if "--auto-unmount" in arguments else [Operation.MOUNT]
    assert [each.request.operation for each in asked] == mounts


def test_auto_unmount_as_a_part_of_another_option_means_nothing(
    helper: Path, place: Path, device: int
) -> None:
    path = place.parent / "broker.sock"
    options = r"fsname=a\,auto_unmount,subtype=auto_unmount,no_auto_unmount"
    with (
        fuse_helper.broker(path, fuse_helper.gives(device)) as asked,
        program(helper, path) as caller,
    ):
        # with auto_unmount, this call would not return
        assert caller.call("-o", options, place) == (0, "")
    assert [each.request.options for each in asked] == [options.encode()]


# libfuse 3.19: the program serves before it is mounted


def in_two_steps(device: int, seen: list[Asked | None], last: bytes) -> fuse_helper.Answer:
    def answer(link: socket.socket, __: Asked, ___: Sequence[int]) -> None:
        socket.send_fds(link, [protocol.reply(Operation.SYNC_INIT)], [device])
        with fuse_helper.receive(link) as (request, _):
            seen.append(request)
        if seen[-1] is not None:
            link.send(last)

    return answer


@pytest.mark.parametrize(
    ("errno", "status", "said"),
    [(0, 0, ""), (13, 1, "fusermount3: cannot mount on PLACE: not your directory\n")],
)
def test_with_sync_init_the_program_says_when_to_mount_and_learns_the_result(
    helper: Path, place: Path, device: int, errno: int, status: int, said: str
) -> None:
    path = place.parent / "broker.sock"
    seen: list[Asked | None] = []
    last = protocol.reply(Operation.MOUNT, errno=errno, text="not your directory")
    with (
        fuse_helper.broker(path, in_two_steps(device, seen, last)) as asked,
        program(helper, path) as caller,
        caller.start("--sync-init", "-o", "ro", "--", place) as process,
    ):
        assert caller.received() == (b"\0", ["/memfd:device (deleted)"])
        assert seen == []
        caller.own.send(b"\0")
        assert caller.own.recv(16) == struct.pack("=i", -errno)
        written = process.communicate(timeout=60)
    assert (process.returncode, "".join(written)) == (status, said.replace("PLACE", str(place)))
    assert asked == [Asked(Request(Operation.MOUNT, Flag.SYNC_INIT, b"ro"), (str(place),))]
    assert seen == [Asked(Request(Operation.CONTINUE, Flag(0), b""), ())]


def test_with_sync_init_nothing_is_mounted_for_a_program_that_ends(
    helper: Path, place: Path, device: int
) -> None:
    path = place.parent / "broker.sock"
    seen: list[Asked | None] = []
    with (
        fuse_helper.broker(path, in_two_steps(device, seen, b"")),
        program(helper, path) as caller,
        caller.start("--sync-init", place) as process,
    ):
        assert caller.received() == (b"\0", ["/memfd:device (deleted)"])
        caller.own.close()
        said = "fusermount3: the program ended before it was ready\n"
        assert (process.wait(30), "".join(process.communicate())) == (1, said)
    assert seen == [None]
