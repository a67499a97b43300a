"""Pods mount and unmount through the broker, with the real kernel."""

import contextlib
import errno
import os
import signal
import threading

import pytest

from muster_fuse.broker import observations
from muster_fuse.kernel import jobs
from muster_fuse.request import decision
from muster_fuse.watch import mounts
from tests.worlds import fuse_broker, fuse_daemon, fuse_pods

pytestmark = fuse_pods.needs_pods()
HOME = fuse_broker.HOME
TEXT = fuse_daemon.TEXT.decode()


@pytest.mark.parametrize("user_namespace", [False, True])
@pytest.mark.parametrize("uid", [0, fuse_pods.USER])
def test_a_process_of_a_pod_mounts_reads_and_unmounts(uid: int, *, user_namespace: bool) -> None:
    with (
        fuse_broker.running() as running,
        running.pod(user_namespace=user_namespace) as pod,
        fuse_broker.daemon(pod, "--options=fsname=a b,subtype=x", uid=uid) as daemon,
    ):
        fuse_broker.mounted(daemon)
        assert pod.run("/bin/cat", f"{HOME}/hello", uid=uid) == (0, TEXT)
        event = running.seen(observations.Mounted)
        connection = event.mount.connection
        assert event.pod.uid == pod.pod_uid
        assert event.mount == mounts.Mount(
            pod_uid=pod.pod_uid,
            connection=connection,
            inode=fuse_pods.connections()[connection],
            created_ns=event.mount.created_ns,
            mount_point=HOME,
            source="a b",
            subtype="x",
            user_id=uid,
        )
        assert running.broker.mounts() == (event.mount,)
        assert fuse_broker.unmounted(pod, uid=uid) == ""
        assert daemon.wait(fuse_broker.WAIT_S) == 0
        fuse_broker.until(lambda: not running.broker.mounts())
        assert running.of(observations.Refused) == []


def test_a_pod_has_as_many_mounts_as_it_may_and_not_those_that_are_gone() -> None:
    with fuse_broker.running(mounts_per_pod=1, watch_s=3600.0) as running, running.pod() as pod:
        with fuse_broker.daemon(pod) as first:
            fuse_broker.mounted(first)
            pod.run("/bin/mkdir", "/mnt/tmp/a")
            with fuse_broker.daemon(pod, directory="/mnt/tmp/a") as second:
                text = "this pod has 1 FUSE mounts, the maximum"
                assert fuse_broker.refused(second) == (errno.ENOSPC, text)
            assert fuse_broker.unmounted(pod) == ""
        with fuse_broker.daemon(pod, directory="/mnt/tmp/a") as second:
            fuse_broker.mounted(second)


def test_a_pod_makes_as_many_requests_as_it_may() -> None:
    with (
        fuse_broker.running(requests_burst=3, requests_per_minute=1) as running,
        running.pod() as pod,
    ):
        script = "for _ in range(5): print(asked(_packet(3)))"
        said = fuse_broker.said(fuse_broker.program(pod, script)).splitlines()
        wait = "EAGAIN: this pod may make 1 requests a minute; wait, then try again"
        assert said == ["done"] * 3 + [wait] * 2
        reasons = [refused.reason for refused in running.of(observations.Refused)]
        assert reasons == [decision.Reason.TOO_FAST]


def test_mounts_of_a_pod_at_the_same_time_wait_for_each_other() -> None:
    with fuse_broker.running() as running, running.pod() as pod, contextlib.ExitStack() as stack:
        directories = [f"/mnt/tmp/{number}" for number in range(8)]
        pod.run("/bin/mkdir", *directories)
        daemons = [
            stack.enter_context(fuse_broker.daemon(pod, directory=directory))
            for directory in directories
        ]
        for daemon in daemons:
            fuse_broker.mounted(daemon)
        fuse_broker.until(lambda: len(running.broker.mounts()) == len(directories))
        assert {mount.mount_point for mount in running.broker.mounts()} == set(directories)


def test_sync_init_receives_the_descriptor_first() -> None:
    with (
        fuse_broker.running() as running,
        running.pod() as pod,
        fuse_broker.daemon(pod, "--sync-init") as daemon,
    ):
        fuse_broker.mounted(daemon)
        assert pod.run("/bin/cat", f"{HOME}/hello") == (0, TEXT)
        assert fuse_broker.unmounted(pod) == ""


