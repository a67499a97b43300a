"""Adapter for processes: measures one notifier: storms, latency, rates, receivers without answers.

python -m bench.notifier [--quick] [--json FILE]
"""

import asyncio
import itertools
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Final

from bench import crashes, programs, report
from tests.worlds import webhook_sink

_STORM: Final = 10_000
_AT_ONCE: Final = 200
_AT_ONCE_TIMES: Final = {"group_wait_s": 0, "group_interval_s": 300, "repeat_interval_s": 86_400}


async def measure(options: report.Options) -> list[report.Row]:
    """Measure each scenario separately, with its own NATS server and notifier."""
    directory = Path(tempfile.mkdtemp(prefix="mu-"))
    alerts = 200 if options.quick else 1_000
    try:
        rows = await _storm(directory / "storm")
        rows += _latency_rows(*await _latency(directory, alerts=alerts))
        rows += await _rate(directory / "rate", messages=10 if options.quick else 60)
    finally:
        shutil.rmtree(directory)
    return [*rows, *await crashes.measure(options, of="notifier")] if not options.quick else rows


async def _storm(directory: Path) -> list[report.Row]:
    """Measure 10,000 alerts of one kind on as many nodes, and their resolution."""
    clock = asyncio.get_running_loop().time
    gate = asyncio.Semaphore(_AT_ONCE)
    async with (
        webhook_sink.sink() as a,
        webhook_sink.sink() as b,
        webhook_sink.world(directory) as world,
    ):
        notifier = await world.start(
            {"a": a, "b": b},
            group_by=["kind"],
            group_wait_s=8.0,
            group_interval_s=30.0,
            resolve_wait_s=2.0,
        )
        idle_mib = programs.resident_mib(notifier.pid)

        async def publish(number: int, state: str) -> None:
            async with gate:
                await world.says(number, state, node=f"node-{number}")

        began = clock()
        await asyncio.gather(*(publish(number, "firing") for number in range(_STORM)))
        published_s = clock() - began

        def has_all(taken: list[webhook_sink.Taken]) -> bool:
            return any(message.total >= _STORM for message in taken)

        await a.wait_for(has_all, 60)
        await b.wait_for(has_all, 60)
        notified_s = max(message.at for message in (a.taken[-1], b.taken[-1])) - began
        mib, cpu_s = programs.resident_mib(notifier.pid), programs.cpu_s(notifier.pid)
        await asyncio.gather(*(publish(number, "resolved") for number in range(_STORM)))

        def is_over(taken: list[webhook_sink.Taken]) -> bool:
            return taken[-1].reason == "all_resolved"

        await a.wait_for(is_over, 60)
        await b.wait_for(is_over, 60)
        messages = max(len(a.taken), len(b.taken))
    how = f"{_STORM} alerts of one kind, published within {published_s:.1f} s, group_wait 8 s"
    return [
        report.Row(name="storm notified", value=notified_s, unit="s", target=10, how=how),
        report.Row(
            name="CPU of the storm",
            value=cpu_s,
            unit="s",
            target=None,
            how="of the notifier, its start included, for two receivers",
        ),
        report.Row(
            name="messages a receiver",
            value=messages,
            unit="",
            target=3,
            how="of the whole storm, its end included; group_interval 30 s",
        ),
        report.Row(
            name="memory in the storm",
            value=mib,
            unit="MiB",
            target=64,
            how=f"VmRSS with all alerts firing; {idle_mib:.0f} MiB before",
        ),
    ]


async def _latency(directory: Path, *, alerts: int) -> tuple[list[float], list[float]]:
    """Return the delays from the bus to a receiver: alone, and beside a stuck receiver.

    Both are measured in turns, so that other load on this machine affects both.
    """
    clock = asyncio.get_running_loop().time

    async def latency_s(world: webhook_sink.World, to: webhook_sink.Sink, number: int) -> float:
        began = clock()
        await world.says(number, "firing", node=f"node-{number}")
        await to.wait_for(lambda taken: len(taken) > number, 30)
        return to.taken[-1].at - began

    async with (
        webhook_sink.sink() as first,
        webhook_sink.sink() as second,
        webhook_sink.sink(None) as silent,
        webhook_sink.world(directory / "alone") as alone,
        webhook_sink.world(directory / "beside") as beside,
    ):
        await alone.start({"hook": first}, **_AT_ONCE_TIMES)
        await beside.start({"hook": second, "stuck": silent}, **_AT_ONCE_TIMES)
        waits: tuple[list[float], list[float]] = ([], [])
        for number in range(alerts):
            waits[0].append(await latency_s(alone, first, number))
            waits[1].append(await latency_s(beside, second, number))
        if beside.notifier is not None:
            await beside.notifier.kill()
    return waits


def _latency_rows(alone: list[float], beside: list[float]) -> list[report.Row]:
    p99, p99_beside = report.percentile(alone, 99), report.percentile(beside, 99)
    return [
        report.Row(
            name="alert to webhook, p50",
            value=report.percentile(alone, 50) * 1e3,
            unit="ms",
            target=None,
            how=f"{len(alone)} alerts, one after the other, group_wait 0",
        ),
        report.Row(
            name="alert to webhook, p99",
            value=p99 * 1e3,
            unit="ms",
            target=100,
            how="the same",
        ),
        report.Row(
            name="p50 beside a stuck receiver",
            value=report.percentile(beside, 50) / report.percentile(alone, 50),
            unit="times",
            target=1.1,
            how="the same, and another receiver takes requests and never answers",
        ),
        report.Row(
            name="p99 beside a stuck receiver",
            value=p99_beside / p99,
            unit="times",
            target=1.1,
            how=f"the same: {p99_beside * 1e3:.1f} ms",
        ),
    ]


async def _rate(directory: Path, *, messages: int) -> list[report.Row]:
    """Measure the minimum time between two messages to a receiver with a rate limit."""
    async with webhook_sink.sink() as slow, webhook_sink.world(directory) as world:
        await world.start(
            {"slow": slow}, limits={"slow": {"rate_per_s": 1.0, "burst": 1}}, **_AT_ONCE_TIMES
        )
        for number in range(messages):
            await world.says(number, "firing", node=f"node-{number}")
        await slow.wait_for(lambda taken: len(taken) >= messages, 10 + 2 * messages)
        gaps = [later.at - first.at for first, later in itertools.pairwise(slow.taken)]
        if world.notifier is not None:
            await world.notifier.kill()
    return [
        report.Row(
            name="messages a second to a receiver of 1",
            value=(messages - 1) / (slow.taken[-1].at - slow.taken[0].at),
            unit="1/s",
            target=1.0,
            how=f"{messages} groups at once; shortest time between two: {min(gaps) * 1e3:.0f} ms",
        )
    ]


if __name__ == "__main__":
    sys.exit(report.main("notifier", measure))
