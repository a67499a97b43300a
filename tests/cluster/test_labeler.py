"""Check, label and the service against a real Kubernetes API server; see docs/check.md.

Run `pytest -m cluster` and nothing less: a KUBECONFIG that merely lies about may be a real cluster.
"""

import asyncio
import contextlib
import datetime as dt
import io
import json
import pathlib
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from typing import Any

import orjson
import pytest
import yaml

from muster import vocabulary
from muster.cli import registry
from muster.kubernetes import api as kubernetes_api
from muster.local import nats, processes
from muster.nats import bus
from muster_labeler import model
from muster_labeler.naming import accelerators
from muster_labeler.service import decision_publisher
from tests.worlds import api_server
from tests.worlds import labeler_cluster as clusters

KEY = accelerators.SKYPILOT
DOKS = "doks.digitalocean.com/gpu-model"
NODE = "muster-test-{}"
POLICY = pathlib.Path(__file__).resolve().parents[2] / "k8s/base/admission.yaml"
ACCOUNT = ("muster", "muster-labeler")

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(180)]


class Real:
    """A real cluster, and the nodes that we made in it."""

    def __init__(self, kubeconfig: str, directory: pathlib.Path) -> None:
        self.kubeconfig = kubeconfig
        self.directory = directory

    def ask(
        self,
        verb: str,
        path: str,
        body: object = None,
        content: str = kubernetes_api.JSON,
        *,
        kubeconfig: str | None = None,
        **query: str,
    ) -> kubernetes_api.Answer:
        """Ask the API."""

        async def asked() -> kubernetes_api.Answer:
            async with await kubernetes_api.find(
                kubeconfig=kubeconfig or self.kubeconfig, context=None
            ) as api:
                return await api.request(
                    verb, path, body=body, content=content, query=query, timeout_s=10
                )

        return asyncio.run(asked())

    def make(self, name: str, **labels: str) -> str:
        """Create a node with GPUs, labelled by somebody else."""
        made = clusters.node(NODE.format(name), labels=labels)
        del made["spec"]
        status = made.pop("status")
        self.good("POST", "/api/v1/nodes", made, fieldManager="kubectl")
        path = f"/api/v1/nodes/{NODE.format(name)}/status"
        self.good("PATCH", path, {"status": status}, kubernetes_api.MERGE)
        return NODE.format(name)

    def good(
        self,
        verb: str,
        path: str,
        body: object = None,
        content: str = kubernetes_api.JSON,
        **query: str,
    ) -> Any:
        """Ask what must come out."""
        answer = self.ask(verb, path, body, content, **query)
        assert answer.is_ok, answer.problem
        return orjson.loads(answer.body)

    def labels(self, node: str) -> dict[str, str]:
        """Return those labels of a node that are no system's."""
        labels = self.good("GET", f"/api/v1/nodes/{node}")["metadata"].get("labels", {})
        return {key: value for key, value in labels.items() if key in {KEY, DOKS}}

    def clean(self) -> None:
        """Remove what we made."""
        for item in self.good("GET", "/api/v1/nodes")["items"]:
            if item["metadata"]["name"].startswith(NODE.format("")):
                self.ask("DELETE", f"/api/v1/nodes/{item['metadata']['name']}")

    def run(self, *words: str, kubeconfig: str | None = None) -> tuple[int, str, str]:
        """Call a command of ours."""
        out, err = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = registry.call(*words, "--kubeconfig", kubeconfig or self.kubeconfig)
        return code, out.getvalue(), err.getvalue()

    def account(
        self, namespace: str, name: str, rules: Sequence[Mapping[str, Sequence[str]]]
    ) -> str:
        """Return the kubeconfig of a ServiceAccount with these rights."""
        self.ask("POST", "/api/v1/namespaces", {"metadata": {"name": namespace}})
        accounts = f"/api/v1/namespaces/{namespace}/serviceaccounts"
        self.ask("POST", accounts, {"metadata": {"name": name}})
        group = "rbac.authorization.k8s.io"
        role = {"metadata": {"name": f"muster-test-{name}"}, "rules": rules}
        path = f"/apis/{group}/v1"
        self.ask("DELETE", f"{path}/clusterroles/muster-test-{name}")
        self.good("POST", f"{path}/clusterroles", role)
        binding = {
            "metadata": {"name": f"muster-test-{name}"},
            "roleRef": {"apiGroup": group, "kind": "ClusterRole", "name": f"muster-test-{name}"},
            "subjects": [{"kind": "ServiceAccount", "name": name, "namespace": namespace}],
        }
        self.ask("DELETE", f"{path}/clusterrolebindings/muster-test-{name}")
        self.good("POST", f"{path}/clusterrolebindings", binding)
        request = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": {}}
        token = self.good("POST", f"{accounts}/{name}/token", request)["status"]["token"]
        config = yaml.safe_load(pathlib.Path(self.kubeconfig).read_text())
        config["users"] = [{"name": "account", "user": {"token": token}}]
        for context in config["contexts"]:
            context["context"]["user"] = "account"
        file = self.directory / f"{name}.json"
        file.write_text(json.dumps(config))
        return str(file)