def test_a_user_unmounts_only_what_is_theirs() -> None:
    other = fuse_pods.USER + 1
    with (
        fuse_broker.running() as running,
        running.pod() as pod,
        fuse_broker.daemon(pod, "--options=allow_other") as daemon,
    ):
        fuse_broker.mounted(daemon)
        text = f"EPERM: {HOME} was mounted by another user"
        assert fuse_broker.unmounted(pod, uid=other) == text
        text = "EINVAL: /mnt is not a FUSE file system, but tmpfs"
        assert fuse_broker.unmounted(pod, "/mnt", uid=0) == text
        assert fuse_broker.unmounted(pod, uid=0) == ""
        assert daemon.wait(fuse_broker.WAIT_S) == 0


def test_a_directory_that_is_in_use_is_unmounted_lazily() -> None:
    with (
        fuse_broker.running() as running,
        running.pod() as pod,
        fuse_broker.daemon(pod) as daemon,
    ):
        fuse_broker.mounted(daemon)
        using = fuse_broker.program(pod, f"os.chdir({HOME!r}); print('in', flush=True); input()")
        assert using.stdout is not None
        assert using.stdout.readline() == "in\n"
        assert fuse_broker.unmounted(pod).startswith("EBUSY: ")
        assert fuse_broker.unmounted(pod, lazy=True) == ""
        assert pod.run("/bin/ls", HOME) == (0, "")
        using.communicate("\n")
        assert daemon.wait(fuse_broker.WAIT_S) == 0


def test_opening_a_pod_again_keeps_its_socket_and_heals_a_lost_one() -> None:
    with fuse_broker.running() as running, running.pod() as pod:
        path = running.socket_of(pod.pod_uid)
        before = path.stat().st_ino
        running.open(pod.pod_uid)
        assert path.stat().st_ino == before
        path.unlink()
        running.open(pod.pod_uid)
        with fuse_broker.daemon(pod) as daemon:
            fuse_broker.mounted(daemon)


LEFT = """
over = broker()
print(asked(_packet(3), point("/"), over=over), flush=True)
"""


def test_the_end_of_a_broker_waits_for_the_connections_of_closed_pods() -> None:
    """Otherwise, the exit of its process would close the descriptors that they have sent."""
    with fuse_broker.running() as running, running.pod() as pod:
        mounter = running.mounter.pid
        assert mounter is not None
        os.kill(mounter, signal.SIGSTOP)
        assert fuse_broker.said(fuse_broker.program(pod, LEFT)) == (
            "EPROTO: HELLO with 1 descriptors is not allowed"
        )
        # closing the pod does not wait long for the connection
        running.call(running.broker.close(pod.pod_uid))
        threading.Timer(0.5, os.kill, (mounter, signal.SIGCONT)).start()


def test_a_closed_pod_is_not_served_and_keeps_its_mounts() -> None:
    with (
        fuse_broker.running() as running,
        running.pod() as pod,
        fuse_broker.daemon(pod) as daemon,
    ):
        fuse_broker.mounted(daemon)
        running.call(running.broker.close(pod.pod_uid))
        assert pod.run("/bin/cat", f"{HOME}/hello") == (0, TEXT)
        refused = fuse_broker.program(pod, "broker()")
        _, errors = refused.communicate(timeout=fuse_broker.WAIT_S)
        assert "ConnectionRefusedError" in errors


def test_the_self_test_passes_through_the_brokers_own_socket() -> None:
    with fuse_broker.running() as running:
        running.open("")
        job = jobs.SelfTestJob(str(running.socket_of("")))
        assert running.call(running.mounter.self_test(job)) == jobs.Outcome()
        assert running.of(observations.Refused) == []
        fuse_broker.until(lambda: not running.broker.mounts())


def test_a_user_with_a_number_that_no_signed_integer_holds_mounts() -> None:
    with fuse_broker.running() as running, running.pod() as pod:
        uid = 3_000_000_000
        assert pod.run("/bin/mkdir", "-m", "777", "/mnt/tmp/big", uid=0) == (0, "")
        with fuse_broker.daemon(pod, directory="/mnt/tmp/big", uid=uid) as daemon:
            fuse_broker.mounted(daemon)
