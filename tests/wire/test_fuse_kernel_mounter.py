"""The mounter as a process: if killed, late, stuck or full, it leaves nothing and blocks no pod."""

import asyncio
import contextlib
import errno
import os
import re
import select
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from muster_fuse.kernel import job_history, jobs, mounter, mounter_client
from tests.worlds import fuse_mounter, fuse_pods, fuse_requests

pytestmark = fuse_pods.needs_pods()
HOME = "/mnt/home"
CYCLES = 50
CALLER = jobs.Caller(1000, 1000, (), 1000, 1000, user_namespace=False, overrides=False)
_SHORT = mounter_client.COMMAND[4].replace(
    "mounter.main(int(sys.argv[2]))",
    "mounter.main(int(sys.argv[2]), deadline_s=1, sync_init_deadline_s=1)",
)
_CYCLES = """
import os, socket, sys
broker, point = socket.socket(fileno=int(sys.argv[1])), sys.argv[2]
for _ in range(int(sys.argv[3])):
    directory = os.open(point, os.O_PATH)
    socket.send_fds(broker, [b"mount"], [directory])
    os.close(directory)
    _, (device,), _, _ = socket.recv_fds(broker, 4096, 1)
    root = os.open(point, os.O_PATH | os.O_NOFOLLOW)
    socket.send_fds(broker, [b"unmount"], [root])
    os.close(root)
    assert broker.recv(4096)
    os.close(device)
"""
STEPS = (
    *("prepare", "check_access", "setns", "_create", "fsopen", "fsconfig_create", "fsmount"),
    *("_attach", "move_mount", "_reply"),
)


def children(pid: int) -> list[int]:
    return [*map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split())]


async def child(pid: int) -> int:
    """Return the only child of a process, once there is one."""
    async with asyncio.timeout(30):
        while not (started := children(pid)):
            await asyncio.sleep(0.002)
    (only,) = started
    return only


def mount_points(container: fuse_pods.Container) -> list[str]:
    lines = Path(f"/proc/{container.process.pid}/mountinfo").read_text().splitlines()
    return [line.split()[4] for line in lines if " - fuse " in line]


@contextlib.asynccontextmanager
async def running(
    process_command: tuple[str, ...] = mounter_client.COMMAND,
    *,
    deadline_s: float = mounter.DEADLINE_S,
) -> AsyncIterator[mounter_client.Mounter]:
    starting = mounter_client.Mounter(process_command, deadline_s=deadline_s)
    async with starting as client, asyncio.timeout(60):
        while client.pid is None:
            await asyncio.sleep(0.002)
        yield client


@pytest.mark.parametrize("moment", ["call", "return"])
@pytest.mark.parametrize("step", STEPS)
def test_a_mounter_killed_at_any_step_leaves_no_mount_without_a_daemon(
    step: str, moment: str
) -> None:
    async def story() -> None:
        killing = fuse_mounter.killing("mounter", step, moment)
        with fuse_pods.container() as pod, fuse_requests.mounting(pod, HOME) as daemon:
            async with running(killing) as client:
                outcome = await daemon.mount(client)
                daemon.broker.close()
                points = mount_points(pod)
                if points:
                    # the daemon has received the device, and no other process keeps it open
                    assert daemon.line() == "mounted\n"
                    assert pod.run("/bin/ls", HOME) == (0, "hello\n")
                    daemon.process.kill()
                    daemon.process.wait()
                    status, text = pod.run("/bin/ls", HOME)
                    assert (status, "not connected" in text) == (2, True)
                else:
                    assert outcome.text == "the mounter has ended"
                    assert daemon.ended()[0] == errno.ECONNREFUSED
                while not client.restarts:
                    await asyncio.sleep(0.01)

    asyncio.run(story())


@pytest.mark.parametrize("step", STEPS[: STEPS.index("_attach")])
def test_a_child_killed_before_it_mounts_leaves_nothing_and_is_reported(step: str) -> None:
    async def story() -> None:
        killing = fuse_mounter.killing("child", step, "return")
        with fuse_pods.container() as pod, fuse_requests.mounting(pod, HOME) as daemon:
            async with running(killing) as client:
                assert client.pid is not None
                assert await daemon.mount(client) == jobs.Outcome(
                    errno.EIO, "the process that did the job ended with status -9", "child"
                )
                assert mount_points(pod) == []
                assert children(client.pid) == []
                assert client.restarts == 0

    asyncio.run(story())


def test_a_child_killed_after_it_mounted_has_told_which_mount_remains() -> None:
    async def story() -> None:
        killing = fuse_mounter.killing("child", "_reply", "call")
        with fuse_pods.container() as pod, fuse_requests.mounting(pod, HOME) as daemon:
            async with running(killing) as client:
                outcome = await daemon.mount(client)
                assert (outcome.errno, outcome.stage) == (errno.EIO, "child")
                assert mount_points(pod) == [HOME]
                assert outcome.minor in fuse_pods.connections()

    asyncio.run(story())


