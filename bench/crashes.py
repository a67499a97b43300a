"""Adapter for processes: kills services at random points, and counts losses and duplicates.

python -m bench.crashes [--of notifier|health] [--quick] [--json FILE]

The notifier sends to the stand-ins of six services at the same time (`tests.worlds.receivers`), so
each kill affects all of them. Health monitors plugins that follow a script
(`tests.worlds.scripted_health`), so the expected alerts are known.
"""

import argparse
import random
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Final

from bench import report
from tests.worlds import killed_services, receivers, scripted_health

_HEALTH_POINTS_S: Final = (0.0, 3.0)
"""The range of times from the start of the process to its kill.

It covers a process that starts, restores its state, waits for leadership, and leads.
"""


async def measure(options: report.Options, *, of: str) -> list[report.Row]:
    """Kill one of the services repeatedly; return the figures."""
    return await (_notifier(options) if of == "notifier" else _health(options))


async def _health(options: report.Options) -> list[report.Row]:
    """Kill health 200 times, or 10 times if quick."""
    chance = random.Random(1)  # noqa: S311  # not for cryptography
    points_s = [chance.uniform(*_HEALTH_POINTS_S) for _ in range(10 if options.quick else 200)]
    directory = Path(tempfile.mkdtemp(prefix="mu-"))
    for name in ("calm", "killed"):
        (directory / name).mkdir()
    try:
        calm = await scripted_health.run_with_crashes(
            directory / "calm", points_s=(), nodes=4, timeout_s=killed_services.END_S
        )
        killed = await scripted_health.run_with_crashes(
            directory / "killed", points_s=points_s, nodes=4, timeout_s=killed_services.END_S
        )
    finally:
        shutil.rmtree(directory)
    how = f"{len(points_s)} SIGKILLs at random points, {killed.alerts} alerts by a script"
    calmly = f"without a kill: {calm.lost} lost, {calm.unexpected} more"
    disorder = not (killed.in_order and killed.leaders_in_order)
    return [
        report.Row(name="alerts lost", value=killed.lost, unit="", target=0, how=how),
        report.Row(
            name="alerts published twice, or wrongly",
            value=killed.unexpected,
            unit="",
            target=0,
            how=calmly,
        ),
        report.Row(
            name="alerts out of order", value=disorder, unit="", target=0, how="of a node, a leader"
        ),
    ]


async def _notifier(options: report.Options) -> list[report.Row]:
    """Kill the notifier 500 times, or 20 times if quick."""
    kills = 20 if options.quick else 500
    directory = Path(tempfile.mkdtemp(prefix="mu-"))
    try:
        results = await killed_services.play(directory, kills=kills, seed=1)
    finally:
        shutil.rmtree(directory)
    return [row for way, result in results.items() for row in _rows(way, result)]


def _rows(way: str, result: killed_services.Result) -> list[report.Row]:
    how = f"{result.kills} SIGKILLs at random points, {result.messages} messages"
    lost = report.Row(
        name=f"{way}: notifications lost", value=result.lost, unit="", target=0, how=how
    )
    if way in receivers.IDEMPOTENT:
        how = f"{result.dropped} came again and changed nothing"
        name = f"{way}: notifications sent twice"
        return [lost, report.Row(name=name, value=result.again, unit="", target=0, how=how)]
    return [
        lost,
        report.Row(
            name=f"{way}: repeats of one kill",
            value=result.again_of_one_kill,
            unit="",
            target=1,
            how=f"the most; {result.again} in all, {result.again / result.kills:.3f} a kill",
        ),
    ]


def main() -> int:
    """Run the benchmark."""
    more = argparse.ArgumentParser(add_help=False)
    more.add_argument(
        "--of", default="notifier", choices=["notifier", "health"], help="the service to kill"
    )
    of = more.parse_known_args()[0].of
    return report.main("crashes", lambda options: measure(options, of=of), more=more)


if __name__ == "__main__":
    sys.exit(main())
