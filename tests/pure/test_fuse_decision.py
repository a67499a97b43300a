"""Which requests of pods the FUSE broker grants, and which it refuses, and why."""

import errno
import re
from typing import Final

import hypothesis
import hypothesis.strategies as st
import pytest

from muster_fuse import config, protocol
from muster_fuse.kernel import jobs
from muster_fuse.request import caller, decision
from muster_fuse.request.decision import Reason

UID: Final = "0f2c9d3e-1b7a-4e53-9c55-6f0d2a1b3c4d"
OWN: Final = 11
"""The broker's user namespace."""
USER: Final = jobs.Caller(
    uid=1000,
    gid=1000,
    groups=(),
    user_id=1000,
    group_id=1000,
    user_namespace=False,
    overrides=False,
)
PROCESS: Final = caller.Process(
    cgroup=f"0::/kubepods/pod{UID}/abc\n",
    status="Uid:\t1000\t1000\t1000\t1000\nGid:\t1000\t1000\t1000\t1000\nGroups:\t\nCapEff:\t0\n",
    uid_map="0 0 4294967295\n",
    gid_map="0 0 4294967295\n",
    connected_uid=1000,
    connected_gid=1000,
    user_namespace=OWN,
    mount_owner=OWN,
)


def checked(process: caller.Process, *, pod_uid: str = UID) -> jobs.Caller | tuple[Reason, str]:
    """Return the caller, or why it was refused."""
    try:
        return decision.check_caller(
            pod_uid, process, own_cgroup="0::/own\n", own_user_namespace=OWN
        )
    except decision.Refusal as refusal:
        return refusal.reason, refusal.text


def test_a_process_of_the_pod_may_ask() -> None:
    assert checked(PROCESS) == USER


def test_a_process_of_another_pod_or_of_none_is_refused() -> None:
    refused = Reason.FOREIGN_POD, "the process does not belong to the pod of this socket"
    assert checked(PROCESS, pod_uid="deadbeef") == refused
    assert checked(PROCESS._replace(cgroup="0::/\n")) == refused
    assert checked(PROCESS._replace(cgroup=f"0::/own/kubepods/pod{UID}/x\n")) == USER


def test_the_self_test_must_be_in_the_brokers_own_cgroups() -> None:
    assert checked(PROCESS._replace(cgroup="0::/own\n"), pod_uid="") == USER
    for cgroup in ("0::/\n", "", PROCESS.cgroup, "0::/own/x\n"):
        refused = checked(PROCESS._replace(cgroup=cgroup), pod_uid="")
        assert refused == (
            Reason.FOREIGN_POD,
            "the process does not belong to the pod of this socket",
        )


def test_a_process_whose_ids_are_not_clear_is_refused() -> None:
    assert checked(PROCESS._replace(connected_uid=1001)) == (
        Reason.UNCLEAR_CALLER,
        "the process has changed its user or group since it connected",
    )
    assert checked(PROCESS._replace(uid_map="")) == (
        Reason.UNCLEAR_CALLER,
        "id 1000 is not mapped in the process's user namespace",
    )


def test_a_user_namespace_without_a_mount_namespace_of_its_own_is_refused() -> None:
    nested = PROCESS._replace(user_namespace=22, uid_map="0 1000 1\n", gid_map="0 1000 1\n")
    answer = checked(nested)
    assert isinstance(answer, tuple)
    assert answer[0] is Reason.USER_NAMESPACE
    assert checked(nested._replace(mount_owner=22)) == USER._replace(
        user_id=0, group_id=0, user_namespace=True
    )


def line(
    mount_id: int = 30,
    kind: str = "overlay",
    *,
    parent: int = 20,
    point: str = "/",
    **changed: object,
) -> caller.MountLine:
    """Return a mount as the process sees it."""
    made = caller.MountLine(
        mount_id=mount_id,
        parent_id=parent,
        device="0:40",
        mount_point=point,
        is_shared=False,
        kind=kind,
        source="x",
        options=("rw",),
    )
    return made._replace(**changed)  # type: ignore[arg-type]  # the fields differ in type


