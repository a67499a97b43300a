"""The caller of the FUSE broker, identified from the files of its process in /proc."""

import hypothesis
import hypothesis.strategies as st
import pytest

from muster_fuse.kernel import jobs
from muster_fuse.request import caller

UID = "0f2c9d3e-1b7a-4e53-9c55-6f0d2a1b3c4d"
OTHER = "deadbeef-0000-4000-8000-000000000000"
UNDER = UID.replace("-", "_")
OTHER_UNDER = OTHER.replace("-", "_")
SYSTEMD = f"/kubepods.slice/kubepods-besteffort.slice/kubepods-besteffort-pod{UNDER}.slice"
CGROUPFS = f"/kubepods/burstable/pod{UID}"


@pytest.mark.parametrize(
    ("cgroup", "uid"),
    [
        (f"0::{SYSTEMD}/cri-containerd-abc.scope\n", UID),
        (f"0::/kubepods.slice/kubepods-pod{UNDER}.slice/x.scope\n", UID),
        (f"0::{CGROUPFS}/abc\n", UID),
        (f"0::/kubepods/pod{UID}/abc\n", UID),
        (f"0::/../..{CGROUPFS}/abc\n", UID),
        (
            f"0::/docker/abc/kubelet.slice/kubelet-kubepods-burstable-pod{UNDER}.slice/x\n",
            UID,
        ),
        (
            (
                f"12:pids:{CGROUPFS}/abc\n11:cpu,cpuacct:{CGROUPFS}/abc\n1:name=systemd:{CGROUPFS}\n"
                "0::/system.slice/containerd.service\n"
            ),
            UID,
        ),
        ("0::/\n", None),
        ("0::/user.slice/user-0.slice\n", None),
        ("0::/kubepods/besteffort\n", None),
        (f"0::/system.slice/pod{UID}\n", None),
        (f"0::/besteffort/pod{UID}\n", None),
        (f"0::/kubepods/x/pod{UID}\n", None),
        ("", None),
        # cgroups that a container created below its own
        (f"0::{CGROUPFS}/abc/kubepods/pod{OTHER}\n", UID),
        (f"0::{SYSTEMD}/x.scope/kubepods-pod{OTHER_UNDER}.slice\n", UID),
        (f"0::{CGROUPFS}/kubepods-besteffort-pod{OTHER_UNDER}.slice\n", UID),
        (f"0::{CGROUPFS}/a\x0b0::/kubepods/pod{OTHER}\n", UID),
        (f"0::{CGROUPFS}/a\r0::/kubepods/pod{OTHER}\u2028\n", UID),
        (f"0::{CGROUPFS}/a:1::/kubepods/pod{OTHER}\n", UID),
    ],
)
def test_the_outermost_pod_of_a_cgroup_counts(cgroup: str, uid: str | None) -> None:
    assert caller.pod_uid(cgroup) == uid


@pytest.mark.parametrize(
    ("cgroup", "text"),
    [
        (f"2:cpu:{CGROUPFS}\n0::/kubepods/pod{OTHER}\n", "cgroups of several pods"),
        ("0::/x\nhello\n", "a line in the cgroup file has no path"),
    ],
)
def test_a_cgroup_that_is_not_clear_is_refused(cgroup: str, text: str) -> None:
    with pytest.raises(caller.Unclear, match=text):
        caller.pod_uid(cgroup)


def status(**changed: str) -> str:
    """Return the text of a file /proc/<pid>/status."""
    fields = {
        "Name": "sshfs",
        "Umask": "0022",
        "Uid": "1000\t1001\t1002\t1003",
        "Gid": "2000\t2001\t2002\t2003",
        "Groups": "7 8 ",
        "CapInh": "0000000000000000",
        "CapEff": "00000000a80425fb",
    } | changed
    return "".join(f"{name}:\t{value}\n" for name, value in fields.items())


def test_the_effective_ids_of_a_process_count() -> None:
    assert caller.ids(status()) == caller.Ids(1001, 2001, (7, 8), 0xA80425FB)
    assert caller.ids(status(Groups="")).groups == ()


