"""The API stand-in with real clients: Python's kubernetes (async and sync), kubectl, plain HTTP."""

import asyncio
import io
import os
import pathlib
import shutil
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import aiohttp
import orjson
import pytest
from kubernetes import client as sync_client
from kubernetes import config as sync_config
from kubernetes import watch as sync_watch
from kubernetes.aio import config as aio_config
from kubernetes.aio.client import ApiClient, Configuration

from muster.local import httpd, kubernetes
from muster.local.kubernetes import refusals, requests, server

Story = Callable[[kubernetes.KubernetesApi, aiohttp.ClientSession], Awaitable[None]]
NODE = {"metadata": {"name": "node-a", "labels": {"zone": "a"}}}
POD = {"metadata": {"name": "pod-a"}, "spec": {"containers": [{"name": "c", "image": "i"}]}}
NODES = "/api/v1/nodes"
PODS = "/api/v1/namespaces/default/pods"
MERGE = "application/merge-patch+json"
STRATEGIC = "application/strategic-merge-patch+json"
APPLY = "application/apply-patch+yaml"
EXAMPLE = pathlib.Path(__file__).parents[2] / "examples/pod.yaml"
KUBECTL = shutil.which("kubectl", path=str(pathlib.Path(sys.executable).parent)) or "kubectl"
needs_kubectl = pytest.mark.skipif(shutil.which(KUBECTL) is None, reason="there is no kubectl")


def play(story: Story) -> None:
    async def played() -> None:
        async with (
            asyncio.timeout(100),
            kubernetes.KubernetesApi(bookmark_period_s=0.05, schedules=True) as api,
            aiohttp.ClientSession(api.url) as http,
        ):
            await story(api, http)

    asyncio.run(played())


async def send(
    http: aiohttp.ClientSession, method: str, path: str, body: object = None, media_type: str = ""
) -> tuple[int, Any]:
    """Send a request; return the status and the decoded body of the answer."""
    data = io.BytesIO(body if isinstance(body, bytes) else orjson.dumps(body))
    headers = {"Content-Type": media_type or "application/json"}
    async with http.request(method, path, data=data, headers=headers) as response:
        return response.status, orjson.loads(await response.read())


async def events(
    http: aiohttp.ClientSession, path: str, **query: str
) -> AsyncIterator[dict[str, Any]]:
    """Yield the events of a watch until the server ends it."""
    async with http.get(path, params={"watch": "true", **query}) as response:
        assert response.status == 200
        async for line in response.content:
            yield orjson.loads(line)


def brief(event: dict[str, Any]) -> tuple[str, str]:
    return event["type"], event["object"]["metadata"].get("name", "")


def test_the_asynchronous_client_lists_patches_and_watches_raw_dicts(
    tmp_path: pathlib.Path,
) -> None:
    async def call(
        client: ApiClient, method: str, path: str, body: object = None, **parts: Any
    ) -> Any:
        request = await client.param_serialize(
            method=method,
            resource_path=path,
            query_params=parts.get("query", []),
            header_params={
                "Accept": "application/json",
                "Content-Type": parts.get("content", "application/json"),
            },
            body=body,
            auth_settings=["BearerToken"],
        )
        return await client.call_api(*request, _request_timeout=30)

    async def story(api: kubernetes.KubernetesApi, _: aiohttp.ClientSession) -> None:
        api.write_kubeconfig(tmp_path / "config")
        configuration = Configuration()
        await aio_config.load_kube_config(  # type: ignore[no-untyped-call]
            config_file=str(tmp_path / "config"), client_configuration=configuration
        )
        async with ApiClient(configuration) as client:
            await call(client, "POST", NODES, NODE)
            listed = orjson.loads(await (await call(client, "GET", NODES)).read())
            conditions = [{"type": "GpuHealthy", "status": "False", "reason": "XID79"}]
            for query in ([], [("dryRun", "All")]):
                patched = await call(
                    client,
                    "PATCH",
                    f"{NODES}/node-a/status",
                    {"status": {"conditions": conditions}},
                    content=STRATEGIC,
                    query=[("fieldManager", "muster"), *query],
                )
                shown = orjson.loads(await patched.read())
                assert shown["status"]["conditions"] == conditions
            assert shown["metadata"]["managedFields"][1]["manager"] == "muster"
            since = ("resourceVersion", listed["metadata"]["resourceVersion"])
            watched = await call(client, "GET", NODES, query=[("watch", "true"), since])
            events = orjson.loads(await watched.response.content.readline())
            assert brief(events) == ("MODIFIED", "node-a")
            watched.response.close()
            missing = await call(client, "GET", f"{NODES}/none")
            assert (missing.status, orjson.loads(await missing.read())["reason"]) == (
                404,
                "NotFound",
            )

    play(story)


