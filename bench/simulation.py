"""Adapter for a virtual clock: counts wrong and late verdicts of the detector.

For each model of `tests/worlds/plugin_gaps.py`, a day is simulated: healthy plugins lose
heartbeats, pause and are cut off at random, beside 100 failures of each kind. A wrong verdict
states a failure that does not exist at that moment, or a pause or cut of less than 20 s. Counted
separately: STUCK during a pause of less than 20 s that the kubelet confirms, and STUCK or
UNREACHABLE for longer gaps.

    python -m bench.simulation [--quick] [--nodes 1000] [--days 1] [--json FILE]
"""

import argparse
import sys
from collections import Counter

from bench import report
from muster.vocabulary import Verdict
from tests.worlds import healthy_fleet, plugin_gaps

_FAILURES = 100
_NODES = 1000


async def measure(
    options: report.Options, *, nodes: int = _NODES, days: float = 1.0
) -> list[report.Row]:
    """Simulate each model; return the figures."""
    days = 0.1 if options.quick else days
    return [row for model in plugin_gaps.MODELS for row in _rows(model, nodes, days)]


def _rows(model: plugin_gaps.Model, nodes: int, days: float) -> list[report.Row]:
    result = healthy_fleet.simulate(nodes, days, model, failures=_FAILURES)
    name = f"loss {model.loss:.1%}, pauses {model.pause_s:g} s"
    how = f"{nodes:,} plugins that are well, {days:g} days; {result.gaps} gaps"
    short_lived = Counter[str]()
    for verdict, count in result.short_lived.items():
        short_lived[verdict.partition(" ")[0]] += count
    rows: list[report.Row] = []
    for kind, delays_s in result.delays.items():
        failed = f"{_FAILURES} failures beside them, to the right verdict"
        rows += report.spread(f"{name}: {kind}", delays_s, "s", how=failed)
    counts = (
        ("wrong verdicts a day", result.wrong.total() / days, 1.0, _most(result.wrong)),
        ("misnamed failures", result.misnamed.total(), 0.0, _most(result.misnamed)),
        ("alerts", len(result.alerts), 0.0, how),
        ("STUCK, pause < 20 s that goes on", result.standing.total() / days, None, "a day"),
        ("STUCK, pause >= 20 s", short_lived[Verdict.STUCK] / days, None, "a day"),
        ("UNREACHABLE, cut >= 20 s", short_lived[Verdict.UNREACHABLE] / days, None, "a day"),
    )
    return rows + [
        report.row(f"{name}: {what}", value, "", target=target, how=explained or how)
        for what, value, target, explained in counts
    ]


def _most(counts: Counter[str]) -> str:
    return "; ".join(f"{count} x {name}" for name, count in counts.most_common(3))


def main() -> int:
    """Run the benchmark from the command line."""
    more = argparse.ArgumentParser(add_help=False)
    more.add_argument("--nodes", type=int, default=_NODES, help="healthy plugins")
    more.add_argument("--days", type=float, default=1.0, help="simulated days for each model")
    chosen = more.parse_known_args()[0]
    return report.main(
        "simulation",
        lambda options: measure(options, nodes=chosen.nodes, days=chosen.days),
        more=more,
    )


if __name__ == "__main__":
    sys.exit(main())
