"""The streams and buckets: what each stores, and its limits."""

import pytest

from muster import codec, vocabulary
from muster.nats import streams
from muster_gate import config
from tests.worlds import manifests


@pytest.mark.parametrize("kind", vocabulary.EVENTS, ids=lambda kind: kind.TYPE)
def test_every_event_is_stored_by_one_stream(kind: type[vocabulary.Event]) -> None:
    for template in filter(None, (kind.SUBJECT, kind.EARLIER_SUBJECT)):
        prefix = ".".join(template.split(".")[:2])
        assert [
            stream
            for stream in streams.STREAMS
            if any(subject.startswith(f"{prefix}.") for subject in stream.subjects)
        ] == [streams.required(template)]


def test_reports_of_plugins_and_conclusions_are_in_separate_streams() -> None:
    reported = {k.TYPE for k in vocabulary.EVENTS if issubclass(k, vocabulary.PluginEvent)}
    by_stream = {
        stream: {k.TYPE for k in vocabulary.EVENTS if streams.stream_of(k.SUBJECT) is stream}
        for stream in streams.FOLLOWED
    }
    inventory = {vocabulary.InventoryReported.TYPE}
    assert by_stream[streams.INVENTORY] == inventory
    assert by_stream[streams.EVENTS] == reported - inventory


@pytest.mark.parametrize("stream", [streams.EVENTS, streams.INVENTORY], ids=lambda s: s.name)
def test_one_node_fills_a_small_part_of_a_stream(stream: streams.Stream) -> None:
    mib = 1024**2
    expected = {"MUSTER_EVENTS": 23.4375 * mib, "MUSTER_INVENTORY": 3.0625 * mib}
    templates = {t for kind in vocabulary.EVENTS for t in (kind.SUBJECT, kind.EARLIER_SUBJECT)}
    of_stream = [t for t in templates if t and streams.required(t) is stream]
    subjects = sum(vocabulary.PAGES_MAX if "{page}" in t else 1 for t in of_stream)
    of_broker = sum(".fuse." in t for t in of_stream)
    of_a_subject = stream.per_subject_max * stream.message_bytes_max
    of_a_plugin = (subjects - of_broker) * of_a_subject
    assert of_a_plugin == expected[stream.name] < stream.bytes_max / 20
    assert streams.PLUGINS_MAX == vocabulary.PLUGINS_MAX
    # only one plugin of a node may report mounts
    of_a_node = streams.PLUGINS_MAX * of_a_plugin + of_broker * of_a_subject
    assert of_a_node < stream.bytes_max * 2 / 5


@pytest.mark.parametrize("stream", [streams.EVENTS, streams.INVENTORY], ids=lambda s: s.name)
def test_the_ids_that_one_node_can_have_kept_are_a_small_part_of_a_servers_memory(
    stream: streams.Stream,
) -> None:
    rates = config.Rates()
    # an id can be nearly as long as its whole message
    kept = rates.bytes_per_s * (rates.burst_s + stream.duplicate_window_s)
    nats = manifests.only("production", "StatefulSet", "muster-nats")
    container = nats["spec"]["template"]["spec"]["containers"][0]
    limit = int(container["resources"]["limits"]["memory"].removesuffix("Gi")) * 2**30
    collected = next(v["value"] for v in container["env"] if v["name"] == "GOMEMLIMIT")
    assert kept < limit / 10
    # four nodes together, and everything else
    assert 4 * kept + 256 * 2**20 < int(collected.removesuffix("MiB")) * 2**20 < 0.8 * limit


def test_every_page_of_an_inventory_is_stored_and_no_other() -> None:
    assert streams.INVENTORY.subjects == tuple(f"muster.inventory.*.*.{n}" for n in range(64))


def test_heartbeats_and_requests_are_stored_by_no_stream() -> None:
    assert streams.stream_of(vocabulary.Heartbeat.SUBJECT) is None
    assert streams.stream_of(vocabulary.rpc_subject("a", "p", "probe")) is None


def test_a_filter_finds_its_stream_too() -> None:
    kept_by = {streams.stream_of(f) for f in vocabulary.subject_filters("*", "a.b")}
    assert kept_by == {*streams.FOLLOWED}


@pytest.mark.parametrize("stream", streams.STREAMS, ids=lambda stream: stream.name)
def test_every_stream_is_bounded(stream: streams.Stream) -> None:
    assert 0 < stream.age_max_s <= 90 * 86_400
    assert 0 < stream.bytes_max <= 1024**3
    # the audit log has one subject, and frequent actions must not push out older ones
    most = 100_000 if stream is streams.AUDIT else 1_000
    assert 0 < stream.per_subject_max <= most
    if stream not in {streams.EVENTS, streams.INVENTORY}:
        # a dead letter is an event with headers that contain the reason
        assert stream.message_bytes_max >= codec.EVENT_BYTES_MAX + 4096
    assert 0 < stream.duplicate_window_s <= stream.age_max_s


@pytest.mark.parametrize("bucket", streams.BUCKETS, ids=lambda bucket: bucket.name)
def test_every_bucket_is_bounded(bucket: streams.Bucket) -> None:
    assert 0 < bucket.value_bytes_max < bucket.bytes_max <= 1024**3


def test_names_and_subjects_are_each_used_once() -> None:
    names = [s.name for s in streams.STREAMS] + [b.name for b in streams.BUCKETS]
    assert len(names) == len(set(names))
    subjects = [subject for stream in streams.STREAMS for subject in stream.subjects]
    assert len(subjects) == len(set(subjects))


@pytest.mark.parametrize("stream", streams.FOLLOWED, ids=lambda stream: stream.name)
def test_a_full_stream_with_a_young_oldest_message_removes_too_early(
    stream: streams.Stream,
) -> None:
    full, short_s = stream.bytes_max, stream.kept_min_s - 1
    assert 0 < stream.kept_min_s < stream.age_max_s
    assert streams.early_eviction(stream, full // 2, short_s) == ""
    assert streams.early_eviction(stream, full, stream.kept_min_s) == ""
    mib = full // 2**20
    assert streams.early_eviction(stream, full, short_s) == (
        f"{stream.name} has {mib} of {mib} MiB, and its oldest message is {short_s:.0f} s old; "
        f"messages should stay for at least {stream.kept_min_s:.0f} s"
    )
