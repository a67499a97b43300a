"""Adapter for a cluster: accesses muster's pods, Secrets and logs with the rights of the user.

Pods are reached by a port-forward through the API server; the credentials for NATS are read from a
Secret that the user may read. An error names the missing permission: verb, resource and namespace.
"""

import contextlib
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Final, TypeVar

import msgspec

from muster.kubernetes import api as kubernetes_api
from muster.kubernetes import installation, port_forward
from muster.kubernetes.installation import Login, Pod, Role, Unreachable
from muster.nats.auth import cluster_secrets

_REQUEST_S: Final = 10.0
_ATTEMPTS: Final = 3
_LOG_IS_GONE: Final = "unable to retrieve container logs for "
"""The start of the kubelet's answer, with status 200, if the runtime has removed the container."""
_ABSENT: Final = 404
_OWN: Final = {
    Role.READER: "muster auth reader --name NAME --out FILE",
    Role.ADMIN: "admin.creds, which muster auth init made",
}
"""How to get a credentials file, by role."""
_ME: Final = "/apis/authentication.k8s.io/v1/selfsubjectreviews"
_RIGHTS: Final = "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews"

Shape = TypeVar("Shape")


class _UserInfo(msgspec.Struct, frozen=True):
    username: str = ""


class _SelfStatus(msgspec.Struct, frozen=True):
    user: _UserInfo = msgspec.field(name="userInfo", default=_UserInfo())


class _SelfReview(msgspec.Struct, frozen=True):
    status: _SelfStatus = _SelfStatus()


class _AccessStatus(msgspec.Struct, frozen=True):
    allowed: bool = False


class _AccessReview(msgspec.Struct, frozen=True):
    status: _AccessStatus = _AccessStatus()


@contextlib.asynccontextmanager
async def opened(*, context: str, namespace: str) -> AsyncIterator["Cluster"]:
    """Connect to a cluster of the kubeconfig, as kubectl would. Raises Unreachable."""
    kubeconfig = os.environ.get("KUBECONFIG") or str(Path.home() / ".kube/config")
    try:
        api = await kubernetes_api.find(
            kubeconfig=kubeconfig, context=context, attempts=_ATTEMPTS, timeout_s=_REQUEST_S
        )
    except kubernetes_api.NoCluster as error:
        raise Unreachable(str(error)) from None
    async with api:
        yield Cluster(api, namespace=namespace)


