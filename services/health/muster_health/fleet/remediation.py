"""Pure: One plugin's cure: ask which pod it is, decide, and say what was done or why not."""

from datetime import datetime

from muster import vocabulary
from muster_health.fleet import remedy
from muster_health.model import config, signals
from muster_health.plugin import tracked_plugin


class Cures:
    """Which plugins' pods were asked for, and what is done about them."""

    def __init__(self, settings: config.Remediation) -> None:
        self._remedies = remedy.Remedies(settings)
        self._asked: dict[str, int] = {}
        self._answered: set[str] = set()

    @property
    def is_on(self) -> bool:
        """Tell whether anything is ever done."""
        return self._remedies.mode is not config.Remedies.OFF

    def restore(self, node: str, plugin: str, times: tuple[float, ...]) -> None:
        """Take when a plugin's pod was restarted before, on our clock."""
        self._remedies.restore(node, plugin, times)

    def answered(self, key: str, number: int) -> None:
        """Take that Kubernetes answered a question of this number."""
        if self._asked.get(key) == number:
            self._answered.add(key)

    def asks(self, found: tracked_plugin.Dossier, now: float) -> int | None:
        """Return the number to ask for a plugin's pods under, if that is to be done."""
        if not found.needs_remedy(now):
            self._asked.pop(found.key, None)
            self._answered.discard(found.key)
            return None
        if found.key in self._asked:
            return None
        number = found.state.inquire().number
        self._asked[found.key] = number
        return number

    def decide(
        self, found: tracked_plugin.Dossier, leader: int, now: float, at: datetime, *, storm: bool
    ) -> list[signals.Output]:
        """Return what is to be done about a plugin that a new process may mend."""
        if found.key not in self._answered:
            return []
        self._answered.discard(found.key)
        del self._asked[found.key]
        chosen = self._remedies.choose(found.node, found.plugin, found.state.pods, now, storm=storm)
        is_refused = isinstance(chosen, remedy.Refused)
        before = found.remedied(leader, acted_at=None if is_refused else at)
        if isinstance(chosen, remedy.Refused):
            refused = vocabulary.Remedy.REFUSED
            return [before, _decided(found, refused, chosen.reason, at=at, leader=leader)]
        act = signals.Remediate(
            node=found.node,
            plugin=found.plugin,
            pod=chosen.name,
            uid=chosen.uid,
            reason=f"{found.state.verdict}: {found.state.rule}",
            dry_run=self._is_dry,
        )
        return [before, act]

    def done(
        self, found: tracked_plugin.Dossier, told: signals.Remediated, leader: int, at: datetime
    ) -> list[signals.Output]:
        """Say what came of it."""
        done = vocabulary.Remedy.DRY_RUN if self._is_dry else vocabulary.Remedy.ACTED
        outcome = vocabulary.Remedy.FAILED if told.error else done
        mere = "the pod would be deleted" if self._is_dry else "the pod was deleted"
        reason = told.error or mere
        return [_decided(found, outcome, reason, told.pod, at=at, leader=leader)]

    @property
    def _is_dry(self) -> bool:
        return self._remedies.mode is config.Remedies.DRY_RUN


def _decided(
    found: tracked_plugin.Dossier,
    outcome: vocabulary.Remedy,
    reason: str,
    pod: str = "",
    *,
    at: datetime,
    leader: int,
) -> signals.Publish:
    """Return the fact of what was done, or why it was not."""
    event = vocabulary.RemediationDecided(
        node=found.node,
        at=at,
        plugin=found.plugin,
        verdict=found.state.verdict or vocabulary.Verdict.HEALTHY,
        outcome=outcome,
        reason=reason[:2000],
        pod=pod,
        leader=leader,
    )
    since = found.remedied_since or at
    return signals.Publish(event=event, event_id=f"{found.key}:remedy:{since.isoformat()}")
