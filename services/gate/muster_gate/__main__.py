"""Adapter for NATS: answers nats-server's auth callout requests, and refreshes the cluster's keys.

The replicas are one queue group, so each request is answered once. If no replica is running,
existing connections stay, and nats-server refuses new ones; clients retry.
"""

from muster.service import start  # isort: skip  # before everything else

import asyncio
import contextlib
import sys
import time
from pathlib import Path
from typing import Final

import nats.aio.client
import prometheus_client

from muster.nats import connection
from muster.nats.auth import permissions
from muster.service import entry, logs, metrics, probes, runtime
from muster_gate import callout, cluster_keys, config, issuer, traffic_monitor
from muster_gate.tokens import Reason

start.end_imports()

_GROUP: Final = "muster-gate"
_REFETCH_S: Final = 5.0
"""The minimum time after any fetch before a token with an unknown key triggers another."""
_WAITING_FOR_KEYS_MAX: Final = 1_000
_LOG_INTERVAL_S: Final = 10.0
_REQUESTS_MAX: Final = 20_000
_LATE_S: Final = 1.5
"""Requests that have waited longer are dropped: a client waits only 2 s before it retries."""

ANSWERS: Final = metrics.counter(
    "muster_gate_answers_total",
    "Connections by outcome: admitted, or the reason for the denial.",
    "outcome",
    ("admitted", *Reason),
)
DECIDING: Final = prometheus_client.Histogram(
    "muster_gate_decision_seconds",
    "Time to decide about one connection.",
    buckets=(0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.05),
)
KEYS: Final = prometheus_client.Gauge(
    "muster_gate_keys", "Public keys of the cluster that are in use."
)
KEYS_FETCHED: Final = prometheus_client.Gauge(
    "muster_gate_keys_fetched_timestamp_seconds", "When the keys were last fetched."
)
SIGNING: Final = prometheus_client.Gauge(
    "muster_gate_signing_usable", "0 while gate.json is unusable and the previous one is used."
)
FETCHES: Final = metrics.counter(
    "muster_gate_key_fetches_total",
    "Fetches of the cluster's keys, by outcome.",
    "outcome",
    ("fetched", "failed"),
)


