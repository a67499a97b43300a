"""A hostile pod that changes while the broker examines it, with the real kernel."""

import contextlib
import errno
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from muster_fuse.broker import observations
from muster_fuse.kernel import jobs, mounter_client, syscalls
from muster_fuse.request import caller
from tests.worlds import fuse_broker, fuse_pods

pytestmark = fuse_pods.needs_pods()

MOVING = """
import ctypes, random, time

libc = ctypes.CDLL(None, use_errno=True)
os.mkdir("/mnt/home/d")
ours, theirs = socket.socketpair()
inside = os.fork()
if inside == 0:
    assert libc.unshare(0x10020000) == 0
    open("/proc/self/setgroups", "w").write("deny")
    open("/proc/self/uid_map", "w").write("0 1000 1")
    open("/proc/self/gid_map", "w").write("0 1000 1")
    socket.send_fds(theirs, [b"x"], [point("/mnt/home/d")])
    theirs.recv(1)
    print(open("/proc/self/mountinfo").read().count("user_id=1000"))
    sys.stdout.flush()
    os._exit(0)
_, descriptors, _, _ = socket.recv_fds(ours, 1, 1)
user, mounts = (os.open(f"/proc/{inside}/ns/{kind}", os.O_RDONLY) for kind in ("user", "mnt"))
end = time.monotonic() + float(sys.argv[1])
while time.monotonic() < end:
    if os.fork() == 0:
        over = broker()
        socket.send_fds(over, [_packet(1)], descriptors)
        late = time.perf_counter() + random.random() * 0.005
        while time.perf_counter() < late:
            pass
        assert libc.setns(user, 0) == 0
        assert libc.setns(mounts, 0) == 0
        over.recv(4096)
        os._exit(0)
    os.wait()
ours.send(b"x")
os.wait()
"""


def test_a_process_that_changes_its_namespaces_meanwhile_gets_no_mount_of_the_node() -> None:
    with (
        fuse_broker.running(requests_burst=10_000, mounts_per_pod=10_000) as running,
        running.pod() as pod,
    ):
        # a mount of the pod's nested user namespace would not have user_id=1000
        assert fuse_broker.said(fuse_broker.program(pod, MOVING, "8")) == "0"


TAKEN = """
import ctypes

libc = ctypes.CDLL(None, use_errno=True)
assert libc.unshare(0x10020000) == 0
open("/proc/self/setgroups", "w").write("deny")
open("/proc/self/uid_map", "w").write("0 1000 1")
open("/proc/self/gid_map", "w").write("0 1000 1")
over = broker()
socket.send_fds(over, [_packet(1, flags=2)], [point("/mnt/home")])
answer, descriptors, _, _ = socket.recv_fds(over, 4096, 4)
print(answer[16:].decode())
for device in descriptors:
    options = f"fd={device},rootmode=40000,user_id=0,group_id=0"
    print(libc.mount(b"x", b"/mnt/home", b"fuse", 0, options.encode()))
"""


def test_no_device_is_given_that_its_receiver_could_mount_without_the_broker() -> None:
    with fuse_broker.running() as running, running.pod() as pod:
        assert fuse_broker.said(fuse_broker.program(pod, TAKEN)) == (
            "in a user namespace, the device is handed over only together with its mount"
        )


MANY = """
import resource

_, most = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
device = mount(broker(), "/mnt/home")
with contextlib.suppress(OSError):
    while True:
        os.dup(device)
for _ in range(400_000 // most):
    if os.fork() == 0:
        break
print("ready", flush=True)
sys.stdin.readline()
"""


def test_a_pod_with_hundreds_of_thousands_of_descriptors_delays_no_other() -> None:
    with (
        fuse_broker.running() as running,
        running.pod() as many,
        running.pod() as other,
    ):
        process = fuse_broker.program(many, MANY)
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        before = resident_kib()
        for _ in range(10):
            with fuse_broker.daemon(other) as daemon:
                fuse_broker.mounted(daemon)
                assert fuse_broker.unmounted(other) == ""
        assert resident_kib() < before + 10_000
        process.kill()
        process.communicate()


