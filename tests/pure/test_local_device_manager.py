import hypothesis
import pytest
from hypothesis import stateful
from hypothesis import strategies as st

from muster.local.kubelet import device_manager, rules

GPU = "nvidia.com/gpu"
NOBODY = device_manager.Options()


def registered(
    *ids: str, preferred: bool = False, per_socket: bool = True
) -> device_manager.DeviceManager:
    manager = device_manager.DeviceManager(per_socket=per_socket)
    client = manager.connecting(GPU, "/s/a.sock")
    manager.connected(client, device_manager.Options(preferred_allocation=preferred))
    manager.listed(GPU, [device_manager.Device(id=id_) for id_ in ids])
    return manager


def newest_ends(
    manager: device_manager.DeviceManager, now: float = 5.0
) -> device_manager.Client | None:
    client = manager.client(GPU)
    assert client is not None
    return manager.stream_ended(client, now)


def wish(count: int, *, pod: str = "pod-1") -> device_manager.Request:
    return device_manager.Request(pod=pod, container="main", resource=GPU, count=count)


def given(manager: device_manager.DeviceManager, request: device_manager.Request) -> frozenset[str]:
    offer = manager.offer(request)
    assert offer is not None
    return manager.grant(request, manager.take(offer), b"").ids


def shown(manager: device_manager.DeviceManager) -> tuple[dict[str, int], dict[str, int]]:
    return manager.capacity(), manager.allocatable()


def test_a_message_replaces_the_whole_list() -> None:
    manager = registered("0", "1")

    manager.listed(GPU, [device_manager.Device(id="2")])

    assert shown(manager) == ({GPU: 1}, {GPU: 1})
    assert manager.lists()[GPU].healthy == {"2"}


def test_an_empty_list_shows_zero_of_zero() -> None:
    manager = registered("0")

    manager.listed(GPU, [])

    assert shown(manager) == ({GPU: 0}, {GPU: 0})


@pytest.mark.parametrize("health", ["Unhealthy", "healthy", "Broken", ""])
def test_only_the_word_healthy_is_healthy(health: str) -> None:
    manager = registered()

    manager.listed(
        GPU, [device_manager.Device(id="0", health=health), device_manager.Device(id="1")]
    )

    assert shown(manager) == ({GPU: 2}, {GPU: 1})


def test_an_id_sent_with_both_healths_counts_twice() -> None:
    manager = registered()

    manager.listed(
        GPU,
        [
            device_manager.Device(id="0"),
            device_manager.Device(id="0", health="Unhealthy"),
            device_manager.Device(id="1"),
        ],
    )

    assert shown(manager) == ({GPU: 3}, {GPU: 2})


def test_a_resource_without_a_first_message_is_not_shown() -> None:
    manager = device_manager.DeviceManager()

    manager.connected(manager.connecting(GPU, "/s/a.sock"), NOBODY)

    assert shown(manager) == ({}, {})
    with pytest.raises(device_manager.AllocationError) as refused:
        manager.offer(wish(1))
    assert str(refused.value) == "cannot allocate unregistered device nvidia.com/gpu"


def test_the_end_of_the_stream_makes_every_device_unhealthy_and_stops_the_endpoint() -> None:
    manager = registered("0", "1")

    closed = newest_ends(manager)

    assert closed == device_manager.Client(resource=GPU, socket="/s/a.sock", number=1)
    assert shown(manager) == ({GPU: 2}, {GPU: 0})
    with pytest.raises(device_manager.AllocationError) as refused:
        manager.offer(wish(1))
    assert str(refused.value) == (
        "no healthy devices present; cannot allocate unhealthy devices nvidia.com/gpu"
    )


def test_after_the_grace_the_lists_are_gone_and_the_key_stays_at_zero() -> None:
    manager = registered("0", "1")
    newest_ends(manager)

    kept = manager.status(305.0)
    late = manager.status(305.1)
    later = manager.status(315.0)

    assert kept == device_manager.Status(
        capacity={GPU: 2}, allocatable={GPU: 0}, removed=frozenset()
    )
    assert late == device_manager.Status(capacity={}, allocatable={}, removed=frozenset({GPU}))
    assert later == device_manager.Status(capacity={}, allocatable={}, removed=frozenset())
    assert shown(manager) == ({GPU: 0}, {GPU: 0})
    with pytest.raises(device_manager.AllocationError) as refused:
        manager.offer(wish(1))
    assert str(refused.value) == "cannot allocate unregistered device nvidia.com/gpu"


