"""Adapter for processes: starts the mounter, sends it jobs, and restarts it.

No job waits without limit: the mounter kills a late child, and a mounter that does not answer in
time is itself killed and replaced.
"""

import asyncio
import contextlib
import enum
import errno
import itertools
import os
import signal
import socket
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final, Self

import structlog

from muster_fuse.kernel import job_history, jobs, mounter

JOBS_MAX: Final = 16
"""How many jobs of each kind may run at the same time; further jobs wait."""
_SLOT_S: Final = 5.0
_MARGIN_S: Final = 3.0
"""How long the mounter may take to answer after a child's deadline."""
_RESTART_MIN_S: Final = 0.1
_RESTART_MAX_S: Final = 10.0
_STABLE_S: Final = 60.0
_LAST_ANSWERS_S: Final = 1.0
_START: Final = (
    "import sys; sys.path.append(sys.argv[1]);"
    " from muster_fuse.kernel import mounter; mounter.main(int(sys.argv[2]))"
)
_PACKAGES: Final = Path(__file__).parents[2]
COMMAND: Final = (sys.executable, "-I", "-S", "-c", _START, str(_PACKAGES))
"""The mounter's command, without site-packages; the socket's descriptor must be appended."""

_log = structlog.get_logger()


class PodDescriptor:
    """A descriptor that a pod has sent, or a pod's connection: the pod may delay its closing.

    So a child of the mounter must be the last to close it. The exception: if the child is killed
    while the broker replaces the file, the broker closes it last.
    """

    def __init__(self, number: int) -> None:
        self.number = number
        self.is_taken = False
        """Whether a child has taken the descriptor over; `number` then refers to /dev/null."""

    def release(self) -> None:
        """Replace the file by /dev/null, so that the number stays in use until it is closed."""
        nothing = os.open("/dev/null", os.O_PATH | os.O_CLOEXEC)
        os.dup2(nothing, self.number, inheritable=False)
        os.close(nothing)
        self.is_taken = True


class _Sent:
    """A job for the mounter, and the outcomes that the mounter has sent for it."""

    def __init__(self, history: job_history.JobHistory) -> None:
        self.history = history
        loop = asyncio.get_running_loop()
        self.answer: asyncio.Future[jobs.Outcome] = loop.create_future()
        """The final outcome."""
        self.started: asyncio.Future[None] = loop.create_future()
        """Done when a child has the job's descriptors."""
        self.attaching = jobs.Outcome()
        """The mount that was made, which may have been attached even if the job failed."""

    def receive(self, outcome: jobs.Outcome) -> None:
        """Process an outcome of the job; only the last outcome of a job is final."""
        match outcome.stage:
            case jobs.STARTED:
                self.started.set_result(None)
            case jobs.ATTACHING:
                self.attaching = outcome
            case _:
                self.answer.set_result(outcome)


class _Slots(enum.Enum):
    """The kinds of jobs; each kind has its own slots, so no kind delays another."""

    QUICK = enum.auto()
    SYNC_INIT = enum.auto()
    SLOW = enum.auto()


