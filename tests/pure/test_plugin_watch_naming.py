"""Which resource a socket serves, how many devices it should have, and the kubelet's checkpoint."""

import base64
import tracemalloc

import hypothesis
import msgspec
import pytest
from hypothesis import strategies

from muster_plugin.watch import checkpoint, expectation, naming

GDP = base64.b64encode(b"squat.ai/serial").decode()


@pytest.mark.parametrize(
    ("socket", "resource"),
    [
        (f"gdp-{GDP}-1732345678.sock", "squat.ai/serial"),
        ("gdp-%%%-1732345678.sock", None),
        ("gdp-AAAA-1.sock", None),
        ("nvidiaGPU-1732345678.sock", "nvidia.com/gpu"),
        ("nvidia-gpu.sock", "nvidia.com/gpu"),
        ("nvidia-mig-1g.10gb.sock", "nvidia.com/mig-1g.10gb"),
        ("smarter-net_tun.sock", "smarter-devices/net_tun"),
        ("kubevirt-kvm.sock", "devices.kubevirt.io/kvm"),
        ("amd.com_gpu", "amd.com/gpu"),
        ("intel.com_sriov_netdevice.sock", "intel.com/sriov_netdevice"),
        ("gpu.intel.com-i915.sock", "gpu.intel.com/i915"),
        ("plugin.sock", None),
        ("_.sock", None),
        ("", None),
    ],
)
def test_the_sockets_of_well_known_plugins_name_their_resources(
    socket: str, resource: str | None
) -> None:
    assert naming.resource(socket) == resource


@hypothesis.given(strategies.text(max_size=60))
def test_any_name_of_a_socket_is_accepted(socket: str) -> None:
    resource = naming.resource(socket)
    assert resource is None or naming.RESOURCE.fullmatch(resource)
    assert naming.stem(naming.stem(socket)) == naming.stem(socket)


def test_a_socket_is_matched_to_the_only_resource_of_its_name() -> None:
    resources = ["rdma/hca_a", "rdma/hca_b", "a.com/gpu", "b.com/gpu"]
    assert naming.resource_among("hca_a.sock", naming.by_last_part(resources)) == "rdma/hca_a"
    assert naming.resource_among("gpu.sock", naming.by_last_part(resources)) is None
    assert naming.resource_among("other.sock", naming.by_last_part(resources)) is None


def test_numbers_of_a_start_are_no_part_of_a_stem() -> None:
    assert naming.stem("plugin-1732345678.sock") == "plugin-*.sock"
    assert naming.stem("x-0badcafe12.sock") == "x-*.sock"
    assert naming.stem("gpu0.sock") == "gpu0.sock"


def test_a_count_is_learned_once_it_has_lasted_and_is_never_learned_to_be_less() -> None:
    known = expectation.Expectations({"a.com/set": 4}, {"a.com/kept": 8})
    assert not known.record_listed("a.com/new", 2, 0.0)
    assert not known.record_listed("a.com/new", 3, 20.0)
    assert not known.record_listed("a.com/new", 3, 49.9)
    assert known.record_listed("a.com/new", 3, 50.0)
    assert not known.record_listed("a.com/new", 3, 60.0)
    assert not known.record_listed("a.com/new", 1, 70.0)
    assert not known.record_listed("a.com/new", 1, 170.0)
    known.record_registered("a.com/kept", 9)
    known.record_registered("a.com/dead", 1)
    assert {
        name: known.expected(name)
        for name in ("a.com/set", "a.com/kept", "a.com/new", "a.com/dead", "a.com/unknown")
    } == {"a.com/set": 4, "a.com/kept": 8, "a.com/new": 3, "a.com/dead": 1, "a.com/unknown": None}


def test_what_only_the_checkpoint_holds_need_not_be_listed() -> None:
    known = expectation.Expectations({}, {"a.com/kept": 8})
    for name in ("a.com/kept", "a.com/same", "a.com/fewer", "a.com/none"):
        known.record_registered(name, 8)
    assert known.record_listed("a.com/same", 8, 0.0)
    assert not known.record_listed("a.com/listed-before", 8, 0.0)
    assert not known.record_registered("a.com/listed-before", 9)
    assert known.record_registered("a.com/listed-before", 8)
    assert known.expected("a.com/listed-before") == 8
    assert not known.record_listed("a.com/fewer", 7, 0.0)
    assert not known.record_listed("a.com/none", 0, 0.0)
    assert {
        name: (known.expected(name), known.is_listable(name))
        for name in ("a.com/kept", "a.com/same", "a.com/fewer", "a.com/none")
    } == {
        "a.com/kept": (8, True),
        "a.com/same": (8, True),
        "a.com/fewer": (None, True),
        "a.com/none": (8, False),
    }


