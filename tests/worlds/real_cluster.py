"""A real cluster for tests only: that of KUBECONFIG, which `make cluster` starts.

It is used only with `pytest -m cluster`, because a KUBECONFIG that happens to be set may lead to a
cluster in production.
"""

import contextlib
import itertools
import json
import os
import re
import shutil
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, TypeVar

import pytest
import yaml

from scripts.cluster import layout
from tests.worlds import manifests

MUSTER: Final = "localhost/muster:test"
"""muster's image, as scripts/cluster builds and imports it."""
BUSYBOX: Final = "localhost/busybox:1"
NAMESPACE: Final = "muster"
PART: Final = "app.kubernetes.io/part-of=muster"
_PASSING: Final = {
    *("events", "events.events.k8s.io", "leases.coordination.k8s.io", "componentstatuses"),
    *("endpoints", "endpointslices.discovery.k8s.io", "nodes", "persistentvolumes"),
}
"""Kinds whose objects change by themselves; nodes are compared by some of their fields."""

_ENDED: Final = {"Succeeded", "Failed"}
_DEFAULT_CLASS: Final = "storageclass.kubernetes.io/is-default-class"

T = TypeVar("T")


@dataclass
class Offered:
    """The allocatable amounts of a resource on a node, with the monotonic time of each status."""

    seen: list[tuple[float, str]] = field(default_factory=list)

    @property
    def amounts(self) -> set[str]:
        """Return every amount that was allocatable, as Kubernetes writes it."""
        return {amount for _, amount in self.seen}

    def away_s(self, since: float = 0.0) -> float:
        """Return for how many seconds since `since` none was allocatable."""
        return self.fewer_s(1, since)

    def fewer_s(self, than: int, since: float = 0.0) -> float:
        """Return for how many seconds since `since` fewer than `than` were allocatable."""
        before = [(since, amount) for at, amount in self.seen if at < since][-1:]
        after = [each for each in self.seen if each[0] >= since]
        seen = [*before, *after, (time.monotonic(), "")]
        pairs = itertools.pairwise(seen)
        return sum(later - at for (at, amount), (later, _) in pairs if int(amount or 0) < than)