def target(path: str = "/mnt", mount_id: int = 30, *, is_path: bool = True) -> caller.Descriptor:
    return caller.Descriptor(mount_id=mount_id, is_path=is_path, path=path)


def refused_target(
    wanted: caller.Descriptor, lies_on: caller.MountLine | None, *, fuse_on_fuse: bool = False
) -> tuple[Reason, int] | None:
    """Return why a mount point is refused, or None."""
    try:
        decision.check_target(wanted, lies_on, fuse_on_fuse=fuse_on_fuse)
    except decision.Refusal as refusal:
        return refusal.reason, refusal.errno if refusal.text.isprintable() else 0
    return None


@pytest.mark.parametrize(
    "kind", ["overlay", "ext4", "xfs", "btrfs", "tmpfs", "nfs", "nfs4", "zfs", "f2fs"]
)
def test_a_directory_of_an_ordinary_file_system_may_be_a_mount_point(kind: str) -> None:
    assert refused_target(target(), line(kind=kind)) is None


@pytest.mark.parametrize(
    "kind",
    [
        *("proc", "sysfs", "cgroup", "cgroup2", "devpts", "mqueue", "devtmpfs", "securityfs"),
        *("bpf", "fuse", "fuse.sshfs", "fuseblk", "autofs", "nsfs", "", "tmpfs\n", "overlay2"),
    ],
)
def test_other_file_systems_carry_no_mount_points(kind: str) -> None:
    assert refused_target(target(), line(kind=kind)) == (Reason.FILE_SYSTEM, errno.EPERM)


def test_fuse_lies_on_fuse_only_where_the_settings_say_so() -> None:
    for kind in ("fuse", "fuse.sshfs"):
        assert refused_target(target(), line(kind=kind), fuse_on_fuse=True) is None
    refused = (Reason.FILE_SYSTEM, errno.EPERM)
    assert refused_target(target(), line(kind="fuseblk"), fuse_on_fuse=True) == refused
    assert refused_target(target(), line(kind="fusectl"), fuse_on_fuse=True) == refused


@pytest.mark.parametrize(
    "path", ["/", "", "/dev", "/dev/fuse", "/proc", "/proc/acpi", "/sys/firmware", "/dev/shm"]
)
def test_what_a_runtime_relies_on_is_no_mount_point(path: str) -> None:
    assert refused_target(target(path), line(kind="tmpfs")) == (Reason.PROTECTED, errno.EPERM)


@pytest.mark.parametrize("path", ["/dev/shm/a", "/device", "/procs/x", "/mnt/dev", "/a (deleted)"])
def test_other_directories_are_not_protected(path: str) -> None:
    assert refused_target(target(path), line()) is None


def test_a_mount_point_must_be_seen_and_private() -> None:
    assert refused_target(target(), None) == (Reason.NOT_VISIBLE, errno.EINVAL)
    assert refused_target(target(), line(is_shared=True)) == (Reason.SHARED, errno.EPERM)
    assert refused_target(target(is_path=False), line()) == (Reason.BAD_DESCRIPTOR, errno.EBADF)


@hypothesis.given(
    st.text(max_size=300), st.booleans(), st.sampled_from([*decision.MOUNTABLE, "proc", "fuse.x"])
)
def test_no_target_outside_the_rules_passes(
    path: str,
    shared: bool,  # noqa: FBT001  # drawn by hypothesis
    kind: str,
) -> None:
    if refused_target(target(path), line(kind=kind, is_shared=shared, point=path)) is None:
        assert not shared
        assert kind in decision.MOUNTABLE
        assert not re.match(r"/?$|/(proc|sys|dev(?!/shm/))(/|$)", path)


def mount_request(options: bytes = b"", *, sync: bool = False) -> protocol.Request:
    flags = protocol.Flag.SYNC_INIT if sync else protocol.Flag(0)
    return protocol.Request(protocol.Operation.MOUNT, flags, options)


