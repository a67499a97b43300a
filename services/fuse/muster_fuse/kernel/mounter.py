"""Adapter for the mounter: a single-threaded process that forks a child for each job.

A process with several threads cannot enter namespaces (setns(2): EINVAL), so this is a separate
process. It receives jobs on a SOCK_SEQPACKET socket:

| message           | content                                                                    |
|-------------------|----------------------------------------------------------------------------|
| a job, received   | number of the job, 4 bytes; jobs.encode(job); its descriptors, in the order |
|                   | of DESCRIPTORS                                                             |
| an answer, sent   | number of the job, 4 bytes; jobs.encode_outcome(outcome); earlier answers  |
|                   | have the stages jobs.STARTED (a job with `held`), jobs.ATTACHING (a mount) |
| stuck job, sent   | 0, 4 bytes; the number of the job, 4 bytes; 1 when its child gets stuck, 0  |
|                   | when that ends, 4 bytes                                                    |

The last process that closes a descriptor of a pod may hang, so that process must be a child. The
broker keeps the job's descriptors open until it has the answer STARTED. Then it closes the
descriptor listed before `held`, and its end of the pipe `held`; the child waits for that.

A child sends the answer to its job itself. If the child was killed, at its deadline or otherwise,
the mounter answers instead. A child that does not end after it was killed hangs in the kernel: it
is stuck, and is counted until it ends.

When the socket closes, no new job is started, and the mounter ends when each of its children has
ended or is stuck.
"""

import contextlib
import errno
import functools
import os
import select
import signal
import socket
import struct
import time
from collections.abc import Callable
from typing import Final, NamedTuple

from muster_fuse.kernel import jobs, mount_steps, receiving, self_test, syscalls

CHILDREN_MAX: Final = 64
"""The maximum number of children that are not stuck."""
STUCK_MAX: Final = 256
"""The maximum number of stuck children; a pod with a stuck child gets no further children."""
DEADLINE_S: Final = 5.0
SYNC_INIT_DEADLINE_S: Final = 2 * mount_steps.CONTINUE_S
"""The deadline of a mount with `sync_init`, which waits for the caller and for the daemon."""
RECEIVE_DEADLINE_S: Final = 2.0
"""The deadline for receiving or closing descriptors, which only a hostile pod can delay."""
STUCK_S: Final = 1.0
"""How long a killed child may take to end before it counts as stuck."""
NUMBER: Final = struct.Struct("<I")
STUCK: Final = struct.Struct("<III")
DESCRIPTORS: Final = {
    jobs.MountJob: ("peer", "directory", "reply"),
    jobs.UnmountJob: ("peer", "root", "held"),
    jobs.ReceiveJob: ("connection", "passing"),
    jobs.DiscardJob: ("discarded", "held"),
    jobs.SelfTestJob: (),
}


class _Child(NamedTuple):
    """A child with a job; at its `deadline` it is killed or, if already killed, counts as stuck."""

    job: int
    pid: int
    pidfd: int
    deadline: float
    is_killed: bool = False
    is_stuck: bool = False


