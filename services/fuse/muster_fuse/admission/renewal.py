"""Pure: decides when the webhook's certificate is replaced.

| certificate in use | the next one | step |
|---|---|---|
| none, expired, or not valid yet | none that is valid | ISSUE: make one and use it now |
| none, expired, or not valid yet | valid | PROMOTE: use it |
| valid | made at least `settle_s` ago | PROMOTE |
| valid, but expires within `settle_s` | valid | PROMOTE |
| valid | made later | KEEP |
| in the last third of its lifetime | none | PREPARE: make one, so that its CA becomes trusted |
| in the first two thirds of its lifetime | none | KEEP |

The API servers trust a new CA only after they have read it from the webhook's configuration. So a
new certificate is used after a delay, and the CA of the previous one stays trusted until it
expires. Times are seconds since 1970, as in the certificates.
"""

import enum
from dataclasses import dataclass
from typing import Final

BACKDATED_S: Final = 300.0
"""How long before its creation a certificate's validity begins, because clocks differ."""


class Step(enum.StrEnum):
    """The next step for the certificate."""

    KEEP = "keep"
    ISSUE = "issue"
    PREPARE = "prepare"
    PROMOTE = "promote"


@dataclass(frozen=True, slots=True)
class Validity:
    """The period in which a certificate is valid."""

    begins_at: float
    ends_at: float

    def includes(self, at: float) -> bool:
        """Return whether the certificate is valid at this time."""
        return self.begins_at <= at < self.ends_at

    @property
    def made_at(self) -> float:
        """Return when the certificate was made."""
        return self.begins_at + BACKDATED_S


def decide(
    current: Validity | None, following: Validity | None, *, at: float, settle_s: float
) -> Step:
    """Return the next step; a certificate that is missing or unusable is given as None."""
    is_next = following is not None and following.includes(at)
    if current is None or not current.includes(at):
        return Step.PROMOTE if is_next else Step.ISSUE
    if following is not None and is_next:
        has_settled = at - following.made_at >= settle_s
        return Step.PROMOTE if has_settled or current.ends_at - at <= settle_s else Step.KEEP
    left_s = current.ends_at - at
    return Step.PREPARE if 3 * left_s <= current.ends_at - current.made_at else Step.KEEP
