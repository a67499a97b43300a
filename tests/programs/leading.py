"""A process that leads or waits to, and says as which revision it acts, as often as it can.

python leading.py URL NAME TTL_S RENEW_S MARGIN_S
"""

import asyncio
import functools
import sys

from muster import buckets, bus, streams
from muster_health import leader


async def act(url: str, name: str, terms: leader.Terms) -> None:
    async with bus.Bus(url, producer="tests", name=name) as connected:
        lock = leader.Lock(
            functools.partial(buckets.claim, connected.link, streams.LEADER, "test"),
            functools.partial(buckets.release, connected.link, streams.LEADER, "test"),
        )
        async with leader.Leader(lock, name=name, terms=terms) as leading:
            while True:
                client = connected.link.live_client()
                revision = leading.revision()
                if client is not None and revision is not None:
                    await client.publish("acted", f"{name} {revision}".encode())
                    await client.flush()
                await asyncio.sleep(0.005)


if __name__ == "__main__":
    ttl_s, renew_s, margin_s = (float(given) for given in sys.argv[3:])
    asyncio.run(
        act(
            sys.argv[1],
            sys.argv[2],
            leader.Terms(ttl_s=int(ttl_s), renew_s=renew_s, margin_s=margin_s),
        )
    )
