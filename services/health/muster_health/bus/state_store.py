"""Adapter: NATS: saves the detector's state; may briefly delay publishing, but never blocks it.

State is saved before its conclusion is published, so that after a crash in between the same thing
is published again under the same id. But a bucket that accepts nothing (it is full, or has lost its
quorum) must not hide a failure from people: after a few seconds the conclusion is published all the
same, the state is saved once that is possible, and until then a crash may repeat an alert.
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Final

from muster.service import logs

IsLeader = Callable[[], bool]
Write = Callable[[str, bytes, IsLeader], Awaitable[bool]]
"""Writes a value, retrying while the third argument returns True (it is called before every try);
returns whether the value was written."""

_DELAY_MAX_S: Final = 5.0
_RETRY_S: Final = 2.0


class StateStore:
    """Saves values by key in the background (`run`). The key `last` is written after all others."""

    def __init__(
        self,
        write: Write,
        *,
        last: str,
        delay_max_s: float = _DELAY_MAX_S,
        retry_s: float = _RETRY_S,
    ) -> None:
        self._write = write
        self._last = last
        self._delay_max_s, self._retry_s = delay_max_s, retry_s
        self._unsaved: dict[str, tuple[bytes, IsLeader]] = {}
        self._clock = asyncio.get_running_loop().time
        self._unsaved_since = 0.0

    @property
    def problem(self) -> str:
        """Why some values are not saved; empty if all are."""
        if not self._unsaved:
            return ""
        seconds = self._clock() - self._unsaved_since
        return (
            f"NATS has not stored the state of {len(self._unsaved)} plugins for {seconds:.0f} s: "
            "is the bucket muster_state full? A restart of health now may repeat alerts"
        )

    async def save(self, key: str, value: bytes, is_leader: IsLeader) -> None:
        """Save a value now, or later if that takes too long; an empty value deletes the key."""
        until: float | None = None

        def may_retry() -> bool:
            nonlocal until
            if until is None:
                until = self._clock() + self._delay_max_s
            return is_leader() and self._clock() < until

        if not self._unsaved and await self._write(key, value, may_retry):
            return
        if is_leader():
            self._save_later(key, value, is_leader)

    async def run(self) -> None:
        """Retry the values that could not be saved in time, forever."""
        while True:
            await asyncio.sleep(self._retry_s)
            if self._unsaved:
                await self._save_all()

    def _save_later(self, key: str, value: bytes, is_leader: IsLeader) -> None:
        if not self._unsaved:
            self._unsaved_since = self._clock()
            logs.logger().error("state_not_saved", key=key)
        self._unsaved[key] = value, is_leader

    async def _save_all(self) -> None:
        """Write all unsaved values; a newer value that arrives meanwhile is written too."""
        while self._unsaved:
            key = next((key for key in self._unsaved if key != self._last), self._last)
            entry = self._unsaved[key]
            await self._write(key, *entry)
            if self._unsaved[key] is entry:
                del self._unsaved[key]
        logs.logger().info("state_saved", seconds=round(self._clock() - self._unsaved_since, 1))
