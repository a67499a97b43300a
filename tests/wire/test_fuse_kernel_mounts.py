"""Mounts in the namespaces of pods, with the real kernel: successes and refusals."""

import asyncio
import errno
import os
import struct
import subprocess
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from muster_fuse.kernel import jobs, mounter_client, syscalls
from tests.worlds import fuse_daemon, fuse_pods, fuse_requests

pytestmark = fuse_pods.needs_pods()
DONE = jobs.Outcome()
HOME = "/mnt/home"


def with_mounter(story: Callable[[mounter_client.Mounter], Awaitable[None]]) -> None:
    """Run a story with a mounter, whose mounts must not appear on this machine."""

    async def play() -> None:
        async with mounter_client.Mounter() as mounter:
            await story(mounter)
            assert " - fuse test " not in Path("/proc/self/mountinfo").read_text()

    asyncio.run(play())


def mounts(container: fuse_pods.Container) -> list[str]:
    """Return the FUSE mounts that the container sees: mount point, options, source, parameters."""
    mounts = []
    for line in Path(f"/proc/{container.process.pid}/mountinfo").read_text().splitlines():
        _, _, _, _, point, options, *_, kind, source, parameters = line.split()
        if kind == "fuse":
            mounts.append(f"{point} {options} {source} {parameters}")
    return mounts


def anonymous(outcome: jobs.Outcome) -> jobs.Outcome:
    """Return an outcome without the numbers of a mount that may have remained."""
    return outcome._replace(minor=0, inode=0, created_ns=0)


def as_host(container: fuse_pods.Container, script: str) -> None:
    """Run a script as root of the machine, in the mount namespace of the container."""
    enter = ["/usr/bin/nsenter", f"--target={container.process.pid}", "--mount", "--"]
    subprocess.run([*enter, "/bin/sh", "-ec", script], check=True, timeout=60)


@pytest.mark.parametrize("user_namespace", [False, True])
@pytest.mark.parametrize("uid", [0, fuse_pods.USER])
def test_a_process_of_a_pod_mounts_uses_and_unmounts(uid: int, *, user_namespace: bool) -> None:
    async def story(mounter: mounter_client.Mounter) -> None:
        with fuse_pods.container(user_namespace=user_namespace) as pod:
            with fuse_requests.mounting(pod, HOME, uid=uid) as daemon:
                outcome = await daemon.mount(mounter)
                assert outcome == jobs.Outcome(
                    minor=outcome.minor, inode=outcome.inode, created_ns=outcome.created_ns
                )
                assert daemon.line() == "mounted\n"
                assert " - fuse test " not in Path("/proc/self/mountinfo").read_text()
                assert fuse_pods.connections()[outcome.minor] == outcome.inode
                assert mounts(pod) == [
                    f"{HOME} rw,nosuid,nodev,relatime test rw,user_id={uid},group_id={uid}"
                ]
                status, listing = pod.run("/bin/ls", "-ln", HOME, uid=uid)
                assert (status, listing.split()[2:6]) == (
                    0,
                    ["-rw-r--r--", "1", f"{uid}", f"{uid}"],
                )
                assert pod.run("/bin/cat", f"{HOME}/hello", uid=uid) == (
                    0,
                    fuse_daemon.TEXT.decode(),
                )
                with fuse_requests.unmounting(pod, HOME, uid=uid) as asking:
                    assert await asking.unmount(mounter) == DONE
                assert daemon.ended() == (0, "unmounted\n")
            assert mounts(pod) == []
            assert fuse_pods.connections().get(outcome.minor) != outcome.inode

    with fuse_pods.same_connections():
        with_mounter(story)


def test_a_file_can_be_a_mount_point() -> None:
    async def story(mounter: mounter_client.Mounter) -> None:
        with fuse_pods.container() as pod:
            pod.run("/bin/touch", f"{HOME}/file")
            with fuse_requests.mounting(pod, f"{HOME}/file") as daemon:
                assert (await daemon.mount(mounter)).errno == 0
                assert [line.split()[0] for line in mounts(pod)] == [f"{HOME}/file"]
                with fuse_requests.unmounting(pod, f"{HOME}/file") as asking:
                    assert await asking.unmount(mounter) == DONE

    with_mounter(story)