def test_a_child_that_is_stopped_is_killed_at_its_deadline() -> None:
    async def story() -> None:
        with fuse_pods.container() as pod, fuse_requests.mounting(pod, HOME) as daemon:
            async with running(fuse_mounter.command(_SHORT)) as client:
                assert client.pid is not None
                # the child waits for this process, which does not answer
                daemon.process.send_signal(signal.SIGSTOP)
                mounting = asyncio.create_task(daemon.mount(client, sync_init=True))
                os.kill(await child(client.pid), signal.SIGSTOP)
                late = jobs.Outcome(errno.ETIMEDOUT, "the job did not end in time", "deadline")
                assert await mounting == late
                assert (children(client.pid), client.stuck) == ([], 0)

    asyncio.run(story())


def test_with_sync_init_a_daemon_that_never_answers_has_no_mount() -> None:
    async def story() -> None:
        arguments = ("--sync-init", "--stall", "INIT")
        with fuse_pods.container() as pod, fuse_requests.mounting(pod, HOME, *arguments) as daemon:
            async with running(fuse_mounter.command(_SHORT)) as client:
                assert client.pid is not None
                outcome = await daemon.mount(client, sync_init=True)
                waited = jobs.Outcome(errno.ETIMEDOUT, "the job did not end in time", "deadline")
                # before Linux 6.18 the kernel does not wait for the daemon
                mounted = outcome._replace(errno=0, text="", stage="")
                assert (outcome, mount_points(pod)) in ((waited, []), (mounted, [HOME]))
                while children(client.pid):
                    await asyncio.sleep(0.002)
                assert client.stuck == 0

    asyncio.run(story())


def test_a_child_that_hangs_in_the_kernel_is_counted_until_it_ends() -> None:
    async def story() -> None:
        with (
            fuse_pods.container() as pod,
            fuse_requests.mounting(pod, HOME, "--stall", "GETATTR") as hanging,
        ):
            async with running(fuse_mounter.command(_SHORT)) as client:
                assert (await hanging.mount(client, flags=("allow_other",))).errno == 0
                with fuse_requests.mounting(pod, HOME) as daemon:
                    late = jobs.Outcome(errno.ETIMEDOUT, "the job did not end in time", "stuck")
                    assert await daemon.mount(client) == late
                    while client.stuck != 1:
                        await asyncio.sleep(0.01)
                    # others are served meanwhile
                    with (
                        fuse_pods.container() as other,
                        fuse_requests.mounting(other, HOME) as served,
                    ):
                        assert (await served.mount(client)).errno == 0
                    hanging.process.kill()
                    while client.stuck:
                        await asyncio.sleep(0.01)

    asyncio.run(story())


def test_the_mounter_has_one_thread_and_loads_only_what_it_needs() -> None:
    script = (
        "import sys; sys.path.append(sys.argv[1]); from muster_fuse.kernel import mounter;"
        " print(*sorted(sys.modules)); print(open('/proc/self/status').read())"
    )
    printed = subprocess.run(
        fuse_mounter.command(script), capture_output=True, text=True, check=True
    ).stdout
    modules, _, status = printed.partition("\n")
    loaded = {name for name in modules.split() if name.split(".")[0] not in sys.stdlib_module_names}
    kernel = (
        *("jobs", "mount_steps", "mount_users", "mounter"),
        *("receiving", "self_test", "syscalls"),
    )
    packages = {"__main__", "muster_fuse", "muster_fuse.kernel"}
    ours = {"muster_fuse.protocol", *(f"muster_fuse.kernel.{name}" for name in kernel)}
    assert loaded == packages | ours
    assert {"asyncio", "logging", "pathlib", "subprocess"}.isdisjoint(modules.split())
    assert "Threads:\t1\n" in status


def test_a_mounter_that_is_frozen_is_replaced() -> None:
    async def story() -> None:
        with fuse_pods.container() as pod, fuse_requests.mounting(pod, HOME) as daemon:
            async with running(deadline_s=1.0) as client:
                assert client.pid is not None
                os.kill(client.pid, signal.SIGSTOP)
                assert await daemon.mount(client) == jobs.Outcome(
                    errno.ETIMEDOUT, "the mounter did not answer", "mounter"
                )
                assert (await daemon.mount(client)).errno == 0
                assert client.restarts == 1

    asyncio.run(story())


