"""Adapter for the command `muster demo`: measures the duration of each step of its scenario.

python -m bench.demo [--quick] [--json FILE]
"""

import asyncio
import statistics
import sys

import msgspec

from bench import report
from muster.cli import demo

_DEMO_MAX_S = 60.0


async def measure(options: report.Options) -> list[report.Row]:
    """Run the scenario once, or three times, and return its figures."""
    runs = [await _play() for _ in range(1 if options.quick else 3)]
    how = f"median of {len(runs)} runs of `muster demo --json`; heartbeats every second"
    rows = [
        report.Row(
            name="muster demo, whole",
            value=statistics.median(played.seconds for played in runs),
            unit="s",
            target=_DEMO_MAX_S,
            how=how,
        )
    ]
    rows.extend(
        report.Row(
            name=step.name,
            value=statistics.median(played.steps[index].seconds for played in runs),
            unit="s",
            target=None,
            how=step.detail,
        )
        for index, step in enumerate(runs[-1].steps)
    )
    return rows


async def _play() -> demo.Report:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "muster.cli", "demo", "--json", stdout=asyncio.subprocess.PIPE
    )
    text, _ = await process.communicate()
    if process.returncode != 0:
        raise RuntimeError(f"the scenario failed: {text.decode()}")
    return msgspec.json.decode(text, type=demo.Report)


if __name__ == "__main__":
    sys.exit(report.main("demo", measure))
