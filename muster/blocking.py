"""Adapter for threads: runs blocking calls outside the event loop, each with a timeout.

A thread that hangs in the kernel cannot be ended. It is abandoned as a daemon thread, so that the
process can still exit: Python waits at exit for the threads of the loop's own pool. A hanging call
is not repeated until it returns, so it occupies one thread, not one for each attempt.
"""

import asyncio
import contextlib
import threading
from collections.abc import Callable
from typing import Generic, TypeVar

Result = TypeVar("Result")


class Serial:
    """Runs blocking calls in threads, one at a time."""

    def __init__(self) -> None:
        self._last: asyncio.Future[None] | None = None

    @property
    def is_busy(self) -> bool:
        """Whether a call is still running."""
        return self._last is not None and not self._last.done()

    async def run(self, call: Callable[[], Result], *, timeout_s: float | None = None) -> Result:
        """Return the result of `call`. Raises its exceptions, or TimeoutError.

        If the caller stops waiting, a call that has begun continues, and the next call begins only
        when it has ended.
        """
        async with asyncio.timeout(timeout_s):
            while self._last is not None and not self._last.done():
                await asyncio.wait([self._last])
            self._last = ended = asyncio.get_running_loop().create_future()
            return await _start(call, ended)


class Latest(Generic[Result]):
    """Caches the latest result of a repeated blocking call, and returns it while a call hangs."""

    def __init__(self, initial: Result) -> None:
        self.result = initial
        """The latest result; `initial` before the first."""
        self.is_hanging = False
        """Whether the latest call timed out."""
        self._serial = Serial()

    async def refresh(self, call: Callable[[], Result], *, timeout_s: float) -> Result:
        """Return the result of `call`, or the previous result if `call` does not return in time.

        While an earlier call hangs, the previous result is returned immediately. Raises the
        exceptions of `call`.
        """
        if self.is_hanging and self._serial.is_busy:
            return self.result
        try:
            self.result = await self._serial.run(call, timeout_s=timeout_s)
        except TimeoutError:
            self.is_hanging = True
            return self.result
        except Exception:
            self.is_hanging = False
            raise
        self.is_hanging = False
        return self.result


def _start(call: Callable[[], Result], ended: asyncio.Future[None]) -> asyncio.Future[Result]:
    loop = asyncio.get_running_loop()
    done: asyncio.Future[Result] = loop.create_future()

    def settle(set_outcome: Callable[[], None]) -> None:
        ended.set_result(None)
        if not done.done():
            set_outcome()

    def body() -> None:
        try:
            result = call()
        except Exception as error:  # noqa: BLE001  # raised again where it is awaited
            problem = error
            set_outcome: Callable[[], None] = lambda: done.set_exception(problem)  # noqa: E731
        else:
            set_outcome = lambda: done.set_result(result)  # noqa: E731
        # the loop may have been closed meanwhile
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(settle, set_outcome)

    threading.Thread(target=body, daemon=True).start()
    return done
