"""From rules and device nodes to units: cases of generic and smarter, and invariants."""

from collections.abc import Sequence
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from muster_plugin.config import resources
from muster_plugin.discovery import resource_plan, scan_result
from muster_plugin.model import advertised, patterns
from muster_plugin.model import advertised as resource_names

DEVICE = resources.NodeType.DEVICE
MOUNT = resources.NodeType.MOUNT


def char(path: str, *links: str, minor: int = 0, numa: int | None = None) -> scan_result.Node:
    return scan_result.Node(
        path=path, kind=scan_result.Kind.CHAR, major=10, minor=minor, links=links, numa=numa
    )


def stick(port: str, dev: int, serial: str = "") -> scan_result.Node:
    usb = scan_result.Usb(
        vendor="1a86", product="7523", serial=serial, bus=int(port[0]), dev=dev, port=port
    )
    return scan_result.Node(
        path=f"/dev/bus/usb/{usb.bus:03}/{dev:03}", kind=scan_result.Kind.CHAR, minor=dev, usb=usb
    )


def scanned(*nodes: scan_result.Node | str) -> scan_result.ScanResult:
    return scan_result.ScanResult(nodes=tuple(char(n) if isinstance(n, str) else n for n in nodes))


def resource(
    *groups: Sequence[resources.Entry],
    name: str = "a.example/x",
    count: int = 1,
    per_match: bool = False,
) -> resources.Resource:
    return resources.Resource(
        name=name,
        per_match=per_match,
        groups=tuple(resources.Group(devices=tuple(group), count=count) for group in groups),
    )


def planned(given: resources.Resource, what: scan_result.ScanResult) -> tuple[advertised.Unit, ...]:
    plan = resource_plan.plan([given], what)
    assert plan.problems == ()
    [offer] = plan.resources
    return offer.units


def given_to_a_container(unit: advertised.Unit) -> list[tuple[str, str]]:
    devices = [(d.host_path, d.container_path) for d in unit.devices]
    return devices + [(m.host_path, m.container_path) for m in unit.mounts]


SERIAL = ("/dev/ttyUSB0", "/dev/ttyUSB1", "/dev/ttyUSB2", "/dev/ttyUSB3")
OPTIONAL = [
    resources.Entry(path=path, optional=True)
    for path in ("/dev/ttyS0", "/dev/ttyUSB0", "/dev/ttyUSB1")
]
# generic-device-plugin deviceplugin/path_test.go, TestDiscoverPaths: name, entries, nodes, and
# (host path, container path) of each unit
GENERIC = [
    ("plain", [resources.Entry(path="/dev/plain")], ("/dev/plain",), [[("/dev/plain",) * 2]]),
    (
        "multiple",
        [resources.Entry(path="/dev/ttyUSB*", mount_path="/dev/ttyUSB0")],
        SERIAL,
        [[(path, "/dev/ttyUSB0")] for path in SERIAL],
    ),
    (
        "multiple with mount directory",
        [resources.Entry(path="/dev/ttyUSB*", mount_path="/dev/serial/")],
        SERIAL,
        [[(path, path.replace("/dev/", "/dev/serial/"))] for path in SERIAL],
    ),
    (
        "only one exists",
        [resources.Entry(path="/dev/does/not/exist"), resources.Entry(path="/dev/does/exist")],
        ("/dev/does/exist",),
        [],
    ),
    ("some missing", OPTIONAL, ("/dev/ttyUSB0",), [[("/dev/ttyUSB0",) * 2]]),
    (
        "all present",
        OPTIONAL,
        ("/dev/ttyS0", "/dev/ttyUSB0", "/dev/ttyUSB1"),
        [[(path,) * 2 for path in ("/dev/ttyS0", "/dev/ttyUSB0", "/dev/ttyUSB1")]],
    ),
    ("all missing", OPTIONAL, (), []),
    (
        # README and device-plugins.md: 5 microphones and 1 control node with limit 10 are 5 pairs
        "a limit lets one node stand beside several",
        [resources.Entry(path="/dev/snd/pcm*"), resources.Entry(path="/dev/snd/control", limit=10)],
        ("/dev/snd/control", *(f"/dev/snd/pcm{n}" for n in range(5))),
        [[(f"/dev/snd/pcm{n}",) * 2, ("/dev/snd/control",) * 2] for n in range(5)],
    ),
    (
        "a limit makes no more than there are",
        [resources.Entry(path="/dev/fuse", limit=10)],
        ("/dev/fuse",),
        [[("/dev/fuse",) * 2]],
    ),
    (
        "the shorter list decides",
        [resources.Entry(path="/dev/a*"), resources.Entry(path="/dev/b*", limit=2)],
        ("/dev/a0", "/dev/a1", "/dev/a2", "/dev/b0"),
        [[(f"/dev/a{n}",) * 2, ("/dev/b0",) * 2] for n in range(2)],
    ),
]


