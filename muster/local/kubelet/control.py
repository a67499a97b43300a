"""Adapter: HTTP: look at a kubelet stand-in, and do to it what happens to kubelets."""

import msgspec
from aiohttp import web
from google.protobuf import json_format

from muster.local.kubelet import device_manager, rules, server

_BODY_BYTES_MAX = 64 * 1024


class PodRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The body of POST /pods."""

    name: str
    namespace: str = "default"
    resources: dict[str, int]


def application(stand_in: server.Kubelet) -> web.Application:
    """Serve the control surface of one kubelet; GET / lists it."""
    surface = _Surface(stand_in)
    routes = {
        ("GET", "/state"): surface.state,
        ("POST", "/drop-stream"): surface.drop_stream,
        ("POST", "/restart"): surface.restart,
        ("POST", "/registration"): surface.registration,
        ("POST", "/pods"): surface.add_pod,
        ("DELETE", "/pods/{namespace}/{name}"): surface.delete_pod,
    }

    async def index(_request: web.Request) -> web.Response:
        return web.Response(text="".join(f"{method} {path}\n" for method, path in routes))

    served = web.Application(client_max_size=_BODY_BYTES_MAX)
    served.router.add_get("/", index)
    for (method, path), handler in routes.items():
        served.router.add_route(method, path, handler)
    return served


class _Surface:
    def __init__(self, stand_in: server.Kubelet) -> None:
        self._kubelet = stand_in

    async def state(self, _request: web.Request) -> web.Response:
        return _answer(200, self._kubelet.state())

    async def drop_stream(self, request: web.Request) -> web.Response:
        resource = request.query.get("resource", "")
        if not resource:
            return _answer(400, {"error": "which? /drop-stream?resource=vendor.example/name"})
        if not await self._kubelet.drop_stream(resource):
            return _answer(404, {"error": f"no plugin is connected for {resource}"})
        return _answer(200, {"dropped": resource})

    async def restart(self, _request: web.Request) -> web.Response:
        await self._kubelet.restart()
        return _answer(200, {"restarts": self._kubelet.state().restarts})

    async def registration(self, request: web.Request) -> web.Response:
        accept = request.query.get("accept")
        if accept not in {"true", "false"}:
            return _answer(400, {"error": f"accept={accept}: either true or false"})
        self._kubelet.accept_registrations(accept == "true")
        return _answer(200, {"accept": accept == "true"})

    async def add_pod(self, request: web.Request) -> web.Response:
        try:
            pod = msgspec.json.decode(await request.read(), type=PodRequest)
        except msgspec.MsgspecError as error:
            return _answer(400, {"error": str(error)})
        try:
            allocated = await self._kubelet.allocate(
                name=pod.name, namespace=pod.namespace, resources=pod.resources
            )
        except device_manager.AllocationError as refused:
            text = rules.admission_error(str(refused))
            return _answer(409, {"reason": "UnexpectedAdmissionError", "error": text})
        containers = [
            {
                "container": part.container,
                "resource": part.resource,
                "ids": part.ids,
                "answer": json_format.MessageToDict(part.answer, preserving_proto_field_name=True),
            }
            for part in allocated
        ]
        return _answer(201, {"allocated": containers})

    async def delete_pod(self, request: web.Request) -> web.Response:
        namespace, name = request.match_info["namespace"], request.match_info["name"]
        if not self._kubelet.release(namespace=namespace, name=name):
            return _answer(404, {"error": f"no pod {namespace}/{name} here"})
        return _answer(200, {"released": f"{namespace}/{name}"})


def _answer(status: int, body: object) -> web.Response:
    return web.Response(
        status=status, body=msgspec.json.encode(body), content_type="application/json"
    )
