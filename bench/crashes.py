"""Door to a notifier that is killed at random points: what is lost, and what is told twice.

python -m bench.crashes [--quick] [--json FILE]
"""

import asyncio
import itertools
import random
import shutil
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from bench import sink, table

_NODES: Final = 8
_POINTS_S: Final = (0.0, 0.9)
"""From the start of the process: reading, deciding, sending and remembering lie in between."""


@dataclass(frozen=True, slots=True)
class Result:
    """What became of it. `repeats` came under a key that was there; `doubles` under another."""

    kills: int
    news: int
    messages: int
    lost: int
    repeats: int
    repeats_of_one_kill: int
    doubles: int


async def measure(options: table.Options) -> list[table.Row]:
    """Kill it 20 times, or 500."""
    kills = 20 if options.quick else 500
    directory = Path(tempfile.mkdtemp(prefix="mu-"))
    try:
        found = await play(directory, kills=kills, seed=1)
    finally:
        shutil.rmtree(directory)
    how = f"{found.kills} SIGKILLs at random points, {found.messages} messages"
    return [
        table.Row(name="news lost", value=found.lost, unit="", target=0, how=how),
        table.Row(
            name="news told twice to who drops repeats",
            value=found.doubles,
            unit="",
            target=0,
            how="the same about a group, twice in a row under different keys",
        ),
        table.Row(
            name="repeats a kill to who does not",
            value=found.repeats / found.kills,
            unit="",
            target=1,
            how=f"{found.repeats} came again under their key; at most "
            f"{found.repeats_of_one_kill} in one life",
        ),
    ]


async def play(directory: Path, *, kills: int, seed: int) -> Result:
    """Kill the notifier again and again while alerts come and go; then look at what was told."""
    chance = random.Random(seed)  # noqa: S311  # the points of death are no secret
    firing: set[int] = set()
    lives: list[int] = []
    news = 0
    times = {"group_wait_s": 0, "group_interval_s": 0.05, "repeat_interval_s": 86_400}
    async with sink.sink() as found, sink.world(directory) as world:
        began: dict[int, int] = {}
        for _ in range(kills):
            notifier = await world.start({"hook": found}, **times)
            lives.append(len(found.taken))
            end = asyncio.get_running_loop().time() + chance.uniform(*_POINTS_S)
            while (left := end - asyncio.get_running_loop().time()) > 0:
                number = chance.randrange(_NODES)
                firing ^= {number}
                state = "firing" if number in firing else "resolved"
                news += 1
                if number in firing:
                    began[number] = 2 * news
                await world.says(number, state, node=f"node-{number}", episode=began[number])
                await asyncio.sleep(min(left, chance.uniform(0, 0.1)))
            await notifier.kill()
        lives.append(len(found.taken))
        await world.start({"hook": found}, **times)
        expected = {f'{{}}:{{kind="stuck",node="node-{n}"}}': n for n in range(_NODES)}

        def is_known(taken: list[sink.Taken]) -> bool:
            last = {one.group: one.firing for one in taken}
            return all(
                bool(last.get(group)) == (number in firing) for group, number in expected.items()
            )

        lost = 0
        try:
            await found.wait_for(is_known, 20.0)
            # what is told once more would come within the interval
            await asyncio.sleep(1.0)
        except TimeoutError:
            last = {one.group: one.firing for one in found.taken}
            lost = sum(
                bool(last.get(group)) != (number in firing) for group, number in expected.items()
            )
    return _result(found.taken, kills=kills, news=news, lost=lost, lives=lives)


def _result(
    taken: list[sink.Taken], *, kills: int, news: int, lost: int, lives: list[int]
) -> Result:
    keys = Counter(one.key for one in taken)
    repeats = sum(count - 1 for count in keys.values())
    doubles = 0
    before: dict[str, sink.Taken] = {}
    first: set[str] = set()
    for one in taken:
        last = before.get(one.group)
        is_new = one.key not in first
        if is_new and last is not None and (last.firing, last.reason) == (one.firing, one.reason):
            doubles += last.reason != "first" or not one.firing
        first.add(one.key)
        before[one.group] = one
    seen: set[str] = set()
    worst = 0
    bounds = [*lives, len(taken)]
    for begin, end in itertools.pairwise(bounds):
        again = sum(one.key in seen for one in taken[begin:end])
        worst = max(worst, again)
        seen |= {one.key for one in taken[begin:end]}
    return Result(kills, news, len(taken), lost, repeats, worst, doubles)


if __name__ == "__main__":
    sys.exit(table.main("crashes", measure))
