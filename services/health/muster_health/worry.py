"""Pure. Trouble that a plugin tells of itself, and how long it may last before it is believed."""

from muster_health import trouble


class Worry:
    """The trouble of one plugin. `due` is when to ask about it, if no beat comes before.

    While it is `held` it is not believed, however long it lasts: many have trouble at once.
    """

    __slots__ = ("due", "found", "held", "since")

    def __init__(self) -> None:
        self.found: trouble.Trouble | None = None
        self.since = 0.0
        self.due: float | None = None
        self.held = False

    def hold(self) -> None:
        """Believe it not before `release`."""
        self.held, self.due = True, None

    def release(self) -> None:
        """Believe it again, when it is told of the next time."""
        self.held = False

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

    def forget(self) -> None:
        """Take that there is none."""
        self.found, self.due, self.held = None, None, False