def test_the_name_of_a_process_is_not_read_as_its_ids() -> None:
    for name in (r"x\nUid:\t0\t0\t0\t0", "x\x0bUid:\t0\t0\t0\t0", "x\rUid:\t0\t0\t0\t0"):
        assert caller.ids(status(Name=name)) == caller.ids(status())


@pytest.mark.parametrize(
    "text",
    ["", "Uid:\t1\n", status(Uid="a b c d"), status(Name="x\nUid:\t0\t0\t0\t0"), status(CapEff="")],
)
def test_a_status_that_is_not_clear_is_refused(text: str) -> None:
    with pytest.raises(caller.Unclear, match="cannot parse /proc/PID/status"):
        caller.ids(text)


WHOLE = "         0          0 4294967295\n"


@pytest.mark.parametrize(
    ("id_", "id_map", "inside"),
    [
        (0, WHOLE, 0),
        (1000, WHOLE, 1000),
        (100_000, "0 100000 65536\n", 0),
        (165_535, "0 100000 65536\n", 65_535),
        (5000, "0 100000 1000\n1000 5000 1\n", 1000),
    ],
)
def test_an_id_is_translated_to_its_user_namespace(id_: int, id_map: str, inside: int) -> None:
    assert caller.seen_inside(id_, id_map) == inside


@pytest.mark.parametrize(
    ("id_", "id_map"),
    [
        (0, ""),
        (165_536, "0 100000 65536\n"),
        (99_999, "0 100000 65536\n"),
        (4_294_967_295, "0 4294967295 1\n"),
        (0, "0 0\n"),
        (0, "a b c\n"),
    ],
)
def test_an_id_without_counterpart_is_refused(id_: int, id_map: str) -> None:
    with pytest.raises(caller.Unclear):
        caller.seen_inside(id_, id_map)


extents = st.lists(st.tuples(st.integers(1, 50), st.integers(1, 50)), min_size=1, max_size=5)


@hypothesis.given(extents, st.integers(0, 600))
def test_a_translation_has_one_way_back(parts: list[tuple[int, int]], id_: int) -> None:
    back: dict[int, int] = {}
    lines, inside, outside = [], 0, 0
    for gap, count in parts:
        outside += gap
        lines.append(f"{inside} {outside} {count}\n")
        back |= {outside + i: inside + i for i in range(count)}
        inside, outside = inside + count + gap, outside + count
    if id_ in back:
        assert caller.seen_inside(id_, "".join(lines)) == back[id_]
    else:
        with pytest.raises(caller.Unclear):
            caller.seen_inside(id_, "".join(lines))


def process(**changed: object) -> caller.Process:
    """Return what is read about a process of uid 1001 in the node's user namespace."""
    facts = caller.Process(
        cgroup=f"0::{CGROUPFS}\n",
        status=status(),
        uid_map=WHOLE,
        gid_map=WHOLE,
        connected_uid=1001,
        connected_gid=2001,
        user_namespace=11,
        mount_owner=11,
    )
    return facts._replace(**changed)  # type: ignore[arg-type]  # the fields differ in type


def test_a_process_of_the_node_keeps_its_ids() -> None:
    assert caller.identify(process(), own_user_namespace=11) == jobs.Caller(
        uid=1001,
        gid=2001,
        groups=(7, 8),
        user_id=1001,
        group_id=2001,
        user_namespace=False,
        overrides=False,
    )


def test_a_process_of_another_user_namespace_gets_the_ids_of_that() -> None:
    inside = process(uid_map="0 1001 1\n", gid_map="5 2000 9\n", user_namespace=22)
    assert caller.identify(inside, own_user_namespace=11) == jobs.Caller(
        uid=1001,
        gid=2001,
        groups=(7, 8),
        user_id=0,
        group_id=6,
        user_namespace=True,
        overrides=True,
    )


ROOT = process(status=status(Uid="0 0 0 0"), connected_uid=0)


@pytest.mark.parametrize(
    ("facts", "overrides"),
    [
        (ROOT, True),
        (ROOT._replace(status=status(Uid="0 0 0 0", CapEff="00000000000000fd")), False),
        # a program with file capabilities that inherited an open connection
        (process(status=status(CapEff="000001ffffffffff")), False),
    ],
)
def test_only_a_root_with_the_capability_overrides_permissions(
    facts: caller.Process,
    overrides: bool,  # noqa: FBT001  # a parameter of a test
) -> None:
    assert caller.identify(facts, own_user_namespace=11).overrides is overrides


