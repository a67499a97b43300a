"""Adapter: the command line and the signals of `python -m muster.local.kubelet`."""

import argparse
import asyncio
import pathlib
import sys

import orjson

from muster.local import httpd
from muster.local.kubelet import control, device_manager, server

PROGRAM = "muster.local.kubelet"


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
        httpd.listening(control.application(stand_in), options.http) as url,
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


if __name__ == "__main__":
    sys.exit(main())
