"""Door to whoever reads a benchmark: one table on stdout, one JSON file, the same for all.

The contract: `python -m bench.<name> [--quick] [--json FILE]`; `--quick` ends within 60 s; exit
code 0 even when a target is missed, because the table says so, and 1 only when the benchmark
itself failed. The JSON is `{"bench", "machine", "rows"}`, each row
`{"name", "value", "unit", "target", "ok", "how"}`.
"""

import argparse
import asyncio
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

import orjson

_CPU: Final = Path("/proc/cpuinfo")
_MEMORY: Final = Path("/proc/meminfo")
_LOAD: Final = Path("/proc/loadavg")


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One figure. `target` is the most it may be (None: no target); `how` it was measured."""

    name: str
    value: float
    unit: str
    target: float | None
    how: str

    @property
    def ok(self) -> bool:
        """Whether the figure keeps its target."""
        return self.target is None or self.value <= self.target


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What the command line said."""

    quick: bool


def main(
    bench: str,
    measure: Callable[[Options], Coroutine[None, None, list[Row]]],
    *,
    more: argparse.ArgumentParser | None = None,
) -> int:
    """Run a benchmark from its command line; return the exit code.

    What `more` takes, it has taken already; here it is only allowed, and shown in the help.
    """
    parser = argparse.ArgumentParser(
        prog=f"python -m bench.{bench}", parents=[more] if more else []
    )
    parser.add_argument("--quick", action="store_true", help="end within 60 s")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there too")
    chosen = parser.parse_args()
    started = time.monotonic()
    rows = asyncio.run(measure(Options(quick=chosen.quick)))
    print(text(bench, rows))
    print(f"{time.monotonic() - started:.1f} s")
    if chosen.json:
        chosen.json.write_bytes(document(bench, rows))
    return 0


def text(bench: str, rows: Sequence[Row]) -> str:
    """Return the figures for people."""
    lines = [("figure", "value", "target", "", "how")]
    for row in rows:
        target = "" if row.target is None else f"<= {row.target:g}"
        verdict = "" if row.target is None else "ok" if row.ok else "MISSED"
        lines.append((row.name, f"{row.value:.4g} {row.unit}", target, verdict, row.how))
    widths = [max(len(line[column]) for line in lines) for column in range(4)]
    text = [f"bench.{bench} on {machine()['cpu']}, Python {machine()['python']}"]
    for line in lines:
        cells = [cell.ljust(width) for cell, width in zip(line, widths, strict=False)]
        text.append("  ".join([*cells, line[4]]).rstrip())
    return "\n".join(text)


def document(bench: str, rows: Sequence[Row]) -> bytes:
    """Return the figures for programs, as JSON."""
    return orjson.dumps(
        {
            "bench": bench,
            "machine": machine(),
            "rows": [asdict(row) | {"ok": row.ok} for row in rows],
        },
        option=orjson.OPT_INDENT_2,
    )


def machine() -> dict[str, str | int | float]:
    """Say what it was measured on."""
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
