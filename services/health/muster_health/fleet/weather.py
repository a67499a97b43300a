"""Pure: Who is judged in a storm, and after it: nobody, and then one by one.

Who is in a storm is frozen. Those whom it leaves silent are judged some at a time: each takes
questions and answers, and there may be thousands.
"""

import itertools
from collections.abc import Callable, Iterable, Mapping
from typing import Final

from muster_health.fleet import mass_failure
from muster_health.model import config
from muster_health.plugin import links, tracked_plugin

SOON_S: Final = 0.05
"""For what one plugin's input means for others: later than now, so that `tick` comes to an end."""
_TEND_S: Final = 1.0
_THAW_S: Final = 0.5
_THAW_EACH: Final = 25


class Weather:
    """The storms over these plugins, and who is left over of one; its end is told to `over`."""

    def __init__(
        self,
        settings: config.Detection,
        plugins: Mapping[str, tracked_plugin.Dossier],
        over: Callable[[mass_failure.Ended, float], None],
    ) -> None:
        self.storms = mass_failure.Storms(settings)
        self._plugins = plugins
        self._over = over
        self._leftover: dict[str, None] = {}
        self._thaw_at = 0.0

    def holds(self, found: tracked_plugin.Dossier, now: float) -> tuple[bool, float | None]:
        """Look at a plugin; return whether it is not to be judged, and when to look at all."""
        key, state = found.key, found.state
        if not (state.is_silent or state.is_troubled(now)):
            self.storms.cleared(key)
            return False, None
        server = links.short(state.link.server)
        causes = (*found.causes, f"server={server}") if server else found.causes
        self.storms.suspected(key, causes, now, silent=state.is_silent)
        began, over = self.storms.update(len(self._plugins), now)
        for new in began:
            for member in new.members:
                self._plugins[member].state.freeze()
        due = now + SOON_S if began or over else None
        self._end(over, now)
        if self.storms.holds(key):
            if not state.is_held:
                state.freeze()
        elif state.is_held:
            self._leftover[key] = None
            due = max(self._thaw_at, now + SOON_S) if due is None else due
        return state.is_held, due

    def tend(self, now: float) -> list[tracked_plugin.Dossier]:
        """End the storms that are over; return whose turn it is to be judged again."""
        _, over = self.storms.update(len(self._plugins), now)
        self._end(over, now)
        if now < self._thaw_at or not self._leftover:
            return []
        self._thaw_at = now + _THAW_S
        turn = list(itertools.islice(self._leftover, _THAW_EACH))
        for key in turn:
            del self._leftover[key]
        return [self._plugins[key] for key in turn if key in self._plugins]

    def waits(self, now: float) -> Iterable[float]:
        """Return when to tend it again, if at all."""
        if self.storms.active:
            yield now + _TEND_S
        if self._leftover:
            yield max(self._thaw_at, now + SOON_S)

    def clear(self) -> None:
        """Forget all suspicions."""
        self.storms.clear()
        self._leftover.clear()

    def _end(self, over: Iterable[mass_failure.Ended], now: float) -> None:
        for ended in over:
            self._over(ended, now)
            self._leftover |= {left: None for left in ended.left if not self.storms.holds(left)}
