import datetime as dt

from muster import codec, vocabulary


def fact(*, instance: str, sequence: int, position: int) -> codec.CloudEvent:
    at = dt.datetime(2026, 1, 1, tzinfo=dt.UTC)
    data = vocabulary.PluginStopping(
        node="node-a", plugin="device-plugin", at=at, reason=vocabulary.StopReason.SIGNAL
    )
    written = codec.encode(
        data,
        event_id=f"{instance}:{sequence}",
        producer="plugins/device-plugin",
        instance=instance,
        sequence=sequence,
        boot="",
    )
    return codec.decode(data.subject, written, position=position)


def test_facts_of_one_producer_are_ordered_by_its_sequence_whatever_the_stream_says() -> None:
    before = fact(instance="a", sequence=1, position=900)
    after = fact(instance="a", sequence=2, position=1)
    assert before.precedes(after)
    assert not after.precedes(before)


def test_facts_of_two_producers_are_ordered_by_the_stream() -> None:
    before = fact(instance="a", sequence=7, position=1)
    after = fact(instance="b", sequence=1, position=2)
    assert before.precedes(after)
    assert not after.precedes(before)


def test_a_redelivered_fact_does_not_precede_itself() -> None:
    once = fact(instance="a", sequence=7, position=1)
    assert not once.precedes(once)
