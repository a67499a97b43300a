"""The discovery of devices in a tree that looks like a node, and in this machine's /dev."""

import os
import shutil
import stat
from pathlib import Path

import pytest

from muster_plugin.config import resources
from muster_plugin.discovery import devfs, resource_plan, scan_result
from muster_plugin.model import advertised


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Return the root of an empty host, so that no test sees this machine's /dev or /sys."""
    for name in ("dev", "sys/dev/char", "sys/bus/usb/devices", "sys/devices"):
        (tmp_path / name).mkdir(parents=True)
    return tmp_path


def touch(root: Path, *paths: str) -> None:
    for path in paths:
        file = root / path.lstrip("/")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()


def link(root: Path, path: str, target: str) -> None:
    (root / path.lstrip("/")).parent.mkdir(parents=True, exist_ok=True)
    (root / path.lstrip("/")).symlink_to(target)


def write(directory: Path, **files: str) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (directory / name).write_text(f"{text}\n")
    return directory


def names(observed: scan_result.ScanResult) -> dict[str, tuple[str, ...]]:
    return {node.path: node.links for node in observed.nodes}


def glob(path: str) -> list[resources.Entry]:
    return [resources.Entry(path=path, type=resources.NodeType.MOUNT)]


REGEX = [resources.Entry(regex="x")]


def test_a_glob_finds_what_it_means_and_nothing_else(root: Path) -> None:
    touch(root, "/dev/ttyUSB0", "/dev/ttyUSB1", "/dev/ttyS0", "/dev/a/ttyUSB2", "/opt/lib/x.so")
    assert names(devfs.scan(glob("/dev/ttyUSB*"), root=root).result) == {
        "/dev/ttyUSB0": (),
        "/dev/ttyUSB1": (),
    }
    assert names(devfs.scan(glob("/dev/*/ttyUSB?"), root=root).result) == {"/dev/a/ttyUSB2": ()}
    assert names(devfs.scan(glob("/dev/**/ttyUSB?"), root=root).result) == {
        "/dev/a/ttyUSB2": (),
        "/dev/ttyUSB0": (),
        "/dev/ttyUSB1": (),
    }
    assert devfs.scan(glob("/opt/lib"), root=root).result == scan_result.ScanResult(
        nodes=(scan_result.Node(path="/opt/lib", kind=scan_result.Kind.DIRECTORY),)
    )
    assert devfs.scan(glob("/opt/none/x"), root=root).result == scan_result.ScanResult()


def test_links_are_followed_and_are_names_of_what_they_lead_to(root: Path) -> None:
    touch(root, "/dev/ttyUSB0", "/dev/rtc0")
    link(root, "/dev/serial/by-id/usb-x", "../../ttyUSB0")
    link(root, "/dev/rtc", "rtc0")
    link(root, "/dev/absolute", "/dev/rtc")
    link(root, "/dev/dangling", "nowhere")
    link(root, "/dev/circle", "circle")
    link(root, "/dev/outside", "../../../../../dev/rtc0")
    link(root, "/dev/fd", "/proc/self/fd")
    link(root, "/dev/alias", "serial")
    assert names(devfs.scan(REGEX, root=root).result) == {
        "/dev/rtc0": ("/dev/absolute", "/dev/outside", "/dev/rtc"),
        "/dev/serial": ("/dev/alias",),
        "/dev/serial/by-id": (),
        "/dev/ttyUSB0": ("/dev/serial/by-id/usb-x",),
    }
    through = devfs.scan(glob("/dev/al*/by-id/*"), root=root).result
    assert names(through) == {"/dev/ttyUSB0": ("/dev/alias/by-id/usb-x",)}


def test_a_walk_is_bounded_and_says_what_it_left_out(root: Path) -> None:
    touch(root, *(f"/dev/{n:03}" for n in range(30)), "/dev/a/b/c/d/x", "/dev/shm/secret")
    deep = devfs.scan(REGEX, root=root, depth_max=2).result
    assert deep.problems == ("/dev/a/b/c: more than 2 directories deep; not scanned",)
    assert [n.path for n in deep.nodes if n.path.startswith("/dev/a")] == [
        "/dev/a",
        "/dev/a/b",
        "/dev/a/b/c",
    ]
    assert "/dev/shm/secret" not in names(deep)
    many = devfs.scan(REGEX, root=root, entries_max=10).result
    assert "/dev: more than 10 entries; not all were scanned" in many.problems
    assert len(many.nodes) == 10