def test_parameters_and_attributes_are_those_of_the_job() -> None:
    async def story(mounter: mounter_client.Mounter) -> None:
        with fuse_pods.container() as pod, fuse_requests.mounting(pod, HOME) as daemon:
            strings = (("source", "a b"), ("subtype", "sshfs"), ("max_read", "65536"))
            flags = ("ro", "allow_other", "default_permissions")
            outcome = await daemon.mount(mounter, strings=strings, flags=flags, attributes=0x9)
            assert outcome.errno == 0
            info = Path(f"/proc/{pod.process.pid}/mountinfo").read_text().splitlines()[-1]
            assert info.split()[4:] == [
                *(HOME, "ro,nosuid,nodev,noexec,relatime", "-", "fuse.sshfs", r"a\040b"),
                "ro,user_id=1000,group_id=1000,default_permissions,allow_other,max_read=65536",
            ]

    with_mounter(story)


def test_a_parameter_that_the_kernel_does_not_know_is_refused_in_its_words() -> None:
    async def story(mounter: mounter_client.Mounter) -> None:
        with fuse_pods.container() as pod, fuse_requests.mounting(pod, HOME) as daemon:
            assert await daemon.mount(mounter, flags=("nosuch",)) == jobs.Outcome(
                errno.EINVAL,
                "cannot create the file system: Invalid argument: fuse: Unknown parameter 'nosuch'",
                "create",
            )
            assert mounts(pod) == []

    with_mounter(story)


def test_a_mount_point_of_another_container_is_refused() -> None:
    async def story(mounter: mounter_client.Mounter) -> None:
        with (
            fuse_pods.container() as pod,
            fuse_pods.container() as other,
            fuse_requests.mounting(pod, HOME) as daemon,
            fuse_requests.mounting(other, HOME) as stranger,
        ):
            smuggled = daemon._replace(descriptor=stranger.descriptor)
            assert anonymous(await smuggled.mount(mounter)) == jobs.Outcome(
                errno.EINVAL,
                "the mount point is not in the container, or its type has changed",
                "attach",
            )
            assert mounts(pod) == mounts(other) == []

    with_mounter(story)


def test_a_deleted_directory_is_refused_and_a_renamed_one_is_mounted_on() -> None:
    async def story(mounter: mounter_client.Mounter) -> None:
        with fuse_pods.container() as pod:
            pod.run("/bin/mkdir", f"{HOME}/gone", f"{HOME}/before")
            with fuse_requests.mounting(pod, f"{HOME}/gone") as daemon:
                pod.run("/bin/rmdir", f"{HOME}/gone")
                assert anonymous(await daemon.mount(mounter)) == jobs.Outcome(
                    errno.ENOENT, "the mount point has been deleted", "attach"
                )
            with fuse_requests.mounting(pod, f"{HOME}/before") as daemon:
                pod.run("/bin/mv", f"{HOME}/before", f"{HOME}/after")
                pod.run("/bin/ln", "-s", "/etc", f"{HOME}/before")
                assert (await daemon.mount(mounter)).errno == 0
                assert [line.split()[0] for line in mounts(pod)] == [f"{HOME}/after"]

    with_mounter(story)


@pytest.mark.parametrize(
    ("directory", "code", "text"),
    [
        ("/etc", errno.EACCES, "cannot write to the mount point as the caller: Permission denied"),
        ("/mnt/tmp", errno.EPERM, "the mount point is a sticky directory of another user"),
        ("/dev/null", errno.ENOTDIR, "the mount point is neither a directory nor a file"),
    ],
)
def test_a_user_cannot_cover_what_belongs_to_others(directory: str, code: int, text: str) -> None:
    async def story(mounter: mounter_client.Mounter) -> None:
        with fuse_pods.container() as pod, fuse_requests.mounting(pod, directory) as daemon:
            assert await daemon.mount(mounter) == jobs.Outcome(code, text, "access")
            assert mounts(pod) == []
            assert daemon.ended()[0] == errno.ECONNREFUSED

    with_mounter(story)


