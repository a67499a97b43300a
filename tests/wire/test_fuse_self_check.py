"""The problems that the broker finds in itself, by a mount and a HELLO of its own."""

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable

from muster_fuse import self_check
from muster_fuse.kernel import mounter
from tests.worlds import fuse_broker, fuse_pods

pytestmark = fuse_pods.needs_pods()


def checked(
    story: Callable[[self_check.SelfCheck, fuse_broker.Running], Awaitable[None]],
    *,
    period_s: float = 60.0,
    deadline_s: float = mounter.DEADLINE_S,
) -> None:
    """Run a story while a broker checks itself."""
    with fuse_broker.running(deadline_s=deadline_s) as broker:

        async def whole() -> None:
            check = self_check.SelfCheck(
                broker.broker, broker.mounter, broker.directory / "own.sock", period_s=period_s
            )
            assert check.problem(0.0) == "the self-test has not run yet"
            running = asyncio.create_task(check.run())
            try:
                await check.changed.wait()
                await story(check, broker)
            finally:
                running.cancel()
                await asyncio.wait([running])

        broker.call(whole())


def test_a_broker_that_mounts_and_answers_has_no_problem_until_its_tests_are_old() -> None:
    async def story(check: self_check.SelfCheck, _: fuse_broker.Running) -> None:
        assert check.tested_at is not None
        assert check.problem(check.tested_at + 179) is None
        assert check.problem(check.tested_at + 181) == "the last self-test was 181 s ago"
        assert check.stuck(check.answered_at + 29) is None
        assert check.stuck(check.answered_at + 31) == "the broker's socket last answered 31 s ago"

    checked(story)


def test_a_mounter_that_is_frozen_is_a_problem_until_another_has_mounted() -> None:
    async def story(check: self_check.SelfCheck, broker: fuse_broker.Running) -> None:
        assert check.tested_at is not None
        assert broker.mounter.pid is not None
        os.kill(broker.mounter.pid, signal.SIGSTOP)
        check.changed.clear()
        await check.changed.wait()
        assert check.problem(check.tested_at) == (
            "the self-test failed: the mounter did not answer (mounter)"
        )
        check.changed.clear()
        await check.changed.wait()
        assert check.problem(check.tested_at) is None

    checked(story, period_s=0.1, deadline_s=1.0)
