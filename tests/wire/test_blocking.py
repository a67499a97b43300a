"""A blocking call that hangs is abandoned in time, costs one thread and delays no other call."""

import asyncio
import threading

import pytest

from muster import blocking


def test_a_call_that_hangs_is_given_up_in_time_and_not_started_twice() -> None:
    async def story() -> None:
        hung, other, release = blocking.Serial(), blocking.Serial(), threading.Event()
        started: list[int] = []

        def hang() -> str:
            started.append(1)
            assert release.wait(20)
            return "late"

        for _ in range(3):
            with pytest.raises(TimeoutError):
                await hung.run(hang, timeout_s=0.05)
        assert len(started) == 1
        assert hung.is_busy
        assert await other.run(lambda: 2) == 2
        release.set()
        async with asyncio.timeout(30):
            assert await hung.run(lambda: "free again", timeout_s=5) == "free again"

    asyncio.run(story())


def test_what_a_call_raises_is_raised_in_the_loop() -> None:
    async def story() -> None:
        with pytest.raises(ZeroDivisionError):
            await blocking.Serial().run(lambda: 1 // 0, timeout_s=5)

    asyncio.run(story())


def test_while_a_repetition_hangs_the_latest_result_stands() -> None:
    async def story() -> None:
        latest, release = blocking.Latest("nothing yet"), threading.Event()

        def hang() -> str:
            assert release.wait(20)
            return "late"

        assert await latest.refresh(lambda: "first", timeout_s=5) == "first"
        assert await latest.refresh(hang, timeout_s=0.05) == "first"
        assert latest.is_hanging
        # the call is known to hang, so this returns at once
        assert await latest.refresh(lambda: "unread", timeout_s=1000) == "first"
        release.set()
        async with asyncio.timeout(30):
            while await latest.refresh(lambda: "again", timeout_s=5) != "again":
                await asyncio.sleep(0.001)
        assert not latest.is_hanging

    asyncio.run(story())


def test_a_repetition_that_fails_after_one_that_hung_no_longer_hangs() -> None:
    async def story() -> None:
        latest, release = blocking.Latest("nothing yet"), threading.Event()
        await latest.refresh(lambda: str(release.wait(20)), timeout_s=0.05)
        assert latest.is_hanging
        release.set()

        async def until_it_fails() -> None:
            async with asyncio.timeout(30):
                while True:
                    await latest.refresh(lambda: str(1 // 0), timeout_s=5)
                    await asyncio.sleep(0.001)

        with pytest.raises(ZeroDivisionError):
            await until_it_fails()
        assert not latest.is_hanging

    asyncio.run(story())
