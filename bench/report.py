"""Adapter for stdout and files: writes the table and the JSON file of every benchmark.

The contract: `python -m bench.<name> [--quick] [--json FILE]`; `--quick` ends within 60 s; exit
code 0 even if a target is missed, because the table shows it, and 1 only if the benchmark itself
failed. The JSON is `{"bench", "machine", "rows", "series"}`.

Every sample counts: a missing reaction counts with the full waiting time. Fewer than 100 samples
have no 99th percentile; their maximum is shown instead. Beside a figure is its floor, the cost of
doing nothing on this machine: an interpreter that only starts, an empty call.
"""

import argparse
import asyncio
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Final

import orjson

_CPU: Final = Path("/proc/cpuinfo")
_MEMORY: Final = Path("/proc/meminfo")
_LOAD: Final = Path("/proc/loadavg")
_ENOUGH_FOR_P99: Final = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One figure.

    `target` is its maximum (None: no target); `how` describes the measurement. `floor` is the cost
    of doing nothing on this machine, in the same unit (None: not measured). `never` is the value
    of a missing reaction (None: no reaction is missing, or there is no such value).
    """

    name: str
    value: float
    unit: str
    target: float | None
    how: str
    floor: float | None = None
    never: float | None = None

    @property
    def ok(self) -> bool:
        """Whether the figure meets its target."""
        return self.target is None or self.value <= self.target

    @property
    def ratio(self) -> float | None:
        """The figure as a multiple of its floor."""
        return self.value / self.floor if self.floor else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The options of the command line."""

    quick: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """The result of a benchmark.

    `series` are for plots: samples by name, or points (x, y) by name.
    """

    rows: list[Row]
    series: Mapping[str, Sequence[float] | Sequence[tuple[float, float]]] = field(
        default_factory=dict
    )


Measure = Callable[[Options], Coroutine[None, None, "list[Row] | Result"]]


def main(bench: str, measure: Measure, *, more: argparse.ArgumentParser | None = None) -> int:
    """Run a benchmark from its command line; return the exit code.

    The caller has parsed the options in `more`; here they are only accepted, and shown in the help.
    """
    parser = argparse.ArgumentParser(
        prog=f"python -m bench.{bench}", parents=[more] if more else []
    )
    parser.add_argument("--quick", action="store_true", help="end within 60 s")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there too")
    options = parser.parse_args()
    started = time.monotonic()
    measured = asyncio.run(measure(Options(quick=options.quick)))
    result = measured if isinstance(measured, Result) else Result(rows=measured)
    print(text(bench, result.rows))
    print(f"{time.monotonic() - started:.1f} s")
    if options.json:
        options.json.write_bytes(document(bench, result))
    return 0


def spread(
    name: str,
    samples: Sequence[float],
    unit: str,
    *,
    how: str,
    target: float | None = None,
    median_target: float | None = None,
    floor: float | None = None,
    never: float | None = None,
) -> list[Row]:
    """Return the median, and the 99th percentile or the maximum; `target` is for the latter."""
    if not samples:
        return [Row(name=f"{name}: no sample", value=1, unit="", target=0, how=how)]
    if never is not None and max(samples) >= never:
        how = f"{how}; never counts as {never:g} {unit}"
    is_many = len(samples) >= _ENOUGH_FOR_P99
    worst = percentile(samples, 99) if is_many else max(samples)
    return [
        row(
            f"{name}, p50",
            statistics.median(samples),
            unit,
            target=median_target,
            how=how,
            floor=floor,
            never=never,
        ),
        row(
            f"{name}, {'p99' if is_many else 'max'}",
            worst,
            unit,
            target=target,
            how=how,
            never=never,
        ),
    ]


def row(
    name: str,
    value: float,
    unit: str,
    *,
    target: float | None = None,
    how: str,
    floor: float | None = None,
    never: float | None = None,
) -> Row:
    """Return a figure, rounded to four decimal places."""
    return Row(
        name=name,
        value=round(value, 4),
        unit=unit,
        target=target,
        how=how,
        floor=floor,
        never=never,
    )


def text(bench: str, rows: Sequence[Row]) -> str:
    """Return the figures as a table for people."""
    lines = [("figure", "value", "x floor", "target", "", "how")]
    lines += [(*cells(row), row.how) for row in rows]
    widths = [max(len(line[column]) for line in lines) for column in range(5)]
    heading = [f"bench.{bench} on {machine()['cpu']}, Python {machine()['python']}"]
    for line in lines:
        padded = [cell.ljust(width) for cell, width in zip(line, widths, strict=False)]
        heading.append("  ".join([*padded, line[5]]).rstrip())
    return "\n".join(heading)


def cells(row: Row) -> tuple[str, str, str, str, str]:
    """Return name, value, ratio to the floor, target and whether it was met, as texts."""
    ratio = "" if row.ratio is None else f"{row.ratio:.3g}"
    target = "" if row.target is None else f"<= {row.target:g}"
    verdict = "" if row.target is None else "ok" if row.ok else "MISSED"
    value = f"{row.value:.4g} {row.unit}".rstrip()
    if row.never is not None and row.value >= row.never:
        value = f"never (within {row.never:g} {row.unit})"
    return (row.name, value, ratio, target, verdict)


def times(count: int) -> str:
    """Return a number of repetitions as text: `once`, `3 times`."""
    return "once" if count == 1 else f"{count} times"


def document(bench: str, result: Result) -> bytes:
    """Return the result as JSON, for programs."""
    return orjson.dumps(
        {
            "bench": bench,
            "machine": machine(),
            "rows": [asdict(row) | {"ok": row.ok} for row in result.rows],
            "series": result.series,
        },
        option=orjson.OPT_INDENT_2,
    )


def machine() -> dict[str, str | int | float]:
    """Return a description of this machine."""
    models = [line for line in _CPU.read_text().splitlines() if line.startswith("model name")]
    return {
        "cpu": models[0].partition(":")[2].strip() if models else platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_mib": int(_MEMORY.read_text().split()[1]) // 1024,
        "kernel": platform.release(),
        "python": platform.python_version(),
        "load_1m": float(_LOAD.read_text().split()[0]),
        "bytecode": "not written" if sys.dont_write_bytecode else "compiled",
    }


def percentile(values: Sequence[float], share: int) -> float:
    """Return the value that `share` percent of the values do not exceed."""
    if len(values) == 1:
        return values[0]
    return statistics.quantiles(values, n=100, method="inclusive")[share - 1]
