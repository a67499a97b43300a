"""Which device nodes a rule matches: as in the peers' rules, and where muster differs."""

import msgspec
import pytest

from muster_plugin.config import resources
from muster_plugin.discovery import scan_result


def char(path: str, *links: str, minor: int = 0, **facts: object) -> scan_result.Node:
    node = {"path": path, "kind": "char", "major": 10, "minor": minor, "links": links, **facts}
    return msgspec.convert(node, scan_result.Node)


def stick(port: str, dev: int, *, serial: str = "", ids: str = "1a86:7523") -> scan_result.Node:
    vendor, product = ids.split(":")
    usb = scan_result.Usb(
        vendor=vendor, product=product, serial=serial, bus=int(port[0]), dev=dev, port=port
    )
    return char(f"/dev/bus/usb/{usb.bus:03}/{dev:03}", minor=dev, usb=usb)


def directory(path: str, *links: str) -> scan_result.Node:
    return scan_result.Node(path=path, kind=scan_result.Kind.DIRECTORY, links=links)


def keys(rule: resources.Entry, *nodes: scan_result.Node, every_name: bool = False) -> list[str]:
    index = scan_result.NodeIndex(nodes)
    return [m.key for m in scan_result.matches(rule, index, every_name=every_name)]


VIDEO = [char("/dev/video10"), char("/dev/video2"), char("/dev/video0"), char("/dev/v4l/x")]
SOUND = [directory("/dev/snd"), char("/dev/snd/controlC0"), char("/dev/snd/pcmC0D0p")]


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        # the patterns of smarter's default conf.yaml, on the same list of nodes
        ("^snd$", ["/dev/snd"]),
        ("^video[0-9]*$", ["/dev/video0", "/dev/video10", "/dev/video2"]),
        ("^ttyUSB[0-9]*$", ["/dev/ttyUSB0"]),
        ("^fuse$", ["/dev/fuse"]),
        ("^rtc0$", ["/dev/rtc0"]),
        ("^hci[0-9]*$", []),
        # unanchored patterns, whose matches surprise users of smarter
        ("video", ["/dev/video0", "/dev/video10", "/dev/video2"]),
        ("rtc", ["/dev/rtc", "/dev/rtc0"]),
        ("snd", ["/dev/snd", "/dev/snd/controlC0", "/dev/snd/pcmC0D0p"]),
        ("use", ["/dev/fuse", "/dev/input/mouse0"]),
        ("^/dev/fuse$", []),
    ],
)
def test_a_regular_expression_is_on_the_path_below_dev_and_each_name_counts(
    pattern: str, expected: list[str]
) -> None:
    nodes = [
        *VIDEO,
        *SOUND,
        char("/dev/ttyUSB0"),
        char("/dev/fuse"),
        char("/dev/rtc0", "/dev/rtc"),
        char("/dev/input/mouse0"),
        scan_result.Node(path="/opt/fuse", kind=scan_result.Kind.FILE),
    ]
    assert keys(resources.Entry(regex=pattern), *nodes, every_name=True) == expected


def test_a_node_with_several_names_is_one_match_under_its_own_before_its_first_link() -> None:
    disk = char("/dev/sda", "/dev/disk/by-id/a", "/dev/disk/by-id/b", "/dev/disk/by-path/c")
    assert keys(resources.Entry(path="/dev/**"), disk) == ["/dev/sda"]
    assert keys(resources.Entry(path="/dev/disk/*/*"), disk) == ["/dev/disk/by-id/a"]
    assert keys(resources.Entry(path="/dev/disk/by-path/*"), disk) == ["/dev/disk/by-path/c"]
    assert keys(resources.Entry(path="/dev/disk/by-id/b"), disk) == ["/dev/disk/by-id/b"]


def test_an_exclusion_may_name_a_node_by_any_of_its_names() -> None:
    nodes = [char("/dev/video0", "/dev/v4l/by-id/cam-a"), char("/dev/video1")]
    everything = resources.Entry(path="/dev/video*")
    assert keys(everything, *nodes) == ["/dev/video0", "/dev/video1"]
    for glob in ("/dev/video0", "/dev/v4l/by-id/*-a", "/dev/**/cam*"):
        rule = resources.Entry(path="/dev/video*", exclude=(glob,))
        assert keys(rule, *nodes) == ["/dev/video1"]


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        (resources.Entry(path="/dev/snd"), ["/dev/snd"]),
        (resources.Entry(path="/dev/s?d"), []),
        (resources.Entry(path="/dev/**"), ["/dev/fuse", "/dev/snd/controlC0", "/dev/snd/pcmC0D0p"]),
        (resources.Entry(regex="^snd$"), ["/dev/snd"]),
        (resources.Entry(regex="^snd"), ["/dev/snd/controlC0", "/dev/snd/pcmC0D0p"]),
        (resources.Entry(path="/dev/log"), []),
        (resources.Entry(path="/dev/log", type=resources.NodeType.MOUNT), ["/dev/log"]),
        (resources.Entry(path="/dev/s*", type=resources.NodeType.MOUNT), ["/dev/snd"]),
        (resources.Entry(path="/opt/lib", type=resources.NodeType.MOUNT), ["/opt/lib"]),
        (resources.Entry(path="/opt/lib"), ["/opt/lib"]),
    ],
)
def test_a_wildcard_finds_device_nodes_and_a_name_also_a_directory_of_them(
    rule: resources.Entry, expected: list[str]
) -> None:
    log = scan_result.Node(path="/dev/log", kind=scan_result.Kind.OTHER)
    nodes = [*SOUND, char("/dev/fuse"), log, directory("/opt/lib")]
    assert keys(rule, *nodes) == expected


