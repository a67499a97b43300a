"""A real cluster with muster in it, faults in the cluster, and muster's reactions to them.

muster is installed from an overlay, by default `minimal`, with a webhook of the tests as its
receiver. The faults act on the node's processes, so they need the cluster that scripts/cluster
starts on this machine.
"""

import contextlib
import functools
import http.server
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

import pytest
import yaml

from scripts.cluster import layout, node
from tests.worlds import manifests, real_cluster
from tests.worlds.real_cluster import until

SERVICES: Final = ("health", "labeler", "notifier")
_KILLS_MAX: Final = 3
_HEARD: Final = frozenset({"recovering", "healthy"})
_PLUGIN: Final = b"/etc/muster/plugin.yaml"
_NOTIFIER: Final = """
group_wait_s: 0
group_interval_s: 1
resolve_wait_s: 0
watchdog: {{patience_s: 20}}
receivers:
  - name: hook
    webhook: {{url: "{url}", reach: private}}
    limits: {{rate_per_s: 20, burst: 100}}
"""
_KUSTOMIZATION: Final = """
apiVersion: kustomize.config.k8s.io/v1beta1
kind: Kustomization
resources: [muster/k8s/overlays/{overlay}]
components: [{components}]
images: [{{name: muster, newName: {image}, newTag: {tag}}}]
configMapGenerator:
  - {{name: muster-notifier-settings, namespace: muster, behavior: merge, files: [notifier.yaml]}}
  - {{name: muster-health-settings, namespace: muster, behavior: merge, files: [health.yaml]}}
"""
_START_API: Final = """
from scripts.cluster import components, layout, node
node.spawn(components.apiserver(), [layout.STATE / "bin"])
"""
_SECRETS: Final = """
kubectl apply -f muster/k8s/base/namespace.yaml
for user in health labeler notifier reader console admin gate; do
  printf "p%s" "$(openssl rand -hex 24)" |
    kubectl -n muster create secret generic muster-nats-$user --from-file=password=/dev/stdin
done
kubectl apply -k .
for each in daemonset/muster-plugin statefulset/muster-nats deployment/muster-health \
  deployment/muster-labeler deployment/muster-notifier; do
  kubectl -n muster rollout status $each --timeout=120s
done
"""


@dataclass(frozen=True, slots=True)
class Notified:
    """One alert in a notification that the webhook received."""

    at: float
    alert: dict[str, Any]


@dataclass
class Webhook:
    """A receiver that keeps the alerts sent to it; `url` is its address for the cluster's pods."""

    url: str = ""
    taken: list[Notified] = field(default_factory=list)

    @contextlib.contextmanager
    def serving(self, host: str) -> Iterator["Webhook"]:
        """Serve on an address that the pods reach."""
        taken = self.taken

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                now = time.monotonic()
                taken.extend(Notified(now, each) for each in body["data"]["alerts"])
                self.send_response(200)
                self.end_headers()

            def log_message(self, *_: object) -> None:
                pass

        with http.server.ThreadingHTTPServer((host, 0), Handler) as server:
            threading.Thread(target=server.serve_forever, daemon=True).start()
            self.url = f"http://{host}:{server.server_address[1]}/"
            yield self
            server.shutdown()


