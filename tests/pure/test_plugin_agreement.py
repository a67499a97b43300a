from muster import vocabulary
from muster.vocabulary import Health
from muster_plugin.kubelet import podresources_check

FUSE = "a.com/fuse"


def device(name: str, health: Health = Health.HEALTHY) -> vocabulary.Device:
    return vocabulary.Device(id=name, resource=FUSE, health=health)


DEVICES = (device("fuse-0"), device("fuse-1"), device("fuse-2", Health.UNHEALTHY))


def ours(sent_at: float | None = 0.0) -> dict[str, podresources_check.Advertised]:
    return {FUSE: podresources_check.Advertised(DEVICES, sent_at)}


def listing(*allocatable: str, **holders: str) -> podresources_check.Listing:
    return podresources_check.Listing(
        holders={(FUSE, name.replace("_", "-")): pod for name, pod in holders.items()},
        allocatable={FUSE: frozenset(allocatable)},
    )


def test_what_the_kubelet_lists_as_told_is_no_disagreement() -> None:
    found = podresources_check.PodResourcesCheck()
    for now in (10.0, 20.0):
        found.compare(listing("fuse-0", "fuse-1"), ours(), now)
    assert (found.mismatch(FUSE, 20.0), found.needs_recheck) == ("", False)


def test_an_unhealthy_device_that_is_listed_proves_nothing() -> None:
    found = podresources_check.PodResourcesCheck()
    for now in (10.0, 20.0):
        found.compare(listing("fuse-0", "fuse-1", "fuse-2"), ours(), now)
    assert (found.mismatch(FUSE, 20.0), found.needs_recheck) == ("", False)


def test_a_disagreement_is_told_when_it_is_seen_twice_and_no_longer_when_it_ends() -> None:
    found = podresources_check.PodResourcesCheck()
    found.compare(listing("fuse-0", "fuse-1"), ours(), 10.0)
    found.compare(listing("fuse-0", "other"), ours(), 20.0)
    assert (found.mismatch(FUSE, 20.5), found.needs_recheck, found.mismatches) == ("", True, {})
    for now, sure in ((22.0, False), (30.0, True)):
        found.compare(listing("fuse-0", "other"), ours(), now)
        assert found.mismatch(FUSE, now) == (
            "the kubelet does not list fuse-1; "
            f"the kubelet lists other, which the plugin does not advertise, for {now - 20:.0f} s"
        )
        assert found.needs_recheck is not sure
    found.compare(listing("fuse-0", "fuse-1"), ours(), 31.0)
    assert (found.mismatch(FUSE, 31.0), found.needs_recheck, found.mismatches) == ("", False, {})


def test_what_was_just_sent_may_take_two_seconds_to_be_listed() -> None:
    found = podresources_check.PodResourcesCheck()
    for now in (10.5, 11.0, 11.9):
        found.compare(listing("fuse-0"), ours(sent_at=10.0), now)
        assert (found.mismatch(FUSE, now), found.needs_recheck) == ("", True)
    found.compare(listing("fuse-0"), ours(sent_at=10.0), 12.0)
    assert found.mismatch(FUSE, 12.0) == "the kubelet does not list fuse-1, for 2 s"


def test_lists_that_are_sent_all_the_time_hide_nothing_that_lasts() -> None:
    found = podresources_check.PodResourcesCheck()
    for now in range(10, 14):
        found.compare(listing("fuse-0"), ours(sent_at=now - 0.5), now)
    assert found.mismatch(FUSE, 13.0) == "the kubelet does not list fuse-1, for 4 s"


def test_what_differs_for_a_moment_each_time_is_no_disagreement() -> None:
    found = podresources_check.PodResourcesCheck()
    for now in range(10, 30):
        late = ("fuse-0",) if now % 2 else ("fuse-0", "fuse-1")
        found.compare(listing(*late), ours(sent_at=now - 0.5), now)
        assert (found.mismatches, found.needs_recheck) == ({}, bool(now % 2))


def test_a_kubelet_that_does_not_have_the_resource_disagrees_with_nothing() -> None:
    found = podresources_check.PodResourcesCheck()
    for now in (10.0, 20.0):
        found.compare(listing(), ours(sent_at=None), now)
    assert (found.mismatch(FUSE, 20.0), found.needs_recheck) == ("", False)


def test_a_kubelet_that_cannot_be_asked_disagrees_with_nothing() -> None:
    found = podresources_check.PodResourcesCheck()
    for now in (10.0, 20.0):
        found.compare(listing("fuse-0"), ours(), now)
    assert found.mismatches == {FUSE: "the kubelet does not list fuse-1"}
    assert found.compare(None, ours(), 30.0) == []
    assert (found.mismatch(FUSE, 60.0), found.allocated_count(FUSE)) == ("", None)


def test_pods_that_hold_devices_newly_are_told_once() -> None:
    found = podresources_check.PodResourcesCheck()
    first = listing("fuse-0", "fuse-1", fuse_0="default/old")
    assert found.compare(first, ours(), 0.0) == []
    second = listing("fuse-0", "fuse-1", fuse_0="default/old", fuse_1="default/new")
    new = [podresources_check.Allocation(FUSE, "default/new", ("fuse-1",))]
    assert found.compare(second, ours(), 10.0) == new
    assert found.compare(second, ours(), 20.0) == []
    assert (found.allocated_count(FUSE), second.pods_by_resource()) == (
        2,
        {FUSE: {"fuse-0": "default/old", "fuse-1": "default/new"}},
    )
