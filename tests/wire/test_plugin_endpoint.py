"""One server of ours on one socket, seen from outside."""

import asyncio
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from muster_plugin import allocation, endpoint, inventory, signals


class Nobody:
    """Hears of nothing, and finds everything there."""

    async def absent(self, paths: Sequence[str]) -> str:
        del paths
        return ""

    async def present(self, paths: Sequence[str]) -> frozenset[str]:
        return frozenset(paths)

    def allocated(self, resource: str, device_ids: tuple[str, ...]) -> None:
        raise AssertionError(f"nobody allocates {device_ids} of {resource}")


@pytest.fixture
def root() -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="mu-"))
    yield path
    shutil.rmtree(path)


def served(path: Path, told: list[signals.Signal]) -> endpoint.Endpoint:
    devices = inventory.Inventory(node="n1", plugin="p")
    service = endpoint.Service(
        resource="a.com/x",
        devices=devices,
        allocator=allocation.Allocator(devices, "a.com/x", lambda: devices.terms),
        figures=endpoint.Figures(),
    )
    return endpoint.Endpoint(path, 1, service, tell=told.append, observer=Nobody())


def test_a_probe_that_another_instance_answers_has_failed(root: Path) -> None:
    async def story() -> None:
        told: list[signals.Signal] = []
        ours, other = served(root / "a.sock", told), served(root / "b.sock", told)
        async with asyncio.timeout(10):
            await ours.start()
            assert await ours.probe() > 0
            await other.start()
            (root / "b.sock").rename(root / "a.sock")
            with pytest.raises(endpoint.ProbeFailed, match=r"^a.sock answers as another instance$"):
                await ours.probe()
            assert ours.is_lost
            await ours.stop()
            await other.stop()
        assert told == []

    asyncio.run(story())