@pytest.mark.parametrize(
    ("entries", "nodes", "expected"), [c[1:] for c in GENERIC], ids=[c[0] for c in GENERIC]
)
def test_units_are_those_of_generic(
    entries: list[resources.Entry],
    nodes: tuple[str, ...],
    expected: list[list[tuple[str, str]]],
) -> None:
    got = planned(resource(entries), scanned(*nodes))
    assert [given_to_a_container(unit) for unit in got] == expected


def test_a_unit_says_everything_the_kubelet_is_reported() -> None:
    entries = [
        resources.Entry(path="/dev/ttyUSB*", mount_path="/dev/serial/", permissions="r"),
        resources.Entry(path="/opt/lib", type=MOUNT, mount_path="/lib/x", read_only=True, limit=9),
    ]
    lib = scan_result.Node(path="/opt/lib", kind=scan_result.Kind.DIRECTORY)
    assert planned(resource(entries, count=2), scanned(char("/dev/ttyUSB0", numa=1), lib)) == tuple(
        advertised.Unit(
            id=f"ttyUSB0-{replica}",
            physical="/dev/ttyUSB0",
            identity={0: "/dev/ttyUSB0 char 10:0", 1: "/opt/lib directory 0:0"},
            devices=(
                advertised.DeviceSpec(
                    host_path="/dev/ttyUSB0", container_path="/dev/serial/ttyUSB0", permissions="r"
                ),
            ),
            mounts=(
                advertised.Mount(host_path="/opt/lib", container_path="/lib/x", read_only=True),
            ),
            nodes=("/dev/ttyUSB0",),
            numa=1,
        )
        for replica in range(2)
    )


def test_two_identical_sticks_are_two_devices_that_keep_their_ids() -> None:
    given = resource([resources.Entry(usb=resources.Usb(vendor="1a86", product="7523"))])
    ids = ["usb-1a86-7523-S-1-1-0", "usb-1a86-7523-S-1-2-0"]
    before = planned(given, scanned(stick("1-1", 5, "S"), stick("1-2", 6, "S")))
    assert [unit.id for unit in before] == ids
    after = planned(given, scanned(stick("1-1", 9, "S"), stick("1-2", 6, "S")))
    assert [unit.id for unit in after] == ids
    assert after[0].is_same(before[0])
    assert [d.host_path for d in after[0].devices] == ["/dev/bus/usb/001/009"]


def test_each_match_is_a_resource_of_its_own_where_the_rule_says_so() -> None:
    given = resource(
        [resources.Entry(regex="tun$|^snd|^a.b$")],
        name="smarter-devices/*",
        count=2,
        per_match=True,
    )
    nodes = scanned("/dev/net/tun", "/dev/a.b", "/dev/snd/c", "/dev/" + "x" * 70 + "tun")
    plan = resource_plan.plan([given], nodes)
    assert plan.problems == ()
    assert {o.name: [u.id for u in o.units] for o in plan.resources} == {
        "smarter-devices/a_b": ["a.b-0", "a.b-1"],
        "smarter-devices/net_tun": ["net-tun.e475e4f8-0", "net-tun.e475e4f8-1"],
        "smarter-devices/snd_c": ["snd-c.b0a730b6-0", "snd-c.b0a730b6-1"],
        f"smarter-devices/{'x' * 54}-b040e497": [
            f"{'x' * 49}tun.88361875-0",
            f"{'x' * 49}tun.88361875-1",
        ],
    }


