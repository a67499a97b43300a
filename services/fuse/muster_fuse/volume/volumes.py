"""Adapter for mounts, sockets and records: manages the volumes of the node's pods.

A record is written before any part of a volume exists and removed after every part was removed, so
that the broker can clean up if it was killed in between. Every step may be repeated.
"""

import asyncio
import errno
import functools
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Final, TypeVar

import msgspec

from muster import blocking
from muster.service import logs
from muster_fuse.broker import service
from muster_fuse.request import caller
from muster_fuse.volume import publication, state, tmpfs

Result = TypeVar("Result")

_STEP_S: Final = 10.0
"""The timeout for the mounts of one volume."""
_SEAL_TRIES: Final = 10
_SEAL_S: Final = 0.1


class TooManyPods(Exception):
    """The node already has the maximum number of pods with volumes."""


class Volumes:
    """The volumes of the node's pods, below the directory `root`."""

    def __init__(self, root: Path, helper: Path, broker: service.Broker, *, pods_max: int) -> None:
        self.problems: dict[str, str] = {}
        """Why pods' sockets are not served, by pod uid."""
        self._pods = root / "pods"
        self._helper = helper
        self._broker = broker
        self._pods_max = pods_max
        self._stored = state.Records(root / "records")
        self._records: dict[str, state.Record] = {}
        self._served: set[str] = set()
        self._serial = blocking.Serial()
        self._lock = asyncio.Lock()
        self._was_late = False

    @property
    def is_hanging(self) -> bool:
        """Whether a step of a volume did not end in time and still runs."""
        return self._was_late and self._serial.is_busy

    @property
    def pods(self) -> int:
        """How many pods have volumes."""
        return len(self._records)

    def pod(self, uid: str) -> caller.Pod | None:
        """Return the pod with this uid; None if it has no volume."""
        record = self._records.get(uid)
        return record.pod if record else None

    async def restore(self) -> None:
        """Serve the pods that had volumes when the broker last ended. Raises OSError."""
        self._records, strange = await self._run(self._stored.load)
        for problem in strange:
            logs.logger().warning("volume_record_unreadable", problem=problem)
        await self._broker.recall(record.pod for record in self._records.values())
        for record in [*self._records.values()]:
            directory = self._pods / record.pod.uid
            try:
                if await self._run(functools.partial(tmpfs.mounted_at, directory)):
                    await self._serve(record)
                    continue
                # the node was rebooted; the kubelet publishes the volumes of existing pods again
                await self._run(functools.partial(tmpfs.remove, directory))
                await self._forget(record.pod.uid)
            except (OSError, TimeoutError) as error:
                self._report(record.pod.uid, str(error))

    async def publish(self, wanted: publication.Publication) -> None:
        """Mount a pod's volume and serve its socket. Raises TooManyPods, OSError, TimeoutError."""
        uid, volume = wanted.volume.pod_uid, wanted.volume
        directory = self._pods / uid
        async with self._lock:
            record = self._records.get(uid) or state.Record(pod=wanted.pod, volumes={})
            if uid not in self._records and len(self._records) >= self._pods_max:
                raise TooManyPods(
                    f"{len(self._records)} pods on this node have volumes of "
                    f"{publication.DRIVER}; the settings allow no more"
                )
            if record.volumes.get(volume.volume_id) != volume.target:
                volumes = {**record.volumes, volume.volume_id: volume.target}
                record = msgspec.structs.replace(record, volumes=volumes)
                await self._run(lambda: self._stored.save(record))
                self._records[uid] = record
            await self._run(lambda: tmpfs.make(directory, self._helper))
            await self._serve(record)
            await self._run(lambda: tmpfs.attach(directory, Path(volume.target)))

    async def unpublish(self, volume: publication.Volume) -> None:
        """Remove a volume; with a pod's last volume, also its socket, mounts and record.

        Succeeds even if the pod has no record. Raises OSError, TimeoutError.
        """
        uid = volume.pod_uid
        async with self._lock:
            await self._run(lambda: tmpfs.remove(Path(volume.target)))
            record = self._records.get(uid)
            left = {**record.volumes} if record else {}
            left.pop(volume.volume_id, None)
            if record and left:
                fewer = msgspec.structs.replace(record, volumes=left)
                await self._run(lambda: self._stored.save(fewer))
                self._records[uid] = fewer
                return
            await self._broker.close(uid)
            self._served.discard(uid)
            await self._run(lambda: tmpfs.remove(self._pods / uid))
            await self._broker.release(uid)
            await self._forget(uid)

    async def _serve(self, record: state.Record) -> None:
        """Listen on a pod's socket, unless it is already served."""
        uid, directory = record.pod.uid, self._pods / record.pod.uid
        path = directory / tmpfs.SOCKET
        if uid in self._served and await self._run(lambda: tmpfs.has(path, stat.S_ISSOCK)):
            return
        self._served.discard(uid)
        await self._run(lambda: tmpfs.set_read_only(directory, read_only=False))
        try:
            await self._broker.close(uid)
            await self._broker.open(record.pod, path)
        finally:
            await self._seal(directory)
        self._served.add(uid)
        self._report(uid, "")

    async def _seal(self, directory: Path) -> None:
        """Make a pod's file system read-only. Raises OSError."""
        for attempt in range(_SEAL_TRIES):
            try:
                await self._run(lambda: tmpfs.set_read_only(directory, read_only=True))
            except OSError as error:
                # the old socket was removed but still has connections, which are about to end
                if error.errno != errno.EBUSY or attempt == _SEAL_TRIES - 1:
                    raise
                await asyncio.sleep(_SEAL_S)
            else:
                return

    async def _forget(self, uid: str) -> None:
        await self._run(lambda: self._stored.forget(uid))
        self._records.pop(uid, None)
        self._report(uid, "")

    def _report(self, uid: str, problem: str) -> None:
        """Log a problem with a pod once when it begins, and once when it ends."""
        before = self.problems.pop(uid, "")
        if problem:
            self.problems[uid] = problem
        if problem == before:
            return
        if problem:
            logs.logger().warning("pod_volume_failed", pod_uid=uid, problem=problem)
        else:
            logs.logger().info("pod_volume_recovered", pod_uid=uid)

    async def _run(self, call: Callable[[], Result]) -> Result:
        try:
            result = await self._serial.run(call, timeout_s=_STEP_S)
        except TimeoutError:
            self._was_late = True
            raise
        self._was_late = False
        return result
