"""Adapter for HTTPS: answers the API server's admission requests for new pods.

No pod is refused: a pod that cannot be read, or about which no decision is possible, is allowed
unchanged, with a warning. The size of bodies, the time for an answer, and the number of concurrent
requests are limited.
"""

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator
from typing import Final

import prometheus_client
from aiohttp import web

from muster.service import logs, metrics
from muster_fuse.admission import config, event_reporter, namespaces, pod_patch, review

PATH: Final = "/pods"
EXCLUDED: Final = frozenset({"kube-system", "kube-public", "kube-node-lease"})
"""The namespaces, besides muster's own, whose pods the API server never sends.

A request about a pod in one of them is not from the API server, and must not cause an Event.
"""
_BODY_BYTES_MAX: Final = 4 * 1024 * 1024
"""The largest request body; the API server accepts objects of at most 3 MiB."""
_AT_ONCE_MAX: Final = 16
_DEADLINE_S: Final = 4.0
"""The time limit for an answer; the API server waits for 5 s (timeoutSeconds)."""
_CONNECTIONS_MAX: Final = 64
"""The maximum number of connections; beyond it, a new one closes the oldest."""
_HANDSHAKE_S: Final = 5.0
_IDLE_S: Final = 30.0
_SHUTDOWN_S: Final = 2.0

PODS: Final = metrics.counter(
    "muster_fuse_webhook_pods_total",
    "Admission requests for new pods.",
    "outcome",
    (*pod_patch.Outcome, "unreadable", "unanswerable", "late"),
)
DECIDING: Final = prometheus_client.Histogram(
    "muster_fuse_webhook_answer_seconds",
    "Time to answer one admission request.",
    buckets=(0.0005, 0.001, 0.002, 0.005, 0.01, 0.05, 0.2, 1, 4),
)


class Webhook:
    """Answers admission requests for pods; `own` is muster's namespace."""

    def __init__(
        self,
        cached: namespaces.Namespaces,
        reporter: event_reporter.EventReporter,
        *,
        own: str,
    ) -> None:
        self._namespaces = cached
        self._reporter = reporter
        self._excluded = EXCLUDED | {own}
        self._slots = asyncio.Semaphore(_AT_ONCE_MAX)

    async def answer(self, request: web.Request) -> web.Response:
        """Answer an admission request: 4xx if it is malformed, 503 if the answer takes too long."""
        try:
            with DECIDING.time():
                async with asyncio.timeout(_DEADLINE_S), self._slots:
                    admission = review.request_in(await request.read())
                    plan = await self._plan(admission)
        except review.Unanswerable as error:
            PODS.labels("unanswerable").inc()
            return web.Response(status=400, text=f"{error}\n")
        except TimeoutError:
            PODS.labels("late").inc()
            return web.Response(status=503, text=f"no answer within {_DEADLINE_S:g} s\n")
        body = review.answer(admission.uid, plan)
        return web.Response(body=body, content_type="application/json")

    async def _plan(self, admission: review.Request) -> pod_patch.Plan:
        if not admission.is_new_pod or admission.namespace in self._excluded:
            return pod_patch.Plan(pod_patch.Outcome.UNASKED)
        try:
            plan = await self._decide(admission)
        except review.Unreadable as error:
            PODS.labels("unreadable").inc()
            return pod_patch.Plan(pod_patch.Outcome.CONFLICT, warnings=(str(error),))
        except namespaces.Unavailable as error:
            text = f"the pod stays unchanged, because its namespace could not be read: {error}"
            plan = pod_patch.Plan(pod_patch.Outcome.CONFLICT, warnings=(text,))
        except Exception as error:  # noqa: BLE001  # an error here must not block pods
            logs.logger().error(
                "admission_decision_failed", namespace=admission.namespace, exc_info=error
            )
            text = "the pod stays unchanged, because the webhook failed; see the webhook's log"
            plan = pod_patch.Plan(pod_patch.Outcome.CONFLICT, warnings=(text,))
        PODS.labels(plan.outcome.value).inc()
        if plan.outcome is pod_patch.Outcome.CONFLICT and not admission.dry_run:
            metadata = review.metadata_in(admission)
            self._reporter.report(admission.namespace, metadata, "; ".join(plan.warnings))
        return plan

    async def _decide(self, admission: review.Request) -> pod_patch.Plan:
        pod = review.pod_in(admission)
        if not pod_patch.may_be_replaced(pod):
            return pod_patch.plan(pod)
        # decoded, a pod may take thirty times the memory: only one at a time, so none while waiting
        del pod
        replace = await self._namespaces.replace(admission.namespace)
        return pod_patch.plan(review.pod_in(admission), replace=replace)


@contextlib.asynccontextmanager
async def serve(listen: config.Listen, webhook: Webhook, tls: ssl.SSLContext) -> AsyncIterator[str]:
    """Serve until the block ends; yield the address. Raises OSError."""
    application = web.Application(client_max_size=_BODY_BYTES_MAX)
    application.router.add_post(PATH, webhook.answer)
    runner = web.AppRunner(
        application, access_log=None, keepalive_timeout=_IDLE_S, shutdown_timeout=_SHUTDOWN_S
    )
    await runner.setup()
    handlers = runner.server
    assert handlers is not None, "the runner is set up"

    def connected() -> asyncio.BaseProtocol:
        if len(handlers.connections) >= _CONNECTIONS_MAX:
            # idle clients must not block the API server, which reconnects after a disconnect
            open_ = (each for each in handlers.connections if each.transport is not None)
            if (oldest := next(open_, None)) is not None:
                oldest.force_close()
        return handlers()

    try:
        listening = await asyncio.get_running_loop().create_server(
            connected,
            listen.host,
            listen.port,
            ssl=tls,
            ssl_handshake_timeout=_HANDSHAKE_S,
            ssl_shutdown_timeout=_SHUTDOWN_S,
        )
        async with listening:
            host, port = listening.sockets[0].getsockname()[:2]
            yield f"https://{host}:{port}"
    finally:
        await runner.cleanup()
