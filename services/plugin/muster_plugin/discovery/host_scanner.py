"""Adapter: scans the host's devices and checks paths in threads, because a file system may hang.

Entries below /dev are scanned separately from the others, so that a mount that hangs does not hide
changes in /dev. For the entries whose scan hangs, the last successful scan is used.
"""

import asyncio
import contextlib
import os
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Final

from muster import blocking
from muster_plugin.config import resources
from muster_plugin.discovery import devfs, inotify, resource_plan, scan_result
from muster_plugin.model import errors

_DEV: Final = "/dev/"
_DEV_TIMEOUT_S: Final = 10.0
"""The timeout for scanning /dev.

It is long, because some sysfs attributes are read from the hardware; devtmpfs does not hang.
"""
_ELSEWHERE_TIMEOUT_S: Final = 2.0
_PATHS_TIMEOUT_S: Final = 0.7
"""The timeout for checking paths; an Allocate waits for up to three checks or scans, 2 s in all."""
_RETRY_S: Final = 1.0
"""After a scan that did not finish in time, the next scan is requested after this delay."""
_LISTED_MAX: Final = 3
_FEW_NODES: Final = 200
"""Up to this many nodes are planned without a thread, whose start would take longer."""
_PERIOD_S: Final = 30.0
_SETTLE_S: Final = 0.002
_SHARE: Final = 0.2
"""The largest share of CPU time for scans, even if devices change continuously."""


class HostScanner:
    """Scans the devices of this host that rules may match; stores the last result."""

    def __init__(self) -> None:
        self.directories: frozenset[Path] = frozenset()
        """The directories whose changes may change the result of a scan."""
        self.changed = asyncio.Event()
        """Set to request another scan, for example after `directories` has changed."""
        self._dev = blocking.Latest(devfs.Scan())
        self._elsewhere = blocking.Latest(devfs.Scan())
        self._planning = blocking.Serial()

    @property
    def is_dev_hanging(self) -> bool:
        """Whether the scan of /dev itself hangs."""
        return self._dev.is_hanging

    def scan_times(
        self, others: Callable[[], Iterable[Path]]
    ) -> contextlib.aclosing[AsyncGenerator[None, None]]:
        """Open a stream that yields when a scan is due; `others` are more directories to watch."""
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
        """Scan, and plan the units of every resource (`resource_plan.plan`)."""
        result = await self.scan([entry for rule in configured for _, entry in rule.entries()])

        def plan() -> resource_plan.Plan:
            return resource_plan.plan(configured, result, current_names=current_names)

        if len(result.nodes) <= _FEW_NODES:
            return plan()
        return await self._planning.run(plan, timeout_s=None)

    async def scan(self, entries: Sequence[resources.Entry]) -> scan_result.ScanResult:
        """Return all nodes that these entries may match; the problems name the scans that hang."""
        dev_entries = [entry for entry in entries if _is_below_dev(entry)]
        others = [entry for entry in entries if not _is_below_dev(entry)]
        dev, elsewhere = await asyncio.gather(
            _scan(self._dev, dev_entries, timeout_s=_DEV_TIMEOUT_S),
            _scan(self._elsewhere, others, timeout_s=_ELSEWHERE_TIMEOUT_S),
        )
        directories = dev.directories | elsewhere.directories
        if directories != self.directories:
            self.directories = directories
            self.changed.set()
        hanging = tuple(
            _hanging(scanned)
            for scan, scanned in ((self._dev, dev_entries), (self._elsewhere, others))
            if scan.is_hanging and scanned
        )
        if hanging:
            # the last result may lack the change that caused this scan
            asyncio.get_running_loop().call_later(_RETRY_S, self.changed.set)
        result = scan_result.merged(dev.result, elsewhere.result)
        return scan_result.merged(result, scan_result.ScanResult(problems=hanging))


class HostPaths:
    """Checks paths anywhere on the host without blocking the event loop."""

    def __init__(self) -> None:
        self._lane = blocking.Serial()

    async def missing(self, paths: Sequence[str]) -> list[str]:
        """Return the paths that do not exist. Raises TimeoutError if their mount hangs."""
        gone = [path for path in paths if path.startswith(_DEV) and not os.path.exists(path)]  # noqa: PTH110, ASYNC240  # devtmpfs never hangs; a Path costs more than the answer
        others = [path for path in paths if not path.startswith(_DEV)]
        if others:
            gone += await self._lane.run(
                lambda: [path for path in others if not Path(path).exists()],
                timeout_s=_PATHS_TIMEOUT_S,
            )
        return gone

    async def present(self, paths: Sequence[str]) -> frozenset[str]:
        """Return the paths that exist. Raises TimeoutError if their mount hangs."""
        return frozenset(paths).difference(await self.missing(paths)) if paths else frozenset()


def _is_below_dev(entry: resources.Entry) -> bool:
    return not entry.path or entry.path.startswith(_DEV)


async def _scan(
    repeated: blocking.Latest[devfs.Scan], entries: Sequence[resources.Entry], *, timeout_s: float
) -> devfs.Scan:
    if not entries:
        return devfs.Scan()
    return await repeated.refresh(lambda: devfs.scan(entries), timeout_s=timeout_s)


def _hanging(entries: Sequence[resources.Entry]) -> str:
    paths = [*dict.fromkeys(entry.path or _DEV for entry in entries)]
    listed = errors.listed(paths, most=_LISTED_MAX)
    return f"{listed}: the scan hangs; the last result is used"
