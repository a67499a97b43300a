"""The NRI plugin's process against a real containerd, and against a runtime that misbehaves."""

import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import grpc
import pytest

from muster.pb import nri_pb2
from muster_fuse.nri import device_check
from tests.worlds import containerd, nri_runtime, service_process
from tests.worlds.nri_runtime import ANNOTATED
from tests.worlds.service_process import Service

DEVICE: Final = "10, 229"


@pytest.fixture(scope="module")
def runtime(tmp_path_factory: pytest.TempPathFactory) -> Iterator[containerd.Containerd]:
    if reason := containerd.missing():
        pytest.skip(reason)
    with containerd.running(tmp_path_factory.mktemp("containerd")) as started:
        yield started


def running(nri: Path, *, namespaces: str = "default") -> service_process.Service:
    return service_process.Service(
        "muster_fuse.nri",
        {
            "MUSTER_FUSE_NRI__SOCKET": str(nri),
            "MUSTER_FUSE_NRI__NAMESPACES": f"[{namespaces}]",
        },
    )


@pytest.fixture
def plugin(runtime: containerd.Containerd) -> Iterator[Service]:
    with running(runtime.nri) as started:
        started.logged("nri_connected")
        yield started


def device_of(container: containerd.Container) -> str:
    """Return the numbers of the container's /dev/fuse if it can be opened, else the error."""
    code, text = container.execute("dd", "if=/dev/fuse", "count=0")
    if code:
        return text
    listed = container.execute("ls", "-l", "/dev/fuse")[1]
    assert listed.startswith("crw-rw-rw-")
    return DEVICE if DEVICE in listed else listed


ABSENT: Final = "dd: can't open '/dev/fuse': No such file or directory\n"


def test_an_annotated_container_can_open_the_device(
    runtime: containerd.Containerd, plugin: Service
) -> None:
    assert device_of(runtime.pod(ANNOTATED).start("main")) == DEVICE
    assert plugin.logged("device_granted")["container"] == "main"
    assert plugin.get("/readyz") == (200, "ok\n")
    assert plugin.metric("muster_fuse_nri_granted_total") == 1


@pytest.mark.usefixtures("plugin")
def test_a_container_without_the_annotation_cannot_even_make_the_device(
    runtime: containerd.Containerd,
) -> None:
    container = runtime.pod({}).start("main")
    assert device_of(container) == ABSENT
    assert container.execute("mknod", "/fuse", "c", "10", "229") == (0, "")
    assert container.execute("dd", "if=/fuse", "count=0") == (
        1,
        "dd: can't open '/fuse': Operation not permitted\n",
    )


@pytest.mark.usefixtures("plugin")
def test_the_annotation_for_one_container_gives_the_others_nothing(
    runtime: containerd.Containerd,
) -> None:
    pod = runtime.pod({"fuse.muster.dev/device.container.main": "true"})
    assert device_of(pod.start("main")) == DEVICE
    assert device_of(pod.start("sidecar")) == ABSENT


@pytest.mark.usefixtures("plugin")
def test_a_container_in_a_foreign_namespace_does_not_start_and_its_error_says_why(
    runtime: containerd.Containerd,
) -> None:
    pod = runtime.pod(ANNOTATED, namespace="foreign")
    with pytest.raises(grpc.RpcError) as refused:
        pod.start("main")
    assert refused.value.code() is grpc.StatusCode.PERMISSION_DENIED
    assert str(refused.value.details()).endswith(
        "desc = namespace foreign may not use /dev/fuse: it matches none of `namespaces` in the "
        "settings of muster-fuse-nri"
    )


def test_a_container_created_while_no_plugin_ran_is_reported_and_the_next_has_its_device(
    runtime: containerd.Containerd,
) -> None:
    pod = runtime.pod(ANNOTATED)
    assert device_of(pod.start("before")) == ABSENT
    with running(runtime.nri) as plugin:
        reported = plugin.logged("container_lacks_dev_fuse")
        assert (reported["namespace"], reported["container"]) == ("default", "before")
        assert plugin.metric("muster_fuse_nri_without_device_total") == 1
        assert device_of(pod.start("after")) == DEVICE


