"""Attacks from inside the plugin's own pod, with its own token, on the production overlay."""

import asyncio
import time
from collections.abc import Callable

import pytest

from tests.worlds import real_cluster
from tests.worlds.hostile_cluster import EVENTS, World

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]

ATTACK_S = 25.0
VERDICT_S = 10.0
"""On a machine that also runs the cluster and the attack; 2 s is usual."""
RECOVERED_S = 60.0


@pytest.fixture(scope="module")
def world(cluster: real_cluster.Cluster, tmp_path_factory: pytest.TempPathFactory) -> World:
    folder = tmp_path_factory.mktemp("hostile")
    cluster.install_production(folder)
    return World(cluster, folder, cluster.node)


@pytest.mark.parametrize("attack", ["large", "names", "events", "storm", "medium"])
def test_an_attack_harms_no_service_and_no_other_node_and_its_own_node_is_back_after_it(
    world: World, attack: str, record_property: Callable[[str, object], None]
) -> None:
    world.until_back(world.node, within_s=100)
    before = world.services()
    assert {said.split()[0] for _, conditions in before.values() for said in conditions} == {"True"}

    async def story() -> dict[str, int]:
        async with world.victim(attack) as victim:
            published = await world.kept(victim)
            assert sorted(published.values()) == [1, EVENTS]
            attacking = asyncio.create_task(asyncio.to_thread(world.attack, attack, ATTACK_S))
            await asyncio.sleep(ATTACK_S / 3)
            victim.failing.set()
            record_property("verdict_s", await world.until_fallen(victim, within_s=VERDICT_S))
            counts = await attacking
            assert await world.kept(victim) == published
            return counts

    counts = asyncio.run(story())
    record_property("counts", counts)
    assert counts.keys() - {"sent", "opened"}, "NATS objected to nothing"
    began = time.monotonic()
    world.until_back(world.node, within_s=RECOVERED_S)
    record_property("recovered_s", time.monotonic() - began)
    assert world.services() == before