@pytest.mark.parametrize("user_namespace", [False, True])
def test_what_a_user_may_write_to_is_what_the_permissions_say(*, user_namespace: bool) -> None:
    async def story(mounter: mounter_client.Mounter) -> None:
        with fuse_pods.container(user_namespace=user_namespace) as pod:
            base = fuse_pods.FIRST_HOST_ID if user_namespace else 0
            as_host(
                pod,
                f"cd /mnt/tmp; mkdir mine of-group; chown {base + 1000} mine;"
                f" chgrp {base + 5000} of-group; chmod 2770 of-group",
            )
            for directory, groups, code in (
                ("mine", (), 0),
                ("of-group", (), errno.EACCES),
                ("of-group", (base + 4000, base + 5000), 0),
            ):
                point = f"/mnt/tmp/{directory}"
                with fuse_requests.mounting(pod, HOME, groups=groups) as daemon:
                    descriptor = os.open(f"{pod.root}{point}", os.O_PATH)
                    outcome = await daemon._replace(descriptor=descriptor).mount(mounter)
                    os.close(descriptor)
                    assert (directory, groups, outcome.errno) == (directory, groups, code)

    with_mounter(story)


def test_the_root_of_a_container_without_capabilities_is_a_user_like_others() -> None:
    async def story(mounter: mounter_client.Mounter) -> None:
        with fuse_pods.container() as pod, fuse_requests.mounting(pod, HOME, uid=0) as daemon:
            powerless = daemon._replace(caller=daemon.caller._replace(overrides=False))
            assert (await powerless.mount(mounter)).errno == errno.EACCES
            assert (await daemon.mount(mounter)).errno == 0

    with_mounter(story)


@pytest.mark.parametrize("what", ["remount,bind,ro", "remount,ro"])
def test_on_a_read_only_file_system_permissions_count_as_if_it_were_not(what: str) -> None:
    async def story(mounter: mounter_client.Mounter) -> None:
        with fuse_pods.container(read_only=True) as pod:
            as_host(
                pod,
                "mkdir /mnt/ro; mount -t tmpfs tmpfs /mnt/ro; cd /mnt/ro;"
                " mkdir mine roots all; chown 1000 mine; chmod 777 all;"
                f" mount -o {what} /mnt/ro",
            )
            for directory, code in (("mine", 0), ("all", 0), ("roots", None)):
                with fuse_requests.mounting(pod, f"/mnt/ro/{directory}") as daemon:
                    outcome = await daemon.mount(mounter)
                    refused = errno.EROFS if what == "remount,ro" else errno.EACCES
                    expected = refused if code is None else code
                    assert (directory, outcome.errno) == (directory, expected)
            with fuse_requests.mounting(pod, "/srv", uid=0) as daemon:
                assert (await daemon.mount(mounter)).errno == 0

    with_mounter(story)


@pytest.mark.parametrize("option", ["rw", "ro"])
def test_an_access_list_that_denies_the_caller_counts_on_a_read_only_file_system_too(
    option: str,
) -> None:
    everybody = -1
    # tags of linux/posix_acl.h: the owner, a user, the group, the mask, others
    entries = ((1, 7, everybody), (2, 0, 1000), *((tag, 7, everybody) for tag in (4, 16, 32)))
    denying = struct.pack("<I", 2) + b"".join(struct.pack("<HHi", *entry) for entry in entries)

    async def story(mounter: mounter_client.Mounter) -> None:
        with fuse_pods.container() as pod:
            as_host(pod, "cd /mnt; mkdir acl; mount -t tmpfs x acl; mkdir -m 777 acl/denied")
            os.setxattr(f"{pod.root}/mnt/acl/denied", "system.posix_acl_access", denying)
            as_host(pod, f"mount -o remount,{option} /mnt/acl")
            with fuse_requests.mounting(pod, "/mnt/acl/denied") as daemon:
                outcome = await daemon.mount(mounter)
                assert outcome.errno == (errno.EACCES if option == "rw" else errno.EROFS)
            assert mounts(pod) == []

    with_mounter(story)


