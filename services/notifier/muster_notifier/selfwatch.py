"""Pure: The alerts that the notifier raises by itself: health is silent, letters are dead."""

import hashlib
import itertools
from datetime import datetime

from muster import codec, vocabulary

PLUGIN = "notifier"


class Voice:
    """Makes alerts as the bus would bring them."""

    def __init__(self, *, instance: str, runbook_url: str) -> None:
        self._instance = instance
        self._runbook_url = runbook_url
        self._count = itertools.count(1)
        self._since: dict[vocabulary.AlertKind, datetime] = {}

    def fires(
        self, kind: vocabulary.AlertKind, *, summary: str, seen: str, at: datetime
    ) -> codec.CloudEvent:
        """Say that something is wrong, since when we first said so."""
        self._since.setdefault(kind, at)
        evidence = vocabulary.Evidence(source="notifier", observed=seen)
        return self._event(kind, summary=summary, evidence=evidence, at=at, ends_at=None)

    def ends(
        self, kind: vocabulary.AlertKind, *, summary: str, seen: str, at: datetime
    ) -> codec.CloudEvent:
        """Say that it is over; also after a restart, when only the ledger knows that it began."""
        evidence = vocabulary.Evidence(source="notifier", observed=seen)
        event = self._event(kind, summary=summary, evidence=evidence, at=at, ends_at=at)
        self._since.pop(kind, None)
        return event

    def _event(
        self,
        kind: vocabulary.AlertKind,
        *,
        summary: str,
        evidence: vocabulary.Evidence,
        at: datetime,
        ends_at: datetime | None,
    ) -> codec.CloudEvent:
        number = next(self._count)
        state = vocabulary.AlertState.RESOLVED if ends_at else vocabulary.AlertState.FIRING
        alert = vocabulary.AlertChanged(
            node=vocabulary.FLEET,
            at=at,
            plugin=PLUGIN,
            kind=kind,
            severity=vocabulary.Severity.CRITICAL,
            state=state,
            fingerprint=hashlib.sha256(f"{PLUGIN}|{kind}".encode()).hexdigest()[:16],
            summary=summary,
            starts_at=self._since.get(kind, at),
            ends_at=ends_at,
            evidence=(evidence,),
            runbook=f"{self._runbook_url}{kind}.md",
        )
        return codec.CloudEvent(
            id=f"{self._instance}:{kind}:{number}",
            source="/services/notifier",
            type=alert.TYPE,
            time=at,
            instance=self._instance,
            sequence=number,
            boot="",
            data=alert,
        )