class Gate:
    """Answers auth callout requests, and keeps the required keys up to date."""

    def __init__(self, settings: config.Settings, authorizer: callout.Authorizer, api: str) -> None:
        self._settings = settings
        self._authorizer = authorizer
        self._api = api
        self._fetch_error = ""
        self._is_signing_unusable = False
        SIGNING.set(1)
        self._fetched_at = float("-inf")
        self._fetching = asyncio.Lock()
        self._waiting: set[asyncio.Task[None]] = set()
        self._client: nats.aio.client.Client | None = None
        self._log_intervals: dict[Reason, tuple[float, int]] = {}
        self._requests: asyncio.Queue[tuple[float, connection.Message]] = asyncio.Queue(
            _REQUESTS_MAX
        )

    def problem(self) -> str | None:
        """Return why no client can be admitted; None if clients can be admitted."""
        ring = self._authorizer.ring
        if ring is None or time.time() - ring.fetched_at > self._settings.keys.age_max_s:
            return f"no keys: {self._fetch_error or 'not fetched yet'}"
        return None

    async def subscribe(self, client: nats.aio.client.Client) -> None:
        """Subscribe on a new client; nats-py keeps the subscription when it reconnects."""
        if client is self._client:
            return
        await client.subscribe(
            permissions.CALLOUT, queue=_GROUP, cb=self.enqueue, pending_msgs_limit=_REQUESTS_MAX
        )
        self._client = client

    async def enqueue(self, request: connection.Message) -> None:
        """Queue a request; if too many are waiting, drop it."""
        try:
            self._requests.put_nowait((asyncio.get_running_loop().time(), request))
        except asyncio.QueueFull:
            ANSWERS.labels(Reason.LATE.value).inc()

    async def answer(self) -> None:
        """Answer requests until cancelled.

        A request whose token has an unknown key first waits for a fetch, if one is allowed now.
        """
        clock = asyncio.get_running_loop().time
        while True:
            since, request = await self._requests.get()
            if clock() - since > _LATE_S:
                ANSWERS.labels(Reason.LATE.value).inc()
                continue
            decision = self._decide(request.data)
            has_new_key = (
                isinstance(decision, callout.Denied) and decision.reason is Reason.UNKNOWN_KEY
            )
            if has_new_key and self._may_fetch() and len(self._waiting) < _WAITING_FOR_KEYS_MAX:
                task = asyncio.create_task(self._answer_later(request))
                self._waiting.add(task)
                task.add_done_callback(self._waiting.discard)
            else:
                await self._respond(request, decision)
            # yield, so that requests arrive and answers are sent
            await asyncio.sleep(0)

    async def refresh(self) -> None:
        """Periodically refresh the cluster's keys and the gate's signing keys, until cancelled."""
        while True:
            await self.fetch()
            await asyncio.sleep(self._settings.keys.refresh_s)
            self._read_signing()

    async def fetch(self) -> None:
        """Fetch the cluster's keys now; if that fails, keep the keys that are in use."""
        async with self._fetching:
            self._fetched_at = asyncio.get_running_loop().time()
            issuer = self._settings.tokens.issuer
            try:
                self._authorizer.ring = ring = await cluster_keys.fetch(
                    self._settings.keys, issuer=issuer, api=self._api, at=time.time()
                )
            except cluster_keys.KeysUnavailable as error:
                FETCHES.labels("failed").inc()
                if not self._fetch_error:
                    logs.logger().warning("token_keys_unavailable", error=str(error))
                self._fetch_error = str(error)
                return
        FETCHES.labels("fetched").inc()
        KEYS.set(sum(map(len, ring.keys.values())))
        KEYS_FETCHED.set(ring.fetched_at)
        if self._fetch_error:
            logs.logger().info("token_keys_available", keys=len(ring.keys))
        self._fetch_error = ""

    async def close(self) -> None:
        """Drop the requests that wait for keys."""
        waiting = list(self._waiting)
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)

    def _may_fetch(self) -> bool:
        interval_s = min(_REFETCH_S, self._settings.keys.refresh_s)
        is_due = asyncio.get_running_loop().time() - self._fetched_at >= interval_s
        return is_due or self._fetching.locked()

    async def _answer_later(self, request: connection.Message) -> None:
        if self._fetching.locked():
            async with self._fetching:
                pass
        else:
            await self.fetch()
        await self._respond(request, self._decide(request.data))

    def _decide(self, payload: bytes) -> callout.Admitted | callout.Denied:
        clock = asyncio.get_running_loop().time
        try:
            with DECIDING.time():
                return self._authorizer.decide(payload, at=time.time(), now=clock())
        except Exception as error:  # noqa: BLE001  # no request may end the process
            logs.logger().error("request_failed", kind=type(error).__name__)
            return callout.Denied(answer=b"", reason=Reason.UNREADABLE)

    async def _respond(
        self, request: connection.Message, decision: callout.Admitted | callout.Denied
    ) -> None:
        if isinstance(decision, callout.Admitted):
            ANSWERS.labels("admitted").inc()
            logs.logger().debug(
                "connection_admitted",
                node=decision.node,
                pod=decision.pod,
                lifetime_s=round(decision.lifetime_s),
            )
        else:
            ANSWERS.labels(decision.reason.value).inc()
            self._log_denial(decision)
        if decision.answer and request.reply:
            with contextlib.suppress(*connection.LOST):
                await request.respond(decision.answer)

    def _log_denial(self, denied: callout.Denied) -> None:
        """Log a denial; more denials for the same reason soon afterwards are only counted."""
        now = asyncio.get_running_loop().time()
        next_at, suppressed = self._log_intervals.get(denied.reason, (now, 0))
        if now < next_at:
            self._log_intervals[denied.reason] = (next_at, suppressed + 1)
            return
        self._log_intervals[denied.reason] = (now + _LOG_INTERVAL_S, 0)
        logs.logger().warning(
            "connection_denied",
            reason=denied.reason,
            connection=denied.name,
            host=denied.host,
            subject=denied.subject,
            suppressed_before=suppressed,
        )

    def _read_signing(self) -> None:
        try:
            self._authorizer.signing = read_signing(self._settings)
        except entry.CannotStart as error:
            if not self._is_signing_unusable:
                logs.logger().error("signing_key_unusable", error=str(error))
            self._is_signing_unusable = True
        else:
            if self._is_signing_unusable:
                logs.logger().info("signing_key_restored")
            self._is_signing_unusable = False
        SIGNING.set(not self._is_signing_unusable)


def read_signing(settings: config.Settings) -> callout.Signing:
    """Return the keys that sign answers. Raises CannotStart."""
    file = settings.password or settings.signing
    read = issuer.derive_signing if settings.password else callout.read_signing
    try:
        return read(Path(file).read_bytes())
    except OSError as error:
        raise entry.CannotStart(f"signing: {file}: {error.strerror or error}") from None
    except ValueError as error:
        raise entry.CannotStart(f"signing: {file}: {error}") from None


async def serve(settings: config.Settings) -> None:
    """Serve until SIGTERM. Raises CannotStart."""
    logs.configure("gate", level=settings.log.level)
    api = cluster_keys.api_address(settings.keys.api)
    if settings.keys.file is None and not api:
        raise entry.CannotStart("keys: not running in a cluster; set keys.file or keys.api")
    authorizer = callout.Authorizer(settings, read_signing(settings))
    authorizer.ring = cluster_keys.cached(settings.keys, issuer=settings.tokens.issuer)
    if authorizer.ring is not None:
        KEYS_FETCHED.set(authorizer.ring.fetched_at)
    gate = Gate(settings, authorizer, api)
    monitor = traffic_monitor.TrafficMonitor(authorizer.limiter, settings.rates)

    async def prepare(client: nats.aio.client.Client) -> None:
        await gate.subscribe(client)
        await monitor.subscribe(client)

    async with contextlib.AsyncExitStack() as stack:
        link = await stack.enter_async_context(
            connection.Connection(settings.bus.url, name="muster-gate", prepare=prepare)
        )
        stack.push_async_callback(gate.close)
        address = await stack.enter_async_context(
            probes.serve(
                settings.http.host,
                settings.http.port,
                ready=lambda: gate.problem() if link.is_connected else "not connected to NATS",
            )
        )

        async def work() -> None:
            # from here on SIGTERM is handled
            logs.logger().info("listening", http=address)
            await gate.refresh()

        await runtime.run(work(), gate.answer(), monitor.ask())


def main() -> int:
    """Run the gate; return the exit code."""
    return entry.main("gate", config.Settings, serve)


if __name__ == "__main__":
    sys.exit(main())
