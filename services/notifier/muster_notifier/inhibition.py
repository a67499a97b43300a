"""Pure: Inhibition: an alert that fires keeps others quiet that only follow from it.

A rule has matchers for the source, matchers for the target, and labels in which both must be equal;
a label that neither has is equal. An alert that is on both sides of a rule is not inhibited by
another that is on both sides, and so never by itself (prometheus/alertmanager inhibit/inhibit.go).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from muster import matchers as matching


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """One rule."""

    name: str
    source: tuple[matching.Matcher, ...]
    target: tuple[matching.Matcher, ...]
    equal: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Inhibited:
    """By which alert that fires, and which rule."""

    fingerprint: str
    rule: str


class Inhibition:
    """Knows the alerts that fire and are the source of a rule."""

    def __init__(self, rules: Sequence[Rule]) -> None:
        self._rules = tuple(rules)
        # for each rule: values of its equal labels -> fingerprint -> whether it is a target as well
        self._sources: list[dict[tuple[str, ...], dict[str, bool]]] = [{} for _ in rules]
        self._known: dict[str, Mapping[str, str]] = {}

    def fires(self, fingerprint: str, labels: Mapping[str, str]) -> None:
        """Take an alert that fires, or fires with other labels than before."""
        if self._known.get(fingerprint) == labels:
            return
        self.ends(fingerprint)
        is_source = False
        for rule, sources in zip(self._rules, self._sources, strict=True):
            if matching.all_hold(rule.source, labels):
                is_target = matching.all_hold(rule.target, labels)
                sources.setdefault(_values(rule, labels), {})[fingerprint] = is_target
                is_source = True
        if is_source:
            self._known[fingerprint] = labels

    def ends(self, fingerprint: str) -> None:
        """Forget an alert that fires no more."""
        labels = self._known.pop(fingerprint, None)
        if labels is None:
            return
        for rule, sources in zip(self._rules, self._sources, strict=True):
            values = _values(rule, labels)
            held = sources.get(values, {})
            held.pop(fingerprint, None)
            if not held:
                sources.pop(values, None)

    def inhibits(self, labels: Mapping[str, str]) -> Inhibited | None:
        """Return what keeps an alert with these labels quiet, if anything does."""
        for rule, sources in zip(self._rules, self._sources, strict=True):
            if not matching.all_hold(rule.target, labels):
                continue
            is_source = matching.all_hold(rule.source, labels)
            for fingerprint, is_target in sources.get(_values(rule, labels), {}).items():
                if not (is_source and is_target):
                    return Inhibited(fingerprint, rule.name)
        return None


def _values(rule: Rule, labels: Mapping[str, str]) -> tuple[str, ...]:
    return tuple(labels.get(name, "") for name in rule.equal)
