"""Adapter: the command line and the HTTP control API of `python -m muster.local.kubelet`."""

import argparse
import pathlib
import sys

import msgspec
from aiohttp import web
from google.protobuf import json_format

from muster.local import httpd
from muster.local.kubelet import device_manager, rules, server

PROGRAM = "muster.local.kubelet"
_BODY_BYTES_MAX = 64 * 1024


def main(arguments: list[str] | None = None) -> int:
    """Run one kubelet until SIGTERM or SIGINT; return the exit code."""
    return httpd.run(PROGRAM, _run(_parser().parse_args(arguments)))


async def _run(options: argparse.Namespace) -> None:
    stand_in = server.Kubelet(
        directory=options.dir,
        node=options.node,
        api=options.api,
        status_period_s=options.status_period,
        stop_grace_s=options.stop_grace,
        plugin_watcher=options.plugin_watcher,
        version=options.version,
        log=httpd.log,
    )
    stopped = httpd.stop_on_signals()
    async with (
        stand_in,
        httpd.listening(application(stand_in), options.http) as url,
    ):
        httpd.log(
            "listening", service="kubelet", node=options.node, http=url, socket=stand_in.socket
        )
        await stopped.wait()


def _parser() -> argparse.ArgumentParser:
    parser = httpd.Parser(prog=PROGRAM, description="A kubelet without containers, for one node.")
    parser.add_argument("--node", required=True, help="name of the node")
    parser.add_argument(
        "--dir", required=True, type=pathlib.Path, help="used instead of /var/lib/kubelet"
    )
    parser.add_argument(
        "--api", help="URL of a Kubernetes API; without it, pods are added by POST /pods"
    )
    parser.add_argument(
        "--http",
        type=httpd.address,
        default=httpd.LOCAL,
        metavar="HOST:PORT",
        help="address of the control API (%(default)s)",
    )
    parser.add_argument(
        "--status-period",
        type=_seconds,
        default=server.STATUS_PERIOD_S,
        metavar="S",
        help="seconds between node status updates (%(default)s)",
    )
    parser.add_argument(
        "--stop-grace",
        type=_seconds,
        default=device_manager.STOP_GRACE_S,
        metavar="S",
        help="seconds until a stopped plugin's devices are forgotten (%(default)s)",
    )
    parser.add_argument(
        "--plugin-watcher", action="store_true", help="also watch DIR/plugins_registry"
    )
    parser.add_argument(
        "--version",
        choices=rules.VERSIONS,
        default=rules.VERSIONS[-1],
        help="behave like this kubelet (%(default)s)",
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


class PodRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The body of POST /pods."""

    name: str
    namespace: str = "default"
    resources: dict[str, int]


def application(stand_in: server.Kubelet) -> web.Application:
    """Return the control API of one kubelet; GET / lists its endpoints."""
    control = _Control(stand_in)
    routes = {
        ("GET", "/state"): control.state,
        ("POST", "/drop-stream"): control.drop_stream,
        ("POST", "/restart"): control.restart,
        ("POST", "/registration"): control.registration,
        ("POST", "/pods"): control.add_pod,
        ("DELETE", "/pods/{namespace}/{name}"): control.delete_pod,
    }

    async def index(_request: web.Request) -> web.Response:
        return web.Response(text="".join(f"{method} {path}\n" for method, path in routes))

    served = web.Application(client_max_size=_BODY_BYTES_MAX)
    served.router.add_get("/", index)
    for (method, path), handler in routes.items():
        served.router.add_route(method, path, handler)
    return served


class _Control:
    def __init__(self, stand_in: server.Kubelet) -> None:
        self._kubelet = stand_in

    async def state(self, _request: web.Request) -> web.Response:
        return httpd.json_response(self._kubelet.state())

    async def drop_stream(self, request: web.Request) -> web.Response:
        resource = request.query.get("resource", "")
        if not resource:
            return httpd.json_response(
                {"error": "no resource: use /drop-stream?resource=vendor.example/name"}, status=400
            )
        if not await self._kubelet.drop_stream(resource):
            return httpd.json_response(
                {"error": f"no plugin is connected for {resource}"}, status=404
            )
        return httpd.json_response({"dropped": resource})

    async def restart(self, _request: web.Request) -> web.Response:
        await self._kubelet.restart()
        return httpd.json_response({"restarts": self._kubelet.state().restarts})

    async def registration(self, request: web.Request) -> web.Response:
        accept = request.query.get("accept")
        if accept not in {"true", "false"}:
            return httpd.json_response(
                {"error": f"accept={accept}: expected true or false"}, status=400
            )
        self._kubelet.accept_registrations(accept == "true")
        return httpd.json_response({"accept": accept == "true"})

    async def add_pod(self, request: web.Request) -> web.Response:
        try:
            pod = msgspec.json.decode(await request.read(), type=PodRequest)
        except msgspec.MsgspecError as error:
            return httpd.json_response({"error": str(error)}, status=400)
        try:
            allocated = await self._kubelet.allocate(
                name=pod.name, namespace=pod.namespace, resources=pod.resources
            )
        except device_manager.AllocationError as refused:
            text = rules.admission_error(str(refused))
            return httpd.json_response(
                {"reason": "UnexpectedAdmissionError", "error": text}, status=409
            )
        containers = [
            {
                "container": part.container,
                "resource": part.resource,
                "ids": part.ids,
                "answer": json_format.MessageToDict(part.answer, preserving_proto_field_name=True),
            }
            for part in allocated
        ]
        return httpd.json_response({"allocated": containers}, status=201)

    async def delete_pod(self, request: web.Request) -> web.Response:
        namespace, name = request.match_info["namespace"], request.match_info["name"]
        if not self._kubelet.release(namespace=namespace, name=name):
            return httpd.json_response({"error": f"no pod {namespace}/{name} here"}, status=404)
        return httpd.json_response({"released": f"{namespace}/{name}"})


if __name__ == "__main__":
    sys.exit(main())