def test_what_cannot_be_is_left_out_and_reported() -> None:
    each = [resources.Entry(regex="tun$")]
    plan = resource_plan.plan(
        [
            resource(each, name="b.example/*", per_match=True),
            resource(each, name="b.example/*", per_match=True, count=3),
            resource([resources.Entry(path="/dev/net/*")], [resources.Entry(path="/dev/net/tun")]),
            resource(
                [resources.Entry(path="/dev/**/tun", mount_path="/dev/tun")], name="a.example/y"
            ),
            resource(
                [
                    resources.Entry(path="/dev/a*", mount_path="/x/"),
                    resources.Entry(path="/dev/*/a", mount_path="/x/"),
                ],
                name="a.example/z",
            ),
        ],
        scanned("/dev/net/tun", "/dev/net_tun", "/dev/a", "/dev/b/a"),
    )
    assert [(o.name, len(o.units)) for o in plan.resources] == [
        ("b.example/net_tun", 1),
        ("a.example/x", 1),
        ("a.example/y", 1),
        ("a.example/z", 1),
    ]
    assert plan.problems == (
        "b.example/net_tun: /dev/net/tun and /dev/net_tun would both have this name",
        "b.example/net_tun: two rules define it; the first applies",
        "a.example/x: groups 0 and 1 both match /dev/net/tun",
        "/dev/a and /dev/b/a would both be /x/a in the container",
        "b.example/net_tun and a.example/x both advertise /dev/net/tun",
        "b.example/net_tun and a.example/y both advertise /dev/net/tun",
    )


def test_a_shared_node_may_belong_to_two_resources() -> None:
    def pair(name: str, first: str, *, shared: bool) -> resources.Resource:
        control = resources.Entry(path="/dev/control", limit=9, shared=shared)
        return resource([resources.Entry(path=first), control], name=name)

    nodes = scanned("/dev/a", "/dev/b", "/dev/control")
    apart = [
        pair("a.example/a", "/dev/a", shared=False),
        pair("a.example/b", "/dev/b", shared=True),
    ]
    assert resource_plan.plan(apart, nodes).problems == ()
    apart[1] = pair("a.example/b", "/dev/b", shared=False)
    assert resource_plan.plan(apart, nodes).problems == (
        "a.example/a and a.example/b both advertise /dev/control",
    )


def test_more_devices_than_a_message_holds_are_cut_and_reported() -> None:
    given = resource([resources.Entry(path="/dev/a*")], count=6_000)
    plan = resource_plan.plan([given], scanned("/dev/a1", "/dev/a2"))
    assert len(plan.resources[0].units) == resource_plan.DEVICES_MAX
    assert plan.problems == ("a.example/x: more than 10000 devices; the others are left out",)


def test_more_devices_than_can_be_looked_after_are_cut_and_reported() -> None:
    paths = [f"/dev/a{number}" for number in range(6)]
    given = [
        resource([resources.Entry(path=path)], name=f"a.example/r{at}", count=9_000)
        for at, path in enumerate(paths)
    ]
    plan = resource_plan.plan(given, scanned(*paths))
    assert [len(offer.units) for offer in plan.resources] == [9_000] * 5 + [5_000]
    assert plan.problems == (
        "a.example/r5: more than 50000 devices in all resources; the others are left out",
    )