@pytest.fixture(scope="module")
def real(request: pytest.FixtureRequest) -> Iterator[Real]:
    with api_server.asked_for(request) as (kubeconfig, directory):
        made = Real(kubeconfig, directory)
        others = [
            node["metadata"]["name"]
            for node in made.good("GET", "/api/v1/nodes")["items"]
            if "nvidia.com/gpu" in node.get("status", {}).get("capacity", {})
            and not node["metadata"]["name"].startswith(NODE.format(""))
        ]
        if others:
            pytest.skip(f"no throwaway cluster: it has GPU nodes of its own, {others[:3]}")
        yield made


@pytest.fixture(autouse=True)
def clean(real: Real) -> Iterator[None]:
    real.clean()
    yield
    real.clean()


def test_check_and_label_do_what_they_say(real: Real) -> None:
    a, b = real.make("a", **{DOKS: "h100"}), real.make("b", **{DOKS: "l4"})
    code, out, _ = real.run("check", "gpu", "--output", "json")
    assert (code, [f["id"] for f in orjson.loads(out)["findings"]]) == (0, ["GPU001", "GPU001"])
    assert real.run("label-gpus", "--apply", "--yes", "--node", a)[0] == 1
    assert real.run("label-gpus", "--apply", "--yes")[0] == 0
    assert (real.labels(a)[KEY], real.labels(b)[KEY]) == ("h100", "l4")
    provenance = real.good("GET", f"/api/v1/nodes/{a}")["metadata"]["annotations"]
    assert orjson.loads(provenance[model.PROVENANCE])["value"] == "h100"
    code, out, _ = real.run("check", "gpu", "--output", "json")
    assert (code, orjson.loads(out)["findings"]) == (0, [])
    assert real.run("unlabel-gpus", "--yes")[0] == 0
    assert real.labels(a) == {DOKS: "h100"}


def test_a_conflict_is_refused_and_names_its_owner(real: Real) -> None:
    a = real.make("a", **{DOKS: "h100", KEY: "l4"})
    code, out, _ = real.run("label-gpus", "--apply", "--yes")
    assert code == 1
    assert "owned by kubectl" in out
    assert real.labels(a)[KEY] == "l4"
    body = {"apiVersion": "v1", "kind": "Node", "metadata": {"name": a, "labels": {KEY: "h100"}}}
    query = {"fieldManager": model.FIELD_MANAGER, "force": "false"}
    refused = real.ask("PATCH", f"/api/v1/nodes/{a}", body, kubernetes_api.APPLY, **query)
    assert (refused.status, "kubectl" in refused.problem) == (409, True)
    assert real.run("label-gpus", "--apply", "--yes", "--overwrite")[0] == 0
    assert real.labels(a)[KEY] == "h100"


def test_a_node_that_is_gone_is_not_made_again(real: Real) -> None:
    a = real.make("a", **{DOKS: "h100"})
    uid = real.good("GET", f"/api/v1/nodes/{a}")["metadata"]["uid"]
    real.good("DELETE", f"/api/v1/nodes/{a}")
    metadata = {"name": a, "uid": uid, "labels": {KEY: "h100"}}
    body = {"apiVersion": "v1", "kind": "Node", "metadata": metadata}
    query = {"fieldManager": model.FIELD_MANAGER, "force": "false"}
    refused = real.ask("PATCH", f"/api/v1/nodes/{a}", body, kubernetes_api.APPLY, **query)
    assert refused.status == 409, refused.problem


def test_missing_permissions_are_named(real: Real) -> None:
    real.make("a", **{DOKS: "h100"})
    rules = [{"apiGroups": [""], "resources": ["nodes"], "verbs": ["get", "list"]}]
    limited = real.account("default", "muster-test-viewer", rules)
    code, _, errors = real.run("label-gpus", "--apply", "--yes", kubeconfig=limited)
    assert (code, errors) == (4, "muster label-gpus: not allowed to patch nodes\n")
    code, out, _ = real.run("check", "all", "--output", "json", kubeconfig=limited)
    findings = [(f["id"], f["object"]) for f in orjson.loads(out)["findings"]]
    assert (code, ("ACCESS", "pods") in findings) == (4, True)


