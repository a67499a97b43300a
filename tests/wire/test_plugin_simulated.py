"""GPUs that exist only here."""

import asyncio
import contextlib

from muster_plugin.config import settings
from muster_plugin.gpu import evaluation as gpu_source
from muster_plugin.gpu import simulated
from muster_plugin.model import advertised, gpu


def test_simulated_gpus_are_polled_as_often_as_is_reported_last() -> None:
    async def story() -> None:
        source = simulated.SimulatedSource(settings.SimulatedGpus(count=1), "n1", poll_s=1000)
        heard: asyncio.Queue[gpu_source.Observed] = asyncio.Queue()
        await source.first_scan(1)
        following = asyncio.create_task(source.observe(heard.put_nowait))
        await asyncio.sleep(0)
        source.set_poll_interval(0.01)
        async with asyncio.timeout(30):
            polls = [await heard.get() for _ in range(2)]
        assert [poll.gpu for poll in polls if isinstance(poll, gpu.Poll)] == [
            advertised.gpu_uuid("n1", 0)
        ] * 2
        following.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await following

    asyncio.run(story())
