"""The alert that `helm test` sends through a real NATS, and what it reports about the delivery."""

import asyncio
import contextlib
import os
import subprocess
import sys
from collections.abc import AsyncGenerator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Final

import pytest

import muster
from muster import vocabulary
from muster.local import nats
from muster.nats import bus

# the services' image has no libraries of the command line
POD: Final = """
import runpy, sys
sys.modules.update(cyclopts=None, rich=None)
runpy.run_module("muster.cli.verify_installation", run_name="__main__")
"""


def tick() -> vocabulary.Event:
    return vocabulary.WatchdogTicked(
        node=vocabulary.FLEET, at=datetime.now(UTC), holder="t", leader=7, interval_s=10.0
    )


def outcome(alert: vocabulary.AlertChanged, error: str) -> vocabulary.Event:
    common = vocabulary.NotificationDelivered(
        node=vocabulary.FLEET,
        at=datetime.now(UTC),
        receiver="ops",
        group="{}",
        reason=vocabulary.NotificationReason.FIRST,
        firing=(alert.fingerprint,),
    )
    if not error:
        return common
    return vocabulary.NotificationFailed(
        node=common.node,
        at=common.at,
        receiver=common.receiver,
        group=common.group,
        reason=common.reason,
        firing=common.firing,
        error=error,
    )


@pytest.mark.parametrize(
    ("error", "code", "printed"),
    [
        ("", 0, "passed: ops got the test alert"),
        ("no_such_channel", 1, "failed: ops did not get the test alert: no_such_channel"),
    ],
)
def test_the_outcome_is_the_notifiers_and_no_alert_is_left(
    tmp_path: Path, error: str, code: int, printed: str
) -> None:
    async def story() -> None:
        async with (
            asyncio.timeout(100),
            nats.NatsServer(tmp_path) as server,
            bus.Bus(server.url, producer="t", name="t", owner=True) as link,
        ):
            await link.publish(tick())
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-c", POD),
                env={**os.environ, "NATS_URL": server.url, "NAMESPACE": "muster"},
                stdout=subprocess.PIPE,
            )
            async with contextlib.aclosing(alerts(server.url)) as changes:
                fired = await anext(changes)
                assert (fired.state, fired.leader) == (vocabulary.AlertState.FIRING, 7)
                # a new node: in the group of an earlier test, the alert would wait for an interval
                assert fired.node == f"helm-test-{fired.fingerprint}"
                await link.publish(outcome(fired, error))
                resolved = await anext(changes)
            assert resolved.fingerprint == fired.fingerprint
            assert resolved.state is vocabulary.AlertState.RESOLVED
            out, _ = await process.communicate()
            lines = out.decode().splitlines()
            assert lines[0] == "skipped: muster serves no devices here"
            assert lines[1].startswith(printed)
            assert process.returncode == code

    asyncio.run(story())


async def alerts(url: str) -> AsyncGenerator[vocabulary.AlertChanged, None]:
    since = timedelta(minutes=1)
    async for event in muster.events("alert.changed", since=since, url=url):
        if isinstance(event.data, vocabulary.AlertChanged):
            yield event.data
