"""Attacks of a hostile pod through the broker's socket, with the real kernel."""

import contextlib
import errno
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from muster_fuse.broker import observations
from muster_fuse.request.decision import Reason
from tests.worlds import fuse_broker, fuse_mounter, fuse_pods

pytestmark = fuse_pods.needs_pods()
HOME = fuse_broker.HOME
RELEASE = tuple(map(int, os.uname().release.split(".")[:2]))


def answers(pod: fuse_pods.Container, script: str, **more: object) -> list[str]:
    """Return the lines that a script in a pod prints."""
    return fuse_broker.said(
        fuse_broker.program(pod, script, **more)  # type: ignore[arg-type]  # passed on
    ).splitlines()


def as_host(pod: fuse_pods.Container, script: str) -> None:
    """Run a script as root of the machine, in the mount namespace of a pod."""
    enter = ["/usr/bin/nsenter", f"--target={pod.process.pid}", "--mount", "--"]
    subprocess.run([*enter, "/bin/sh", "-ec", script], check=True, timeout=60)


def reasons(running: fuse_broker.Running) -> set[Reason]:
    return {refused.reason for refused in running.of(observations.Refused)}


PACKETS = f"""
here = point({HOME!r})
print(asked(b"MFUS"))
print(asked(b"HTTP" + bytes(12), here))
print(asked(_packet(1)))
print(asked(_packet(1), here, here))
print(asked(_packet(1), here, here, here))
print(asked(_packet(1), *[here] * 253))
print(asked(_packet(2)))
print(asked(_packet(3), here))
print(asked(_packet(5)))
print(asked(_packet(1, bytes(4080)), here)[:40])
print(asked(_packet(1, bytes(4081)), here))
print(asked(_packet(1, bytes(150_000)), here))
try:
    asked(_packet(1, bytes(1 << 20)), here)
except OSError as error:
    print(errno.errorcode[error.errno])
print(asked(_packet(1, b"ro,suid"), here))
"""
CUT = "EPROTO: the packet is too long, or carries too many descriptors"


def test_packets_that_are_cut_or_carry_other_descriptors_are_refused() -> None:
    with fuse_broker.running() as running, running.pod() as pod:
        assert answers(pod, PACKETS) == [
            "EPROTO: a packet of 4 bytes is shorter than its header",
            "EPROTO: not a packet of this protocol",
            "EPROTO: MOUNT with 0 descriptors is not allowed",
            "EPROTO: MOUNT with 2 descriptors is not allowed",
            "EPROTO: MOUNT with 3 descriptors is not allowed",
            CUT,
            "EPROTO: UNMOUNT with 0 descriptors is not allowed",
            "EPROTO: HELLO with 1 descriptors is not allowed",
            "EPROTO: no mount is waiting for this packet",
            "EINVAL: option '" + 24 * "\ufffd",
            CUT,
            CUT,
            "EMSGSIZE",
            "EINVAL: option 'suid' is refused: programs on a FUSE file system gain no privileges",
        ]
        assert fuse_broker.fuse_mounts(pod.process.pid) == []
        assert reasons(running) == {Reason.MALFORMED, Reason.OPTION}


def test_a_pod_gets_nothing_through_the_socket_of_another() -> None:
    with fuse_broker.running() as running, running.pod() as victim:
        binds = {"/run/muster-fuse": running.socket_of(victim.pod_uid).parent}
        text = "the process does not belong to the pod of this socket"
        with fuse_pods.container(binds=binds) as foreign:
            with fuse_broker.daemon(foreign) as daemon:
                assert fuse_broker.refused(daemon) == (errno.EPERM, text)
            with fuse_broker.daemon(foreign, uid=0) as daemon:
                assert fuse_broker.refused(daemon) == (errno.EPERM, text)
            assert fuse_broker.fuse_mounts(foreign.process.pid) == []
        assert reasons(running) == {Reason.FOREIGN_POD}


