"""A notifier that is killed repeatedly loses no notification, and each kill repeats at most one."""

import asyncio
from pathlib import Path

from tests.worlds import killed_services, receivers


def test_kills_at_random_points_lose_nothing_and_show_at_most_one_repeat_each(
    tmp_path: Path,
) -> None:
    async def story() -> dict[str, killed_services.Result]:
        async with asyncio.timeout(100):
            return await killed_services.play(tmp_path, kills=5, seed=7)

    results = asyncio.run(story())
    for way, result in results.items():
        print(way, result)  # noqa: T201  # the counts are part of the answer
    assert {way: result.lost for way, result in results.items()} == dict.fromkeys(results, 0)
    assert {way: results[way].again for way in receivers.IDEMPOTENT} == dict.fromkeys(
        receivers.IDEMPOTENT, 0
    )
    assert all(results[way].again_of_one_kill <= 1 for way in receivers.REPEATING)
    assert all(result.messages for result in results.values())
