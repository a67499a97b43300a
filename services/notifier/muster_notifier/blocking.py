"""Adapter: threads: what may hang is done beside the loop, one thing at a time in each lane.

The loop's own pool has a few threads for everybody, and is waited for at the end: one name server
or file system that does not answer would take all of them. Here it costs one thread, which is left
to itself.
"""

import asyncio
import contextlib
import threading
from collections.abc import Callable
from typing import TypeVar

Result = TypeVar("Result")


class Lane:
    """Where one thing is done after the other."""

    def __init__(self) -> None:
        self._last: asyncio.Future[None] | None = None

    async def run(self, work: Callable[[], Result]) -> Result:
        """Return what `work` does, and raise what it raises.

        Whoever waits no longer leaves it running; the next begins when it has come to an end.
        """
        while self._last is not None and not self._last.done():
            await asyncio.wait([self._last])
        loop = asyncio.get_running_loop()
        self._last = ended = loop.create_future()
        done: asyncio.Future[Result] = loop.create_future()

        def settle(tell: Callable[[], None]) -> None:
            ended.set_result(None)
            if not done.done():
                tell()

        def body() -> None:
            try:
                result = work()
            except Exception as error:  # noqa: BLE001  # raised again where it is waited for
                problem = error
                tell: Callable[[], None] = lambda: done.set_exception(problem)  # noqa: E731
            else:
                tell = lambda: done.set_result(result)  # noqa: E731
            # the loop may have ended meanwhile
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(settle, tell)

        threading.Thread(target=body, daemon=True).start()
        return await done