class Cluster:
    """Accesses muster's objects in one namespace, with the rights of the kubeconfig's user."""

    def __init__(self, api: kubernetes_api.Api, *, namespace: str) -> None:
        self.api = api
        self.namespace = namespace
        self.server = api.server
        self._pods: list[Pod] | None = None

    async def user(self) -> str:
        """Return the user's name according to the API; `an unknown user` if it gives none."""
        kind = {"apiVersion": "authentication.k8s.io/v1", "kind": "SelfSubjectReview"}
        answer = await self.api.request("POST", _ME, body=kind, timeout_s=_REQUEST_S)
        with contextlib.suppress(*kubernetes_api.UNREADABLE):
            if answer.is_ok:
                review = msgspec.json.decode(answer.body, type=_SelfReview)
                return review.status.user.username or "an unknown user"
        return "an unknown user"

    async def rights(self, context: str) -> str:
        """Return a string that names the context, its server, the namespace and the user."""
        where = f"context {context} ({self.server}), namespace {self.namespace}"
        return f"{where}; as {await self.user()}"

    async def pods(self) -> list[Pod]:
        """Return all of muster's pods, which are listed only once. Raises Unreachable."""
        if self._pods is None:
            path = f"/api/v1/namespaces/{self.namespace}/pods"
            query = {"labelSelector": installation.PART_OF}
            try:
                self._pods = [
                    _decoded(bytes(item), Pod, path)
                    async for page in self.api.pages(path, query=query, timeout_s=_REQUEST_S)
                    for item in page.items
                ]
            except kubernetes_api.Refused as error:
                raise _unreachable(
                    error.answer, f"list pods in the namespace {self.namespace}"
                ) from None
        return self._pods

    async def ready(self, part: str) -> list[Pod]:
        """Return the ready pods of a part, at least one. Raises Unreachable."""
        pods = await self.pods()
        chosen = installation.ready(pods, part)
        if not chosen:
            raise Unreachable(installation.absent(pods, part, self.namespace))
        return chosen

    @contextlib.asynccontextmanager
    async def forwarded(self, pod: Pod, port: int) -> AsyncIterator[str]:
        """Forward a local port to a pod's port; yield `host:port`. Raises Unreachable."""
        forward = port_forward.Forward(self.api, namespace=self.namespace, pod=pod.name, port=port)
        try:
            await forward.check()
        except kubernetes_api.Refused as error:
            if error.answer.is_forbidden:
                raise Unreachable(await self._missing_permission()) from None
            raise _unreachable(error.answer, "") from None
        except kubernetes_api.LOST as error:
            text = str(error) or "no answer in time"
            raise Unreachable(f"port-forward to {pod.name}: {text}") from None
        async with forward.opened() as place:
            yield place

    async def credentials(
        self, login: Login, place: str, *, own: str | None = None
    ) -> dict[str, str]:
        """Return the environment variables with which a client logs on.

        Raises Unreachable. `own` is a credentials file of the user; it replaces credentials in the
        cluster, but not a password.
        """
        variables: dict[str, str] = {}
        secret = ""
        if login.is_password or own is None:
            secret = await self._secret(login)
        try:
            variables["NATS_URL"] = login.address(place, secret)
        except ValueError as error:
            raise Unreachable(str(error)) from None
        if not login.is_password:
            variables["NATS_CREDS"] = own or secret
        if login.authority:
            variables["NATS_CA"] = await self._authority(login.authority)
            variables["NATS_SERVER_NAME"] = login.server
        return variables

    async def settings(self, part: str, key: str) -> str:
        """Return the content of a part's settings file in its ConfigMap. Raises Unreachable."""
        name = installation.settings_map(await self.pods(), part, self.namespace)
        return await self._config_map(name, key)

    async def secret(self, name: str) -> dict[str, bytes]:
        """Return the content of a Secret; empty if it does not exist. Raises Unreachable."""
        path = self._secret_path(name)
        answer = await self.api.request("GET", path, timeout_s=_REQUEST_S)
        if answer.status == _ABSENT:
            return {}
        if not answer.is_ok:
            raise _unreachable(answer, f"get the Secret {name} in the namespace {self.namespace}")
        return _decoded(answer.body, installation.Secret, path).data or {}

    async def apply_secret(self, name: str, manifest: object, *, manager: str, force: bool) -> None:
        """Apply a part of a Secret.

        Raises Unreachable, for example if another manager owns a field.
        """
        answer = await self.api.request(
            "PATCH",
            self._secret_path(name),
            query={"fieldManager": manager, "force": "true" if force else "false"},
            body=manifest,
            content=kubernetes_api.APPLY,
            timeout_s=_REQUEST_S,
        )
        if not answer.is_ok:
            what = f"create and patch the Secret {name} in the namespace {self.namespace}"
            raise _unreachable(answer, what)

    def _secret_path(self, name: str) -> str:
        return f"/api/v1/namespaces/{self.namespace}/secrets/{name}"

    async def _secret(self, login: Login) -> str:
        name = login.secret.name
        path = self._secret_path(name)
        answer = await self.api.request("GET", path, timeout_s=_REQUEST_S)
        if answer.status == _ABSENT and not login.is_password:
            raise Unreachable(
                f"NATS needs credentials, and the namespace {self.namespace} has no Secret {name}: "
                f"set NATS_CREDS to a file of your own ({_OWN[login.role]})"
            )
        if not answer.is_ok:
            raise _unreachable(answer, f"get the Secret {name} in the namespace {self.namespace}")
        data, key = _decoded(answer.body, installation.Secret, path).data or {}, login.secret.key
        content = data.get(key, b"").decode("utf-8", "replace")
        problem = cluster_secrets.damage(key, content) if content.strip() else "missing or empty"
        if problem:
            raise Unreachable(
                f"Secret {name}: {key} is damaged: {problem}; correct it, or make it again as "
                "docs/security.md says"
            )
        return content

    async def config_map(self, name: str) -> dict[str, str]:
        """Return the content of a ConfigMap. Raises Unreachable."""
        path = f"/api/v1/namespaces/{self.namespace}/configmaps/{name}"
        answer = await self.api.request("GET", path, timeout_s=_REQUEST_S)
        if not answer.is_ok:
            raise _unreachable(
                answer, f"get the ConfigMap {name} in the namespace {self.namespace}"
            )
        return _decoded(answer.body, installation.ConfigMap, path).data or {}

    async def log(
        self, pod: Pod, container: str, *, is_previous: bool, lines: int, bytes_max: int
    ) -> str:
        """Return the last lines of the log of a container or, with `is_previous`, its predecessor.

        Raises Unreachable.
        """
        path = f"/api/v1/namespaces/{self.namespace}/pods/{pod.name}/log"
        query = {"container": container, "tailLines": str(lines), "limitBytes": str(bytes_max)}
        query |= {"previous": "true"} if is_previous else {}
        # limitBytes may cut a line, and a server may ignore it
        answer = await self.api.request(
            "GET", path, query=query, timeout_s=_REQUEST_S, body_bytes_max=2 * bytes_max
        )
        if not answer.is_ok:
            raise _unreachable(answer, f"get pods/log in the namespace {self.namespace}")
        text = answer.body.decode("utf-8", "replace")
        if text.startswith(_LOG_IS_GONE) and "\n" not in text.strip():
            raise Unreachable(text.strip())
        return text

    async def _authority(self, name: str) -> str:
        return (await self._config_map(name, "ca.crt")).strip()

    async def _config_map(self, name: str, key: str) -> str:
        text = (await self.config_map(name)).get(key)
        if not text:
            raise Unreachable(f"the ConfigMap {name} has no {key}")
        return text

    async def _missing_permission(self) -> str:
        """Return a text with the rights that the user lacks to forward a port."""
        missing = [verb for verb in ("get", "create") if not await self._may(verb)]
        verbs = " and ".join(missing or ("get", "create"))
        return (
            f"missing permission: {verbs} pods/portforward in the namespace {self.namespace} "
            "(docs/security.md has a Role)"
        )

    async def _may(self, verb: str) -> bool:
        """Return whether the user has this permission on pods/portforward; True if unknown."""
        attributes = {
            "verb": verb,
            "resource": "pods",
            "subresource": "portforward",
            "namespace": self.namespace,
        }
        review = {
            "apiVersion": "authorization.k8s.io/v1",
            "kind": "SelfSubjectAccessReview",
            "spec": {"resourceAttributes": attributes},
        }
        answer = await self.api.request("POST", _RIGHTS, body=review, timeout_s=_REQUEST_S)
        with contextlib.suppress(*kubernetes_api.UNREADABLE):
            if answer.is_ok:
                return msgspec.json.decode(answer.body, type=_AccessReview).status.allowed
        return True


def _decoded(body: bytes, shape: type[Shape], path: str) -> Shape:
    try:
        return msgspec.json.decode(body, type=shape)
    except kubernetes_api.UNREADABLE as error:
        raise Unreachable(f"the answer to get {path} is unreadable: {error}") from None


def _unreachable(answer: kubernetes_api.Answer, what: str) -> Unreachable:
    """Return an error with the reason for a failed request, or with the missing permission."""
    if answer.is_forbidden and what:
        return Unreachable(
            f"missing permission: {what} ({answer.problem}); docs/security.md has a Role"
        )
    return Unreachable(answer.problem)
