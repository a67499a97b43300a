"""The sixteen failure classes of a plugin, all at once on one fleet: each gets its own verdict.

What is real, what is a stand-in and what is simulated, `fleet` says; time runs ten times as fast as
in production (`parts.FAST`).
"""

import asyncio
from collections.abc import Collection

from tests.flow import faults, fleet

_TIMEOUT_S = 25.0
_QUIET_S = 3.0
_MENDED = faults.MENDED[0]
"""One node for all of these, one after another."""


async def one_after_another(
    node: fleet.Node, them: Collection[faults.Fault] = faults.MENDED
) -> list[faults.Played]:
    return [
        await faults.played(node, fault, timeout_s=_TIMEOUT_S, quiet_s=_QUIET_S) for fault in them
    ]


def test_each_class_of_failure_gets_its_verdict_its_evidence_and_its_end() -> None:
    async def story() -> list[str]:
        async with asyncio.timeout(55), fleet.fleet() as world:
            nodes = await faults.started(world, (*faults.FAULTS, _MENDED))
            playing = [asyncio.create_task(one_after_another(nodes[_MENDED.name]))]
            playing += [
                asyncio.create_task(one_after_another(nodes[fault.name], (fault,)))
                for fault in faults.FAULTS
            ]
            return [problem for task in playing for one in await task for problem in one.problems]

    assert asyncio.run(story()) == []