def test_a_directory_of_another_mount_namespace_is_no_mount_point(tmp_path: Path) -> None:
    with fuse_broker.running() as running, running.pod() as pod:
        here = os.open(tmp_path, os.O_PATH)
        try:
            script = f"print(asked(_packet(1), {here}))"
            said = answers(pod, script, pass_fds=(here,))
        finally:
            os.close(here)
        text = "the process cannot see the mount that this path is on; was it unmounted?"
        assert said == [f"EINVAL: {text}"]
        assert reasons(running) == {Reason.NOT_VISIBLE}


TARGETS = """
for path in sys.argv[1:]:
    print(asked(_packet(1), point(path)))
"""


@pytest.mark.parametrize("uid", [0, fuse_pods.USER])
def test_what_a_runtime_relies_on_is_no_mount_point(uid: int) -> None:
    with fuse_broker.running() as running, running.pod() as pod:
        paths = ["/", "/proc", "/proc/self", "/sys", "/sys/fs/cgroup", "/dev", "/dev/pts"]
        program = fuse_broker.program(pod, TARGETS, *paths, uid=uid)
        for answer in fuse_broker.said(program).splitlines():
            assert answer.endswith(" cannot be a mount point: the container runtime relies on it")
        assert fuse_broker.fuse_mounts(pod.process.pid) == []
        assert reasons(running) == {Reason.PROTECTED}


def test_other_file_systems_and_shared_mounts_are_no_mount_points() -> None:
    with fuse_broker.running() as running, running.pod() as pod:
        as_host(pod, "mkdir /mnt/proc /mnt/shared; mount -t proc proc /mnt/proc")
        as_host(pod, "mount -t tmpfs -o mode=1777 x /mnt/shared; mount --make-shared /mnt/shared")
        program = fuse_broker.program(pod, TARGETS, "/mnt/proc", "/mnt/shared", uid=0)
        text = (
            "EPERM: /mnt/shared is a shared mount: other containers or the node would see what is"
            " mounted there; use a directory on another volume"
        )
        assert fuse_broker.said(program).splitlines() == [
            "EPERM: a mount point on a file system of type proc is not allowed",
            text,
        ]
        assert reasons(running) == {Reason.FILE_SYSTEM, Reason.SHARED}


def test_a_user_cannot_cover_what_is_not_theirs() -> None:
    with fuse_broker.running() as running, running.pod() as pod:
        said = fuse_broker.said(
            fuse_broker.program(pod, TARGETS, "/etc", "/etc/passwd", "/mnt/tmp")
        )
        assert [line.partition(":")[0] for line in said.splitlines()] == [
            "EACCES",
            "EACCES",
            "EPERM",
        ]
        assert reasons(running) == {Reason.FAILED}


def test_fuse_does_not_lie_on_fuse_even_where_its_daemon_hangs() -> None:
    with (
        fuse_broker.running() as running,
        running.pod() as pod,
        fuse_broker.daemon(pod, "--stall", "GETATTR", "LOOKUP") as daemon,
    ):
        fuse_broker.mounted(daemon)
        program = fuse_broker.program(pod, TARGETS, HOME)
        assert fuse_broker.said(program) == (
            "EPERM: a mount point on a file system of type fuse is not allowed"
        )


SWAPPED = """
os.mkdir("/mnt/home/a")
here = point("/mnt/home/a")
os.rename("/mnt/home/a", "/mnt/home/b")
os.symlink("/etc", "/mnt/home/a")
print(asked(_packet(1), here))
"""


def test_a_mount_point_that_is_swapped_for_a_link_is_still_the_directory() -> None:
    with fuse_broker.running() as running, running.pod() as pod:
        assert answers(pod, SWAPPED) == ["done"]
        assert fuse_broker.fuse_mounts(pod.process.pid) == ["/mnt/home/b"]


ORPHAN = """
over = broker()
if os.fork():
    os._exit(0)
sys.stdin.readline()
print(asked(_packet(1), point("/mnt/home"), over=over))
"""


@contextlib.contextmanager
def orphan(pod: fuse_pods.Container) -> Iterator[tuple[int, subprocess.Popen[str]]]:
    """Run a process that, on request, sends over a connection of its parent, which has ended."""
    process = fuse_broker.program(pod, ORPHAN)
    process.wait(fuse_broker.WAIT_S)
    yield process.pid, process
    process.communicate()


ENDED = "ESRCH: the process that connected has ended; it has to wait for the reply\n"


