"""Adapter for the command line: runs a Kubernetes cluster of one node on this machine.

python -m scripts.cluster up                 start it, unless it already runs; see --help
python -m scripts.cluster kubelet restart    start, stop, kill or restart its kubelet
python -m scripts.cluster down               remove everything except the cache
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final, Literal

import cyclopts

from scripts.cluster import certificates, components, images, layout, node, peers, tools

READY_S: Final = 120.0
VOLUMES: Final = 6
"""The number of volumes of the default StorageClass: enough for three NATS servers, twice."""

app = cyclopts.App(name="python -m scripts.cluster", help=__doc__.splitlines()[0])


@app.command
def up(*, version: Literal["1.37", "1.34"] = "1.37") -> None:
    """Start a cluster of one node; first build programs and images that are not in the cache."""
    began = time.monotonic()

    def say(text: str) -> None:
        print(f"[{time.monotonic() - began:4.0f} s] {text}", flush=True)

    check()
    if _running() == version:
        say(f"Kubernetes {version} is already running")
        _import(images.build(say), say)
        return
    node.destroy()
    tools.install_packages(say)
    folders = tools.build(version, say)
    archives = images.build(say)
    started = time.monotonic()
    try:
        _start(version, folders, archives, say)
    except layout.Refused:
        print(f"logs: {layout.LOGS}", file=sys.stderr)
        raise
    say(f"Kubernetes {tools.version_of(version)} is ready, "
        f"{time.monotonic() - started:.0f} s after its start")  # fmt: skip
    print(f"\n  export KUBECONFIG={layout.KUBECONFIG}")
    print(f"  {layout.STATE}/bin/kubectl get nodes")
    print(f"  images for pods: {images.MUSTER} {images.BUSYBOX} {images.nats_name()}")


@app.command
def check() -> None:
    """Print what this machine lacks for a cluster; fail if anything is missing."""
    if problem := node.missing() or tools.missing():
        raise layout.Refused(problem)


@app.command
def down() -> None:
    """Stop the cluster and remove everything except the cache."""
    node.destroy()


@app.command
def kubelet(
    action: Literal["start", "stop", "kill", "restart"],
    *,
    status_period: str = components.STATUS_PERIOD,
) -> None:
    """Start, stop, kill or restart the kubelet alone."""
    _first()
    if action != "start":
        node.end("kubelet", signal.SIGKILL if action == "kill" else signal.SIGTERM)
    if action in {"start", "restart"} and not node.processes("kubelet"):
        _spawn(components.kubelet(status_period=status_period))


@app.command(name="peers")
def import_peers() -> None:
    """Build the images of third-party device plugins, and import them into the cluster."""
    _first()
    began = time.monotonic()

    def say(text: str) -> None:
        print(f"[{time.monotonic() - began:4.0f} s] {text}", flush=True)

    _import(peers.build(say), say)


@app.command(name="tools")
def build_tools(*names: Literal["helm", "karpenter", "kwok"]) -> None:
    """Build other programs that tests need, unless they are in the cache."""
    began = time.monotonic()
    for name in names:
        tools.built(name, lambda text: print(f"[{time.monotonic() - began:4.0f} s] {text}"))


@app.command(name="previous")
def import_previous() -> None:
    """Build muster's image of the previous version, and import it into the cluster."""
    _first()
    began = time.monotonic()

    def say(text: str) -> None:
        print(f"[{time.monotonic() - began:4.0f} s] {text}", flush=True)

    _import([images.previous(say)], say)


@app.command
def env() -> None:
    """Print the environment variables with which tests use the cluster."""
    _first()
    variables = {
        "KUBECONFIG": layout.KUBECONFIG,
        "MUSTER_KUBELET_DIR": layout.KUBELET,
        "MUSTER_KUBELET_NODE": layout.NODE,
        "MUSTER_KUBELET_RESTART": f"{sys.executable} -m scripts.cluster kubelet restart",
    }
    for name, value in variables.items():
        print(f"export {name}='{value}'")


@app.command
def run(*command: str) -> None:
    """Run a command inside the node's namespaces."""
    pid = _first()
    os.environ["PATH"] = f"{layout.STATE}/bin:{os.environ['PATH']}"
    os.execvp("nsenter", [*node.entering(pid), *command])


def _first() -> int:
    pid = node.first()
    if pid is None:
        raise layout.Refused("no cluster runs: make cluster")
    return pid


def _running() -> str | None:
    """Return the version of the running cluster; None if none is running."""
    if node.first() is None:
        return None
    try:
        return (layout.STATE / "version").read_text()
    except OSError:
        return None


