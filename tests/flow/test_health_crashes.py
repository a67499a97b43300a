"""Health is killed, stopped and continued, with one or two replicas: no alert is affected.

The plugins and their script are `tests.worlds.scripted_health`; NATS and health are real. Leases
are short, so that a take-over is quick.
"""

import asyncio
import random
import signal
from pathlib import Path

from tests.worlds import scripted_health

_SEED = 5
_POINTS = 8
_RIGHT = (0, 0, True, True)


def summary(result: scripted_health.Result) -> tuple[int, int, bool, bool]:
    return result.lost, result.unexpected, result.in_order, result.leaders_in_order


def test_kills_at_random_points_change_nothing_that_is_published(tmp_path: Path) -> None:
    chance = random.Random(_SEED)  # noqa: S311  # not for cryptography
    points_s = [chance.uniform(0.0, 2.2) for _ in range(_POINTS)]
    print("seed", _SEED, points_s)  # noqa: T201  # to repeat a failure

    async def story() -> scripted_health.Result:
        async with asyncio.timeout(100):
            return await scripted_health.run_with_crashes(
                tmp_path, points_s=points_s, nodes=4, timeout_s=25
            )

    result = asyncio.run(story())
    assert summary(result) == _RIGHT
    assert result.alerts >= 16


async def leader_of(services: list[scripted_health.HealthService]) -> scripted_health.HealthService:
    while True:
        for service in services:
            if await service.is_leader():
                return service
        await asyncio.sleep(0.02)


def test_a_second_health_takes_over_from_a_killed_or_stopped_one_and_repeats_no_alert(
    tmp_path: Path,
) -> None:
    async def story() -> scripted_health.Result:
        async with asyncio.timeout(100), scripted_health.run(tmp_path, nodes=4) as script:
            services = [script.health(name, ttl_s=2) for name in ("one", "two")]
            await script.begin()
            try:
                for service in services:
                    await service.launch()
                for number in (signal.SIGKILL, signal.SIGSTOP):
                    first = await leader_of(services)
                    (second,) = {*services} - {first}
                    await script.wait_for_alerts(4)
                    first.send(number)
                    assert await leader_of([second]) is second
                    if number is signal.SIGKILL:
                        await first.end()
                        await first.launch()
                    await script.wait_for_alerts(4)
                first.send(signal.SIGCONT)
                await script.wait_for_alerts(8)
                assert not await first.is_leader()
                return await script.end(timeout_s=25)
            finally:
                for service in services:
                    await service.end(signal.SIGKILL)

    assert summary(asyncio.run(story())) == _RIGHT