def resident_kib() -> int:
    (line,) = (x for x in Path("/proc/self/status").read_text().splitlines() if "VmRSS" in x)
    return int(line.split()[1])


FLEETING = """
import ctypes, time

libc = ctypes.CDLL(None, use_errno=True)
assert libc.unshare(0x10020000) == 0
open("/proc/self/setgroups", "w").write("deny")
open("/proc/self/uid_map", "w").write("0 1000 1")
open("/proc/self/gid_map", "w").write("0 1000 1")
end = time.monotonic() + float(sys.argv[1])
while time.monotonic() < end:
    device = mount(broker(), "/mnt/home")
    libc.umount2(b"/mnt/home", 2)
    os.close(device)
"""


def test_a_mount_that_is_gone_at_once_is_not_taken_for_the_next_of_its_number() -> None:
    with (
        fuse_broker.running(requests_burst=10_000, mounts_per_pod=10_000) as running,
        running.pod() as pod,
    ):
        fleeting = fuse_broker.program(pod, FLEETING, "5")
        taken = []
        while fleeting.poll() is None:
            with node_mount() as connection:
                time.sleep(0.01)
                present = fuse_pods.connections()
                taken += [
                    m
                    for m in running.broker.mounts()
                    if m.connection == connection and m.inode == present[connection]
                ]
        assert fuse_broker.said(fleeting) == ""
        assert taken == []


@contextlib.contextmanager
def node_mount() -> Iterator[int]:
    """Mount a FUSE file system for the node itself; yield the number of its connection."""
    with contextlib.ExitStack() as stack:
        device = os.open("/dev/fuse", os.O_RDWR)
        stack.callback(os.close, device)
        context = syscalls.fsopen(b"fuse")
        with contextlib.closing(os.fdopen(context, "rb", buffering=0)):
            for key, value in {
                "fd": device,
                "rootmode": 40000,
                "user_id": 0,
                "group_id": 0,
            }.items():
                syscalls.fsconfig_string(context, key, str(value))
            syscalls.fsconfig_create(context)
            made = syscalls.fsmount(context, 0)
        stack.callback(os.close, made)
        yield syscalls.status(made).minor


SLOW = """
while True:
    over = broker()
    socket.send_fds(over, [_packet(1, flags=2)], [point("/mnt/home")])
    _, descriptors, _, _ = socket.recv_fds(over, 4096, 1)
    for descriptor in descriptors:
        os.close(descriptor)
        print("waits", flush=True)
    over.recv(4096)
"""

LATE = """
import ctypes, signal

libc = ctypes.CDLL(None, use_errno=True)
assert libc.unshare(0x10020000) == 0
open("/proc/self/setgroups", "w").write("deny")
open("/proc/self/uid_map", "w").write("0 1000 1")
open("/proc/self/gid_map", "w").write("0 1000 1")
for name in ("hung", "empty", "over"):
    os.mkdir(f"/mnt/home/{name}")
device = mount(broker(), "/mnt/home/hung")
daemon = os.fork()
if daemon == 0:
    signal.signal(signal.SIGUSR1, lambda *_: [os.read(device, 1 << 18) for _ in iter(int, 1)])
    serve(device)
os.close(device)
layers = b"lowerdir=/mnt/home/hung:/mnt/home/empty"
assert libc.mount(b"x", b"/mnt/home/over", b"overlay", 0, layers) == 0
here = point("/mnt/home/over")
os.kill(daemon, signal.Signals[sys.argv[1]])
for _ in range(int(sys.argv[2])):
    # its file system waits for a daemon that has stopped, or reads and never answers
    print("waits" if asked(_packet(1), here).startswith("ETIMEDOUT") else "failed", flush=True)
sys.stdin.readline()
"""


