"""A process that competes for a lock, and publishes its term continually while it holds the lock.

It prints the name of the lock's holder whenever it changes.

python leading.py URL NAME TTL_S RENEW_S MARGIN_S
"""

import asyncio
import sys

from muster import leadership
from muster.nats import bus, leader_lock, streams


async def act(url: str, name: str, terms: leader_lock.Timing) -> None:
    async with bus.Bus(url, producer="tests", name=name) as connected:
        key = leader_lock.Key(connected.link, streams.LEADER, "health")
        us = leader_lock.this_process(name)
        async with leader_lock.Lock(key, us=us, timing=terms, on_change=show) as held:
            while True:
                client = connected.link.live_client()
                revision = held.term()
                if client is not None and revision is not None:
                    await client.publish("acted", f"{name} {revision}".encode())
                    await client.flush()
                await asyncio.sleep(0.005)


def show(_: leadership.Leadership, now: leadership.Leadership) -> None:
    sys.stdout.write(f"{now.leader}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    ttl_s, renew_s, margin_s = (float(given) for given in sys.argv[3:])
    asyncio.run(
        act(
            sys.argv[1],
            sys.argv[2],
            leader_lock.Timing(ttl_s=int(ttl_s), renew_s=renew_s, margin_s=margin_s),
        )
    )
