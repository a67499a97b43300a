"""Kills the notifier at random points, and counts lost and repeated notifications."""

import asyncio
import itertools
import random
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tests.worlds import receivers, webhook_sink

_NODES: Final = 8
_POINTS_S: Final = (0.0, 0.9)
"""When it is killed, counted from its start; by then it reads, decides, sends or stores."""
END_S: Final = 30.0
_TIMES: Final = {"group_wait_s": 0, "group_interval_s": 0.05, "repeat_interval_s": 86_400}


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What one receiver got.

    `lost` counts the nodes whose final state it does not know, `again` the notifications that it
    showed again, and `dropped` the repeated ones that it dropped. `again_of_one_kill` is the
    largest number shown again in one run of the notifier.
    """

    kills: int
    messages: int
    lost: int
    again: int
    again_of_one_kill: int
    dropped: int


async def play(directory: Path, *, kills: int, seed: int) -> dict[str, Result]:
    """Kill the notifier `kills` times while alerts fire and resolve; return results by receiver."""
    chance = random.Random(seed)  # noqa: S311  # the points of death are no secret
    firing: set[int] = set()
    episodes: Counter[int] = Counter()
    lives: list[int] = []
    async with receivers.services() as receiving, webhook_sink.world(directory) as world:
        settings = {
            "receivers": receiving.receivers(directory / "secret"),
            "kubernetes": {"url": f"{receiving.url}/kubernetes"},
            **_TIMES,
        }
        for _ in range(kills):
            notifier = await world.start({}, **settings)
            lives.append(len(receiving.heard))
            end = asyncio.get_running_loop().time() + chance.uniform(*_POINTS_S)
            while (left := end - asyncio.get_running_loop().time()) > 0:
                number = chance.randrange(_NODES)
                firing ^= {number}
                episodes[number] += number in firing
                state = "firing" if number in firing else "resolved"
                await world.says(number, state, node=f"node-{number}", episode=episodes[number])
                await asyncio.sleep(min(left, chance.uniform(0, 0.1)))
            await notifier.kill()
        lives.append(len(receiving.heard))
        await world.start({}, **settings)

        def is_known(services: receivers.Services) -> bool:
            return not any(_lost(services, way, firing) for way in _ways())

        try:
            await receiving.wait_for(is_known, END_S)
            # repeated notifications arrive before the one about one more node
            firing.add(_NODES)
            await world.says(_NODES, "firing", node=f"node-{_NODES}", episode=1)
            await receiving.wait_for(is_known, END_S)
        except TimeoutError:
            pass  # what is lost is counted below
    return {
        way: _result(
            receiving, way, kills=kills, lives=lives, lost=len(_lost(receiving, way, firing))
        )
        for way in _ways()
    }


def _ways() -> Iterable[str]:
    return (*receivers.IDEMPOTENT, *receivers.REPEATING)


def _lost(receiving: receivers.Services, way: str, firing: set[int]) -> set[str]:
    """Return the nodes whose true state a service does not know."""
    believed = {node for node, fires in receiving.known(way).items() if fires}
    return believed ^ {f"node-{number}" for number in firing}


def _result(
    receiving: receivers.Services, way: str, *, kills: int, lives: Sequence[int], lost: int
) -> Result:
    seen: set[tuple[str, str, int, bool]] = set()
    messages = again = worst = dropped = 0
    for begin, end in itertools.pairwise((0, *lives, len(receiving.heard))):
        here = 0
        for message in receiving.heard[begin:end]:
            if message.way != way:
                continue
            messages += 1
            dropped += not message.is_effect
            if message.is_effect:
                here += message.news in seen
                seen.add(message.news)
        again += here
        worst = max(worst, here)
    return Result(
        kills=kills,
        messages=messages,
        lost=lost,
        again=again,
        again_of_one_kill=worst,
        dropped=dropped,
    )