def _start(
    version: str, folders: Sequence[Path], archives: Sequence[Path], say: Callable[[str], None]
) -> None:
    node.create()
    certificates.make()
    _link_programs(folders)
    _spawn(components.etcd())
    _spawn(components.apiserver())
    _spawn(components.containerd())
    with ThreadPoolExecutor(1) as pool:
        imported = pool.submit(_import, archives, say)
        _until("kube-apiserver", lambda: _kubectl("get", "--raw", "/readyz") == "ok")
        say("kube-apiserver is ready")
        _spawn(components.controller_manager())
        # it exits if its cache is inconsistent, as after a hanging API server (1.37.2)
        _spawn(components.scheduler(), restarts=True)
        # it exits when its node is deleted (pkg/proxy/node.go, OnNodeDelete)
        _spawn(components.proxy(), restarts=True)
        _spawn(components.dns())
        imported.result()
    _spawn(components.kubelet())
    # kubectl's first apply needs it, and fails permanently without it
    _until("kube-apiserver", lambda: _kubectl("get", "--raw", "/openapi/v2")[:1] == "{")
    _apply(*_storage())
    _until("kubelet", _node_is_ready)
    _until("kube-controller-manager", lambda: bool(_kubectl("get", "serviceaccount", "default")))
    (layout.STATE / "version").write_text(version)


def _link_programs(folders: Sequence[Path]) -> None:
    for name in ("bin", "cni"):
        (layout.STATE / name).mkdir(exist_ok=True)
    for folder in folders:
        target = layout.STATE / ("cni" if folder.name.startswith("cni-") else "bin")
        for program in folder.iterdir():
            (target / program.name).symlink_to(program)


def _spawn(command: Sequence[str], *, restarts: bool = False) -> None:
    node.spawn(command, [layout.STATE / "bin"], restarts=restarts)


def _import(archives: Sequence[Path], say: Callable[[str], None]) -> None:
    """Import into containerd the images that are missing or outdated there."""
    ctr = [f"{layout.STATE}/bin/ctr", "--address", str(layout.CONTAINERD), "--namespace", "k8s.io"]
    _until("containerd", lambda: _succeeds(*ctr, "version"))
    pid = _first()
    for archive in archives:
        mark = layout.STATE / "imported" / archive.name
        if mark.exists():
            continue
        # the layers must be unpacked in the node, with its mounts
        command = [*node.entering(pid), *ctr, "images", "import", str(archive)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise layout.Refused(f"import of {archive}: {done.stderr.strip()[-500:]}")
        mark.parent.mkdir(exist_ok=True)
        mark.touch()
        say(f"imported the image {archive.stem}")


def _succeeds(*command: str) -> bool:
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


def _kubectl(*arguments: str, text: str | None = None) -> str:
    """Return the output of kubectl; empty if it fails."""
    command = [f"{layout.STATE}/bin/kubectl", "--kubeconfig", str(layout.KUBECONFIG), *arguments]
    return subprocess.run(command, input=text, capture_output=True, text=True, check=False).stdout


def _apply(*objects: dict[str, Any]) -> None:
    manifest = json.dumps({"apiVersion": "v1", "kind": "List", "items": objects})
    if not _kubectl("apply", "-f", "-", text=manifest):
        raise layout.Refused("kubectl apply failed")


def _storage() -> list[dict[str, Any]]:
    """Return the default StorageClass, and volumes for it in directories of the node."""
    name = "standard"
    objects: list[dict[str, Any]] = [
        {
            "apiVersion": "storage.k8s.io/v1",
            "kind": "StorageClass",
            "metadata": {
                "name": name,
                "annotations": {"storageclass.kubernetes.io/is-default-class": "true"},
            },
            "provisioner": "kubernetes.io/no-provisioner",
            "volumeBindingMode": "WaitForFirstConsumer",
        }
    ]
    for number in range(VOLUMES):
        folder = layout.STATE / f"volumes/{number}"
        folder.mkdir(parents=True, exist_ok=True)
        folder.chmod(0o777)
        objects.append(
            {
                "apiVersion": "v1",
                "kind": "PersistentVolume",
                "metadata": {"name": f"volume-{number}"},
                "spec": {
                    "capacity": {"storage": "20Gi"},
                    "accessModes": ["ReadWriteOnce"],
                    "persistentVolumeReclaimPolicy": "Retain",
                    "storageClassName": name,
                    "hostPath": {"path": str(folder)},
                },
            }
        )
    return objects


def _node_is_ready() -> bool:
    path = "{.status.conditions[?(@.type=='Ready')].status}"
    return _kubectl("get", "node", layout.NODE, "-o", f"jsonpath={path}") == "True"


def _until(component: str, holds: Callable[[], bool]) -> None:
    until = time.monotonic() + READY_S
    while not holds():
        if not node.processes(component):
            time.sleep(0.5)
            if not node.processes(component):
                raise layout.Refused(f"{component} has ended: {_log_end(component)}")
        if time.monotonic() > until:
            raise layout.Refused(
                f"{component} is not ready after {READY_S:g} s: {_log_end(component)}"
            )
        time.sleep(0.1)


def _log_end(component: str) -> str:
    log = layout.LOGS / f"{component}.log"
    return log.read_text(errors="replace").strip()[-600:] if log.exists() else "it has no log"


def main() -> int:
    """Run a command; print a refusal in one line, with exit code 1."""
    try:
        app()
    except layout.Refused as refused:
        print(f"cluster: {refused}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
