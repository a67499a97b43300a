"""Adapter for fusectl and /proc: checks the connections of mounts and their daemons.

Checking all processes takes long, so the processes that serve a mount are cached. A new search
starts if none of them serves the mount any more, and from time to time while requests wait.
"""

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import Final

from muster_fuse.watch import connections, mounts, processes

_LOOKS_MAX: Final = 6
"""How many times cached processes are checked while requests wait, before a new search."""
_HOLDERS_MAX: Final = 64
"""The maximum number of cached processes per mount."""


@dataclass(slots=True)
class _Served:
    """The processes that serve a mount, and how many times they were checked."""

    holders: list[processes.Holder] = field(default_factory=list)
    looks: int = 0


class Observer:
    """Checks mounts. Its calls block while they read /proc."""

    def __init__(self, fuse_connections: connections.Connections) -> None:
        self._connections = fuse_connections
        self._served: dict[str, _Served] = {}

    def look(
        self,
        watched: Collection[mounts.Mount],
        *,
        dead: Collection[str] = (),
        hung: Collection[str] = (),
    ) -> dict[str, mounts.Look | None]:
        """Check mounts and return the results by mount id; None for a mount that no longer exists.

        `dead` mounts do not cause a search for processes. `hung` mounts cause a search for killed
        processes.
        """
        waiting = {mount.id: self._connections.waiting(mount) for mount in watched}
        present = [mount for mount in watched if waiting[mount.id] is not None]
        self._served = {mount.id: self._served.get(mount.id, _Served()) for mount in present}
        if any(self._needs_search(m, waiting[m.id] or 0) for m in present if m.id not in dead):
            self._search(present, dead)
        killed = processes.killed({mount.pod_uid for mount in present if mount.id in hung})
        looks: dict[str, mounts.Look | None] = dict.fromkeys(waiting)
        for mount in present:
            worked = _worked(self._served[mount.id].holders)
            looks[mount.id] = mounts.Look(
                waiting=waiting[mount.id] or 0,
                is_held=bool(worked),
                worked_ticks=sum(worked),
                is_killed=mount.pod_uid in killed,
            )
        return looks

    def _needs_search(self, mount: mounts.Mount, waiting: int) -> bool:
        served = self._served[mount.id]
        served.looks = served.looks + 1 if waiting else 0
        return served.looks > _LOOKS_MAX or not _worked(served.holders)

    def _search(self, present: Collection[mounts.Mount], dead: Collection[str]) -> None:
        """Find the processes that serve the mounts: in the mounts' pods, else anywhere on the node.

        A daemon may have passed the device on to another process.
        """
        pods = {mount.pod_uid for mount in present}
        for everywhere in (False, True):
            holders = list(processes.holders(pods, everywhere=everywhere))
            for mount in present:
                self._served[mount.id] = _Served(_serving(mount, holders))
            if all(self._served[mount.id].holders for mount in present if mount.id not in dead):
                return


def _serving(mount: mounts.Mount, holders: Collection[processes.Holder]) -> list[processes.Holder]:
    if any(holder.connection is not None for holder in holders):
        serving = [holder for holder in holders if holder.connection == mount.connection]
    else:
        serving = [holder for holder in holders if holder.pod_uid == mount.pod_uid]
    return serving[:_HOLDERS_MAX]


def _worked(holders: Iterable[processes.Holder]) -> list[int]:
    ticks = map(processes.worked_ticks, holders)
    return [worked for worked in ticks if worked is not None]