def test_the_synchronous_client_lists_patches_and_watches_models(tmp_path: pathlib.Path) -> None:
    def use(path: pathlib.Path) -> None:
        configuration = sync_client.Configuration()
        sync_config.load_kube_config(  # type: ignore[no-untyped-call]
            config_file=str(path), client_configuration=configuration
        )
        with sync_client.ApiClient(configuration) as client:
            core: Any = sync_client.CoreV1Api(client)
            core.create_node(NODE)
            core.patch_node("node-a", {"metadata": {"labels": {"gpu": "h100"}}})
            (node,) = core.list_node(label_selector="gpu in (h100, h200)").items
            assert node.metadata.labels == {"zone": "a", "gpu": "h100"}
            with pytest.raises(sync_client.ApiException) as refused:
                core.create_node(NODE)
            assert orjson.loads(refused.value.body or "")["reason"] == "AlreadyExists"
            core.create_namespaced_pod("default", POD)
            (pod,) = core.list_pod_for_all_namespaces(field_selector="status.phase=Pending").items
            assert pod.metadata.name == "pod-a"
            watch: Any = sync_watch.Watch()  # type: ignore[no-untyped-call]
            for event in watch.stream(core.list_node):
                assert (event["type"], event["object"].metadata.name) == ("ADDED", "node-a")
                watch.stop()

    async def story(api: kubernetes.KubernetesApi, _: aiohttp.ClientSession) -> None:
        path = tmp_path / "config"
        api.write_kubeconfig(path)
        await asyncio.to_thread(use, path)

    play(story)


def test_a_watch_sends_bookmarks_and_ends_in_time() -> None:
    async def story(_: kubernetes.KubernetesApi, http: aiohttp.ClientSession) -> None:
        node = (await send(http, "POST", NODES, NODE))[1]
        watch = events(http, NODES, allowWatchBookmarks="true", timeoutSeconds="1")
        received = [event async for event in watch]
        assert brief(received[0]) == ("ADDED", "node-a")
        assert len(received) > 2
        bookmark = {
            "type": "BOOKMARK",
            "object": {
                "kind": "Node",
                "apiVersion": "v1",
                "metadata": {
                    "resourceVersion": node["metadata"]["resourceVersion"],
                    "creationTimestamp": None,
                },
            },
        }
        assert received[1:] == [bookmark] * (len(received) - 1)

    play(story)


def test_a_watch_begins_with_what_exists_and_goes_on_with_what_happens() -> None:
    async def story(_: kubernetes.KubernetesApi, http: aiohttp.ClientSession) -> None:
        await send(http, "POST", NODES, NODE)
        watch = events(http, NODES, labelSelector="zone")
        assert brief(await anext(watch)) == ("ADDED", "node-a")
        unlabel = {"metadata": {"labels": {"zone": None}}}
        await send(http, "PATCH", f"{NODES}/node-a", unlabel, MERGE)
        assert brief(await anext(watch)) == ("DELETED", "node-a")
        await watch.aclose()  # type: ignore[attr-defined]
        streaming = events(
            http,
            NODES,
            sendInitialEvents="true",
            allowWatchBookmarks="true",
            resourceVersionMatch="NotOlderThan",
        )
        assert brief(await anext(streaming)) == ("ADDED", "node-a")
        mark = await anext(streaming)
        assert mark["type"] == "BOOKMARK"
        assert mark["object"]["metadata"]["annotations"] == {"k8s.io/initial-events-end": "true"}
        await streaming.aclose()  # type: ignore[attr-defined]

    play(story)