def test_a_process_that_has_ended_gets_nothing() -> None:
    with fuse_broker.running() as running, running.pod() as pod, orphan(pod) as (_, process):
        assert process.communicate("go\n")[0] == ENDED
        assert fuse_broker.fuse_mounts(pod.process.pid) == []
        assert reasons(running) == {Reason.EXITED}


def test_beyond_the_rate_of_its_pod_nobody_looks_at_a_process() -> None:
    with (
        fuse_broker.running(requests_burst=1, requests_per_minute=0.1) as running,
        running.pod() as pod,
        orphan(pod) as (_, late),
    ):
        assert answers(pod, "print(asked(_packet(3)))") == ["done"]
        answer, _ = late.communicate("go\n")
        assert answer.startswith("EAGAIN: this pod may make 0.1 requests a minute")
        assert reasons(running) == {Reason.TOO_FAST}


def test_a_process_that_has_the_number_of_one_that_has_ended_lends_it_nothing() -> None:
    last = Path("/proc/sys/kernel/ns_last_pid")
    with fuse_broker.running() as running, running.pod() as pod, orphan(pod) as (pid, process):
        with contextlib.ExitStack() as stack:
            for _ in range(1000):
                last.write_text(str(pid - 1))
                root = stack.enter_context(pod.start("/bin/sleep", "60", uid=0))
                stack.callback(root.kill)
                if root.pid == pid:
                    break
            assert root.pid == pid
            assert process.communicate("go\n")[0] == ENDED
        assert fuse_broker.fuse_mounts(pod.process.pid) == []


CHANGED = """
os.setresuid(1000, 1000, 0)
over = broker()
os.setresuid(0, 0, 0)
print(asked(_packet(1), point("/etc"), over=over))
os.setresgid(5, 5, 0)
over = broker()
os.setresgid(0, 0, 0)
print(asked(_packet(1), point("/etc"), over=over))
"""


def test_a_process_that_becomes_root_after_it_connected_is_not_taken_for_root() -> None:
    with fuse_broker.running() as running, running.pod() as pod:
        text = "EPERM: the process has changed its user or group since it connected"
        assert answers(pod, CHANGED, uid=0) == [text, text]
        assert reasons(running) == {Reason.UNCLEAR_CALLER}


NESTED = """
import ctypes
over = broker()
assert ctypes.CDLL(None).unshare(0x10000000) == 0
open("/proc/self/setgroups", "w").write("deny")
open("/proc/self/uid_map", "w").write("0 1000 1")
open("/proc/self/gid_map", "w").write("0 1000 1")
print(asked(_packet(1), point("/etc")))
print(asked(_packet(1), point("/etc"), over=over))
"""


def test_the_root_of_a_nested_user_namespace_is_not_the_root_of_the_container() -> None:
    with fuse_broker.running() as running, running.pod() as pod:
        text = (
            "EPERM: the process is in a user namespace that does not own its mount namespace;"
            " create both together (unshare --user --mount), or mount outside"
        )
        assert answers(pod, NESTED) == [text, text]
        assert reasons(running) == {Reason.USER_NAMESPACE}


SILENT = """
connections = []
try:
    for _ in range(1000):
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        connections.append(connection)
        connection.setblocking(False)
        connection.connect("/run/muster-fuse/broker.sock")
except BlockingIOError:
    pass
print(len(connections), flush=True)
sys.stdin.readline()
"""


def test_connections_that_say_nothing_hold_up_their_own_pod_only() -> None:
    with (
        fuse_broker.running(request_s=1.0) as running,
        running.pod() as silent,
        running.pod() as other,
    ):
        process = fuse_broker.program(silent, SILENT)
        assert process.stdout is not None
        # the broker accepts 8, and the kernel queues some more
        assert 8 < int(process.stdout.readline()) < 100
        with fuse_broker.daemon(other) as daemon:
            fuse_broker.mounted(daemon)
        with fuse_broker.daemon(silent) as daemon:
            fuse_broker.mounted(daemon)
        process.communicate("end\n")