@pytest.mark.parametrize(
    ("limit", "present", "count", "expected"),
    [
        (1, False, 4, ()),
        (
            1,
            True,
            1,
            (
                (
                    "a.example/x: groups[0].devices[2]: optional, but it limits the group to 1 "
                    "of 4 devices; raise its limit"
                ),
            ),
        ),
        (4, True, 4, ()),
    ],
)
def test_an_optional_entry_that_is_there_limits_as_any_other_and_that_is_reported(
    limit: int, count: int, expected: tuple[str, ...], *, present: bool
) -> None:
    entries = [
        resources.Entry(path="/dev/loop[0-3]"),
        resources.Entry(path="/dev/kvm", limit=5),
        resources.Entry(path="/opt/lib", type=MOUNT, optional=True, limit=limit),
    ]
    nodes = [*(f"/dev/loop{number}" for number in range(4)), "/dev/kvm"]
    plan = resource_plan.plan([resource(entries)], scanned(*nodes, *["/opt/lib"][: int(present)]))
    assert (len(plan.resources[0].units), plan.problems) == (count, expected)


def test_a_pattern_that_finds_nothing_is_reported() -> None:
    plan = resource_plan.plan([resource([resources.Entry(regex="^/dev/a")])], scanned("/dev/a"))
    assert plan.problems == (
        (
            "a.example/x: groups[0].devices[0].regex: '^/dev/a' matches nothing: it is compared "
            "with the path below /dev; write '^a'"
        ),
    )


@pytest.mark.parametrize(
    ("numas", "expected"),
    [((0, 0), 0), ((0, 1), None), ((1, None), 1), ((None, None), None), ((-1, -1), None)],
)
def test_a_unit_is_on_the_numa_node_that_all_its_nodes_are_on(
    numas: tuple[int | None, int | None], expected: int | None
) -> None:
    nodes = scanned(char("/dev/a", numa=numas[0]), char("/dev/b", numa=numas[1]))
    [unit] = planned(
        resource([resources.Entry(path="/dev/a"), resources.Entry(path="/dev/b")]), nodes
    )
    assert unit.numa == expected


def test_an_optional_part_that_appears_leaves_the_unit_the_same() -> None:
    given = resource(
        [resources.Entry(path="/dev/a"), resources.Entry(path="/dev/b", optional=True)]
    )
    [before], [after] = (
        planned(given, scanned("/dev/a")),
        planned(given, scanned("/dev/a", "/dev/b")),
    )
    assert (before.id, before.nodes) == ("a-0", ("/dev/a",))
    assert (after.id, after.nodes) == ("a-0", ("/dev/a", "/dev/b"))
    assert before.is_same(after)
    assert after.is_same(before)
    [other] = planned(given, scanned("/dev/a", char("/dev/b", minor=7)))
    assert not after.is_same(other)


def test_a_row_that_is_refused_hides_no_other() -> None:
    item = resources.Group(devices=(resources.Entry(path="/dev/a0"),))
    both = resources.Group(
        devices=(
            resources.Entry(path="/dev/[ab]*", limit=1),
            resources.Entry(path="/dev/a*", limit=2),
            resources.Entry(path="/dev/b*", limit=2),
        )
    )
    given = resources.Resource(name="example.com/x", groups=(item, both))
    plan = resource_plan.plan([given], scanned("/dev/a0", "/dev/b0"))
    assert [unit.id for unit in plan.resources[0].units] == ["a0-0", "b0-0"]
    assert plan.problems == ("example.com/x: groups 0 and 1 both match /dev/a0",)
    alone = resource_plan.plan(
        [resources.Resource(name="example.com/x", groups=(both,))], scanned("/dev/a0", "/dev/b0")
    )
    assert [unit.id for unit in alone.resources[0].units] == ["a0-0"]
    assert alone.problems == ("example.com/x: groups[0]: /dev/b0 would duplicate another device",)


NAMES = [f"/dev/{kind}{n}" for kind in ("a", "b", "c") for n in range(5)]
entries = st.builds(
    resources.Entry,
    path=st.sampled_from(["/dev/a*", "/dev/b*", "/dev/c*", "/dev/[ab]*", "/dev/a0", "/dev/c[1-3]"]),
    limit=st.integers(1, 3),
    optional=st.booleans(),
)
groups = st.lists(entries, min_size=1, max_size=3, unique_by=lambda e: e.path)
nodes = st.lists(st.sampled_from(NAMES), unique=True)


