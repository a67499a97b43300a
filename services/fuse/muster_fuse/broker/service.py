"""Adapter for the broker: serves each pod on its own socket, one mount or unmount at a time."""

import asyncio
import contextlib
import errno
import socket
from collections.abc import AsyncIterator, Callable, Iterable
from pathlib import Path
from typing import Final, assert_never

from muster import blocking, pacing
from muster_fuse import config, protocol
from muster_fuse.broker import ledger, observations, peer, sockets
from muster_fuse.kernel import job_history, jobs, mounter_client
from muster_fuse.request import caller, decision, limits
from muster_fuse.request.decision import Reason, Refusal
from muster_fuse.watch import mounts as watched

_TURN_S: Final = 5.0
"""How long a mount or unmount waits for the pod's earlier ones; the helper waits longer."""
_REFUSALS_MAX: Final = 4096
_DISCARD_RETRY_S: Final = 1.0
_CLOSE_S: Final = 1.0
"""How long the removal of a pod's socket waits for the pod's connections to close."""
_STOP_S: Final = 8.0
"""How long the broker's shutdown waits for the connections of all pods to close.

Connections that are still open are closed when the process exits; that may hang.
"""


class _Served:
    """A pod with its socket, and a lock that allows one mount or unmount at a time."""

    def __init__(
        self, pod: caller.Pod, listener: sockets.Listener, history: job_history.JobHistory
    ) -> None:
        self.pod = pod
        self.listener = listener
        self.history = history
        self.turn = asyncio.Lock()
        self.reading = blocking.Serial()
        """Runs the calls that read the mount tables of the pod's processes."""


