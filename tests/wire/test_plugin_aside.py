import asyncio
import threading

import pytest

from muster_plugin import blocking


def test_what_hangs_is_given_up_in_time_and_not_begun_twice() -> None:
    async def story() -> None:
        lane, release = blocking.Lane(), threading.Event()
        begun: list[int] = []

        def hang() -> str:
            begun.append(1)
            assert release.wait(20)
            return "late"

        for _ in range(2):
            with pytest.raises(TimeoutError):
                await lane.run(hang, timeout_s=0.05)
        assert len(begun) == 1
        release.set()
        async with asyncio.timeout(30):
            assert await lane.run(lambda: "free again", timeout_s=5) == "free again"

    asyncio.run(story())


def test_what_fails_beside_the_loop_fails_in_it() -> None:
    async def story() -> None:
        with pytest.raises(ZeroDivisionError):
            await blocking.Lane().run(lambda: 1 // 0, timeout_s=5)

    asyncio.run(story())
