"""Door to threads: runs beside the loop what may hang, and waits no longer than told.

Nobody can end a thread that hangs in the kernel. It is left to itself, as a daemon, so that the
process can end all the same (a pool would be waited for); and what hangs is not begun again before
it has come to an end, so that it costs one thread and not one for every try.
"""

import asyncio
import contextlib
import threading
from collections.abc import Callable
from typing import TypeVar

Result = TypeVar("Result")


class Lane:
    """Where one thing is done at a time."""

    def __init__(self) -> None:
        self._last: asyncio.Future[None] | None = None

    async def run(self, work: Callable[[], Result], *, timeout_s: float) -> Result:
        """Return what `work` does. Raises what it raises, or TimeoutError."""
        async with asyncio.timeout(timeout_s):
            while self._last is not None and not self._last.done():
                await asyncio.wait([self._last])
            self._last = ended = asyncio.get_running_loop().create_future()
            return await _begin(work, ended)


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
