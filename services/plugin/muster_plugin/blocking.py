"""Adapter: threads: runs beside the loop what may hang, and waits no longer than told.

Nobody can end a thread that hangs in the kernel. It is left to itself, as a daemon, so that the
process can end all the same (a pool would be waited for); and what hangs is not begun again before
it has come to an end, so that it costs one thread and not one for every try.
"""

import asyncio
import contextlib
import threading
from collections.abc import Callable
from typing import Generic, TypeVar

Result = TypeVar("Result")


class Lane:
    """Where one thing is done at a time."""

    def __init__(self) -> None:
        self._last: asyncio.Future[None] | None = None

    @property
    def is_busy(self) -> bool:
        """Whether something is still being done."""
        return self._last is not None and not self._last.done()

    async def run(self, work: Callable[[], Result], *, timeout_s: float | None) -> Result:
        """Return what `work` does. Raises what it raises, or TimeoutError."""
        async with asyncio.timeout(timeout_s):
            while self._last is not None and not self._last.done():
                await asyncio.wait([self._last])
            self._last = ended = asyncio.get_running_loop().create_future()
            return await _begin(work, ended)


class Look(Generic[Result]):
    """One thing that is looked at again and again; while a look hangs, the last answer stands."""

    def __init__(self, nothing: Result) -> None:
        self.answer = nothing
        """What was last seen; `nothing` before the first time."""
        self.hangs = False
        """Whether the newest look has not ended in time."""
        self._lane = Lane()

    async def again(self, work: Callable[[], Result], *, timeout_s: float) -> Result:
        """Return what `work` sees, or what it saw before if it does not end in time.

        A look that is known to hang is not waited for again.
        """
        if self.hangs and self._lane.is_busy:
            return self.answer
        try:
            self.answer = await self._lane.run(work, timeout_s=timeout_s)
        except TimeoutError:
            self.hangs = True
        else:
            self.hangs = False
        return self.answer


def _begin(work: Callable[[], Result], ended: asyncio.Future[None]) -> asyncio.Future[Result]:
    loop = asyncio.get_running_loop()
    done: asyncio.Future[Result] = loop.create_future()

    def settle(result: Result | None, error: BaseException | None) -> None:
        ended.set_result(None)
        if done.done():
            return
        if error is not None:
            done.set_exception(error)
        else:
            done.set_result(result)  # type: ignore[arg-type]  # None only if `work` returned it

    def body() -> None:
        result, error = None, None
        try:
            result = work()
        except Exception as caught:  # noqa: BLE001  # raised again where it is waited for
            error = caught
        # the loop may have closed meanwhile
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(settle, result, error)

    threading.Thread(target=body, daemon=True).start()
    return done