def test_a_watch_from_a_forgotten_version_gets_410() -> None:
    async def story(api: kubernetes.KubernetesApi, http: aiohttp.ClientSession) -> None:
        _, node = await send(http, "POST", NODES, NODE)
        version = int(node["metadata"]["resourceVersion"])
        api.compact()
        for since in (version - 1, version + 1000, 1):
            (received,) = [event async for event in events(http, NODES, resourceVersion=str(since))]
            assert (received["type"], received["object"]["code"], received["object"]["reason"]) == (
                "ERROR",
                410,
                "Expired",
            )

    play(story)


def test_after_a_restart_every_version_is_later_than_all_before() -> None:
    async def version() -> int:
        async with (
            kubernetes.KubernetesApi() as api,
            aiohttp.ClientSession(api.url) as http,
        ):
            _, listed = await send(http, "GET", NODES)
            return int(listed["metadata"]["resourceVersion"])

    async def story() -> None:
        assert await version() < await version()

    asyncio.run(story())


def test_an_apply_that_takes_a_field_needs_force() -> None:
    async def story(_: kubernetes.KubernetesApi, http: aiohttp.ClientSession) -> None:
        path = f"{NODES}/node-a"
        wanted = b"metadata:\n  labels: {zone: b}\n"
        await send(http, "POST", f"{NODES}?fieldManager=people", NODE)
        code, status = await send(http, "PATCH", f"{path}?fieldManager=muster", wanted, APPLY)
        assert (code, status["reason"]) == (409, "Conflict")
        assert status["details"]["causes"] == [
            {
                "reason": "FieldManagerConflict",
                "message": 'conflict with "people" using v1',
                "field": ".metadata.labels.zone",
            }
        ]
        forced = f"{path}?fieldManager=muster&force=true"
        code, shown = await send(http, "PATCH", forced, wanted, APPLY)
        assert (code, shown["metadata"]["labels"]) == (200, {"zone": "b"})
        code, shown = await send(http, "PATCH", forced, {}, APPLY)
        assert (code, "labels" in shown["metadata"]) == (200, False)

    play(story)


def test_collections_can_be_paged_and_deleted() -> None:
    async def story(_: kubernetes.KubernetesApi, http: aiohttp.ClientSession) -> None:
        for name in ("c-1", "c-2", "c-3"):
            body = {"metadata": {"name": name, "labels": {"app": "x"}}, "data": {"a": "b"}}
            await send(http, "POST", "/api/v1/namespaces/default/configmaps", body)
        page = (await send(http, "GET", "/api/v1/configmaps?limit=2"))[1]
        token = page["metadata"]["continue"]
        rest = (await send(http, "GET", f"/api/v1/configmaps?limit=2&continue={token}"))[1]
        names = [item["metadata"]["name"] for item in page["items"] + rest["items"]]
        assert names == ["c-1", "c-2", "c-3"]
        path = "/api/v1/namespaces/default/configmaps?labelSelector=app%3Dx"
        code, gone = await send(http, "DELETE", path)
        assert len(gone["items"]) == 3
        left = (await send(http, "GET", "/api/v1/configmaps"))[1]
        assert (code, left["items"]) == (200, [])

    play(story)