@pytest.mark.skipif(not POLICY.exists(), reason="k8s/base/admission.yaml is not there")
def test_the_admission_policy_lets_the_labeler_change_labels_of_accelerators_only(
    real: Real,
) -> None:
    a = real.make("a", **{DOKS: "h100"})
    rules = [
        {"apiGroups": [""], "resources": ["nodes"], "verbs": ["get", "list", "patch"]},
        {"apiGroups": [""], "resources": ["nodes/status"], "verbs": ["patch"]},
    ]
    labeler = real.account(*ACCOUNT, rules)
    for policy in yaml.safe_load_all(POLICY.read_text()):
        plural = {
            "ValidatingAdmissionPolicy": "validatingadmissionpolicies",
            "ValidatingAdmissionPolicyBinding": "validatingadmissionpolicybindings",
        }[policy["kind"]]
        path = f"/apis/admissionregistration.k8s.io/v1/{plural}/{policy['metadata']['name']}"
        query = {"fieldManager": "test", "force": "true"}
        real.good("PATCH", path, policy, kubernetes_api.APPLY, **query)

    def status(patch: object, below: str = "", content: str = kubernetes_api.MERGE) -> int:
        path = f"/api/v1/nodes/{a}{below}"
        query = {"fieldManager": model.FIELD_MANAGER}
        return real.ask("PATCH", path, patch, content, kubeconfig=labeler, **query).status

    async def held() -> None:
        # a policy takes a moment to hold
        async with asyncio.timeout(100):
            while await asyncio.to_thread(status, {"spec": {"unschedulable": True}}) == 200:
                # what changes nothing is allowed, so it is changed back before the next attempt
                back = {"spec": {"unschedulable": None}}
                path = f"/api/v1/nodes/{a}"
                await asyncio.to_thread(real.good, "PATCH", path, back, kubernetes_api.MERGE)
                await asyncio.sleep(0.2)

    asyncio.run(held())
    assert status({"metadata": {"labels": {"team": "x"}}}) == 422
    assert status({"metadata": {"annotations": {"team": "x"}}}) == 422
    assert status({"spec": {"taints": [{"key": "x", "effect": "NoSchedule"}]}}) == 422
    assert status({"metadata": {"labels": {KEY: "h100"}}}) == 200
    words = ("label-gpus", "--apply", "--yes", "--unheard", "--overwrite")
    assert real.run(*words, kubeconfig=labeler)[0] == 0
    uid = real.good("GET", f"/api/v1/nodes/{a}")["metadata"]["uid"]
    for verdict in (vocabulary.Verdict.HEALTHY, vocabulary.Verdict.PLUGIN_DOWN):
        wanted = decision_publisher.condition_of({"device-plugin": verdict})
        ours = decision_publisher.condition_patch(a, uid, wanted, at=dt.datetime.now(dt.UTC))
        assert status(ours, "/status", kubernetes_api.APPLY) == 200
    ready = {"type": "Ready", "status": "False", "reason": "x", "message": "x"}
    assert status({"status": {"conditions": [ready]}}, "/status") == 422
    assert status({"status": {"capacity": {"nvidia.com/gpu": "99"}}}, "/status") == 422
    assert status({"metadata": {"labels": {"team": "x"}}}, "/status") == 422


def test_the_service_applies_reads_back_and_repairs(real: Real) -> None:
    a = real.make("a")

    async def until(wanted: str | None) -> None:
        async with asyncio.timeout(100):
            while (await asyncio.to_thread(real.labels, a)).get(KEY) != wanted:
                await asyncio.sleep(0.1)

    async def story(connected: bus.Bus) -> None:
        gpu = vocabulary.Gpu(uuid="GPU-0", product="NVIDIA L4", memory_mib=23034)
        await connected.publish(
            vocabulary.InventoryReported(
                node=a,
                plugin="device-plugin",
                at=dt.datetime.now(dt.UTC),
                devices=(),
                gpus=vocabulary.GpuNode(gpus=(gpu,)),
            )
        )
        await until("l4")
        patch = {"metadata": {"labels": {KEY: None}}}
        await asyncio.to_thread(
            real.good, "PATCH", f"/api/v1/nodes/{a}", patch, kubernetes_api.MERGE
        )
        await until("l4")

    asyncio.run(_with_service(real, story))
    leases = "/apis/coordination.k8s.io/v1/namespaces/default/leases"
    assert real.good("GET", f"{leases}/muster-labeler")["spec"].get("holderIdentity", "") == ""
    real.ask("DELETE", f"{leases}/muster-labeler")


async def _with_service(real: Real, story: Callable[[bus.Bus], Awaitable[None]]) -> None:
    async with contextlib.AsyncExitStack() as open_:
        started = await open_.enter_async_context(nats.NatsServer(real.directory / "nats"))
        connected = await open_.enter_async_context(
            bus.Bus(started.url, producer="plugins/device-plugin", name="plugin", owner=True)
        )
        file = real.directory / "labeler.json"
        kubernetes = {"kubeconfig": real.kubeconfig, "namespace": "default"}
        settings = {"bus": {"url": started.url}, "mode": "apply", "kubernetes": kubernetes}
        file.write_bytes(orjson.dumps(settings))
        program = processes.Program("labeler", "muster_labeler", ("--config", str(file)))
        labeler = processes.Process(program, real.directory / "labeler.log")
        await labeler.start()
        open_.push_async_callback(labeler.end)
        await story(connected)