@pytest.mark.parametrize("lazy", [False, True])
def test_a_daemon_that_never_answers_holds_up_nobody(*, lazy: bool) -> None:
    async def story(mounter: mounter_client.Mounter) -> None:
        with (
            fuse_pods.container() as pod,
            fuse_requests.mounting(pod, HOME, "--stall", "INIT") as daemon,
        ):
            assert (await daemon.mount(mounter)).errno == 0
            assert daemon.line() == "mounted\n"
            with fuse_requests.unmounting(pod, HOME) as asking:
                assert await asking.unmount(mounter, lazy=lazy) == DONE
            assert daemon.ended() == (0, "unmounted\n")
            assert mounts(pod) == []

    with_mounter(story)


_MAPPING = f"""
import mmap, sys
with open("{HOME}/hello", "rb") as file:
    mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
print("in", flush=True)
sys.stdin.readline()
"""


@pytest.mark.parametrize(
    "program",
    [
        ("/bin/sh", "-c", f"cd {HOME}; echo in; read -r x"),
        ("/bin/sh", "-c", f"exec 3< {HOME}/hello; echo in; read -r x"),
        (*fuse_pods.PROGRAM, "-c", _MAPPING),
    ],
    ids=["directory", "file", "mapped"],
)
def test_a_mount_in_use_is_removed_only_lazily(program: tuple[str, ...]) -> None:
    async def story(mounter: mounter_client.Mounter) -> None:
        with fuse_pods.container() as pod, fuse_requests.mounting(pod, HOME) as daemon:
            assert (await daemon.mount(mounter)).errno == 0
            pipe = subprocess.PIPE
            with pod.start(*program, stdin=pipe, stdout=pipe) as user:
                assert user.stdout is not None
                assert user.stdout.readline() == "in\n"
                with fuse_requests.unmounting(pod, HOME) as asking:
                    assert await asking.unmount(mounter) == jobs.Outcome(
                        errno.EBUSY, "cannot unmount: Device or resource busy", "unmount"
                    )
                with fuse_requests.unmounting(pod, HOME) as asking:
                    assert await asking.unmount(mounter, lazy=True) == DONE
                assert mounts(pod) == []
                user.communicate("\n")
            assert daemon.line() == "mounted\n"
            assert daemon.ended() == (0, "unmounted\n")

    with_mounter(story)


def test_a_mount_point_whose_name_is_not_utf_8_can_be_unmounted() -> None:
    async def story(mounter: mounter_client.Mounter) -> None:
        directory = f"{HOME}/\udcff"
        with fuse_pods.container() as pod:
            pod.run("/bin/mkdir", directory)
            with fuse_requests.mounting(pod, directory) as daemon:
                assert (await daemon.mount(mounter)).errno == 0
                with fuse_requests.unmounting(pod, directory) as asking:
                    assert await asking.unmount(mounter) == DONE

    with_mounter(story)


@pytest.mark.parametrize("lazy", [False, True])
def test_a_mount_that_another_covers_is_not_removed_before_it(*, lazy: bool) -> None:
    async def story(mounter: mounter_client.Mounter) -> None:
        with fuse_pods.container() as pod, fuse_requests.mounting(pod, HOME) as inner:
            assert (await inner.mount(mounter, flags=("allow_other",))).errno == 0
            with (
                fuse_requests.unmounting(pod, HOME) as asking,
                fuse_requests.mounting(pod, HOME) as outer,
            ):
                assert (await outer.mount(mounter)).errno == 0
                text = "cannot unmount: another mount covers this one; unmount the other one first"
                outcome = jobs.Outcome(errno.EBUSY, text, "unmount")
                assert await asking.unmount(mounter, lazy=lazy) == outcome
                assert len(mounts(pod)) == 2

    with_mounter(story)


@pytest.mark.parametrize("lazy", [False, True])
def test_only_the_mount_that_was_sent_is_removed_though_its_path_leads_to_another(
    *, lazy: bool
) -> None:
    """Another container of the pod may rename directories that they share at any moment."""

    async def story(mounter: mounter_client.Mounter) -> None:
        with fuse_pods.container() as pod:
            pod.run("/bin/mkdir", f"{HOME}/mine", f"{HOME}/secret")
            as_host(pod, f"mount -t tmpfs secret {HOME}/secret; touch {HOME}/secret/kept")
            with fuse_requests.mounting(pod, f"{HOME}/mine") as daemon:
                assert (await daemon.mount(mounter)).errno == 0
                with fuse_requests.unmounting(pod, f"{HOME}/mine") as asking:
                    shared = Path(f"{pod.root}{HOME}")
                    for name, other in (("mine", "x"), ("secret", "mine"), ("x", "secret")):
                        (shared / name).rename(shared / other)
                    assert await asking.unmount(mounter, lazy=lazy) == DONE
                assert mounts(pod) == []
                assert pod.run("/bin/ls", f"{HOME}/mine") == (0, "kept\n")

    with_mounter(story)


