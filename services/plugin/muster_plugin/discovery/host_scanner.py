"""Adapter: what is there on the host; looks at it beside the loop, because a file system may hang.

What lies below /dev is looked at apart from the rest: a mount that hangs then hides nothing but
what lies in it, and of that what was last seen counts.
"""

import asyncio
import contextlib
import os
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Final

from muster_plugin import blocking
from muster_plugin.config import resources
from muster_plugin.discovery import devfs, inotify, resource_plan
from muster_plugin.model import scan_result

_DEV: Final = "/dev/"
_DEV_TIMEOUT_S: Final = 10.0
"""It does not hang; but some of sysfs' attributes are read from the hardware."""
_ELSEWHERE_TIMEOUT_S: Final = 2.0
_NAMED_MAX: Final = 3
_FEW_NODES: Final = 200
"""Planned in less time than it takes to do it elsewhere."""
_PERIOD_S: Final = 30.0
_SETTLE_S: Final = 0.002
_SHARE: Final = 0.2
"""Of the time, when devices come and go without end."""


class HostScanner:
    """What rules may mean on this host, as it was last seen."""

    def __init__(self) -> None:
        self.directories: frozenset[Path] = frozenset()
        """Where a change may change what there is to see."""
        self.changed = asyncio.Event()
        """Set when these are others than before, and so not watched yet."""
        self._dev = blocking.Look(devfs.Scan())
        self._elsewhere = blocking.Look(devfs.Scan())
        self._planning = blocking.Lane()

    @property
    def is_dev_hanging(self) -> bool:
        """Whether not even /dev can be looked at."""
        return self._dev.hangs

    def scan_times(
        self, others: Callable[[], Iterable[Path]]
    ) -> contextlib.aclosing[AsyncGenerator[None, None]]:
        """Yield when it is time to look, at what changes in `others` as well; to be entered."""
        return contextlib.aclosing(
            inotify.scan_times(
                lambda: self.directories.union(others()),
                period_s=_PERIOD_S,
                settle_s=_SETTLE_S,
                share=_SHARE,
                changed=self.changed,
            )
        )

    async def plan(
        self, configured: Sequence[resources.Resource], *, current_names: Mapping[str, str]
    ) -> resource_plan.Plan:
        """Look, and say what every resource consists of (`units.plan`)."""
        result = await self.scan([nodes for rule in configured for _, nodes in rule.nodes()])

        def plan() -> resource_plan.Plan:
            return resource_plan.plan(configured, result, current_names=current_names)

        if len(result.nodes) <= _FEW_NODES:
            return plan()
        return await self._planning.run(plan, timeout_s=None)

    async def scan(self, wanted: Sequence[resources.Entry]) -> scan_result.ScanResult:
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
        return scan_result.merged(
            scan_result.merged(here.result, there.result), scan_result.ScanResult(problems=hanging)
        )


def _is_below_dev(entry: resources.Entry) -> bool:
    return not entry.path or entry.path.startswith(_DEV)


async def _look(
    repeated: blocking.Look[devfs.Scan], entries: Sequence[resources.Entry], *, timeout_s: float
) -> devfs.Scan:
    if not entries:
        return devfs.Scan()
    return await repeated.again(lambda: devfs.look(entries), timeout_s=timeout_s)


def _hangs(entries: Sequence[resources.Entry]) -> str:
    named = dict.fromkeys(entry.path or _DEV for entry in entries)
    more = f" and {len(named) - _NAMED_MAX} more" if len(named) > _NAMED_MAX else ""
    return f"{', '.join([*named][:_NAMED_MAX])}{more}: the look hangs; what was last seen counts"


_PATHS_TIMEOUT_S: Final = 1.0
_DEV_PREFIX: Final = "/dev/"


class HostPaths:
    """Asks for paths, wherever they are, without holding up the event loop."""

    def __init__(self) -> None:
        self._lane = blocking.Lane()

    async def missing(self, paths: Sequence[str]) -> list[str]:
        """Return those that are not there. Raises TimeoutError if their mount hangs."""
        gone = [path for path in paths if path.startswith(_DEV_PREFIX) and not os.path.exists(path)]  # noqa: PTH110, ASYNC240  # devtmpfs never hangs; a Path costs more than the answer
        others = [path for path in paths if not path.startswith(_DEV_PREFIX)]
        if others:
            gone += await self._lane.run(lambda: _missing(others), timeout_s=_PATHS_TIMEOUT_S)
        return gone

    async def present(self, paths: Sequence[str]) -> frozenset[str]:
        """Return those that are there. Raises TimeoutError if their mount hangs."""
        return frozenset(paths).difference(await self.missing(paths)) if paths else frozenset()


def _missing(paths: Iterable[str]) -> list[str]:
    return [path for path in paths if not Path(path).exists()]
