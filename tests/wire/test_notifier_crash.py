"""A notifier that is killed again and again loses nothing, and tells nothing twice."""

import asyncio
from pathlib import Path

from bench import crashes


def test_kills_at_random_points_lose_nothing_and_repeat_only_under_the_same_key(
    tmp_path: Path,
) -> None:
    async def story() -> crashes.Result:
        async with asyncio.timeout(50):
            return await crashes.play(tmp_path, kills=5, seed=7)

    found = asyncio.run(story())
    print(found)  # noqa: T201  # the count is part of the answer
    assert (found.kills, found.lost, found.doubles) == (5, 0, 0)
    assert found.repeats_of_one_kill <= 4, "of one life, one for each message that was on its way"
