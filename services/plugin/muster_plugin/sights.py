"""Door to what is there on the host; looks at it beside the loop, because a file system may hang.

What lies below /dev is looked at apart from the rest: a mount that hangs then hides nothing but
what lies in it, and of that what was last seen counts.
"""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from muster_plugin import aside, devfs, found, rules

_DEV: Final = "/dev/"
_DEV_TIMEOUT_S: Final = 10.0
"""It does not hang; but some of sysfs' attributes are read from the hardware."""
_ELSEWHERE_TIMEOUT_S: Final = 2.0
_NAMED_MAX: Final = 3


class Sights:
    """What rules may mean on this host, as it was last seen."""

    def __init__(self) -> None:
        self.directories: frozenset[Path] = frozenset()
        """Where a change may change what there is to see."""
        self.changed = asyncio.Event()
        """Set when these are others than before, and so not watched yet."""
        self._dev = aside.Look(devfs.Look())
        self._elsewhere = aside.Look(devfs.Look())

    @property
    def is_blind(self) -> bool:
        """Whether not even /dev can be looked at."""
        return self._dev.hangs

    async def look(self, wanted: Sequence[rules.Nodes]) -> found.Seen:
        """Return everything that these rules may mean, and which look hangs."""
        dev = [entry for entry in wanted if _is_below_dev(entry)]
        others = [entry for entry in wanted if not _is_below_dev(entry)]
        here, there = await asyncio.gather(
            _look(self._dev, dev, timeout_s=_DEV_TIMEOUT_S),
            _look(self._elsewhere, others, timeout_s=_ELSEWHERE_TIMEOUT_S),
        )
        directories = here.directories | there.directories
        if directories != self.directories:
            self.directories = directories
            self.changed.set()
        hanging = tuple(
            _hangs(entries)
            for look, entries in ((self._dev, dev), (self._elsewhere, others))
            if look.hangs and entries
        )
        return found.together(found.together(here.seen, there.seen), found.Seen(problems=hanging))


def _is_below_dev(entry: rules.Nodes) -> bool:
    return not entry.path or entry.path.startswith(_DEV)


async def _look(
    look: aside.Look[devfs.Look], entries: Sequence[rules.Nodes], *, timeout_s: float
) -> devfs.Look:
    if not entries:
        return devfs.Look()
    return await look.again(lambda: devfs.look(entries), timeout_s=timeout_s)


def _hangs(entries: Sequence[rules.Nodes]) -> str:
    named = dict.fromkeys(entry.path or _DEV for entry in entries)
    more = f" and {len(named) - _NAMED_MAX} more" if len(named) > _NAMED_MAX else ""
    return f"{', '.join([*named][:_NAMED_MAX])}{more}: the look hangs; what was last seen counts"
