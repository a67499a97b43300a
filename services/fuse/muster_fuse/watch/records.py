"""Adapter for files: records the broker's mounts for a restart, in one file per pod.

If fusectl was not mounted anywhere for a while, a connection's directory has a new inode. A mount
is then recognised by the file systems that its pod's processes see mounted.
"""

import re
from collections.abc import Collection
from pathlib import Path
from typing import Final

import msgspec

from muster_fuse.request import caller, decision
from muster_fuse.watch import connections, mounts, processes

_BYTES_MAX: Final = 1 << 22
_FILE: Final = re.compile(r"[0-9A-Za-z-]{1,128}", re.ASCII)
_NEW: Final = ".new"
_USER: Final = "user_id="


class Records:
    """The records in a directory. All calls block."""

    def __init__(self, directory: Path, fuse_connections: connections.Connections) -> None:
        self._directory = directory
        self._connections = fuse_connections

    def load(self, pod_uid: str, seen: processes.Seen) -> list[mounts.Mount]:
        """Return the recorded mounts that a pod still has.

        Raises OSError, msgspec.MsgspecError. Mounts that the pod's processes both serve and
        see are also returned, because the broker may have ended before it recorded them.
        """
        present: dict[int, mounts.Mount] = {}
        for mount in self._read(pod_uid):
            line = seen.mounted.get(mount.connection)
            if self._connections.waiting(mount) is not None:
                present[mount.connection] = mount
            elif line is not None and f"{_USER}{mount.user_id}" in line.options:
                present[mount.connection] = self._identified(mount)
        for connection in seen.served & seen.mounted.keys() - present.keys():
            mount = _from_line(pod_uid, connection, seen.mounted[connection])
            present[connection] = self._identified(mount)
        return list(present.values())

    def save(self, pod_uid: str, made: Collection[mounts.Mount]) -> None:
        """Write the mounts of a pod; remove the file if there are none. Raises OSError."""
        path = self._path(pod_uid)
        if not made:
            path.unlink(missing_ok=True)
            return
        self._directory.mkdir(parents=True, exist_ok=True)
        new = path.with_name(f"{path.name}{_NEW}")
        with new.open("wb") as file:
            # not synced to the disk: a node that loses power loses all mounts too
            file.write(msgspec.json.encode(list(made)))
        new.replace(path)

    def _read(self, pod_uid: str) -> list[mounts.Mount]:
        try:
            with self._path(pod_uid).open("rb") as file:
                return msgspec.json.decode(file.read(_BYTES_MAX), type=list[mounts.Mount])
        except FileNotFoundError:
            return []

    def _identified(self, mount: mounts.Mount) -> mounts.Mount:
        identity = self._connections.identity(mount.connection) or connections.Identity(0, 0)
        return msgspec.structs.replace(mount, inode=identity.inode, created_ns=identity.created_ns)

    def _path(self, pod_uid: str) -> Path:
        assert _FILE.fullmatch(pod_uid), f"the uid {pod_uid!r} is not the name of a file"
        return self._directory / f"{pod_uid}.json"


def _from_line(pod_uid: str, connection: int, line: caller.MountLine) -> mounts.Mount:
    """Return a mount as a process of its pod sees it."""
    users = [option for option in line.options if option.startswith(_USER)]
    return mounts.Mount(
        pod_uid=pod_uid,
        connection=connection,
        inode=0,
        created_ns=0,
        mount_point=decision.shown(line.mount_point),
        source=decision.shown(line.source),
        subtype=decision.shown(line.kind.partition(".")[2]),
        user_id=int(users[0].removeprefix(_USER)) if users else 0,
    )
