import asyncio

import pytest

from muster import connection
from muster.local import nats


@pytest.mark.parametrize("turns", range(8))
def test_leaving_while_a_dial_is_refused_never_hangs(turns: int) -> None:
    async def story() -> None:
        url = f"nats://127.0.0.1:{nats.free_port()}"
        async with asyncio.timeout(30), connection.Connection(url, name="test"):
            for _ in range(turns):
                await asyncio.sleep(0)

    asyncio.run(story())
