"""Pure: stores silences; a program applies at most 1,000 of them, those that end last."""

import bisect
from datetime import datetime
from typing import Final

from muster import matching
from muster.fleet import health_state

SILENCES_MAX: Final = 1_000
"""The maximum number of silences that are applied."""
_KNOWN_MAX: Final = 10_000
"""The maximum number of stored silences; some are applied only when others are removed."""


class KeptSilences:
    """Stores silences; `by_id` contains the `SILENCES_MAX` silences that end last."""

    def __init__(self) -> None:
        self.by_id: dict[str, matching.Silence] = {}
        self._known: dict[str, matching.Silence] = {}
        self._ends: list[tuple[datetime, str]] = []
        """The end and id of every stored silence, sorted."""
        self._matchers: dict[str, tuple[matching.Matcher, ...]] = {}
        self._active: tuple[datetime, list[str]] | None = None
        """A time and the ids of the silences active then; cached, because callers repeat a time."""

    def receive(
        self, key: str, silence: matching.Silence | None
    ) -> list[tuple[matching.Matcher, ...]]:
        """Add, replace or (None) remove a silence.

        Returns the matchers of each silence that entered or left `by_id`; the change may move
        another silence, too.
        """
        before = self._known.pop(key, None)
        if silence is not None:
            self._known[key] = silence
        if silence == before:
            return []
        if before is not None:
            del self._ends[bisect.bisect_left(self._ends, (before.ends_at, key))]
        if silence is not None:
            bisect.insort(self._ends, (silence.ends_at, key))
        changed = [self._leave(key)] if key in self.by_id else []
        # without `key`, the others have moved by one place at most
        limit = max(0, len(self._ends) - SILENCES_MAX)
        last = [(silence.ends_at, key)] if silence is not None else []
        changed += [
            self._enter(place[1])
            for place in dict.fromkeys([*last, *self._ends[limit : limit + 1]])
            if place >= self._ends[limit] and place[1] not in self.by_id
        ]
        if limit and self._ends[limit - 1][1] in self.by_id:
            changed.append(self._leave(self._ends[limit - 1][1]))
        if len(self._ends) > _KNOWN_MAX:
            del self._known[self._ends.pop(0)[1]]
        return changed

    def silence_of(self, alert: health_state.Alert, at: datetime) -> matching.Silence | None:
        """Return the active silence that matches an alert and ends last, or None."""
        if self._active is None or self._active[0] != at:
            self._active = at, [key for key, each in self.by_id.items() if each.is_active(at)]
        labels = alert.labels if self._active[1] else {}
        keys = (key for key in self._active[1] if matching.all_hold(self._matchers[key], labels))
        return max((self.by_id[key] for key in keys), key=lambda each: each.ends_at, default=None)

    def caveats(self, at: datetime) -> list[str]:
        """Return why some silenced alerts may be shown as not silenced."""
        limit = len(self._ends) - SILENCES_MAX
        if limit <= 0 or self._ends[limit - 1][0] <= at:
            return []
        which = f"more than {SILENCES_MAX:,} silences have not ended"
        return [
            f"{which}; those that end first are ignored, so silenced alerts may look unsilenced"
        ]

    def _enter(self, key: str) -> tuple[matching.Matcher, ...]:
        self._active = None
        self.by_id[key] = self._known[key]
        self._matchers[key] = matching.parse_all(self.by_id[key].matchers)
        return self._matchers[key]

    def _leave(self, key: str) -> tuple[matching.Matcher, ...]:
        self._active = None
        del self.by_id[key]
        return self._matchers.pop(key)
