"""A real cluster with muster in it, its faults, and what muster makes of them.

muster is an overlay, as a rule `minimal`, with a webhook of ours as its receiver. The faults need
the node's processes: they are for the cluster that scripts/cluster starts on this machine.
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
    """One alert in a message that the webhook took."""

    at: float
    alert: dict[str, Any]


@dataclass
class Webhook:
    """Keeps what it takes; `url` is for the pods of the cluster."""

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
    """Which plugin is meant; empty if there is only one."""

    @classmethod
    def of(cls, cluster: real_cluster.Cluster) -> "Muster":
        """Return muster as it runs now, without a webhook."""
        muster = cls(cluster, Webhook())
        muster.find_health()
        return muster

    def about(self, plugin: str) -> "Muster":
        """Return the same for one of several plugins."""
        return replace(self, name=plugin)

    def find_health(self) -> None:
        """Learn where health's pods are; the API must answer."""
        pods = self.cluster.get(
            "pods", "", "-n", "muster", "-l", "app.kubernetes.io/name=muster-health"
        )
        self.health = tuple(pod["status"]["podIP"] for pod in pods["items"])

    def states(self) -> list[dict[str, Any]]:
        """Return what each health shows, the leader first."""
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
        """Return what the leading health shows of the plugin; empty if none leads."""
        states = self.states()
        if not states or states[0]["service"]["leads"] is None:
            return {}
        shown: list[dict[str, Any]] = states[0]["plugins"]
        return next((each for each in shown if self.name in {"", each["plugin"]}), {})

    def unread(self) -> set[str]:
        """Return what any health says that it cannot read in Kubernetes."""
        return {what for state in self.states() for what in state["service"]["cluster"]}

    def until_unread(self, what: Collection[str], *, within_s: float) -> None:
        """Wait until health says that it cannot read these; nothing: that it can read all."""
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
        """Wait until what the leading health shows of the plugin is so; return that."""
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
        """Wait until the plugin is healthy, in every respect, and nothing fires."""
        self.until_plugin(
            lambda shown: shown["state"] == "healthy" and not shown["alerts"],
            "the plugin is healthy",
            within_s=within_s,
        )

    def until_notified(self, kind: str, state: str, *, since: float, within_s: float) -> Notified:
        """Wait until the webhook was notified of an alert after this time; return that."""

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
    """Return the process of the cluster's plugin, as this machine counts; 0 if none runs."""
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
    """Send the plugin's process a signal; return which process."""
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
    """Remove the plugin's sockets; return which."""
    removed = sockets()
    for file, _ in removed:
        file.unlink()
    return removed


@contextlib.contextmanager
def without_kubelet() -> Iterator[None]:
    """Stop the kubelet for a while."""
    kubelet("stop")
    try:
        yield
    finally:
        kubelet("start")


@contextlib.contextmanager
def without_api(cluster: real_cluster.Cluster) -> Iterator[None]:
    """Kill the API server for a while; after it, the API is ready again."""
    node.end("kube-apiserver", signal.SIGKILL)
    try:
        yield
    finally:
        # in a process of its own: it outlives us
        subprocess.run([sys.executable, "-c", _START_API], check=True)
        until(lambda: cluster.ask("get", "--raw", "/readyz")[1] == "ok", "the API is ready")


@contextlib.contextmanager
def with_hung_api() -> Iterator[None]:
    """Stop the API server's process for a while."""
    (pid,) = node.processes("kube-apiserver")
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


@contextlib.contextmanager
def without_nats(cluster: real_cluster.Cluster) -> Iterator[None]:
    """Take NATS away for a while; after it, NATS is ready again."""
    scale = ("-n", "muster", "scale", "statefulset/muster-nats")
    cluster.good(*scale, "--replicas=0")
    # its controller may be slow: after an API that hung it is for half a minute
    pods = ("pod", "-l", "app.kubernetes.io/name=muster-nats")
    cluster.good("-n", "muster", "wait", "--for=delete", *pods, "--timeout=120s")
    try:
        yield
    finally:
        cluster.good(*scale, "--replicas=1")
        cluster.good("-n", "muster", "rollout", "status", "statefulset/muster-nats")


def kubelet(action: str) -> None:
    """Do to the kubelet what happens to kubelets: start, stop, kill, restart."""
    subprocess.run([sys.executable, "-m", "scripts.cluster", "kubelet", action], check=True)


def crash_plugin(muster: Muster) -> float:
    """Kill the plugin's process until its verdict is PLUGIN_DOWN; return when that was done last.

    The first time the kubelet starts a container again at once, and the plugin may be back within
    the 2 s that it has for that (`detection.restart_s`).
    """
    for _ in range(_KILLS_MAX):
        killed_at = time.monotonic()
        killed = kill_plugin()
        after = until(functools.partial(_after_kill, muster, killed), "it is down, or back")
        if after == "lost":
            return killed_at
    raise AssertionError(f"never down after {_KILLS_MAX} kills")


def _after_kill(muster: Muster, killed: int) -> str:
    """Return the plugin's state once it is down or another process is heard; until then empty."""
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
    """Install muster, wait until all of it is well, and remove it.

    `detection` are health's limits, and `reads` what it reads of the cluster besides its plugins.
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
