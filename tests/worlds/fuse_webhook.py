"""The webhook of the FUSE broker as processes, with the stand-in for the Kubernetes API."""

import asyncio
import base64
import contextlib
import io
import pathlib
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, Final

import aiohttp
import orjson
from cryptography import x509

from muster.local import kubernetes, processes

NAME: Final = "muster-fuse-webhook"
HOST: Final = f"{NAME}.default.svc"
SECRET: Final = f"/api/v1/namespaces/default/secrets/{NAME}"
CONFIGURATION: Final = f"/apis/admissionregistration.k8s.io/v1/mutatingwebhookconfigurations/{NAME}"
Tree = dict[str, Any]


class World:
    """A simulated cluster, and replicas of the webhook in it."""

    def __init__(self, directory: pathlib.Path) -> None:
        self.directory = directory
        self.api = kubernetes.KubernetesApi(namespaces=["apps"])
        self.replicas: list[processes.Process] = []

    async def install(self) -> None:
        """Create the Secret and the webhook configuration, as the manifests do."""
        kind = {"apiVersion": "admissionregistration.k8s.io/v1"}
        service = {"service": {"name": NAME, "namespace": "default", "path": "/pods"}}
        webhooks = [{"name": f"{n}.fuse.muster.dev", "clientConfig": service} for n in "ab"]
        metadata = {"metadata": {"name": NAME, "labels": {"a": "b"}}}
        await self.call("POST", SECRET.rpartition("/")[0], {"type": "Opaque", **metadata})
        await self.call(
            "POST", CONFIGURATION.rpartition("/")[0], {**kind, **metadata, "webhooks": webhooks}
        )

    async def start(self, **settings: object) -> processes.Process:
        """Start a replica."""
        number = len(self.replicas)
        file = self.directory / f"webhook-{number}.json"
        kubeconfig = self.directory / "kubeconfig"
        where = {"kubeconfig": str(kubeconfig), "namespace": "default", "timeout_s": 1}
        # soon read what another replica has written first
        chosen = {"kubernetes": where, "certificates": {"check_s": 0.2}, **settings}
        file.write_bytes(orjson.dumps(chosen))
        program = processes.Program("webhook", "muster_fuse.admission", ("--config", str(file)))
        replica = processes.Process(program, self.directory / f"webhook-{number}.log")
        self.replicas.append(replica)
        await replica.start()
        return replica

    async def call(self, verb: str, path: str, body: object = None) -> Tree:
        """Send a request that must succeed to the stand-in; return the answer."""
        content = {"Content-Type": "application/merge-patch+json"} if verb == "PATCH" else {}
        async with (
            aiohttp.ClientSession(self.api.url) as http,
            http.request(verb, path, json=body, headers=content) as response,
        ):
            answer: Tree = await response.json()
            assert response.ok, answer
            return answer

    async def annotate(self, namespace: str, **annotations: str) -> None:
        named = {f"fuse.muster.dev/{name}": text for name, text in annotations.items()}
        body = {"metadata": {"annotations": named}}
        await self.call("PATCH", f"/api/v1/namespaces/{namespace}", body)

    async def bundles(self) -> list[str]:
        """Return the `caBundle` of each webhook of the configuration."""
        configuration = await self.call("GET", CONFIGURATION)
        return [w["clientConfig"].get("caBundle", "") for w in configuration["webhooks"]]

    async def tls(self) -> ssl.SSLContext:
        """Return the API server's TLS context: it trusts only the configuration's authorities."""
        pem = base64.b64decode((await self.bundles())[0]).decode()
        context = ssl.create_default_context(cadata=pem)
        assert context.check_hostname
        return context

    async def ask(self, replica: processes.Process, pod: object, **changes: object) -> Tree:
        """Send the review of a pod as the API server does; return the response, which allows it."""
        status, answer = await self.post(replica, review_of(pod, **changes))
        assert status == 200, answer
        response: Tree = orjson.loads(answer)["response"]
        assert (response.pop("uid"), response.pop("allowed")) == ("u-1", True)
        return response

    async def post(self, replica: processes.Process, body: bytes) -> tuple[int, bytes]:
        tls = await self.tls()
        async with (
            aiohttp.ClientSession() as http,
            http.post(
                f"{replica.addresses['https']}/pods",
                data=io.BytesIO(body),
                ssl=tls,
                server_hostname=HOST,
            ) as response,
        ):
            return response.status, await response.read()

    async def probe(self, replica: processes.Process, path: str) -> tuple[int, str]:
        async with (
            aiohttp.ClientSession() as http,
            http.get(replica.addresses["http"] + path) as response,
        ):
            return response.status, await response.text()

    async def ready(self, replica: processes.Process) -> None:
        async def is_ready() -> bool:
            return (await self.probe(replica, "/readyz"))[0] == 200

        await until(is_ready)

    async def served(self, address: str) -> int:
        """Return the serial number of the certificate that is served at an address.

        Raises SSLError if the API server would not trust it.
        """
        tls = await self.tls()
        host, _, port = address.removeprefix("https://").rpartition(":")
        _, writer = await asyncio.open_connection(host, int(port), ssl=tls, server_hostname=HOST)
        der = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
        writer.close()
        await writer.wait_closed()
        return x509.load_der_x509_certificate(der).serial_number

    async def events(self) -> list[Tree]:
        return list((await self.call("GET", "/api/v1/namespaces/apps/events"))["items"])


def review_of(pod: object, **changes: object) -> bytes:
    """Return the AdmissionReview that the API server sends for a new pod."""
    request = {
        "uid": "u-1",
        "kind": {"group": "", "version": "v1", "kind": "Pod"},
        "namespace": "apps",
        "operation": "CREATE",
        "object": pod,
        **changes,
    }
    return orjson.dumps({"apiVersion": "admission.k8s.io/v1", "request": request})


async def until(holds: Callable[[], Awaitable[bool]], *, within_s: float = 20.0) -> None:
    """Wait until `holds` returns true."""
    async with asyncio.timeout(within_s):
        while not await holds():
            await asyncio.sleep(0.05)


@contextlib.asynccontextmanager
async def world(directory: pathlib.Path) -> AsyncIterator[World]:
    made = World(directory)
    async with asyncio.timeout(100), made.api:
        made.api.write_kubeconfig(directory / "kubeconfig")
        try:
            yield made
        finally:
            for replica in made.replicas:
                await replica.end()


def play(story: Callable[[World], Awaitable[None]], directory: pathlib.Path) -> None:
    async def played() -> None:
        async with world(directory) as made:
            await story(made)

    asyncio.run(played())