BAD_REQUESTS: list[tuple[str, str, bytes, str, int]] = [
    ("POST", NODES, b"{", "", 400),
    ("POST", NODES, b"", "", 400),
    ("POST", NODES, b"[]", "", 400),
    ("POST", NODES, b"\xff\xfe", "", 400),
    ("POST", NODES, b"[" * 3000, "", 400),
    ("POST", NODES, b'{"metadata": {"name": "A B"}}', "", 422),
    ("POST", NODES, b"k8s\x00", "application/vnd.kubernetes.protobuf", 415),
    ("POST", NODES, b" " * (server.BODY_BYTES_MAX + 1), "", 413),
    ("POST", NODES + "?dryRun=Some", b"{}", "", 400),
    ("POST", NODES + "?fieldManager=" + "x" * 200, b"{}", "", 400),
    ("POST", "/api/v1/pods", orjson.dumps(POD), "", 405),
    ("POST", "/api/v1/namespaces/none/pods", orjson.dumps(POD), "", 404),
    ("POST", NODES + "/node-a", b"{}", "", 405),
    ("PUT", NODES, b"{}", "", 405),
    ("PATCH", NODES, b"{}", MERGE, 405),
    ("DELETE", NODES + "/node-a/status", b"", "", 405),
    ("DELETE", NODES + "/none", b"", "", 404),
    ("DELETE", NODES + "/node-a", b"{", "", 400),
    ("OPTIONS", NODES, b"", "", 405),
    ("PUT", NODES + "/node-a", b'{"metadata": {"name": "b"}}', "", 400),
    ("PATCH", NODES + "/node-a", b"{}", "text/plain", 415),
    ("PATCH", NODES + "/node-a", b"[]", MERGE, 400),
    ("PATCH", NODES + "/node-a", b'{"metadata": 7}', MERGE, 400),
    ("PATCH", NODES + "/node-a", b'{"metadata": {"labels": {"a": {}}}}', MERGE, 422),
    ("PATCH", NODES + "/node-a", b'{"$patch": "burn"}', STRATEGIC, 400),
    ("PATCH", NODES + "/node-a", b'{"status": {"conditions": [7]}}', STRATEGIC, 400),
    ("PATCH", NODES + "/node-a", b"{}", "application/json-patch+json", 400),
    (
        "PATCH",
        NODES + "/node-a",
        b'[{"op":"add","path":"/a/b","value":1}]',
        "application/json-patch+json",
        422,
    ),
    (
        "PATCH",
        NODES + "/node-a",
        b'[{"op":"replace","path":"","value":1}]',
        "application/json-patch+json",
        400,
    ),
    ("PATCH", NODES + "/node-a", b"{}", APPLY, 422),
    ("PATCH", NODES + "/node-a?fieldManager=x", b"a: &b [*b]", APPLY, 400),
    ("GET", "/", b"", "", 404),
    ("GET", "/api/v1/nothing", b"", "", 404),
    ("GET", "/api/v1/nodes/%2e%2e%2f/x", b"", "", 404),
    ("GET", NODES + "?labelSelector=a%20b", b"", "", 400),
    ("GET", NODES + "?fieldSelector=spec.providerID%3Dx", b"", "", 400),
    ("GET", NODES + "?limit=-1", b"", "", 400),
    ("GET", NODES + "?continue=x", b"", "", 400),
    ("GET", NODES + "?watch=true&resourceVersion=x", b"", "", 400),
    ("GET", NODES + "?watch=true&timeoutSeconds=1e9", b"", "", 400),
]


def test_a_bad_request_is_answered_with_a_status_and_never_with_500() -> None:
    async def story(_: kubernetes.KubernetesApi, http: aiohttp.ClientSession) -> None:
        await send(http, "POST", NODES, NODE)
        for method, path, body, media_type, expected in BAD_REQUESTS:
            requests = f"{method} {path} {body[:40]!r}"
            code, status = await send(http, method, path, body, media_type)
            assert (requests, code) == (requests, expected)
            assert (status["kind"], status["status"], status["code"]) == (
                "Status",
                "Failure",
                expected,
            )
            assert status["message"]

        async with http.post(NODES, data=b"x", headers={"Content-Encoding": "gzip"}) as response:
            assert response.status == 400

    play(story)


