from muster import vocabulary
from muster.vocabulary import Health
from muster_plugin.kubelet import podresources

FUSE = "a.com/fuse"


def device(name: str, health: Health = Health.HEALTHY) -> vocabulary.Device:
    return vocabulary.Device(id=name, resource=FUSE, health=health)


DEVICES = (device("fuse-0"), device("fuse-1"), device("fuse-2", Health.UNHEALTHY))


def ours(sent_at: float | None = 0.0) -> dict[str, podresources.Advertised]:
    return {FUSE: podresources.Advertised(DEVICES, sent_at)}


def listing(*allocatable: str, **holders: str) -> podresources.Listing:
    return podresources.Listing(
        holders={(FUSE, name.replace("_", "-")): pod for name, pod in holders.items()},
        allocatable={FUSE: frozenset(allocatable)},
    )


def test_a_listing_of_what_is_advertised_is_no_mismatch() -> None:
    check = podresources.PodResourcesCheck()
    for now in (10.0, 20.0):
        check.compare(listing("fuse-0", "fuse-1"), ours(), now)
    assert (check.mismatch(FUSE, 20.0), check.needs_recheck) == ("", False)


def test_an_unhealthy_device_that_is_listed_proves_nothing() -> None:
    check = podresources.PodResourcesCheck()
    for now in (10.0, 20.0):
        check.compare(listing("fuse-0", "fuse-1", "fuse-2"), ours(), now)
    assert (check.mismatch(FUSE, 20.0), check.needs_recheck) == ("", False)


def test_a_mismatch_is_reported_when_it_is_listed_twice_and_until_it_ends() -> None:
    check = podresources.PodResourcesCheck()
    check.compare(listing("fuse-0", "fuse-1"), ours(), 10.0)
    check.compare(listing("fuse-0", "other"), ours(), 20.0)
    assert (check.mismatch(FUSE, 20.5), check.needs_recheck, check.mismatches) == ("", True, {})
    for now, sure in ((22.0, False), (30.0, True)):
        check.compare(listing("fuse-0", "other"), ours(), now)
        assert check.mismatch(FUSE, now) == (
            "the kubelet does not list fuse-1; "
            f"the kubelet lists other, which the plugin does not advertise, for {now - 20:.0f} s"
        )
        assert check.needs_recheck is not sure
    check.compare(listing("fuse-0", "fuse-1"), ours(), 31.0)
    assert (check.mismatch(FUSE, 31.0), check.needs_recheck, check.mismatches) == ("", False, {})


def test_a_list_that_was_just_sent_has_two_seconds_to_be_listed() -> None:
    check = podresources.PodResourcesCheck()
    for now in (10.5, 11.0, 11.9):
        check.compare(listing("fuse-0"), ours(sent_at=10.0), now)
        assert (check.mismatch(FUSE, now), check.needs_recheck) == ("", True)
    check.compare(listing("fuse-0"), ours(sent_at=10.0), 12.0)
    assert check.mismatch(FUSE, 12.0) == "the kubelet does not list fuse-1, for 2 s"


def test_frequent_lists_hide_no_persistent_mismatch() -> None:
    check = podresources.PodResourcesCheck()
    for now in range(10, 14):
        check.compare(listing("fuse-0"), ours(sent_at=now - 0.5), now)
    assert check.mismatch(FUSE, 13.0) == "the kubelet does not list fuse-1, for 4 s"


def test_a_short_difference_each_time_is_no_mismatch() -> None:
    check = podresources.PodResourcesCheck()
    for now in range(10, 30):
        late = ("fuse-0",) if now % 2 else ("fuse-0", "fuse-1")
        check.compare(listing(*late), ours(sent_at=now - 0.5), now)
        assert (check.mismatches, check.needs_recheck) == ({}, bool(now % 2))


def test_a_resource_that_the_kubelet_was_never_sent_has_no_mismatch() -> None:
    check = podresources.PodResourcesCheck()
    for now in (10.0, 20.0):
        check.compare(listing(), ours(sent_at=None), now)
    assert (check.mismatch(FUSE, 20.0), check.needs_recheck) == ("", False)


def test_a_kubelet_that_does_not_answer_has_no_mismatch() -> None:
    check = podresources.PodResourcesCheck()
    for now in (10.0, 20.0):
        check.compare(listing("fuse-0"), ours(), now)
    assert check.mismatches == {FUSE: "the kubelet does not list fuse-1"}
    assert check.compare(None, ours(), 30.0) == []
    assert (check.mismatch(FUSE, 60.0), check.allocated_count(FUSE)) == ("", None)


def test_new_allocations_of_pods_are_reported_once() -> None:
    check = podresources.PodResourcesCheck()
    first = listing("fuse-0", "fuse-1", fuse_0="default/old")
    assert check.compare(first, ours(), 0.0) == []
    second = listing("fuse-0", "fuse-1", fuse_0="default/old", fuse_1="default/new")
    new = [podresources.Allocation(FUSE, "default/new", ("fuse-1",))]
    assert check.compare(second, ours(), 10.0) == new
    assert check.compare(second, ours(), 20.0) == []
    assert (check.allocated_count(FUSE), second.pods_by_resource()) == (
        2,
        {FUSE: {"fuse-0": "default/old", "fuse-1": "default/new"}},
    )


def test_a_resource_is_displaced_when_none_of_its_devices_is_listed_for_two_seconds() -> None:
    check = podresources.PodResourcesCheck()
    check.compare(listing("fuse-0", "fuse-1"), ours(), 9.0)
    check.compare(listing("x", "y"), ours(), 10.0)
    assert (check.displaced, check.needs_recheck) == ({}, True)
    check.compare(listing("x", "z"), ours(), 12.0)
    text = "the kubelet does not list fuse-0, fuse-1; the kubelet lists x"
    assert check.displaced == {FUSE: f"{text}, which the plugin does not advertise"}
    check.compare(listing(), ours(), 60.0)
    assert (check.displaced, check.needs_recheck) == (
        {FUSE: "the kubelet does not list fuse-0, fuse-1"},
        True,
    )
    check.compare(listing("fuse-0", "fuse-1"), ours(), 61.0)
    assert (check.displaced, check.needs_recheck) == ({FUSE: ""}, False)


def test_a_resource_of_which_some_devices_are_listed_is_not_displaced() -> None:
    check = podresources.PodResourcesCheck()
    for now in (10.0, 12.0):
        check.compare(listing("fuse-2", "x"), ours(), now)
        assert check.displaced == {FUSE: ""}


def test_nothing_is_sure_of_a_resource_just_registered_or_a_kubelet_that_does_not_answer() -> None:
    check = podresources.PodResourcesCheck()
    for now in (10.0, 12.0):
        check.compare(listing("x"), ours(), now)
    check.compare(listing("x"), ours(sent_at=None), 14.0)
    assert check.displaced == {}
    check.compare(listing("x"), ours(sent_at=14.0), 16.0)
    assert check.displaced == {}
    check.compare(None, ours(), 18.0)
    assert check.displaced == {}