def test_what_was_learned_outlasts_a_restart() -> None:
    memory = expectation.Memory(expected={"a.com/x": 8}, resources={"p-*.sock": "a.com/x"})
    assert expectation.decode(expectation.encode(memory)) == memory


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"{",
        b"[]",
        b"[" * 100_000,
        b'{"version":2}',
        b'{"expected":{"":1}}',
        b'{"expected":{"a.com/x":-1}}',
        b'{"expected":{"a.com/\\u001b[31mx":1}}',
        b'{"expected":{"a.com/x\\n":1}}',
        b'{"resources":{"x.sock":"not a resource"}}',
        msgspec.json.encode({"expected": {f"a.com/{number}": 1 for number in range(257)}}),
    ],
    ids=range(11),
)
def test_a_file_with_anything_else_is_refused(text: bytes) -> None:
    with pytest.raises(ValueError, match=r".+"):
        expectation.decode(text)


CHECKPOINT = (
    b'{"Data":{"PodDeviceEntries":[{"PodUID":"u","ContainerName":"c","ResourceName":"a.com/x",'
    b'"DeviceIDs":{"-1":["1"]},"AllocResp":"KAo="}],"RegisteredDevices":{"a.com/x":["1","2"],'
    b'"a.com/dead":[]}},"Checksum":2875433221}'
)


def test_the_checkpoint_holds_the_last_lists_and_what_containers_were_given() -> None:
    assert checkpoint.decode(CHECKPOINT) == checkpoint.Checkpoint(
        {"a.com/x": 2, "a.com/dead": 0}, (checkpoint.Grant("a.com/x", b"(\n"),)
    )


def test_a_checkpoint_of_an_idle_or_older_kubelet_is_read() -> None:
    empty = b'{"Data":{"PodDeviceEntries":null,"RegisteredDevices":{}},"Checksum":1}'
    assert checkpoint.decode(empty) == checkpoint.Checkpoint({}, ())
    older = CHECKPOINT.replace(b'{"-1":["1"]}', b'["1"]')
    assert checkpoint.decode(older) == checkpoint.decode(CHECKPOINT)


@pytest.mark.parametrize(
    "text",
    [
        b"",
        CHECKPOINT[:-40],
        b'{"Data":{}}',
        b'{"Data":{"PodDeviceEntries":[],"RegisteredDevices":[]},"Checksum":1}',
        b"[" * 100_000,
        b"\xff\xfe",
        b'"' + b"x" * checkpoint.BYTES_MAX,
    ],
    ids=range(7),
)
def test_a_checkpoint_of_another_format_is_refused(text: bytes) -> None:
    with pytest.raises(ValueError, match=r".+"):
        checkpoint.decode(text)


@pytest.mark.parametrize(
    ("before", "entry", "after"),
    [
        (b'{"Data":{"PodDeviceEntries":[],"RegisteredDevices":{"a.com/x":[', b'"ab",', b'"c"]}}'),
        (b'{"Data":{"RegisteredDevices":{},"PodDeviceEntries":[', b"{},", b"{}]}"),
    ],
)
def test_the_largest_checkpoint_leaves_most_of_the_memory_limit(
    before: bytes, entry: bytes, after: bytes
) -> None:
    entries = entry * ((checkpoint.BYTES_MAX - 200) // len(entry))
    tracemalloc.start()
    try:
        checkpoint.decode(before + entries + after + b',"Checksum":1}')
        assert tracemalloc.get_traced_memory()[1] < 100 * 1024 * 1024
    finally:
        tracemalloc.stop()


@hypothesis.given(strategies.binary(max_size=100))
def test_any_checkpoint_is_read_or_refused(text: bytes) -> None:
    try:
        read = checkpoint.decode(text)
    except ValueError:
        return
    assert msgspec.to_builtins(read.registered) == dict(read.registered)
