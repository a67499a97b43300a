"""Pure. What holds against the parts of GPUs, and so against every device made of them."""

from collections.abc import Iterator
from typing import Final

from muster_plugin import gpu

_SAID_MAX: Final = 1000


class Findings:
    """Every finding that holds, by part and code."""

    def __init__(self) -> None:
        self._holding: dict[tuple[gpu.Part, gpu.Effect, str], gpu.Began] = {}

    def apply(self, finding: gpu.Finding) -> bool:
        """Take the beginning or the end of a finding; return whether that is news."""
        key = finding.part, finding.effect, finding.code
        match finding:
            case gpu.Began():
                is_news = key not in self._holding
                self._holding[key] = finding
                return is_news
            case gpu.Ended():
                return self._holding.pop(key, None) is not None

    def against(self, part: gpu.Part, effect: gpu.Effect) -> Iterator[gpu.Began]:
        """Give what holds against a part, in the order in which it began."""
        for found in self._holding.values():
            if found.effect is effect and found.part.covers(part):
                yield found

    def reason(self, part: gpu.Part, effect: gpu.Effect) -> str:
        """Say what holds against a part in words; empty if nothing does."""
        return "; ".join(found.reason for found in self.against(part, effect))[:_SAID_MAX]