def test_a_registration_within_the_grace_keeps_the_old_list_until_its_first_message() -> None:
    manager = registered("0", "1")
    newest_ends(manager)

    manager.connected(manager.connecting(GPU, "/s/b.sock"), NOBODY)

    assert shown(manager) == ({GPU: 2}, {GPU: 0})
    assert manager.status(1000.0).removed == frozenset()


def test_messages_of_both_streams_replace_the_list() -> None:
    manager = registered("old")
    manager.connected(manager.connecting(GPU, "/s/b.sock"), NOBODY)

    manager.listed(GPU, [device_manager.Device(id="new")])
    manager.listed(GPU, [device_manager.Device(id="old")])

    assert manager.lists()[GPU].healthy == {"old"}


def test_up_to_1_36_the_end_of_the_old_stream_disconnects_the_new_client() -> None:
    manager = registered("0", per_socket=False)
    old = manager.client(GPU)
    assert old is not None
    new = manager.connecting(GPU, "/s/b.sock")
    manager.connected(new, NOBODY)

    assert manager.stream_ended(old, 5.0) == new

    assert shown(manager) == ({GPU: 1}, {GPU: 0})
    assert manager.stream_ended(old, 5.1) is None


def test_since_1_37_the_end_of_one_of_two_streams_leaves_the_list_to_the_other() -> None:
    manager = registered("0")
    old = manager.client(GPU)
    new = manager.connecting(GPU, "/s/b.sock")
    manager.connected(new, NOBODY)

    assert newest_ends(manager) == new

    assert shown(manager) == ({GPU: 1}, {GPU: 1})
    assert manager.callee(GPU) == manager.client(GPU) == old
    assert newest_ends(manager, 5.1) == old
    assert shown(manager) == ({GPU: 1}, {GPU: 0})


def test_since_1_37_a_connected_socket_is_refused_and_then_forgotten() -> None:
    manager = registered("0")
    first = manager.client(GPU)
    assert first is not None
    second = manager.connecting(GPU, "/s/a.sock")

    with pytest.raises(device_manager.AlreadyConnected) as refused:
        manager.connected(second, NOBODY)
    assert str(refused.value) == "device plugin already connected: /s/a.sock"
    manager.forget(second)

    assert manager.stream_ended(first, 5.0) is None
    assert shown(manager) == ({GPU: 1}, {GPU: 1})


def test_up_to_1_36_a_message_of_an_orphaned_stream_counts_but_nothing_can_be_allocated() -> None:
    manager = registered("0", per_socket=False)
    manager.connected(manager.connecting(GPU, "/s/b.sock"), NOBODY)
    newest_ends(manager)

    manager.listed(GPU, [device_manager.Device(id="0")])

    assert shown(manager) == ({GPU: 1}, {GPU: 1})
    offer = manager.offer(wish(1))
    assert offer is not None
    manager.take(offer)
    with pytest.raises(device_manager.AllocationError) as refused:
        manager.callee(GPU)
    assert str(refused.value) == "endpoint nvidia.com/gpu has been stopped"
    assert rules.admission_error(str(refused.value)) == (
        "Allocate failed due to endpoint nvidia.com/gpu has been stopped, which is unexpected"
    )


def test_up_to_1_36_a_failed_registration_drops_the_working_client() -> None:
    manager = registered("0", per_socket=False)
    works = manager.client(GPU)
    assert works is not None

    manager.forget(manager.connecting(GPU, "/s/missing.sock"))

    assert manager.stream_ended(works, 5.0) is None
    assert shown(manager) == ({GPU: 1}, {GPU: 1})


def test_since_1_37_a_failed_registration_leaves_the_working_client() -> None:
    manager = registered("0")
    works = manager.client(GPU)

    manager.forget(manager.connecting(GPU, "/s/missing.sock"))

    assert newest_ends(manager) == works
    assert shown(manager) == ({GPU: 1}, {GPU: 0})


