"""Pure: What holds against the parts of GPUs, and so against every device made of them.

Thousands of replicas ask for the same few reasons, so what was said of a part is remembered until
something begins or ends to hold against its GPU.
"""

from collections.abc import Iterator
from typing import Final, TypeAlias

from muster_plugin.model import gpu

_SAID_MAX: Final = 1000

_Key: TypeAlias = tuple[gpu.Part, gpu.Effect, str]


class Findings:
    """Every finding that holds, by GPU, and there by part and code."""

    def __init__(self) -> None:
        self._holding: dict[str, dict[_Key, gpu.FaultBegan]] = {}
        self._said: dict[str, dict[tuple[gpu.Part, gpu.Effect], str]] = {}

    def apply(self, finding: gpu.FaultChange) -> bool:
        """Take the beginning or the end of a finding; return whether that is news."""
        name = finding.part.gpu
        key = finding.part, finding.effect, finding.code
        holding = self._holding.setdefault(name, {})
        self._said.pop(name, None)
        match finding:
            case gpu.FaultBegan():
                is_news = key not in holding
                holding[key] = finding
            case gpu.FaultEnded():
                is_news = holding.pop(key, None) is not None
        if not holding:
            del self._holding[name]
        return is_news

    def reason(self, part: gpu.Part, effect: gpu.Effect) -> str:
        """Say what holds against a part, in the order in which it began; empty if nothing does."""
        if part.gpu not in self._holding:
            return ""
        said = self._said.setdefault(part.gpu, {})
        known = said.get((part, effect))
        if known is None:
            reasons = (found.reason for found in self._against(part, effect))
            known = said[part, effect] = "; ".join(reasons)[:_SAID_MAX]
        return known

    def count(self) -> dict[tuple[gpu.Effect, str], int]:
        """Count what holds now, by effect and code."""
        counted: dict[tuple[gpu.Effect, str], int] = {}
        for holding in self._holding.values():
            for _, effect, code in holding:
                counted[effect, code] = counted.get((effect, code), 0) + 1
        return counted

    def _against(self, part: gpu.Part, effect: gpu.Effect) -> Iterator[gpu.FaultBegan]:
        for found in self._holding[part.gpu].values():
            if found.effect is effect and found.part.covers(part):
                yield found
