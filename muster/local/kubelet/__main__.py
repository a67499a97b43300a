"""Adapter: the command line and the HTTP control surface of `python -m muster.local.kubelet`."""

import argparse
import asyncio
import pathlib
import sys

import msgspec
import orjson
from aiohttp import web
from google.protobuf import json_format

from muster.local import httpd
from muster.local.kubelet import device_manager, rules, server

PROGRAM = "muster.local.kubelet"
_BODY_BYTES_MAX = 64 * 1024


def main(arguments: list[str] | None = None) -> int:
    """Run one kubelet until SIGTERM or SIGINT."""
    options = _parser().parse_args(arguments)
    try:
        asyncio.run(_run(options))
    except httpd.MistakeError as mistake:
        return httpd.complain(PROGRAM, mistake)
    return 0


async def _run(options: argparse.Namespace) -> None:
    stand_in = server.Kubelet(
        directory=options.dir,
        node=options.node,
        api=options.api,
        status_period_s=options.status_period,
        stop_grace_s=options.stop_grace,
        plugin_watcher=options.plugin_watcher,
        log=_log,
    )
    stopped = httpd.stop_on_signals()
    async with (
        stand_in,
        httpd.listening(application(stand_in), options.http) as url,
    ):
        _log("listening", service="kubelet", node=options.node, http=url, socket=stand_in.socket)
        await stopped.wait()


def _parser() -> argparse.ArgumentParser:
    parser = httpd.Parser(prog=PROGRAM, description="A kubelet without containers, for one node.")
    parser.add_argument("--node", required=True, help="name of the node")
    parser.add_argument(
        "--dir", required=True, type=pathlib.Path, help="stands for /var/lib/kubelet"
    )
    parser.add_argument("--api", help="URL of a Kubernetes API; without it, pods come over HTTP")
    parser.add_argument(
        "--http", type=httpd.address, default=httpd.LOCAL, metavar="HOST:PORT", help="control"
    )
    parser.add_argument(
        "--status-period",
        type=_seconds,
        default=server.STATUS_PERIOD_S,
        metavar="S",
        help="between node status updates (%(default)s)",
    )
    parser.add_argument(
        "--stop-grace",
        type=_seconds,
        default=device_manager.STOP_GRACE_S,
        metavar="S",
        help="until a stopped plugin's devices are forgotten (%(default)s)",
    )
    parser.add_argument(
        "--plugin-watcher", action="store_true", help="also watch DIR/plugins_registry"
    )
    return parser


def _seconds(written: str) -> float:
    try:
        seconds = float(written)
    except ValueError:
        seconds = 0.0
    if not 0.0 < seconds < float("inf"):
        raise argparse.ArgumentTypeError(f"{written!r} is not a positive number of seconds")
    return seconds


def _log(event: str, **facts: object) -> None:
    line = orjson.dumps({"event": event, **facts}, default=str)
    sys.stdout.buffer.write(line + b"\n")
    sys.stdout.buffer.flush()


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


if __name__ == "__main__":
    sys.exit(main())
