"""Inventories in pages, and events that are longer than a message."""

import random
from datetime import UTC, datetime
from typing import Final

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from muster import codec, inventory_pages, shortening, vocabulary
from muster.nats import assembly, streams
from muster.vocabulary import Device, InventoryReported

AT: Final = datetime(2026, 11, 1, tzinfo=UTC)
EVENT_BYTES: Final = streams.payload_bytes_max(streams.EVENTS)


def devices(count: int, *, reason: str = "") -> tuple[Device, ...]:
    return tuple(
        Device(id=f"{n:05}-{'d' * 40}", resource="example.com/device", reason=reason)
        for n in range(count)
    )


def mounts(count: int) -> tuple[vocabulary.FuseMount, ...]:
    return tuple(
        vocabulary.FuseMount(
            id=f"{n:036}:{n}",
            pod=f"shop/web-{n}",
            connection=n,
            source="s" * 253,
            conditions=(vocabulary.FuseCondition.HUNG,),
        )
        for n in range(count)
    )


def inventory(count: int, *, node: str = "node-a", gpus: int = 0) -> InventoryReported:
    some = vocabulary.GpuNode(
        gpus=tuple(vocabulary.Gpu(uuid=f"GPU-{n}", product="p" * 2_000) for n in range(gpus)),
        resources=(vocabulary.GpuResource(name="nvidia.com/gpu", was="nvidia.com/gpu"),),
        driver_version="550.1",
        problem="GPU-9 cannot be read",
    )
    return InventoryReported(
        node=node,
        plugin="p",
        at=AT,
        devices=devices(count),
        fuse_mounts=mounts(gpus * 5),
        resources=("example.com/device", "nvidia.com/gpu"),
        gpus=some if gpus else None,
    )


def messages(event: InventoryReported, version: int, *, instance: str = "i") -> list[bytes]:
    return [
        codec.encode(
            page,
            event_id=f"{version}-{n}",
            producer="p",
            instance=instance,
            sequence=version,
            boot="",
        )
        for n, page in enumerate(inventory_pages.numbered(event, version))
    ]


def arrivals(
    event: InventoryReported, version: int, *, instance: str = "i"
) -> list[codec.CloudEvent]:
    node = vocabulary.node_token(event.node)
    return [
        codec.decode(f"muster.inventory.{node}.{event.plugin}.{n}", payload, position=version + n)
        for n, payload in enumerate(messages(event, version, instance=instance))
    ]


def test_ten_thousand_devices_fit_into_the_pages_of_one_inventory() -> None:
    payloads = messages(inventory(10_000), 1)
    assert 1 < len(payloads) <= vocabulary.PAGES_MAX
    assert max(map(len, payloads)) <= inventory_pages.PAGE_BYTES_MAX
    assert streams.payload_bytes_max(streams.INVENTORY) >= inventory_pages.PAGE_BYTES_MAX


def test_an_inventory_of_a_usual_node_is_one_page() -> None:
    (payload,) = messages(inventory(64, gpus=8), 5)
    data = codec.decode("muster.inventory.node-a.p.0", payload).data
    assert data == msgspec.structs.replace(inventory(64, gpus=8), version=5)


def test_more_pages_than_the_stream_stores_are_refused() -> None:
    long = msgspec.structs.replace(inventory(0), devices=devices(10_000, reason="x" * 2_000))
    with pytest.raises(inventory_pages.TooManyPages, match="pages, more than 64"):
        inventory_pages.numbered(long, 1)


@given(st.integers(0, 2_000), st.integers(0, 60), st.randoms(use_true_random=False))
def test_pages_in_any_order_are_the_inventory_again(
    count: int, gpus: int, order: random.Random
) -> None:
    event = inventory(count, gpus=gpus)
    pages = arrivals(event, 7)
    first, last = pages[0], None
    order.shuffle(pages)
    assembler = assembly.Assembler()
    for page in pages:
        assert last is None
        last = assembler.add(page)
    assert last is not None
    assert last.data == msgspec.structs.replace(event, version=7)
    assert (last.id, last.position) == (first.id, pages[-1].position)
    assert assembler.forgotten == 0


def test_an_inventory_is_used_only_when_it_is_whole() -> None:
    earlier, later = arrivals(inventory(2_000), 1), arrivals(inventory(1_999), 2)
    assembler = assembly.Assembler()
    seen = [assembler.add(page) for page in (*earlier[:-1], *later)]
    assert [len(event.data.devices) for event in seen if event] == [1_999]  # type: ignore[attr-defined]
    assert assembler.forgotten == len(earlier) - 1


def test_pages_of_two_processes_are_never_mixed() -> None:
    mine, other = arrivals(inventory(600), 1), arrivals(inventory(600), 1, instance="j")
    assembler = assembly.Assembler()
    mixed = [*mine[:1], *other[1:]]
    assert [assembler.add(page) for page in mixed] == [None] * len(mixed)


def test_a_page_that_an_inventory_cannot_have_is_ignored() -> None:
    assembler = assembly.Assembler()
    (page,) = arrivals(inventory(1), 1)
    beyond = msgspec.structs.replace(page.data, page=1)
    assert assembler.add(msgspec.structs.replace(page, data=beyond)) is None
    assert assembler.forgotten == 1
    assert assembler.add(page) is page


def test_an_event_of_another_type_is_passed_on() -> None:
    event = codec.CloudEvent(
        id="e",
        source="s",
        type="device.removed",
        time=AT,
        instance="i",
        sequence=1,
        boot="",
        data=vocabulary.DeviceRemoved(
            node="node-a", plugin="p", at=AT, resource="r", device_id="d"
        ),
    )
    assert assembly.Assembler().add(event) is event


