"""The broker's watch of mounts: daemons that end or hang, pods that end, its own restart."""

import signal
import tempfile
from pathlib import Path

import pytest

from muster import vocabulary
from muster_fuse.broker import observations
from muster_fuse.watch import mounts, processes
from tests.worlds import fuse_broker, fuse_daemon, fuse_pods

pytestmark = fuse_pods.needs_pods()
HOME = fuse_broker.HOME
TEXT = fuse_daemon.TEXT.decode()
DEAD = vocabulary.FuseCondition.DEAD
HUNG = vocabulary.FuseCondition.HUNG
LINGERING = vocabulary.FuseCondition.LINGERING


def changes(running: fuse_broker.Running) -> list[tuple[str, bool]]:
    """Return each change of a condition: its name, and whether it holds."""
    seen = running.of(observations.ConditionChanged)
    return [(change.condition, change.holds) for change in seen]


def test_a_mount_whose_daemon_was_killed_is_dead_until_it_is_unmounted() -> None:
    with fuse_broker.running() as running, running.pod() as pod:
        with fuse_broker.daemon(pod) as daemon:
            fuse_broker.mounted(daemon)
            assert pod.run("/bin/cat", f"{HOME}/hello") == (0, TEXT)
            mount = running.seen(observations.Mounted).mount
        change = running.seen(observations.ConditionChanged)
        assert (change.mount, change.condition, change.holds) == (mount, DEAD, True)
        assert change.text == "no process has /dev/fuse open for this mount any more"
        assert running.broker.conditions(mount) == (DEAD,)
        assert fuse_broker.unmounted(pod) == ""
        fuse_broker.until(lambda: not running.broker.mounts())
        assert changes(running) == [(DEAD, True), (DEAD, False)]


def test_a_daemon_that_is_stopped_makes_its_mount_hung_until_it_goes_on() -> None:
    with (
        fuse_broker.running(hung_s=0.5) as running,
        running.pod() as pod,
        fuse_broker.daemon(pod) as daemon,
    ):
        fuse_broker.mounted(daemon)
        daemon.send_signal(signal.SIGSTOP)
        reading = fuse_broker.program(pod, f"print(os.stat({HOME!r}).st_mode)")
        running.seen(observations.ConditionChanged)
        daemon.send_signal(signal.SIGCONT)
        assert fuse_broker.said(reading) == str(0o40755)
        running.seen(observations.ConditionChanged, lambda change: not change.holds)
        assert changes(running) == [(HUNG, True), (HUNG, False)]


def test_killed_processes_that_wait_for_a_hung_mount_are_freed_with_their_pod() -> None:
    with (
        fuse_broker.running(hung_s=0.5, lingering_s=0.5) as running,
        running.pod() as pod,
        fuse_broker.daemon(pod, "--stall", "LOOKUP") as daemon,
    ):
        fuse_broker.mounted(daemon)
        reading = fuse_broker.program(pod, f"os.stat({HOME!r} + '/hello')")
        running.seen(observations.ConditionChanged)
        reading.kill()
        running.seen(observations.ConditionChanged, lambda change: change.condition == LINGERING)
        assert reading.poll() is None
        running.call(running.broker.close(pod.pod_uid))
        assert running.call(running.broker.release(pod.pod_uid)) == 1
        assert running.broker.mounts() == ()
        reading.communicate(timeout=fuse_broker.WAIT_S)
        assert reading.returncode == -signal.SIGKILL
        aborted = running.seen(observations.Aborted)
        assert (aborted.pod.uid, aborted.count) == (pod.pod_uid, 1)
        assert running.call(running.broker.release(pod.pod_uid)) == 0


def test_a_mount_that_another_pod_serves_is_not_dead_and_is_aborted_with_its_own() -> None:
    passing = """
device = mount(broker(), "/mnt/home")
listening = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
listening.bind("/tmp/" + sys.argv[1])
os.chmod("/tmp/" + sys.argv[1], 0o777)
listening.listen()
print("listening", flush=True)
to, _ = listening.accept()
socket.send_fds(to, [b"x"], [device])
"""
    taking = """
from_ = connected("/tmp/" + sys.argv[1])
_, (device,), _, _ = socket.recv_fds(from_, 1, 1)
print("serving", flush=True)
serve(device)
print("aborted")
"""
    with fuse_broker.running() as running, running.pod() as pod, running.pod() as other:
        name = f"muster-{pod.pod_uid}"
        giving = fuse_broker.program(pod, passing, name)
        try:
            assert giving.stdout is not None
            assert giving.stdout.readline() == "listening\n"
            serving = fuse_broker.program(other, taking, name)
            assert fuse_broker.said(giving) == ""
            assert serving.stdout is not None
            assert serving.stdout.readline() == "serving\n"
        finally:
            Path("/tmp", name).unlink()
        assert pod.run("/bin/cat", f"{HOME}/hello") == (0, TEXT)
        running.call(running.broker.release(pod.pod_uid))
        assert fuse_broker.said(serving) == "aborted"
        assert (DEAD, True) not in changes(running)