UNREAD = """
connections = [broker() for _ in range(8)]
for connection in connections:
    for _ in range(5):
        try:
            connection.send(b"x" * 1000, socket.MSG_DONTWAIT)
        except (BlockingIOError, BrokenPipeError, ConnectionResetError):
            break
print("sent", flush=True)
sys.stdin.readline()
"""


def test_replies_that_nobody_reads_hold_up_nobody() -> None:
    with fuse_broker.running() as running, running.pod() as pod:
        process = fuse_broker.program(pod, UNREAD)
        assert process.stdout is not None
        assert process.stdout.readline() == "sent\n"
        with fuse_broker.daemon(pod) as daemon:
            fuse_broker.mounted(daemon)
        process.communicate("end\n")


FLOOD = """
for _ in range(300):
    broker().close()
print(asked(_packet(3)))
"""


def test_hundreds_of_connections_leave_nothing_behind() -> None:
    with fuse_broker.running() as running, running.pod() as pod:
        assert answers(pod, FLOOD) == ["done"]
        with fuse_broker.daemon(pod) as daemon:
            fuse_broker.mounted(daemon)


LINGERING = """
import struct
listening = socket.create_server(("127.0.0.1", 0))
if os.fork() == 0:
    # keeps the listener until it is told to end
    sys.stdin.readline()
    os._exit(0)


def slow():
    sending = socket.create_connection(listening.getsockname())
    sending.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 3600))
    sending.setblocking(False)
    try:
        while True:
            sending.send(bytes(1 << 16))
    except BlockingIOError:
        return sending


sockets = [slow() for _ in range(int(sys.argv[2]))]
over = broker()
if sys.argv[1] == "unread":
    over.send(_packet(3))
# the broker may be quicker
with contextlib.suppress(BrokenPipeError):
    socket.send_fds(over, [_packet(1)], [each.fileno() for each in sockets])
print("sent", flush=True)
# the end of a process does not wait for its sockets
os._exit(0)
"""


@pytest.mark.parametrize("arrival", ["read", "unread"])
def test_a_socket_that_takes_an_hour_to_close_holds_up_nobody(arrival: str) -> None:
    def sockets() -> int:
        return sum(path.startswith("socket:") for path in fuse_broker.descriptors().values())

    with fuse_broker.running() as running, running.pod() as pod:
        before = sockets()
        process = fuse_broker.program(pod, LINGERING, arrival, "1")
        assert process.stdout is not None
        assert process.stdout.readline() == "sent\n"
        # a process that is started before that would have to close the socket, too
        fuse_broker.until(lambda: sockets() == before)
        with fuse_broker.daemon(pod) as daemon:
            fuse_broker.mounted(daemon)
            assert fuse_broker.unmounted(pod) == ""
        # end the listener, and with it the connection
        process.communicate("end\n")


def test_sockets_that_the_kernel_has_to_close_hold_up_their_own_pod_only() -> None:
    with fuse_broker.running() as running, running.pod() as pod, running.pod() as other:
        # the broker receives four of the eight; the kernel closes the others during that call
        process = fuse_broker.program(pod, LINGERING, "read", "8")
        assert process.stdout is not None
        assert process.stdout.readline() == "sent\n"
        with fuse_broker.daemon(other) as daemon:
            fuse_broker.mounted(daemon)
        process.communicate("end\n")
        with fuse_broker.daemon(pod) as daemon:
            fuse_broker.mounted(daemon)


FLUSHING = """
file = os.open("/mnt/home/hello", os.O_RDONLY)
over = broker()
print(asked(_packet(1), file, over=over), flush=True)
os._exit(0)
"""