def test_a_caller_in_thousands_of_groups_is_refused_and_harms_nobody() -> None:
    async def story() -> None:
        with fuse_pods.container() as pod, fuse_requests.mounting(pod, HOME) as daemon:
            crowd = daemon.caller._replace(groups=tuple(range(65_536)))
            async with running() as client:
                outcome = await daemon._replace(caller=crowd).mount(client)
                assert (outcome.errno, outcome.stage) == (errno.E2BIG, "mounter")
                assert (await daemon.mount(client)).errno == 0
                assert client.restarts == 0

    asyncio.run(story())


def test_a_child_keeps_nothing_of_the_host_but_its_own_descriptors() -> None:
    async def story() -> None:
        with (
            fuse_pods.container() as pod,
            fuse_requests.mounting(pod, HOME, "--sync-init") as daemon,
        ):
            daemon.process.send_signal(signal.SIGSTOP)
            async with running() as client:
                assert client.pid is not None
                mounting = asyncio.create_task(daemon.mount(client, sync_init=True))
                pid = await child(client.pid)
                process, container = Path(f"/proc/{pid}"), Path(f"/proc/{pod.process.pid}")
                while (process / "ns/mnt").readlink() != (container / "ns/mnt").readlink():
                    await asyncio.sleep(0.002)
                assert (process / "cwd").readlink() == Path("/")
                links = [link for link in (process / "fd").iterdir() if int(link.name) > 2]
                assert sorted(re.sub(r"\d+", "N", str(link.readlink())) for link in links) == [
                    # the root of fusectl, whose mount is attached nowhere
                    "/",
                    "/dev/fuse",
                    "/dev/fuse",
                    "/mnt/home",
                    "/proc/N/fd",
                    "anon_inode:[pidfd]",
                    "pipe:[N]",
                    "socket:[N]",
                    "socket:[N]",
                ]
                daemon.process.send_signal(signal.SIGCONT)
                assert (await mounting).errno == 0

    asyncio.run(story())


def test_a_descriptor_is_released_only_once_a_child_has_it() -> None:
    async def story() -> None:
        descriptor = mounter_client.PodDescriptor(os.open("/etc", os.O_PATH))
        link = Path(f"/proc/self/fd/{descriptor.number}")
        try:
            async with mounter_client.Mounter(fuse_mounter.forkless(1)) as client:
                outcome = await client.discard(descriptor)
                text = "cannot start a process for the job: Resource temporarily unavailable"
                assert outcome == jobs.Outcome(errno.EAGAIN, text, "limit")
                assert (descriptor.is_taken, link.readlink()) == (False, Path("/etc"))
                assert await client.discard(descriptor) == jobs.Outcome()
                assert (descriptor.is_taken, link.readlink()) == (True, Path("/dev/null"))
                assert client.restarts == 0
        finally:
            os.close(descriptor.number)

    asyncio.run(story())


def test_a_descriptor_is_kept_if_the_child_that_has_it_was_killed(tmp_path: Path) -> None:
    """Both answers of the mounter arrive before this process runs again."""

    async def story() -> None:
        reading, writing = os.pipe()
        descriptor = mounter_client.PodDescriptor(reading)
        try:
            answered = tmp_path / "answered"
            command = fuse_mounter.with_dead_children(answered)
            async with mounter_client.Mounter(command) as client:
                discarding = asyncio.create_task(client.discard(descriptor))
                while not client._sent:
                    await asyncio.sleep(0)
                while not answered.exists():  # without giving way to other tasks
                    pass
                assert (await discarding).stage == "deadline"
                assert not descriptor.is_taken
                os.write(writing, b"somebody still has it open")
        finally:
            os.close(reading)
            os.close(writing)

    asyncio.run(story())


def test_a_slow_pod_has_two_jobs_at_once_and_leaves_slots_to_others() -> None:
    async def story() -> None:
        slow, other = job_history.JobHistory(), job_history.JobHistory()
        now = asyncio.get_running_loop().time()
        for history in (slow, other):
            history.record(took_s=60.0, is_waiting=False, now=now)
        async with running() as client:
            assert client.pid is not None
            os.kill(client.pid, signal.SIGSTOP)
            descriptors = [mounter_client.PodDescriptor(os.open("/etc", os.O_PATH)) for _ in "abcd"]
            *own, last = descriptors
            tasks = [asyncio.create_task(client.discard(each, slow)) for each in own]
            while len(client._sent) < 2:
                await asyncio.sleep(0)
            tasks.append(asyncio.create_task(client.discard(last, other)))
            while len(client._sent) < 3:
                await asyncio.sleep(0)
            # the third job of the slow pod waits for one of its first two
            assert {id(sent.history) for sent in client._sent.values()} == {id(slow), id(other)}
            assert sum(sent.history is slow for sent in client._sent.values()) == 2
            os.kill(client.pid, signal.SIGCONT)
            assert await asyncio.gather(*tasks) == [jobs.Outcome()] * 4
            for each in descriptors:
                os.close(each.number)

    asyncio.run(story())


