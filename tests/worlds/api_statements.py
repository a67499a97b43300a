"""Statements about a Kubernetes API, each checked with the stand-in and with a real server.

A statement is an async function that gets an `Api`; `@statement` turns it into a test. Each
statement works on objects of its own, which are removed afterwards.
"""

import asyncio
import contextlib
import json
import os
import secrets
import tempfile
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any, Final, Self

import pytest
import yaml

from muster.kubernetes import api as kubernetes_api
from muster.local import kubernetes

STAND_IN_CANNOT: Final = {
    "test_an_unknown_field_is_refused_on_request": "it has no schema",
    "test_who_creates_a_map_or_a_list_owns_it_too": "it has no schema",
    "test_quantities_are_kept_in_canonical_form": "it has no schema",
    "test_a_lease_lasts_more_than_no_time": "it has no schema",
    "test_a_token_is_issued_and_says_whose_it_is": "it has no accounts",
}
"""Statements that do not hold for the stand-in, and why; if one does hold, its test fails."""

NODES: Final = "/api/v1/nodes"
DEFAULT: Final = "/api/v1/namespaces/default"
LEASES: Final = "/apis/coordination.k8s.io/v1/namespaces/default/leases"
STRATEGIC: Final = "application/strategic-merge-patch+json"
JSON_PATCH: Final = "application/json-patch+json"
BOUND_S: Final = 30.0

Object = dict[str, Any]
Said = tuple[int, Object]