@dataclass
class Muster:
    """muster in a cluster; all times are seconds."""

    cluster: real_cluster.Cluster
    webhook: Webhook
    health: tuple[str, ...] = ()
    """The addresses of health's pods."""
    name: str = ""
    """The name of the plugin; empty if there is only one."""

    @classmethod
    def of(cls, cluster: real_cluster.Cluster) -> "Muster":
        """Return the muster that already runs in a cluster, without a webhook."""
        muster = cls(cluster, Webhook())
        muster.find_health()
        return muster

    def about(self, plugin: str) -> "Muster":
        """Return a copy for one of several plugins."""
        return replace(self, name=plugin)

    def find_health(self) -> None:
        """Read the addresses of health's pods from the Kubernetes API."""
        pods = self.cluster.get(
            "pods", "", "-n", "muster", "-l", "app.kubernetes.io/name=muster-health"
        )
        self.health = tuple(pod["status"]["podIP"] for pod in pods["items"])

    def states(self) -> list[dict[str, Any]]:
        """Return the state that each replica of health shows, the leader's first."""
        states = []
        for address in self.health:
            url = f"http://{address}:8080/state"
            with (
                contextlib.suppress(OSError, ValueError),
                urllib.request.urlopen(url, timeout=2.0) as answer,
            ):
                states.append(json.load(answer))
        return sorted(states, key=lambda state: state["service"]["leads"] is None)

    def plugin(self) -> dict[str, Any]:
        """Return what health's leader shows of the plugin; empty if there is no leader."""
        states = self.states()
        if not states or states[0]["service"]["leads"] is None:
            return {}
        shown: list[dict[str, Any]] = states[0]["plugins"]
        return next((each for each in shown if self.name in {"", each["plugin"]}), {})

    def unread(self) -> set[str]:
        """Return what the replicas of health show as unreadable in Kubernetes."""
        return {what for state in self.states() for what in state["service"]["cluster"]}

    def until_unread(self, what: Collection[str], *, within_s: float) -> None:
        """Wait until health shows these as unreadable; if `what` is empty, nothing at all."""
        last: set[str] = set()

        def is_so() -> bool:
            last.clear()
            last.update(self.unread())
            return last >= set(what) if what else not last

        try:
            until(is_so, f"health cannot read {sorted(what)}", within_s=within_s)
        except AssertionError as error:
            raise AssertionError(f"{error}; it cannot read {sorted(last)}") from None

    def until_plugin(
        self, holds: Callable[[dict[str, Any]], bool], what: str, *, within_s: float
    ) -> dict[str, Any]:
        """Wait until `holds` accepts what health's leader shows of the plugin; return that."""
        last: dict[str, Any] = {}

        def shown() -> dict[str, Any]:
            last.update(self.plugin())
            return last if last and holds(last) else {}

        try:
            return until(shown, what, within_s=within_s)
        except AssertionError as error:
            names = ("state", "verdict", "rule", "flapping", "evidence")
            raise AssertionError(f"{error}; it is {[last.get(name) for name in names]}") from None

    def until_verdict(self, verdict: str, *, within_s: float) -> dict[str, Any]:
        """Wait for a verdict; return what health shows of the plugin then."""
        return self.until_plugin(
            lambda shown: bool(shown["verdict"] == verdict), verdict, within_s=within_s
        )

    def until_healthy(self, *, within_s: float = 100.0) -> None:
        """Wait until the plugin's state is healthy and it has no alerts."""
        self.until_plugin(
            lambda shown: shown["state"] == "healthy" and not shown["alerts"],
            "the plugin is healthy",
            within_s=within_s,
        )

    def until_notified(self, kind: str, state: str, *, since: float, within_s: float) -> Notified:
        """Wait until the webhook has received an alert after this time; return it."""

        def notified() -> Notified | None:
            for each in self.webhook.taken:
                is_it = (each.alert["kind"], each.alert["state"]) == (kind, state)
                is_about = self.name in {"", each.alert["plugin"]}
                if is_it and is_about and each.at >= since:
                    return each
            return None

        message = until(notified, f"the webhook has {kind} {state}", within_s=within_s)
        assert message is not None
        return message


def plugin_pid() -> int:
    """Return this machine's process id of the cluster's plugin; 0 if none runs."""
    for folder in Path("/proc").iterdir():
        with contextlib.suppress(OSError, ValueError):
            words = (folder / "cmdline").read_bytes().split(b"\0")
            is_plugin = _PLUGIN in words and words[0].endswith((b"python", b"python3"))
            if is_plugin and f"/{layout.CGROUP}/" in (folder / "cgroup").read_text():
                return int(folder.name)
    return 0


def end_plugin() -> None:
    """Kill the plugin's process if one runs."""
    with contextlib.suppress(ProcessLookupError):
        if pid := plugin_pid():
            os.kill(pid, signal.SIGKILL)


def kill_plugin(number: signal.Signals = signal.SIGKILL) -> int:
    """Send the plugin's process a signal; return its process id."""
    pid = until(plugin_pid, "a plugin's process runs", within_s=60.0)
    os.kill(pid, number)
    return pid


def sockets() -> set[tuple[Path, int]]:
    """Return the plugin's sockets in the kubelet's directory, each with its inode."""
    folders = [layout.KUBELET / name for name in ("device-plugins", "plugins_registry")]
    files = [file for folder in folders if folder.exists() for file in folder.iterdir()]
    return {(file, file.stat().st_ino) for file in files
            if file.is_socket() and file.name != "kubelet.sock"}  # fmt: skip


def remove_sockets() -> set[tuple[Path, int]]:
    """Remove the plugin's sockets; return them."""
    removed = sockets()
    for file, _ in removed:
        file.unlink()
    return removed


