"""Pure: derives the condition of each mount from kernel data, without access to the mount.

A check of a mount shows how many requests wait, whether a process has /dev/fuse open for it, how
much processor time such processes have used, and whether a killed process of its pod cannot end.

| the mount                                                          | condition             |
|--------------------------------------------------------------------|-----------------------|
| its connection is gone, or its number has been reused              | none: no more checks  |
| in two checks in a row no process has /dev/fuse open for it        | dead, until a process |
|                                                                    | has it open           |
| requests wait for `hung_s`, never fewer than before, and the       | hung, until fewer     |
| daemon works for less than a thousandth of that time               | wait or it works      |
| it is hung, and for `lingering_s` a killed process of its pod has  | lingering, until it   |
| been unable to end                                                 | is not hung, or no    |
|                                                                    | such process is left  |

The kernel keeps the connection of a daemon that has ended until the file system is unmounted. So a
missing connection means that the file system was unmounted, by its user or with its mount
namespace. `waiting` alone does not distinguish a hung daemon from a steadily busy one: both may
show the same number for a long time.
"""

from collections.abc import Mapping
from typing import Final, NamedTuple

import msgspec

from muster import vocabulary
from muster_fuse import config

Condition = vocabulary.FuseCondition
TICK_S: Final = 0.01
"""The kernel's unit of processor time (USER_HZ)."""
_WORKING: Final = 0.001
"""The minimum share of a processor that a daemon uses while it answers requests."""
_UNHELD_MAX: Final = 2
"""After this many checks in a row in which no process has /dev/fuse open, a mount is dead.

More than 1, because a check may fall between a daemon's fork() and the end of its parent.
"""


class Mount(msgspec.Struct, frozen=True, kw_only=True):
    """A mount that the broker made in a pod.

    `inode` and `created_ns` are those of the connection's directory, because numbers are reused.
    `mount_point` is where the file system was mounted, as text for people. Texts are printable.
    """

    pod_uid: str
    connection: int
    inode: int
    created_ns: int
    mount_point: str
    source: str
    subtype: str
    user_id: int

    @property
    def id(self) -> str:
        """The id of the mount, unique on its node."""
        return f"{self.connection}-{self.inode}"


class Look(NamedTuple):
    """The result of a check of a connected mount."""

    waiting: int
    is_held: bool
    worked_ticks: int
    is_killed: bool


class Change(NamedTuple):
    """A condition of a mount that begins or ends."""

    mount: Mount
    condition: Condition
    holds: bool
    text: str


class _Watched:
    """A mount and the results of recent checks."""

    def __init__(self, mount: Mount) -> None:
        self.mount = mount
        self.conditions: dict[Condition, str] = {}
        self.waiting = 0
        self.unheld = 0
        self.stuck_since: float | None = None
        self.stuck_ticks = 0
        self.is_hung = False
        self.killed_since: float | None = None


class Mounts:
    """The mounts of all pods of a node."""

    def __init__(self, limits: config.Limits) -> None:
        self._limits = limits
        self._watched: dict[str, _Watched] = {}

    def add(self, mount: Mount) -> None:
        """Start watching a mount."""
        self._watched[mount.id] = _Watched(mount)

    def forget(self, mount: Mount) -> None:
        """Stop watching a mount, if it is watched."""
        self._watched.pop(mount.id, None)

    def get(self, id_: str) -> Mount | None:
        """Return a mount by its id, if it is watched."""
        watched = self._watched.get(id_)
        return watched.mount if watched else None

    def all(self) -> tuple[Mount, ...]:
        """Return the watched mounts, oldest first."""
        return tuple(watched.mount for watched in self._watched.values())

    def of(self, pod_uid: str) -> tuple[Mount, ...]:
        """Return the mounts of a pod."""
        return tuple(mount for mount in self.all() if mount.pod_uid == pod_uid)

    def conditions(self, mount: Mount) -> tuple[Condition, ...]:
        """Return the conditions that hold for a mount."""
        watched = self._watched.get(mount.id)
        return tuple(sorted(watched.conditions)) if watched else ()

    def look(self, looks: Mapping[str, Look | None], *, now: float) -> list[Change]:
        """Record the results of a check, by mount id; return the changed conditions.

        None for a mount means that it no longer exists. Mounts that were not checked stay
        unchanged.
        """
        changes = []
        for id_, look in looks.items():
            watched = self._watched.get(id_)
            if watched is None:
                continue
            if look is None:
                del self._watched[id_]
                held = {}
            else:
                held = self._judge(watched, look, now)
            before, watched.conditions = watched.conditions, held
            mount = watched.mount
            changes += [Change(mount, c, holds=False, text="") for c in before if c not in held]
            changes += [Change(mount, c, holds=True, text=held[c]) for c in held if c not in before]
        return changes

    def _judge(self, watched: _Watched, look: Look, now: float) -> dict[Condition, str]:
        watched.unheld = 0 if look.is_held else watched.unheld + 1
        if watched.unheld >= _UNHELD_MAX:
            return {Condition.DEAD: "no process has /dev/fuse open for this mount any more"}
        self._measure(watched, look, now)
        if not watched.is_hung:
            watched.killed_since = None
            return {}
        held = {Condition.HUNG: f"{look.waiting} requests wait for the daemon of this mount"}
        if not look.is_killed:
            watched.killed_since = None
        elif watched.killed_since is None:
            watched.killed_since = now
        elif now - watched.killed_since >= self._limits.lingering_s:
            text = "processes of the mount's pod have been killed and cannot end"
            held[Condition.LINGERING] = text
        return held

    def _measure(self, watched: _Watched, look: Look, now: float) -> None:
        """Decide whether the daemon hangs, after each `hung_s` without visible progress."""
        is_fewer = look.waiting < watched.waiting
        watched.waiting = look.waiting
        if look.waiting == 0 or is_fewer:
            watched.stuck_since, watched.is_hung = None, False
            return
        if watched.stuck_since is not None:
            stuck_s = now - watched.stuck_since
            if stuck_s < self._limits.hung_s:
                return
            worked_s = (look.worked_ticks - watched.stuck_ticks) * TICK_S
            # a negative value: another process serves the mount now
            watched.is_hung = 0 <= worked_s < _WORKING * stuck_s
        watched.stuck_since, watched.stuck_ticks = now, look.worked_ticks