class Cluster:
    """A cluster that is accessed with kubectl."""

    def __init__(self, kubeconfig: str) -> None:
        self.kubeconfig = kubeconfig
        path = os.pathsep.join((str(Path(kubeconfig).parent / "bin"), os.environ.get("PATH", "")))
        self.kubectl = shutil.which("kubectl", path=path) or "kubectl"
        self.command = (self.kubectl, "--kubeconfig", kubeconfig)
        self.environment = {
            **os.environ,
            "KUBECONFIG": kubeconfig,
            "PATH": f"{Path(sys.executable).parent}:{path}",
        }

    def ask(self, *words: str, given: object = None) -> tuple[int, str]:
        """Run kubectl; return its exit code, and its stdout or, if that is empty, its stderr."""
        text = given if isinstance(given, str) else json.dumps(given)
        done = subprocess.run(
            [*self.command, *words],
            input=text if given is not None else None,
            capture_output=True,
            text=True,
            check=False,
        )
        return done.returncode, done.stdout or done.stderr

    def good(self, *words: str, given: object = None) -> str:
        """Run kubectl, which must succeed; return what it printed."""
        code, output = self.ask(*words, given=given)
        assert code == 0, f"kubectl {' '.join(words)}: {output}"
        return output

    def get(self, kind: str, name: str = "", *more: str) -> dict[str, Any]:
        """Return an object, or the list of a kind; empty if it does not exist."""
        code, output = self.ask("get", kind, *([name] if name else []), *more, "-o", "json")
        if code and "NotFound" in output:
            return {}
        assert code == 0, output
        answer: dict[str, Any] = json.loads(output)
        return answer

    def muster(self, *words: str, expect: int = 0) -> str:
        """Run a command of muster against the cluster; return stdout or, if empty, stderr."""
        done = subprocess.run(
            [str(Path(sys.executable).with_name("muster")), *words],
            capture_output=True, text=True, check=False, env=self.environment,
        )  # fmt: skip
        assert done.returncode == expect, f"muster {' '.join(words)}: {done.stdout}{done.stderr}"
        return done.stdout or done.stderr

    def shell(self, script: str, folder: Path, *, expect: int = 0) -> str:
        """Run a Bash script with this kubeconfig; return everything that it printed."""
        done = subprocess.run(
            [shutil.which("bash") or "bash", "-euo", "pipefail", "-c", script],
            cwd=folder, env=self.environment, text=True, check=False,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        assert done.returncode == expect, f"{script}\n{done.stdout}"
        return done.stdout

    def install(self, folder: Path, settings: Mapping[str, object] = MappingProxyType({})) -> str:
        """Install the minimal overlay as in docs/install.md; return the last step's output.

        `settings`, by name of the service, replace those of the overlay.
        """
        self.prepare(folder, settings=settings)
        self.shell(passwords(), folder)
        return self.shell(block("install.md", "kubectl apply -k my-muster"), folder)

    def install_production(self, folder: Path) -> str:
        """Install the overlay `production` as in docs/install.md, with keys in `muster-keys`."""
        soft = yaml.safe_load(block("install.md", "podAntiAffinity"))
        self.prepare(folder, overlay="production", more=soft)
        self.shell(namespace_step(), folder)
        printed = self.shell(block("install.md", "muster auth init"), folder)
        self.shell(printed_commands(printed), folder)
        return self.shell(block("install.md", "apply -k my-muster"), folder)

    def prepare(
        self,
        folder: Path,
        *,
        overlay: str = "minimal",
        settings: Mapping[str, object] = MappingProxyType({}),
        more: Mapping[str, object] = MappingProxyType({}),
    ) -> None:
        """Create `my-muster` as in docs/install.md, with `more` in its kustomization.yaml."""
        (folder / "muster").symlink_to(manifests.ROOT)
        script = block("install.md", "mkdir my-muster")
        assert "k8s/overlays/minimal]" in script
        self.shell(script.replace("overlays/minimal]", f"overlays/{overlay}]"), folder)
        generators = [
            {"name": f"muster-{name}-settings", "namespace": NAMESPACE, "behavior": "merge",
             "files": [f"{name}.yaml"]}
            for name in settings
        ]  # fmt: skip
        for name, tree in settings.items():
            (folder / f"my-muster/{name}.yaml").write_text(yaml.safe_dump(tree))
        if added := {**({"configMapGenerator": generators} if generators else {}), **more}:
            with (folder / "my-muster/kustomization.yaml").open("a") as file:
                yaml.safe_dump(added, file)

    @property
    def node(self) -> str:
        """Return the name of the first node."""
        return str(self.get("nodes")["items"][0]["metadata"]["name"])

    def allocatable(self, resource: str) -> str:
        """Return the first node's allocatable amount of a resource; empty if it lists none."""
        node = self.get("nodes")["items"][0]
        return str(node["status"]["allocatable"].get(resource, ""))

    def posted(self) -> str:
        """Return when the kubelet last posted the first node's status."""
        conditions = self.get("nodes")["items"][0]["status"]["conditions"]
        return str(
            next(each["lastHeartbeatTime"] for each in conditions if each["type"] == "Ready")
        )

    def snapshot(self) -> dict[str, Any]:
        """Return what an uninstall has to restore: names of all objects, and fields of nodes."""
        kinds = self.good("api-resources", "--verbs=list", "-o", "name").split()
        listed = ",".join(sorted(set(kinds) - _PASSING))
        names = self.good("get", listed, "--all-namespaces", "-o", "name", "--ignore-not-found")
        nodes = {
            node["metadata"]["name"]: {
                "labels": node["metadata"].get("labels", {}),
                "annotations": node["metadata"].get("annotations", {}),
                "taints": node["spec"].get("taints", []),
                "conditions": sorted(
                    (item["type"], item["status"]) for item in node["status"]["conditions"]
                ),
            }
            for node in self.get("nodes")["items"]
        }
        return {"objects": sorted(names.split()), "nodes": nodes}

    def pods(self, name: str) -> list[dict[str, Any]]:
        """Return the pods of a part of muster that are not being deleted, sorted by name."""
        listed = self.get("pods", "", "-n", NAMESPACE, "-l", f"app.kubernetes.io/name={name}")
        pods = [pod for pod in listed["items"] if "deletionTimestamp" not in pod["metadata"]]
        return sorted(pods, key=lambda pod: str(pod["metadata"]["name"]))

    def run_pod(self, limits: Mapping[str, str], script: str) -> str:
        """Run a shell script in a busybox pod with these limits; return what it printed."""
        run = {"name": "main", "image": BUSYBOX, "command": ["sh", "-c", script]}
        container = {**run, "resources": {"limits": limits}}
        pod = {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": "muster-test", "namespace": "default"},
            "spec": {"restartPolicy": "Never", "containers": [container]},
        }
        self.good("create", "-f", "-", given=pod)
        try:
            until(
                lambda: self.get("pod", "muster-test")["status"]["phase"] in _ENDED, "the pod ends"
            )
            return self.good("logs", "muster-test")
        finally:
            self.good("delete", "pod", "muster-test")

    def fetch(self, pod: Mapping[str, Any], path: str, port: int = 8080) -> str:
        """Return what a pod serves at a path; this machine must be able to reach pods."""
        with urllib.request.urlopen(
            f"http://{pod['status']['podIP']}:{port}{path}", timeout=10
        ) as answer:
            return str(answer.read().decode())

    def renew_node(self) -> None:
        """Create the Node object again, because the kubelet never removes a resource from it."""
        if Path(self.kubeconfig) != layout.KUBECONFIG:
            return
        kubelet = [sys.executable, "-m", "scripts.cluster", "kubelet"]
        name = self.node
        subprocess.run([*kubelet, "stop"], check=True, cwd=manifests.ROOT)
        (layout.KUBELET / "device-plugins/kubelet_internal_checkpoint").unlink(missing_ok=True)
        self.good("delete", "node", name)
        subprocess.run([*kubelet, "start"], check=True, cwd=manifests.ROOT)
        until(lambda: self.get("node", name), "the kubelet registers its node")
        self.good("wait", "node", name, "--for=condition=Ready", "--timeout=60s")

    @contextlib.contextmanager
    def no_default_storage(self) -> Iterator[None]:
        """Make no StorageClass the default until the block ends."""
        classes = [
            entry["metadata"]["name"]
            for entry in self.get("storageclasses")["items"]
            if entry["metadata"].get("annotations", {}).get(_DEFAULT_CLASS) == "true"
        ]
        self.good("annotate", "storageclass", *classes, f"{_DEFAULT_CLASS}-")
        try:
            yield
        finally:
            self.good("annotate", "storageclass", *classes, f"{_DEFAULT_CLASS}=true")

    @contextlib.contextmanager
    def offered(self, resource: str) -> Iterator[Offered]:
        """Record the node's allocatable amounts of a resource until the block ends; yield them."""
        path = f"jsonpath={{.status.allocatable.{resource}}}{{'\\n'}}"
        command = [*self.command, "get", "node", self.node, "--watch", "-o", path]
        offered, over = Offered(), threading.Event()
        watches: list[subprocess.Popen[str]] = []

        def read() -> None:
            # a watch ends when its API server does
            while not over.wait(0.2 if watches else 0):
                with subprocess.Popen(
                    command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
                ) as watch:
                    watches.append(watch)
                    if over.is_set():
                        watch.terminate()
                    assert watch.stdout is not None
                    for line in watch.stdout:
                        offered.seen.append((time.monotonic(), line.strip()))

        reader = threading.Thread(target=read)
        reader.start()
        try:
            until(lambda: offered.seen, "the watch has begun")
            yield offered
        finally:
            over.set()
            for watch in watches:
                watch.terminate()
            reader.join()

    def _remove_namespace(self) -> None:
        """Delete muster's namespace, and wait until it and its pods are gone."""
        # its controller checks again after 5 s; until then, end the pods as quickly as possible
        self.good("delete", "namespace", NAMESPACE, "--wait=false")
        inside = ("-n", NAMESPACE, "delete", "--all")
        self.good(*inside, "statefulset,deployment,daemonset,job", "--wait=false")
        self.good(*inside, "pod", "--grace-period=1", "--timeout=120s")
        self.good(*inside, "persistentvolumeclaim", "--timeout=60s")
        # if it checked too early, it waits for most of a minute, unless the namespace changes
        self.ask("annotate", "namespace", NAMESPACE, "muster-test/pods=ended")
        self.good("wait", "namespace", NAMESPACE, "--for=delete", "--timeout=120s")

    def rest(self) -> None:
        """Remove everything of muster, and wait until it is gone."""
        kinds = (
            "clusterrole,clusterrolebinding,role,rolebinding,"
            "validatingadmissionpolicy,validatingadmissionpolicybinding,"
            "mutatingwebhookconfiguration,csidriver,deviceclass,resourceslice"
        )
        self.good("delete", kinds, "--all-namespaces", "-l", PART, "--ignore-not-found")
        if self.get("namespace", NAMESPACE):
            self._remove_namespace()
        bound = "jsonpath={.items[?(@.status.phase=='Bound')].spec.claimRef.namespace}"
        volumes = ("get", "pv", "-o", bound)
        until(lambda: NAMESPACE not in self.good(*volumes).split(), "the volumes are released")
        for volume in self.get("persistentvolumes")["items"]:
            if volume["status"].get("phase") == "Released":
                # empty it for reuse, as an administrator would
                data = Path(volume["spec"]["hostPath"]["path"])
                if data.is_relative_to(layout.STATE):
                    shutil.rmtree(data, ignore_errors=True)
                    data.mkdir(mode=0o777)
                    data.chmod(0o777)
                forget = '[{"op": "remove", "path": "/spec/claimRef"}]'
                self.good("patch", "pv", volume["metadata"]["name"], "--type=json", "-p", forget)


def until(holds: Callable[[], T], what: str, *, within_s: float = 60.0) -> T:
    """Call `holds` until its result is true; return the result."""
    end = time.monotonic() + within_s
    while not (answer := holds()):
        assert time.monotonic() < end, f"not within {within_s:g} s: {what}"
        time.sleep(0.2)
    return answer


def chosen(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    """Yield the cluster of KUBECONFIG; skip without one, or if others use muster in it."""
    if "cluster" not in str(request.config.getoption("-m")):
        pytest.skip("only with -m cluster")
    kubeconfig = os.environ.get("KUBECONFIG")
    if not kubeconfig:
        pytest.skip("no real cluster: KUBECONFIG names none (make cluster starts one)")
    cluster = Cluster(kubeconfig)
    if cluster.get("namespace", NAMESPACE):
        if Path(kubeconfig) != layout.KUBECONFIG:
            pytest.skip("no throwaway cluster: it has a namespace muster already")
        # left by a run that was interrupted
        cluster.rest()
    yield cluster
    cluster.rest()


def block(page: str, phrase: str) -> str:
    """Return the code block of a page that contains a phrase, with the image under test."""
    text = (manifests.ROOT / "docs" / page).read_text()
    blocks = re.findall(r"^```(\w*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    (chosen_block,) = [
        each for kind, each in blocks if kind in {"", "sh", "yaml"} and phrase in each
    ]
    return _with_our_image(chosen_block)


def namespace_step() -> str:
    """Return the command of docs/install.md that creates the namespace."""
    return block("install.md", "kubectl apply -f muster/k8s/base/namespace.yaml")


def passwords() -> str:
    """Return the commands of docs/install.md that create the namespace and NATS' passwords."""
    return f"{namespace_step()}\n{block('install.md', 'secret generic muster-nats-$user')}"


def printed_commands(printed: str) -> str:
    """Return the commands that `muster auth` printed for the user to run."""
    lines = [line for line in printed.splitlines() if line.startswith("into")]
    assert lines, printed
    return "\n".join(lines)


def _with_our_image(script: str) -> str:
    """Return commands with the image under test, without those that build and push one."""
    lines = [line for line in script.splitlines() if not line.startswith("docker ")]
    name, _, tag = MUSTER.partition(":")
    replaced: Mapping[str, str] = {
        "registry.example.com/muster:0.1.0": MUSTER,
        "newName: registry.example.com/muster, newTag: 0.1.0": f"newName: {name}, newTag: {tag}",
        "image.repository=registry.example.com/muster": f"image.repository={name},image.tag={tag}",
        "repository: registry.example.com/muster, tag: 0.1.0": f"repository: {name}, tag: {tag}",
        "image: busybox": f"image: {BUSYBOX}",
    }
    text = "\n".join(lines)
    for old, new in replaced.items():
        text = text.replace(old, new)
    return text
