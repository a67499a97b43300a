from muster import vocabulary
from muster.vocabulary import Health
from muster_plugin import agreement

FUSE = "a.com/fuse"


def device(name: str, health: Health = Health.HEALTHY) -> vocabulary.Device:
    return vocabulary.Device(id=name, resource=FUSE, health=health)


OURS = {FUSE: (device("fuse-0"), device("fuse-1"), device("fuse-2", Health.UNHEALTHY))}


def listing(*allocatable: str, **holders: str) -> agreement.Listing:
    return agreement.Listing(
        holders={(FUSE, name.replace("_", "-")): pod for name, pod in holders.items()},
        allocatable={FUSE: frozenset(allocatable)},
    )


def test_what_the_kubelet_lists_as_told_is_no_disagreement() -> None:
    found = agreement.Agreement()
    for now in (0.0, 100.0):
        found.compare(listing("fuse-0", "fuse-1"), OURS, now)
    assert found.apart(FUSE, 200.0) == ""


def test_an_unhealthy_device_that_is_listed_proves_nothing() -> None:
    found = agreement.Agreement()
    for now in (0.0, 100.0):
        found.compare(listing("fuse-0", "fuse-1", "fuse-2"), OURS, now)
    assert found.apart(FUSE, 200.0) == ""


def test_a_disagreement_is_told_when_it_lasts_and_no_longer_when_it_ends() -> None:
    found = agreement.Agreement()
    found.compare(listing("fuse-0", "other"), OURS, 0.0)
    assert found.apart(FUSE, 10.0) == ""
    found.compare(listing("fuse-0", "other"), OURS, 20.0)
    assert found.apart(FUSE, 30.0) == (
        "the kubelet does not list fuse-1; "
        "the kubelet lists other, which we do not advertise, for 30 s"
    )
    found.compare(listing("fuse-0", "fuse-1"), OURS, 40.0)
    assert found.apart(FUSE, 100.0) == ""


def test_a_kubelet_that_cannot_be_asked_disagrees_with_nothing() -> None:
    found = agreement.Agreement()
    found.compare(listing("fuse-0"), OURS, 0.0)
    assert found.compare(None, OURS, 30.0) == []
    assert (found.apart(FUSE, 60.0), found.held(FUSE)) == ("", None)


def test_pods_that_hold_devices_newly_are_told_once() -> None:
    found = agreement.Agreement()
    first = listing("fuse-0", "fuse-1", fuse_0="default/old")
    assert found.compare(first, OURS, 0.0) == []
    second = listing("fuse-0", "fuse-1", fuse_0="default/old", fuse_1="default/new")
    new = [agreement.Allocation(FUSE, "default/new", ("fuse-1",))]
    assert found.compare(second, OURS, 10.0) == new
    assert found.compare(second, OURS, 20.0) == []
    assert (found.held(FUSE), second.held()) == (
        2,
        {FUSE: {"fuse-0": "default/old", "fuse-1": "default/new"}},
    )
