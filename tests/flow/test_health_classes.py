"""The failure classes of a plugin, all at once in one fleet, and class l, the failure of health.

`tests.worlds.fleet` describes what is real, a stand-in or simulated. Time runs ten
times as fast as in production (`fleet_parts.FAST`).
"""

import asyncio
import contextlib
import re
import signal
from collections.abc import Collection, Sequence
from pathlib import Path

import orjson
import pytest

from muster.local import nats, webhook
from muster.nats import bus, consumers, streams
from tests.worlds import fault_classes, fleet, fleet_parts

_TIMEOUT_S = 60.0
_QUIET_S = 3.0
_SELF_HEALING = fault_classes.SELF_HEALING[0]
"""Its node is used for all self-healing faults, one after the other."""


async def play_all(
    node: fleet.Node, faults: Collection[fault_classes.Fault] = fault_classes.SELF_HEALING
) -> list[fault_classes.Outcome]:
    return [
        await fault_classes.play(node, fault, timeout_s=_TIMEOUT_S, quiet_s=_QUIET_S)
        for fault in faults
    ]


def unexplained(outcome: fault_classes.Outcome) -> list[str]:
    """Return the problems, without those of a machine that is too busy for the plugins' checks."""
    explained = re.compile("unexpected (alert )?degraded", re.IGNORECASE)
    if not any("reports_checker_silent" in problem for problem in outcome.problems):
        return outcome.problems
    return [problem for problem in outcome.problems if not explained.search(problem)]


@pytest.mark.timeout(240)  # on a busy machine; 20 s on an idle one
def test_each_class_of_failure_gets_its_verdict_its_evidence_and_its_end() -> None:
    async def story() -> list[str]:
        async with asyncio.timeout(230), fleet.fleet() as world:
            nodes = await fault_classes.start_nodes(world, (*fault_classes.FAULTS, _SELF_HEALING))
            playing = [asyncio.create_task(play_all(nodes[_SELF_HEALING.name]))]
            playing += [
                asyncio.create_task(play_all(nodes[fault.name], (fault,)))
                for fault in fault_classes.FAULTS
            ]
            return [
                problem
                for task in playing
                for outcome in await task
                for problem in unexplained(outcome)
            ]

    assert asyncio.run(story()) == []


async def wait_for_tick(url: str) -> None:
    """Wait for health's next watchdog tick."""
    async with bus.Bus(url, producer="tests/flow", name="test", owner=True) as connected:
        ticks = consumers.follow(connected.link, streams.ALERTS, filters=["muster.sys.>"])
        async with contextlib.aclosing(ticks):  # type: ignore[type-var]
            await anext(ticks)


def test_when_health_itself_dies_the_notifier_reports_it_and_its_return(tmp_path: Path) -> None:
    """Class l, with a real health service, a real notifier, NATS and a webhook."""

    def config(name: str, **sections: object) -> tuple[str, str]:
        file = tmp_path / f"{name}.json"
        file.write_bytes(orjson.dumps(sections))
        return "--config", str(file)

    def statuses(received: Sequence[webhook.Received]) -> list[str]:
        bodies = [post.body for post in received if '"health_silent"' in post.body]
        return [orjson.loads(body)["data"]["status"] for body in bodies]

    async def story() -> list[str]:
        async with (
            asyncio.timeout(100),
            contextlib.AsyncExitStack() as stack,
            nats.NatsServer(tmp_path / "nats") as server,
            webhook.WebhookReceiver() as hook,
        ):
            at = {"url": server.url}
            leading = fleet_parts.FAST.health["leading"]
            health = fleet_parts.Service(
                "muster_health", config("health", bus=at, leading=leading), tmp_path / "h.log"
            )
            receiver = {"name": "hook", "webhook": {"url": f"{hook.url}/", "reach": "loopback"}}
            notifier = fleet_parts.Service(
                "muster_notifier",
                config(
                    "notifier",
                    bus=at,
                    receivers=[receiver],
                    group_wait_s=0,
                    group_interval_s=0.1,
                    watchdog={"patience_s": 5},
                ),
                tmp_path / "n.log",
            )
            for service in (health, notifier):
                stack.push_async_callback(service.end)
                await service.start()
                await wait_for_tick(server.url)
            await health.end(signal.SIGKILL)
            await hook.wait_for(lambda posts: statuses(posts) == ["firing"], timeout_s=100)
            await health.start()
            posts = await hook.wait_for(lambda posts: len(statuses(posts)) > 1, timeout_s=100)
            return statuses(posts)

    assert asyncio.run(story()) == ["firing", "resolved"]
