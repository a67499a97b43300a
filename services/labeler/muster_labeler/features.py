"""Adapter: a node's file of features: labels for who has no right on nodes.

node-feature-discovery's worker reads the folder features.d on its node, and its master writes what
stands there as labels (NFD docs, customization guide: local feature source). So an agent on a node
needs no right on nodes but to read them.
"""

import argparse
import contextlib
import os
import pathlib
import sys
import tempfile
from collections.abc import Sequence
from typing import Final

from muster_labeler import labelsets, options, sources
from muster_labeler.findings import Exit
from muster_labeler.labelsets import LabelSet
from muster_labeler.plan import Row, Step

_SETS: Final = (LabelSet.SKYPILOT, LabelSet.MUSTER)


def write(
    chosen: argparse.Namespace, rows: Sequence[Row], views: sources.Views, *, objection: str | None
) -> int:
    """Write the labels of the one node that was named; none where it must have none."""
    (name,) = chosen.node
    row = next((row for row in rows if row.node == name), None)
    refusal = objection or (row.reason if row is not None and row.step is Step.REFUSE else None)
    labels = {}
    if row is not None and row.new is not None and refusal is None:
        kinds = views.agents.get(name, {})
        labels = labelsets.labels(_SETS, row.new, kinds=kinds, gpus=None)
    text = labelsets.feature_file(labels)
    if chosen.features == "-":
        sys.stdout.write(text)
    else:
        _replace(pathlib.Path(chosen.features), text)
    if refusal is not None:
        options.tell(chosen.command, f"{name}: no label: {refusal}")
    return Exit.PROBLEMS if refusal else Exit.FINE


def _replace(file: pathlib.Path, text: str) -> None:
    """Write a file that nobody can read half of: NFD leaves out names that begin with a dot."""
    try:
        if file.exists() and file.read_text("utf-8") == text:
            return
        half, name = tempfile.mkstemp(dir=file.parent, prefix=".muster-")
        try:
            with os.fdopen(half, "w", encoding="utf-8") as opened:
                opened.write(text)
            pathlib.Path(name).chmod(0o644)
            pathlib.Path(name).replace(file)
        except OSError:
            with contextlib.suppress(OSError):
                pathlib.Path(name).unlink()
            raise
    except OSError as error:
        raise options.Mistake(f"{file}: {error.strerror or error}") from None