def test_after_a_restart_resources_are_known_and_empty_and_pods_keep_their_devices() -> None:
    before = registered("0", "1")
    given(before, wish(1))

    after = device_manager.DeviceManager()
    after.restore(before.checkpoint(), 100.0)

    assert shown(after) == ({GPU: 0}, {GPU: 0})
    assert [(grant.pod, grant.ids) for grant in after.grants()] == [("pod-1", frozenset({"0"}))]
    assert after.status(400.1).removed == {GPU}


def test_after_a_restart_the_plugin_registers_and_finds_its_devices_reserved() -> None:
    before = registered("0", "1")
    given(before, wish(1))
    after = device_manager.DeviceManager()
    after.restore(before.checkpoint(), 100.0)

    after.connected(after.connecting(GPU, "/s/b.sock"), NOBODY)
    after.listed(GPU, [device_manager.Device(id="0"), device_manager.Device(id="1")])

    assert shown(after) == ({GPU: 2}, {GPU: 2})
    assert given(after, wish(1, pod="pod-2")) == {"1"}


def test_devices_stay_reserved_until_the_pod_ends_even_if_the_id_disappears_meanwhile() -> None:
    manager = registered("0")
    given(manager, wish(1))

    manager.listed(GPU, [])
    manager.listed(GPU, [device_manager.Device(id="0")])

    with pytest.raises(device_manager.AllocationError) as refused:
        manager.offer(wish(1, pod="pod-2"))
    assert str(refused.value) == (
        "requested number of devices unavailable for nvidia.com/gpu. Requested: 1, Available: 0"
    )
    manager.release("pod-1")
    assert given(manager, wish(1, pod="pod-2")) == {"0"}


def test_a_container_that_has_its_devices_needs_no_second_allocate() -> None:
    manager = registered("0", "1")
    given(manager, wish(1))

    assert manager.offer(wish(1)) is None
    with pytest.raises(device_manager.AllocationError) as refused:
        manager.offer(wish(2))
    assert str(refused.value) == (
        'pod "pod-1" container "main" changed request for resource "nvidia.com/gpu" from 1 to 2'
    )


def test_a_pod_admitted_again_fails_when_its_device_is_unhealthy() -> None:
    manager = registered("0", "1")
    given(manager, wish(1))
    manager.listed(
        GPU, [device_manager.Device(id="0", health="Unhealthy"), device_manager.Device(id="1")]
    )

    with pytest.raises(device_manager.AllocationError) as refused:
        manager.offer(wish(1))

    assert str(refused.value) == (
        "previously allocated devices are no longer healthy; "
        "cannot allocate unhealthy devices nvidia.com/gpu"
    )


@pytest.mark.parametrize(
    ("answer", "ids"),
    [
        (["3", "1"], {"1", "3"}),
        (["3"], {"0", "3"}),
        ([], {"0", "1"}),
        (["3", "3", "nowhere"], {"0", "3"}),
        (["3", "2", "1"], {"1", "2"}),
    ],
)
def test_a_preference_is_intersected_with_what_is_free_and_filled_up(
    answer: list[str], ids: set[str]
) -> None:
    manager = registered("0", "1", "2", "3", preferred=True)
    offer = manager.offer(wish(2))
    assert offer is not None

    assert manager.wants_preference(offer)
    assert manager.take(offer, answer) == ids


def test_devices_of_init_containers_are_given_to_later_containers_first() -> None:
    manager = registered("0", "1", "2")
    init = device_manager.Request(pod="pod-1", container="init", resource=GPU, count=1)
    reusable = given(manager, init)

    offer = manager.offer(wish(2), reusable=reusable)

    assert offer == device_manager.Offer(
        request=wish(2), reused=frozenset({"0"}), available=frozenset({"1", "2"})
    )
    assert manager.take(offer) == {"0", "1"}


def test_what_was_taken_is_free_again_when_the_plugin_refuses() -> None:
    manager = registered("0")
    offer = manager.offer(wish(1))
    assert offer is not None
    manager.take(offer)

    manager.abandon(GPU)

    assert given(manager, wish(1, pod="pod-2")) == {"0"}