class Mounter:
    """The broker's side of the mounter process; restarts it when it ends.

    The mounter kills a child after `deadline_s`; mounts with `sync_init`,
    which wait for the daemon's answer, have a longer deadline.
    """

    def __init__(
        self, command: Sequence[str] = COMMAND, *, deadline_s: float = mounter.DEADLINE_S
    ) -> None:
        self.restarts = 0
        self._command = command
        self._deadline_s = deadline_s
        self._numbers = itertools.count(1)
        self._sent: dict[int, _Sent] = {}
        self._stuck: set[int] = set()
        self._slots = {kind: asyncio.Semaphore(JOBS_MAX) for kind in _Slots}
        self._control: socket.socket | None = None
        self._is_up = asyncio.Event()
        self._process: asyncio.subprocess.Process | None = None
        self._running: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        """Start the mounter, and restart it when it ends, until the context ends."""
        self._running = asyncio.create_task(self._keep_running())
        return self

    async def __aexit__(self, *_: object) -> None:
        """Close the mounter's socket, so that the mounter ends; kill it if it does not end."""
        assert self._running is not None, "not entered"
        self._running.cancel()
        await asyncio.gather(self._running, return_exceptions=True)
        if self._process is not None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._deadline_s + _MARGIN_S):
                    await self._process.wait()
            if self._process.returncode is None:
                self._process.kill()
                await self._process.wait()

    @property
    def stuck(self) -> int:
        """How many children of this mounter hang in the kernel after they were killed."""
        return len(self._stuck)

    def is_stuck(self, history: job_history.JobHistory) -> bool:
        """Return whether a job of a pod hangs in the kernel."""
        history.stuck &= self._stuck
        return bool(history.stuck)

    @property
    def pid(self) -> int | None:
        """The mounter's process id; None while it is not running."""
        return self._process.pid if self._process and self._is_up.is_set() else None

    async def mount(
        self,
        job: jobs.MountJob,
        *,
        peer: int,
        directory: int,
        reply: int,
        history: job_history.JobHistory | None = None,
    ) -> jobs.Outcome:
        """Mount on `directory` in the namespace of `peer`, and send /dev/fuse over `reply`."""
        wait_s = mounter.SYNC_INIT_DEADLINE_S if job.sync_init else self._deadline_s
        return await self._do(job, (peer, directory, reply), wait_s=wait_s, history=history)

    async def receive(
        self, *, connection: int, passing: int, history: job_history.JobHistory | None = None
    ) -> jobs.Outcome:
        """Receive a packet from `connection`, and pass it on over `passing`.

        The job misses its deadline if the pod delays the closing of a descriptor in the packet.
        """
        descriptors = (connection, passing)
        wait_s = mounter.RECEIVE_DEADLINE_S
        return await self._do(jobs.ReceiveJob(), descriptors, wait_s=wait_s, history=history)

    async def discard(
        self, descriptor: PodDescriptor, history: job_history.JobHistory | None = None
    ) -> jobs.Outcome:
        """Have a child close a descriptor, or a connection with the descriptors in its queue.

        If no child can be started, `descriptor.is_taken` stays false.
        """
        wait_s = mounter.RECEIVE_DEADLINE_S
        return await self._do(
            jobs.DiscardJob(), (), wait_s=wait_s, history=history, taken=descriptor
        )

    async def unmount(
        self,
        job: jobs.UnmountJob,
        *,
        peer: int,
        root: PodDescriptor,
        history: job_history.JobHistory | None = None,
    ) -> jobs.Outcome:
        """Have a child remove the mount whose root is `root`, and close that descriptor."""
        wait_s = self._deadline_s
        return await self._do(job, (peer,), wait_s=wait_s, history=history, taken=root)

    async def self_test(self, job: jobs.SelfTestJob) -> jobs.Outcome:
        """Have a child mount, use and unmount a file system through the socket that `job` names."""
        return await self._do(job, (), wait_s=self._deadline_s)

    async def _do(
        self,
        job: jobs.Job,
        descriptors: tuple[int, ...],
        *,
        wait_s: float,
        history: job_history.JobHistory | None = None,
        taken: PodDescriptor | None = None,
    ) -> jobs.Outcome:
        """Send a job when a slot is free; return its outcome. The child then owns `taken`."""
        history = history or job_history.JobHistory()
        kind = _Slots.SYNC_INIT if _is_sync(job) else _Slots.QUICK
        node_is_busy = f"{JOBS_MAX} requests are already in progress on this node"
        slots = {node_is_busy: self._slots[kind]}
        if history.is_slow(_now()):
            pod_is_busy = "slow requests of this pod are still in progress"
            slots = {pod_is_busy: history.slow_jobs, node_is_busy: self._slots[_Slots.SLOW]}
        async with contextlib.AsyncExitStack() as slots_taken:
            try:
                async with asyncio.timeout(_SLOT_S):
                    for reason, slot in slots.items():  # noqa: B007  # why the slot is not free
                        await slots_taken.enter_async_context(slot)
            except TimeoutError:
                return jobs.Outcome(errno.EAGAIN, f"{reason}; try again", "limit")
            return await self._answered(
                job, descriptors, wait_s=wait_s, history=history, taken=taken
            )

    async def _answered(
        self,
        job: jobs.Job,
        descriptors: tuple[int, ...],
        *,
        wait_s: float,
        history: job_history.JobHistory,
        taken: PodDescriptor | None,
    ) -> jobs.Outcome:
        message = jobs.encode(job)
        if len(message) > jobs.MESSAGE_MAX:
            text = "the job is too long for the mounter: is the caller in thousands of groups?"
            return jobs.Outcome(errno.E2BIG, text, "mounter")
        sent = _Sent(history)
        try:
            async with asyncio.timeout(wait_s + _MARGIN_S):
                if taken is not None:
                    await self._hand_over(sent, message, descriptors, taken)
                else:
                    await self._send(sent, message, descriptors)
                began = _now()
                outcome = await sent.answer
            is_waiting = isinstance(job, jobs.UnmountJob) or _is_sync(job)
            history.record(took_s=_now() - began, is_waiting=is_waiting, now=_now())
        except TimeoutError:
            if self._process is not None and self._is_up.is_set():
                self._is_up.clear()
                with contextlib.suppress(ProcessLookupError):
                    self._process.kill()
            outcome = jobs.Outcome(errno.ETIMEDOUT, "the mounter did not answer", "mounter")
        except OSError as error:
            text = f"the mounter does not accept jobs: {error.strerror}"
            return jobs.Outcome(error.errno or errno.EIO, text, "mounter")
        if outcome.errno:
            made = sent.attaching
            return outcome._replace(minor=made.minor, inode=made.inode, created_ns=made.created_ns)
        return outcome

    async def _hand_over(
        self, sent: _Sent, message: bytes, descriptors: tuple[int, ...], taken: PodDescriptor
    ) -> None:
        """Send a job with its descriptors; when a child has them, replace `taken` by /dev/null.

        The child waits for that, so that it is the last process to close the file of `taken`.
        """
        held, holding = os.pipe()
        try:
            await self._send(sent, message, (*descriptors, taken.number, held))
            await asyncio.wait((sent.started, sent.answer), return_when=asyncio.FIRST_COMPLETED)
            # a child that has answered already has been killed while it waited
            if sent.started.done() and not sent.answer.done():
                taken.release()
        finally:
            os.close(held)
            os.close(holding)

    async def _send(self, sent: _Sent, message: bytes, descriptors: tuple[int, ...]) -> None:
        """Send a job to the mounter, or to a new mounter process if the old one has just ended."""
        number = next(self._numbers)
        packet = mounter.NUMBER.pack(number) + message
        while number not in self._sent:
            await self._is_up.wait()
            assert self._control is not None, "the mounter is up"
            try:
                socket.send_fds(self._control, [packet], descriptors, socket.MSG_NOSIGNAL)
                self._sent[number] = sent
            except (BrokenPipeError, ConnectionResetError):
                self._is_up.clear()

    async def _keep_running(self) -> None:
        loop = asyncio.get_running_loop()
        delay_s = _RESTART_MIN_S
        while True:
            began = loop.time()
            try:
                reason = f"ended with {await self._run()}"
            except OSError as error:
                reason = f"not started: {error.strerror}"
            delay_s = _RESTART_MIN_S if loop.time() - began > _STABLE_S else delay_s
            _log.warning("mounter_ended", reason=reason, restart_in_s=delay_s)
            await asyncio.sleep(delay_s)
            self.restarts += 1
            delay_s = min(2 * delay_s, _RESTART_MAX_S)

    async def _run(self) -> int:
        """Run a mounter until it ends; return its exit status. Raises OSError."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)  # noqa: FBT003  # its only parameter
        with ours:
            with theirs:
                self._process = await asyncio.create_subprocess_exec(
                    *self._command,
                    str(theirs.fileno()),
                    pass_fds=[theirs.fileno()],
                    stdin=asyncio.subprocess.DEVNULL,
                )
            self._control = ours
            self._is_up.set()
            reading = asyncio.create_task(self._read(ours))
            try:
                status = await self._ended(self._process)
                # children of a killed mounter may still send an answer
                await asyncio.wait([reading], timeout=_LAST_ANSWERS_S)
            finally:
                self._is_up.clear()
                reading.cancel()
                self._give_up()
        return status

    async def _ended(self, process: asyncio.subprocess.Process) -> int:
        """Wait until a mounter ends; return its exit status.

        If it was killed but hangs in the kernel, return the status of a killed process.
        """
        ending = asyncio.create_task(process.wait())
        try:
            while not ending.done():
                await asyncio.wait([ending], timeout=mounter.STUCK_S)
                if not ending.done() and not self._is_up.is_set():
                    # it hangs in the kernel
                    return -signal.SIGKILL
            return ending.result()
        finally:
            ending.cancel()

    async def _read(self, control: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        with contextlib.suppress(ConnectionError):
            while message := await loop.sock_recv(control, mounter.NUMBER.size + jobs.MESSAGE_MAX):
                (number,) = mounter.NUMBER.unpack_from(message)
                if number == 0:
                    _, job, is_stuck = mounter.STUCK.unpack(message)
                    self._stuck = self._stuck | {job} if is_stuck else self._stuck - {job}
                    if is_stuck and job in self._sent:
                        self._sent[job].history.stuck.add(job)
                elif sent := self._sent.get(number):
                    sent.receive(jobs.decode_outcome(message[mounter.NUMBER.size :]))
                    if sent.answer.done():
                        del self._sent[number]

    def _give_up(self) -> None:
        self._stuck = set()
        for sent in self._sent.values():
            if not sent.answer.done():
                sent.answer.set_result(jobs.Outcome(errno.EIO, "the mounter has ended", "mounter"))
        self._sent.clear()


def _is_sync(job: jobs.Job) -> bool:
    return isinstance(job, jobs.MountJob) and job.sync_init


def _now() -> float:
    return asyncio.get_running_loop().time()
