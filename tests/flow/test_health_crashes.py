"""Health is killed, stopped and continued, alone and with a second one: people notice nothing.

The plugins and their script are `tests.worlds.scripted_health`; NATS and health are real. Leases
are short, so that a take-over is quick.
"""

import asyncio
import random
import signal
import time
from pathlib import Path

from tests.worlds import scripted_health

_SEED = 5
_POINTS = 8
_TAKE_OVER_S = 6.0
_RIGHT = (0, 0, True, True)


def judged(found: scripted_health.Result) -> tuple[int, int, bool, bool]:
    return found.lost, found.strange, found.in_order, found.leaders_in_order


def test_kills_at_random_points_change_nothing_that_is_told(tmp_path: Path) -> None:
    chance = random.Random(_SEED)  # noqa: S311  # the points of death are no secret
    points_s = [chance.uniform(0.0, 2.2) for _ in range(_POINTS)]
    print("seed", _SEED, points_s)  # noqa: T201  # to play a failure again

    async def story() -> scripted_health.Result:
        async with asyncio.timeout(100):
            return await scripted_health.crashed(tmp_path, points_s=points_s, nodes=4, timeout_s=25)

    found = asyncio.run(story())
    assert judged(found) == _RIGHT
    assert found.alerts >= 16


async def leader_of(watchers: list[scripted_health.Watcher]) -> scripted_health.Watcher:
    while True:
        for watcher in watchers:
            if await watcher.leads():
                return watcher
        await asyncio.sleep(0.02)


def test_a_second_health_takes_over_from_one_that_is_killed_or_stopped_and_nothing_is_told_twice(
    tmp_path: Path,
) -> None:
    async def story() -> tuple[scripted_health.Result, list[float]]:
        taken_s = []
        async with asyncio.timeout(100), scripted_health.run(tmp_path, nodes=4) as script:
            watchers = [script.watcher(name, ttl_s=2) for name in ("one", "two")]
            await script.begin()
            try:
                for watcher in watchers:
                    await watcher.launch()
                for number in (signal.SIGKILL, signal.SIGSTOP):
                    first = await leader_of(watchers)
                    (second,) = {*watchers} - {first}
                    await script.goes_on(4)
                    began = time.monotonic()
                    first.send(number)
                    assert await leader_of([second]) is second
                    taken_s.append(time.monotonic() - began)
                    if number is signal.SIGKILL:
                        await first.end()
                        await first.launch()
                    await script.goes_on(4)
                first.send(signal.SIGCONT)
                await script.goes_on(8)
                assert not await first.leads()
                return await script.end(timeout_s=25), taken_s
            finally:
                for watcher in watchers:
                    await watcher.end(signal.SIGKILL)

    found, taken_s = asyncio.run(story())
    assert judged(found) == _RIGHT
    assert max(taken_s) < _TAKE_OVER_S
