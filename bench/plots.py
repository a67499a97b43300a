"""Adapter for matplotlib: draws the plots of docs/performance.md; equal data give equal files."""

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib import pyplot as plt


def draw(results: Mapping[str, Any], folder: Path) -> dict[str, list[tuple[str, str]]]:
    """Draw the plots for the results; return the titles and files of each benchmark's plots."""
    mpl.use("svg")
    mpl.rcParams["svg.hashsalt"] = "muster"
    drawn: dict[str, list[tuple[str, str]]] = {}
    delays = {
        name.removeprefix("delay "): samples
        for name, samples in results.get("detection", {}).get("series", {}).items()
        if samples
    }
    if delays:
        title = "Detection delay by class: every injection, median and quartiles"
        _distribution(delays, title, folder / "detection.svg")
        drawn["detection"] = [(title, "detection.svg")]
    for name, points in results.get("health", {}).get("series", {}).items():
        if len(points) > 1:
            file = f"health-{name.split(',')[0].lower()}.svg"
            _curve(points, f"Health: {name}, by nodes", folder / file)
            drawn.setdefault("health", []).append((f"Health: {name}, by nodes", file))
    return drawn


def _distribution(series: Mapping[str, Sequence[float]], title: str, file: Path) -> None:
    names = sorted(series, key=lambda name: statistics.median(series[name]), reverse=True)
    figure, axes = plt.subplots(figsize=(8, 5))
    axes.boxplot([series[name] for name in names], orientation="horizontal", showfliers=False)
    for row, name in enumerate(names, 1):
        axes.plot(series[name], [row] * len(series[name]), "o", markersize=3, alpha=0.5)
    axes.set_yticks(range(1, len(names) + 1), names)
    axes.set(title=title, xlabel="seconds from the fault to the verdict", ylabel="class")
    axes.grid(visible=True, axis="x", alpha=0.3)
    _save(figure, file)


def _curve(points: Sequence[tuple[float, float]], title: str, file: Path) -> None:
    figure, axes = plt.subplots(figsize=(6, 3.5))
    axes.plot([x for x, _ in points], [y for _, y in points], marker="o")
    for x, y in points:
        axes.annotate(f"{y:.3g}", (x, y), textcoords="offset points", xytext=(0, 6))
    axes.set(title=title, xlabel="nodes", xscale="log")
    axes.set_ylim(0, 1.15 * max(y for _, y in points))
    axes.margins(x=0.1)
    _save(figure, file)


def _save(figure: Any, file: Path) -> None:
    figure.tight_layout()
    figure.savefig(file, metadata={"Date": None})
    plt.close(figure)