def test_a_name_that_is_not_utf8_is_left_out_and_reported(root: Path) -> None:
    (root / "dev" / os.fsdecode(b"x\xff")).touch()
    touch(root, "/dev/xy")
    observed = devfs.scan(REGEX, root=root).result
    assert names(observed) == {"/dev/xy": ()}
    assert observed.problems == ("'/dev/x\\udcff': not UTF-8, so it cannot be sent to the kubelet",)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_directory_that_cannot_be_read_is_reported(root: Path) -> None:
    touch(root, "/dev/secret/x")
    (root / "dev/secret").chmod(0)
    try:
        assert devfs.scan(REGEX, root=root).result.problems == ("/dev/secret: permission denied",)
    finally:
        (root / "dev/secret").chmod(0o755)


def watched(root: Path, *wanted: resources.Entry) -> set[str]:
    return {f"/{path.relative_to(root)}" for path in devfs.scan(wanted, root=root).directories}


def test_the_directories_to_watch_are_those_in_which_something_may_come_or_go(root: Path) -> None:
    touch(root, "/dev/ttyUSB0", "/dev/input/event0", "/opt/lib/x.so", "/dev/bus/usb/001/002")
    link(root, "/dev/serial/by-id/usb-x", "../../ttyUSB0")
    link(root, "/dev/current", "input/event0")
    assert watched(root, *glob("/dev/ttyUSB*")) == {"/dev"}
    assert watched(root, *glob("/dev/not/yet/there")) == {"/dev"}
    assert watched(root, *glob("/dev/serial/by-id/*")) == {
        "/dev",
        "/dev/serial",
        "/dev/serial/by-id",
    }
    assert watched(root, *glob("/dev/current")) == {"/dev", "/dev/input"}
    assert watched(root, *glob("/opt/lib")) == {"/opt"}
    assert watched(root, *glob("/none/x")) == {"/."}
    assert watched(root, resources.Entry(usb=resources.Usb(vendor="1a86", product="7523"))) == {
        "/dev",
        "/dev/bus",
        "/dev/bus/usb",
        "/dev/bus/usb/001",
    }
    assert watched(root, resources.Entry(regex="x")) == {
        "/dev",
        "/dev/bus",
        "/dev/bus/usb",
        "/dev/bus/usb/001",
        "/dev/input",
        "/dev/serial",
        "/dev/serial/by-id",
    }


@pytest.fixture
def host(root: Path) -> Path:
    """Return the root of an empty host in which device nodes can be made."""
    try:
        os.mknod(root / "try", stat.S_IFCHR | 0o600, os.makedev(1, 3))
    except PermissionError:
        pytest.skip("device nodes can be made by root only")
    return root


def node(root: Path, path: str, major: int, minor: int) -> None:
    file = root / path.lstrip("/")
    file.parent.mkdir(parents=True, exist_ok=True)
    os.mknod(file, stat.S_IFCHR | 0o600, os.makedev(major, minor))


def plug(root: Path, number: str, device: str, **own: str) -> Path:
    """Make a device below /sys/devices and the link from its number to it."""
    directory = write(root / "sys/devices" / device, **own)
    link(root, f"/sys/dev/char/{number}", f"../../devices/{device}")
    return directory


CONTROLLER = "pci0000:00/0000:00:14.0"
PORT = f"{CONTROLLER}/usb1/1-1"


@pytest.fixture
def uart(host: Path) -> Path:
    """Return a host with a serial adapter: device node, USB device, controller on NUMA node 1."""
    node(host, "/dev/ttyUSB0", 188, 0)
    node(host, "/dev/bus/usb/001/005", 189, 4)
    tty = plug(host, "188:0", f"{PORT}/1-1:1.0/ttyUSB0/tty/ttyUSB0")
    devices = host / "sys/devices"
    write(devices / CONTROLLER, vendor="0x8086", device="0xa36d", numa_node="1")
    plug(
        host,
        "189:4",
        PORT,
        idVendor="1A86",
        idProduct="7523",
        busnum="1",
        devnum="5",
        serial="S1",
        manufacturer="QinHeng",
        numa_node="-1",
    )
    (devices / PORT / "1-1:1.0/driver").symlink_to("../../../drivers/ch341")
    (tty / "subsystem").symlink_to("../../../../class/tty")
    (devices / PORT / "subsystem").symlink_to("../../../../bus/usb")
    (host / "sys/bus/usb/devices/1-1").symlink_to(devices / PORT)
    (host / "sys/bus/usb/devices/1-1:1.0").symlink_to(devices / PORT / "1-1:1.0")
    return host