@pytest.mark.parametrize(
    "body",
    [
        b"a: &x [1]\nb: *x",
        b"1: 2",
        b"a: !!binary aGk=",
        b"a: !!set {x}",
        b"a: !!python/name:os.system",
        b"a: [",
        b"a: 99999999999999999999999999",
        b'a: "\\ud800"',
        b"\xff",
        b"[" * 500,
        b"a: " + b"x" * 300_000,
    ],
)
def test_yaml_that_json_cannot_express_is_refused(body: bytes) -> None:
    with pytest.raises(refusals.RequestError) as refused:
        requests.decode_object(body, "application/yaml")
    assert refused.value.code == 400


def test_a_date_in_yaml_stays_a_string() -> None:
    body = b"at: 2026-11-01T10:00:00Z"
    assert requests.decode_object(body, "application/yaml") == {"at": "2026-11-01T10:00:00Z"}


POD_YAML = """
apiVersion: v1
kind: Pod
metadata: {name: pod-a, labels: {app: x}}
spec: {containers: [{name: c, image: i}]}
"""
NODE_YAML = """
apiVersion: v1
kind: Node
metadata: {name: node-a}
status: {conditions: [{type: Ready, status: "True"}]}
"""


def kubectl_in(directory: pathlib.Path) -> Callable[[str], Awaitable[str]]:
    """Return a function that runs kubectl with the kubeconfig `config` in a directory."""
    # kubectl keeps discovery documents under $HOME by port, and ports are used again
    environment = {"PATH": os.environ["PATH"], "HOME": str(directory)}

    async def kubectl(line: str) -> str:
        process = await asyncio.create_subprocess_exec(
            KUBECTL,
            f"--kubeconfig={directory}/config",
            *line.split(),
            env=environment,
            cwd=directory,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        output, errors = await process.communicate()
        assert (line, process.returncode, errors.decode()) == (line, 0, "")
        return output.decode()

    return kubectl


@needs_kubectl
def test_kubectl_applies_the_example_which_gets_a_node_or_says_why_not(
    tmp_path: pathlib.Path,
) -> None:
    kubectl = kubectl_in(tmp_path)
    node = {**NODE, "status": {"allocatable": {"nvidia.com/gpu": "1"}}}

    async def story(api: kubernetes.KubernetesApi, http: aiohttp.ClientSession) -> None:
        api.write_kubeconfig(tmp_path / "config")
        assert await kubectl(f"apply -f {EXAMPLE}") == "pod/training created\n"
        shown = await kubectl("describe pod training")
        assert "no nodes available to schedule pods" in shown
        await send(http, "POST", NODES, node)
        await send(http, "PATCH", f"{NODES}/node-a/status", node, MERGE)
        assert await kubectl(f"apply -f {EXAMPLE}") == "pod/training unchanged\n"
        table = await kubectl("get pods -o wide")
        assert [line.split()[:4] for line in table.splitlines()] == [
            ["NAME", "READY", "STATUS", "RESTARTS"],
            ["training", "0/1", "Pending", "0"],
        ]
        assert table.split()[-1] == "node-a"
        assert "NotReady" in await kubectl("get node node-a")
        events = await kubectl("get events")
        assert "Successfully assigned default/training to node-a" in events

    play(story)


@needs_kubectl
def test_kubectl_works_with_it(tmp_path: pathlib.Path) -> None:
    (tmp_path / "pod.yaml").write_text(POD_YAML)
    (tmp_path / "node.yaml").write_text(NODE_YAML)
    kubectl = kubectl_in(tmp_path)

    async def story(api: kubernetes.KubernetesApi, _: aiohttp.ClientSession) -> None:
        api.write_kubeconfig(tmp_path / "config")
        assert await kubectl("create -f node.yaml") == "node/node-a created\n"
        assert await kubectl("label node node-a gpu=h100") == "node/node-a labeled\n"
        shown = await kubectl("get nodes --show-labels --no-headers")
        assert (shown.split()[0], shown.split()[-1]) == ("node-a", "gpu=h100")
        assert "node-a" in await kubectl("describe node node-a")
        assert await kubectl("get leases -A --ignore-not-found") == ""
        assert await kubectl("create -f pod.yaml") == "pod/pod-a created\n"
        applied = await kubectl("apply --server-side --force-conflicts -f pod.yaml")
        assert applied == "pod/pod-a serverside-applied\n"
        assert await kubectl("get pods -A -l app=x -o name") == "pod/pod-a\n"
        assert (await kubectl("delete pod pod-a")).startswith('pod "pod-a" deleted')

    play(story)


@needs_kubectl
def test_kubectl_applies_a_list(tmp_path: pathlib.Path) -> None:
    pods = [
        {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": name},
            "spec": {"containers": [{"name": "main", "image": "busybox"}]},
        }
        for name in ("one", "two")
    ]
    listed = {"apiVersion": "v1", "kind": "List", "items": pods}
    (tmp_path / "list.json").write_bytes(orjson.dumps(listed))
    kubectl = kubectl_in(tmp_path)

    async def story(api: kubernetes.KubernetesApi, _: aiohttp.ClientSession) -> None:
        api.write_kubeconfig(tmp_path / "config")
        assert await kubectl("apply -f list.json") == "pod/one created\npod/two created\n"
        again = await kubectl("apply --server-side --force-conflicts -f list.json")
        assert again == "pod/one serverside-applied\npod/two serverside-applied\n"

    play(story)


def start(*arguments: str) -> "subprocess.Popen[bytes]":
    command = [sys.executable, "-m", "muster.local.kubernetes", *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_process_prints_its_address_and_ends_cleanly_during_a_watch(
    tmp_path: pathlib.Path, number: signal.Signals
) -> None:
    async def watch(url: str, process: "subprocess.Popen[bytes]") -> list[str]:
        async with aiohttp.ClientSession(url) as http:
            received = events(http, "/api/v1/namespaces", fieldSelector="metadata.name=default")
            kinds = [brief(await anext(received))[0]]
            process.send_signal(number)
            return kinds + [brief(event)[0] async for event in received]

    with start("--kubeconfig", str(tmp_path / "config")) as process:
        assert process.stdout is not None
        line = orjson.loads(process.stdout.readline())
        assert (line["event"], line["service"]) == ("listening", "kubernetes")
        config = orjson.loads((tmp_path / "config").read_bytes())
        assert config["clusters"][0]["cluster"]["server"] == line["http"]
        assert asyncio.run(watch(line["http"], process)) == ["ADDED"]
        rest, errors = process.communicate(timeout=30)
    assert (process.returncode, rest, errors) == (0, b"", b"")


def test_a_usage_error_is_one_line() -> None:
    mistakes = {
        ("--http", "127.0.0.1:99999"): "'127.0.0.1:99999' is not host:port",
        ("--http", "192.0.2.1:0"): "cannot listen on 192.0.2.1:0: ",
        ("--kubeconfig", "/nowhere/f"): "cannot write the kubeconfig /nowhere/f: No such file",
    }
    processes = {arguments: start(*arguments) for arguments in mistakes}
    for arguments, process in processes.items():
        with process:
            output, errors = process.communicate(timeout=30)
        assert (process.returncode, output) == (2, b"")
        assert mistakes[arguments] in errors.decode()
        assert errors.count(b"\n") == 1


def test_an_address_is_a_host_and_a_port() -> None:
    assert httpd.address("[::1]:80") == httpd.Address("::1", 80)
    assert str(httpd.address("[::1]:80")) == "[::1]:80"
