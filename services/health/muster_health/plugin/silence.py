"""Pure: How long a plugin has been silent, by our clock, but for when we could not hear."""


class Silence:
    """The silence of one plugin. `heard_at` is None until its first sign of life."""

    __slots__ = ("_since", "heard_at", "window_s")

    def __init__(self, now: float) -> None:
        self.heard_at: float | None = None
        self._since = now
        self.window_s = 0.0
        """It has so much more than usual for its next sign of life."""

    @property
    def since(self) -> float:
        """Return when it began."""
        return self._since

    @property
    def ever_heard(self) -> bool:
        """Tell whether there was a sign of life at all."""
        return self.heard_at is not None

    def broken(self, now: float) -> None:
        """Take a sign of life."""
        self.heard_at = self._since = now
        self.window_s = 0.0

    def begin_anew(self, now: float, *, window_s: float = 0.0) -> None:
        """Take that nothing could be heard until now.

        It has `window_s` more than usual for its next sign of life.
        """
        self._since, self.window_s = now, window_s

    def shift(self, seconds: float, now: float) -> None:
        """Take that we stood still for so long."""
        self._since = min(now, self._since + seconds)

    def due(self, patience_s: float) -> float:
        """Return when the silence is longer than `patience_s`."""
        return self._since + patience_s + self.window_s
