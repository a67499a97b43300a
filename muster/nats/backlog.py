"""Pure: how late the reader of a stream is, by its own clock: the server's clock may differ."""


class Backlog:
    """How long messages of a stream have been waiting for their reader.

    When a message is read while `left` more are stored, these are counted down from then on: as
    long as not all of them are read, the reader is at least that late.
    """

    def __init__(self) -> None:
        self._left = 0
        self._since = 0.0

    def note(self, left: int, now: float) -> None:
        """Record that a message was read while `left` more were stored behind it."""
        # a message that was replaced meanwhile is never read
        self._left = min(self._left - 1, left)
        if self._left <= 0:
            self._left, self._since = left, now

    def age_s(self, now: float) -> float:
        """Return how long the oldest unread message has been waiting at least; 0 if none waits."""
        return now - self._since if self._left > 0 else 0.0
