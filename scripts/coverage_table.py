"""Adapter for coverage.py's JSON report: prints line and branch coverage by package.

coverage json -o build/coverage.json; python scripts/coverage_table.py build/coverage.json
"""

import collections
import json
import sys
from pathlib import Path, PurePath
from typing import Final

_KEYS: Final = ("num_statements", "covered_lines", "num_branches", "covered_branches")


def main(report: Path) -> int:
    """Print one line per package; return the exit code."""
    totals: collections.defaultdict[str, collections.Counter[str]]
    totals = collections.defaultdict(collections.Counter)
    for name, file in json.loads(report.read_text("utf-8"))["files"].items():
        for package in (_package(name), "all"):
            totals[package].update({key: file["summary"].get(key, 0) for key in _KEYS})
    width = max(map(len, totals))
    print(f"{'package':{width}}  lines  branches")
    for package in [*sorted(totals.keys() - {"all"}), "all"]:
        lines, covered_lines, branches, covered_branches = (totals[package][key] for key in _KEYS)
        print(
            f"{package:{width}}  {_percent(covered_lines, lines):>5}"
            f"  {_percent(covered_branches, branches):>8}"
        )
    return 0


def _package(name: str) -> str:
    parts = PurePath(name).parent.parts
    return ".".join(parts[2:] if parts[0] == "services" else parts)


def _percent(part: int, whole: int) -> str:
    return f"{100 * part / whole:.0f} %" if whole else "-"


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