def test_a_file_that_takes_forever_to_close_holds_up_nobody() -> None:
    with (
        fuse_broker.running() as running,
        running.pod() as pod,
        running.pod() as other,
        fuse_broker.daemon(pod, "--stall", "FLUSH") as hanging,
    ):
        fuse_broker.mounted(hanging)
        process = fuse_broker.program(pod, FLUSHING)
        assert process.stdout is not None
        assert process.stdout.readline() == "EBADF: the descriptor was not opened with O_PATH\n"
        # closing the file would wait for its daemon for ever
        assert running.seen(observations.Aborted).count == 1
        fuse_broker.until(lambda: running.mounter.stuck == 0)
        for served in (pod, other):
            with fuse_broker.daemon(served, directory="/mnt/tmp/a") as daemon:
                assert fuse_broker.refused(daemon)[0] == 1
            served.run("/bin/mkdir", "/mnt/tmp/a")
            with fuse_broker.daemon(served, directory="/mnt/tmp/a") as daemon:
                fuse_broker.mounted(daemon)
        # a new mounter is not held up either, though it would close an inherited file
        before = running.mounter.pid
        assert before is not None
        os.kill(before, signal.SIGKILL)
        fuse_broker.until(lambda: running.mounter.pid not in (None, before))
        with fuse_broker.daemon(other, directory="/mnt/home") as daemon:
            fuse_broker.mounted(daemon)
        hanging.kill()
        process.communicate()


def send_while_paused(running: fuse_broker.Running, process: subprocess.Popen[str]) -> None:
    """Let a program send its descriptors, and close its own, before the broker receives them."""
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stdout.readline() == "connected\n"
    with running.paused():
        process.stdin.write("\n")
        process.stdin.flush()
        assert process.stdout.readline() == "sent\n"


UNWRITTEN = """
sent, written = (os.open("/mnt/home/hello", os.O_RDWR) for _ in range(2))
into, out = socket.socketpair()
socket.send_fds(into, [b"x"], [sent])
os.close(sent)
os.pwrite(written, b"y", 0)
over = broker()
print("connected", flush=True)
sys.stdin.readline()
socket.send_fds(over, [_packet(int(sys.argv[1]))], [out.fileno()])
# then only the broker can close the file
out.close()
into.close()
print("sent", flush=True)
print(over.recv(4096)[16:].decode(), flush=True)
os._exit(0)
"""


@pytest.mark.parametrize("operation", ["1", "3"], ids=["mount", "hello"])
def test_a_file_that_must_be_written_before_it_can_be_closed_holds_up_nobody(
    operation: str,
) -> None:
    """Closing it waits for its daemon, whether or not the operation takes a descriptor."""
    with fuse_broker.running() as running, running.pod() as pod, running.pod() as other:
        process = fuse_broker.program(pod, fuse_broker.UNWRITTEN + UNWRITTEN, operation)
        assert process.stdout is not None
        send_while_paused(running, process)
        refusal = {
            "1": "the descriptor was not opened with O_PATH",
            "3": "HELLO with 1 descriptors is not allowed",
        }
        assert process.stdout.readline() == f"{refusal[operation]}\n"
        aborted = running.seen(observations.Aborted)
        assert (aborted.pod.uid, aborted.count) == (pod.pod_uid, 1)
        fuse_broker.until(lambda: running.mounter.stuck == 0)
        with fuse_broker.daemon(other) as daemon:
            fuse_broker.mounted(daemon)
        process.communicate()


DETACHED = """
import ctypes, select
libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = ctypes.c_void_p


def serving(device, has_end):
    # READ (15) is never answered, FLUSH is not supported
    while True:
        if not select.select([device], [], [], 0.02)[0]:
            continue
        if has_end():
            return
        request = os.read(device, 1 << 18)
        _, opcode, unique, node, *_ = struct.unpack_from("IIQQ", request)
        operation = _OPCODES.get(opcode, "")
        if operation in _UNANSWERED or opcode == 15:
            continue
        answer = errno.ENOSYS if operation == "FLUSH" else _answer(operation, node, request[40:])
        error, body = (-answer, b"") if isinstance(answer, int) else (0, answer)
        os.write(device, struct.pack("IiQ", 16 + len(body), error, unique) + body)


for name in ("silent", "detached"):
    os.mkdir(f"/mnt/tmp/{name}")
silent = mount(broker(), "/mnt/tmp/silent")
if os.fork() == 0:
    serving(silent, lambda: False)
os.close(silent)
device = mount(broker(), "/mnt/tmp/detached")
if os.fork() == 0:
    trap = os.open("/mnt/tmp/silent/hello", os.O_RDONLY)
    # private and writable: whoever writes to it has to read the file first
    address = libc.mmap(None, 1 << 18, 3, 2, trap, ctypes.c_long(0))
    serving(device, lambda: os.path.exists("/mnt/tmp/armed"))
    libc.read(device, ctypes.c_void_p(address), 1 << 18)
os.close(device)
os.close(os.open("/mnt/tmp/detached/hello", os.O_RDONLY))
last = os.open("/mnt/tmp/detached/hello", os.O_RDONLY)
open("/mnt/tmp/armed", "w").close()
# the daemon receives RELEASE into its trap, and an abort waits until it has received it
os.close(last)
root = point("/mnt/tmp/detached")
detaching = broker()
socket.send_fds(detaching, [_packet(2, flags=1)], [root])
detaching.recv(4096)
asking = broker()
print("connected", flush=True)
sys.stdin.readline()
socket.send_fds(asking, [_packet(1)], [root])
# then only the broker has the mount
os.close(root)
print("sent", flush=True)
print(asking.recv(4096)[16:].decode(), flush=True)
sys.stdin.readline()
"""