def test_a_request_to_mount_becomes_a_job() -> None:
    limits = config.Limits()
    request = mount_request(b"ro,fsname=bucket,subtype=s3fs,allow_other")
    assert decision.mount_job(request, USER, limits=limits) == jobs.MountJob(
        caller=USER,
        strings=(("source", "bucket"), ("subtype", "s3fs")),
        flags=("allow_other", "ro"),
        attributes=1,
        sync_init=False,
    )
    assert decision.mount_job(mount_request(sync=True), USER, limits=limits).sync_init


@pytest.mark.parametrize("option", [b"suid", b"allow_other"])
def test_a_request_with_a_refused_option_is_refused(option: bytes) -> None:
    with pytest.raises(decision.Refusal, match=f"option '{option.decode()}' is refused") as refused:
        decision.mount_job(mount_request(option), USER, limits=config.Limits(allow_other=False))
    assert (refused.value.reason, refused.value.errno) == (Reason.OPTION, errno.EINVAL)


MOUNTED: Final = line(40, "fuse.sshfs", parent=30, point="/mnt", options=("rw", "user_id=1000"))


def unmounted(
    asking: jobs.Caller = USER,
    *lines: caller.MountLine,
    lazy: bool = False,
    is_path: bool = True,
) -> jobs.UnmountJob | tuple[Reason, str]:
    """Return the job for unmounting the mount 40, or why it was refused."""
    request = protocol.Request(protocol.Operation.UNMOUNT, protocol.Flag(int(lazy)), b"")
    try:
        return decision.unmount_job(
            request,
            asking,
            root=target("/mnt", 40, is_path=is_path),
            lines={known.mount_id: known for known in lines},
        )
    except decision.Refusal as refusal:
        return refusal.reason, refusal.text


ROOT: Final = USER._replace(uid=0, user_id=0, gid=0, group_id=0)


def test_a_user_unmounts_what_is_theirs_and_root_what_is_anyones() -> None:
    assert unmounted(USER, MOUNTED, line()) == jobs.UnmountJob(USER, lazy=False)
    assert unmounted(USER, MOUNTED, line(), lazy=True) == jobs.UnmountJob(USER, lazy=True)
    assert unmounted(ROOT, MOUNTED, line()) == jobs.UnmountJob(ROOT, lazy=False)
    for options in (("user_id=10000",), ("user_id=100",), ("x=user_id=1000",), ()):
        theirs = MOUNTED._replace(options=options)
        assert unmounted(USER, theirs, line()) == (
            Reason.NOT_YOURS,
            "/mnt was mounted by another user",
        )


@pytest.mark.parametrize(
    ("lines", "reason", "text"),
    [
        (
            [],
            Reason.NOT_VISIBLE,
            "the process cannot see the mount that this path is on; was it unmounted?",
        ),
        (
            [MOUNTED],
            Reason.NOT_VISIBLE,
            "/mnt is not mounted on a directory that the process sees",
        ),
        (
            [MOUNTED, line(is_shared=True)],
            Reason.SHARED,
            "/mnt is shared with other containers, which would lose it too",
        ),
        (
            [MOUNTED._replace(kind="tmpfs", mount_point="/\x1b[2J"), line()],
            Reason.NOT_FUSE,
            "/\ufffd[2J is not a FUSE file system, but tmpfs",
        ),
        (
            [MOUNTED._replace(kind="fuseblk"), line()],
            Reason.NOT_FUSE,
            "/mnt is not a FUSE file system, but fuseblk",
        ),
    ],
)
def test_nothing_else_is_unmounted(
    lines: list[caller.MountLine], reason: Reason, text: str
) -> None:
    assert unmounted(ROOT, *lines) == (reason, text)


def test_the_root_of_a_mount_must_be_a_path_descriptor() -> None:
    assert unmounted(ROOT, MOUNTED, line(), is_path=False) == (
        Reason.BAD_DESCRIPTOR,
        "the descriptor was not opened with O_PATH",
    )