USB = scan_result.Usb(vendor="1a86", product="7523", serial="S1", bus=1, dev=5, port="1-1")


def test_sysfs_reports_a_node_by_itself_and_its_parents(uart: Path) -> None:
    wanted = resources.Entry(
        udev=resources.Udev(attrs={"manufacturer": "*", "none": "*", "../x": "*"})
    )
    tty = next(n for n in devfs.scan([wanted], root=uart).result.nodes if n.path == "/dev/ttyUSB0")
    assert tty == scan_result.Node(
        path="/dev/ttyUSB0",
        kind=scan_result.Kind.CHAR,
        major=188,
        minor=0,
        numa=1,
        subsystem="tty",
        driver="ch341",
        vendor="1a86",
        product="7523",
        serial="S1",
        attrs={"manufacturer": "QinHeng"},
    )


def test_usb_devices_are_found_by_what_is_plugged_in(uart: Path) -> None:
    wanted = resources.Entry(usb=resources.Usb(vendor="1a86", product="7523"))
    assert devfs.scan([wanted], root=uart).result == scan_result.ScanResult(
        nodes=(
            scan_result.Node(
                path="/dev/bus/usb/001/005",
                kind=scan_result.Kind.CHAR,
                major=189,
                minor=4,
                numa=1,
                usb=USB,
            ),
        )
    )


def test_the_ids_of_a_pci_device_are_those_of_its_controller(host: Path) -> None:
    node(host, "/dev/dri/renderD128", 226, 128)
    plug(host, "226:128", f"{CONTROLLER}/drm/renderD128")
    write(host / "sys/devices" / CONTROLLER, vendor="0x10DE", device="0x2330", numa_node="-1")
    wanted = resources.Entry(udev=resources.Udev(vendor="10de"))
    [gpu] = [n for n in devfs.scan([wanted], root=host).result.nodes if n.path.endswith("128")]
    assert (gpu.vendor, gpu.product, gpu.numa) == ("10de", "2330", None)


def test_a_stick_that_is_plugged_in_again_is_the_same_unit(uart: Path) -> None:
    entry = resources.Entry(usb=resources.Usb(vendor="1a86", product="7523"))
    given = resources.Resource(name="a.example/x", groups=(resources.Group(devices=(entry,)),))

    def first_scan() -> advertised.Unit:
        [offer] = resource_plan.plan([given], devfs.scan([entry], root=uart).result).resources
        [unit] = offer.units
        return unit

    before = first_scan()
    (uart / "dev/bus/usb/001/005").unlink()
    node(uart, "/dev/bus/usb/001/006", 189, 5)
    write(uart / "sys/devices" / PORT, devnum="6")
    after = first_scan()
    assert after.id == before.id == "usb-1a86-7523-S1-1-1-0"
    assert after.is_same(before)
    assert (before.nodes, after.nodes) == (("/dev/bus/usb/001/005",), ("/dev/bus/usb/001/006",))


def test_what_vanishes_during_a_look_is_not_there(uart: Path) -> None:
    shutil.rmtree(uart / "sys")
    [tty] = devfs.scan([resources.Entry(path="/dev/ttyUSB0")], root=uart).result.nodes
    assert (tty.kind, tty.major, tty.numa, tty.subsystem) == (scan_result.Kind.CHAR, 188, None, "")


PRESENT = [path for path in ("/dev/null", "/dev/zero", "/dev/fuse") if Path(path).exists()]


@pytest.mark.parametrize("path", PRESENT)
def test_the_real_dev_says_what_the_kernel_says(path: str) -> None:
    [observed] = devfs.scan([resources.Entry(path=path)]).result.nodes
    number = Path(path).stat().st_rdev
    assert (observed.path, observed.kind) == (path, scan_result.Kind.CHAR)
    assert (observed.major, observed.minor) == (os.major(number), os.minor(number))
    for wanted in (resources.Entry(regex=f"^{path[5:]}$"), resources.Entry(path="/dev/**")):
        assert path in names(devfs.scan([wanted]).result)
