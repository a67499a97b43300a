"""Pure: Why somebody is not let in: one word for log, metric, test and NATS' log."""

import enum


class Reason(enum.StrEnum):
    """What is wrong with who asks, or with us; the order is that of the questions."""

    UNREADABLE = "unreadable"
    """Not a request of nats-server's."""
    NO_TOKEN = "no_token"  # noqa: S105  # a word
    MALFORMED = "malformed"
    ALGORITHM = "algorithm"
    """Not RS256 or ES256, or not what the key is for."""
    NO_KEYS = "no_keys"
    """We have none that is young enough: the API server is away, or was never there."""
    UNKNOWN_KEY = "unknown_key"
    SIGNATURE = "signature"
    ISSUER = "issuer"
    AUDIENCE = "audience"
    EXPIRED = "expired"
    NOT_YET = "not_yet"
    ACCOUNT = "account"
    """Another service account than the plugins'."""
    NO_NODE = "no_node"
    """Not bound to a pod on a node."""
    NAME = "name"
    """The connection is named like a plugin of another node."""
    TOO_OFTEN = "too_often"
    LATE = "late"
    """Asked so long ago that nobody waits for the answer: more come than we can let in."""


class Refused(Exception):
    """Who asks is not let in; `subject` is whom the token names, where that could be checked."""

    def __init__(self, reason: Reason, *, subject: str = "") -> None:
        super().__init__(reason.value)
        self.reason = reason
        self.subject = subject