UART = char(
    "/dev/ttyUSB0",
    subsystem="tty",
    driver="ch341-uart",
    vendor="1a86",
    product="7523",
    serial="A",
    attrs={"manufacturer": "QinHeng Electronics", "interface": ""},
)


@pytest.mark.parametrize(
    ("udev", "found_it"),
    [
        (resources.Udev(subsystem="tty"), True),
        (resources.Udev(subsystem="t*", driver="ch34?-uart"), True),
        (resources.Udev(subsystem="tty", driver="ftdi_sio"), False),
        (resources.Udev(vendor="1A86", product="75[0-9]3"), True),
        (resources.Udev(vendor="1A86", product="0001"), False),
        (resources.Udev(attrs={"manufacturer": "QinHeng*"}), True),
        (resources.Udev(attrs={"manufacturer": "Qin*/*"}), False),
        (resources.Udev(attrs={"interface": "*"}), True),
        (resources.Udev(attrs={"absent": "*"}), False),
    ],
)
def test_udev_criteria_must_all_match(udev: resources.Udev, *, found_it: bool) -> None:
    nodes = [UART, char("/dev/null", subsystem="mem"), directory("/dev/tty.d")]
    assert keys(resources.Entry(udev=udev), *nodes) == (["/dev/ttyUSB0"] if found_it else [])


def test_a_criterion_never_matches_what_sysfs_does_not_say() -> None:
    for udev in (
        resources.Udev(driver="*"),
        resources.Udev(vendor="*"),
        resources.Udev(subsystem="*"),
    ):
        assert keys(resources.Entry(udev=udev), char("/dev/x")) == []


@pytest.mark.parametrize(
    ("serial", "expected"),
    [
        ("", ["usb-1a86-7523-1-1", "usb-1a86-7523-A-1-2", "usb-1a86-7523-A-1-3"]),
        ("A", ["usb-1a86-7523-A-1-2", "usb-1a86-7523-A-1-3"]),
        ("B", []),
    ],
)
def test_an_empty_serial_is_any_and_equal_sticks_are_reported_by_their_ports(
    serial: str, expected: list[str]
) -> None:
    nodes = [
        stick("1-3", 9, serial="A"),
        stick("1-2", 8, serial="A"),
        stick("1-1", 7),
        stick("1-4", 6, ids="0403:6001"),
        char("/dev/bus/usb/001/005"),
    ]
    rule = resources.Entry(usb=resources.Usb(vendor="1A86", product="7523", serial=serial))
    assert keys(rule, *nodes) == expected


def test_generic_simple_usb_case_finds_the_bus_node() -> None:
    # generic-device-plugin deviceplugin/usb_test.go, "simple": 1050:0407 on 3-4, bus 3, device 22
    nodes = [stick("3-4", 22, ids="1050:0407")]
    rule = resources.Entry(usb=resources.Usb(vendor="1050", product="0407"))
    found_it = scan_result.matches(rule, scan_result.NodeIndex(nodes))
    assert [match.path for match in found_it] == ["/dev/bus/usb/003/022"]


def test_identity_is_the_number_of_a_plain_node_and_the_name_of_a_persistent_one() -> None:
    def identity(rule: resources.Entry, node: scan_result.Node) -> str:
        [match] = scan_result.matches(rule, scan_result.NodeIndex([node]))
        return match.identity

    plain = resources.Entry(path="/dev/ttyUSB*")
    assert identity(plain, char("/dev/ttyUSB0", minor=1)) == "/dev/ttyUSB0 char 10:1"
    assert identity(plain, char("/dev/ttyUSB0", minor=2)) == "/dev/ttyUSB0 char 10:2"
    by_id = resources.Entry(path="/dev/serial/by-id/*")
    for minor in (1, 2):
        node = char(f"/dev/ttyUSB{minor}", "/dev/serial/by-id/x", minor=minor)
        assert identity(by_id, node) == "/dev/serial/by-id/x"
    usb = resources.Entry(usb=resources.Usb(vendor="1a86", product="7523"))
    for dev in (5, 6):
        assert identity(usb, stick("1-1", dev)) == "usb-1a86-7523-1-1"