class _Mounter:
    """The children, and the socket on which jobs arrive."""

    def __init__(
        self, control: socket.socket, *, deadline_s: float, sync_init_deadline_s: float
    ) -> None:
        self._control = control
        self._deadline_s = deadline_s
        self._sync_init_deadline_s = sync_init_deadline_s
        self._children: dict[int, _Child] = {}
        self._is_open = True

    def run(self) -> None:
        """Accept jobs until the socket closes and all children have ended or are stuck."""
        while self._is_open or not all(child.is_stuck for child in self._children.values()):
            poll = select.poll()
            if self._is_open:
                poll.register(self._control, select.POLLIN)
            for pidfd in self._children:
                poll.register(pidfd, select.POLLIN)
            ready = {descriptor for descriptor, _ in poll.poll(self._timeout_ms())}
            for pidfd in ready & self._children.keys():
                self._reap(self._children.pop(pidfd))
            for child in tuple(self._children.values()):
                self._kill_late(child, time.monotonic())
            if self._control.fileno() in ready:
                self._receive()

    def _timeout_ms(self) -> int | None:
        deadlines = [child.deadline for child in self._children.values() if not child.is_stuck]
        if not deadlines:
            return None
        return max(0, int((min(deadlines) - time.monotonic()) * 1000) + 1)

    def _reap(self, child: _Child) -> None:
        _, status = os.waitpid(child.pid, 0)
        os.close(child.pidfd)
        if child.is_stuck:
            self._send(STUCK.pack(0, child.job, 0))
        elif child.is_killed:
            self._answer(child.job, _LATE)
        elif status:
            code = os.waitstatus_to_exitcode(status)
            text = f"the process that did the job ended with status {code}"
            self._answer(child.job, jobs.Outcome(errno.EIO, text, "child"))

    def _kill_late(self, child: _Child, now: float) -> None:
        if now < child.deadline or child.is_stuck:
            return
        if not child.is_killed:
            # this also kills a stopped child; a pidfd cannot refer to another process
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(child.pidfd, signal.SIGKILL)
            later = child._replace(is_killed=True, deadline=now + STUCK_S)
            self._children[child.pidfd] = later
        else:
            self._children[child.pidfd] = child._replace(is_stuck=True)
            self._send(STUCK.pack(0, child.job, 1))
            self._answer(child.job, _LATE._replace(stage="stuck"))

    def _receive(self) -> None:
        message, descriptors, _, _ = socket.recv_fds(
            self._control, NUMBER.size + jobs.MESSAGE_MAX, 3
        )
        if not message:
            self._is_open = False
            return
        (number,) = NUMBER.unpack_from(message)
        try:
            job = jobs.decode(message[NUMBER.size :])
            assert len(descriptors) == len(DESCRIPTORS[type(job)]), (
                "a job comes with its descriptors"
            )
            stuck = sum(child.is_stuck for child in self._children.values())
            if text := _limit(len(self._children), stuck):
                self._answer(number, jobs.Outcome(errno.EAGAIN, text, "limit"))
            else:
                self._start(number, job, descriptors)
        except OSError as error:
            text = f"cannot start a process for the job: {error.strerror}"
            self._answer(number, jobs.Outcome(error.errno or errno.EIO, text, "limit"))
        finally:
            for descriptor in descriptors:
                os.close(descriptor)

    def _start(self, number: int, job: jobs.Job, descriptors: list[int]) -> None:
        """Fork a child, which begins its job when this process has closed the job's descriptors.

        This process closes them even if it cannot fork: the broker still has them open.
        """
        begin, begun = os.pipe()
        parent = os.getpid()
        try:
            pid = os.fork()
        except OSError:
            os.close(begin)
            os.close(begun)
            raise
        if pid == 0:
            code = 1
            try:
                os.close(begun)
                keep = (self._control.fileno(), begin, *descriptors)
                answer = functools.partial(self._answer, number)
                answer(_outcome(job, descriptors, answer, parent=parent, keep=keep, begin=begin))
                code = 0
            finally:
                os._exit(code)
        try:
            pidfd = os.pidfd_open(pid)
        except OSError:
            # it still waits
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            os.close(begin)
            os.close(begun)
            raise
        deadline = time.monotonic() + self._limit_s(job)
        self._children[pidfd] = _Child(number, pid, pidfd, deadline)
        for descriptor in descriptors:
            os.close(descriptor)
        descriptors.clear()
        os.close(begin)
        os.close(begun)

    def _limit_s(self, job: jobs.Job) -> float:
        match job:
            case jobs.ReceiveJob() | jobs.DiscardJob():
                return RECEIVE_DEADLINE_S
            case jobs.MountJob(sync_init=True):
                return self._sync_init_deadline_s
            case _:
                return self._deadline_s

    def _answer(self, number: int, outcome: jobs.Outcome) -> None:
        self._send(NUMBER.pack(number) + jobs.encode_outcome(outcome))

    def _send(self, message: bytes) -> None:
        # if the broker has ended, nobody needs the message
        with contextlib.suppress(OSError):
            self._control.send(message, socket.MSG_NOSIGNAL)


_LATE: Final = jobs.Outcome(errno.ETIMEDOUT, "the job did not end in time", "deadline")


def _take_over(held: int, report: Callable[[jobs.Outcome], None]) -> None:
    """Report that this child has the job's descriptors; wait until the broker has closed its own.

    `held` is the reading end of a pipe, whose other end the broker closes at that time.
    """
    report(jobs.Outcome(stage=jobs.STARTED))
    os.read(held, 1)
    os.close(held)


def _limit(children: int, stuck: int) -> str:
    """Return which limit is reached; an empty text if none is."""
    if stuck >= STUCK_MAX:
        return f"{STUCK_MAX} requests hang in the kernel of this node"
    return (
        f"{CHILDREN_MAX} requests are already in progress"
        if children - stuck >= CHILDREN_MAX
        else ""
    )


def _outcome(  # noqa: PLR0911  # one for each job
    job: jobs.Job,
    descriptors: list[int],
    report: Callable[[jobs.Outcome], None],
    *,
    parent: int,
    keep: tuple[int, ...],
    begin: int,
) -> jobs.Outcome:
    """Execute a job in a child, and return its outcome."""
    try:
        host = mount_steps.prepare(parent=parent, keep=keep)
        os.read(begin, 1)
        match job:
            case jobs.MountJob():
                peer, point, reply = descriptors
                return mount_steps.mount(
                    job, host, peer=peer, point=point, reply=reply, report=report
                )
            case jobs.UnmountJob():
                peer, root, held = descriptors
                _take_over(held, report)
                return mount_steps.unmount(job, host, peer=peer, root=root)
            case jobs.ReceiveJob():
                connection, passing = descriptors
                return receiving.receive(connection, passing)
            case jobs.DiscardJob():
                discarded, held = descriptors
                _take_over(held, report)
                return receiving.discard(discarded)
            case jobs.SelfTestJob():
                return self_test.run(job)
    except mount_steps.Failed as failed:
        return failed.outcome
    except OSError as error:
        return jobs.Outcome(
            error.errno or errno.EIO, f"unexpected error: {error.strerror}", "child"
        )


def main(
    control: int,
    *,
    deadline_s: float = DEADLINE_S,
    sync_init_deadline_s: float = SYNC_INIT_DEADLINE_S,
) -> None:
    """Run the mounter on an inherited socket."""
    # Ctrl-C is for the broker, which then closes the socket
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    syscalls.forbid_tracing()
    with socket.socket(fileno=control) as connection:
        _Mounter(connection, deadline_s=deadline_s, sync_init_deadline_s=sync_init_deadline_s).run()
