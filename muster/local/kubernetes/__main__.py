"""Adapter: the command line of `python -m muster.local.kubernetes`."""

import argparse
import pathlib
import sys

from muster.local import httpd
from muster.local.kubernetes import server


async def _serve(options: argparse.Namespace) -> None:
    stopped = httpd.stop_on_signals()
    async with server.KubernetesApi(
        http=options.http,
        audit_log=options.audit_log_path,
        namespaces=options.namespace,
        schedules=options.schedule_pods,
    ) as api:
        if options.kubeconfig is not None:
            try:
                api.write_kubeconfig(options.kubeconfig)
            except OSError as error:
                raise httpd.UsageError(
                    f"cannot write the kubeconfig {options.kubeconfig}: {error.strerror}"
                ) from error
        httpd.log("listening", service="kubernetes", http=api.url)
        await stopped.wait()


def main(arguments: list[str] | None = None) -> int:
    """Serve until SIGTERM or SIGINT; return the exit code."""
    parser = httpd.Parser(prog="muster.local.kubernetes", description=server.__doc__)
    parser.add_argument("--http", type=httpd.address, default=httpd.LOCAL, metavar="HOST:PORT")
    parser.add_argument("--kubeconfig", type=pathlib.Path, metavar="FILE")
    parser.add_argument("--audit-log-path", type=pathlib.Path, metavar="FILE")
    parser.add_argument("--namespace", action="append", default=[], metavar="NAME")
    parser.add_argument("--schedule-pods", action="store_true", help="bind pods to nodes that fit")
    return httpd.run(parser.prog, _serve(parser.parse_args(arguments)))


if __name__ == "__main__":
    sys.exit(main())