def test_the_mounter_ends_when_its_socket_closes_and_its_children_have_ended() -> None:
    with fuse_pods.container() as pod, fuse_requests.mounting(pod, HOME, "--sync-init") as daemon:
        daemon.process.send_signal(signal.SIGSTOP)
        process, control = by_hand()
        with control:
            give(control, 1, daemon)
            asyncio.run(child(process.pid))
        daemon.process.send_signal(signal.SIGCONT)
        assert process.wait(30) == 0
        # the child has ended first, and its mount has a daemon
        assert daemon.line() == "mounted\n"


def test_a_mounter_with_too_many_children_refuses_more_and_none_outlives_it() -> None:
    with fuse_pods.container() as pod, fuse_requests.mounting(pod, HOME, "--sync-init") as daemon:
        daemon.process.send_signal(signal.SIGSTOP)
        process, control = by_hand()
        with control:
            for number in range(mounter.CHILDREN_MAX + 1):
                give(control, number + 1, daemon)
            message = control.recv(jobs.MESSAGE_MAX)
            assert mounter.NUMBER.unpack_from(message) == (mounter.CHILDREN_MAX + 1,)
            assert jobs.decode_outcome(message[mounter.NUMBER.size :]) == jobs.Outcome(
                errno.EAGAIN, "64 requests are already in progress", "limit"
            )
            running_children = [*map(os.pidfd_open, children(process.pid))]
            assert len(running_children) == mounter.CHILDREN_MAX
            process.kill()
            process.wait()
            for pidfd in running_children:
                assert select.select([pidfd], [], [], 30)[0] == [pidfd]
                os.close(pidfd)


def test_many_cycles_leave_no_descriptor_no_child_and_no_connection() -> None:
    async def story() -> None:
        broker, theirs = fuse_requests.socketpair()
        connections = set()
        with broker, fuse_pods.container() as pod:
            with theirs:
                arguments = (str(theirs.fileno()), HOME, str(CYCLES))
                program = (*fuse_pods.PROGRAM, "-c", _CYCLES, *arguments)
                process = pod.start(*program, pass_fds=[theirs.fileno()])
            peer = os.pidfd_open(process.pid)
            asking = fuse_requests.Asking(process, broker, peer, -1, CALLER)
            async with running() as client:
                assert client.pid is not None
                held: list[int] = []
                for _ in range(CYCLES):
                    with sent(broker) as descriptor:
                        outcome = await asking._replace(descriptor=descriptor).mount(client)
                    assert outcome.errno == 0
                    connections.add((outcome.minor, fuse_pods.connections()[outcome.minor]))
                    with sent(broker) as descriptor:
                        unmounting = asking._replace(descriptor=descriptor)
                        assert await unmounting.unmount(client) == jobs.Outcome()
                    # only now has the mounter opened everything that it keeps open
                    held = held or [descriptors(client.pid), descriptors(os.getpid())]
                    broker.send(b"unmounted")
                assert process.wait(30) == 0
                # the last child has answered, but may not have ended yet
                while children(client.pid):
                    await asyncio.sleep(0.002)
                while descriptors(client.pid) > held[0] or descriptors(os.getpid()) > held[1]:
                    await asyncio.sleep(0.002)
                assert (client.stuck, client.restarts) == (0, 0)
            os.close(peer)
            assert mount_points(pod) == []
        assert connections.isdisjoint(fuse_pods.connections().items())

    asyncio.run(story())


@contextlib.contextmanager
def sent(broker: socket.socket) -> Iterator[int]:
    """Receive a descriptor that a process has sent; yield it, and close it afterwards."""
    _, (descriptor,), _, _ = socket.recv_fds(broker, 4096, 2)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def descriptors(pid: int) -> int:
    return len([*Path(f"/proc/{pid}/fd").iterdir()])


def by_hand() -> tuple[subprocess.Popen[bytes], socket.socket]:
    """Start a mounter; return it with the socket for its jobs."""
    control, theirs = fuse_requests.socketpair()
    with theirs:
        number = theirs.fileno()
        return subprocess.Popen([*mounter_client.COMMAND, str(number)], pass_fds=[number]), control


def give(control: socket.socket, number: int, daemon: fuse_requests.Asking) -> None:
    """Give a mounter the job to mount with SYNC_INIT, so that its child waits for the daemon."""
    job = jobs.MountJob(daemon.caller, (("source", "test"),), (), 0, sync_init=True)
    message = mounter.NUMBER.pack(number) + jobs.encode(job)
    socket.send_fds(control, [message], [daemon.peer, daemon.descriptor, daemon.broker.fileno()])
