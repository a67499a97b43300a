"""Adapter: a virtual clock: false alarms of the real detector about plugins that are all well.

python -m bench.simulation [--quick | nodes days]
"""

import sys

from tests.worlds import healthy_fleet

_MODELS = (
    healthy_fleet.Model(),
    healthy_fleet.Model(loss=0.01),
    healthy_fleet.Model(pause_s=3.0),
)


def main(arguments: list[str]) -> int:
    """Print a result for each model of interest; 1 if there was an alert."""
    sizes = [argument for argument in arguments if argument != "--quick"]
    nodes = int(sizes[0]) if sizes else 1000
    days = float(sizes[1]) if len(sizes) > 1 else 1.0
    alerts = 0
    for model in _MODELS:
        result = healthy_fleet.simulate(nodes, days, model)
        alerts += len(result.alerts)
        print(f"{nodes} nodes, {days:g} days, {model}")
        print(
            f"  {len(result.alerts)} alerts; {result.gaps} gaps, {result.inputs} inputs, "
            f"{result.seconds:.1f} s"
        )
        print(f"  {dict(result.notes)}")
        print(f"  {dict(result.verdicts)}")
    return 1 if alerts else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