class Api:
    """The API for one statement, used as an administrator."""

    def __init__(
        self, kind: str, kubeconfig: str, stand_in: kubernetes.KubernetesApi | None
    ) -> None:
        self.kind = kind
        self.name = f"statement-{secrets.token_hex(4)}"
        self._kubeconfig = kubeconfig
        self._stand_in = stand_in
        self._open = contextlib.AsyncExitStack()

    async def __aenter__(self) -> Self:
        self._api = await self._open.enter_async_context(await self._opened(self._kubeconfig))
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._open.aclose()

    async def ask(
        self,
        verb: str,
        path: str,
        body: object = None,
        content: str = kubernetes_api.JSON,
        **query: str,
    ) -> Said:
        """Send a request; return the status and the object, or the text, of the answer."""
        return await sent(self._api, verb, path, body, content, **query)

    async def good(
        self,
        verb: str,
        path: str,
        body: object = None,
        content: str = kubernetes_api.JSON,
        **query: str,
    ) -> Object:
        """Send a request that must succeed; return the object."""
        status, answer = await self.ask(verb, path, body, content, **query)
        assert status in {200, 201}, (status, answer)
        return answer

    async def refused(
        self,
        verb: str,
        path: str,
        body: object = None,
        content: str = kubernetes_api.JSON,
        **query: str,
    ) -> tuple[int, str, str]:
        """Send a request that must be refused; return status, reason and message.

        In the message, NAME replaces the name of the statement's objects.
        """
        status, answer = await self.ask(verb, path, body, content, **query)
        assert status >= 400, answer
        if answer.get("kind") == "Status":
            assert (answer["status"], answer["code"]) == ("Failure", status)
        message = answer["message"].replace(self.name, "NAME")
        return status, answer.get("reason", ""), message

    async def make(self, path: str, made: Mapping[str, Any], **query: str) -> Object:
        """Create an object that is removed when the statement ends."""
        created = await self.good("POST", path, made, **query)
        self.goes(f"{path}/{created['metadata']['name']}")
        return created

    async def node(
        self, *, manager: str = "kubelet", status: Object | None = None, **labels: str
    ) -> str:
        """Create a node; return its path."""
        metadata = {"name": self.name, "labels": labels}
        made: Object = {"metadata": metadata} | ({"status": status} if status else {})
        await self.make(NODES, made, fieldManager=manager)
        return f"{NODES}/{self.name}"

    async def config_map(self, manager: str = "editor", **data: str) -> str:
        """Create a ConfigMap, which no controller writes; return its path."""
        made = {"metadata": {"name": self.name}, "data": data}
        await self.make(f"{DEFAULT}/configmaps", made, fieldManager=manager)
        return f"{DEFAULT}/configmaps/{self.name}"

    def goes(self, path: str) -> None:
        """Remove an object when the statement ends."""
        # the default of a pod is 30 s
        options = {"gracePeriodSeconds": 0}
        self._open.push_async_callback(self.ask, "DELETE", path, options)

    async def apply(
        self,
        path: str,
        wanted: Mapping[str, Any],
        manager: str = "applier",
        *,
        force: bool = False,
    ) -> Said:
        """Apply a node or a ConfigMap (server-side apply); return the status and the answer."""
        kind = "Node" if path.startswith(NODES) else "ConfigMap"
        metadata = {"name": self.name, **wanted.get("metadata", {})}
        body = {"apiVersion": "v1", "kind": kind, **wanted, "metadata": metadata}
        query = {"fieldManager": manager, "force": str(force).lower()}
        return await self.ask("PATCH", path, body, kubernetes_api.APPLY, **query)

    async def patch(
        self, path: str, patch: object, manager: str = "editor", content: str = STRATEGIC
    ) -> Object:
        """Patch an object as a field manager; by default with a strategic merge patch."""
        return await self.good("PATCH", path, patch, content, fieldManager=manager)

    async def watch(self, path: str, *, seconds: int = 3, **query: str) -> list[Object]:
        """Return the events of a watch that the server ends after `seconds`."""
        asked = {"watch": "true", "timeoutSeconds": str(seconds), **query}
        events = self._api.watch(path, asked, idle_s=BOUND_S)
        return [json.loads(line) async for line in events if line]

    async def viewer(self) -> kubernetes_api.Api:
        """Return the API for a user who may read ConfigMaps, but no nodes and no pods."""
        file = Path(await self._open.enter_async_context(_folder())) / "viewer"
        if self._stand_in is not None:
            self._stand_in.write_kubeconfig(file, token=self.name)
            for plural in ("nodes", "pods"):
                self._stand_in.users.deny(self.name, "*", plural)
        else:
            file.write_text(json.dumps(await self._account()))
        return await self._open.enter_async_context(await self._opened(str(file)))

    async def token(self, **spec: object) -> Object:
        """Request a token for a new ServiceAccount; return the status of the TokenRequest."""
        await self.make(f"{DEFAULT}/serviceaccounts", {"metadata": {"name": self.name}})
        body = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": spec}
        answer = await self.good("POST", f"{DEFAULT}/serviceaccounts/{self.name}/token", body)
        status: Object = answer["status"]
        return status

    def kubeconfig(self, token: str) -> Object:
        """Return a kubeconfig with this token."""
        config: Object = yaml.safe_load(Path(self._kubeconfig).read_text())
        config["users"] = [{"name": "user", "user": {"token": token}}]
        for context in config["contexts"]:
            context["context"]["user"] = "user"
        return config

    async def of(self, token: str) -> kubernetes_api.Api:
        """Return the API for a user with this token."""
        file = Path(await self._open.enter_async_context(_folder())) / "kubeconfig"
        file.write_text(json.dumps(self.kubeconfig(token)))
        return await self._open.enter_async_context(await self._opened(str(file)))

    async def _account(self) -> Object:
        token = (await self.token())["token"]
        group = "/apis/rbac.authorization.k8s.io/v1/namespaces/default"
        rules = [{"apiGroups": [""], "resources": ["configmaps"], "verbs": ["get", "list"]}]
        await self.make(f"{group}/roles", {"metadata": {"name": self.name}, "rules": rules})
        role = {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": self.name}
        subject = {"kind": "ServiceAccount", "name": self.name, "namespace": "default"}
        binding = {"metadata": {"name": self.name}, "roleRef": role, "subjects": [subject]}
        await self.make(f"{group}/rolebindings", binding)
        return self.kubeconfig(str(token))

    async def _opened(self, kubeconfig: str) -> kubernetes_api.Api:
        return await kubernetes_api.find(kubeconfig=kubeconfig, context=None, attempts=1)


def owners(shown: Object) -> dict[str, Object]:
    """Return the owned fields by manager, operation and subresource."""
    return {
        " ".join(
            filter(None, (entry["manager"], entry["operation"], entry.get("subresource")))
        ): entry["fieldsV1"]
        for entry in shown["metadata"].get("managedFields", [])
    }


def condition(kind: str, status: str = "True", **more: str) -> Object:
    """Return a condition of a node."""
    at = "2026-11-22T10:00:00Z"
    times = {"lastHeartbeatTime": at, "lastTransitionTime": at}
    return {"type": kind, "status": status, "reason": "x", "message": "x", **times, **more}


def types(shown: Object) -> list[str]:
    """Return the types of a node's conditions."""
    return [entry["type"] for entry in shown.get("status", {}).get("conditions", [])]


async def sent(
    api: kubernetes_api.Api,
    verb: str,
    path: str,
    body: object = None,
    content: str = kubernetes_api.JSON,
    **query: str,
) -> Said:
    """Send a request; return the status and the object, or the text, of the answer."""
    answer = await api.request(verb, path, body=body, content=content, query=query, timeout_s=10)
    try:
        return answer.status, json.loads(answer.body)
    except ValueError:
        return answer.status, {"message": answer.body.decode().strip()}


async def until(what: str, read: Callable[[], Awaitable[Any]]) -> Any:
    """Call `read` until its result is true; return the result."""
    try:
        async with asyncio.timeout(BOUND_S):
            while not (value := await read()):
                await asyncio.sleep(0.05)
    except TimeoutError:
        raise AssertionError(f"{what}: not within {BOUND_S:g} s") from None
    return value


Statement = Callable[[Api], Awaitable[None]]


def statement(story: Statement) -> Any:
    """Return a test of a statement."""

    def test(kind: str, request: pytest.FixtureRequest) -> None:
        if kind == "stand-in" and story.__name__ in STAND_IN_CANNOT:
            reason = STAND_IN_CANNOT[story.__name__]
            request.applymarker(
                pytest.mark.xfail(strict=True, raises=AssertionError, reason=reason)
            )
        asyncio.run(_play(kind, story, request))

    test.__name__ = story.__name__
    test.__doc__ = story.__doc__
    real = pytest.param("real", marks=[pytest.mark.cluster])
    return pytest.mark.parametrize("kind", ["stand-in", real])(test)


async def _play(kind: str, story: Statement, request: pytest.FixtureRequest) -> None:
    async with contextlib.AsyncExitStack() as open_:
        stand_in = None
        if kind == "stand-in":
            stand_in = await open_.enter_async_context(
                kubernetes.KubernetesApi(bookmark_period_s=60.0)
            )
            file = Path(await open_.enter_async_context(_folder())) / "kubeconfig"
            stand_in.write_kubeconfig(file)
            kubeconfig = str(file)
        else:
            if "cluster" not in str(request.config.getoption("-m")):
                pytest.skip("only with -m cluster")
            kubeconfig = os.environ.get("KUBECONFIG", "")
            if not kubeconfig:
                pytest.skip("no real cluster: KUBECONFIG names none (make cluster starts one)")
        async with Api(kind, kubeconfig, stand_in) as api:
            await story(api)


@contextlib.asynccontextmanager
async def _folder() -> Any:
    with tempfile.TemporaryDirectory(prefix="mu-") as name:
        yield name