def test_a_runtime_that_enforces_required_plugins_starts_nothing_without_the_plugin(
    runtime: containerd.Containerd,
) -> None:
    required = {"required-plugins.noderesource.dev": '["muster-fuse"]'}
    pod = runtime.pod({**ANNOTATED, **required})
    with pytest.raises(grpc.RpcError) as refused:
        pod.start("before")
    assert "muster-fuse" in str(refused.value.details())
    with running(runtime.nri) as plugin:
        plugin.logged("nri_connected")
        assert device_of(pod.start("after")) == DEVICE


def test_after_a_restart_of_the_runtime_the_plugin_is_back_and_reports_no_given_device(
    runtime: containerd.Containerd, plugin: Service
) -> None:
    pod = runtime.pod(ANNOTATED)
    before = pod.start("before")
    count = plugin.metric("muster_fuse_nri_without_device_total")
    runtime.restart()
    plugin.logged("nri_disconnected")
    plugin.logged("nri_connected")
    assert plugin.metric("muster_fuse_nri_without_device_total") == count
    assert device_of(before) == DEVICE
    assert device_of(pod.start("after")) == DEVICE


def test_a_plugin_that_hangs_loses_its_connection_and_returns_when_it_goes_on(
    runtime: containerd.Containerd, plugin: Service
) -> None:
    pod = runtime.pod(ANNOTATED)
    plugin.process.send_signal(signal.SIGSTOP)
    hung = pod.start("hung")
    plugin.process.send_signal(signal.SIGCONT)
    plugin.logged("nri_disconnected")
    assert plugin.logged("container_lacks_dev_fuse")["container"] == "hung"
    assert device_of(hung) == ABSENT
    assert device_of(pod.start("after")) == DEVICE


def test_the_plugin_waits_for_a_socket_and_survives_a_runtime_that_sends_nonsense(
    tmp_path: Path,
) -> None:
    path = tmp_path / "nri.sock"
    with running(path) as plugin:
        plugin.logged("nri_disconnected")
        problem = f"{path}: No such file or directory\n"
        assert plugin.get("/readyz") == (503, problem)
        assert plugin.get("/healthz") == (200, "ok\n")
        with socket.socket(socket.AF_UNIX) as listening:
            listening.bind(str(path))
            listening.listen()
            listening.settimeout(service_process.WAIT_S)
            for nonsense in (b"\xff" * 64, nri_runtime.registered(code=3, text="no"), b""):
                connection, _ = listening.accept()
                with connection:
                    connection.sendall(nonsense)
                    if nonsense:
                        plugin.logged("nri_disconnected")
            connection, _ = listening.accept()
            with connection:
                synchronize = nri_pb2.SynchronizeRequest()
                connection.sendall(nri_runtime.registered())
                connection.sendall(nri_runtime.request("Synchronize", synchronize))
                plugin.logged("nri_connected")
                assert plugin.get("/readyz") == (200, "ok\n")


def test_the_check_of_the_device_ends_with_1_and_the_cause_where_there_is_none() -> None:
    if reason := containerd.missing():
        pytest.skip(reason)
    checked = f"{sys.executable} -m {device_check.__name__}"
    hidden = subprocess.run(
        ["/usr/bin/unshare", "--mount", "sh", "-c", f"mount -t tmpfs tmpfs /dev && exec {checked}"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (hidden.returncode, hidden.stdout) == (1, "")
    assert hidden.stderr == (
        "muster: /dev/fuse: No such file or directory: the runtime gave this container no device; "
        "check that muster-fuse-nri is ready on this node, and that the pod has the annotation "
        'fuse.muster.dev/device: "true"\n'
    )
    assert subprocess.run(checked.split(), check=False).returncode == 0
