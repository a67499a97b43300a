"""Pure: One question, one answer: who is let in, and why another is not."""

from dataclasses import dataclass

from muster_gate import config, keyring, pace, questions, tokens
from muster_gate.reasons import Reason, Refused


@dataclass(frozen=True, slots=True, kw_only=True)
class Admitted:
    """Somebody may come in."""

    answer: bytes
    node: str
    pod: str
    lifetime_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Turned:
    """Somebody may not, and why; `answer` is empty where nobody can be answered."""

    answer: bytes
    reason: Reason
    name: str = ""
    host: str = ""
    subject: str = ""


class Doorkeeper:
    """Holds the keys of the cluster and our own, which its door renews, and who came how often."""

    def __init__(self, settings: config.Settings, signing: questions.Signing) -> None:
        self.ring: keyring.Keyring | None = None
        self.signing = signing
        self._tokens = settings.tokens
        self._keys = settings.keys
        self._pace = pace.Pace(settings.pace)

    def decide(self, payload: bytes, *, at: float, now: float) -> Admitted | Turned:
        """Return the answer to a question of nats-server's; `at` is UTC, `now` monotonic."""
        try:
            asked = questions.read(payload)
        except Refused as refusal:
            return Turned(answer=b"", reason=refusal.reason)
        try:
            who = tokens.bearer(asked.token, self._tokens, self._keys, ring=self.ring, at=at)
            self._check(asked, who, now)
        except Refused as refusal:
            return Turned(
                answer=questions.refused(asked, refusal.reason, self.signing, at=at),
                reason=refusal.reason,
                name=asked.name[:256],
                host=asked.host,
                subject=refusal.subject,
            )
        return Admitted(
            answer=questions.admitted(asked, who, self.signing, at=at),
            node=who.node,
            pod=who.pod,
            lifetime_s=who.lifetime_s,
        )

    def _check(self, asked: questions.Question, who: tokens.Bearer, now: float) -> None:
        if not questions.speaks_for_itself(asked.name, who.node):
            raise Refused(Reason.NAME, subject=who.node)
        if not self._pace.takes(who.node, now):
            raise Refused(Reason.TOO_OFTEN, subject=who.node)
