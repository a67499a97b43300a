"""Adapter: what is remembered: it may hold up what is to be told for a while, and not for ever.

What is told is remembered first, so that a crash in between repeats it under the same id. But a
bucket that takes nothing (it is full, or has no quorum) must keep nobody from hearing of a failure:
then what is to be remembered is owed, what is to be told is told, and a crash may repeat it.
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Final

from muster.service import logs

Still = Callable[[], bool]
Write = Callable[[str, bytes, Still], Awaitable[bool]]
"""Writes a value, however long that takes, and tells whether it did; ends once the third says no,
which is asked before every try."""

_PATIENCE_S: Final = 5.0
_AGAIN_S: Final = 2.0


class Memory:
    """Keeps values by key; `run` must run. What is in `last` is written after all else."""

    def __init__(
        self, write: Write, *, last: str, patience_s: float = _PATIENCE_S, again_s: float = _AGAIN_S
    ) -> None:
        self._write = write
        self._last = last
        self._patience_s, self._again_s = patience_s, again_s
        self._owed: dict[str, tuple[bytes, Still]] = {}
        self._clock = asyncio.get_running_loop().time
        self._since = 0.0

    @property
    def problem(self) -> str:
        """Say what is wrong; empty if nothing is owed."""
        if not self._owed:
            return ""
        seconds = self._clock() - self._since
        return (
            f"NATS has not taken the state of {len(self._owed)} plugins for {seconds:.0f} s: is "
            "the bucket muster_state full? A restart of health now may repeat what was told"
        )

    async def keep(self, key: str, value: bytes, still: Still) -> None:
        """Write a value, or owe it if that does not come about soon; empty is forgetting it."""
        until: float | None = None

        def patient() -> bool:
            nonlocal until
            if until is None:
                until = self._clock() + self._patience_s
            return still() and self._clock() < until

        if not self._owed and await self._write(key, value, patient):
            return
        if still():
            self._owe(key, value, still)

    async def run(self) -> None:
        """Write what is owed, for ever."""
        while True:
            await asyncio.sleep(self._again_s)
            if self._owed:
                await self._pay()

    def _owe(self, key: str, value: bytes, still: Still) -> None:
        if not self._owed:
            self._since = self._clock()
            logs.logger().error("state_not_remembered", key=key)
        self._owed[key] = value, still

    async def _pay(self) -> None:
        """Write them one by one; a newer value that is owed meanwhile is written in its turn."""
        while self._owed:
            key = next((key for key in self._owed if key != self._last), self._last)
            owed = self._owed[key]
            await self._write(key, *owed)
            if self._owed[key] is owed:
                del self._owed[key]
        logs.logger().info("state_remembered", seconds=round(self._clock() - self._since, 1))