def test_mounts_go_with_their_container_and_raise_no_alarm() -> None:
    with fuse_broker.running() as running:
        with running.pod() as pod, fuse_broker.daemon(pod) as daemon:
            fuse_broker.mounted(daemon)
            running.seen(observations.Mounted)
            pod.process.communicate()
            daemon.kill()
        fuse_broker.until(lambda: not running.broker.mounts())
        fuse_broker.until(lambda: not records(running))
        assert {holds for condition, holds in changes(running) if condition != DEAD} == set()


def test_a_broker_finds_again_what_an_earlier_one_has_mounted() -> None:
    with (
        fuse_broker.running() as running,
        running.pod() as pod,
        fuse_broker.daemon(pod, "--options=fsname=a") as daemon,
    ):
        fuse_broker.mounted(daemon)
        before = running.seen(observations.Mounted).mount
        fuse_broker.until(lambda: records(running))
        running.restart()
        assert pod.run("/bin/cat", f"{HOME}/hello") == (0, TEXT)
        running.open(pod.pod_uid)
        (after,) = running.broker.mounts()
        assert ignoring_identity(after) == ignoring_identity(before)
        assert after.inode == fuse_pods.connections()[after.connection]
        assert fuse_broker.unmounted(pod) == ""
        assert daemon.wait(fuse_broker.WAIT_S) == 0
        fuse_broker.until(lambda: not running.broker.mounts())


def test_a_broker_finds_what_an_earlier_one_could_not_write_down() -> None:
    with (
        fuse_broker.running() as running,
        running.pod() as pod,
        fuse_broker.daemon(pod, "--options=fsname=a b,subtype=x") as daemon,
    ):
        fuse_broker.mounted(daemon)
        fuse_broker.until(lambda: records(running))
        before = running.seen(observations.Mounted).mount
        running.stop_watching()
        for file in records(running):
            file.unlink()
        running.restart()
        running.open(pod.pod_uid)
        opened = Path(f"/proc/{daemon.pid}/fdinfo").iterdir()
        if not any("fuse_connection:" in file.read_text() for file in opened):
            pytest.skip("this kernel does not say which connection a /dev/fuse serves")
        (after,) = running.broker.mounts()
        assert ignoring_identity(after) == ignoring_identity(before)
        assert after.subtype == before.subtype
        with running.pod():
            assert running.broker.mounts() == (after,)


@pytest.mark.parametrize("text", [b"", b"[{}]", b"\xff", b'[{"pod_uid": 5}]'])
def test_a_record_that_cannot_be_read_stops_nothing(text: bytes) -> None:
    with tempfile.TemporaryDirectory(prefix="muster-") as directory:
        records = Path(directory) / "records"
        records.mkdir()
        (records / "a-b.json").write_bytes(text)
        with fuse_broker.running(Path(directory)) as running:
            running.open("a-b")
            assert running.broker.mounts() == ()


def test_a_recorded_mount_that_is_gone_is_forgotten() -> None:
    with fuse_broker.running() as running:
        with running.pod() as pod, fuse_broker.daemon(pod) as daemon:
            fuse_broker.mounted(daemon)
            fuse_broker.until(lambda: records(running))
            running.stop_watching()
        running.restart()
        running.open(pod.pod_uid)
        assert running.broker.mounts() == ()


def records(running: fuse_broker.Running) -> list[Path]:
    return list(running.directory.glob("records/*.json"))


def ignoring_identity(mount: mounts.Mount) -> tuple[object, ...]:
    """Return the fields of a mount that do not depend on whether fusectl is mounted."""
    return (mount.pod_uid, mount.connection, mount.mount_point, mount.source, mount.user_id)


LOOKALIKES = """
import resource

_, most = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
os.mkdir("/mnt/tmp/a")
file = os.open("/mnt/tmp/fuse", os.O_CREAT | os.O_RDWR)
for _ in range(3000):
    os.dup(file)
device = mount(broker(), "/mnt/tmp/a")
print("ready", flush=True)
sys.stdin.readline()
"""


def test_thousands_of_files_named_like_the_device_hide_the_mounts_of_their_own_pod_only() -> None:
    with fuse_broker.running() as running, running.pod() as many, running.pod() as other:
        process = fuse_broker.program(many, LOOKALIKES)
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        with fuse_broker.daemon(other) as daemon:
            fuse_broker.mounted(daemon)
            pods = {many.pod_uid, other.pod_uid}
            holders = list(processes.holders(pods, everywhere=False))
            if any(
                holder.connection is None for holder in holders if holder.pod_uid == other.pod_uid
            ):
                pytest.skip("needs Linux 6.16: the kernel shows the connection of a descriptor")
            serving = [holder.pod_uid for holder in holders if holder.connection is not None]
            assert serving == [other.pod_uid]
        process.communicate("end\n")
