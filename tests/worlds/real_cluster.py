"""A real cluster that may be thrown away: the one of KUBECONFIG, which `make cluster` starts.

Run `pytest -m cluster` and nothing less: a KUBECONFIG that merely lies about may be a real cluster.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
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
"""Kinds whose objects come and go by themselves; nodes are compared by what they say."""

T = TypeVar("T")


class Cluster:
    """A cluster, and kubectl to ask it with."""

    def __init__(self, kubeconfig: str) -> None:
        self.kubeconfig = kubeconfig
        path = os.pathsep.join((str(Path(kubeconfig).parent / "bin"), os.environ.get("PATH", "")))
        self.kubectl = shutil.which("kubectl", path=path) or "kubectl"
        self.environment = {
            **os.environ,
            "KUBECONFIG": kubeconfig,
            "PATH": f"{Path(sys.executable).parent}:{path}",
        }

    def ask(self, *words: str, given: object = None) -> tuple[int, str]:
        """Return the exit code of kubectl, and what it printed on stdout or else on stderr."""
        text = given if isinstance(given, str) else json.dumps(given)
        done = subprocess.run(
            [self.kubectl, "--kubeconfig", self.kubeconfig, *words],
            input=text if given is not None else None,
            capture_output=True,
            text=True,
            check=False,
        )
        return done.returncode, done.stdout or done.stderr

    def good(self, *words: str, given: object = None) -> str:
        """Ask what must succeed; return what kubectl printed."""
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
        """Run a command of muster against the cluster; return what it printed."""
        done = subprocess.run(
            [str(Path(sys.executable).with_name("muster")), *words],
            capture_output=True, text=True, check=False, env=self.environment,
        )  # fmt: skip
        assert done.returncode == expect, f"muster {' '.join(words)}: {done.stdout}{done.stderr}"
        return done.stdout

    def shell(self, script: str, folder: Path) -> str:
        """Run a script as a user does who has this kubeconfig; return all that it printed."""
        done = subprocess.run(
            [shutil.which("bash") or "bash", "-euo", "pipefail", "-c", script],
            cwd=folder, env=self.environment, text=True, check=False,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        assert done.returncode == 0, f"{script}\n{done.stdout}"
        return done.stdout

    def install(self, folder: Path, settings: Mapping[str, object] = MappingProxyType({})) -> str:
        """Install the minimal overlay as docs/install.md says; return what was printed.

        `settings` of services by their names replace the ones that the overlay has.
        """
        (folder / "muster").symlink_to(manifests.ROOT)
        build, overlay, apply = map(with_our_image, documented("install.md", "## In a cluster")[:3])
        assert "apply -k my-muster" in apply
        printed = self.shell(f"{build}\n{overlay}", folder)
        generators = [
            {"name": f"muster-{name}-settings", "namespace": NAMESPACE, "behavior": "merge",
             "files": [f"{name}.yaml"]}
            for name in settings
        ]  # fmt: skip
        for name, tree in settings.items():
            (folder / f"my-muster/{name}.yaml").write_text(yaml.safe_dump(tree))
        with (folder / "my-muster/kustomization.yaml").open("a") as file:
            yaml.safe_dump({"configMapGenerator": generators}, file)
        return printed + self.shell(apply, folder)

    @property
    def node(self) -> str:
        """The name of the first node."""
        return str(self.get("nodes")["items"][0]["metadata"]["name"])

    def allocatable(self, resource: str) -> str:
        """Return what the first node offers of a resource; empty if it does not list it."""
        node = self.get("nodes")["items"][0]
        return str(node["status"]["allocatable"].get(resource, ""))

    def snapshot(self) -> dict[str, Any]:
        """Return what an uninstall has to restore: the names of all objects, and what nodes say."""
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

    def rest(self) -> None:
        """Remove whatever of muster is there, and wait until it is gone."""
        kinds = (
            "clusterrole,clusterrolebinding,role,rolebinding,"
            "validatingadmissionpolicy,validatingadmissionpolicybinding"
        )
        self.good("delete", kinds, "--all-namespaces", "-l", PART, "--ignore-not-found")
        self.good("delete", "namespace", NAMESPACE, "--ignore-not-found", "--timeout=120s")
        self.good("delete", "clusterrole,clusterrolebinding", "-l", PART, "--ignore-not-found")
        for volume in self.get("persistentvolumes")["items"]:
            if volume["status"].get("phase") == "Released":
                # used again, emptied as an administrator would
                data = Path(volume["spec"]["hostPath"]["path"])
                if data.is_relative_to(layout.STATE):
                    shutil.rmtree(data, ignore_errors=True)
                    data.mkdir(mode=0o777)
                    data.chmod(0o777)
                self.good(
                    "patch",
                    "pv",
                    volume["metadata"]["name"],
                    "--type=json",
                    "-p",
                    '[{"op": "remove", "path": "/spec/claimRef"}]',
                )


def until(holds: Callable[[], T], what: str, *, within_s: float = 60.0) -> T:
    """Ask until the answer is true; return it."""
    end = time.monotonic() + within_s
    while not (answer := holds()):
        assert time.monotonic() < end, f"not within {within_s:g} s: {what}"
        time.sleep(0.2)
    return answer


def chosen(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    """Give the cluster of KUBECONFIG; skip without one, and where it is somebody's."""
    if "cluster" not in str(request.config.getoption("-m")):
        pytest.skip("only with -m cluster")
    kubeconfig = os.environ.get("KUBECONFIG")
    if not kubeconfig:
        pytest.skip("no real cluster: KUBECONFIG names none (make cluster starts one)")
    cluster = Cluster(kubeconfig)
    if cluster.get("namespace", NAMESPACE):
        pytest.skip("no throwaway cluster: it has a namespace muster already")
    yield cluster
    cluster.rest()


def documented(page: str, heading: str) -> list[str]:
    """Return the commands that a page shows below a heading, block by block."""
    text = (manifests.ROOT / "docs" / page).read_text()
    _, _, section = text.partition(f"\n{heading}\n")
    assert section, f"docs/{page} has no {heading}"
    section = re.split(rf"^#{{1,{heading.count('#')}}} ", section, flags=re.MULTILINE)[0]
    return re.findall(r"^```\n(.*?)^```$", section, re.MULTILINE | re.DOTALL)


def with_our_image(script: str) -> str:
    """Return documented commands, with the image that is there instead of one that is pushed."""
    lines = [line for line in script.splitlines() if not line.startswith("docker ")]
    name, _, tag = MUSTER.partition(":")
    replaced: Mapping[str, str] = {
        "registry.example.com/muster:0.1.0": MUSTER,
        "newName: registry.example.com/muster, newTag: 0.1.0": f"newName: {name}, newTag: {tag}",
        "image.repository=registry.example.com/muster": f"image.repository={name},image.tag={tag}",
    }
    text = "\n".join(lines)
    for old, new in replaced.items():
        text = text.replace(old, new)
    return text
