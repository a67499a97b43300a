"""Door to threads: runs beside the loop what may hang, and waits no longer than told.

Nobody can end a thread that hangs in the kernel. It is left to itself, as a daemon, so that the
process can end all the same; a pool of threads would be waited for.
"""

import asyncio
import contextlib
import threading
from collections.abc import Callable
from typing import TypeVar

Result = TypeVar("Result")


async def run(work: Callable[[], Result], *, timeout_s: float) -> Result:
    """Return what `work` does. Raises what it raises, or TimeoutError."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[Result] = loop.create_future()

    def settle(result: Result | None, error: BaseException | None) -> None:
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
    async with asyncio.timeout(timeout_s):
        return await done
