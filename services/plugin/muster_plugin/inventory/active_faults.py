"""Pure: the active faults of GPUs and their parts, and so of every device made of them.

Thousands of replicas ask for the same few reasons, so the reason of a part is cached until a fault
of its GPU begins or ends.
"""

from collections import Counter
from collections.abc import Iterator
from typing import Final, TypeAlias

from muster_plugin.model import gpu

_REASON_MAX: Final = 1000

_Key: TypeAlias = tuple[gpu.Part, gpu.Effect, str]


class ActiveFaults:
    """Every active fault, by GPU, part, effect and code."""

    def __init__(self) -> None:
        self._active: dict[str, dict[_Key, gpu.FaultBegan]] = {}
        self._reasons: dict[str, dict[tuple[gpu.Part, gpu.Effect], str]] = {}

    def apply(self, fault: gpu.FaultChange) -> bool:
        """Apply the beginning or the end of a fault; return whether that changes anything."""
        uuid = fault.part.gpu
        key = fault.part, fault.effect, fault.code
        active = self._active.setdefault(uuid, {})
        self._reasons.pop(uuid, None)
        match fault:
            case gpu.FaultBegan():
                is_change = key not in active
                active[key] = fault
            case gpu.FaultEnded():
                is_change = active.pop(key, None) is not None
        if not active:
            del self._active[uuid]
        return is_change

    def reason(self, part: gpu.Part, effect: gpu.Effect) -> str:
        """Return the active faults of a part in words, oldest first; empty if there are none."""
        if part.gpu not in self._active:
            return ""
        cache = self._reasons.setdefault(part.gpu, {})
        if (part, effect) not in cache:
            reasons = (fault.reason for fault in self._matching(part, effect))
            cache[part, effect] = "; ".join(reasons)[:_REASON_MAX]
        return cache[part, effect]

    def count(self) -> Counter[tuple[gpu.Effect, str]]:
        """Count the active faults by effect and code."""
        return Counter(
            (effect, code) for active in self._active.values() for _, effect, code in active
        )

    def _matching(self, part: gpu.Part, effect: gpu.Effect) -> Iterator[gpu.FaultBegan]:
        for fault in self._active[part.gpu].values():
            if fault.effect is effect and fault.part.covers(part):
                yield fault
