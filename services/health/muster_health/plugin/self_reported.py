"""Pure: The trouble that a plugin tells of itself, or its node shows: since when, how long yet.

What `trouble` finds in a beat depends on what was before it: for how long the plugin has had what
it has, and has been about to end. And nothing is believed before it has lasted for its grace.
"""

from collections.abc import Mapping
from typing import Final

from muster import vocabulary
from muster.vocabulary import Verdict
from muster_health.model import cluster_facts, config
from muster_health.model.rules import Rule
from muster_health.plugin import beats, trouble

_COMMON: Final = frozenset({Verdict.DEREGISTERED, Verdict.MISMATCH, Verdict.STUCK})
"""What many say of themselves at once where their kubelets or their revision are at fault."""
_LOOK_AGAIN_S: Final = 10.0
"""How soon Kubernetes is asked again what a node offers, if it did not say."""


class Worry:
    """The trouble of one plugin. `due` is when to ask about it, if no beat comes before.

    While it is `held` it is not believed, however long it lasts: many have trouble at once.
    """

    __slots__ = (
        "_drains_at",
        "_look_again_at",
        "_looked",
        "_settings",
        "due",
        "found",
        "held",
        "offers",
        "settled_at",
        "since",
    )

    def __init__(self, settings: config.Detection, now: float) -> None:
        self.found: trouble.Trouble | None = None
        self.since = 0.0
        self.due: float | None = None
        self.held = False
        self.offers: Mapping[str, cluster_facts.Offer] | None = None
        """What the node offers, as Kubernetes said last."""
        self.settled_at = now
        """Since when the plugin has had what it has."""
        self._settings = settings
        self._drains_at: float | None = None
        self._looked: int | None = None
        """Under which number Kubernetes is asked what the node offers now."""
        self._look_again_at = now

    def reported(
        self, beat: vocabulary.Heartbeat, order: beats.Beats, now: float
    ) -> trouble.Trouble | None:
        """Return the worst that a beat tells; one that is about to end may lose its streams."""
        drains = beat.phase is vocabulary.Phase.DRAINING or self._drains_at is not None
        if drains and self._drains(beat, now):
            return None
        if not order.turns and trouble.is_none(beat, order.stretch, self.offers, self._settings):
            # as of nearly all
            return None
        return trouble.reported(
            beat,
            self._settings,
            offers=self.offers,
            settled_s=now - self.settled_at,
            twins=order.twins(now),
            stretch=order.stretch,
        )

    def lost(self, event: vocabulary.PluginDeregistered, interval_s: float, now: float) -> None:
        """Take that a registration was lost a moment ago."""
        grace_s = trouble.mending_s(self._settings, interval_s)
        self.about(trouble.deregistered(event, grace_s), now)

    def offered(self, had: Mapping[str, int], interval_s: float, now: float) -> None:
        """Take that what the node offers has changed, which may not be due to the plugin."""
        is_settled = now - self.settled_at >= self._settings.mismatch_s
        if self.offers is None or not is_settled:
            return
        grace_s = trouble.mending_s(self._settings, interval_s)
        found = trouble.offered(had, self.offers, grace_s)
        if found is not None:
            self.about(found, now)

    def about(self, found: trouble.Trouble, now: float) -> bool:
        """Take trouble; return whether it has lasted long enough.

        Other trouble of another patience begins anew; of the same one it is the same, turned.
        """
        known = self.found
        if known is None or (known.grace_s != found.grace_s and known.rule is not found.rule):
            self.since = now
        self.found = found
        due = self.since + found.grace_s
        self.due = due if now < due and not self.held else None
        return self.due is None and not self.held

    def is_common(self, interval_s: float, now: float) -> bool:
        """Tell whether it is about to be believed, and many may have it in common."""
        found = self.found
        if found is None or found.verdict not in _COMMON:
            return False
        return self.since + found.grace_s - now <= self._settings.trouble_s + interval_s

    def may_look(self, now: float) -> bool:
        """Tell whether it is time to ask what the node offers now.

        What a watch told may be old, and the watch not know that.
        """
        return now >= self._look_again_at

    def looks(self, number: int, now: float) -> None:
        """Take that Kubernetes is asked what the node offers now."""
        self._looked, self._look_again_at = number, now + _LOOK_AGAIN_S

    def is_look(self, number: int) -> bool:
        """Tell whether an answer is to that question."""
        return number == self._looked

    def looked(
        self, known: cluster_facts.Facts | None, had: Mapping[str, int], *, hears: bool
    ) -> trouble.Trouble | None:
        """Take what Kubernetes says; return what it bears out of the trouble that made us ask."""
        self._looked = None
        if known is None or known.offers is None:
            return None
        self.offers = known.offers
        if self.found is None or self.found.rule is not Rule.NODE_OFFERS_OTHERS or not hears:
            return None
        found = trouble.offered(had, known.offers, self.found.grace_s)
        if found is None:
            self.forget()
        return found

    def hold(self) -> None:
        """Believe it not before `release`."""
        self.held, self.due = True, None

    def release(self) -> None:
        """Believe it again, when it is told of the next time."""
        self.held = False

    def shift(self, seconds: float) -> None:
        """Take that we stood still for so long."""
        if self.due is not None:
            self.since += seconds
            self.due += seconds

    def forget(self) -> None:
        """Take that there is none."""
        self.found, self.due, self.held = None, None, False

    def _drains(self, beat: vocabulary.Heartbeat, now: float) -> bool:
        """Tell whether it is about to end: one that does not come to its end is not."""
        if beat.phase is not vocabulary.Phase.DRAINING:
            self._drains_at = None
            return False
        if self._drains_at is None:
            self._drains_at = now
        return now - self._drains_at < self._settings.maintenance_s