def test_a_node_that_never_ends_its_inventories_loses_its_own_pages_and_no_others() -> None:
    assembler = assembly.Assembler()
    honest = arrivals(inventory(2_000, node="honest"), 1)
    assert [assembler.add(page) for page in honest[:-1]] == [None] * (len(honest) - 1)
    endless = arrivals(inventory(10_000, node="flood"), 1)[:-1]
    for number in range(50):
        for page in endless:
            data = msgspec.structs.replace(page.data, plugin=f"p{number}")
            assert assembler.add(msgspec.structs.replace(page, data=data)) is None
    assert assembler.forgotten > 49 * len(endless) - assembly.WAITING_MAX
    whole = assembler.add(honest[-1])
    assert whole is not None
    assert whole.data == msgspec.structs.replace(inventory(2_000, node="honest"), version=1)


def test_an_inventory_of_an_earlier_plugin_is_read_where_it_was_published() -> None:
    earlier = msgspec.structs.replace(inventory(3))
    payload = codec.encode(earlier, event_id="e", producer="p", instance="i", sequence=1, boot="")
    subject = "muster.event.node-a.p.inventory.reported"
    event = codec.decode(subject, payload, position=9_000, stream="MUSTER_EVENTS")
    assert event.data == earlier
    later = arrivals(msgspec.structs.replace(inventory(3), at=datetime(2026, 11, 2, tzinfo=UTC)), 1)
    upgraded = msgspec.structs.replace(later[0], instance="j", stream="MUSTER_INVENTORY")
    # positions in different streams cannot be compared
    assert event.precedes(upgraded)
    assert not upgraded.precedes(event)


# events that are longer than a message


def sizes(events: tuple[vocabulary.Event, ...]) -> list[int]:
    return [
        len(
            codec.encode(
                e, event_id="e" * 32, producer="plugins/p", instance="i", sequence=1, boot="b"
            )
        )
        for e in events
    ]


def test_an_allocation_of_many_devices_becomes_several() -> None:
    ids = tuple(device.id for device in devices(10_000))
    event = vocabulary.AllocationObserved(
        node="node-a", plugin="p", at=AT, resource="r", device_ids=ids, pod="a/b"
    )
    parts = shortening.fit(event, EVENT_BYTES - inventory_pages.ATTRIBUTES_BYTES)
    assert max(sizes(parts)) <= EVENT_BYTES
    allocations = [part for part in parts if isinstance(part, vocabulary.AllocationObserved)]
    assert tuple(each for part in allocations for each in part.device_ids) == ids
    assert {part.pod for part in allocations} == {"a/b"}


TEXTS: Final = st.one_of(
    st.just(""), st.sampled_from(["x", "\0", "é", "😀"]).map(lambda c: c * 2_048)
)


@given(
    st.builds(
        vocabulary.DeviceHealthChanged,
        node=st.just("a" * 253),
        plugin=st.just("p" * 63),
        at=st.just(AT),
        resource=st.just("r" * 253),
        device_id=st.just("d" * 63),
        health=st.just(vocabulary.Health.UNHEALTHY),
        reason=TEXTS,
        policy=TEXTS,
        evidence=st.lists(
            st.builds(vocabulary.Evidence, source=st.just("s"), observed=TEXTS), max_size=9
        ).map(tuple),
        pods=st.lists(TEXTS, max_size=200).map(tuple),
    )
)
def test_any_event_fits_into_a_message_and_says_what_was_cut(
    event: vocabulary.DeviceHealthChanged,
) -> None:
    limit = EVENT_BYTES - inventory_pages.ATTRIBUTES_BYTES
    (short,) = shortening.fit(event, limit)
    assert max(sizes((short,))) <= EVENT_BYTES
    payload = codec.encode(short, event_id="e", producer="p", instance="i", sequence=1, boot="")
    assert codec.decode(short.subject, payload).data == short
    assert short == event or "(shortened)" in str(short) or "more left out)" in str(short)
    assert isinstance(short, vocabulary.DeviceHealthChanged)
    assert (short.health, short.device_id) == (event.health, event.device_id)


def test_an_event_about_a_mount_fits_into_a_message() -> None:
    mount = vocabulary.FuseMount(
        id="i" * 63,
        pod="p" * 317,
        connection=2**53,
        source="s" * 2_048,
        subtype="t" * 2_048,
        mount_point="m" * 2_048,
    )
    event = vocabulary.FuseMountChanged(
        node="a" * 253,
        plugin="p" * 63,
        at=AT,
        mount=mount,
        condition=vocabulary.FuseCondition.HUNG,
        holds=True,
        text="x" * 2_048,
    )
    (short,) = shortening.fit(event, EVENT_BYTES - inventory_pages.ATTRIBUTES_BYTES)
    assert max(sizes((short,))) <= EVENT_BYTES
    assert isinstance(short, vocabulary.FuseMountChanged)
    assert short.mount.source == "s" * 985 + "... (shortened)"
    assert (short.mount.id, short.mount.pod) == (mount.id, mount.pod)


def test_a_list_is_cut_with_the_number_of_what_is_missing() -> None:
    event = vocabulary.ConfigurationRefused(
        node="node-a", plugin="p", at=AT, config_hash="h", problems=("x" * 900,) * 100
    )
    (short,) = shortening.fit(event, 10_000)
    assert isinstance(short, vocabulary.ConfigurationRefused)
    text = "x" * 285 + "... (shortened)"
    assert short.problems == (*[text] * 20, "(80 more left out)")