@contextlib.contextmanager
def without_kubelet() -> Iterator[None]:
    """Stop the kubelet until the block ends."""
    kubelet("stop")
    try:
        yield
    finally:
        kubelet("start")


@contextlib.contextmanager
def without_api(cluster: real_cluster.Cluster) -> Iterator[None]:
    """Kill the API server; when the block ends, start it and wait until it is ready."""
    node.end("kube-apiserver", signal.SIGKILL)
    try:
        yield
    finally:
        # started by another process, because the API server outlives this one
        subprocess.run([sys.executable, "-c", _START_API], check=True)
        until(lambda: cluster.ask("get", "--raw", "/readyz")[1] == "ok", "the API is ready")


@contextlib.contextmanager
def with_hung_api() -> Iterator[None]:
    """Suspend the API server's process until the block ends."""
    (pid,) = node.processes("kube-apiserver")
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


@contextlib.contextmanager
def without_nats(cluster: real_cluster.Cluster) -> Iterator[None]:
    """Scale NATS down to zero; when the block ends, scale it up and wait until it is ready."""
    scale = ("-n", "muster", "scale", "statefulset/muster-nats")
    cluster.good(*scale, "--replicas=0")
    # the controller may be slow, as in the half minute after the API hung
    pods = ("pod", "-l", "app.kubernetes.io/name=muster-nats")
    cluster.good("-n", "muster", "wait", "--for=delete", *pods, "--timeout=120s")
    try:
        yield
    finally:
        cluster.good(*scale, "--replicas=1")
        cluster.good("-n", "muster", "rollout", "status", "statefulset/muster-nats")


def kubelet(action: str) -> None:
    """Start, stop, kill or restart the kubelet."""
    subprocess.run([sys.executable, "-m", "scripts.cluster", "kubelet", action], check=True)


def crash_plugin(muster: Muster) -> float:
    """Kill the plugin's process until its state is `lost`; return the time of the last kill.

    After the first kill the kubelet restarts the container at once, and the plugin may be back in
    time (`detection.restart_s`, 2 s).
    """
    for _ in range(_KILLS_MAX):
        killed_at = time.monotonic()
        killed = kill_plugin()
        after = until(functools.partial(_after_kill, muster, killed), "it is down, or back")
        if after == "lost":
            return killed_at
    raise AssertionError(f"never down after {_KILLS_MAX} kills")


def _after_kill(muster: Muster, killed: int) -> str:
    """Return the plugin's state once it is lost, or health knows a new process; else empty."""
    is_back = plugin_pid() not in {0, killed}
    state = str(muster.plugin().get("state", ""))
    return state if state == "lost" or (is_back and state in _HEARD) else ""


def installed(
    cluster: real_cluster.Cluster,
    folder: Path,
    detection: Mapping[str, float] | None = None,
    *,
    overlay: str = "minimal",
    components: Sequence[str] = (),
    reads: Mapping[str, Any] | None = None,
) -> Iterator[Muster]:
    """Install muster, yield it once it is ready and its plugin healthy, and remove it.

    `detection` replaces health's settings of that name; `reads` extends its settings `cluster`.
    """
    if node.first() is None:
        pytest.skip("faults need the node's processes: make cluster starts such a cluster")
    with Webhook().serving(_our_address(cluster)) as webhook:
        (folder / "muster").symlink_to(manifests.ROOT)
        image, _, tag = real_cluster.MUSTER.partition(":")
        named = ", ".join(f"muster/k8s/components/{name}" for name in components)
        (folder / "kustomization.yaml").write_text(
            _KUSTOMIZATION.format(image=image, tag=tag, overlay=overlay, components=named)
        )
        (folder / "notifier.yaml").write_text(_NOTIFIER.format(url=webhook.url))
        base = manifests.ROOT / "k8s" / "base" / "settings" / "health.yaml"
        settings = yaml.safe_load(base.read_text())
        settings["detection"] = dict(detection or {})
        settings["cluster"] |= reads or {}
        (folder / "health.yaml").write_text(yaml.safe_dump(settings))
        muster = Muster(cluster, webhook)
        try:
            cluster.shell(_SECRETS, folder)
            muster.find_health()
            muster.until_healthy()
            yield muster
        finally:
            cluster.rest()


def _our_address(cluster: real_cluster.Cluster) -> str:
    """Return the address by which the cluster reaches this machine."""
    view = json.loads(cluster.good("config", "view", "--minify", "-o", "json"))
    api = urlsplit(view["clusters"][0]["cluster"]["server"])
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((api.hostname, api.port))
        return str(probe.getsockname()[0])
