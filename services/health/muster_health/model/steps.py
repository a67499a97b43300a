"""Pure: What the machine of one plugin decides."""

from dataclasses import dataclass

from muster import vocabulary
from muster.vocabulary import Verdict
from muster_health.model import signals
from muster_health.model.rules import Rule


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """Probe the plugin, under this number."""

    number: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Inquiry:
    """Ask the Kubernetes API about the node, under this number."""

    number: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Conclusion:
    """A new verdict, and why; `previous` is the one before."""

    verdict: Verdict
    previous: Verdict | None
    rule: Rule
    resources: tuple[str, ...]
    evidence: tuple[vocabulary.Evidence, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Confirmed:
    """The verdict stands, for another reason than before, or for more resources."""

    rule: Rule
    evidence: tuple[vocabulary.Evidence, ...]
    resources: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Overdue:
    """A planned end lasts too long."""

    evidence: tuple[vocabulary.Evidence, ...]


Step = Question | Inquiry | Conclusion | Confirmed | Overdue | signals.Noted