def by_hand(group: list[resources.Entry], names: list[str]) -> list[list[str]]:
    """Return the expected units: the matches of each entry, repeated `limit` times, side by side.

    There are at most as many rows as one entry has matches. Rows with the same nodes, because two
    entries match one node, are one unit: only `count` makes several units of the same nodes.
    """
    lists, longest = [], 0
    for entry in group:
        matched = [n for n in sorted(names) if patterns.glob(entry.path).fullmatch(n)]
        longest = max(longest, len(matched))
        if matched or not entry.optional:
            lists.append(matched * entry.limit)
    rows = [tuple(dict.fromkeys(row)) for row in zip(*lists, strict=False)][:longest]
    first = {frozenset(row): row for row in reversed(rows)}
    return [list(row) for row in first.values()]


@settings(deadline=None)
@given(groups, nodes)
def test_cardinality_is_that_of_lists_laid_side_by_side(
    group: list[resources.Entry], names: list[str]
) -> None:
    plan = resource_plan.plan([resource(group)], scanned(*names))
    got = sorted([d.host_path for d in unit.devices] for unit in plan.resources[0].units)
    assert got == sorted(by_hand(group, names))


@settings(deadline=None)
@given(
    st.lists(groups, min_size=1, max_size=2, unique_by=str), nodes, st.integers(1, 3), st.randoms()
)
def test_ids_are_unique_short_and_the_same_whatever_the_order(
    several: list[list[resources.Entry]],
    names: list[str],
    count: int,
    random: Random,
) -> None:
    given_rules = [resource(*several, count=count)]
    before = resource_plan.plan(given_rules, scanned(*names))
    ids = [unit.id for unit in before.resources[0].units]
    assert len(set(ids)) == len(ids)
    assert all(1 <= len(name) <= 63 for name in ids)
    assert ids == sorted(ids)
    random.shuffle(names)
    assert resource_plan.plan(given_rules, scanned(*names)) == before


@settings(deadline=None)
@given(st.sampled_from(["/dev/a*", "/dev/[ab]*", "/dev/**"]), nodes, nodes)
def test_other_devices_that_come_or_go_change_no_id(
    path: str, names: list[str], others: list[str]
) -> None:
    given_rules = resource([resources.Entry(path=path)])
    alone = {u.physical: u.id for u in planned(given_rules, scanned(*names))}
    together = {u.physical: u.id for u in planned(given_rules, scanned(*{*names, *others}))}
    assert alone.items() <= together.items()


@settings(deadline=None)
@given(st.lists(st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=90)))
def test_any_name_gives_ids_and_resource_names_that_the_kubelet_takes(names: list[str]) -> None:
    each = resource([resources.Entry(regex=".")], name="a.example/*", per_match=True)
    paths = {f"/dev/{name}" for name in names}
    for offer in resource_plan.plan([each], scanned(*paths)).resources:
        assert [*resource_names.name_problems(offer.name)] == []
        assert all(1 <= len(unit.id) <= 63 for unit in offer.units)


def test_more_resources_than_can_be_served_are_left_out_and_those_that_stand_stay() -> None:
    rule = resources.Resource(
        name="a.example/*",
        per_match=True,
        groups=(resources.Group(devices=(resources.Entry(path="/dev/x[0-9]"),)),),
    )
    scanned = scan_result.ScanResult(
        nodes=tuple(
            scan_result.Node(path=f"/dev/x{n}", kind=scan_result.Kind.CHAR) for n in range(9)
        )
    )
    whole = resource_plan.plan([rule], scanned)
    few = resource_plan.limited(whole, 3, current_names={"a.example/x7"})
    assert [offer.name for offer in few.resources] == [
        "a.example/x7",
        "a.example/x0",
        "a.example/x1",
    ]
    (problem,) = few.problems
    assert problem == (
        "9 resources are more than the 3 that one plugin serves with its limit of open files; "
        "left out: a.example/x2, a.example/x3, a.example/x4, a.example/x5, a.example/x6 and 1 more"
    )
    assert resource_plan.limited(whole, 9, current_names=()) is whole