class Broker:
    """Serves pods; passes observations to `observe`, and stores records in `records`."""

    def __init__(
        self,
        settings: config.Limits,
        mounter: mounter_client.Mounter,
        *,
        observe: Callable[[observations.Observation], None],
        records: Path,
    ) -> None:
        self._settings = settings
        self._mounter = mounter
        self._observe = observe
        self._ledger = ledger.Ledger(settings, records, observe)
        self._limiter = limits.Limiter(settings)
        self._refusals = pacing.KeyedBuckets[tuple[str, Reason]](
            per_s=1.0, burst=1, keys_max=_REFUSALS_MAX
        )
        self._served: dict[str, _Served] = {}
        self._ending: set[sockets.Listener] = set()
        """The sockets of closed pods that still have connections to close."""
        self._histories: dict[str, job_history.JobHistory] = {}

    async def recall(self, pods: Iterable[caller.Pod]) -> None:
        """Watch the mounts that an earlier broker made in these pods."""
        await self._ledger.recall(pods)

    async def open(self, pod: caller.Pod, socket_path: Path) -> None:
        """Listen on a socket for a pod, unless the socket is already served. Raises OSError."""
        before = self._served.get(pod.uid)
        if before is not None:
            if await before.listener.is_at(socket_path):
                return
            await self.close(pod.uid)
        await self._ledger.recall([pod])
        listener = sockets.Listener(
            connections=self._settings.connections_per_pod,
            discard=lambda connected: self._discard(served, connected),
        )
        # the broker's own socket is never slow
        history = self._histories.setdefault(
            pod.uid, job_history.JobHistory(can_be_slow=bool(pod.namespace))
        )
        served = _Served(pod, listener, history)
        await listener.start(socket_path, lambda connected: self._serve(served, connected))
        self._served[pod.uid] = served

    async def close(self, pod_uid: str) -> None:
        """Close a pod's socket and its connections; its mounts stay."""
        served = self._served.pop(pod_uid, None)
        if served is not None:
            self._ending = {listener for listener in self._ending if listener.is_ending}
            self._ending.add(served.listener)
            await served.listener.stop(wait_s=_CLOSE_S)

    async def release(self, pod_uid: str) -> int:
        """Abort the FUSE connections that an ended pod left behind; return how many it aborted."""
        self._histories.pop(pod_uid, None)
        return await self._ledger.release(pod_uid)

    @property
    def looked_at(self) -> float | None:
        """When all mounts were last checked, in monotonic seconds; None before the first check."""
        return self._ledger.looked_at

    def mounts(self) -> tuple[watched.Mount, ...]:
        """Return the watched mounts of all pods."""
        return self._ledger.mounts.all()

    def conditions(self, mount: watched.Mount) -> tuple[watched.Condition, ...]:
        """Return the conditions of a mount."""
        return self._ledger.mounts.conditions(mount)

    async def watch(self) -> None:
        """Check all mounts periodically until cancelled."""
        while True:
            await self._ledger.look()
            await asyncio.sleep(self._settings.watch_s)

    async def stop(self) -> None:
        """Close the sockets of all pods; mounts and their records stay."""
        listeners = self._ending | {served.listener for served in self._served.values()}
        self._served.clear()
        async with asyncio.TaskGroup() as tasks:
            for listener in listeners:
                tasks.create_task(listener.stop(wait_s=_STOP_S))
        self._ledger.close()

    async def _serve(self, served: _Served, connected: peer.Peer) -> None:
        """Answer the request on a connection."""
        try:
            async with asyncio.timeout(self._settings.request_s):
                await sockets.readable(connected.connection)
        except TimeoutError:
            return
        # the operation in the reply to an unreadable request
        operation = protocol.Operation.MOUNT
        try:
            request = connected.peek()
            if request is None:
                return
            operation = request.operation
            # before all that costs more
            self._limiter.take(served.pod.uid, now=asyncio.get_running_loop().time())
            if operation in protocol.DESCRIPTORS:
                async with self._turn(served):
                    request = await self._received(served, connected)
                    answer = await self._do(served, connected, request) if request else b""
            else:
                answer = await self._do(served, connected, request)
        except Refusal as refusal:
            self._report(served.pod, refusal)
            answer = protocol.reply(operation, errno=refusal.errno, text=refusal.text)
        # do not wait for a peer that has disconnected or does not read
        with contextlib.suppress(OSError):
            if answer:
                connected.connection.send(answer, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)

    async def _received(self, served: _Served, connected: peer.Peer) -> protocol.Request | None:
        """Receive a request with its descriptors; return None if the peer has disconnected."""
        outcome = await connected.receive(self._mounter, served.history)
        await self._free(served, outcome)
        request = connected.request()
        if request is None:
            _check(outcome)
        return request

    async def _discard(self, served: _Served, connected: peer.Peer) -> None:
        """Have the mounter close the descriptors that the pod has sent over a connection."""
        left = connected.undiscarded()
        for descriptor in left:
            while not descriptor.is_taken:
                if self._mounter.is_stuck(served.history):
                    await asyncio.sleep(_DISCARD_RETRY_S)
                    continue
                outcome = await self._mounter.discard(descriptor, served.history)
                await self._free(served, outcome)
                if not descriptor.is_taken:
                    await asyncio.sleep(_DISCARD_RETRY_S)
        # until then, the connection counts as one of the pod's
        while left and self._mounter.is_stuck(served.history):  # noqa: ASYNC110  # rare
            await asyncio.sleep(_DISCARD_RETRY_S)

    async def _free(self, served: _Served, outcome: jobs.Outcome) -> None:
        """Abort the pod's unresponsive FUSE connections if a job is stuck closing a descriptor."""
        if outcome.stage == "stuck":
            reason = "the pod sent the broker a file whose FUSE daemon delays the closing"
            await self._ledger.abort_unanswered(served.pod.uid, reason)

    async def _do(self, served: _Served, connected: peer.Peer, request: protocol.Request) -> bytes:
        """Execute a request; return the reply, or no bytes if none is to be sent."""
        received = await served.reading.run(lambda: connected.identify(request))
        if received is None:
            return b""
        asking = decision.check_caller(
            served.pod.uid,
            received.process,
            own_cgroup=received.own.cgroup,
            own_user_namespace=received.own.user_namespace,
        )
        operation = request.operation
        match operation:
            case protocol.Operation.HELLO:
                text = f"up to {self._settings.mounts_per_pod} mounts for each pod"
                return protocol.reply(operation, text=text)
            case protocol.Operation.MOUNT:
                await self._mount(served, connected, received, asking)
                return b""
            case protocol.Operation.UNMOUNT:
                await self._unmount(served, connected, received, asking)
                return protocol.reply(operation)
            case protocol.Operation.CONTINUE | protocol.Operation.SYNC_INIT:
                raise Refusal(Reason.MALFORMED, errno.EPROTO, "no mount is waiting for this packet")
            case _:
                assert_never(operation)

    @contextlib.asynccontextmanager
    async def _turn(self, served: _Served) -> AsyncIterator[None]:
        """Run the block while the pod has no other mount or unmount in progress. Raises Refusal."""
        try:
            async with asyncio.timeout(_TURN_S):
                await served.turn.acquire()
        except TimeoutError:
            text = "an earlier request from this pod is still in progress; try again"
            raise Refusal(Reason.BUSY, errno.EBUSY, text) from None
        try:
            if self._mounter.is_stuck(served.history):
                text = "an earlier request of this pod hangs in the kernel; delete the pod"
                raise Refusal(Reason.STUCK, errno.EBUSY, text)
            yield
        finally:
            served.turn.release()

    async def _mount(
        self, served: _Served, connected: peer.Peer, received: peer.Received, asking: jobs.Caller
    ) -> None:
        uid, settings = served.pod.uid, self._settings
        counts = self._ledger.counts()
        if counts[uid] >= settings.mounts_per_pod or counts.total() >= settings.mounts_per_node:
            # some may have been unmounted in the meantime
            await self._ledger.look()
        with self._limiter.making(uid, self._ledger.counts()):
            point = received.descriptor()
            decision.check_target(
                point, received.lines.get(point.mount_id), fuse_on_fuse=settings.fuse_on_fuse
            )
            job = decision.mount_job(received.request, asking, limits=settings)
            outcome = await self._mounter.mount(
                job,
                peer=connected.pidfd,
                directory=connected.descriptors[0].number,
                reply=connected.connection.fileno(),
                history=served.history,
            )
            if outcome.minor and (not outcome.errno or await self._ledger.exists(outcome)):
                await self._ledger.record(served.pod, job, point, outcome)
            _check(outcome)

    async def _unmount(
        self, served: _Served, connected: peer.Peer, received: peer.Received, asking: jobs.Caller
    ) -> None:
        job = decision.unmount_job(
            received.request, asking, root=received.descriptor(), lines=received.lines
        )
        outcome = await self._mounter.unmount(
            job, peer=connected.pidfd, root=connected.descriptors[0], history=served.history
        )
        _check(outcome)

    def _report(self, pod: caller.Pod, refusal: Refusal) -> None:
        now = asyncio.get_running_loop().time()
        if self._refusals.try_take((pod.uid, refusal.reason), now):
            text = refusal.text
            self._observe(observations.Refused(pod=pod, reason=refusal.reason, text=text))


def _check(outcome: jobs.Outcome) -> None:
    """Raise Refusal if a job failed."""
    if outcome.errno:
        raise Refusal(Reason.FAILED, outcome.errno, decision.shown(outcome.text))