@pytest.mark.parametrize(
    "facts",
    [process(status=status(Uid="1001 0 0 0")), process(status=status(Gid="2001 0 0 0"))],
)
def test_a_program_that_gained_rights_on_an_open_connection_is_refused(
    facts: caller.Process,
) -> None:
    with pytest.raises(caller.Unclear, match="has changed its user or group since it connected"):
        caller.identify(facts, own_user_namespace=11)


def test_a_descriptor_is_read() -> None:
    text = "pos:\t0\nflags:\t012100000\nmnt_id:\t29\nino:\t17\n"
    assert caller.descriptor(text, "/mnt") == caller.Descriptor(29, is_path=True, path="/mnt")
    text = "pos:\t0\nflags:\t0100002\nmnt_id:\t15\nlock:\t1: POSIX\n"
    assert caller.descriptor(text, "/x") == caller.Descriptor(15, is_path=False, path="/x")
    for unclear in ("", "flags:\t8\nmnt_id:\t1\n", text + "mnt_id:\t16\n"):
        with pytest.raises(caller.Unclear):
            caller.descriptor(unclear, "/")


MOUNTINFO = [
    "1 1 254:0 / / rw - ext4 /dev/vda rw\n",
    (
        r"36 25 0:41 / /mnt/a\040b\011c\012d\134e rw,nosuid shared:7 master:2 - fuse.x\012y"
        " src\\040- rw,user_id=1000,group_id=5\n"
    ),
    "361 25 0:42 / /b rw master:2 propagate_from:2 - overlay - rw,lowerdir=/l\n",
    "37 36 0:43 / /mnt/- rw - - - -\n",
]


def test_the_line_of_a_mount_is_read_and_unescaped() -> None:
    assert caller.mount_line(MOUNTINFO, 36) == caller.MountLine(
        mount_id=36,
        parent_id=25,
        device="0:41",
        mount_point="/mnt/a b\tc\nd\\e",
        is_shared=True,
        kind="fuse.x\ny",
        source="src -",
        options=("rw", "user_id=1000", "group_id=5"),
    )
    overlay = caller.mount_line(MOUNTINFO, 361)
    assert overlay is not None
    assert (overlay.is_shared, overlay.kind, overlay.source) == (False, "overlay", "-")
    odd = caller.mount_line(MOUNTINFO, 37)
    assert odd is not None
    assert (odd.mount_point, odd.kind, odd.options) == ("/mnt/-", "-", ("-",))


def test_a_mount_that_is_not_listed_has_no_line() -> None:
    assert caller.mount_line(MOUNTINFO, 3) is None
    assert caller.mount_line([], 1) is None


@pytest.mark.parametrize(
    "line", ["36 \n", "36 25 0:41 / /m rw fuse x rw\n", "36 x 0:1 / / rw - a b c"]
)
def test_a_line_that_is_not_as_the_kernel_writes_it_is_refused(line: str) -> None:
    with pytest.raises(caller.Unclear, match="unexpected line in mountinfo"):
        caller.mount_line([line], 36)


def mangled(text: str) -> str:
    """Return a text with the escapes that the kernel writes in a field of mountinfo."""
    return "".join(f"\\{ord(c):03o}" if c in " \t\n\\" else c for c in text)


names = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=20)


@hypothesis.given(names, names, names, st.booleans())
def test_names_never_change_what_else_a_line_says(
    point: str,
    subtype: str,
    source: str,
    shared: bool,  # noqa: FBT001  # drawn by hypothesis
) -> None:
    tags = "shared:1 " if shared else ""
    line = (
        f"9 8 0:7 / /{mangled(point)} rw {tags}- fuse.{mangled(subtype)} {mangled(source)}"
        " rw,user_id=5\n"
    )
    assert caller.read_line(line) == caller.MountLine(
        mount_id=9,
        parent_id=8,
        device="0:7",
        mount_point=f"/{point}",
        is_shared=shared,
        kind=f"fuse.{subtype}",
        source=source,
        options=("rw", "user_id=5"),
    )
