"""Adapter for files: runs every benchmark, and writes docs/performance.md with tables and plots.

python -m bench [--only NAME,NAME]

The figures of each benchmark are stored in build/bench, so that a single benchmark can be run
again. A benchmark without stored figures keeps its section of the page. All of them take more than
an hour on two cores. The plots need matplotlib (extra `bench`).
"""

import argparse
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import orjson

from bench import plots, report
from scripts.cluster import node
from tests.worlds import fuse_pods

_ROOT: Final = Path(__file__).resolve().parent.parent
_KEPT: Final = _ROOT / "build" / "bench"
_PAGE: Final = _ROOT / "docs" / "performance.md"
_PLOTS: Final = _ROOT / "docs" / "performance"
_RUNS: Final = {
    "plugin": ("--quick",),
    "gpu": ("--quick",),
    "peers": ("--quick",),
    "watch": ("--times", "20"),
    "placement": (),
    "detection": ("--times", "10", "--minutes", "4"),
    "cluster": ("--times", "10"),
    "simulation": (),
    "health": ("--only", "curve,storm", "--seconds", "15"),
    "hostile": ("--seconds", "20"),
    "crashes": ("--quick",),
    "notifier": ("--quick",),
    "labeler": ("--quick",),
    "fuse": (),
    "scale": (),
    "top": ("--quick",),
    "console": ("--quick",),
    "demo": ("--quick",),
}
"""The benchmarks of `make bench` with their options, in the order of the page."""
_SUBJECTS: Final = {
    "plugin": "The plugin: start, cost, recovery",
    "gpu": "The plugin with eight GPUs (a stand-in for NVML)",
    "peers": "Other device plugins beside ours",
    "watch": "An agent that only watches other plugins",
    "placement": "Preferred allocation of 16 GPUs",
    "detection": "From a fault to its verdict",
    "cluster": "Faults on a real cluster",
    "simulation": "Wrong verdicts and delays, simulated",
    "health": "Health under load",
    "hostile": "One hostile node beside many honest ones",
    "crashes": "Nothing lost or repeated when services are killed",
    "notifier": "The notifier",
    "labeler": "The labeler and its commands",
    "fuse": "FUSE mounts in pods",
    "scale": "2,000 nodes and 10,000 pods on a real API server, beside the stand-in",
    "top": "`muster top` with 10,000 nodes",
    "console": "The console with 10,000 nodes",
    "demo": "`muster demo`",
}
_HEAD: Final = """# Performance

Made by `make bench`; do not edit. Real: plugins, health, labeler, notifier, nats-server, each a
process of its own. Simulated, unless a section names a real cluster: kubelets, the Kubernetes API,
GPUs and, where a table says so, the plugins behind connections. The machines are shared and noisy:
read the ratio to the floor, which was measured beside the figure and is what the machine takes for
nothing. Every sample counts; what did not happen counts as the longest wait, or is counted.
"""


def main() -> int:
    """Run the benchmarks and write the page; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m bench")
    parser.add_argument(
        "--only", default=",".join(_RUNS), help="run these, keep the sections of all others"
    )
    chosen = parser.parse_args().only.split(",")
    unknown = sorted(set(chosen) - _RUNS.keys() - {""})
    if unknown:
        parser.error(f"no benchmark {', '.join(unknown)}; there are {', '.join(_RUNS)}")
    _KEPT.mkdir(parents=True, exist_ok=True)
    for name in _RUNS:
        if name in chosen and (missing := _missing(name)):
            print(f"==> bench.{name}: not run: {missing}", flush=True)
        elif name in chosen:
            print(f"==> bench.{name} {' '.join(_RUNS[name])}", flush=True)
            command = (*(sys.executable, "-m", f"bench.{name}"), *_RUNS[name])
            subprocess.run([*command, "--json", str(_KEPT / f"{name}.json")], check=True)  # noqa: S603
    kept = {name: _KEPT / f"{name}.json" for name in _RUNS if (_KEPT / f"{name}.json").exists()}
    results = {name: orjson.loads(file.read_bytes()) for name, file in kept.items()}
    _PLOTS.mkdir(exist_ok=True)
    drawn = plots.draw(results, _PLOTS)
    before = _sections(_PAGE.read_text("utf-8")) if _PAGE.exists() else {}
    _PAGE.write_text("\n".join(_page(results, drawn, before)), "utf-8")
    print(f"wrote {_PAGE.relative_to(_ROOT)}")
    return 0


def _missing(name: str) -> str:
    """Return why a benchmark cannot run here, or an empty text."""
    if name == "cluster" and node.first() is None:
        return "no cluster runs (make cluster)"
    return fuse_pods.missing() if name == "fuse" else ""


def _sections(page: str) -> dict[str, str]:
    """Return the text of each section of the page, by its subject."""
    parts = (part.partition("\n\n") for part in page.split("\n## ")[1:])
    return {subject: text.rstrip("\n") for subject, _, text in parts}


def _page(
    results: dict[str, Any], drawn: dict[str, list[tuple[str, str]]], before: dict[str, str]
) -> Iterator[str]:
    """Yield the page: new sections for `results`, and the previous ones, `before`, for others."""
    yield _HEAD
    for name, subject in _SUBJECTS.items():
        if name not in results and subject in before:
            yield f"## {subject}\n\n{before[subject]}\n"
        if name not in results:
            continue
        result = results[name]
        yield f"## {subject}\n"
        command = " ".join(("python -m", f"bench.{name}", *_RUNS[name]))
        yield f"`{command}`: {_where(result['machine'])}\n"
        yield "| figure | value | x floor | target | | how |\n|---|---|---|---|---|---|"
        for row in _rows(result["rows"]):
            how = row.how.replace("|", "\\|")
            yield f"| {' | '.join(report.cells(row))} | {how} |"
        yield ""
        yield from (f"![{title}](performance/{file})\n" for title, file in drawn.get(name, ()))


def _where(machine: dict[str, Any]) -> str:
    return (
        f"{machine['cores']} cores of {machine['cpu']}, {machine['memory_mib']} MiB, "
        f"Linux {machine['kernel']}, Python {machine['python']}, load {machine['load_1m']:.1f}"
    )


def _rows(rows: Sequence[dict[str, Any]]) -> Iterator[report.Row]:
    for row in rows:
        yield report.Row(**{key: value for key, value in row.items() if key != "ok"})


if __name__ == "__main__":
    sys.exit(main())
