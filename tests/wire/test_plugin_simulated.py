"""Simulated GPUs: the script of faults, and the interval of polls."""

import asyncio
import contextlib
from pathlib import Path

from muster_plugin.config import settings
from muster_plugin.gpu import evaluation as gpu_source
from muster_plugin.gpu import simulated
from muster_plugin.model import advertised, gpu


def test_a_script_that_cannot_be_read_was_not_read_and_changes_no_fault(tmp_path: Path) -> None:
    async def story() -> None:
        script = tmp_path / "faults"
        script.write_text('{"device": 0, "xid": 79}')
        simulated_gpus = settings.SimulatedGpus(count=1, faults=str(script))
        source = simulated.SimulatedSource(simulated_gpus, "n1", poll_s=1000)
        created_at = source.checked_at[simulated.KIND]
        (poll,) = (await source.first_scan(1)).polls
        read_at = source.checked_at
        assert (poll.error, list(read_at)) == ("GPU_IS_LOST", [simulated.KIND])
        assert read_at[simulated.KIND] > created_at
        script.unlink()
        script.mkdir()
        (poll,) = (await source.first_scan(1)).polls
        assert (poll.error, source.checked_at) == ("GPU_IS_LOST", read_at)
        script.rmdir()
        (poll,) = (await source.first_scan(1)).polls
        assert poll.error == ""
        assert source.checked_at[simulated.KIND] > read_at[simulated.KIND]

    asyncio.run(story())


def test_without_a_script_no_age_of_reading_one_is_reported() -> None:
    async def story() -> None:
        source = simulated.SimulatedSource(settings.SimulatedGpus(count=1), "n1", poll_s=1000)
        await source.first_scan(1)
        assert source.checked_at == {}

    asyncio.run(story())


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