def test_a_child_is_the_last_to_close_the_root_of_a_detached_mount() -> None:
    with fuse_broker.running() as running, running.pod() as pod, running.pod() as other:
        process = fuse_broker.program(pod, DETACHED)
        assert process.stdout is not None
        send_while_paused(running, process)
        text = "the process cannot see the mount that this path is on; was it unmounted?\n"
        assert process.stdout.readline() == text
        fuse_broker.until(lambda: running.mounter.stuck == 1)
        with fuse_broker.daemon(other) as daemon:
            fuse_broker.mounted(daemon)
        (pod.cgroup / "cgroup.kill").write_text("1")
        fuse_broker.until(lambda: running.mounter.stuck == 0)
        process.communicate()


def test_a_mount_that_remains_though_its_child_was_killed_is_counted() -> None:
    """A file system may delay a child until the mounter kills it in the middle of its job."""
    killing = fuse_mounter.killing("child", "_reply", "call")
    with (
        fuse_broker.running(command=killing, mounts_per_pod=1) as running,
        running.pod() as pod,
    ):
        with fuse_broker.daemon(pod) as daemon:
            assert fuse_broker.refused(daemon)[0] == errno.EIO
        assert fuse_broker.fuse_mounts(pod.process.pid) == [HOME]
        (mount,) = running.broker.mounts()
        assert mount.mount_point == HOME
        assert pod.run("/bin/mkdir", "/mnt/tmp/a") == (0, "")
        with fuse_broker.daemon(pod, directory="/mnt/tmp/a") as daemon:
            assert fuse_broker.refused(daemon) == (
                errno.ENOSPC,
                "this pod has 1 FUSE mounts, the maximum",
            )


def test_a_child_that_is_killed_before_it_has_received_anything_holds_up_nobody() -> None:
    killing = fuse_mounter.killing("child", "receive", "call")
    with fuse_broker.running(command=killing) as running, running.pod() as pod:
        with fuse_broker.daemon(pod) as daemon:
            text = "the process that did the job ended with status -9"
            assert fuse_broker.refused(daemon) == (errno.EIO, text)
        hello = "print(asked(_packet(3)))"
        assert answers(pod, hello) == answers(pod, hello) != []


CONNECTED = """
import fcntl
served = mount(broker(), "/mnt/home")
os.mkdir("/mnt/tmp/a")
over = broker()
socket.send_fds(over, [_packet(1, flags=2)], [point("/mnt/tmp/a")])
_, [device], _, _ = socket.recv_fds(over, 4096, 1)
# FUSE_DEV_IOC_CLONE of linux/fuse.h
fcntl.ioctl(device, 0x8004E500, struct.pack("I", served))
over.send(_packet(5))
print(over.recv(4096)[16:].decode())
"""


@pytest.mark.skipif(RELEASE < (6, 6), reason="needs Linux 6.6: FSCONFIG_CMD_CREATE_EXCL")
def test_a_device_that_its_receiver_has_connected_mounts_no_file_system_again() -> None:
    with fuse_broker.running() as running, running.pod() as pod:
        (answer,) = answers(pod, CONNECTED)
        assert answer.startswith("cannot create the file system: Device or resource busy")
        assert fuse_broker.fuse_mounts(pod.process.pid) == [HOME]