@pytest.mark.parametrize("script", [SLOW, LATE], ids=["continue", "answer"])
def test_pods_that_keep_the_mounter_waiting_hold_up_neither_others_nor_the_self_test(
    script: str,
) -> None:
    with (
        fuse_broker.running() as running,
        contextlib.ExitStack() as ended,
        contextlib.ExitStack() as stack,
    ):
        for process in [
            fuse_broker.program(stack.enter_context(running.pod()), script, "SIGSTOP", "1000")
            for _ in range(mounter_client.JOBS_MAX)
        ]:
            ended.callback(process.communicate)
            assert process.stdout is not None
            assert process.stdout.readline() == "waits\n"
        other = stack.enter_context(running.pod())
        began = time.monotonic()
        for _ in range(4):
            with fuse_broker.daemon(other) as daemon:
                fuse_broker.mounted(daemon)
                assert fuse_broker.unmounted(other) == ""
        # eight calls that each waited for jobs of five seconds would take longer
        assert time.monotonic() - began < 20
        path = running.directory / "own.sock"
        uid = caller.pod_uid(Path("/proc/self/cgroup").read_text()) or ""
        running.call(running.broker.open(caller.Pod(uid=uid, namespace="", name=""), path))
        test = running.mounter.self_test(jobs.SelfTestJob(str(path)))
        assert running.call(test) == jobs.Outcome()


TABLES = """
import ctypes

libc = ctypes.CDLL(None, use_errno=True)
assert libc.unshare(0x10020000) == 0
open("/proc/self/setgroups", "w").write("deny")
open("/proc/self/uid_map", "w").write("0 1000 1")
open("/proc/self/gid_map", "w").write("0 1000 1")
device = mount(broker(), "/mnt/home")
assert libc.mount(b"x", b"/mnt/tmp", b"tmpfs", 0, None) == 0
path = "/mnt/tmp"
for _ in range(15):
    path += "/" + chr(10) * 250
    os.mkdir(path)
for _ in range(4000):
    assert libc.mount(path.encode(), path.encode(), None, 0x1000, None) == 0
for _ in range(200):
    if os.fork() == 0:
        break
print("ready", flush=True)
sys.stdin.readline()
"""


def test_a_pod_whose_processes_see_huge_mount_tables_delays_no_start_of_a_broker() -> None:
    with (
        fuse_broker.running() as running,
        contextlib.ExitStack() as ended,
        running.pod() as other,
        running.pod() as many,
    ):
        process = fuse_broker.program(many, TABLES)
        ended.callback(process.communicate)
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        running.restart()
        for uid in (many.pod_uid, other.pod_uid):
            running.open(uid)
        assert [mount.pod_uid for mount in running.broker.mounts()] == [many.pod_uid]
        with fuse_broker.daemon(other) as daemon:
            fuse_broker.mounted(daemon)


def test_a_job_that_hangs_in_the_kernel_bars_its_own_pod_and_none_that_was_only_late() -> None:
    with (
        fuse_broker.running() as running,
        contextlib.ExitStack() as ended,
        running.pod() as stuck,
        running.pod() as late,
    ):
        for pod, signal in ((stuck, "SIGUSR1"), (late, "SIGSTOP")):
            process = fuse_broker.program(pod, LATE, signal, "1")
            ended.callback(process.communicate)
            assert process.stdout is not None
            assert process.stdout.readline() == "waits\n"
        assert running.mounter.stuck == 1
        with fuse_broker.daemon(late, directory="/mnt/home/empty") as daemon:
            fuse_broker.mounted(daemon)
        # a new socket does not help the pod
        running.call(running.broker.close(stuck.pod_uid))
        running.open(stuck.pod_uid)
        with fuse_broker.daemon(stuck, directory="/mnt/home/empty") as daemon:
            text = "an earlier request of this pod hangs in the kernel; delete the pod"
            assert fuse_broker.refused(daemon) == (errno.EBUSY, text)
        assert running.of(observations.Aborted) == []
