"""What hangs holds up nobody else."""

import asyncio
import threading

import pytest

from muster_notifier import blocking
from muster_notifier.receivers import http


def test_what_is_done_aside_gives_its_result_or_its_error() -> None:
    async def story() -> None:
        lane = blocking.Lane()
        assert await lane.run(lambda: 1) == 1
        with pytest.raises(ZeroDivisionError):
            await lane.run(lambda: 1 // 0)

    asyncio.run(story())


def test_what_hangs_costs_one_thread_and_only_its_own_lane() -> None:
    async def story() -> None:
        hung, other = blocking.Lane(), blocking.Lane()
        release = threading.Event()
        begun: list[int] = []

        def hang() -> int:
            begun.append(1)
            release.wait()
            return len(begun)

        for _ in range(3):
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.02):
                    await hung.run(hang)
        assert await other.run(lambda: 2) == 2
        assert begun == [1]
        release.set()
        assert await hung.run(lambda: 3) == 3

    asyncio.run(story())


def test_a_host_is_its_addresses() -> None:
    async def story() -> None:
        assert await http.Host("127.0.0.1", 1).addresses() == ["127.0.0.1"]
        assert "127.0.0.1" in await http.Host("localhost", 1).addresses()
        with pytest.raises(OSError, match=r"."):
            await http.Host("no.such.host.invalid", 1).addresses()

    asyncio.run(story())