def test_devices_are_recorded_by_numa_node() -> None:
    manager = registered()
    manager.listed(
        GPU,
        [
            device_manager.Device(id="0", numa_nodes=(0, 1)),
            device_manager.Device(id="1", numa_nodes=(1,)),
            device_manager.Device(id="2"),
        ],
    )
    offer = manager.offer(wish(3))
    assert offer is not None

    grant = manager.grant(wish(3), manager.take(offer), b"answer")

    assert grant.ids_by_node == {0: ("0",), 1: ("0", "1"), -1: ("2",)}
    assert grant.ids == {"0", "1", "2"}


@pytest.mark.parametrize(
    ("version", "name", "text"),
    [
        ("v1beta1", "nvidia.com/gpu", None),
        ("v1beta1", "A.b/c", 'the ResourceName "A.b/c" is invalid'),
        ("v1beta1", "a.b/C_d.e-f", None),
        ("v1beta1", "noslash", 'the ResourceName "noslash" is invalid'),
        ("v1beta1", "a/b/c", 'the ResourceName "a/b/c" is invalid'),
        ("v1beta1", "/gpu", 'the ResourceName "/gpu" is invalid'),
        ("v1beta1", "a/", 'the ResourceName "a/" is invalid'),
        ("v1beta1", "kubernetes.io/x", 'the ResourceName "kubernetes.io/x" is invalid'),
        ("v1beta1", "requests.a.b/x", 'the ResourceName "requests.a.b/x" is invalid'),
        (
            "v1alpha2",
            "nvidia.com/gpu",
            (
                'requested API version "v1alpha2" is not supported by kubelet. '
                'Supported version is ["v1beta1"]'
            ),
        ),
    ],
)
def test_a_bad_version_or_name_is_refused_with_the_kubelets_text(
    version: str, name: str, text: str | None
) -> None:
    assert rules.refusal(version, name) == text


def test_the_prefix_of_a_quota_costs_the_domain_nine_characters() -> None:
    domain = ".".join(["a" * 60] * 4)  # 243 characters

    assert rules.is_extended_resource(f"{domain}a/x")
    assert not rules.is_extended_resource(f"{domain}aa/x")
    assert rules.is_extended_resource(f"a/{'x' * 63}")
    assert not rules.is_extended_resource(f"a/{'x' * 64}")


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0"), (8, "8"), (1000, "1k"), (1500, "1500"), (5000, "5k"), (2_000_000, "2M")],
)
def test_quantities_are_written_in_canonical_form(count: int, text: str) -> None:
    assert rules.quantity(count) == text


@hypothesis.given(st.integers(min_value=0, max_value=10**15))
def test_a_quantity_reads_back_as_the_same_count(count: int) -> None:
    assert rules.count(rules.quantity(count)) == count


@pytest.mark.parametrize("text", ["", "k", "0.5", "-1", "1Ki", "²"])
def test_a_quantity_that_is_no_whole_number_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is not a whole quantity"):
        rules.count(text)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("RESOURCE_EXHAUSTED", "rpc error: code = ResourceExhausted desc = no"),
        ("CANCELLED", "rpc error: code = Canceled desc = no"),
    ],
)
def test_a_grpc_status_is_printed_as_go_prints_it(name: str, text: str) -> None:
    assert rules.rpc_error(name, "no") == text


