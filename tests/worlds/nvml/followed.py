"""Adapter for NVML: runs the NVML source in this process, with the fake library."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Final, TypeVar

import pytest

from muster_plugin.config import gpus
from muster_plugin.gpu.nvml import observer
from muster_plugin.model import gpu
from tests.worlds.nvml import fake, scenes

Observed = gpu.Scan | gpu.Observation
Kind = TypeVar("Kind", gpu.Scan, gpu.Poll, gpu.Xid, gpu.MonitoringChanged)

UUIDS: Final = tuple(device.uuid for device in scenes.h100x8().gpus)
TIMEOUTS: Final = observer.Timeouts(
    answer_s=0.3,
    slice_s=0.05,
    guard_s=0.05,
    rescan_s=0.1,
    restart_first_s=0.05,
    restart_max_s=0.2,
    close_s=1.5,
)
POLL_S: Final = 0.1


def here(state: Path, monkeypatch: pytest.MonkeyPatch) -> fake.Fake:
    """Make this process load the fake instead of NVML; skip the test if it cannot be built."""
    try:
        fake.built()
    except fake.NoCompiler as no:
        pytest.skip(str(no))
    made = fake.Fake(state)
    for name, value in made.environment().items():
        monkeypatch.setenv(name, value)
    return made


class Story:
    """The NVML source, and everything that it reported."""

    def __init__(self, node: fake.Fake, directory: Path, timeouts: observer.Timeouts) -> None:
        self.node = node
        rules = gpus.Gpus(library=str(fake.built()), health=gpus.Health(poll_s=POLL_S))
        self.nvml = observer.NvmlSource(
            rules, sysfs=directory / "sys", proc=directory / "proc", timeouts=timeouts
        )
        self.observations: list[Observed] = []
        self._came = asyncio.Event()

    def observed(self, observation: Observed) -> None:
        self.observations.append(observation)
        self._came.set()

    def of(self, kind: type[Kind]) -> list[Kind]:
        return [observation for observation in self.observations if isinstance(observation, kind)]

    async def until(self, kind: type[Kind], *, is_it: Callable[[Kind], bool] | None = None) -> Kind:
        """Wait for a matching observation that is made after this call; return it."""
        return await self._first(kind, is_it, after=len(self.observations))

    async def had(self, kind: type[Kind], *, is_it: Callable[[Kind], bool] | None = None) -> Kind:
        """Return the first matching observation; wait for it if there is none yet."""
        return await self._first(kind, is_it, after=0)

    async def of_each(self, kind: type[gpu.Poll] | type[gpu.MonitoringChanged]) -> None:
        """Wait until there is an observation of this kind for each GPU."""
        while {
            observation.gpu for observation in self.observations if isinstance(observation, kind)
        } != {*UUIDS}:
            self._came.clear()
            await self._came.wait()

    async def _first(
        self, kind: type[Kind], is_it: Callable[[Kind], bool] | None, *, after: int
    ) -> Kind:
        while True:
            for observation in self.observations[after:]:
                if isinstance(observation, kind) and (is_it is None or is_it(observation)):
                    return observation
            after = len(self.observations)
            self._came.clear()
            await self._came.wait()

    async def polled(self, number: int, times: int = 2) -> gpu.Poll:
        """Wait for `times` polls of a GPU; by default, the last of them began after this call."""
        for _ in range(times):
            poll = await self.until(gpu.Poll, is_it=lambda poll: poll.gpu == UUIDS[number])
        return poll

    async def xid(self, number: int, code: int, *, gi: int = -1, ci: int = -1) -> gpu.Xid:
        """Make a GPU report an XID; wait for its observation, and return it."""
        self.node.xid(number, code, gi=gi, ci=ci)
        return await self.until(gpu.Xid, is_it=lambda observation: observation.xid == code)


@contextlib.asynccontextmanager
async def followed(
    node: fake.Fake, *, timeouts: observer.Timeouts = TIMEOUTS, first_s: float = 5.0
) -> AsyncIterator[tuple[Story, gpu.Scan]]:
    """Run the NVML source, and yield it with its first scan; at the end, check for misuses."""
    story = Story(node, node.state_file.parent, timeouts)
    async with asyncio.timeout(100):
        scan = await story.nvml.first_scan(first_s)
        following = asyncio.ensure_future(story.nvml.observe(story.observed))
        try:
            yield story, scan
        finally:
            following.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await following
            await story.nvml.close()
    assert node.misuses() == {}


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
