"""A task that waits for an event gets it, also if older events are dropped meanwhile."""

import asyncio
from datetime import UTC, datetime

import pytest

from muster import codec, vocabulary
from muster.cli import events

AT = datetime(2026, 1, 2, tzinfo=UTC)


def message(number: int) -> codec.CloudEvent:
    event = vocabulary.PluginStarted(
        node=f"node-{number}", at=AT, plugin="p", version="1", instance="i"
    )
    payload = codec.encode(
        event, event_id=f"i:{number}", producer="p", instance="i", sequence=number + 1, boot="b"
    )
    return codec.decode(event.subject, payload)


def test_no_event_is_skipped_when_old_ones_are_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events, "_KEPT_MAX", 4)

    async def story() -> None:
        recorder = events.Recorder()

        def is_last(event: vocabulary.PluginStarted) -> bool:
            return event.node == "node-5"

        waiting = asyncio.create_task(recorder.first(vocabulary.PluginStarted, is_last, since=0.0))
        for number in range(4):
            await recorder.record(message(number))
            await asyncio.sleep(0)
        # the next event drops two, so the last one gets an index that was already checked
        await recorder.record(message(4))
        await recorder.record(message(5))
        async with asyncio.timeout(10):
            _, event = await waiting
        assert event.node == "node-5"

    asyncio.run(story())
