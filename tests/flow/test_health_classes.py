"""The sixteen failure classes of a plugin, all at once on one fleet: each gets its own verdict.

What is real, what is a stand-in and what is simulated, `fleet` says; time runs ten times as fast as
in production (`parts.FAST`).
"""

import asyncio
import contextlib
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
_MENDED = fault_classes.MENDED[0]
"""One node for all of these, one after another."""


async def one_after_another(
    node: fleet.Node, them: Collection[fault_classes.Fault] = fault_classes.MENDED
) -> list[fault_classes.Played]:
    return [
        await fault_classes.played(node, fault, timeout_s=_TIMEOUT_S, quiet_s=_QUIET_S)
        for fault in them
    ]


@pytest.mark.timeout(240)  # on a machine that is busy; 20 s on one that is not
def test_each_class_of_failure_gets_its_verdict_its_evidence_and_its_end() -> None:
    async def story() -> list[str]:
        async with asyncio.timeout(230), fleet.fleet() as world:
            nodes = await fault_classes.started(world, (*fault_classes.FAULTS, _MENDED))
            playing = [asyncio.create_task(one_after_another(nodes[_MENDED.name]))]
            playing += [
                asyncio.create_task(one_after_another(nodes[fault.name], (fault,)))
                for fault in fault_classes.FAULTS
            ]
            return [problem for task in playing for one in await task for problem in one.problems]

    assert asyncio.run(story()) == []


async def ticked(url: str) -> None:
    """Return when health has ticked, from now on."""
    async with bus.Bus(url, producer="tests/flow", name="ear", owner=True) as ear:
        ticks = consumers.follow(ear.link, streams.ALERTS, filters=["muster.sys.>"])
        async with contextlib.aclosing(ticks):  # type: ignore[type-var]
            await anext(ticks)


def test_when_health_itself_dies_the_notifier_says_so_and_when_it_is_back(tmp_path: Path) -> None:
    """Class l. A real health, a real notifier, a webhook; nobody else takes part."""

    def written(name: str, **sections: object) -> tuple[str, str]:
        file = tmp_path / f"{name}.json"
        file.write_bytes(orjson.dumps(sections))
        return "--config", str(file)

    def told(received: Sequence[webhook.Received]) -> list[str]:
        bodies = [one.body for one in received if '"health_silent"' in one.body]
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
                "muster_health", written("health", bus=at, leading=leading), tmp_path / "h.log"
            )
            receiver = {"name": "hook", "webhook": {"url": f"{hook.url}/", "reach": "loopback"}}
            notifier = fleet_parts.Service(
                "muster_notifier",
                written(
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
                await ticked(server.url)
            await health.end(signal.SIGKILL)
            await hook.wait_for(lambda all_: told(all_) == ["firing"], timeout_s=100)
            await health.start()
            seen = await hook.wait_for(lambda all_: len(told(all_)) > 1, timeout_s=100)
            return told(seen)

    assert asyncio.run(story()) == ["firing", "resolved"]