class AnyLife(stateful.RuleBasedStateMachine):
    """Any order of registrations, device lists, ended streams, pods and restarts."""

    RESOURCES = ("a.b/x", "a.b/y")
    IDS = ("0", "1", "2", "3")

    def __init__(self) -> None:
        super().__init__()
        self.manager = device_manager.DeviceManager(stop_grace_s=10.0)
        self.streams: list[device_manager.Client] = []
        self.unnoticed: set[str] = set()
        self.now = 0.0
        self.pods = 0

    @stateful.initialize(per_socket=st.booleans())
    def a_version(self, *, per_socket: bool) -> None:
        self.manager.per_socket = per_socket

    @stateful.rule(seconds=st.floats(min_value=0, max_value=30))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        status = self.manager.status(self.now)
        assert not status.removed & set(status.capacity)
        assert {self.manager.capacity()[name] for name in status.removed} <= {0}

    @stateful.rule(
        resource=st.sampled_from(RESOURCES),
        socket=st.sampled_from(["/s/a", "/s/b"]),
        works=st.booleans(),
    )
    def a_plugin_registers(self, resource: str, socket: str, *, works: bool) -> None:
        client = self.manager.connecting(resource, socket)
        try:
            if works:
                self.manager.connected(client, NOBODY)
                self.streams.append(client)
                return
        except device_manager.AlreadyConnected:
            assert self.manager.per_socket
        self.manager.forget(client)

    @stateful.rule(
        resource=st.sampled_from(RESOURCES),
        ids=st.dictionaries(st.sampled_from(IDS), st.sampled_from(["Healthy", "Unhealthy"])),
    )
    def a_plugin_lists(self, resource: str, ids: dict[str, str]) -> None:
        if self.manager.endpoint(resource) is None:
            return
        self.manager.listed(
            resource, [device_manager.Device(id=id_, health=health) for id_, health in ids.items()]
        )
        assert self.manager.capacity()[resource] == len(ids)

    @stateful.precondition(lambda self: self.streams)
    @stateful.rule(data=st.data())
    def a_stream_ends(self, data: st.DataObject) -> None:
        ended = self.streams.pop(data.draw(st.integers(0, len(self.streams) - 1)))
        disconnected = self.manager.stream_ended(ended, self.now)
        if disconnected is None:
            self.unnoticed.add(ended.resource)
            return
        assert disconnected.resource == ended.resource
        assert not self.manager.per_socket or disconnected.socket == ended.socket
        # a second registration on the same socket may have replaced the first one
        is_served = any(stream.resource == ended.resource for stream in self.streams)
        # since 1.37, a socket whose end was not noticed counts as connected until the restart
        is_served |= self.manager.per_socket and ended.resource in self.unnoticed
        if self.manager.client(ended.resource) is None and not is_served:
            assert self.manager.allocatable().get(ended.resource, 0) == 0

    @stateful.rule(resource=st.sampled_from(RESOURCES), count=st.integers(0, 4))
    def a_pod_comes(self, resource: str, count: int) -> None:
        self.pods += 1
        request = device_manager.Request(
            pod=f"pod-{self.pods}", container="main", resource=resource, count=count
        )
        try:
            offer = self.manager.offer(request)
            if offer is None:
                assert count == 0
                return
            ids = self.manager.take(offer)
            self.manager.callee(resource)
        except device_manager.AllocationError:
            self.manager.abandon(resource)
            return
        assert self.manager.grant(request, ids, b"").ids == ids
        assert len(ids) == count
        assert ids <= self.manager.lists()[resource].healthy

    @stateful.rule(number=st.integers(1, 20))
    def a_pod_ends(self, number: int) -> None:
        self.manager.release(f"pod-{number}")
        assert all(grant.pod != f"pod-{number}" for grant in self.manager.grants())

    @stateful.rule()
    def the_kubelet_restarts(self) -> None:
        held = list(self.manager.grants())
        before = self.manager
        self.manager = device_manager.DeviceManager(stop_grace_s=10.0, per_socket=before.per_socket)
        self.manager.restore(before.checkpoint(), self.now)
        self.streams.clear()
        self.unnoticed.clear()
        assert list(self.manager.grants()) == held
        assert set(self.manager.capacity().values()) <= {0}

    @stateful.invariant()
    def allocatable_never_exceeds_capacity(self) -> None:
        capacity, allocatable = shown(self.manager)
        assert capacity.keys() == allocatable.keys()
        assert all(allocatable[name] <= capacity[name] for name in capacity)

    @stateful.invariant()
    def nothing_is_given_twice(self) -> None:
        given_ids = [(grant.resource, id_) for grant in self.manager.grants() for id_ in grant.ids]
        assert len(given_ids) == len(set(given_ids))


test_any_life = AnyLife.TestCase
test_any_life.settings = hypothesis.settings(max_examples=40, stateful_step_count=40)
