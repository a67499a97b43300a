"""Adapter for the process of the admission webhook: connects its parts and runs them."""

from muster.service import start  # isort: skip  # before everything else

import contextlib
import sys
from typing import Final

from muster.kubernetes import api
from muster.service import entry, logs, probes, runtime
from muster_fuse.admission import certificate_store, config, event_reporter, namespaces, server

start.end_imports()

_READ_S: Final = 2.0
"""The timeout for reading a namespace: short, because the API server waits meanwhile."""


def main() -> int:
    """Run the webhook; return its exit code."""
    return entry.main("fuse-webhook", config.Settings, _serve)


async def _serve(settings: config.Settings) -> None:
    logs.configure("fuse-webhook", level=settings.log.level)
    options = settings.kubernetes
    try:
        kubernetes = await api.find(kubeconfig=options.kubeconfig, context=options.context)
    except api.NoCluster as error:
        raise entry.CannotStart(str(error)) from None
    async with contextlib.AsyncExitStack() as open_:
        await open_.enter_async_context(kubernetes)
        store = certificate_store.CertificateStore(kubernetes, settings)
        reporter = event_reporter.EventReporter(kubernetes, timeout_s=options.timeout_s)
        cached = namespaces.Namespaces(kubernetes, timeout_s=_READ_S)
        webhook = server.Webhook(cached, reporter, own=options.namespace)
        try:
            https = await open_.enter_async_context(
                server.serve(settings.listen, webhook, store.tls)
            )
        except OSError as error:
            where = f"listen: {settings.listen.host}:{settings.listen.port}"
            raise entry.CannotStart(f"{where}: {error.strerror or error}") from None
        http = await open_.enter_async_context(
            probes.serve(settings.http.host, settings.http.port, ready=store.problem)
        )
        logs.logger().info("listening", http=http, https=https)
        await runtime.run(store.run(), reporter.run())


if __name__ == "__main__":
    sys.exit(main())
