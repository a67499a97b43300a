"""Pure: The way back from a bad verdict: some good beats, and the longer the more often it fell."""

from muster_health.model import config


class Recovery:
    """Counts the good beats since a plugin came back; `due` is when it is believed anyhow."""

    __slots__ = ("_held_until", "_settings", "due", "good_beats")

    def __init__(self, settings: config.Detection) -> None:
        self._settings = settings
        self.good_beats = 0
        self.due: float | None = None
        self._held_until = 0.0

    def begin(self) -> None:
        """Take that it is not back, or no longer."""
        self.good_beats, self.due = 0, None

    def good(self, now: float, *, counts: bool, hold_s: float) -> bool:
        """Take a good beat; return whether that is enough."""
        self.good_beats += counts
        if self.due is None:
            self._held_until = now + hold_s
            self.due = now + max(self._settings.recover_s, hold_s)
        return self.good_beats >= self._settings.recover_beats and now >= self._held_until

    def shift(self, seconds: float) -> None:
        """Take that we heard nothing for so long."""
        if self.due is not None:
            self.due += seconds
            self._held_until += seconds
