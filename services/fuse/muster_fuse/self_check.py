"""Adapter for the broker's socket: checks the broker with a hello and a complete mount.

Both use a socket like a pod's, so that they fail if a pod's request would fail. If the broker is
not in a pod, the socket accepts processes in the broker's own cgroup.
"""

import asyncio
import contextlib
import errno
import socket
import time
from pathlib import Path
from typing import Final

from muster.service import logs
from muster_fuse import protocol
from muster_fuse.broker import service
from muster_fuse.kernel import jobs, mounter_client
from muster_fuse.request import caller

HELLO_PERIOD_S: Final = 5.0
_HELLO_S: Final = 4.0
_HELLOS_MISSED_MAX: Final = 6
_AFTER_FAILURE_S: Final = 5.0
_TESTS_MISSED_MAX: Final = 3
_CGROUP: Final = Path("/proc/self/cgroup")


class SelfCheck:
    """Checks the broker through the socket at `path`."""

    def __init__(
        self,
        broker: service.Broker,
        mounter: mounter_client.Mounter,
        path: Path,
        *,
        period_s: float,
    ) -> None:
        self.outcome: jobs.Outcome | None = None
        """The outcome of the last self-test; None before the first."""
        self.seconds = 0.0
        """How long the last self-test took."""
        self.tested_at: float | None = None
        self.answered_at = time.monotonic()
        """When the broker last answered a hello; before that, when this object was created."""
        self.changed = asyncio.Event()
        """Set when the outcome of a test differs from that of the previous test."""
        self._broker = broker
        self._mounter = mounter
        self._path = path
        self._period_s = period_s

    async def run(self) -> None:
        """Check until cancelled. Raises OSError if the socket cannot be created."""
        # a pod without a name: its mounts are neither counted nor reported
        uid = caller.pod_uid(_CGROUP.read_text("ascii")) or ""
        await self._broker.open(caller.Pod(uid=uid, namespace="", name=""), self._path)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._say_hello())
            tasks.create_task(self._test())

    def problem(self, now: float) -> str | None:
        """Return why pods may be unable to mount; None if a recent self-test passed."""
        if self.outcome is None or self.tested_at is None:
            return "the self-test has not run yet"
        if self.outcome.errno:
            return f"the self-test failed: {self.outcome.text} ({self.outcome.stage})"
        if now - self.tested_at > _TESTS_MISSED_MAX * self._period_s:
            return f"the last self-test was {now - self.tested_at:.0f} s ago"
        return None

    def stuck(self, now: float) -> str | None:
        """Return why the broker counts as stuck; None if it recently answered a hello."""
        age_s = now - self.answered_at
        if age_s > _HELLOS_MISSED_MAX * HELLO_PERIOD_S:
            return f"the broker's socket last answered {age_s:.0f} s ago"
        return None

    async def _say_hello(self) -> None:
        while True:
            with contextlib.suppress(OSError, TimeoutError, protocol.MalformedPacket):
                async with asyncio.timeout(_HELLO_S):
                    if await self._is_answered():
                        self.answered_at = time.monotonic()
            await asyncio.sleep(HELLO_PERIOD_S)

    async def _is_answered(self) -> bool:
        loop = asyncio.get_running_loop()
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as client:
            client.settimeout(0)
            await loop.sock_connect(client, str(self._path))
            await loop.sock_sendall(client, protocol.request(protocol.Operation.HELLO))
            packet = await loop.sock_recv(client, protocol.PACKET_MAX)
        return protocol.parse_reply(packet).errno == 0

    async def _test(self) -> None:
        while True:
            began = time.monotonic()
            outcome = await self._mounter.self_test(jobs.SelfTestJob(str(self._path)))
            self.tested_at = time.monotonic()
            self.seconds = self.tested_at - began
            before, self.outcome = self.outcome, outcome
            if before is None or before.errno != outcome.errno:
                self._report(outcome)
                self.changed.set()
            soon_s = min(_AFTER_FAILURE_S, self._period_s)
            await asyncio.sleep(soon_s if outcome.errno else self._period_s)

    @staticmethod
    def _report(outcome: jobs.Outcome) -> None:
        if outcome.errno:
            code = errno.errorcode.get(outcome.errno, str(outcome.errno))
            logs.logger().error(
                "self_test_failed", problem=outcome.text, stage=outcome.stage, errno=code
            )
        else:
            logs.logger().info("self_test_passed")
