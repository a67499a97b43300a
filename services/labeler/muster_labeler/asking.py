"""Adapter: a terminal: asks a person whether something shall be done."""

import asyncio
import sys


async def agreed(question: str) -> bool:
    """Ask until a line comes; only `y` or `yes` is yes.

    By the loop and not in a thread: who interrupts the question would wait for that thread.
    """
    sys.stderr.write(f"{question} [y/N] ")
    sys.stderr.flush()
    loop, file = asyncio.get_running_loop(), sys.stdin.fileno()
    answer: asyncio.Future[str] = loop.create_future()

    def read() -> None:
        loop.remove_reader(file)
        answer.set_result(sys.stdin.readline())

    loop.add_reader(file, read)
    try:
        return (await answer).strip().lower() in {"y", "yes"}
    finally:
        loop.remove_reader(file)
