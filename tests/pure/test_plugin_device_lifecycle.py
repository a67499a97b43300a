"""The table of `device_lifecycle`, row by row, and what holds after any sequence of signals."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from muster import vocabulary
from muster_plugin.config import resources
from muster_plugin.inventory import device_lifecycle
from muster_plugin.model import advertised

HEALTHY, UNHEALTHY = vocabulary.Health.HEALTHY, vocabulary.Health.UNHEALTHY
CHECKED = device_lifecycle.Policy(grace_s=60, good_checks=3, checked=True)


def unit(name: str = "a-0", minor: int = 1) -> advertised.Unit:
    path = f"/dev/{name[:-2]}"
    return advertised.Unit(
        id=name, physical=path, identity={0: f"{path} char 10:{minor}"}, nodes=(path,)
    )


A, OTHER = unit(), unit(minor=2)
LOOK = {
    "same": device_lifecycle.Observed((A,)),
    "gone": device_lifecycle.Observed(()),
    "another": device_lifecycle.Observed((OTHER,)),
}
GOOD, BAD = device_lifecycle.Checked(A), device_lifecycle.Checked(A, "no answer")
DO: dict[str, device_lifecycle.Signal] = {**LOOK, "bad": BAD, "good": GOOD}


def after(
    *steps: str, policy: device_lifecycle.Policy = CHECKED
) -> device_lifecycle.DeviceLifecycle:
    life = device_lifecycle.DeviceLifecycle("a.example/a", policy)
    for step in steps:
        life.receive(DO[step], 0.0)
    return life


def turned(
    life: device_lifecycle.DeviceLifecycle, step: str, now: float = 1.0
) -> list[tuple[str, str]]:
    """Return (health, code) of each change of health in one step."""
    facts = life.receive(DO[step], now)
    assert all(isinstance(fact, device_lifecycle.HealthChanged) for fact in facts)
    return [
        (f.health.value, f.code) for f in facts if isinstance(f, device_lifecycle.HealthChanged)
    ]


def devices(life: device_lifecycle.DeviceLifecycle) -> tuple[vocabulary.Device, ...]:
    return tuple(life.device(unit.id) for unit in life.offered())


NEW = ("same",)
WELL = ("same", "good")
FAILING = (*WELL, "bad")
GONE = (*WELL, "gone")
REPLACED = (*WELL, "another")
BACK = (*GONE, "same")
TO_GONE = [("Unhealthy", device_lifecycle.MISSING)]
TO_REPLACED = [("Unhealthy", device_lifecycle.REPLACED)]
TO_FAILING = [("Unhealthy", device_lifecycle.CHECK_FAILED)]
TO_UNCHECKED = [("Unhealthy", device_lifecycle.NOT_CHECKED)]
TO_WELL = [("Healthy", device_lifecycle.HEALTHY)]
TABLE = [
    (NEW, "same", []),
    (NEW, "gone", TO_GONE),
    (NEW, "another", TO_REPLACED),
    (NEW, "bad", TO_FAILING),
    (NEW, "good", TO_WELL),
    (WELL, "same", []),
    (WELL, "gone", TO_GONE),
    (WELL, "another", TO_REPLACED),
    (WELL, "bad", TO_FAILING),
    (WELL, "good", []),
    (FAILING, "same", []),
    (FAILING, "gone", TO_GONE),
    (FAILING, "another", TO_REPLACED),
    (FAILING, "bad", []),
    (FAILING, "good", []),
    ((*FAILING, "good", "good"), "good", TO_WELL),
    ((*FAILING, "good", "good", "bad", "good", "good"), "good", TO_WELL),
    (GONE, "same", TO_UNCHECKED),
    (GONE, "gone", []),
    (GONE, "another", TO_REPLACED),
    (GONE, "bad", []),
    (GONE, "good", []),
    (REPLACED, "same", TO_UNCHECKED),
    (REPLACED, "gone", TO_GONE),
    (REPLACED, "another", []),
    (REPLACED, "bad", []),
    (REPLACED, "good", []),
    (BACK, "same", []),
    (BACK, "gone", TO_GONE),
    (BACK, "another", TO_REPLACED),
    (BACK, "bad", TO_FAILING),
    (BACK, "good", TO_WELL),
    ((*FAILING, "gone", "same", "good", "good"), "good", TO_WELL),
]


@pytest.mark.parametrize(("before", "step", "expected"), TABLE)
def test_the_table_holds(
    before: tuple[str, ...], step: str, expected: list[tuple[str, str]]
) -> None:
    assert turned(after(*before), step) == expected


def test_a_device_without_checks_is_healthy_as_soon_as_it_is_observed() -> None:
    life = device_lifecycle.DeviceLifecycle("a.example/a", device_lifecycle.Policy())
    device = vocabulary.Device(id="a-0", resource="a.example/a")
    assert life.receive(LOOK["same"], 0.0) == [device_lifecycle.Added(device)]
    assert devices(life) == (device,)


def test_a_device_that_was_never_checked_is_not_healthy() -> None:
    life = device_lifecycle.DeviceLifecycle("a.example/a", CHECKED)
    reason = "/dev/a has not been checked since it appeared"
    device = vocabulary.Device(id="a-0", resource="a.example/a", health=UNHEALTHY, reason=reason)
    assert life.receive(LOOK["same"], 0.0) == [device_lifecycle.Added(device)]
    assert life.units_to_check() == (A,)


def test_a_device_that_goes_is_unhealthy_first_and_removed_after_the_grace_period() -> None:
    life = after("same", policy=device_lifecycle.Policy(grace_s=60))
    gone = device_lifecycle.HealthChanged(
        "a-0", UNHEALTHY, "/dev/a is gone", device_lifecycle.MISSING
    )
    assert life.receive(LOOK["gone"], 100.0) == [gone]
    assert life.units_to_check() == ()
    assert life.next_deadline() == 160.0
    assert life.tick(159.9) == []
    assert life.unit("a-0") == A
    assert life.tick(160.0) == [device_lifecycle.Removed("a-0", "/dev/a is gone")]
    assert (devices(life), life.unit("a-0"), life.next_deadline()) == ((), None, None)


def test_a_device_that_a_pod_holds_is_never_removed() -> None:
    life = after("same", policy=device_lifecycle.Policy(grace_s=60))
    life.receive(device_lifecycle.AllocationsChanged(frozenset({"a-0"})), 0.0)
    life.receive(LOOK["gone"], 100.0)
    assert life.next_deadline() is None
    assert life.tick(10_000.0) == []
    left = device_lifecycle.Removed("a-0", "/dev/a is gone")
    assert life.receive(device_lifecycle.AllocationsChanged(frozenset()), 10_001.0) == [left]


def test_another_device_is_new_under_the_same_id_once_the_old_one_is_removed() -> None:
    policy = device_lifecycle.Policy(grace_s=60)
    reason = "/dev/a is now another device: /dev/a char 10:1 became /dev/a char 10:2"
    turned_replaced = device_lifecycle.HealthChanged(
        "a-0", UNHEALTHY, reason, device_lifecycle.REPLACED
    )
    exchanged = [
        device_lifecycle.Removed("a-0", reason),
        device_lifecycle.Added(vocabulary.Device(id="a-0", resource="a.example/a")),
    ]
    unknown = after("same", policy=policy)
    assert unknown.receive(LOOK["another"], 100.0) == [turned_replaced]
    assert unknown.tick(159.0) == []
    assert unknown.tick(160.0) == exchanged
    assert unknown.unit("a-0") == OTHER

    free = after("same", policy=policy)
    free.receive(device_lifecycle.AllocationsChanged(frozenset()), 0.0)
    assert free.receive(LOOK["another"], 100.0) == [turned_replaced, *exchanged]

    held = after("same", policy=policy)
    held.receive(device_lifecycle.AllocationsChanged(frozenset({"a-0"})), 0.0)
    assert held.receive(LOOK["another"], 100.0) == [turned_replaced]
    assert held.tick(1_000.0) == []
    assert held.receive(device_lifecycle.AllocationsChanged(frozenset()), 1_001.0) == exchanged


def test_the_grace_period_counts_from_the_first_loss() -> None:
    life = after("same", policy=device_lifecycle.Policy(grace_s=60))
    life.receive(LOOK["gone"], 100.0)
    life.receive(LOOK["another"], 130.0)
    life.receive(LOOK["gone"], 150.0)
    assert life.next_deadline() == 160.0


def test_a_device_that_returns_has_its_id_and_its_new_path() -> None:
    def stick(dev: int) -> advertised.Unit:
        path = f"/dev/bus/usb/001/{dev:03}"
        spec = advertised.DeviceSpec(host_path=path, container_path=path, permissions="rw")
        identity = {0: "usb-1a86-7523-1-1"}
        return advertised.Unit(id="usb-0", physical="usb", identity=identity, devices=(spec,))

    life = device_lifecycle.DeviceLifecycle("a.example/a", device_lifecycle.Policy())
    life.receive(device_lifecycle.Observed((stick(5),)), 0.0)
    life.receive(device_lifecycle.Observed(()), 1.0)
    back = device_lifecycle.HealthChanged(
        "usb-0", HEALTHY, "present and healthy", device_lifecycle.HEALTHY
    )
    assert life.receive(device_lifecycle.Observed((stick(6),)), 2.0) == [back]
    assert life.unit("usb-0") == stick(6)


def test_a_check_concerns_all_replicas_and_not_another_device_in_the_same_place() -> None:
    life = device_lifecycle.DeviceLifecycle("a.example/a", device_lifecycle.Policy(good_checks=1))
    life.receive(device_lifecycle.Observed((unit("a-0"), unit("a-1"), unit("b-0"))), 0.0)
    assert life.units_to_check() == (unit("a-0"), unit("b-0"))
    assert life.receive(device_lifecycle.Checked(OTHER, "no answer"), 1.0) == []
    assert life.receive(BAD, 2.0) == [
        device_lifecycle.HealthChanged(
            name, UNHEALTHY, "/dev/a: no answer", device_lifecycle.CHECK_FAILED
        )
        for name in ("a-0", "a-1")
    ]
    assert [device.health for device in devices(life)] == [UNHEALTHY, UNHEALTHY, HEALTHY]


def test_fewer_devices_than_expected_is_a_problem_in_words() -> None:
    life = device_lifecycle.DeviceLifecycle("a.example/a", device_lifecycle.Policy(expected=2))
    assert life.problem == "expected at least 2 devices, found 0"
    life.receive(device_lifecycle.Observed((unit("a-0"), unit("b-0"))), 0.0)
    assert life.problem == ""
    life.receive(device_lifecycle.Observed((unit("a-0"),)), 1.0)
    assert life.problem == "expected at least 2 devices, found 1"
    life.receive(device_lifecycle.Checked(unit("a-0"), "no answer"), 2.0)
    assert life.problem == "expected at least 2 devices, found 1"


def test_each_shared_gpu_is_expected_once() -> None:
    life = device_lifecycle.DeviceLifecycle(
        "nvidia.com/gpu", device_lifecycle.Policy(expected=2, of_gpus=True)
    )
    replicas = tuple(
        advertised.Unit(id=f"GPU-a::{number}", physical="GPU-a", identity={0: "GPU-a"})
        for number in range(4)
    )
    life.receive(device_lifecycle.Observed(replicas), 0.0)
    assert life.problem == "expected at least 2 GPUs or MIG devices, found 1"


def test_the_policy_follows_from_the_rule() -> None:
    groups = (resources.Group(devices=(resources.Entry(path="/dev/a"),)),)
    plain = resources.Resource(name="a.example/a", groups=groups)
    assert device_lifecycle.policy(plain) == device_lifecycle.Policy(grace_s=60.0, good_checks=3)
    strict = resources.Resource(
        name="a.example/a",
        groups=groups,
        grace_s=5,
        checks=resources.Checks(open=True, good=2),
        expect=resources.Expect(min=4),
    )
    assert device_lifecycle.policy(strict) == device_lifecycle.Policy(
        grace_s=5.0, good_checks=2, checked=True, expected=4
    )


IDS = ["a-0", "b-0", "c-0"]
looks = st.lists(st.sampled_from(IDS), unique=True).flatmap(
    lambda names: st.tuples(*(st.builds(unit, st.just(n), st.integers(1, 2)) for n in names))
)
signals = st.one_of(
    st.builds(device_lifecycle.Observed, looks),
    st.builds(
        device_lifecycle.Checked,
        st.builds(unit, st.sampled_from(IDS), st.integers(1, 2)),
        st.sampled_from(["", "", "no answer"]),
    ),
    st.builds(device_lifecycle.AllocationsChanged, st.none() | st.frozensets(st.sampled_from(IDS))),
    st.none(),
)
policies = st.builds(
    device_lifecycle.Policy,
    grace_s=st.sampled_from([0.0, 5.0, 20.0]),
    good_checks=st.integers(1, 3),
    checked=st.booleans(),
)


def replay(
    advertised_health: dict[str, vocabulary.Health], facts: list[device_lifecycle.Fact]
) -> None:
    for fact in facts:
        match fact:
            case device_lifecycle.Added(device=device):
                assert device.id not in advertised_health
                advertised_health[device.id] = device.health
            case device_lifecycle.Removed(device_id=name):
                assert advertised_health.pop(name) is UNHEALTHY
            case device_lifecycle.HealthChanged(device_id=name, health=health):
                advertised_health[name] = health


@settings(deadline=None)
@given(policies, st.lists(st.tuples(signals, st.integers(0, 10)), max_size=40))
def test_whatever_happens_the_list_follows_from_the_facts_and_no_missing_unit_is_healthy(
    policy: device_lifecycle.Policy, story: list[tuple[device_lifecycle.Signal | None, int]]
) -> None:
    life = device_lifecycle.DeviceLifecycle("a.example/a", policy)
    advertised_health: dict[str, vocabulary.Health] = {}
    there: dict[str, advertised.Unit] = {}
    lost: dict[str, float] = {}
    held: frozenset[str] | None = None
    now = 0.0
    for signal, pause in story:
        now += pause
        for step in (None, signal):
            before = set(advertised_health)
            replay(
                advertised_health, list(life.tick(now) if step is None else life.receive(step, now))
            )
            if isinstance(step, device_lifecycle.Observed):
                there = {healthy_before.id: healthy_before for healthy_before in step.units}
            if isinstance(step, device_lifecycle.AllocationsChanged):
                held = step.ids
            assert {d.id: d.health for d in devices(life)} == advertised_health
            assert there.keys() <= advertised_health.keys()
            for name in before - advertised_health.keys():
                assert now - lost.pop(name, now) >= policy.grace_s
                assert held is None or name not in held
            for name, health in advertised_health.items():
                is_there = name in there and life.unit(name) == there[name]
                assert is_there or health is UNHEALTHY
                lost.pop(name, None) if is_there else lost.setdefault(name, now)
            deadline = life.next_deadline()
            assert deadline is None or deadline > now
