"""Pure: Which labels a node gets besides SkyPilot's: ours, NVIDIA's, and NFD's file of features."""

import enum
from collections.abc import Collection, Iterable, Mapping
from typing import Final

from muster import vocabulary
from muster_labeler import gfd, schemes, sources

COUNT: Final = "muster.dev/accelerator-count"
MEMORY: Final = "muster.dev/accelerator-memory-mib"


class LabelSet(enum.StrEnum):
    """Keys that belong together; the autoscalers' own are in none of them."""

    SKYPILOT = "skypilot"
    MUSTER = "muster"
    NVIDIA = "nvidia"


def labels(
    sets: Collection[LabelSet],
    name: str,
    *,
    kinds: sources.Kinds,
    gpus: vocabulary.GpuNode | None,
) -> dict[str, str]:
    """Return the labels of a node whose accelerators are called `name`.

    NVIDIA's can be told only where an agent reported `gpus`.
    """
    found: dict[str, str] = {}
    if LabelSet.SKYPILOT in sets:
        found[schemes.SKYPILOT] = name
    if LabelSet.MUSTER in sets:
        found[schemes.MUSTER] = name
        if kinds:
            found[COUNT] = str(sum(kinds.values()))
        memory = {kind.memory_mib for kind in kinds}
        if len(memory) == 1 and None not in memory:
            found[MEMORY] = str(memory.pop())
    if LabelSet.NVIDIA in sets and gpus is not None:
        found.update(gfd.labels(gpus))
    return found


def stale(
    ours: Iterable[str],
    wanted: Mapping[str, str],
    sets: Collection[LabelSet],
    *,
    gpus: vocabulary.GpuNode | None,
) -> frozenset[str]:
    """Return which labels of ours nothing speaks for any more.

    SkyPilot's stays where it is not for us to write: a person's command wrote it. So do NVIDIA's
    where they are, and nobody reported the GPUs.
    """
    unsaid = f"{gfd.DOMAIN}/" if LabelSet.NVIDIA in sets and gpus is None else None
    return frozenset(
        key
        for key in ours
        if key not in wanted and key != schemes.SKYPILOT and not (unsaid and key.startswith(unsaid))
    )


def feature_file(wanted: Mapping[str, str]) -> str:
    """Return labels as node-feature-discovery reads them from features.d, a line each.

    A node's agent that has this file needs no right on nodes: NFD's master writes the labels.
    """
    return "".join(f"{key}={value}\n" for key, value in sorted(wanted.items()))
