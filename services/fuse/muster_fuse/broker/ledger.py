"""Adapter for files and /proc: records, checks and aborts the broker's mounts."""

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Final

import msgspec
import structlog

from muster import blocking, vocabulary
from muster_fuse import config
from muster_fuse.broker import observations
from muster_fuse.kernel import jobs
from muster_fuse.request import caller, decision
from muster_fuse.watch import connections, mounts, observer, processes, records

_SAMPLES: Final = 5
"""A daemon with waiting requests in this many samples in a row counts as unresponsive."""
_SAMPLE_S: Final = 0.2
_WAIT_S: Final = 30.0
"""The timeout for reading connections and processes from the kernel."""

log = structlog.get_logger()


class Ledger:
    """The mounts of all pods; the records in `directory` outlast the broker's process."""

    def __init__(
        self,
        settings: config.Limits,
        directory: Path,
        observe: Callable[[observations.Observation], None],
    ) -> None:
        self.mounts = mounts.Mounts(settings)
        self.looked_at: float | None = None
        """When all mounts were last checked, on the event loop's clock; None if never."""
        self._observe = observe
        self._connections = connections.Connections()
        self._records = records.Records(directory, self._connections)
        self._observer = observer.Observer(self._connections)
        self._serial = blocking.Serial()
        self._looking = blocking.Serial()
        """Runs only the checks, which pods can make slow, so that no other call waits for them."""
        self._saving = asyncio.Lock()
        self._pods: dict[str, caller.Pod] = {}

    async def recall(self, pods: Iterable[caller.Pod]) -> None:
        """Watch the mounts that an earlier broker made in pods that are not watched yet.

        This reads all processes of the node once, however many pods there are.
        """
        new = {pod.uid: pod for pod in pods if pod.uid not in self._pods}
        self._pods.update(new)
        uids = [uid for uid in new if uid]
        if not uids:
            return
        seen: dict[str, processes.Seen] = {}
        try:
            await self._run(self._connections.open)
            # pods can make this slow; their recorded mounts are restored without it
            seen = await self._looking.run(lambda: processes.seen_by(uids), timeout_s=_WAIT_S)
        except (OSError, TimeoutError) as error:
            log.warning("processes_not_read", pods=len(uids), error=str(error))
        for uid in uids:
            await self._restore(uid, seen.get(uid, processes.Seen()))

    async def _restore(self, uid: str, seen: processes.Seen) -> None:
        try:
            present = await self._run(lambda: self._records.load(uid, seen))
        except (OSError, TimeoutError, msgspec.MsgspecError) as error:
            log.warning("mounts_not_restored", pod_uid=uid, error=str(error))
            return
        for mount in present:
            self.mounts.add(mount)

    async def exists(self, made: jobs.Outcome) -> bool:
        """Return whether a mount still exists after its job failed; True if that is unknown."""
        wanted = connections.Identity(made.inode, made.created_ns)
        try:
            identity = await self._run(lambda: self._connections.identity(made.minor))
        except (OSError, TimeoutError) as error:
            log.warning("mount_check_failed", error=str(error))
            return True
        return identity == wanted

    async def record(
        self, pod: caller.Pod, job: jobs.MountJob, point: caller.Descriptor, made: jobs.Outcome
    ) -> None:
        """Record and watch a mount that was just made."""
        strings = dict(job.strings)
        mount = mounts.Mount(
            pod_uid=pod.uid,
            connection=made.minor,
            inode=made.inode,
            created_ns=made.created_ns,
            mount_point=decision.shown(point.path),
            source=strings.get("source", ""),
            subtype=strings.get("subtype", ""),
            user_id=job.caller.user_id,
        )
        self.mounts.add(mount)
        self._observe(observations.Mounted(pod=pod, mount=mount))
        await self._save(pod.uid)

    def counts(self) -> Counter[str]:
        """Return how many mounts each pod has."""
        return Counter(mount.pod_uid for mount in self.mounts.all())

    async def look(self) -> None:
        """Check all mounts, and report changed conditions."""
        watched = self.mounts.all()
        dead = self._with(vocabulary.FuseCondition.DEAD)
        hung = self._with(vocabulary.FuseCondition.HUNG)
        try:
            seen = await self._looking.run(
                lambda: self._observer.look(watched, dead=dead, hung=hung), timeout_s=_WAIT_S
            )
        except OSError as error:
            log.warning("mount_check_failed", error=str(error))
            return
        self.looked_at = asyncio.get_running_loop().time()
        for change in self.mounts.look(seen, now=self.looked_at):
            pod = self._pods.get(change.mount.pod_uid)
            if pod is not None:
                self._observe(observations.ConditionChanged(pod=pod, **change._asdict()))
        for uid in {mount.pod_uid for mount in watched if seen[mount.id] is None}:
            await self._save(uid)

    async def release(self, pod_uid: str) -> int:
        """Abort the FUSE connections that an ended pod left behind; return how many it aborted."""
        left = self.mounts.of(pod_uid)
        try:
            count = await self._run(lambda: sum(map(self._connections.abort, left)))
        except OSError as error:
            # the mounts stay in the records, and the next call retries
            log.warning("abort_failed", pod_uid=pod_uid, mounts=len(left), error=str(error))
            return 0
        for mount in left:
            self.mounts.forget(mount)
        await self._save(pod_uid)
        pod = self._pods.pop(pod_uid, None)
        if count and pod is not None:
            reason = "the pod has ended, and its mounts were still connected"
            self._observe(observations.Aborted(pod=pod, count=count, reason=reason))
        return count

    async def abort_unanswered(self, pod_uid: str, reason: str) -> None:
        """Abort those FUSE connections of a pod whose daemons do not answer requests."""
        made = [*self.mounts.of(pod_uid)]

        def waiting() -> list[mounts.Mount]:
            return [mount for mount in made if self._connections.waiting(mount)]

        try:
            for _ in range(_SAMPLES):
                made = await self._run(waiting)
                await asyncio.sleep(_SAMPLE_S)
            count = await self._run(lambda: sum(map(self._connections.abort, made)))
        except (OSError, TimeoutError) as error:
            log.warning("abort_failed", pod_uid=pod_uid, mounts=len(made), error=str(error))
            return
        pod = self._pods.get(pod_uid)
        if count and pod is not None:
            self._observe(
                observations.Aborted(pod=pod, count=count, reason=reason, pod_has_ended=False)
            )

    def close(self) -> None:
        """Close the mount of fusectl, which lists the kernel's FUSE connections."""
        self._connections.close()

    def _with(self, condition: vocabulary.FuseCondition) -> set[str]:
        return {m.id for m in self.mounts.all() if condition in self.mounts.conditions(m)}

    async def _save(self, pod_uid: str) -> None:
        if not pod_uid:
            return
        async with self._saving:
            made = self.mounts.of(pod_uid)
            try:
                await self._run(lambda: self._records.save(pod_uid, made))
            except OSError as error:
                log.warning("mount_record_not_written", pod_uid=pod_uid, error=str(error))

    async def _run(self, call: Callable[[], blocking.Result]) -> blocking.Result:
        """Run a call in a thread, one at a time. Raises the call's exceptions, or TimeoutError."""
        return await self._serial.run(call, timeout_s=_WAIT_S)
