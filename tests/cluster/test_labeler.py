"""`muster check`, `muster label-gpus` and the labeler on a real cluster; see docs/check.md."""

import asyncio
import contextlib
import datetime as dt
import json
from collections.abc import Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import orjson
import pytest

from muster import vocabulary
from muster.kubernetes import api as kubernetes_api
from muster.local import nats, processes
from muster.nats import bus
from muster_labeler import model
from muster_labeler.naming import accelerators
from muster_labeler.service import decision_publisher
from tests.worlds import kube_client, manifests
from tests.worlds import labeler_cluster as clusters
from tests.worlds.real_cluster import NAMESPACE, PART, Cluster, until

KEY: Final = accelerators.SKYPILOT
DOKS: Final = "doks.digitalocean.com/gpu-model"
PREFIX: Final = "muster-test-"
POLICY: Final = manifests.ROOT / "k8s/base/admission.yaml"

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(180)]


class Nodes:
    """Creates a test's nodes in the cluster, and reads their labels and findings."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.api = kube_client.Client(cluster.kubeconfig)

    def make(self, name: str, **labels: str) -> str:
        """Create a node with GPUs and with labels that kubectl owns; return its name."""
        (made,) = self.make_all([name], **labels)
        return made

    def make_all(self, names: Sequence[str], **labels: str) -> list[str]:
        """Create several nodes like `make`; return their names."""
        made = [clusters.node(f"{PREFIX}{name}", labels=labels) for name in names]
        for each in made:
            del each["spec"]
        listed = {"apiVersion": "v1", "kind": "List", "items": made}
        # kubectl would validate the list, which lacks fields that only a kubelet sets
        create = ("create", "-f", "-", "--field-manager=kubectl", "--validate=false")
        self.cluster.good(*create, given=listed)
        return [f"{PREFIX}{name}" for name in names]

    def labels(self, node: str) -> dict[str, str]:
        """Return the labels of a node that name its GPU: SkyPilot's and the cloud's."""
        labels = self.cluster.get("node", node)["metadata"].get("labels", {})
        return {key: value for key, value in labels.items() if key in {KEY, DOKS}}

    def findings(self, *words: str, expect: int = 0) -> list[dict[str, Any]]:
        """Return the findings of `muster check`."""
        report = json.loads(self.cluster.muster("check", *words, "--json", expect=expect))
        return list(report["findings"])

    def account(self, name: str, *rules: Sequence[str], folder: Path) -> Cluster:
        """Return the cluster as seen by a new ServiceAccount; a rule is verbs, then a resource."""
        cluster, role = self.cluster, f"muster-test-{name}"
        cluster.good("create", "serviceaccount", name, "-n", NAMESPACE)
        listed = [
            {"apiGroups": [""], "resources": [what], "verbs": verbs} for *verbs, what in rules
        ]
        metadata = {"name": role, "labels": dict([PART.split("=")])}
        kind = {"apiVersion": "rbac.authorization.k8s.io/v1", "kind": "ClusterRole"}
        cluster.good("create", "-f", "-", given={**kind, "metadata": metadata, "rules": listed})
        account = f"--serviceaccount={NAMESPACE}:{name}"
        cluster.good("create", "clusterrolebinding", role, f"--clusterrole={role}", account)
        cluster.good("label", "clusterrolebinding", role, PART)
        config = json.loads(cluster.good("config", "view", "--raw", "-o", "json"))
        token = cluster.good("create", "token", name, "-n", NAMESPACE).strip()
        config["users"] = [{"name": name, "user": {"token": token}}]
        for context in config["contexts"]:
            context["context"]["user"] = name
        file = folder / f"{name}.json"
        file.write_text(json.dumps(config))
        return Cluster(str(file))


@pytest.fixture(scope="module")
def prepared(cluster: Cluster) -> Cluster:
    others = [
        node["metadata"]["name"]
        for node in cluster.get("nodes")["items"]
        if int(node["status"].get("capacity", {}).get("nvidia.com/gpu", "0"))
    ]
    if others:
        pytest.skip(f"no throwaway cluster: it has GPU nodes of its own, {others[:3]}")
    cluster.good("create", "namespace", NAMESPACE)
    return cluster


@pytest.fixture
def nodes(prepared: Cluster) -> Iterator[Nodes]:
    yield Nodes(prepared)
    made = [n for n in prepared.good("get", "node", "-o", "name").split() if f"/{PREFIX}" in n]
    if made:
        prepared.good("delete", "--wait=false", *made)


def test_check_and_label_do_what_they_say(nodes: Nodes) -> None:
    a, b = nodes.make("a", **{DOKS: "h100"}), nodes.make("b", **{DOKS: "l4"})
    assert [f["id"] for f in nodes.findings("gpu")] == ["GPU001", "GPU001"]
    nodes.cluster.muster("label-gpus", "--apply", "--yes", "--node", a, expect=1)
    nodes.cluster.muster("label-gpus", "--apply", "--yes")
    assert (nodes.labels(a)[KEY], nodes.labels(b)[KEY]) == ("h100", "l4")
    provenance = nodes.cluster.get("node", a)["metadata"]["annotations"][model.PROVENANCE]
    assert json.loads(provenance)["value"] == "h100"
    assert nodes.findings("gpu") == []
    nodes.cluster.muster("unlabel-gpus", "--yes")
    assert nodes.labels(a) == {DOKS: "h100"}


def test_a_conflict_is_refused_and_names_its_owner(nodes: Nodes) -> None:
    a = nodes.make("a", **{DOKS: "h100", KEY: "l4"})
    out = nodes.cluster.muster("label-gpus", "--apply", "--yes", expect=1)
    assert "owned by kubectl" in out
    assert nodes.labels(a)[KEY] == "l4"
    nodes.cluster.muster("label-gpus", "--apply", "--yes", "--overwrite")
    assert nodes.labels(a)[KEY] == "h100"


def test_a_label_without_a_known_owner_is_overwritten_on_request(nodes: Nodes) -> None:
    a = nodes.make("a", **{DOKS: "h100", KEY: "l4"})
    nobody = '{"metadata": {"managedFields": [{}]}}'
    nodes.cluster.good("patch", "node", a, "--type=merge", "-p", nobody)
    out = nodes.cluster.muster("label-gpus", "--apply", "--yes", expect=1)
    assert "owned by an unknown manager" in out
    nodes.cluster.muster("label-gpus", "--apply", "--yes", "--overwrite")
    assert nodes.labels(a)[KEY] == "h100"


def test_missing_permissions_are_named(nodes: Nodes, tmp_path: Path) -> None:
    nodes.make("a", **{DOKS: "h100"})
    limited = nodes.account("viewer", ("get", "list", "nodes"), folder=tmp_path)
    errors = limited.muster("label-gpus", "--apply", "--yes", expect=4)
    assert errors == "muster label-gpus: not allowed to patch nodes\n"
    report = Nodes(limited).findings("all", expect=4)
    refused = {f["object"] for f in report if f["id"] == "ACCESS"}
    assert refused == {"deployments", "events", "pods"}


def test_the_admission_policy_lets_the_labeler_do_its_work(nodes: Nodes, tmp_path: Path) -> None:
    a = nodes.make("a", **{DOKS: "h100"})
    rights = ("get", "list", "patch", "nodes"), ("patch", "nodes/status")
    labeler = Nodes(nodes.account("muster-labeler", *rights, folder=tmp_path))
    nodes.cluster.good("apply", "-f", str(POLICY))

    def status(
        patch: object,
        below: str = "",
        content: str = kubernetes_api.MERGE,
        *,
        manager: str = model.FIELD_MANAGER,
        **query: str,
    ) -> int:
        path = f"/api/v1/nodes/{a}{below}"
        return labeler.api.ask("PATCH", path, patch, content, fieldManager=manager, **query).status

    def policy_holds() -> bool:
        if status({"spec": {"unschedulable": True}}) != 200:
            return True
        # a patch without a change is allowed, so this one is reverted before the next attempt
        nodes.cluster.good("uncordon", a)
        return False

    until(policy_holds, "the admission policy holds")
    words = ("label-gpus", "--apply", "--yes", "--unheard", "--overwrite")
    labeler.cluster.muster(*words)
    assert nodes.labels(a)[KEY] == "h100"
    uid = nodes.cluster.get("node", a)["metadata"]["uid"]
    for verdict in (vocabulary.Verdict.HEALTHY, vocabulary.Verdict.PLUGIN_DOWN):
        wanted = decision_publisher.condition_of({"device-plugin": verdict})
        ours = decision_publisher.condition_patch(a, uid, wanted, at=dt.datetime.now(dt.UTC))
        assert status(ours, "/status", kubernetes_api.APPLY) == 200
    ready = {"type": "Ready", "status": "False", "reason": "x", "message": "x"}
    assert status({"status": {"conditions": [ready]}}, "/status") == 422
    assert status({"status": {"capacity": {"nvidia.com/gpu": "99"}}}, "/status") == 422
    # what a compromised labeler might change for other operators, or in fields of other owners
    for label in (
        *("nvidia.com/gpu.deploy.driver=false", "nvidia.com/mig.config=all-disabled"),
        *("nvidia.com/gpu.workload.config=vm-passthrough", "muster.dev/other=x"),
        *(f"{KEY}=H100", "nvidia.com/gpu.count=many", "nvidia.com/mig-1g.5gb.count=x"),
    ):
        key, _, value = label.partition("=")
        assert (label, status({"metadata": {"labels": {key: value}}})) == (label, 422)
    assert status({"metadata": {"annotations": {"muster.dev/fuse": "true"}}}) == 422
    assert status({"metadata": {"managedFields": [{}]}}) == 422
    assert status({"metadata": {"labels": {KEY: "l4"}}}, manager="kubectl") == 422
    profile = {"nvidia.com/gpu.count": "8", "nvidia.com/mig-1g.5gb.product": "A100"}
    assert status({"metadata": {"labels": profile}}) == 200
    nodes.cluster.good("label", "node", a, "nvidia.com/gpu.family=ampere")
    forced: Any = {"apiVersion": "v1", "kind": "Node", "metadata": {"name": a, "uid": uid}}
    forced["metadata"]["labels"] = {"nvidia.com/gpu.family": "hopper"}
    assert status(forced, content=kubernetes_api.APPLY, force="true") == 422
    assert status({"metadata": {"labels": {"nvidia.com/gpu.family": None}}}) == 422


def test_the_service_applies_reads_back_and_repairs(nodes: Nodes, tmp_path: Path) -> None:
    a = nodes.make("a")

    async def labelled() -> None:
        def is_labelled() -> bool:
            return nodes.labels(a).get(KEY) == "l4"

        await asyncio.to_thread(until, is_labelled, f"{a} is labelled l4")

    async def story(labeler: Labeler) -> None:
        await labeler.report(a, "NVIDIA L4", 23034)
        await labelled()
        nodes.cluster.good("label", "node", a, f"{KEY}-")
        await labelled()

    asyncio.run(_with_service(nodes, tmp_path, story))
    lease = nodes.cluster.get("lease", "muster-labeler", "-n", NAMESPACE)
    assert lease["spec"].get("holderIdentity", "") == ""


def test_a_labeler_killed_in_the_middle_of_an_apply_ends_right_after_its_restart(
    nodes: Nodes, tmp_path: Path
) -> None:
    names = nodes.make_all([f"k{number:02}" for number in range(30)])

    def labelled() -> list[str]:
        listed = nodes.cluster.get("nodes", "", "-l", f"{KEY}=l4")["items"]
        return sorted(node["metadata"]["name"] for node in listed)

    async def story(labeler: Labeler) -> None:
        for name in names:
            await labeler.report(name, "NVIDIA L4", 23034)
        await asyncio.to_thread(until, labelled, "the first nodes are labelled")
        await labeler.process.kill()
        done = labelled()
        assert 0 < len(done) < len(names), "it was killed in the middle"
        await labeler.process.start()
        for name in names:
            await labeler.report(name, "NVIDIA L4", 23034)
        await asyncio.to_thread(until, lambda: labelled() == names, "all nodes are labelled")

    # a short Lease, so that the one of the killed holder expires soon
    asyncio.run(_with_service(nodes, tmp_path, story, writes_per_s=5.0, lasts_s=3))
    shown = nodes.cluster.get("nodes", "", "-l", f"{KEY}=l4", "--show-managed-fields")["items"]
    managers = {
        node["metadata"]["name"]: [each["manager"] for each in node["metadata"]["managedFields"]]
        for node in shown
    }
    ours = {name: listed.count(model.FIELD_MANAGER) for name, listed in managers.items()}
    assert ours == dict.fromkeys(names, 1)


class Labeler:
    """A labeler process on this machine, and the bus for reports to it."""

    def __init__(self, process: processes.Process, connected: bus.Bus) -> None:
        self.process = process
        self._bus = connected

    async def report(self, node: str, product: str, memory_mib: int) -> None:
        """Publish an inventory of a node with one GPU."""
        gpu = vocabulary.Gpu(uuid="GPU-0", product=product, memory_mib=memory_mib)
        await self._bus.publish(
            vocabulary.InventoryReported(
                node=node,
                plugin="device-plugin",
                at=dt.datetime.now(dt.UTC),
                devices=(),
                gpus=vocabulary.GpuNode(gpus=(gpu,)),
            )
        )


async def _with_service(
    nodes: Nodes,
    folder: Path,
    story: Callable[[Labeler], Awaitable[None]],
    *,
    writes_per_s: float = 20.0,
    lasts_s: int = 15,
) -> None:
    async with contextlib.AsyncExitStack() as open_:
        started = await open_.enter_async_context(nats.NatsServer(folder / "nats"))
        connected = await open_.enter_async_context(
            bus.Bus(started.url, producer="plugins/device-plugin", name="plugin", owner=True)
        )
        file = folder / "labeler.json"
        settings = {
            "bus": {"url": started.url},
            "mode": "apply",
            "policy": {"writes_per_s": writes_per_s},
            "lease": {"lasts_s": lasts_s},
            "kubernetes": {"kubeconfig": nodes.cluster.kubeconfig, "namespace": NAMESPACE},
        }
        file.write_bytes(orjson.dumps(settings))
        program = processes.Program("labeler", "muster_labeler", ("--config", str(file)))
        labeler = processes.Process(program, folder / "labeler.log")
        await labeler.start()
        open_.push_async_callback(labeler.end)
        await story(Labeler(labeler, connected))
