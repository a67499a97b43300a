"""Adapter: a virtual clock: wrong and late verdicts of the real detector, a day for each model.

python -m bench.simulation [--quick | nodes days]
"""

import statistics
import sys
from collections import Counter

from muster.vocabulary import Verdict
from tests.worlds import healthy_fleet, plugin_gaps


def table(nodes: int, days: float, failures: int) -> tuple[list[str], int]:
    """Return delays and wrong verdicts side by side, a line for each model; how many alerts."""
    columns = [f"{kind} p50/max s" for kind in plugin_gaps.RIGHT_VERDICT]
    counted = ["wrong", "standing", "STUCK", "UNREACHABLE", "misnamed"]
    lines = [" | ".join(["model", *columns, *counted])]
    alerts = 0
    for model in plugin_gaps.MODELS:
        result = healthy_fleet.simulate(nodes, days, model, failures=failures)
        alerts += len(result.alerts)
        lived = Counter[str]()
        for name, many in result.short_lived.items():
            lived[name.partition(" ")[0]] += many
        cells = [
            f"loss {model.loss:.1%}, pauses {model.pause_s:g} s",
            *(_delay(seconds) for seconds in result.delays.values()),
            f"{result.wrong.total()}",
            f"{result.standing.total()}",
            f"{lived[Verdict.STUCK]}",
            f"{lived[Verdict.UNREACHABLE]}",
            f"{result.misnamed.total()}",
        ]
        lines.append(" | ".join(cells))
        lines += [f"    wrong {name}: {many}" for name, many in result.wrong.most_common()]
        lines += [f"    standing {name}: {many}" for name, many in result.standing.most_common()]
        lines += [f"    misnamed {name}: {many}" for name, many in result.misnamed.most_common()]
        lines.append(
            f"    {len(result.alerts)} alerts; {result.gaps} gaps, {result.inputs} inputs, "
            f"{result.seconds:.1f} s; {dict(result.notes)}"
        )
    return lines, alerts


def _delay(seconds: list[float]) -> str:
    return f"{statistics.median(seconds):.1f}/{max(seconds):.1f}" if seconds else "never"


def main(arguments: list[str]) -> int:
    """Print a result for each model of interest; 1 if there was an alert."""
    arguments = [given for given in arguments if given != "--quick"]
    nodes = int(arguments[0]) if arguments else 1000
    days = float(arguments[1]) if len(arguments) > 1 else 1.0
    lines, alerts = table(nodes, days, failures=100)
    print(f"{nodes} plugins that are well, {days:g} days; 100 of each failure beside them")
    print("\n".join(lines))
    return 1 if alerts else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
