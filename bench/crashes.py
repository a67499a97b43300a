"""Door to services that are killed at random points: what is lost, and what is told twice.

python -m bench.crashes [--of notifier|health] [--quick] [--json FILE]

The notifier tells the stand-ins of six services at once (`bench.services`), so each kill hits all
of them. Health watches plugins that go through a script (`bench.scripted`), so it is known what had
to be told.
"""

import argparse
import asyncio
import itertools
import random
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from bench import scripted, services, sink, table

_NODES: Final = 8
_POINTS_S: Final = (0.0, 0.9)
"""From the start of the process: reading, deciding, sending and remembering lie in between."""
_HEALTH_POINTS_S: Final = (0.0, 3.0)
"""The same for health: starting, restoring, waiting for the lead of the killed one, leading."""
_END_S: Final = 30.0
_TIMES: Final = {"group_wait_s": 0, "group_interval_s": 0.05, "repeat_interval_s": 86_400}


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What became of one receiver's news: lost at the end, shown twice, or repeated and dropped.

    `again_of_one_kill` is the most that was shown twice in one life of the notifier.
    """

    kills: int
    messages: int
    lost: int
    again: int
    again_of_one_kill: int
    dropped: int


async def measure(options: table.Options, *, of: str) -> list[table.Row]:
    """Kill one of them again and again."""
    return await (_notifier(options) if of == "notifier" else _health(options))


async def _health(options: table.Options) -> list[table.Row]:
    """Kill it 10 times, or 200."""
    chance = random.Random(1)  # noqa: S311  # the points of death are no secret
    points_s = [chance.uniform(*_HEALTH_POINTS_S) for _ in range(10 if options.quick else 200)]
    directory = Path(tempfile.mkdtemp(prefix="mu-"))
    for name in ("calm", "killed"):
        (directory / name).mkdir()
    try:
        calm = await scripted.crashed(directory / "calm", points_s=(), nodes=4, timeout_s=_END_S)
        found = await scripted.crashed(
            directory / "killed", points_s=points_s, nodes=4, timeout_s=_END_S
        )
    finally:
        shutil.rmtree(directory)
    how = f"{len(points_s)} SIGKILLs at random points, {found.alerts} alerts by a script"
    calmly = f"without a kill: {calm.lost} lost, {calm.strange} more"
    disorder = not (found.in_order and found.leaders_in_order)
    return [
        table.Row(name="alerts lost", value=found.lost, unit="", target=0, how=how),
        table.Row(
            name="alerts told twice, or wrongly",
            value=found.strange,
            unit="",
            target=0,
            how=calmly,
        ),
        table.Row(
            name="alerts out of order", value=disorder, unit="", target=0, how="of a node, a leader"
        ),
    ]


async def _notifier(options: table.Options) -> list[table.Row]:
    """Kill it 20 times, or 500."""
    kills = 20 if options.quick else 500
    directory = Path(tempfile.mkdtemp(prefix="mu-"))
    try:
        found = await play(directory, kills=kills, seed=1)
    finally:
        shutil.rmtree(directory)
    return [row for way, result in found.items() for row in _rows(way, result)]


def _rows(way: str, found: Result) -> list[table.Row]:
    how = f"{found.kills} SIGKILLs at random points, {found.messages} messages"
    lost = table.Row(name=f"{way}: news lost", value=found.lost, unit="", target=0, how=how)
    if way in services.IDEMPOTENT:
        how = f"{found.dropped} came again and changed nothing"
        name = f"{way}: news told twice"
        return [lost, table.Row(name=name, value=found.again, unit="", target=0, how=how)]
    return [
        lost,
        table.Row(
            name=f"{way}: repeats of one kill",
            value=found.again_of_one_kill,
            unit="",
            target=1,
            how=f"the most; {found.again} in all, {found.again / found.kills:.3f} a kill",
        ),
    ]


async def play(directory: Path, *, kills: int, seed: int) -> dict[str, Result]:
    """Kill the notifier again and again while alerts come and go; then look at what was told."""
    chance = random.Random(seed)  # noqa: S311  # the points of death are no secret
    firing: set[int] = set()
    episodes: Counter[int] = Counter()
    lives: list[int] = []
    async with services.services() as told, sink.world(directory) as world:
        settings = {
            "receivers": told.receivers(directory / "secret"),
            "kubernetes": {"url": f"{told.url}/kubernetes"},
            **_TIMES,
        }
        for _ in range(kills):
            notifier = await world.start({}, **settings)
            lives.append(len(told.heard))
            end = asyncio.get_running_loop().time() + chance.uniform(*_POINTS_S)
            while (left := end - asyncio.get_running_loop().time()) > 0:
                number = chance.randrange(_NODES)
                firing ^= {number}
                episodes[number] += number in firing
                state = "firing" if number in firing else "resolved"
                await world.says(number, state, node=f"node-{number}", episode=episodes[number])
                await asyncio.sleep(min(left, chance.uniform(0, 0.1)))
            await notifier.kill()
        lives.append(len(told.heard))
        await world.start({}, **settings)

        def is_known(found: services.Services) -> bool:
            return not any(_lost(found, way, firing) for way in _ways())

        try:
            await told.wait_for(is_known, _END_S)
            # what is told once more would come within the interval
            await asyncio.sleep(1.0)
        except TimeoutError:
            pass  # what is lost is counted below
    return {
        way: _result(told, way, kills=kills, lives=lives, lost=len(_lost(told, way, firing)))
        for way in _ways()
    }


def _ways() -> Iterable[str]:
    return (*services.IDEMPOTENT, *services.REPEATING)


def _lost(told: services.Services, way: str, firing: set[int]) -> set[str]:
    """Return the nodes of which a service does not know what is true."""
    believed = {node for node, fires in told.known(way).items() if fires}
    return believed ^ {f"node-{number}" for number in firing}


def _result(
    told: services.Services, way: str, *, kills: int, lives: Sequence[int], lost: int
) -> Result:
    seen: set[tuple[str, str, int, bool]] = set()
    messages = again = worst = dropped = 0
    for begin, end in itertools.pairwise((0, *lives, len(told.heard))):
        here = 0
        for one in told.heard[begin:end]:
            if one.way != way:
                continue
            messages += 1
            dropped += not one.is_effect
            if one.is_effect:
                here += one.news in seen
                seen.add(one.news)
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


def main() -> int:
    """Run it."""
    more = argparse.ArgumentParser(add_help=False)
    more.add_argument("--of", default="notifier", choices=["notifier", "health"], help="who dies")
    of = more.parse_known_args()[0].of
    return table.main("crashes", lambda options: measure(options, of=of), more=more)


if __name__ == "__main__":
    sys.exit(main())