def test_a_mount_that_a_covered_path_hides_is_removed() -> None:
    async def story(mounter: mounter_client.Mounter) -> None:
        with fuse_pods.container() as pod:
            pod.run("/bin/mkdir", f"{HOME}/a", f"{HOME}/a/b")
            with (
                fuse_requests.mounting(pod, f"{HOME}/a/b") as inner,
                fuse_requests.mounting(pod, f"{HOME}/a") as outer,
            ):
                assert (await inner.mount(mounter)).errno == 0
                with fuse_requests.unmounting(pod, f"{HOME}/a/b") as asking:
                    assert (await outer.mount(mounter)).errno == 0
                    assert await asking.unmount(mounter) == DONE
                (left,) = mounts(pod)
                assert left.startswith(f"{HOME}/a rw")

    with_mounter(story)


def test_a_caller_that_has_exited_gets_nothing() -> None:
    async def story(mounter: mounter_client.Mounter) -> None:
        with fuse_pods.container() as pod, fuse_requests.mounting(pod, HOME) as daemon:
            daemon.process.kill()
            daemon.process.wait()
            assert await daemon.mount(mounter) == jobs.Outcome(
                errno.ESRCH, "cannot enter the container: No such process", "enter"
            )
            assert mounts(pod) == []

    with_mounter(story)


def test_a_mount_whose_caller_does_not_take_it_is_removed() -> None:
    async def story(mounter: mounter_client.Mounter) -> None:
        with fuse_pods.container() as pod, fuse_requests.mounting(pod, HOME) as daemon:
            broker, theirs = fuse_requests.socketpair()
            with broker:
                theirs.close()
                assert anonymous(
                    await daemon._replace(broker=broker).mount(mounter)
                ) == jobs.Outcome(errno.EPIPE, "cannot reply to the caller: Broken pipe", "reply")
            assert mounts(pod) == []

    with_mounter(story)


def test_with_sync_init_the_caller_says_when_to_mount() -> None:
    async def story(mounter: mounter_client.Mounter) -> None:
        with (
            fuse_pods.container() as pod,
            fuse_requests.mounting(pod, HOME, "--sync-init") as daemon,
        ):
            assert (await daemon.mount(mounter, sync_init=True)).errno == 0
            assert daemon.line() == "mounted\n"
            assert pod.run("/bin/cat", f"{HOME}/hello")[0] == 0

    with_mounter(story)


def test_with_sync_init_a_caller_that_hangs_up_has_no_mount() -> None:
    async def story(mounter: mounter_client.Mounter) -> None:
        with fuse_pods.container() as pod, fuse_requests.mounting(pod, HOME) as daemon:
            # the caller has not asked for SYNC_INIT: it does not expect this reply, and ends
            assert await daemon.mount(mounter, sync_init=True) == jobs.Outcome(
                errno.EPROTO,
                "the caller did not send CONTINUE: a packet of 0 bytes is shorter than its header",
                "reply",
            )
            assert mounts(pod) == []

    with_mounter(story)


def test_a_process_with_threads_cannot_enter_namespaces() -> None:
    """This is why the mounter is a process of its own."""
    end = threading.Event()
    thread = threading.Thread(target=end.wait)
    thread.start()
    try:
        with fuse_pods.container(user_namespace=True) as pod:
            peer = os.pidfd_open(pod.process.pid)
            for kinds in (syscalls.CLONE_NEWNS, syscalls.CLONE_NEWNS | syscalls.CLONE_NEWUSER):
                with pytest.raises(OSError, match="Invalid argument"):
                    syscalls.setns(peer, kinds)
            os.close(peer)
    finally:
        end.set()
        thread.join()
